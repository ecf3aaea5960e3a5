"""A log on Redis: one server, or a master with replicas that Sentinels watch.

What it promises is what Redis does. A server keeps what is in its file (`appendonly yes`; without
`appendfsync always`, a second may be lost). Replicas get writes a little later, so a master that dies may
take acknowledged writes with it. With `acks`, a write counts when so many replicas have it in memory. Then
the death of one machine loses nothing, if Sentinel promotes a replica that has it: if acks is the number of
replicas, each one has. Else it usually promotes the most advanced, but does not promise that. A master that
is cut off, or was paused, goes on taking writes until it learns that there is another one. Without `acks`
they are lost. With `acks`, the Sentinels are asked before a write counts if its replicas have changed.

A loss is not repaired. It is found where it can be: records have no gap, each knows who wrote the one before
it, and a term has an owner. Then LostRecordsError is raised, and who finds it marks the log, so that nobody
goes on with another history.

All keys begin with `rallypoint:{JOB}:`:

    leader        a hash: see `redis_scripts.py`
    log           a stream: the sequence number of a record is its id
    checkpoint    a hash: name, length, number of parts, parts by number; `checkpoint:next` while it is made
    followers     a hash: see `redis_scripts.py`
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from rallypoint.errors import UsageError
from rallypoint.store.replica.core.records import Pace, parsing
from rallypoint.store.replica.engines import redis_scripts as scripts
from rallypoint.store.replica.engines.address import EngineAddress
from rallypoint.store.replica.engines.redis_client import Command, RedisClient
from rallypoint.store.replica.log import (
    MOST_BYTES,
    Checkpoint,
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


class RedisLog:
    """The log of one job. `acks`: so many replicas must have a write before it counts."""

    def __init__(self, address: EngineAddress, *, acks: int = 0) -> None:
        self.name = str(address)
        self._client = RedisClient(address)
        self._acks = acks
        prefix = f"rallypoint:{{{quote(address.job, safe='')}}}:"
        self._leader, self._log = f"{prefix}leader", f"{prefix}log"
        self._checkpoint, self._next = f"{prefix}checkpoint", f"{prefix}checkpoint:next"
        self._followers = f"{prefix}followers"
        self._owner = secrets.token_hex(8)
        self._pace = Pace()
        self._kept = 0
        """While this log leads: up to where replicas have acknowledged the records."""
        self._known = (0, b"")
        """The number and the stamp of the last record that was read or appended here."""

    # Leading ------------------------------------------------------------------------------------------------

    def read_leadership(self) -> Leadership:
        ((term, beat, address, lost),) = self._client.run(
            ("HMGET", self._leader, "term", "beat", "address", "lost")
        )
        with parsing(self.name, "who leads"):
            return Leadership(
                int(term or 0), int(beat or 0), (address or b"").decode(), (lost or b"").decode()
            )

    def acquire(self, seen: Leadership, address: str) -> int:
        term = seen.term + 1
        word, about = self._eval(
            scripts.ACQUIRE, (self._leader,), seen.term, seen.beat, term, self._owner, address
        )
        self._check_mark(about if word == scripts.MARKED else None)
        with parsing(self.name, "who leads"):
            number = int(about)
        if word != scripts.OK:
            raise FencedError(f"{self.name}: term {number} is under way")
        self._kept = number  # the replicas that have acknowledged this have all that was before
        return term

    def renew(self, term: int) -> None:
        self._write(scripts.RENEW, (self._leader,), term, self._kept)

    def release(self, term: int) -> None:
        self._eval(scripts.RELEASE, (self._leader,), term, self._owner)

    # Records ------------------------------------------------------------------------------------------------

    def append(self, term: int, sequence: int, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            raise UsageError(f"a record of {len(data)} bytes is too long")
        kept = self._kept if self._acks else sequence
        self._write(scripts.APPEND, (self._leader, self._log), term, sequence, data, kept)
        self._kept = sequence
        self._known = (sequence, f"{term} {self._owner}".encode())

    def read(self, sequence: int) -> Sequence[bytes]:
        about, entries = self._client.run(
            ("HMGET", self._leader, "owner", "last", "stamp", "kept", "lost"),
            ("XRANGE", self._log, f"{sequence}-0", "+", "COUNT", self._pace.next_count()),
        )
        with parsing(self.name, f"a record from {sequence} on"):
            records = self._judge_read(sequence, about, entries)
        self._pace.note(records)
        return records

    def _judge_read(self, sequence: int, about: Any, entries: Any) -> Sequence[bytes]:
        """What may be shown of what is there from this record on."""
        owner, last, stamp, kept, lost = about
        self._check_mark(lost)
        if int(last or 0) < sequence - 1:
            raise LostRecordsError(
                f"{self.name}: record {sequence - 1} is gone; the last one is {int(last or 0)}"
            )
        records = [(int(name.partition(b"-")[0]), fields) for name, fields in entries]
        first = records[0][0] if records else int(last or 0) + 1
        if first > sequence:
            raise TrimmedError(f"{self.name}: record {sequence} is gone, and a checkpoint has its place")
        if self._known[0] == sequence - 1:
            before = records[0][1][b"before"] if records else stamp or b""
            if self._known[1] != before:
                raise LostRecordsError(f"{self.name}: record {sequence - 1} is not the one that it was")
        until = int(last or 0) if owner == self._owner.encode() else int(kept or 0)
        shown = [(number, fields) for number, fields in records if number <= until]
        if shown:
            self._known = (shown[-1][0], shown[-1][1][b"stamp"])
        return [fields[b"data"] for _, fields in shown]

    def trim(self, term: int, sequence: int) -> None:
        self._write(scripts.TRIM, (self._leader, self._log), term, sequence)

    # Checkpoints --------------------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint | None:
        while True:
            head = self._checkpoint_head()
            if head is None:
                return None
            sequence, _, count, length = head
            parts: list[bytes] = []
            for number in range(count):
                (part,) = self._client.run(("HGET", self._checkpoint, number))
                if part is None:
                    break
                parts.append(part)
            if self._checkpoint_head() != head:
                continue  # another one has taken its place meanwhile
            data = b"".join(parts)
            if len(data) != length:
                raise LostRecordsError(f"{self.name}: parts of the last checkpoint are gone")
            return Checkpoint(sequence, data)

    def _checkpoint_head(self) -> tuple[int, bytes, int, int] | None:
        """The number of its record, its name, the number of its parts, and its length."""
        ((name, parts, length),) = self._client.run(("HMGET", self._checkpoint, "name", "parts", "length"))
        with parsing(self.name, "the head of the checkpoint"):
            return None if name is None else (int(name.split()[0]), name, int(parts), int(length))

    def put_checkpoint(self, term: int, checkpoint: Checkpoint) -> None:
        data = checkpoint.data
        name = f"{checkpoint.sequence} {term} {self._owner}"
        pieces = [data[start : start + MOST_BYTES] for start in range(0, len(data), MOST_BYTES)]
        for number, piece in enumerate(pieces):
            self._write(scripts.PUT_PART, (self._leader, self._next), term, name, number, piece)
        keys = (self._leader, self._next, self._checkpoint)
        self._write(scripts.PUT_CHECKPOINT, keys, term, name, len(pieces), checkpoint.sequence, len(data))

    # Followers ----------------------------------------------------------------------------------------------

    def announce(self, follower: Follower) -> None:
        arguments = (follower.name, follower.sequence, FOLLOWER_SECONDS)
        self._client.run(("EVAL", scripts.ANNOUNCE, 1, self._followers, *arguments))

    def followers(self) -> Sequence[Follower]:
        (now, _), found = self._client.run(("TIME",), ("HGETALL", self._followers))
        with parsing(self.name, "the list of who stands by"):
            said = {name.decode(): [int(each) for each in text.split()] for name, text in found.items()}
            return [
                Follower(name, sequence)
                for name, (sequence, time) in sorted(said.items())
                if now - time < FOLLOWER_SECONDS
            ]

    def measure(self) -> Extent:
        (records,) = self._client.run(("XLEN", self._log))
        head = self._checkpoint_head()
        return Extent(records, *((head[0], head[3]) if head is not None else ()))

    # Losses, and the end ------------------------------------------------------------------------------------

    def mark_lost(self, why: str) -> None:
        self._eval(scripts.MARK_LOST, (self._leader,), why)

    def _check_mark(self, lost: bytes | None) -> None:
        if lost is not None:
            raise marked_error(self.name, lost.decode(errors="replace"))

    def erase(self) -> None:
        keys = (self._leader, self._log, self._checkpoint, self._next, self._followers)
        self._client.run(("UNLINK", *keys))

    def close(self) -> None:
        self._client.close()

    # Within -------------------------------------------------------------------------------------------------

    def _write(self, script: str, keys: Sequence[str], term: int, *arguments: str | bytes | int) -> None:
        word, *about = self._eval(script, keys, term, self._owner, *arguments)
        self._check_mark(about[0] if word == scripts.MARKED else None)
        with parsing(self.name, "who leads"):
            number = int(about[0]) if about else 0
        if word == scripts.OTHER_TERM and 0 < number < term:
            raise LostRecordsError(f"{self.name}: term {term} is gone; the last one there is {number}")
        if word == scripts.OTHER_TERM:
            raise FencedError(f"{self.name}: term {term} is over; there is term {number}")
        if word == scripts.OTHER_RECORD:
            raise FencedError(f"{self.name}: there is another record of this number")
        if word == scripts.LOST:
            raise LostRecordsError(f"{self.name}: what was before this is gone; the last is {number}")

    def _eval(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> list[Any]:
        command: Command = ("EVAL", script, len(keys), *keys, *arguments)
        (result,) = self._client.run(command, acks=self._acks)
        found: list[Any] = result
        return found
