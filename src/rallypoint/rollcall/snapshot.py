"""What a server or a relay knows at one moment: what it is asked, and what it answers, as JSON.

Times are seconds before the snapshot was made (`seconds`), so that no clocks are compared; `time` alone is
the maker's clock. Keys are named as scripts name them, without the slash that clients put in front.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Final, TypeVar

from rallypoint.errors import ProtocolError
from rallypoint.rollcall.identity import NOBODY, Identity

KEYS_NAMED: Final = 8
"""As many keys of one wait are named; the rest is counted."""

PLAN: Final = "rallypoint/roll"
"""The key at which a launcher says which machine has which ranks; see `plan`."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Question:
    """What is wanted beside the clients, barriers and figures, which are always told."""

    keys: int = 0
    """At most so many keys are listed."""
    search: str = ""
    """Only keys that hold this text."""
    value: str | None = None
    """A key whose value is wanted, as far as `value_bytes` go."""
    value_bytes: int = 4096

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> Question:
        """Raises ProtocolError for what is no question."""
        try:
            content = json.loads(data or b"{}")
            question = Question(**content)
            numbers = all(type(each) is int and each >= 0 for each in (question.keys, question.value_bytes))
            if not numbers or not isinstance(question.search, str):
                raise TypeError("of the wrong kind")
            if question.value is not None and not isinstance(question.value, str):
                raise TypeError("of the wrong kind")
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"LOOK asks what cannot be understood: {error}") from None
        return question


@dataclass(frozen=True)
class Wait:
    """One wait of a client: for keys that are not there."""

    keys: tuple[str, ...]
    """The first few of them."""
    count: int
    seconds: float


@dataclass(frozen=True)
class Client:
    """One connection."""

    id: int
    """Counts connections, from 1; never used again."""
    peer: str
    """Its address, as `host:port`."""
    seconds: float
    """Since it connected."""
    who: Identity = NOBODY
    operations: int = 0
    received: int = 0
    sent: int = 0
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True)
class Barrier:
    """A barrier (the operation BARRIER) at which somebody waits."""

    key: str
    size: int
    arrived: int
    """Ranks, those behind relays included."""
    members: tuple[tuple[int, float], ...]
    """Clients and relays that wait there, by their ids, and for how many seconds."""


@dataclass(frozen=True)
class Gone:
    """A client that has left, and was known."""

    id: int
    who: Identity
    seconds: float
    """Since then."""
    why: str
    """As the log says; nothing if it closed its connection by itself."""


@dataclass(frozen=True)
class Key:
    """A key with a value, or a queue."""

    key: str
    size: int
    """In bytes, all values of a queue together; -1: there are too many of them to be added up."""
    queued: int = 0
    """Values in the queue; 0: it is no queue."""
    writer: int = 0
    """The id of the client or relay that wrote it last; 0: not known."""
    writer_is: str = ""
    """Who that was, also if it has gone: `rank 3`, `process 12 on node-a`, or its address."""


@dataclass(frozen=True)
class Value:
    """The beginning of a value."""

    key: str
    size: int
    data: str
    """Hexadecimal."""


@dataclass(frozen=True)
class Operation:
    """What has been asked of one kind, since the start."""

    name: str
    count: int
    per_second: float
    """In the last seconds."""
    p50: float = -1.0
    """Seconds from the loop's turn that found the request until its reply was sent; -1: none was timed."""
    p99: float = -1.0


@dataclass(frozen=True)
class Second:
    """One second of the past."""

    time: float
    """When it ended, by the maker's clock."""
    operations: int
    p99: float
    """As of `Operation`, of all kinds; -1: none was timed."""
    clients: int
    waiting: int
    """Clients that waited at its end."""


@dataclass(frozen=True)
class Mishap:
    """A connection that was closed or refused, and why."""

    time: float
    peer: str
    reason: str


@dataclass(frozen=True)
class Relay:
    """A relay of this server, or of this relay."""

    id: int
    peer: str
    seconds: float
    present: bool
    """False: it has lost its connection, and may come back."""
    part: Snapshot | None
    """What it said last of itself; None: nothing yet."""
    part_seconds: float = -1.0
    """Since it said so."""
    waits: tuple[Wait, ...] = ()
    """What it waits for, on behalf of its clients."""


