"""What a user of Redis has to be allowed for a log, and how to find out without writing anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from rallypoint.store.replica.engines.redis_client import RedisClient
from rallypoint.store.replica.log import EngineRefusedError

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
