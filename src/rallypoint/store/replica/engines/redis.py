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

    leader        a hash: term, owner, address, beat; `last` and `stamp`, the number of the last record and
                  who wrote it; `kept`, up to where replicas are known to have the records; `lost`, why
                  nobody may go on
    log           a stream: the sequence number of a record is its id
    checkpoint    a hash: name, length, number of parts, parts by number; `checkpoint:next` while it is made
    followers     a hash: of each its last record, and when it said so

Each script checks the term and writes, as one. KEYS[1] is `leader`, but for `_ANNOUNCE`. A script returns a
word, and what explains it. It writes something also when it is repeated and finds its work done: WAIT is
about what a connection has written.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from rallypoint.errors import UsageError
from rallypoint.store.replica.core.records import Pace, parsing
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


_OK: Final = b"ok"
_OTHER_TERM: Final = b"other term"
_OTHER_RECORD: Final = b"other record"
_LOST: Final = b"lost"
_MARKED: Final = b"marked"

_ACQUIRE: Final = """
local seen_term, seen_beat, term, owner, address = unpack(ARGV)
local now = redis.call('HMGET', KEYS[1], 'term', 'beat', 'owner', 'address', 'last', 'lost')
if now[6] then
  return {'marked', now[6]}
end
if (now[1] or '0') == seen_term and (now[2] or '0') == seen_beat then
  if not now[2] then
    local time = redis.call('TIME')
    redis.call('HSET', KEYS[1], 'beat', time[1] .. string.sub('000000' .. time[2], -6))
  end
  redis.call('HSET', KEYS[1], 'term', term, 'owner', owner, 'address', address)
elseif now[1] ~= term or now[3] ~= owner or now[4] ~= address then
  return {'other term', now[1] or '0'}
end
redis.call('HINCRBY', KEYS[1], 'beat', 1)
return {'ok', now[5] or '0'}
"""
"""The first beat is the time: if Redis has lost all, no beat comes a second time."""

_CHECK: Final = """
local now = redis.call('HMGET', KEYS[1], 'term', 'owner', 'lost')
if now[3] then
  return {'marked', now[3]}
end
if now[1] ~= ARGV[1] or now[2] ~= ARGV[2] then
  return {'other term', now[1] or '0'}
end
"""
"""Of all that follow: ARGV[1] is the term, ARGV[2] its owner."""

_RENEW: Final = f"""{_CHECK}
redis.call('HINCRBY', KEYS[1], 'beat', 1)
redis.call('HSET', KEYS[1], 'kept', ARGV[3])
return {{'ok'}}
"""

_RELEASE: Final = f"""{_CHECK}
redis.call('HINCRBY', KEYS[1], 'beat', 1)
redis.call('HSET', KEYS[1], 'owner', '', 'address', '')
return {{'ok'}}
"""

_APPEND: Final = f"""{_CHECK}
local sequence, data, kept = ARGV[3], ARGV[4], ARGV[5]
local stamp = ARGV[1] .. ' ' .. ARGV[2]
local end_ = redis.call('HMGET', KEYS[1], 'last', 'stamp')
local last = tonumber(end_[1] or '0')
local id = sequence .. '-0'
if tonumber(sequence) > last + 1 then
  return {{'lost', end_[1] or '0'}}
elseif tonumber(sequence) <= last then
  local there = redis.call('XRANGE', KEYS[2], id, id)[1]
  if not there or there[2][2] ~= stamp or there[2][6] ~= data then
    return {{'other record'}}
  end
  redis.call('HINCRBY', KEYS[1], 'repeated', 1)
  return {{'ok'}}
end
redis.call('XADD', KEYS[2], id, 'stamp', stamp, 'before', end_[2] or '', 'data', data)
redis.call('HSET', KEYS[1], 'last', sequence, 'stamp', stamp, 'kept', kept)
return {{'ok'}}
"""

_TRIM: Final = f"""{_CHECK}
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3] .. '-1')
redis.call('HSET', KEYS[1], 'trimmed', ARGV[3])
return {{'ok'}}
"""

