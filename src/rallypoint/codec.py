"""Dataclasses as JSON and back: the one codec for everything that goes into files and over the network. Pure.

Data is checked against the annotations of the class before it is believed, as it may come from anybody.
Fields that the class does not have are ignored: versions differ between machines. An annotation may say
more than a type: `Annotated[int, Within(0, 9)]`; with a function, as in `Annotated[str, at_most(80)]`, the
value is what that returns, and its ValueError refuses the value. A field whose name in JSON is another has
that in its metadata: `field(metadata={"json": "from"})`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import itemgetter
from reprlib import repr as short_repr
from sys import float_info
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_Read = Callable[[Any], Any]

_to_text: Final = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make one for each text
_LEAVES: Final = frozenset((str, int, bool, NoneType))
_LARGEST: Final = (1 << 64) - 1


@dataclass(frozen=True)
class Within:
    """Annotates a number with its bounds, which are included."""

    least: float
    most: float


@dataclass(frozen=True)
class ReadBy:
    """Annotates a field with the function that reads it, in place of the check of its type."""

    read: _Read


def at_most(length: int) -> Callable[[Any], Any]:
    """Annotates a text or a tuple: only its beginning is taken."""
    return itemgetter(slice(length))


# Writing


def to_json(value: object, *, sparse: bool = False) -> Any:
    """What `json` can write. `sparse` leaves out fields at their default, and rounds to microseconds."""
    kind: Any = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, float):
        return round(value, 6) if sparse else value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [to_json(each, sparse=sparse) for each in value]
    if isinstance(value, dict):
        return {name: to_json(each, sparse=sparse) for name, each in value.items()}
    content = {}
    for field, name in _names(kind):
        each = getattr(value, field.name)
        if not sparse or each != field.default:
            content[name] = each if type(each) in _LEAVES else to_json(each, sparse=sparse)
    return content


@cache
def _names(kind: Any) -> list[tuple[Field[Any], str]]:
    """The fields of a dataclass, each with its name in JSON."""
    return [(each, each.metadata.get("json", each.name)) for each in fields(kind)]


def to_text(value: object, *, sparse: bool = False) -> str:
    """The shortest JSON text, in ASCII."""
    return _to_text(to_json(value, sparse=sparse))


# Reading


def from_text(kind: type[_T], text: str | bytes) -> _T:
    """As `from_json`, of a JSON text."""
    try:
        return from_json(kind, json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def from_json(kind: type[_T], content: object) -> _T:
    """An object of a dataclass; ValueError, which names the field, if the content is none.

    The object is made without calling its class.
    """
    made: _T = _reader(cast(Any, kind))(content)
    return made


@cache
def _reader(kind: Any) -> _Read:
    """What reads a type; TypeError for a type that has no form in JSON."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _annotated_reader(*parts)
    if kind in (int, float):
        largest = _LARGEST if kind is int else float_info.max
        return _number_reader(kind, Within(-largest, largest))
    if kind in _NAMES:
        return lambda value: _checked(value, kind)
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        return _choice_reader(parts or kind)
    if origin in (Union, UnionType) and parts[1:] == (NoneType,):
        inner = _reader(parts[0])
        return lambda value: None if value is None else inner(value)
    if origin is list or parts[1:] == (Ellipsis,):
        inner = _reader(parts[0])
        return lambda value: origin(map(inner, _checked(value, list)))
    if origin is dict:
        key, inner = map(_reader, parts)
        return lambda value: {key(name): inner(each) for name, each in _checked(value, dict).items()}
    if is_dataclass(kind):
        return _object_reader(kind)
    if issubclass(origin or kind, tuple):  # also a NamedTuple, which is a list in JSON
        hints = parts or get_type_hints(kind, include_extras=True).values()
        return _tuple_reader(tuple if parts else kind._make, [_reader(each) for each in hints])
    raise TypeError(f"{kind} has no form in JSON")


def _annotated_reader(kind: Any, more: Any) -> _Read:
    if isinstance(more, Within):
        return _number_reader(kind, more)
    if isinstance(more, ReadBy):
        return more.read
    inner = _reader(kind)
    return lambda value: more(inner(value))


def _number_reader(kind: type, bounds: Within) -> _Read:
    least, most = bounds.least, bounds.most

    def read(value: Any) -> Any:
        if type(value) is not kind:
            if kind is int or type(value) is not int or abs(value) > _LARGEST:
                raise _refusal(value, kind)
            value = float(value)
        if not least <= value <= most:  # NaN is refused, too
            raise _refusal(value, kind)
        return value

    return read


def _choice_reader(choices: Any) -> _Read:
    known = {each.value if isinstance(each, Enum) else each: each for each in choices}

    def read(value: Any) -> Any:
        if not isinstance(value, str | int) or value not in known:
            raise ValueError(f"{short_repr(value)} is none of {list(known)}")
        return known[value]

    return read


def _tuple_reader(make: _Read, inner: list[_Read]) -> _Read:
    def read(value: Any) -> Any:
        if len(_checked(value, list)) != len(inner):
            raise ValueError(f"{short_repr(value)} is no list of {len(inner)}")
        return make(read(each) for read, each in zip(inner, value, strict=True))

    return read


def _object_reader(kind: Any) -> _Read:
    hints = get_type_hints(kind, include_extras=True)
    rows = [(name, field, _reader(hints[field.name])) for field, name in _names(kind)]

    def read(content: Any) -> Any:
        _checked(content, dict)
        made = object.__new__(kind)
        values = vars(made)  # to call the class would take a second more for a million lines
        for name, field, inner in rows:
            if name in content:
                try:
                    values[field.name] = inner(content[name])
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            elif field.default is not MISSING:
                values[field.name] = field.default
            elif field.default_factory is not MISSING:
                values[field.name] = field.default_factory()
            else:
                raise ValueError(f"{name} is missing")
        return made

    return read


_NAMES: Final = {
    str: "text",
    bool: "truth value",
    dict: "object",
    list: "list",
    int: "whole number that could be meant",
    float: "number that could be meant",
}


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _refusal(value, kind)
    return value


def _refusal(value: object, kind: type) -> ValueError:
    return ValueError(f"{short_repr(value)} is no {_NAMES[kind]}")
