"""Server-sent events to one viewer: one at a time is on its way, and who takes none for long is dropped."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from rallypoint.watch.web.poller import Watch

logger = logging.getLogger("rallypoint.web")

MOST_VIEWERS: Final = 64
_TAKE_SECONDS: Final = 30.0
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # a proxy in front is not to collect them
]


class EventStream:
    """The pictures of a watch."""

    def __init__(self, watch: Watch, most_viewers: int = MOST_VIEWERS) -> None:
        self._watch = watch
        self._most_viewers = most_viewers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._watch.viewers >= self._most_viewers:
            text = f"{self._most_viewers} look already: close a page somewhere\n"
            await PlainTextResponse(text, 503)(scope, receive, send)
            return
        tasks = [asyncio.create_task(self._send(send)), asyncio.create_task(_await_leave(receive))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        events = self._watch.events()
        try:
            async for event in events:
                message = {"type": "http.response.body", "body": event, "more_body": True}
                await asyncio.wait_for(send(message), _TAKE_SECONDS)
        except asyncio.TimeoutError:
            logger.warning("somebody who looks has taken nothing for %g s: disconnected", _TAKE_SECONDS)
            return
        finally:
            await events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _await_leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
