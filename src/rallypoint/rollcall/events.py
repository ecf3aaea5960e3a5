"""What happens at a server or relay, one JSON object per line: what `--events` writes and `timeline` reads.

Every line has `time`, the unix time by the clock of whoever writes it, `event`, one of the kinds below, and
`pid`, the process that writes it: servers of one machine may share a file. Clients are named by the number of
their connection, as in a snapshot; who one is stands in `joined`, as soon as that is known, and again when
more is. Whoever reads knows neither the kinds nor the fields of later versions: it passes over them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

from rallypoint.rollcall.identity import Identity
from rallypoint.rollcall.plan import Plan
from rallypoint.rollcall.snapshot import KEYS_NAMED

MIN_WAIT: Final = 0.01
"""Seconds: shorter waits are not written."""
STILL_WAITING: Final = 1.0
"""Seconds: a wait that lasts longer is written when it has lasted so long, as it may never end."""

_MOST_CHARACTERS: Final = 2048
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make one for each line
_LATEST: Final = 1e11
"""Thousands of years from now: what is above is no unix time."""


@dataclass(frozen=True)
class Started:
    """A server or relay is up. All lines before it belong to an earlier run."""

    KIND: ClassVar = "start"
    time: float
    host: str
    pid: int
    version: str
    backend: str
    kind: str = "server"
    """Or `relay`."""


@dataclass(frozen=True)
class Connected:
    KIND: ClassVar = "connected"
    time: float
    client: int
    peer: str


@dataclass(frozen=True)
class Joined:
    """It is known who a client is. May come long after it connected, and more than once."""

    KIND: ClassVar = "joined"
    time: float
    client: int
    who: Identity


@dataclass(frozen=True)
class Left:
    KIND: ClassVar = "left"
    time: float
    client: int
    why: str = ""
    """As the log says; nothing if it closed its connection by itself."""


@dataclass(frozen=True)
class Waiting:
    """A client has been waiting for `STILL_WAITING` seconds, for keys or at a barrier, and still does."""

    KIND: ClassVar = "waiting"
    time: float
    client: int
    keys: tuple[str, ...]
    """The first few of them: `KEYS_NAMED`."""
    began: float
    """The unix time at which it began, the same in all lines of one wait."""
    seconds: float
    count: int = 1
    """How many keys it waits for."""


@dataclass(frozen=True)
class Waited:
    """A wait of at least `MIN_WAIT` seconds has ended."""

    KIND: ClassVar = "waited"
    time: float
    client: int
    keys: tuple[str, ...]
    """The first few of them: `KEYS_NAMED`."""
    began: float
    """The unix time at which it began, the same in all lines of one wait."""
    seconds: float
    count: int = 1
    """How many keys it waited for."""
    by: int = 0
    """The client whose write, or whose arrival at the barrier, has ended it; 0: not known."""
    gave_up: bool = False
    """It was cancelled, or the client left: what it waited for has not come."""


@dataclass(frozen=True)
class BarrierComplete:
    KIND: ClassVar = "barrier"
    time: float
    key: str
    size: int
    seconds: float
    """From the first arrival to the last."""
    last: int
    """The client that arrived last; 0: not known."""


@dataclass(frozen=True)
class RoundPlanned:
    """A launcher has said which machine has which ranks."""

    KIND: ClassVar = "round"
    time: float
    plan: Plan


@dataclass(frozen=True)
class Stalled:
    """Nobody has progressed for so long, while somebody waits."""

    KIND: ClassVar = "stall"
    time: float
    seconds: float
    text: str
    """The stall report, as the log has it."""


@dataclass(frozen=True)
class Erred:
    """A connection was closed or refused."""

    KIND: ClassVar = "error"
    time: float
    peer: str
    reason: str


@dataclass(frozen=True)
class Stopped:
    KIND: ClassVar = "stop"
    time: float


@dataclass(frozen=True)
class Lost:
    """So many events before this one are not in the file: they came too fast, or the disk refused them."""

    KIND: ClassVar = "lost"
    time: float
    count: int


Event: TypeAlias = (
    Started
    | Connected
    | Joined
    | Left
    | Waiting
    | Waited
    | BarrierComplete
    | RoundPlanned
    | Stalled
    | Erred
    | Stopped
    | Lost
)


def to_line(event: Event, pid: int) -> str:
    """An event as one line, without its end. Long texts are cut, and keys beyond the first few left out."""
    content: dict[str, Any] = {"time": round(event.time, 6), "event": event.KIND, "pid": pid}
    for name, write, default in _WRITERS[event.KIND]:
        value = getattr(event, name)
        if value != default:
            content[name] = write(value)
    return _encode(content)


def from_line(line: str | bytes) -> Event | None:
    """What a line says; None for a kind that this version does not know. ValueError for what is no event."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no event: {error}") from None
    return from_content(content)


def from_content(content: object) -> Event | None:
    """As `from_line`, for a line that `json` has read already."""
    if not isinstance(content, dict):
        raise ValueError("no event: not an object")
    try:
        time, kind = _read_seconds(content["time"]), _read_text(content["event"])
        if kind not in _KINDS:
            return None
        told = {
            name: read(content[name]) if name in content or default is MISSING else default
            for name, read, default in _READERS[kind]
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"no event: {error!r}") from None
    event = object.__new__(_KINDS[kind])
    vars(event).update(
        told, time=time
    )  # its own way, a call per field, takes a second per million lines more
    return event


# What a field may hold


def _write_text(value: str) -> str:
    return value[:_MOST_CHARACTERS]


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _write_texts(value: tuple[str, ...]) -> list[str]:
    return [each[:_MOST_CHARACTERS] for each in value[:KEYS_NAMED]]


def _read_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list of texts")
    return tuple(map(_read_text, value))


def _read_number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"{value!r} is no number that could be meant")
    return value


def _write_seconds(value: float) -> float:
    return round(value, 6)


def _read_seconds(value: object) -> float:
    if type(value) is not float:
        value = float(_read_number(value))
    if not 0.0 <= value < _LATEST:
        raise TypeError(f"{value!r} are no seconds that could be meant")
    return value


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _write_plan(plan: Plan) -> object:
    return json.loads(plan.to_json())


def _read_plan(value: object) -> Plan:
    plan = Plan.from_json(json.dumps(value))
    if plan is None:
        raise TypeError("no plan")
    return plan


class _Form(NamedTuple):
    """How a value goes into JSON, and how it comes out of it: with TypeError for what no event has."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_FORMS: Final = {
    "str": _Form(_write_text, _read_text),
    "int": _Form(int, _read_number),
    "float": _Form(_write_seconds, _read_seconds),
    "bool": _Form(bool, _read_flag),
    "tuple[str, ...]": _Form(_write_texts, _read_texts),
    "Identity": _Form(Identity.as_json, Identity.from_json),
    "Plan": _Form(_write_plan, _read_plan),
}
"""By the type that a field is declared with."""

_KINDS: Final[dict[str, type[Event]]] = {
    kind.KIND: kind
    for kind in (
        *(Started, Connected, Joined, Left, Waiting, Waited),
        *(BarrierComplete, RoundPlanned, Stalled, Erred, Stopped, Lost),
    )
}

_WRITERS: Final = {
    name: [(each.name, _FORMS[str(each.type)].write, each.default) for each in fields(kind)[1:]]
    for name, kind in _KINDS.items()
}
_READERS: Final = {
    name: [(each.name, _FORMS[str(each.type)].read, each.default) for each in fields(kind)[1:]]
    for name, kind in _KINDS.items()
}
"""Of each kind all fields but the time, which is the first of every one."""
