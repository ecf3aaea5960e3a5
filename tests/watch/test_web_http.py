"""The page over HTTP: what is answered, to whom, and by which process."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import psutil
import pytest
from starlette.types import Message

from processes import end
from rallypoint.errors import ConnectError, UsageError
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.store.server.guard.other_users import INSECURE_VARIABLE
from rallypoint.watch.web import app as web_app
from rallypoint.watch.web import hosting
from rallypoint.watch.web import poller as watching
from rallypoint.watch.web import serving as web_serving
from rallypoint.watch.web.app import EventStream
from rallypoint.watch.web.hosting import (
    Access,
    AccessVerdict,
    HostedPage,
    check_token,
    host_web,
    is_loopback_name,
)
from rallypoint.watch.web.poller import StoreWatch
from raw import until
from threads import serving_in_a_thread
from web_stores import ScriptedStore, job, page_about

pytestmark = pytest.mark.windows

SECONDS = 30.0
TOKEN = "correct-horse-battery"
EIGHT = {"node-a": 4, "node-b": 4}


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.body)
        return content


def ask(url: str, path: str = "", headers: Mapping[str, str] | None = None, method: str = "GET") -> Answer:
    """One request; what it is answered."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=SECONDS)
    try:
        connection.request(method, parts.path + path, headers=dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


@contextmanager
def viewing(url: str) -> Iterator[http.client.HTTPResponse]:
    """Look on, as a browser does."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)
    try:
        connection.request("GET", "/events")
        yield connection.getresponse()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def store() -> ScriptedStore:
    values = {"plain": b"hello", "binary": bytes(range(256)) * 40, "odd \udcff": b"x", "empty": b""}
    return ScriptedStore(job(EIGHT, late=[7], waits={0: ("key", 41.0)}), values)


@pytest.fixture(scope="module")
def url(store: ScriptedStore) -> Iterator[str]:
    with page_about(store) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(store: ScriptedStore) -> Iterator[str]:
    with page_about(store, token=TOKEN, loopback=False) as found:
        yield found


# Answers


def test_every_answer_forbids_what_the_page_does_not_need(url: str) -> None:
    for path in ("", "assets/main.js", "metrics", "healthz", "api/keys", "nowhere"):
        headers = ask(url, path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


def test_the_page_names_only_files_that_there_are(url: str) -> None:
    page = ask(url).body.decode()
    names = {part.split('"')[0] for part in page.split('"assets/')[1:]}
    assert names == {
        "icon.svg",
        "main.js",
        *(f"{name}.css" for name in ("colours", "base", "panels", "page")),
    }
    for name in names:
        assert ask(url, f"assets/{name}").status == 200
    assert "<style" not in page
    assert "style=" not in page
    assert "//" not in page.replace("<!doctype", "")


def test_nothing_else_is_served(url: str) -> None:
    for path in ("assets/no.js", "assets/../app.py", "assets/%2e%2e%2fapp.py", "nowhere"):
        assert ask(url, path).status == 404, path


def test_it_only_reads(url: str) -> None:
    for path in ("", "events", "metrics", "healthz", "api/keys", "api/value", "api/ranks/0"):
        for method in ("POST", "PUT", "DELETE"):
            assert ask(url, path, method=method).status == 405, (method, path)


def test_a_rank_keys_and_their_values(url: str) -> None:
    told = ask(url, "api/ranks/0").json
    assert (told["rank"], told["host"], told["state"], told["waits"]) == (0, "node-a", "waiting", ["key"])
    assert ask(url, "api/ranks/7").json["state"] == "late"
    assert ask(url, "api/ranks/8").status == 404
    told = ask(url, "api/keys?search=in").json
    assert [each["key"] for each in told["keys"]] == ["binary", "plain"]
    assert (told["found"], told["count"]) == (2, 4)
    value = ask(url, "api/value?key=" + quote('"binary"')).json
    assert value["size"] == 10_240
    assert value["data"] == (bytes(range(256)) * 16).hex()
    assert ask(url, "api/value?key=" + quote('"empty"')).json["data"] == ""
    (odd,) = ask(url, "api/keys?search=odd").json["keys"]
    assert odd["key"] == "odd \udcff", "a key that is no text"
    assert ask(url, "api/value?key=" + quote(json.dumps(odd["key"]))).json["data"] == "78"
    for key, status in {"": 400, "plain": 400, "7": 400, '"nothing"': 404}.items():
        assert ask(url, "api/value?key=" + quote(key)).status == status, key


def test_health_and_metrics_of_a_store_that_answers_and_of_one_that_does_not(url: str) -> None:
    health = ask(url, "healthz")
    assert (health.status, health.json) == (200, {"status": "ok"})
    metrics = ask(url, "metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"\nrallypoint_ranks_missing 1.0\n" in metrics.body
    gone = ScriptedStore(job(EIGHT), failure=ConnectError("cannot reach the store", hint="is it up?"))
    with page_about(gone) as away:
        health = ask(away, "healthz")
        assert (health.status, health.json) == (503, {"status": "unavailable"})
        assert ask(away, "metrics").body.endswith(b"\nrallypoint_up 0.0\n")
        assert ask(away, "api/keys").status == ask(away, "api/ranks/0").status == 503


# Events


def test_events_come_as_they_happen(url: str) -> None:
    with viewing(url) as response:
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        first = [response.readline() for _ in range(4)]
        assert first[0] == b"event: whole\n"
        assert json.loads(first[2].removeprefix(b"data: "))["counts"]["late"] == 1
        assert response.readline() == b"event: change\n"


VIEW = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
VIEWERS = 64
"""How many may look from one address."""


def test_200_viewers_of_one_address_keep_nobody_from_the_page() -> None:
    """All at once: none of them is being answered yet when the next one asks."""
    store = ScriptedStore(job({"node-a": 2}))
    with page_about(store) as url:
        with sending(url, *[VIEW] * 200) as viewers:
            for path in ("healthz", "", "assets/main.js", "api/keys", "metrics"):
                assert ask(url, path).status == 200, path
            assert 0 < sum(is_answered(each) for each in viewers) <= VIEWERS
        until(lambda: is_shown(url), "places are free again")
        with sending(url, *[VIEW] * VIEWERS) as viewers:
            assert all(map(is_answered, viewers))
            refused = ask(url, "events")
            assert (refused.status, b"close a page somewhere" in refused.body) == (503, True)


def is_answered(connection: socket.socket) -> bool:
    try:
        return connection.recv(12) == b"HTTP/1.1 200"
    except ConnectionResetError:
        return False


def test_questions_that_wait_for_the_store_keep_nobody_from_its_health() -> None:
    class SlowStore(ScriptedStore):
        def look(self, question: Question) -> Snapshot:
            if question.keys:
                assert go_on.wait(SECONDS)
            return super().look(question)

    go_on = threading.Event()
    store = SlowStore(job({"node-a": 2}))
    keys = b"GET /api/keys HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with page_about(store) as url, sending(url, *[keys] * 40) as waiting:
        try:
            until(lambda: len(select.select(waiting, [], [], 0)[0]) == 8, "those without a place are refused")
            assert ask(url, "healthz").json == {"status": "ok"}
            assert ask(url, "api/keys").status == 503
            with viewing(url) as response:
                assert response.readline() == b"event: whole\n"
        finally:
            go_on.set()
        assert sum(is_answered(each) for each in waiting) == 32


def is_shown(url: str) -> bool:
    with viewing(url) as response:
        return response.status == 200


def test_who_takes_nothing_any_more_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is on its way is all that is kept for somebody who does not read."""
    takes = 2
    monkeypatch.setattr(watching, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(web_app, "_TAKE_SECONDS", 0.05)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) > 1 + takes:
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> StoreWatch:
        watch = StoreWatch(ScriptedStore(job(EIGHT)).look, "")
        await asyncio.wait_for(EventStream(watch)({"type": "http"}, receive, send), SECONDS)
        return watch

    assert asyncio.run(work())._viewers == 0
    assert len(sent) == 2 + takes
    assert "has taken nothing for 0.05 s" in caplog.text


# Too many, and too slow


HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


@contextmanager
def sending(url: str, *requests: bytes) -> Iterator[list[socket.socket]]:
    """Connections on which these bytes were sent."""
    sockets = [socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), SECONDS) for _ in requests]
    try:
        for each, data in zip(sockets, requests, strict=True):
            with suppress(OSError):  # the page may have closed it already
                each.sendall(data)
        yield sockets
    finally:
        for each in sockets:
            each.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the page has ended the connection; if it has sent something, that is read instead."""
    try:
        return connection.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_requests_that_are_sent_in_part_keep_nobody_from_the_page(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_serving, "MOST_PER_ADDRESS", 8)
    with viewing(url) as response, sending(url, *[HALF] * 20) as halves:
        assert ask(url, "healthz").status == 200
        for each in halves:
            each.setblocking(False)
        until(lambda: sum(map(is_closed, halves)) >= 12, "all but the last few are closed")
        assert response.readline() == b"event: whole\n"


def test_a_request_has_to_come_in_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a connection, and those after it."""
    monkeypatch.setattr(web_serving, "_REQUEST_SECONDS", 0.1)
    whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with viewing(url) as response, sending(url, b"", HALF, whole + HALF) as (silent, half, second):
        assert is_closed(silent)
        assert is_closed(half)
        assert second.recv(12) == b"HTTP/1.1 200"
        until(lambda: is_closed(second), "the page closes it")
        assert response.readline() == b"event: whole\n"


