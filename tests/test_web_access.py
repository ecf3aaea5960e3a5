"""Who may see the page."""

from __future__ import annotations

import pytest

from rallypoint.errors import UsageError
from rallypoint.watch.web.access import Access, AccessVerdict, Bearing, check_token, is_loopback_name

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
    bearing = Bearing("evil.example", authorization=f"Bearer {TOKEN}", token=TOKEN)
    assert access.judge(bearing) is AccessVerdict.STRANGE_NAME


def test_on_loopback_without_a_token_everybody_may() -> None:
    assert LOCAL.judge(Bearing("localhost:8080")) is AccessVerdict.ALLOW


BEARINGS = [
    (Bearing(), AccessVerdict.REFUSE),
    (Bearing(authorization=f"Bearer {TOKEN}"), AccessVerdict.ALLOW),
    (Bearing(authorization=f"bearer   {TOKEN} "), AccessVerdict.ALLOW),
    (Bearing(authorization=f"Bearer {TOKEN}x"), AccessVerdict.REFUSE),
    (Bearing(authorization=TOKEN), AccessVerdict.REFUSE),
    (Bearing(authorization=f"Basic {TOKEN}"), AccessVerdict.REFUSE),
    (Bearing(token=TOKEN), AccessVerdict.ADMIT),
    (Bearing(token=""), AccessVerdict.REFUSE),
    (Bearing(token="wörse"), AccessVerdict.REFUSE),
    (Bearing(token="\udc80"), AccessVerdict.REFUSE),
    (Bearing(cookies={"here": GUARDED.pass_}), AccessVerdict.ALLOW),
    (Bearing(cookies={"there": GUARDED.pass_}), AccessVerdict.REFUSE),
    (Bearing(cookies={"here": TOKEN}), AccessVerdict.REFUSE),
    (Bearing(cookies={"here": Access("another-token-of-old").pass_}), AccessVerdict.REFUSE),
    (Bearing(authorization="Bearer wrong", cookies={"here": GUARDED.pass_}), AccessVerdict.REFUSE),
    (Bearing(token="wrong", cookies={"here": GUARDED.pass_}), AccessVerdict.REFUSE),
]


def test_with_a_token_every_request_needs_it() -> None:
    for bearing, verdict in BEARINGS:
        assert GUARDED.judge(bearing) is verdict, bearing


def test_the_cookie_does_not_tell_the_token() -> None:
    assert TOKEN not in GUARDED.pass_


def test_where_others_reach_it_a_token_is_needed() -> None:
    check_token("", loopback=True, place="127.0.0.1")
    check_token(TOKEN, loopback=True, place="127.0.0.1")
    check_token(TOKEN, loopback=False, place="0.0.0.0")
    with pytest.raises(UsageError, match=r"on 0\.0\.0\.0, others could see the page") as found:
        check_token("", loopback=False, place="0.0.0.0")
    assert "RALLYPOINT_WEB_TOKEN" in found.value.hint


def test_a_token_that_is_none() -> None:
    for token in ("short", "fifteen-letters", "with a space in it", "\N{SNOWMAN}" * 20, "x\n" * 9):
        with pytest.raises(UsageError) as found:
            check_token(token, loopback=True, place="127.0.0.1")
        assert token not in str(found.value)
