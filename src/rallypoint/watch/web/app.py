"""The application: the addresses and their answers, and the check of each request.

Requests that take long to answer keep nobody from the page: `Room` admits fewer of them than there may be
connections.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rallypoint.errors import RallypointError
from rallypoint.store.machine.addresses import Address
from rallypoint.store.rollcall.question import Question
from rallypoint.store.server.guard.other_users import is_trusted_client
from rallypoint.watch.web import metrics
from rallypoint.watch.web.hosting import TOKEN_VARIABLE, Access, AccessVerdict
from rallypoint.watch.web.picture import Json, details
from rallypoint.watch.web.poller import StoreWatch

logger = logging.getLogger("rallypoint.web")

MOST_VIEWERS: Final = 128
_VIEWERS_PER_ADDRESS: Final = 64
_MOST_QUESTIONS: Final = 128
_QUESTIONS_PER_ADDRESS: Final = 32
"""Together they leave a quarter of the connections of an address, and half of all, to new requests."""
_TAKE_SECONDS: Final = 30.0
MOST_KEYS: Final = 200
VALUE_BYTES: Final = 4096
_LONGEST_TEXT: Final = 8192

_FOLDER: Final = Path(__file__).parent / "page"
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(watch: StoreWatch, access: Access) -> ASGIApp:
    """The page about the store that is watched, behind the rules of `access`."""
    paths = [path for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES]
    files = {path.name: Response(path.read_bytes(), media_type=_MEDIA_TYPES[path.suffix]) for path in paths}
    answers = _Answers(watch, files)
    routes = [
        Route("/", answers.page),
        Route("/assets/{name}", answers.file),
        Route("/events", EventStream(watch), methods=["GET"]),
        Route("/api/ranks/{rank:int}", answers.rank),
        Route("/api/keys", answers.keys),
        Route("/api/value", answers.value),
        Route("/metrics", answers.metrics),
        Route("/healthz", answers.health),
    ]
    return Guard(Starlette(routes=routes), access, bytes(files["refused.html"].body))


class EventStream:
    """The pictures of a watch."""

    def __init__(self, watch: StoreWatch) -> None:
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), _TAKE_SECONDS)

        events = self._watch.events()
        # A proxy in front is not to collect the events.
        response = StreamingResponse(
            events, headers={"X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        try:
            await response(scope, receive, send_in_time)
        except asyncio.TimeoutError:
            logger.warning("a viewer has taken nothing for %g s: disconnected", _TAKE_SECONDS)
        finally:
            await events.aclose()


class _Answers:
    """The answers beside the events."""

    def __init__(self, watch: StoreWatch, files: Mapping[str, Response]) -> None:
        self._watch = watch
        self._files = files

    async def page(self, _: Request) -> Response:
        return self._files["index.html"]

    async def file(self, request: Request) -> Response:
        return self._files.get(request.path_params["name"]) or PlainTextResponse(
            "there is no such file\n", 404
        )

    async def rank(self, request: Request) -> Response:
        """All that is known of one rank."""
        sight = await self._watch.sight()
        if sight.found is None:
            return _failure(sight.error)
        snapshot, roll = sight.found
        wanted = request.path_params["rank"]
        standing = roll.standing(wanted)
        if standing is None:
            return _json({"message": f"nothing is known of a rank {wanted}"}, 404)
        report = await self._watch.report(snapshot)
        return _json(details(standing, snapshot, report.ranks.get(wanted)))

    async def keys(self, request: Request) -> Response:
        """The first keys that hold a text."""
        search = request.query_params.get("search", "")[:_LONGEST_TEXT]
        try:
            found = await self._watch.ask(Question(keys=MOST_KEYS, search=search))
        except RallypointError as error:
            return _failure(error)
        keys = [
            {"key": each.key, "size": each.size, "queued": each.queued, "writer": each.writer_is}
            for each in found.keys
        ]
        return _json({"keys": keys, "found": found.keys_found, "count": found.key_count})

    async def value(self, request: Request) -> Response:
        """The beginning of a value. The key comes as JSON, as a key may be bytes that are no text."""
        try:
            key = json.loads(request.query_params.get("key", "")[:_LONGEST_TEXT])
        except ValueError:
            key = None
        if not isinstance(key, str):
            return _json({"message": "which key? It has to come as a text in JSON."}, 400)
        try:
            value = (await self._watch.ask(Question(value=key, value_bytes=VALUE_BYTES))).value
        except RallypointError as error:
            return _failure(error)
        if value is None:
            return _json({"message": "there is no such key any more"}, 404)
        return _json({"key": key, "size": value.size, "data": value.data})

    async def metrics(self, request: Request) -> Response:
        """The figures for Prometheus; if the store does not answer, only that."""
        sight = await self._watch.sight()
        content, media_type = metrics.encode(sight.found, request.headers.get("accept", ""))
        return Response(content, media_type=media_type)

    async def health(self, _: Request) -> Response:
        """Whether the store answers, and no more: everybody may ask."""
        is_up = (await self._watch.sight()).error is None
        return _json({"status": "ok" if is_up else "unavailable"}, 200 if is_up else 503)


def _json(content: Json, status: int = 200) -> Response:
    # In ASCII: a key may be bytes that are no text, which no other encoding can hold.
    return Response(json.dumps(content), status, media_type="application/json")


def _failure(error: RallypointError | None) -> Response:
    assert error is not None
    return _json({"status": "unavailable", "message": error.message, "hint": error.hint}, 503)


def _client(scope: Scope) -> Address:
    return scope["client"] or ("", 0)  # the connection may be closed already


_TOO_MANY: Final = PlainTextResponse("too many requests at a time: close a page somewhere\n", 503)
_OTHER_USER: Final = PlainTextResponse(
    "this page belongs to another user of this machine, who can start it with --allow-user, or with a token "
    f"({TOKEN_VARIABLE})\n",
    403,
)


class Room:
    """How many requests of a kind may be answered at a time, in total and for one address."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._taken: Counter[str] = Counter()

    @contextmanager
    def place(self, address: str) -> Iterator[bool]:
        """A place for one request until the block is left; False if none is free."""
        if self._taken.total() >= self._most or self._taken[address] >= self._most_per_address:
            yield False
            return
        self._taken[address] += 1
        try:
            yield True
        finally:
            self._taken[address] -= 1
            self._taken += Counter()  # drops addresses without requests