_PUT_PART: Final = f"""{_CHECK}
local name, number, data = ARGV[3], ARGV[4], ARGV[5]
if redis.call('HGET', KEYS[2], 'name') ~= name then
  redis.call('UNLINK', KEYS[2])
end
redis.call('HSET', KEYS[2], 'name', name, number, data)
return {{'ok'}}
"""

_PUT_CHECKPOINT: Final = f"""{_CHECK}
local name, parts, sequence, length = ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local last = redis.call('HGET', KEYS[1], 'last') or '0'
if tonumber(last) < tonumber(sequence) then
  return {{'lost', last}}
end
if redis.call('HGET', KEYS[3], 'name') == name then
  redis.call('HINCRBY', KEYS[1], 'repeated', 1)
  redis.call('UNLINK', KEYS[2])
  return {{'ok'}}
end
redis.call('HSET', KEYS[2], 'name', name, 'parts', parts, 'length', length)
if redis.call('HLEN', KEYS[2]) ~= parts + 3 then
  return {{'lost', '0'}}
end
redis.call('RENAME', KEYS[2], KEYS[3])
return {{'ok'}}
"""

_MARK_LOST: Final = """
if not redis.call('HGET', KEYS[1], 'lost') then
  redis.call('HSET', KEYS[1], 'lost', ARGV[1])
end
redis.call('HINCRBY', KEYS[1], 'repeated', 1)
return {'ok'}
"""

_ANNOUNCE: Final = """
local time = redis.call('TIME')[1]
local all = redis.call('HGETALL', KEYS[1])
for index = 1, #all, 2 do
  local said = string.match(all[index + 1], '%d+ (%d+)')
  if not said or time - said >= tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], all[index])
  end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. time)
return redis.call('EXPIRE', KEYS[1], ARGV[3])
"""
"""KEYS[1] is the hash `followers`; silent ones are dropped."""


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
        word, about = self._eval(_ACQUIRE, (self._leader,), seen.term, seen.beat, term, self._owner, address)
        self._check_mark(about if word == _MARKED else None)
        with parsing(self.name, "who leads"):
            number = int(about)
        if word != _OK:
            raise FencedError(f"{self.name}: term {number} is under way")
        self._kept = number  # the replicas that have acknowledged this have all that was before
        return term

    def renew(self, term: int) -> None:
        self._write(_RENEW, (self._leader,), term, self._kept)

    def release(self, term: int) -> None:
        self._eval(_RELEASE, (self._leader,), term, self._owner)

    # Records ------------------------------------------------------------------------------------------------

    def append(self, term: int, sequence: int, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            raise UsageError(f"a record of {len(data)} bytes is too long")
        kept = self._kept if self._acks else sequence
        self._write(_APPEND, (self._leader, self._log), term, sequence, data, kept)
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
        self._write(_TRIM, (self._leader, self._log), term, sequence)

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
            self._write(_PUT_PART, (self._leader, self._next), term, name, number, piece)
        keys = (self._leader, self._next, self._checkpoint)
        self._write(_PUT_CHECKPOINT, keys, term, name, len(pieces), checkpoint.sequence, len(data))

    # Followers ----------------------------------------------------------------------------------------------

    def announce(self, follower: Follower) -> None:
        arguments = (follower.name, follower.sequence, FOLLOWER_SECONDS)
        self._client.run(("EVAL", _ANNOUNCE, 1, self._followers, *arguments))

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
        self._eval(_MARK_LOST, (self._leader,), why)

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
        self._check_mark(about[0] if word == _MARKED else None)
        with parsing(self.name, "who leads"):
            number = int(about[0]) if about else 0
        if word == _OTHER_TERM and 0 < number < term:
            raise LostRecordsError(f"{self.name}: term {term} is gone; the last one there is {number}")
        if word == _OTHER_TERM:
            raise FencedError(f"{self.name}: term {term} is over; there is term {number}")
        if word == _OTHER_RECORD:
            raise FencedError(f"{self.name}: there is another record of this number")
        if word == _LOST:
            raise LostRecordsError(f"{self.name}: what was before this is gone; the last is {number}")

    def _eval(self, script: str, keys: Sequence[str], *arguments: str | bytes | int) -> list[Any]:
        command: Command = ("EVAL", script, len(keys), *keys, *arguments)
        (result,) = self._client.run(command, acks=self._acks)
        found: list[Any] = result
        return found
