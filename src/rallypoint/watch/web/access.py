"""Which requests may see the page: those of users who may use the store or, if it has a token, those with it.

On loopback, the page has no token unless one is given: a request is answered if its connection belongs to the
user who serves the page, to root or to another trusted user. Where the page listens elsewhere, or the system
does not tell users apart, it always has a token, a fresh one if none is given.

A token comes in the header `Authorization: Bearer …`, or once as `?token=…`, which a browser exchanges for a
cookie. The cookie is made from the token, and is not the token. Where only loopback is served, the request
has to name a host of loopback. Otherwise another site could let its own name lead to this machine, and its
page could read this one.

Pure.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from rallypoint.errors import UsageError
from rallypoint.store.machine.addresses import is_loopback

LEAST_CHARACTERS: Final = 16
_HOST: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::[0-9]*)?")
TOKEN_VARIABLE: Final = "RALLYPOINT_WEB_TOKEN"  # noqa: S105 its name, and not its value
_HINT: Final = "python -c 'import secrets; print(secrets.token_urlsafe())' prints one"


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
            return AccessVerdict.ALLOW if _equal(given.strip(), self.token) else AccessVerdict.REFUSE
        return (
            AccessVerdict.ALLOW if _equal(cookies.get(self.cookie, ""), self.pass_) else AccessVerdict.REFUSE
        )


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