class Guard:
    """Lets only requests through that may see the page and find room, and puts safe headers on all answers.

    `/healthz` is always answered: it tells no more than whether the store does.
    """

    def __init__(self, app: ASGIApp, access: Access, refusal: bytes) -> None:
        self._app = app
        self._access = access
        self._refusal = refusal
        self._viewers = Room(MOST_VIEWERS, _VIEWERS_PER_ADDRESS)
        self._questions = Room(_MOST_QUESTIONS, _QUESTIONS_PER_ADDRESS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        is_public = scope["path"] == "/healthz"
        answer = self._app if is_public else self._turn_away(Request(scope)) or self._answer_if_room
        await answer(scope, receive, send_safely)

    async def _answer_if_room(self, scope: Scope, receive: Receive, send: Send) -> None:
        room = self._viewers if scope["path"] == "/events" else self._questions
        with room.place(_client(scope)[0]) as is_free:
            await (self._app if is_free else _TOO_MANY)(scope, receive, send)

    def _turn_away(self, request: Request) -> Response | None:
        """The answer to a request that is refused or redirected; None for a request that may see the page."""
        token = request.query_params.get("token")
        is_trusted = not self._access.token and is_trusted_client(
            _client(request.scope), request.scope["server"]
        )
        verdict = self._access.judge(request.headers, request.cookies, token, is_trusted)
        if verdict is AccessVerdict.STRANGE_NAME:
            return PlainTextResponse("this page is for this machine only: ask for localhost\n", 403)
        if verdict is AccessVerdict.OTHER_USER:
            return _OTHER_USER
        if verdict is AccessVerdict.REFUSE:
            return self._refuse(request)
        return self._admit(request) if verdict is AccessVerdict.ADMIT else None

    def _refuse(self, request: Request) -> Response:
        headers = {"WWW-Authenticate": "Bearer"}
        if "text/html" in request.headers.get("accept", ""):
            return Response(self._refusal, 401, headers, media_type="text/html; charset=utf-8")
        return PlainTextResponse("a token is needed, or this one is wrong\n", 401, headers)

    def _admit(self, request: Request) -> Response:
        rest = [pair for pair in parse_qsl(request.url.query, keep_blank_values=True) if pair[0] != "token"]
        # One slash in front: with two of them, it would name another machine.
        address = "/" + quote(request.url.path.lstrip("/"), safe="/%")
        response = RedirectResponse(address + ("?" + urlencode(rest) if rest else ""), 303)
        response.set_cookie(self._access.cookie, self._access.pass_, httponly=True, samesite="strict")
        return response
