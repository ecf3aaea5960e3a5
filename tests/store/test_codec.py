"""The codec of all JSON: any dataclass comes back as it was, and nothing else than its own types gets in."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.codec import ReadBy, Within, at_most, from_json, from_text, to_json, to_text

pytestmark = pytest.mark.windows


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


class Pair(NamedTuple):
    name: str
    size: int


@dataclass(frozen=True)
class Inner:
    name: str
    start: int = field(default=0, metadata={"json": "from"})


TEXTS = st.text(st.characters(blacklist_categories=[]), max_size=5)  # surrogates as well: keys may have them
NUMBERS = st.integers(-(1 << 63), 1 << 63)
INNERS = st.builds(Inner, TEXTS, NUMBERS)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    int: NUMBERS,
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    Colour: st.sampled_from(Colour),
    Literal["rate", "time"]: st.sampled_from(["rate", "time"]),
    Pair: st.builds(Pair, TEXTS, NUMBERS),
    Inner: INNERS,
}
ONES = st.sampled_from(list(PLAIN))
KINDS = ONES | ONES.flatmap(
    lambda one: st.sampled_from([one | None, tuple[one, ...], tuple[one, one], list[one], dict[str, one]])  # type: ignore[valid-type]
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type of this test."""
    if kind in PLAIN:
        return PLAIN[kind]
    one = kind.__args__[-1] if kind.__args__[-1] is not Ellipsis else kind.__args__[0]
    if type(None) in kind.__args__:
        return st.none() | PLAIN[kind.__args__[0]]
    if Ellipsis in kind.__args__:
        return st.lists(PLAIN[one], max_size=3).map(tuple)
    if kind.__origin__ is tuple:
        return st.tuples(PLAIN[one], PLAIN[one])
    return st.lists(PLAIN[one], max_size=3) if kind.__origin__ is list else st.dictionaries(TEXTS, PLAIN[one])


@st.composite
def objects(draw: st.DrawFn) -> Any:
    """An object of some dataclass, each of whose fields has some type."""
    kinds = draw(st.lists(KINDS, min_size=1, max_size=4))
    made = make_dataclass("Made", [(f"field{at}", kind) for at, kind in enumerate(kinds)], frozen=True)
    return made(*(draw(values_of(kind)) for kind in kinds))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(objects())
def test_what_is_written_is_read_again(each: Any) -> None:
    text = to_text(each)
    assert text.isascii()
    assert from_text(type(each), text) == each
    assert from_json(type(each), {**to_json(each), "of a later version": [1]}) == each


@settings(deadline=None)
@given(each=objects(), other=JSON, data=st.data())
def test_what_is_of_another_type_is_refused_by_the_name_of_its_field(
    each: Any, other: Any, data: st.DataObject
) -> None:
    """Or it is of that type: then it is written as it was read."""
    name = data.draw(st.sampled_from([each.name for each in fields(each)]))
    content = {**to_json(each), name: other}
    reason = ""
    try:
        read = from_json(type(each), content)
        assert from_json(type(each), to_json(read)) == read
    except ValueError as error:
        reason = str(error)
    assert not reason or reason.startswith(f"{name}: ")
    del content[name]
    with pytest.raises(ValueError, match=f"^{name} is missing"):
        from_json(type(each), content)


@dataclass(frozen=True)
class Bounded:
    share: Annotated[float, Within(0, 1)] = 0.0
    count: Annotated[int, Within(1, 9)] = 1
    any_number: Annotated[float, ReadBy(float)] = 0.0
    text: Annotated[str, at_most(3)] = ""
    inner: Inner | None = None
    many: list[int] = field(default_factory=list)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("share", "1.5", "1.5 is no number that"),
        ("share", "-1", "-1.0 is no number that"),
        ("share", "true", "True is no number"),
        *(("share", number, "is no number that") for number in ("NaN", "Infinity", "1e999", "9" * 400)),
        ("count", "1.0", "1.0 is no whole number"),
        *(("count", number, "is no whole number that") for number in ("0", "10", "9" * 400, "true", '"1"')),
        ("many", f"[{1 << 64}]", "is no whole number that"),
        ("inner", '{"name": 7}', "name: 7 is no text"),
        ("inner", '{"name": "a", "from": "b"}', "from: 'b' is no whole number"),
        ("inner", "[]", r"\[\] is no object"),
    ],
)
def test_what_is_out_of_bounds_is_refused(name: str, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*{reason}"):
        from_text(Bounded, f'{{"{name}": {text}}}')


def test_what_is_not_refused_may_be_cut_or_read_in_another_way() -> None:
    assert from_json(
        Bounded, {"share": 1, "count": 9, "text": "long", "any_number": float("inf")}
    ) == Bounded(1.0, 9, float("inf"), "lon")
    assert from_json(Bounded, {}).many is not from_json(Bounded, {}).many


def test_what_is_at_its_default_may_be_left_out() -> None:
    assert to_json(Bounded(0.1234567, inner=Inner("a")), sparse=True) == {
        "share": 0.123457,
        "inner": {"name": "a"},
        "many": [],
    }


@pytest.mark.parametrize("text", ["", "{", b"\xff", "[]", "null", "1", '"{}"', "1" * 5_000, "[" * 100_000])
def test_what_is_no_object_is_a_value_error_and_nothing_else(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        from_text(Bounded, text)


def test_a_type_without_a_form_in_json_is_a_fault_of_the_program() -> None:
    with pytest.raises(TypeError, match="no form in JSON"):
        from_json(make_dataclass("Odd", [("raw", bytes)]), {"raw": ""})
