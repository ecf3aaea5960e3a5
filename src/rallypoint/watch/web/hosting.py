"""The page in a process of its own, hosted as the store server is: it ends with its parent."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final, NamedTuple

from rallypoint.errors import UsageError
from rallypoint.store.machine.addresses import format_address, is_loopback, plain_host
from rallypoint.store.server.guard.other_users import access_of_environment, looks_at_users
from rallypoint.store.server.process.binding import listen
from rallypoint.store.server.process.hosting import HostedServer, ServerKind, host_on
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

    Raises UsageError if a library is missing or the token is weak, PortInUseError, BindError, or
    ServerStartError with the process's own words.
    """
    place = open_place(host, port, token)
    kind = ServerKind("web page", "rallypoint.watch.web.serving")
    order: dict[str, object] = {"store": list(store), "token": place.token}
    server = host_on(place.listeners, kind, order)
    return HostedPage(server, place.url)


class Place(NamedTuple):
    """Where the page is served, and what it asks for."""

    listeners: list[socket.socket]
    token: str
    """Empty: the page asks for none, and serves trusted users of this machine."""
    url: str
    """The address for a browser; with the token if that was made here, as nobody else knows it."""


def open_place(host: str, port: int, token: str) -> Place:
    """Listen for the page, and make a token if it needs one and none is given; raises as `host_web` does."""
    need_extra()
    check_token(token)
    listeners = listen(host, port)
    url = _url_of(host, listeners)
    if token or (on_loopback(listeners) and (looks_at_users() or access_of_environment().insecure)):
        return Place(listeners, token, url)
    token = secrets.token_urlsafe()
    return Place(listeners, token, f"{url}?token={token}")


def on_loopback(listeners: Sequence[socket.socket]) -> bool:
    """Whether only this machine reaches these sockets."""
    return all(is_loopback(plain_host(each.getsockname())) for each in listeners)


def _url_of(host: str, listeners: Sequence[socket.socket]) -> str:
    """The address for a browser: where it listens everywhere, by this machine's name."""
    address, port = listeners[0].getsockname()[:2]
    name = socket.gethostname() if address in ("::", "0.0.0.0") else host.strip("[]")
    return f"http://{format_address(name, port)}/"
