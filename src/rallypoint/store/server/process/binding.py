"""Where a server listens: only where its host name says. torch's own server binds every interface always.

`localhost` and loopback addresses bind loopback alone, an address of this machine that address. A name that
is not of this machine (a NAT's, a service's) binds every interface, with a warning. So does a name of this
machine that its hosts file maps to loopback, since others reach it elsewhere.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from rallypoint.errors import BindError, PortInUseError, UsageError
from rallypoint.store.machine.addresses import (
    addresses_of,
    family_of,
    format_address,
    is_everywhere,
    is_loopback,
    is_numeric,
    is_own_address,
    reason_of,
)
from rallypoint.store.machine.system import accept_backlog, holder_of

logger = logging.getLogger("rallypoint.server")

BACKLOG = 65_535
"""How many clients may wait to be accepted; the system limits it for each socket."""

_MOST_SOCKETS = 16
_PORT_TRIES = 16


class BindAddresses(NamedTuple):
    """Addresses to bind, and a warning about that choice (empty if there is none)."""

    addresses: tuple[str, ...]
    warning: str = ""


ANY_PORT: Final = range(1)
"""A free port that the system chooses."""


def listen_within(host: str, ports: range, parts: int = 1) -> list[socket.socket]:
    """As `listen`, on the first free one of several ports; BindError if there is none."""
    if len(ports) == 1:
        return listen(host, ports[0], parts)
    addresses = _choose(host, ports[0])
    for port in ports:
        with suppress(PortInUseError):
            return _listen_all(addresses, port, parts, asks_holder=False)
    raise BindError(
        f"all ports from {ports[0]} to {ports[-1]} are in use on this machine",
        hint="each job on it needs one: widen the range (--port-range, RALLYPOINT_PORT_RANGE)",
    )


def listen(host: str, port: int, parts: int = 1) -> list[socket.socket]:
    """Sockets that listen on `port` (0: a free one, the same for all) of the addresses of `host`.

    `parts`: how many processes will share them (see `share_out`). Raises PortInUseError, which names the
    process that holds the port if the system tells, BindError or UsageError.
    """
    addresses = _choose(host, port)
    if port == 0 and len(addresses) > 1:  # what is free on the first address may be taken on the second
        for _ in range(_PORT_TRIES - 1):
            with suppress(PortInUseError):
                return _listen_all(addresses, port, parts, asks_holder=False)
    return _listen_all(addresses, port, parts)


def share_out(listeners: Sequence[socket.socket], parts: int) -> list[list[socket.socket]]:
    """The sockets that each of several processes accepts from.

    On Linux each has its own, and the system spreads the clients over them evenly. Elsewhere all accept from
    the same ones, and a free process takes the next client.
    """
    if sys.platform != "linux" or len(listeners) % parts:
        return [list(listeners)] * parts
    return [list(listeners[number::parts]) for number in range(parts)]


def reserve(host: str, port: int) -> list[socket.socket]:
    """Sockets bound as those of `listen`, but not listening yet: a connect is refused."""
    addresses = _choose(host, port)
    first = reserve_again([(addresses[0], port)])
    return first + reserve_again((each, first[0].getsockname()[1]) for each in addresses[1:])


def reserve_again(places: Iterable[Any]) -> list[socket.socket]:
    """As `reserve`, at the addresses of sockets that are closed by now."""
    sockets: list[socket.socket] = []
    for address, port, *_ in places:
        try:
            sockets.append(_open(address, port, listens=False))
        except OSError as error:
            raise _bind_failure(address, port, error) from error
    return sockets


def _choose(host: str, port: int) -> tuple[str, ...]:
    """The addresses to bind. A surprising choice is logged; UsageError for what is no host or port."""
    if not 0 <= port <= 65_535:
        raise UsageError(f"port {port} does not exist", hint="ports go from 0 (any free one) to 65535")
    addresses, warning = addresses_for(host)
    if warning:
        logger.warning("%s", warning)
    return addresses


def try_port(host: str, port: int) -> None:
    """Raise the errors of `listen` that show when binding. Nobody can connect meanwhile."""
    for address in addresses_for(host).addresses:
        reserve_again([(address, port)])[0].close()


def adopt(fd: int) -> socket.socket:
    """Listen on a socket that the caller has bound, and passes as a file descriptor."""
    try:
        listener = socket.socket(fileno=fd)
    except (OSError, ValueError) as error:
        raise _not_listening(fd, error) from error
    try:
        if listener.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError(errno.EAFNOSUPPORT, "it is no internet socket")
        if listener.getsockname()[1] == 0:
            # The system would choose a port, which nobody could know.
            raise OSError(errno.EINVAL, "it is not bound to a port")
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _not_listening(fd, error) from error
    return listener


def _not_listening(fd: int, error: OSError | ValueError) -> BindError:
    reason = error.strerror if isinstance(error, OSError) else error
    return BindError(
        f"master_listen_fd {fd} cannot be listened on: {reason}",
        hint="pass the descriptor of a bound stream socket, and leave it to the store from then on",
    )


def addresses_for(host: str) -> BindAddresses:
    """The addresses that a server for a host name binds."""
    if is_everywhere(host):
        return BindAddresses((_everything(),))
    if "/" in host or (":" in host and not is_numeric(host)):
        raise UsageError(f"{host!r} is no host name", hint="give the host and the port each by itself")
    if host.lower().rstrip(".") in ("localhost", "localhost.localdomain"):
        return BindAddresses(tuple(filter(is_own_address, ("127.0.0.1", "::1"))) or ("127.0.0.1",))
    addresses = addresses_of(host)
    ours = tuple(filter(is_own_address, addresses))
    if ours and not is_numeric(host) and all(map(is_loopback, ours)):
        why = f"{host} is a loopback address here, but not on other machines"
    elif ours:
        return BindAddresses(ours)
    else:
        known = ", ".join(addresses) or "nothing"
        why = f"{host} (which resolves to {known}) is not an address of this machine"
    return BindAddresses((_everything(),), f"{why}: listening on every interface")


def resolves(host: str) -> bool:
    """Whether a host name or address is known here."""
    return is_everywhere(host) or bool(addresses_of(host))


def describe(listeners: Iterable[socket.socket]) -> str:
    """`HOST:PORT` of listening sockets, each once."""
    return ", ".join(dict.fromkeys(format_address(*each.getsockname()[:2]) for each in listeners))


def reachable_at(listener: socket.socket) -> tuple[str, int]:
    """Host and port at which this machine itself reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    if host == "::" and not listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        return "127.0.0.1", port  # both families; ::1 may be switched off
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def _listen_all(
    addresses: Iterable[str], port: int, parts: int, *, asks_holder: bool = True
) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    try:
        for address in addresses:
            listeners += _listen_on(address, port, parts, asks_holder)
            port = listeners[0].getsockname()[1]
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen_on(address: str, port: int, parts: int, asks_holder: bool) -> list[socket.socket]:
    """Sockets that listen on one address: several, if the system cuts down the backlog of each.

    The first must get the port alone, so that a port in use is noticed, also if others share it.
    """
    try:
        listeners = [_open(address, port)]
    except OSError as error:
        raise _bind_failure(address, port, error, asks_holder=asks_holder) from error
    try:
        if sys.platform == "linux":
            listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for _ in range(_sockets_for(parts) - 1):
            listeners.append(_open(address, listeners[0].getsockname()[1], shared=True))
    except OSError:  # a system that shares otherwise; fewer clients can wait then
        pass
    return listeners


