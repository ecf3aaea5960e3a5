"""Opening the log that an `--engine` URL names."""

from __future__ import annotations

import ssl
from pathlib import Path

from rallypoint.errors import UsageError
from rallypoint.store.replica.engines.address import ETCD, EngineAddress, Tls, parse_address
from rallypoint.store.replica.log import Log


def open_log(url: str, *, acks: int = 0) -> Log:
    """The log of a job. Nothing is asked of the engine yet.

    `acks`: so many replicas of Redis must have a write before it counts. UsageError for a URL that is wrong,
    for files of it that cannot be used, and if the package that speaks to the engine is not installed.
    """
    address = parse_address(url)
    if acks < 0 or (acks and address.kind == ETCD):
        hint = "etcd itself sees to it that most of its nodes have a write" if acks > 0 else "give 0 or more"
        raise UsageError(f"{acks} acknowledgements cannot be asked of {address}", hint=hint)
    if address.tls is not None:
        _check_files(address.tls)
    try:
        return _open(address, acks)
    except ModuleNotFoundError as error:
        name, extra = ("grpcio", "etcd") if address.kind == ETCD else ("redis", "redis")
        hint = f"pip install '.[{extra}]' in a clone of Rallypoint"
        raise UsageError(f"for {address}, the package {name} is needed: {error}", hint=hint) from error


def _check_files(tls: Tls) -> None:
    """The clients of the engines would try again for ever, and not name the file."""
    for path in filter(None, (tls.ca, tls.cert, tls.key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if tls.ca:
            context.load_verify_locations(tls.ca)
    except ssl.SSLError as error:
        raise UsageError(f"{tls.ca} holds no certificate of an authority, in PEM") from error
    try:
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key, password="")  # else it asks at the terminal
    except ssl.SSLError as error:
        raise UsageError(
            f"{tls.cert} and {tls.key} hold no certificate and its key, in PEM and without a password"
        ) from error


def _open(address: EngineAddress, acks: int) -> Log:
    """Their packages take a while to import, and only one is needed."""
    if address.kind == ETCD:
        from rallypoint.store.replica.engines.etcd import EtcdLog

        return EtcdLog(address)
    from rallypoint.store.replica.engines.redis import RedisLog

    return RedisLog(address, acks=acks)
