"""Every limit of the store server, in one table.

A connection that goes over one of them is closed with a log line that names the limit; the others
notice nothing. The defaults are at least as generous as torch's server (keys of 8,192 bytes, values of
8 MiB, 131,072 keys in a request), which has no limit for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches

from rallypoint.errors import UsageError

_MIB = 1 << 20
_GIB = 1 << 30
_ENTRY_BYTES = 200
"""What a key with a short value takes in memory."""


@dataclass(frozen=True)
class Limits:
    """Counts, sizes in bytes, and times in seconds. All must be positive."""

    key_bytes: int = 8_192
    """Length of one key."""

    value_bytes: int = 8 * _MIB
    """Length of one value in a request. What APPENDs add up to is bounded by `stored_bytes` alone."""

    keys_per_request: int = 131_072
    """Keys in one CHECK, WAIT, MULTI_GET or MULTI_SET."""

    request_bytes: int = 4 * _GIB
    """Size of one whole request; bounds what a connection can make the server hold before it is complete."""

    connections: int = 1_000_000
    """Connections at a time. The system's limit of open files mostly comes first."""

    stores: int = 256
    """Stores with a name. For one more, one that nobody uses is dropped."""

    unsent_bytes: int = 1 * _GIB
    """Bytes waiting to be sent to a client that does not read them."""

    stored_bytes: int = 64 * _GIB
    """All keys and values together, queues included."""

    stored_entries: int = 100_000_000
    """Keys with a value and values in queues; bounds what short ones take beside their bytes."""

    handshake_seconds: float = 60.0
    """Time from the connect until a complete VALIDATE, from one piece of a request to the next, and from a
    client's end until it has its replies."""

    session_seconds: float = 60.0
    """How long a relay's session is kept without a connection, and how long its clients wait for one."""

    stall_seconds: float = 60.0
    """How long nobody may make progress while clients wait, before the log says who waits for what."""

    batch_bytes: int = 64 * _MIB
    """Size of one batch of a relay, and of one request behind a relay."""

    held_bytes: int = 4 * _GIB
    """What all clients together can make the server hold besides keys and values: replies that they do not
    read, requests that are not complete, waits, what they tell, and relays' sessions. Beyond it, the client
    that holds the most is closed. A server process uses a quarter of the memory that it may use, unless it is
    told otherwise."""

    relayed_bytes: int = 256 * _MIB
    """What a relay holds of its clients' requests until they are answered; it reads no more meanwhile."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise UsageError(f"limit {name} is {value!r}, but must be positive")

    def within(self, memory: int) -> Limits:
        """These limits for a process that may use this many bytes: half for values, a quarter for what is
        held for clients. The rest is for replies on their way and for fragmentation."""
        stored = min(self.stored_bytes, memory // 2)
        return replace(
            self,
            stored_bytes=stored,
            stored_entries=min(self.stored_entries, stored // _ENTRY_BYTES),
            held_bytes=memory // 4,
            relayed_bytes=min(self.relayed_bytes, memory // 4),
        )

    def override(self, settings: Iterable[str]) -> Limits:
        """These limits with `NAME=VALUE` settings applied; raises UsageError for one that is not right."""
        return replace(self, **dict(_parse(setting) for setting in settings))  # type: ignore[arg-type]


def _parse(setting: str) -> tuple[str, int | float]:
    name, _, text = setting.partition("=")
    name = name.strip()
    kinds = {field.name: type(getattr(Limits(), field.name)) for field in fields(Limits)}
    if name not in kinds:
        near = get_close_matches(name, kinds, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known limits: {', '.join(kinds)}"
        raise UsageError(f"there is no limit called {name!r}", hint=hint)
    try:
        return name, kinds[name](text.replace("_", ""))
    except ValueError:
        raise UsageError(
            f"limit {name} is {text!r}, which is no number", hint=f"write {name}=NUMBER"
        ) from None