def _open(address: str, port: int, *, shared: bool = False, listens: bool = True) -> socket.socket:
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        if sys.platform == "win32":
            # There, SO_REUSEADDR would let two servers share the port.
            listener.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_EXCLUSIVEADDRUSE", ~4), 1)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared and sys.platform == "linux":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address != "::")
        listener.bind((address, port))
        if listens:
            listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _sockets_for(parts: int) -> int:
    """How many sockets it takes for `BACKLOG` clients to wait, a multiple of `parts`; 1 except on Linux.

    A client that does not fit tries again a second later, so in a storm a short backlog costs seconds.
    """
    most = accept_backlog()
    if most is None:
        return 1
    return -(-min(-(-BACKLOG // max(most, 1)), _MOST_SOCKETS) // parts) * parts


def _bind_failure(
    address: str, port: int, error: OSError, *, asks_holder: bool = True
) -> PortInUseError | BindError:
    """`asks_holder`: look up which process has the port, which may take seconds."""
    # On Windows, a port that another holds for itself alone is forbidden.
    if error.errno == errno.EADDRINUSE or (sys.platform == "win32" and error.errno == errno.EACCES):
        holder = holder_of(port) if asks_holder else None
        hint = "end that process, choose another port, or take port 0 for a free one"
        if sys.platform == "win32" and holder is None:
            hint += "; Windows keeps some ports to itself: netsh interface ipv4 show excludedportrange tcp"
        return PortInUseError(
            f"port {port} on {address} is in use" + (f" by {holder}" if holder else ""),
            hint=hint,
            holder=holder,
        )
    hint = "ports below 1024 are reserved; choose a higher one" if error.errno == errno.EACCES else ""
    reason = error.strerror or reason_of(error.errno or 0)
    return BindError(f"cannot listen on port {port} of {address}: {reason}", hint=hint)


def _everything() -> str:
    """All interfaces: of both families in one socket where the system has IPv6."""
    return "::" if socket.has_dualstack_ipv6() and is_own_address("::") else "0.0.0.0"
