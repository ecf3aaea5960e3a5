"""Runs commands on a Redis server, or on the master that Sentinels name: with a deadline, and with retries.

Also lists the commands that a log needs; the Redis user must have the right to run them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.replica.engines.address import PASSWORD_HINT, SENTINEL, EngineAddress
from rallypoint.store.replica.log import EngineAwayError, EngineRefusedError

SECONDS_PER_CALL: Final = 2.0
"""How long a call is tried again."""

SECONDS_PER_TRY: Final = 0.7
"""How long a server or a Sentinel has to answer."""

WAIT_SECONDS: Final = 0.5
"""How long replicas have to acknowledge a write."""

_PAUSE: Final = 0.05

_PASSING: Final = (
    *("LOADING", "MASTERDOWN", "READONLY", "NOREPLICAS", "MISCONF", "OOM", "BUSY", "TRYAGAIN", "CLUSTERDOWN"),
    *("UNBLOCKED", "WAIT cannot be used", "max number of clients reached"),
)
"""How errors begin that go by, or that somebody will mend."""

_RIGHTS: Final = "its user needs more rights: `rallypoint doctor --engine URL` tells which"

Command = Sequence[str | bytes | int]

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


class RedisClient:
    """A server, or the master of several."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self._client = _connect(address)
        self._closed = threading.Event()
        self._replicas: frozenset[tuple[bytes, bytes]] = frozenset()
        """Those that the master had when no Sentinel was replacing it."""

    def run(self, *commands: Command, acks: int = 0) -> list[Any]:
        """Run commands on one connection, as one transaction if there are several; return what each returns.

        `acks`: wait until so many replicas have what this connection has written, else EngineAwayError.
        """
        deadline = Deadline(SECONDS_PER_CALL)
        while not self._closed.is_set():
            try:
                return self._run(commands, acks)
            except redis.RedisError as error:
                failure = self._judge(error)
            except EngineAwayError as error:
                failure = error
            # Another server may be the master by now; a new connection asks the Sentinels.
            self._let_go()
            if deadline.passed:
                raise failure
            self._closed.wait(_PAUSE)
        self._let_go()
        raise EngineAwayError(f"{self._address}: the connection was closed")

    def close(self) -> None:
        """A call under way ends with its try: redis-py breaks if its connection is closed beneath it."""
        self._closed.set()
        self._let_go()

    def _let_go(self) -> None:
        """Close the connections that no call uses."""
        self._client.connection_pool.disconnect(inuse_connections=False)

    def _run(self, commands: Sequence[Command], acks: int) -> list[Any]:
        pipeline: Any  # redis-py has no types for what it inherits
        with self._client.pipeline(transaction=len(commands) > 1) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            if acks:
                pipeline.execute_command("WAIT", acks, int(WAIT_SECONDS * 1000))
                pipeline.execute_command("ROLE")
            results: list[Any] = pipeline.execute()
        if acks:
            role, acknowledged = results.pop(), results.pop()
            if acknowledged < acks:
                raise EngineAwayError(
                    f"{self._address}: fewer than {acks} replicas acknowledged a write within "
                    f"{WAIT_SECONDS:g} s",
                    hint="look at its replicas: `redis-cli info replication`; --acks says how many count",
                )
            if self._address.kind == SENTINEL:
                self._check_master(*role)
        return results

    def _check_master(self, role: bytes, _: int, attached: Any, *__: Any) -> None:
        """EngineAwayError if this master is being replaced: what it takes now will be gone.

        It does not know that. For about a second it has its other replicas, and these acknowledge what they
        get. But it has lost the one that is to be the master. So the Sentinels are asked when it has not the
        replicas that it had before; one of them knows.
        """
        if role != b"master":
            raise EngineAwayError(f"{self._address}: another server has become the master")
        replicas = frozenset((host, port) for host, port, _ in attached)
        if replicas == self._replicas:
            return
        pool: Any = self._client.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            try:
                known = sentinel.sentinel_master(self._address.master)
            except redis.RedisError:
                continue
            is_this = (known["ip"], known["port"]) == pool.master_address
            if is_this and "failover_in_progress" in known["flags"]:
                raise EngineAwayError(f"{self._address}: another server is becoming the master")
        self._replicas = replicas

    def _judge(self, error: redis.RedisError) -> EngineAwayError:
        """The error to raise if it does not go by. If it cannot, it is raised here."""
        words = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MasterNotFoundError):
            words = _shorten(words)
            if "AuthenticationError" in words:
                hint = "?sentinel-password-file=FILE names the file with the password of the Sentinels"
                raise EngineRefusedError(f"{self._address}: it refuses: {words}", hint=hint) from None
        if isinstance(error, redis.AuthenticationError) or "NOAUTH" in words or "WRONGPASS" in words:
            raise EngineRefusedError(f"{self._address}: it refuses: {words}", hint=PASSWORD_HINT) from None
        if isinstance(error, redis.exceptions.NoPermissionError) or "can't run this command" in words:
            raise EngineRefusedError(f"{self._address}: it refuses: NOPERM {words}", hint=_RIGHTS) from None
        if isinstance(error, redis.ConnectionError | redis.TimeoutError) or _is_passing(words):
            return EngineAwayError(f"{self._address}: no answer: {words}")
        raise EngineRefusedError(f"{self._address}: it refuses: {words}") from None


def _shorten(words: str) -> str:
    """What redis-py says if no Sentinel names a master, without all settings of its clients."""
    reasons = dict.fromkeys(re.findall(r"> - (.*?)(?=, <|$)", words))
    return f"{words.partition(' : ')[0]}: {', '.join(reasons) or 'no Sentinel knows one that is up'}"


def _is_passing(words: str) -> bool:
    return any(each in words for each in _PASSING)


def _connect(address: EngineAddress) -> redis.Redis:
    tls = address.tls
    encrypted: dict[str, Any] = {}
    if tls is not None:
        encrypted = {
            "ssl": True,
            "ssl_check_hostname": True,
            "ssl_ca_certs": tls.ca or None,
            "ssl_certfile": tls.cert or None,
            "ssl_keyfile": tls.key or None,
        }
    common: dict[str, Any] = {
        "socket_timeout": SECONDS_PER_TRY,
        "socket_connect_timeout": SECONDS_PER_TRY,
        "retry": Retry(NoBackoff(), 0),  # what is tried again is said in `run`
        **encrypted,
    }
    own = {
        **common,
        "socket_timeout": SECONDS_PER_TRY + WAIT_SECONDS,
        "db": address.database,
        "username": address.user or None,
        "password": address.password or None,
        "protocol": 2,
    }
    if address.kind != SENTINEL:
        ((host, port),) = address.hosts
        return redis.Redis(host, port, **own)
    sentinels: Any = Sentinel
    asked = {**common, "password": address.sentinel_password or None}
    master: redis.Redis = sentinels(address.hosts, sentinel_kwargs=asked, **own).master_for(address.master)
    return master


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