@dataclass
class Guest:
    address: str
    since: float
    is_waiting: bool = True


def test_who_has_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_serving, "MOST_PER_ADDRESS", 2)
    monkeypatch.setattr(web_serving, "MOST_CONNECTIONS", 3)
    old, busy, new = Guest("a", 1.0), Guest("b", 2.0, is_waiting=False), Guest("b", 3.0)
    leaves: Any = web_serving.one_too_many
    assert leaves([old, busy, new], new) is None
    third = Guest("b", 4.0)
    assert leaves([old, busy, new, third], third) is new, "of its own address"
    other = Guest("c", 5.0)
    assert leaves([new, old, busy, other], other) is old, "of all"
    one, two = Guest("b", 1.0, is_waiting=False), Guest("b", 6.0, is_waiting=False)
    assert leaves([one, busy, two], two) is two, "nobody can be asked to go for it"


# Who may see it


def test_a_strange_name_is_refused(url: str) -> None:
    assert ask(url, headers={"Host": "evil.example"}).status == 403
    assert ask(url, "metrics", {"Host": "evil.example:80"}).status == 403
    assert ask(url, "metrics", {"Host": "localhost:1"}).status == 200


def test_without_the_token_nothing_is_told(guarded: str) -> None:
    cookie = f"rallypoint_{urlsplit(guarded).port}=x"
    bearings: list[dict[str, str]] = [{}, {"Authorization": "Bearer wrong"}, {"Cookie": cookie}]
    for path in ("", "assets/page.css", "events", "metrics", "healthz/", "api/keys"):
        for headers in bearings:
            answer = ask(guarded, path, headers)
            assert answer.status == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert b"rallypoint_" not in answer.body
        assert ask(guarded, f"{path}?token=wrong").status == 401


