"""The page in a process of its own, hosted as the store server is: it ends with its parent."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final, NamedTuple

from rallypoint.errors import UsageError
from rallypoint.server.loops.backend import Choice
from rallypoint.server.process.binding import addresses_for, listen
from rallypoint.server.process.hosting import HostedServer, host_on
from rallypoint.server.process.processes import ServerKind
from rallypoint.stores.client.connecting import format_address
from rallypoint.watch.web.access import check_token

_MODULES: Final = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
}


def need_extra() -> None:
    """UsageError, with the command that installs them, if one is missing."""
    missing = [package for module, package in _MODULES.items() if find_spec(module) is None]
    if missing:
        raise UsageError(
            f"the web page needs {', '.join(missing)}: not installed",
            hint="pip install '.[web]' in a clone of Rallypoint",
        )


class HostedPage(NamedTuple):
    """The process that serves the page, and the address of the page."""

    server: HostedServer
    url: str


def host_web(store: tuple[str, int], host: str = "localhost", port: int = 0, token: str = "") -> HostedPage:
    """Start a process that serves the page about a store.

    Raises UsageError if a library or a token is missing, PortInUseError, BindError, or ServerStartError with
    the process's own words.
    """
    listeners = open_listeners(host, port, token)
    url = url_of(host, listeners)
    kind = ServerKind("web page", "rallypoint.watch.web.serving")
    order: dict[str, object] = {"store": list(store), "token": token}
    return HostedPage(host_on(listeners, kind, order, backend=Choice.AUTO), url)


def open_listeners(host: str, port: int, token: str) -> list[socket.socket]:
    """Sockets for the page, where it may be served; raises as `host_web` does."""
    need_extra()
    addresses = addresses_for(host).addresses
    loopback = all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses)
    check_token(token, loopback=loopback, place=host)
    return listen(host, port)


def url_of(host: str, listeners: Sequence[socket.socket]) -> str:
    """The address for a browser: where it listens everywhere, by this machine's name."""
    address, port = listeners[0].getsockname()[:2]
    name = socket.gethostname() if address in ("::", "0.0.0.0") else host.strip("[]")
    return f"http://{format_address(name, port)}/"
