"""A log in memory, with the faults of engines, for simulations: no thread, no clock, nothing random.

Several `MemoryLog`s share one `Memory`, as several processes share an engine. A test brings about a fault by
`Memory.is_away` and `fail_next`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rallypoint.errors import UsageError
from rallypoint.store.replica.log import (
    MOST_BYTES,
    Checkpoint,
    EngineAwayError,
    Extent,
    FencedError,
    Follower,
    Leadership,
    LostRecordsError,
    TrimmedError,
    marked_error,
)


@dataclass(frozen=True)
class _Record:
    term: int
    data: bytes


class Memory:
    """The engine: what it keeps, and what is wrong with it."""

    is_away = False
    """While it is set, no call is carried out."""

    def __init__(self) -> None:
        self.leadership = Leadership()
        self.owner: MemoryLog | None = None
        """Who has acquired the term; None if it is released."""
        self.records: dict[int, _Record] = {}
        self.first = 1
        """The number of the first record that is kept, or will be."""
        self.checkpoint: Checkpoint | None = None
        self.followers: dict[str, Follower] = {}
        self._failure: bool | None = None

    @property
    def last(self) -> int:
        """The number of the last record; of the one before the first, if there is none."""
        return self.first + len(self.records) - 1

    def fail_next(self, *, carried_out: bool) -> None:
        """Let the next write raise EngineAwayError, after it was carried out or instead."""
        self._failure = carried_out

    def begin(self, *, writes: bool) -> None:
        if writes and self._failure is False:
            self._failure = None
            raise EngineAwayError("memory did not answer")
        if self.is_away:
            raise EngineAwayError("memory is away")

    def end(self) -> None:
        """After a write: raise if nobody is to know that it was carried out."""
        failure, self._failure = self._failure, None
        if failure:
            raise EngineAwayError("memory went away")


class MemoryLog:
    """One process's view of a `Memory`. `most` is how many records a `read` returns."""

    def __init__(self, memory: Memory, name: str = "memory", *, most: int = 16) -> None:
        self.name = name
        self._memory = memory
        self._most = most

    def read_leadership(self) -> Leadership:
        self._memory.begin(writes=False)
        return self._memory.leadership

    def acquire(self, seen: Leadership, address: str) -> int:
        memory = self._memory
        memory.begin(writes=True)
        now = memory.leadership
        self._check_mark()
        if now == seen:
            memory.owner = self
            memory.leadership = Leadership(now.term + 1, now.beat + 1, address)
        elif memory.owner is not self or (now.term, now.address) != (seen.term + 1, address):
            raise FencedError(f"term {now.term} is under way")
        memory.end()
        return seen.term + 1

    def renew(self, term: int) -> None:
        self._memory.begin(writes=True)
        self._check(term)
        now = self._memory.leadership
        self._memory.leadership = replace(now, beat=now.beat + 1)
        self._memory.end()

    def release(self, term: int) -> None:
        memory = self._memory
        memory.begin(writes=True)
        if memory.owner is self and memory.leadership.term == term:
            memory.owner = None
            memory.leadership = Leadership(term, memory.leadership.beat + 1)
        memory.end()

    def append(self, term: int, sequence: int, data: bytes) -> None:
        memory = self._memory
        if len(data) > MOST_BYTES:
            raise UsageError(f"a record of {len(data)} bytes is too long")
        memory.begin(writes=True)
        self._check(term)
        if sequence > memory.last + 1:
            raise LostRecordsError(f"record {sequence} would follow record {memory.last}")
        record = _Record(term, bytes(data))
        if sequence <= memory.last and memory.records.get(sequence) != record:
            raise FencedError(f"there is another record {sequence}")
        memory.records[sequence] = record
        memory.end()

    def read(self, sequence: int) -> Sequence[bytes]:
        memory = self._memory
        memory.begin(writes=False)
        self._check_mark()
        if sequence < memory.first:
            raise TrimmedError(f"record {sequence} is gone; the first is {memory.first}")
        if sequence > memory.last + 1:
            raise LostRecordsError(f"record {sequence - 1} is gone; the last is {memory.last}")
        until = min(memory.last + 1, sequence + self._most)
        return [memory.records[number].data for number in range(sequence, until)]

    def checkpoint(self) -> Checkpoint | None:
        self._memory.begin(writes=False)
        return self._memory.checkpoint

    def put_checkpoint(self, term: int, checkpoint: Checkpoint) -> None:
        self._memory.begin(writes=True)
        self._check(term)
        if checkpoint.sequence > self._memory.last:
            raise LostRecordsError(f"record {checkpoint.sequence} is gone; the last is {self._memory.last}")
        self._memory.checkpoint = checkpoint
        self._memory.end()

    def trim(self, term: int, sequence: int) -> None:
        memory = self._memory
        memory.begin(writes=True)
        self._check(term)
        for number in range(memory.first, min(sequence, memory.last) + 1):
            del memory.records[number]
            memory.first = number + 1
        memory.end()

    def announce(self, follower: Follower) -> None:
        self._memory.begin(writes=True)
        self._memory.followers[follower.name] = follower
        self._memory.end()

    def followers(self) -> Sequence[Follower]:
        self._memory.begin(writes=False)
        return sorted(self._memory.followers.values(), key=lambda each: each.name)

    def measure(self) -> Extent:
        self._memory.begin(writes=False)
        kept = self._memory.checkpoint
        return Extent(len(self._memory.records), *((kept.sequence, len(kept.data)) if kept else ()))

    def mark_lost(self, why: str) -> None:
        memory = self._memory
        memory.begin(writes=True)
        if not memory.leadership.lost:
            memory.leadership = replace(memory.leadership, lost=why)
        memory.end()

    def erase(self) -> None:
        memory = self._memory
        memory.begin(writes=True)
        memory.leadership, memory.owner = Leadership(), None
        memory.records, memory.first, memory.checkpoint = {}, 1, None
        memory.followers = {}
        memory.end()

    def close(self) -> None:
        pass

    def _check_mark(self) -> None:
        if self._memory.leadership.lost:
            raise marked_error(self.name, self._memory.leadership.lost)

    def _check(self, term: int) -> None:
        self._check_mark()
        now = self._memory.leadership
        if now.term == term and self._memory.owner is self:
            return
        if 0 < now.term < term:
            raise LostRecordsError(f"term {term} is gone; the last is {now.term}")
        raise FencedError(f"term {now.term} is under way")
