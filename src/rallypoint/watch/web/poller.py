"""Polls the store: once a second while a browser shows the page, and otherwise on request.

Each poll makes a frame: a whole picture, and the patch from the picture before. A viewer that has the
picture before is sent the patch, any other viewer the whole picture: nothing is kept for slow viewers. A poll
runs in a thread, as it waits for the store. For pictures, there is never more than one at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, TypeVar

from rallypoint.errors import RallypointError
from rallypoint.store.connect.deadline import in_thread
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.roll import Roll
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.watch.web.picture import SINCE, JobReport, Json, ReportReader, picture

logger = logging.getLogger("rallypoint.web")

EVERY_SECONDS: Final = 1.0
_SHARE: Final = 10
"""A store that takes long to answer is asked less often: for at most this part of the time."""
_SAME_SECONDS: Final = 1.0
_MOST_QUESTIONS: Final = 2
"""How many questions for keys and values are asked at a time; others wait."""

Fetch = Callable[[Question], Snapshot]
"""Fetches a snapshot of the store; RallypointError if there is none."""

T = TypeVar("T")


@dataclass(frozen=True)
class Sight:
    """The result of one poll: a snapshot with its roll, or an error."""

    began: float
    ended: float
    """By the clock of this process."""
    found: tuple[Snapshot, Roll] | None
    error: RallypointError | None = None

    @property
    def pause(self) -> float:
        """How long to wait before the next one."""
        taken = self.ended - self.began
        return max(EVERY_SECONDS, taken * (_SHARE - 1)) if self.error is None else EVERY_SECONDS


def read_sight(fetch: Fetch) -> Sight:
    """Fetch once, and judge the snapshot."""
    began = time.monotonic()
    try:
        snapshot = fetch(Question())
        found, error = (snapshot, judge(snapshot)), None
    except RallypointError as failure:
        found, error = None, failure
    return Sight(began, time.monotonic(), found, error)


@dataclass(frozen=True)
class Frame:
    """One picture, for all viewers."""

    number: int
    content: Json
    patch: Json
    """From the frame before."""

    @cached_property
    def whole(self) -> bytes:
        """As an event."""
        return _event("whole", self.number, self.content)

    @cached_property
    def change(self) -> bytes:
        """As an event."""
        return _event("change", self.number, self.patch)


def _event(kind: str, number: int, content: Json) -> bytes:
    data = json.dumps(content, separators=(",", ":"))
    return f"event: {kind}\nid: {number}\ndata: {data}\n\n".encode()


def next_frame(before: Frame | None, number: int, sight: Sight, reader: ReportReader, address: str) -> Frame:
    """The frame that follows one, or the first; the store's address is in all of them."""
    last = before.content if before is not None else {}
    if sight.found is not None:
        snapshot, roll = sight.found
        content = settle(last, picture(snapshot, roll, reader.read(snapshot)))
    else:  # the last picture of it, with the error
        assert sight.error is not None
        content = {**last, "problem": {"message": sight.error.message, "hint": sight.error.hint}}
    content = {**content, "address": address, "every": round(sight.pause, 1)}
    return Frame(number, content, difference(last, content))


def settle(before: Json, after: Json) -> Json:
    """A picture whose moments are those of the one before, where they differ by less than a second.

    A store says how many seconds ago something began, and answers a little sooner or later each time. Without
    this, all moments would change by some milliseconds in every picture.
    """
    settled: Json = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            settled[name] = settle(old, value)
        elif name == SINCE and isinstance(old, float) and abs(value - old) < _SAME_SECONDS:
            settled[name] = old
        else:
            settled[name] = value
    return settled


def difference(before: Json, after: Json) -> Json:
    """The patch that makes one picture of another."""
    patch: Json = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := difference(old, value):
                patch[name] = inner
        elif name not in before or value != old or type(value) is not type(old):
            patch[name] = value
    return patch


class StoreWatch:
    """One store, and the viewers of its page. To be used in one event loop."""

    def __init__(self, fetch: Fetch, address: str) -> None:
        self._fetch = fetch
        self._address = address
        self._reader = ReportReader()
        self._current: asyncio.Task[Sight] | None = None
        self._last: Sight | None = None
        self._questions = asyncio.Semaphore(_MOST_QUESTIONS)
        self._viewers = 0
        self._polling: asyncio.Task[None] | None = None
        self._frame: Frame | None = None
        self._number = 0
        self._news = asyncio.Event()
        self._closed = False

    async def sight(self, most_seconds: float = EVERY_SECONDS) -> Sight:
        """What the store answers now, or answered at most `most_seconds` ago."""
        last = self._last
        if last is not None and time.monotonic() - last.ended < most_seconds:
            return last
        if self._current is None:
            self._current = asyncio.create_task(self._refresh())
        # Other callers may wait for the same poll: it goes on if this one gives up.
        return await asyncio.shield(self._current)

    async def ask(self, question: Question) -> Snapshot:
        """The answer to one question; RallypointError if there is none."""
        async with self._questions:
            return await _call(lambda: self._fetch(question))

    async def report(self, snapshot: Snapshot) -> JobReport:
        """What launchers report in a snapshot. In a thread: of many ranks, it takes long to read."""
        return await _call(lambda: self._reader.read(snapshot))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Pictures for one viewer, as events, until `close`."""
        seen = 0
        self._viewers += 1
        try:
            if self._polling is None:
                self._polling = asyncio.create_task(self._poll())
            while (frame := await self._newer_than(seen)) is not None:
                yield frame.change if frame.number == seen + 1 and seen else frame.whole
                seen = frame.number
        finally:
            self._viewers -= 1

    def close(self) -> None:
        """End the events of all viewers."""
        self._closed = True
        self._notify()

    async def _newer_than(self, number: int) -> Frame | None:
        while self._polling is not None and not self._closed:
            if self._frame is not None and self._frame.number > number:
                return self._frame
            await self._news.wait()
        return None

    async def _poll(self) -> None:
        try:
            while self._viewers and not self._closed:
                sight = await self.sight(most_seconds=0)
                self._number += 1
                make = partial(next_frame, self._frame, self._number, sight, self._reader, self._address)
                self._frame = await _call(make)
                self._notify()
                await asyncio.sleep(sight.pause)
        except Exception:
            logger.exception("the page cannot be made")  # viewers are disconnected, and come back
        finally:
            self._polling = None
            self._frame = None  # a viewer that comes later must not see a picture that is hours old
            self._notify()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _refresh(self) -> Sight:
        try:
            self._last = await _call(lambda: read_sight(self._fetch))
        finally:
            self._current = None
        return self._last


def _call(call: Callable[[], T]) -> Awaitable[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
    in_thread(call, future.set_result, future.set_exception)
    return asyncio.wrap_future(future)