def test_a_token_in_the_address_becomes_a_cookie(guarded: str) -> None:
    answer = ask(guarded, f"api/keys?search=a%26b&token={TOKEN}")
    assert answer.status == 303
    assert answer.headers["location"] == "/api/keys?search=a%26b"
    cookie, *traits = answer.headers["set-cookie"].split("; ")
    assert {each.lower() for each in traits} >= {"httponly", "samesite=strict", "path=/"}
    assert TOKEN not in cookie
    assert ask(guarded, "api/keys", {"Cookie": cookie}).status == 200


def test_a_token_sends_nobody_elsewhere(guarded: str) -> None:
    for path in ("/evil.example/", "//evil.example/", "%2F%2Fevil.example"):
        location = ask(guarded, f"{path}?token={TOKEN}").headers["location"]
        assert location.startswith("/")
        assert not location.startswith(("//", "/\\"))


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


# Processes


@pytest.fixture(scope="module")
def real_store() -> Iterator[tuple[str, int]]:
    with serving_in_a_thread(0) as port:
        yield "127.0.0.1", port


@contextmanager
def hosted(store: tuple[str, int], **options: object) -> Iterator[HostedPage]:
    page = host_web(store, **options)  # type: ignore[arg-type]
    try:
        yield page
    finally:
        page.server.release()


