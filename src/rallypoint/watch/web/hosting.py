"""The page's sockets and process, which ends with its parent; and which requests may see the page.

On loopback, the page has no token unless one is given: a request is answered if its connection belongs to the
user who serves the page, to root or to another trusted user. Where the page listens elsewhere, or the system
does not tell users apart, it always has a token, a fresh one if none is given; then requests need that.

A token comes in the header `Authorization: Bearer …`, or once as `?token=…`, which a browser exchanges for a
cookie. The cookie is made from the token, and is not the token. Where only loopback is served, the request
has to name a host of loopback. Otherwise another site could let its own name lead to this machine, and its
page could read this one.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Final, NamedTuple

from rallypoint.errors import UsageError
from rallypoint.store.machine.addresses import format_address, is_loopback, plain_host
from rallypoint.store.server.guard.other_users import access_of_environment, checks_users
from rallypoint.store.server.process.binding import listen
from rallypoint.store.server.process.hosting import HostedServer, ServerKind, host_on

LEAST_CHARACTERS: Final = 16
TOKEN_VARIABLE: Final = "RALLYPOINT_WEB_TOKEN"  # noqa: S105 its name, and not its value
_HOST: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::[0-9]*)?")
_HINT: Final = "python -c 'import secrets; print(secrets.token_urlsafe())' prints one"
_MODULES: Final = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
}


class AccessVerdict(Enum):
    """What becomes of a request."""

    ALLOW = "allow"
    ADMIT = "admit"
    """The token is in the address: set the cookie, and redirect to the address without the token."""
    REFUSE = "refuse"
    """The request has no token, or a wrong one."""
    OTHER_USER = "other user"
    """There is no token, and the request is not from a trusted user of this machine."""
    STRANGE_NAME = "strange name"
    """The request names a host that is not this machine."""


@dataclass(frozen=True)
class Access:
    """The rules for one page."""

    token: str = ""
    """Empty: trusted users of this machine need none, and others are refused."""
    loopback: bool = True
    """Whether only this machine reaches the page."""
    cookie: str = "rallypoint"
    """The name of the cookie. Pages on other ports of this machine need cookies with other names."""

    @property
    def pass_(self) -> str:
        """The value of the cookie."""
        return hmac.new(self.token.encode(), b"rallypoint web page", "sha256").hexdigest()

    def judge(
        self,
        headers: Mapping[str, str],
        cookies: Mapping[str, str],
        token: str | None,
        is_trusted: bool,
    ) -> AccessVerdict:
        """`token` is the one in the address; None: there is none. Names of headers are in small letters."""
        if self.loopback and not is_loopback_name(headers.get("host", "")):
            return AccessVerdict.STRANGE_NAME
        if not self.token:
            return AccessVerdict.ALLOW if is_trusted else AccessVerdict.OTHER_USER
        if token is not None:
            return AccessVerdict.ADMIT if _equal(token, self.token) else AccessVerdict.REFUSE
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            has_pass = _equal(given.strip(), self.token)
        else:
            has_pass = _equal(cookies.get(self.cookie, ""), self.pass_)
        return AccessVerdict.ALLOW if has_pass else AccessVerdict.REFUSE


def check_token(token: str) -> None:
    """UsageError for a token that is easily guessed, or that a header cannot carry."""
    if token and len(token) < LEAST_CHARACTERS:
        raise UsageError(f"a token of {len(token)} characters could be guessed", hint=_HINT)
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("a token has to be of plain letters, digits and signs", hint=_HINT)


def is_loopback_name(host: str) -> bool:
    """Whether the header `Host`, with a port or without, can only mean this machine."""
    match = _HOST.fullmatch(host)
    name = (match[1] or match[2]).lower().rstrip(".") if match else ""
    return name.endswith(".localhost") or is_loopback(name)


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


class Place(NamedTuple):
    """Where the page is served, and what it asks for."""

    listeners: list[socket.socket]
    token: str
    """Empty: the page asks for none, and serves trusted users of this machine."""
    url: str
    """The address for a browser; with the token if that was made here, as nobody else knows it."""


def open_place(host: str, port: int, token: str) -> Place:
    """Listen for the page, and make a token if it needs one and none is given; raises as `host_web` does."""
    missing = [package for module, package in _MODULES.items() if find_spec(module) is None]
    if missing:
        raise UsageError(
            f"the web page needs {', '.join(missing)}: not installed",
            hint="pip install '.[web]' in a clone of Rallypoint",
        )
    check_token(token)
    listeners = listen(host, port)
    address, port = listeners[0].getsockname()[:2]
    # Where it listens everywhere, by this machine's name.
    name = socket.gethostname() if address in ("::", "0.0.0.0") else host.strip("[]")
    url = f"http://{format_address(name, port)}/"
    if token or (_on_loopback(listeners) and (checks_users() or access_of_environment().insecure)):
        return Place(listeners, token, url)
    token = secrets.token_urlsafe()
    return Place(listeners, token, f"{url}?token={token}")


def access_to(listeners: Sequence[socket.socket], token: str) -> Access:
    """The rules for a page on these sockets."""
    return Access(token, _on_loopback(listeners), f"rallypoint_{listeners[0].getsockname()[1]}")


def _on_loopback(listeners: Sequence[socket.socket]) -> bool:
    """Whether only this machine reaches these sockets."""
    return all(is_loopback(plain_host(each.getsockname())) for each in listeners)


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
    return HostedPage(host_on(place.listeners, kind, order), place.url)
