"""Opening the log that an `--engine` URL names."""

from __future__ import annotations

from rallypoint.errors import UsageError
from rallypoint.replica.engines.address import ETCD, EngineAddress, parse_address
from rallypoint.replica.log import Log


def open_log(url: str, *, acks: int = 0) -> Log:
    """The log of a job. Nothing is asked of the engine yet.

    `acks`: so many replicas of Redis must have a write before it counts. UsageError for a URL that is wrong,
    and if the package that speaks to the engine is not installed.
    """
    address = parse_address(url)
    if acks < 0 or (acks and address.kind == ETCD):
        hint = "etcd itself sees to it that most of its nodes have a write" if acks > 0 else "give 0 or more"
        raise UsageError(f"{acks} acknowledgements cannot be asked of {address}", hint=hint)
    try:
        return _open(address, acks)
    except ModuleNotFoundError as error:
        name, extra = ("grpcio", "etcd") if address.kind == ETCD else ("redis", "redis")
        hint = f"pip install '.[{extra}]' in a clone of Rallypoint"
        raise UsageError(f"for {address}, the package {name} is needed: {error}", hint=hint) from error


def _open(address: EngineAddress, acks: int) -> Log:
    """Their packages take a while to import, and only one is needed."""
    if address.kind == ETCD:
        from rallypoint.replica.engines.etcd import EtcdLog

        return EtcdLog(address)
    from rallypoint.replica.engines.redis import RedisLog

    return RedisLog(address, acks=acks)