@dataclass(frozen=True)
class Snapshot:
    """One server, or one relay, with all that are behind it."""

    kind: str
    """`server` or `relay`."""
    version: str
    host: str
    pid: int
    backend: str
    time: float
    seconds: float
    """Since it was started."""
    quiet_seconds: float
    """Since somebody has made progress: connected, set, appended, pushed, popped, or come to a barrier."""
    stalled_seconds: float = 0.0
    """Since nobody has made progress while somebody waited; 0: nobody waits, or somebody has."""
    clients: tuple[Client, ...] = ()
    relays: tuple[Relay, ...] = ()
    barriers: tuple[Barrier, ...] = ()
    gone: tuple[Gone, ...] = ()
    """The last to leave, the latest at the end."""
    key_count: int = 0
    queue_count: int = 0
    stored_bytes: int = 0
    keys: tuple[Key, ...] = ()
    keys_found: int = 0
    """How many keys there are that the question searches for; `keys` may be fewer."""
    value: Value | None = None
    group_writers: tuple[tuple[int, int], ...] = ()
    """Ranks that have written their key in torch's default group, with the client or relay that wrote it;
    that may have gone, or not be known (0)."""
    workers: int = 0
    """How many have counted themselves in, as torch's clients do that know the world size."""
    plan: str = ""
    """The value of the key `PLAN`."""
    rosters: tuple[tuple[str, str], ...] = ()
    """The jobs that meet here: their ids, and their rosters as JSON (see `launch/rendezvous/roster.py`)."""
    received: int = 0
    sent: int = 0
    accepted: int = 0
    """Connections since the start."""
    operations: tuple[Operation, ...] = ()
    history: tuple[Second, ...] = ()
    """The last minutes, the latest second at the end."""
    errors: tuple[Mishap, ...] = ()
    """The last ones, the latest at the end."""
    error_count: int = 0
    incomplete: str = ""
    """What could not be told, and why; nothing if all is there."""

    def to_json(self) -> str:
        return json.dumps(as_content(self), separators=(",", ":"))

    @staticmethod
    def from_json(data: bytes | str) -> Snapshot:
        """Raises ProtocolError for what is no snapshot: it came over the network."""
        try:
            return _snapshot(json.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ProtocolError(
                f"what the store tells of itself cannot be read: {error}",
                hint="do both sides run the same version of Rallypoint?",
            ) from None


# As JSON: what has its default value is left out.


def as_content(each: object) -> Any:
    """An object of this module as what `json` writes."""
    if isinstance(each, Identity):
        return each.as_json()
    if isinstance(each, tuple):
        return [as_content(item) for item in each]
    if isinstance(each, float):
        return round(each, 6)
    fields = getattr(each, "__dataclass_fields__", None)
    if fields is None:
        return each
    told = ((name, getattr(each, name), spec.default) for name, spec in fields.items())
    return {name: as_content(value) for name, value, default in told if value != default}


def _snapshot(content: Mapping[str, Any]) -> Snapshot:
    value = content.get("value")
    return _made(
        Snapshot,
        content,
        clients=_each(_client, content, "clients"),
        relays=_each(_relay, content, "relays"),
        barriers=_each(_barrier, content, "barriers"),
        gone=_each(lambda each: _made(Gone, each, who=Identity.from_json(each["who"])), content, "gone"),
        keys=_each(lambda each: _made(Key, each), content, "keys"),
        value=None if value is None else _made(Value, value),
        group_writers=_pairs(content.get("group_writers", ()), "int", "int"),
        rosters=_pairs(content.get("rosters", ()), "str", "str"),
        operations=_each(lambda each: _made(Operation, each), content, "operations"),
        history=_each(lambda each: _made(Second, each), content, "history"),
        errors=_each(lambda each: _made(Mishap, each), content, "errors"),
    )


def _client(content: Mapping[str, Any]) -> Client:
    return _made(Client, content, who=Identity.from_json(content.get("who", {})), waits=_waits(content))


def key_name(wire_key: bytes) -> str:
    """A key as scripts name it; bytes that are no UTF-8 become surrogates, as in Python's file names."""
    return wire_key.removeprefix(b"/").decode(errors="surrogateescape")


def _relay(content: Mapping[str, Any]) -> Relay:
    return _made(Relay, content, part=_part(content.get("part")), waits=_waits(content))


def _part(told: Any) -> Snapshot | None:
    """A part is a text within the text: what a relay tells is passed on unread, and cannot break the rest.

    One that cannot be read, as it may be of another version, is as good as none.
    """
    if not isinstance(told, str):
        return None if told is None else _snapshot(told)
    try:
        return Snapshot.from_json(told)
    except ProtocolError:
        return None


def _barrier(content: Mapping[str, Any]) -> Barrier:
    return _made(Barrier, content, members=_pairs(content["members"], "int", "float"))


def _waits(content: Mapping[str, Any]) -> tuple[Wait, ...]:
    return _each(lambda each: _made(Wait, each, keys=tuple(map(str, each["keys"]))), content, "waits")


def _pairs(content: Iterable[Any], first: str, second: str) -> tuple[tuple[Any, Any], ...]:
    return tuple((_of_kind(first, one), _of_kind(second, other)) for one, other in content)


def _of_kind(kind: str, value: Any) -> Any:
    if type(value) not in _KINDS[kind] or (type(value) is float and not isfinite(value)):
        raise TypeError(f"{str(value)[:80]} is no {kind}")
    if type(value) is int and not -_LARGEST < value < _LARGEST:
        raise TypeError("a number that nobody has counted")
    return value


def _each(make: Callable[[Mapping[str, Any]], _T], content: Mapping[str, Any], name: str) -> tuple[_T, ...]:
    return tuple(map(make, content.get(name, ())))


_LARGEST: Final = 1 << 64

_KINDS: Final = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


def _made(kind: type[_T], content: Mapping[str, Any], **made: Any) -> _T:
    """An object from JSON; what has been made already stands beside it. TypeError for a wrong kind."""
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    known = {name: value for name, value in content.items() if name in fields and name not in made}
    for name, value in known.items():
        if fields[name].type in _KINDS:
            _of_kind(fields[name].type, value)
    return kind(**known, **made)
