"""The Lua scripts of a log on Redis, and the commands that its user has to be allowed.

Each script checks the term and writes, as one. KEYS[1] is the hash `leader`: term, owner, address, beat;
`last` and `stamp`, the number of the last record and who wrote it; `kept`, up to where replicas are known to
have the records; `lost`, why nobody may go on. Of other keys, see `redis.py`.

Each returns a word, and what explains it. Each writes something, also when it is repeated and finds its work
done: WAIT is about what a connection has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from rallypoint.store.replica.engines.redis_client import RedisClient
from rallypoint.store.replica.log import EngineRefusedError

OK: Final = b"ok"
OTHER_TERM: Final = b"other term"
OTHER_RECORD: Final = b"other record"
LOST: Final = b"lost"
MARKED: Final = b"marked"

ACQUIRE: Final = """
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

RENEW: Final = f"""{_CHECK}
redis.call('HINCRBY', KEYS[1], 'beat', 1)
redis.call('HSET', KEYS[1], 'kept', ARGV[3])
return {{'ok'}}
"""

RELEASE: Final = f"""{_CHECK}
redis.call('HINCRBY', KEYS[1], 'beat', 1)
redis.call('HSET', KEYS[1], 'owner', '', 'address', '')
return {{'ok'}}
"""

APPEND: Final = f"""{_CHECK}
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

TRIM: Final = f"""{_CHECK}
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3] .. '-1')
redis.call('HSET', KEYS[1], 'trimmed', ARGV[3])
return {{'ok'}}
"""

PUT_PART: Final = f"""{_CHECK}
local name, number, data = ARGV[3], ARGV[4], ARGV[5]
if redis.call('HGET', KEYS[2], 'name') ~= name then
  redis.call('UNLINK', KEYS[2])
end
redis.call('HSET', KEYS[2], 'name', name, number, data)
return {{'ok'}}
"""

PUT_CHECKPOINT: Final = f"""{_CHECK}
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

MARK_LOST: Final = """
if not redis.call('HGET', KEYS[1], 'lost') then
  redis.call('HSET', KEYS[1], 'lost', ARGV[1])
end
redis.call('HINCRBY', KEYS[1], 'repeated', 1)
return {'ok'}
"""

ANNOUNCE: Final = """
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
"""KEYS[1] is the hash `followers`: of each the record, and when it said so. Silent ones are dropped."""


_PROBES: Final = {
    "EVAL": ("return 1", 1, "KEY"),
    "EXPIRE": ("KEY", 1),
    "HDEL": ("KEY", "field"),
    "HGET": ("KEY", "field"),
    "HGETALL": ("KEY",),
    "HINCRBY": ("KEY", "field", "no number"),
    "HLEN": ("KEY",),
    "HMGET": ("KEY", "field"),
    "HSET": ("KEY", "field", "value", "a field without a value"),
    "RENAME": ("KEY", "KEY"),
    "TIME": (),
    "UNLINK": ("KEY",),
    "XADD": ("KEY", "NOMKSTREAM", "*", "field", "value"),
    "XLEN": ("KEY",),
    "XRANGE": ("KEY", "-", "+"),
    "XTRIM": ("KEY", "MINID", 1),
}
"""Each command, with arguments for a key that is not there: Redis looks at the user's rights first, then does
nothing, or complains."""

_PROBES_OF_ACKS: Final = {"ROLE": (), "WAIT": (0, 1)}

_TRANSACTION: Final = ("MULTI", "EXEC")

COMMANDS: Final = (*_PROBES, *_TRANSACTION, *_PROBES_OF_ACKS)
"""All that a log uses; `ROLE` and `WAIT` only if replicas are to acknowledge."""


def missing_rights(client: RedisClient, job: str, acks: int) -> Sequence[str]:
    """The commands that this user may not run on the keys of a job."""
    key = f"rallypoint:{{{quote(job, safe='')}}}:probe"
    probes = {**_PROBES, **(_PROBES_OF_ACKS if acks else {})}
    missing = [
        name
        for name, arguments in probes.items()
        if not _may(client, (name, *(key if each == "KEY" else each for each in arguments)))
    ]
    can_transact = "XLEN" in missing or _may(client, ("XLEN", key), ("XLEN", key))
    return [*missing, *(() if can_transact else _TRANSACTION)]


def _may(client: RedisClient, *commands: Sequence[str | int]) -> bool:
    try:
        client.run(*commands)
    except EngineRefusedError as error:
        return "NOPERM" not in error.message and "EXEC without MULTI" not in error.message
    return True
