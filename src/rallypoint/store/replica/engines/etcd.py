"""A log on etcd. Once a write is acknowledged, most of the nodes have it on disk: nothing is lost.

All keys are below `/rallypoint/JOB/`:

    lost                why nobody may go on with this log, if somebody has found that records were lost
    leader              term, owner and address. Its last change is the beat: a renewal writes the same again
    log/SEQUENCE        a record: its term in 8 bytes, then its data
    checkpoint          the last checkpoint: its sequence number, name and length
    parts/NAME/NUMBER   its data, in parts
    followers/NAME      the last record that a standby has read; with a lease, so it goes by itself

Every write is one transaction with the condition that `leader` is what its owner has written, and that nobody
has written `lost`.

etcd keeps each change, also of what is deleted, until its history is compacted: for all users of the cluster
at once. So that is left to etcd (`--auto-compaction-retention`), which does it every five minutes at best.
Only when a lot is in use, `trim` compacts as well, up to the trim before: else a busy job would fill it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from rallypoint.errors import UsageError
from rallypoint.store.replica.core.records import Pace, parsing
from rallypoint.store.replica.engines.address import EngineAddress
from rallypoint.store.replica.engines.etcd_client import SECONDS_PER_TRY, EtcdClient
from rallypoint.store.replica.engines.etcd_messages import (
    KeyValue,
    Outcome,
    absent,
    changed_at,
    delete,
    get,
    holds,
    present,
    put,
    transaction,
)
from rallypoint.store.replica.log import (
    MOST_BYTES,
    Checkpoint,
    EngineAwayError,
    EngineRefusedError,
    Extent,
    FencedError,
    Follower,
    Leadership,
    LostRecordsError,
    TrimmedError,
    marked_error,
)

FOLLOWER_SECONDS: Final = 5
"""How long after its last word a standby is forgotten."""

COMPACT_BYTES: Final = 256 << 20
"""How much the cluster may have in use before this compacts its history. By default it takes 2 GiB."""

_RECORDS_PER_TRIM: Final = 1_000
_PARTS_PER_READ: Final = 8
_SECONDS_PER_READ: Final = 5.0
_TERM_BYTES: Final = 8


class EtcdLog:
    """The log of one job."""

    def __init__(self, address: EngineAddress) -> None:
        self.name = str(address)
        self._client = EtcdClient(address)
        self._prefix = f"/rallypoint/{quote(address.job, safe='')}/"
        self._leader = self._key("leader")
        self._lost = self._key("lost")
        self._checkpoint = self._key("checkpoint")
        self._owner = secrets.token_hex(8)
        self._address = ""
        self._last_trim = 0
        self._pace = Pace()

    # Leading ------------------------------------------------------------------------------------------------

    def read_leadership(self) -> Leadership:
        leader, lost = self._read(get(self._leader), get(self._lost)).found
        with parsing(self.name, "who leads"):
            return replace(_leadership(leader), lost=lost[0].value.decode() if lost else "")

    def acquire(self, seen: Leadership, address: str) -> int:
        self._address = address
        term = seen.term + 1
        mine = self._mine(term)
        outcome = self._client.transact(
            transaction(
                [changed_at(self._leader, seen.beat), absent(self._lost)],
                [put(self._leader, mine)],
                [get(self._leader), get(self._lost)],
            )
        )
        if not outcome.succeeded:
            leader, lost = outcome.found
            self._check_mark(lost)
            if not _is(mine, leader):
                with parsing(self.name, "who leads"):
                    raise FencedError(f"{self.name}: term {_leadership(leader).term} is under way")
        return term

    def renew(self, term: int) -> None:
        self._write(term, [put(self._leader, self._mine(term))])

    def release(self, term: int) -> None:
        released = f"{term} - ".encode()
        self._client.transact(
            transaction([holds(self._leader, self._mine(term))], [put(self._leader, released)])
        )

    # Records ------------------------------------------------------------------------------------------------

    def append(self, term: int, sequence: int, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            raise UsageError(f"a record of {len(data)} bytes is too long")
        key, before = self._record(sequence), self._record(sequence - 1)
        value = term.to_bytes(_TERM_BYTES, "big") + data
        conditions = [absent(key), *([present(before)] if sequence > 1 else [])]
        outcome = self._attempt(term, conditions, [put(key, value)], [get(key)])
        if outcome.succeeded:
            return
        there = outcome.found[-1]
        if not there:
            raise LostRecordsError(f"{self.name}: record {sequence - 1} is gone")
        if not _is(value, there):
            raise FencedError(f"{self.name}: there is another record {sequence}")

    def read(self, sequence: int) -> Sequence[bytes]:
        # Not all that follow: etcd would count them, whatever the limit.
        end = sequence + self._pace.next_count()
        found, before, checkpoint, lost = self._read(
            get(self._record(sequence), self._record(end)),
            get(self._record(sequence - 1), keys_only=True),
            get(self._checkpoint),
            get(self._lost),
            seconds=_SECONDS_PER_READ,
        ).found
        self._check_mark(lost)
        if not found or found[0].key != self._record(sequence):
            if checkpoint and self._about(checkpoint[0]).sequence >= sequence:
                raise TrimmedError(f"{self.name}: record {sequence} is gone, and a checkpoint has its place")
            if found or (not before and sequence > 1):
                gone = sequence if found else sequence - 1
                raise LostRecordsError(f"{self.name}: record {gone} is gone")
        records = [each.value[_TERM_BYTES:] for each in found]
        self._pace.note(records)
        return records

    def trim(self, term: int, sequence: int) -> None:
        """Drop the records before this one. It stays itself: the next one has to follow one.

        In steps: while one of many keys is carried out, the whole cluster writes nothing else.
        """
        last = self._record(sequence)
        for older in self._slices(last):
            outcome = self._attempt(term, [present(last)], [older])
        self._compact(outcome.revision)

    def _slices(self, end: bytes) -> Sequence[bytes]:
        """Deletions that drop the records before this key, some at a time."""
        start = self._key("log/")
        outcome = self._read(get(start, end, limit=1, keys_only=True), seconds=_SECONDS_PER_READ)
        (found,), (count,) = outcome.found, outcome.counts
        number = found[0].key[len(start) :] if found else b""
        first = int(number) if number.isdigit() else 0
        cuts = range(first + _RECORDS_PER_TRIM, first + count, _RECORDS_PER_TRIM)
        return [delete(start, cut) for cut in (*map(self._record, cuts), end)]

    def _compact(self, revision: int) -> None:
        """Compact the history up to the trim before, if a lot is in use."""
        before, self._last_trim = self._last_trim, revision
        try:
            if before and self._client.status().size_in_use > COMPACT_BYTES:
                self._client.compact(before)
        except (EngineAwayError, EngineRefusedError):
            pass  # somebody else has compacted it, or only an administrator may

    # Checkpoints --------------------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint | None:
        while True:
            (found,) = self._read(get(self._checkpoint)).found
            if not found:
                return None
            about = self._about(found[0])
            data = b"".join(self._parts(about.name))
            if len(data) == about.length:
                return Checkpoint(about.sequence, data)
            (again,) = self._read(get(self._checkpoint)).found
            if again == found:
                raise LostRecordsError(
                    f"{self.name}: parts of the checkpoint of record {about.sequence} are gone"
                )

    def _parts(self, name: str) -> Sequence[bytes]:
        parts: list[bytes] = []
        while True:
            first, end = self._part(name, len(parts)), self._key(f"parts/{name}0")
            (found,) = self._read(get(first, end, limit=_PARTS_PER_READ), seconds=_SECONDS_PER_READ).found
            parts += [each.value for each in found]
            if len(found) < _PARTS_PER_READ:
                return parts

    def put_checkpoint(self, term: int, checkpoint: Checkpoint) -> None:
        data = checkpoint.data
        name = f"{checkpoint.sequence:020}-{term}"
        for number, start in enumerate(range(0, len(data), MOST_BYTES)):
            self._write(term, [put(self._part(name, number), data[start : start + MOST_BYTES])])
        text = f"{checkpoint.sequence} {name} {len(data)}".encode()
        older = delete(self._key("parts/"), self._part(name, 0))
        others = delete(self._key(f"parts/{name}0"), self._key("parts0"))
        covered = self._record(checkpoint.sequence)
        self._write(term, [put(self._checkpoint, text), older, others], covered)

    # Followers ----------------------------------------------------------------------------------------------

    def announce(self, follower: Follower) -> None:
        lease = self._client.grant_lease(FOLLOWER_SECONDS)
        key = self._key(f"followers/{quote(follower.name, safe='')}")
        self._client.transact(transaction([], [put(key, b"%d" % follower.sequence, lease=lease)]))

    def followers(self) -> Sequence[Follower]:
        start = self._key("followers/")
        (found,) = self._read(get(start, self._key("followers0"))).found
        with parsing(self.name, "the list of who stands by"):
            return [Follower(unquote(each.key[len(start) :].decode()), int(each.value)) for each in found]

    def measure(self) -> Extent:
        records = get(self._key("log/"), self._key("log0"), limit=1, keys_only=True)
        outcome = self._read(records, get(self._checkpoint), seconds=_SECONDS_PER_READ)
        checkpoint = outcome.found[1]
        if not checkpoint:
            return Extent(outcome.counts[0])
        about = self._about(checkpoint[0])
        return Extent(outcome.counts[0], about.sequence, about.length)

    # Losses, and the end ------------------------------------------------------------------------------------

    def mark_lost(self, why: str) -> None:
        self._client.transact(transaction([absent(self._lost)], [put(self._lost, why.encode())]))

    def _check_mark(self, found: Sequence[KeyValue]) -> None:
        if found:
            raise marked_error(self.name, found[0].value.decode(errors="replace"))

    def erase(self) -> None:
        """A mark of its own comes first and goes last: nobody begins with what is left if this ends in the
        middle, and a deletion that is carried out late finds no mark, and removes nothing of a new log."""
        (leader,) = self._read(get(self._leader)).found
        mark = f"somebody has begun to erase this log, and has not come to an end ({secrets.token_hex(8)})"
        outcome = self._client.transact(
            transaction(
                [changed_at(self._leader, leader[0].changed if leader else 0)],
                [put(self._lost, mark.encode()), delete(self._leader)],
                [get(self._lost)],
            )
        )
        if not outcome.succeeded and not _is(mark.encode(), outcome.found[0]):
            raise FencedError(f"{self.name}: somebody leads", hint="end all processes of the store first")
        prefix = self._prefix.encode()
        rest = delete(prefix, prefix[:-1] + b"0")
        for some in (*self._slices(self._key("log0")), rest):
            self._client.transact(transaction([holds(self._lost, mark.encode())], [some]))

    def close(self) -> None:
        self._client.close()

    # Within -------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> bytes:
        """The key of this name. `0` is what follows `/` in the order of keys: it ends a range."""
        return f"{self._prefix}{name}".encode()

    def _record(self, sequence: int) -> bytes:
        return self._key(f"log/{sequence:020}")

    def _part(self, name: str, number: int) -> bytes:
        return self._key(f"parts/{name}/{number:010}")

    def _about(self, checkpoint: KeyValue) -> _About:
        with parsing(self.name, "the head of the checkpoint"):
            sequence, name, length = checkpoint.value.decode().split()
            return _About(int(sequence), name, int(length))

    def _mine(self, term: int) -> bytes:
        """What the key `leader` holds while this log leads."""
        return f"{term} {self._owner} {self._address}".encode()

    def _read(self, *reads: bytes, seconds: float = SECONDS_PER_TRY) -> Outcome:
        return self._client.transact(transaction([], reads), seconds=seconds)

    def _write(self, term: int, operations: Sequence[bytes], record: bytes | None = None) -> None:
        """Write in this term, and only if there is this record."""
        if not self._attempt(term, [present(record)] if record else [], operations).succeeded:
            raise LostRecordsError(f"{self.name}: the record of a checkpoint is gone")

    def _attempt(
        self,
        term: int,
        conditions: Sequence[bytes],
        operations: Sequence[bytes],
        otherwise: Sequence[bytes] = (),
    ) -> Outcome:
        """Write in this term, on these conditions. If they do not hold, the outcome ends with `otherwise`."""
        conditions = [holds(self._leader, self._mine(term)), absent(self._lost), *conditions]
        reads = [get(self._leader), get(self._lost), *otherwise]
        outcome = self._client.transact(transaction(conditions, operations, reads))
        if not outcome.succeeded:
            self._check_mark(outcome.found[1])
            self._check(term, outcome.found[0])
        return outcome

    def _check(self, term: int, found: Sequence[KeyValue]) -> None:
        """Raise what the key `leader` says to a write in this term; nothing if that term is under way."""
        if _is(self._mine(term), found):
            return
        with parsing(self.name, "who leads"):
            now = _leadership(found).term
        if 0 < now < term:
            raise LostRecordsError(f"{self.name}: term {term} is gone; the last one there is {now}")
        raise FencedError(f"{self.name}: term {term} is over; there is term {now}")


class _About(NamedTuple):
    """What the key `checkpoint` holds."""

    sequence: int
    name: str
    length: int


def _is(value: bytes, found: Sequence[KeyValue]) -> bool:
    return bool(found) and found[0].value == value


def _leadership(found: Sequence[KeyValue]) -> Leadership:
    if not found:
        return Leadership()
    term, _, address = found[0].value.decode().split(" ", 2)
    return Leadership(int(term), found[0].changed, address)
