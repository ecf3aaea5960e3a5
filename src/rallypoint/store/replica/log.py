"""The log of a replicated store, as an engine keeps it: an interface, its errors and its data.

One process leads and appends. Others stand by: they read what it appends, and one of them takes over when it
has been silent for a while. Each leadership has a number, its *term*. Every write names the term, and the
engine refuses it if there is a newer one. So a leader that was paused can neither write nor answer any more.

All calls block for some seconds at most, and may be made from several threads, but each method from one
thread at a time. A call that raises `EngineAwayError` may or may not have been carried out. It may be made
again, by the same `Log` and with the same arguments: if it was carried out, nothing changes, and it returns
as the first would have. Passwords are in no error and in no text of this interface.

A term belongs to the `Log` that acquired it: another one cannot write with its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from rallypoint.errors import RallypointError

MOST_BYTES: Final = 1 << 20
"""How long a record may be. etcd takes no more than 1.5 MiB in one request, by default."""

_ERASE: Final = (
    "nobody knows what was lost, so end the job: `rallypoint erase --engine URL` removes what is left of it, "
    "and its store begins anew; docs/guides/survival.md says what each engine promises"
)


class EngineAwayError(RallypointError):
    """The engine did not answer in time, or said that it cannot write now."""


class EngineRefusedError(RallypointError):
    """The engine does not let this user in, or cannot do what is asked: to ask again is of no use."""


class FencedError(RallypointError):
    """There is a newer term, or the sequence number is taken: whoever asked does not lead any more."""


class TrimmedError(RallypointError):
    """The records that were asked for are gone: a snapshot has taken their place."""


class LostRecordsError(RallypointError):
    """The engine has lost what it had acknowledged, or somebody has removed it: nobody knows what it was."""

    def __init__(self, message: str, *, hint: str = _ERASE) -> None:
        super().__init__(message, hint=hint)


def marked_error(name: str, why: str) -> LostRecordsError:
    """What a log of this name raises that is marked as one that has lost records."""
    return LostRecordsError(f"{name}: it has lost records, and nobody goes on with what is left: {why}")


@dataclass(frozen=True)
class Leadership:
    """Who leads, as the engine knows it."""

    term: int = 0
    """0: nobody ever has."""
    beat: int = 0
    """Grows with each `renew`, and with all else that happens to the term."""
    address: str = ""
    """Where the leader serves; empty if it has released its term."""
    lost: str = ""
    """Why nobody may lead any more, as `mark_lost` has said; else empty."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after a record, and all before it."""

    sequence: int
    data: bytes


@dataclass(frozen=True)
class Extent:
    """How much an engine keeps of a log."""

    records: int = 0
    checkpoint: int = 0
    """The number of the record that the last checkpoint is of; 0: there is none."""
    checkpoint_bytes: int = 0


@dataclass(frozen=True)
class Follower:
    """A process that stands by."""

    name: str
    sequence: int
    """The last record that it has read."""


class Log(Protocol):
    """The log of one store. Sequence numbers count its records, from 1."""

    name: str
    """What and where it is, for messages: `etcd at a:2379, b:2379, job /x`."""

    def read_leadership(self) -> Leadership:
        """Who leads by now."""

    def acquire(self, seen: Leadership, address: str) -> int:
        """Lead from now on, at this address; return the new term. What it was before is fenced.

        FencedError if anything has changed since `seen`: then the leader is alive, or somebody was faster.
        """

    def renew(self, term: int) -> None:
        """Say that the leader is alive. FencedError if it leads no more.

        LostRecordsError, here and for all writes, if the engine knows an older term, but not this one.
        """

    def release(self, term: int) -> None:
        """Lead no more: whoever stands by need not wait. Nothing happens if it does not lead."""

    def append(self, term: int, sequence: int, data: bytes) -> None:
        """Append a record. When this returns, the engine keeps it, by its own rules.

        FencedError if there is a newer term or another record of this number; LostRecordsError if there is
        none before it.
        """

    def read(self, sequence: int) -> Sequence[bytes]:
        """The records from this one on, without a gap: some of them, or none if there is none yet.

        They are those that the engine keeps: nobody reads what may still be lost. TrimmedError if a
        checkpoint has taken the place of the first of them; LostRecordsError if the one before it, which the
        caller knows, is not there.
        """

    def checkpoint(self) -> Checkpoint | None:
        """The last checkpoint that was put, if there is one."""

    def put_checkpoint(self, term: int, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint, of any length, in place of the one before. Errors as for `append`: nobody could
        go on from one that is ahead of the log."""

    def trim(self, term: int, sequence: int) -> None:
        """Drop the records up to this one, which a checkpoint covers. The last of them may stay."""

    def announce(self, follower: Follower) -> None:
        """Say that a process stands by, about every second. It is forgotten some seconds after the last."""

    def followers(self) -> Sequence[Follower]:
        """Who stands by."""

    def measure(self) -> Extent:
        """How much there is; nothing of it is fetched."""

    def mark_lost(self, why: str) -> None:
        """Say that the engine has lost records: nobody is to go on with what is left.

        From then on, `acquire`, `read` and all writes of a term raise LostRecordsError with these words, in
        every process, until `erase`. The first to say it counts.
        """

    def erase(self) -> None:
        """Remove all that the engine keeps of this log. Whoever leads is fenced.

        FencedError if it was faster.
        """

    def close(self) -> None:
        """Let go of connections. A call under way in another thread raises EngineAwayError soon."""