def test_a_page_for_other_machines_asks_for_a_token(real_store: tuple[str, int]) -> None:
    with hosted(real_store, host="0.0.0.0", token=TOKEN) as page:
        local = f"http://127.0.0.1:{urlsplit(page.url).port}/"
        assert TOKEN not in page.url
        assert ask(local, "healthz").json == {"status": "ok"}
        assert ask(local, "metrics").status == 401
        named = {"Authorization": f"Bearer {TOKEN}", "Host": "the-name-of-this-machine"}
        assert ask(local, "metrics", named).status == 200
        process = psutil.Process(page.server.pid)
        assert TOKEN not in " ".join(process.cmdline())
    assert not process.is_running()
    with hosted(real_store, host="0.0.0.0") as page, hosted(real_store, host="0.0.0.0") as other:
        address, tokens = urlsplit(page.url), [each.url.partition("?token=")[2] for each in (page, other)]
        assert len(set(tokens)) == 2, "each has a fresh one, where none is given"
        assert all(len(each) >= 43 for each in tokens)
        local = f"http://127.0.0.1:{address.port}/"
        assert ask(local, f"?token={tokens[1]}").status == 401
        cookie = ask(local, f"?{address.query}").headers["set-cookie"].partition(";")[0]
        assert ask(local, headers={"Cookie": cookie}).status == 200


def test_where_users_cannot_be_told_apart_the_address_has_a_token(
    real_store: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "checks_users", lambda: False)
    monkeypatch.delenv(INSECURE_VARIABLE, raising=False)
    with hosted(real_store) as page:
        assert "?token=" in page.url
        local = page.url.partition("?")[0]
        assert ask(local, "api/keys").status == 401
    monkeypatch.setenv(INSECURE_VARIABLE, "1")
    with hosted(real_store) as page:
        assert ask(page.url, "api/keys").status == 200


def test_without_the_extra_it_says_what_to_install(
    real_store: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(UsageError, match="needs uvicorn: not installed") as found:
        host_web(real_store)
    assert found.value.hint == "pip install '.[web]' in a clone of Rallypoint"


PARENT = """
import sys
from rallypoint.watch.web.hosting import host_web
page = host_web((sys.argv[1], int(sys.argv[2])))
print(page.url, page.server.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_it_ends_with_its_parent_however_that_ends(real_store: tuple[str, int]) -> None:
    command = [sys.executable, "-c", PARENT, real_store[0], str(real_store[1])]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        url, pid = parent.stdout.readline().split()
        page = psutil.Process(int(pid))
        with viewing(url) as response:
            assert response.readline() == b"event: whole\n"
            parent.send_signal(signal.SIGKILL)
            page.wait(SECONDS)
    finally:
        end(parent)


# The command


@contextmanager
def web(*options: str, environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "web", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
    )
    try:
        yield process
    finally:
        end(process)


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_the_command_ends_in_good_order_also_if_somebody_looks(real_store: tuple[str, int]) -> None:
    with web("--store", f"{real_store[0]}:{real_store[1]}") as page:
        assert page.stdout is not None
        line = page.stdout.readline()
        assert line.startswith("rallypoint: page on http://localhost:")
        with viewing(line.split()[-1]) as response:
            assert response.readline() == b"event: whole\n"
            page.send_signal(signal.SIGINT)
            rest, log = page.communicate(timeout=SECONDS)
    assert (page.returncode, rest, log) == (0, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_the_command_comes_up_without_a_store_and_ends_when_told() -> None:
    with socket.socket() as held:  # a port that refuses connections
        held.bind(("127.0.0.1", 0))
        with web("--store", f"127.0.0.1:{held.getsockname()[1]}", "--token", TOKEN) as page:
            assert page.stdout is not None
            url = page.stdout.readline().split()[-1]
            assert ask(url).status == 401
            assert ask(url, headers={"Authorization": f"Bearer {TOKEN}"}).status == 200
            page.terminate()
            page.communicate(timeout=SECONDS)
    assert page.returncode == 0
