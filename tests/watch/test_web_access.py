"""Who may see the page."""

from __future__ import annotations

import pytest

from rallypoint.errors import UsageError
from rallypoint.watch.web.hosting import Access, AccessVerdict, check_token, is_loopback_name

pytestmark = pytest.mark.windows

TOKEN = "correct-horse-battery"
LOCAL = Access()
GUARDED = Access(TOKEN, loopback=False, cookie="here")


LOOPBACK = ("localhost", "localhost:80", "LOCALHOST.", "page.localhost:8080", "127.0.0.1:8080", "127.3.2.1")
ELSEWHERE = (
    *("", "evil.example", "evil.example:8080", "10.0.0.1", "0.0.0.0:80", "localhost.evil.example"),
    *("127.0.0.1.evil.example", "[fd00::1]:80", "notlocalhost", "[", "]", "[::1].evil.example"),
)


def test_names_of_loopback() -> None:
    assert [name for name in (*LOOPBACK, "[::1]", "[::1]:8080") if not is_loopback_name(name)] == []
    assert [name for name in ELSEWHERE if is_loopback_name(name)] == []


@pytest.mark.parametrize("access", [LOCAL, Access(TOKEN, loopback=True)])
def test_a_strange_name_is_refused_before_all_else(access: Access) -> None:
    """As a page elsewhere asks for whose name was made to lead here."""
    headers = {"host": "evil.example", "authorization": f"Bearer {TOKEN}"}
    assert access.judge(headers, {}, TOKEN, is_trusted=True) is AccessVerdict.STRANGE_NAME


def test_on_loopback_without_a_token_trusted_users_may() -> None:
    headers = {"host": "localhost:8080"}
    assert LOCAL.judge(headers, {}, None, is_trusted=True) is AccessVerdict.ALLOW
    assert LOCAL.judge(headers, {}, None, is_trusted=False) is AccessVerdict.OTHER_USER
    assert LOCAL.judge(headers, {}, "", is_trusted=False) is AccessVerdict.OTHER_USER


BEARINGS: list[tuple[str, dict[str, str], str | None, AccessVerdict]] = [
    # the header, the cookies, the token in the address
    ("", {}, None, AccessVerdict.REFUSE),
    (f"Bearer {TOKEN}", {}, None, AccessVerdict.ALLOW),
    (f"bearer   {TOKEN} ", {}, None, AccessVerdict.ALLOW),
    (f"Bearer {TOKEN}x", {}, None, AccessVerdict.REFUSE),
    (TOKEN, {}, None, AccessVerdict.REFUSE),
    (f"Basic {TOKEN}", {}, None, AccessVerdict.REFUSE),
    ("", {}, TOKEN, AccessVerdict.ADMIT),
    ("", {}, "", AccessVerdict.REFUSE),
    ("", {}, "wörse", AccessVerdict.REFUSE),
    ("", {}, "\udc80", AccessVerdict.REFUSE),
    ("", {"here": GUARDED.pass_}, None, AccessVerdict.ALLOW),
    ("", {"there": GUARDED.pass_}, None, AccessVerdict.REFUSE),
    ("", {"here": TOKEN}, None, AccessVerdict.REFUSE),
    ("", {"here": Access("another-token-of-old").pass_}, None, AccessVerdict.REFUSE),
    ("Bearer wrong", {"here": GUARDED.pass_}, None, AccessVerdict.REFUSE),
    ("", {"here": GUARDED.pass_}, "wrong", AccessVerdict.REFUSE),
]


def test_with_a_token_every_request_needs_it() -> None:
    for header, cookies, token, verdict in BEARINGS:
        for is_trusted in (True, False):
            found = GUARDED.judge({"authorization": header}, cookies, token, is_trusted)
            assert found is verdict, (header, cookies, token)


def test_the_cookie_does_not_tell_the_token() -> None:
    assert TOKEN not in GUARDED.pass_


def test_a_token_that_is_none() -> None:
    for good in ("", TOKEN):
        check_token(good)
    for token in ("short", "fifteen-letters", "with a space in it", "\N{SNOWMAN}" * 20, "x\n" * 9):
        with pytest.raises(UsageError) as found:
            check_token(token)
        assert token not in str(found.value)
