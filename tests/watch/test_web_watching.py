"""Asking the store only while somebody looks, and keeping nothing for those who are slow."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rallypoint.errors import ConnectError
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.watch.web import poller as watching
from rallypoint.watch.web.picture import ReportReader
from rallypoint.watch.web.poller import Sight, StoreWatch, next_frame, read_sight
from test_web_picture import apply
from web_stores import ScriptedStore, job

pytestmark = pytest.mark.windows

SECONDS = 30.0
EIGHT = {"node-a": 4, "node-b": 4}


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore(job(EIGHT, late=[7]))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that does not pause."""
    monkeypatch.setattr(watching, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(watching, "_SHARE", 1)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        await asyncio.wait_for(work(), SECONDS)

    asyncio.run(within())


def read(event: bytes) -> tuple[str, int, dict[str, Any]]:
    kind, number, data = (line.partition(": ")[2] for line in event.decode().rstrip("\n").split("\n"))
    return kind, int(number), json.loads(data)


# Frames


def test_the_first_frame_is_whole_and_the_next_a_patch(store: ScriptedStore) -> None:
    first = next_frame(None, 1, read_sight(store.look), ReportReader(), "node-0:29500")
    store.snapshot = job(EIGHT)
    second = next_frame(first, 2, read_sight(store.look), ReportReader(), "node-0:29500")
    assert read(first.whole) == ("whole", 1, first.content)
    kind, number, patch = read(second.change)
    assert (kind, number) == ("change", 2)
    assert patch["machines"] == {"node-b": {"states": "j4"}}
    assert apply(first.content, patch) == second.content
    assert second.content["address"] == "node-0:29500"


def test_a_store_that_fails_and_comes_back(store: ScriptedStore) -> None:
    first = next_frame(None, 1, read_sight(store.look), ReportReader(), "")
    store.failure = ConnectError("cannot reach it", hint="is it up?")
    second = next_frame(first, 2, read_sight(store.look), ReportReader(), "")
    assert second.patch["problem"]["message"] == "cannot reach it"
    assert second.content["machines"] == first.content["machines"]
    store.failure = None
    third = next_frame(second, 3, read_sight(store.look), ReportReader(), "")
    assert third.patch["problem"] is None
    assert "problem" not in third.content
    store.failure = ConnectError("cannot reach it")
    frame = next_frame(None, 1, read_sight(store.look), ReportReader(), "node-0:29500")
    assert set(frame.content) == {"problem", "address", "every"}, "it never answered"


def test_who_answers_slowly_is_asked_less_often() -> None:
    assert Sight(10.0, 10.01, None).pause == watching.EVERY_SECONDS
    assert Sight(10.0, 10.5, None).pause == pytest.approx(4.5)
    assert Sight(10.0, 15.0, None, ConnectError("no")).pause == watching.EVERY_SECONDS


# Looking


def test_what_was_just_seen_is_not_asked_again(store: ScriptedStore) -> None:
    async def work() -> None:
        watch = StoreWatch(store.look, "")
        first, second = await asyncio.gather(watch.sight(), watch.sight())
        assert first is second is await watch.sight()
        assert store.looks == 1
        assert await watch.sight(most_seconds=0) is not first

    run(work)
    assert store.looks == 2


def test_who_gives_up_does_not_end_the_look_of_others() -> None:
    may_answer = threading.Event()

    def look(_: Question) -> Snapshot:
        assert may_answer.wait(SECONDS)
        return job(EIGHT)

    async def work() -> None:
        watch = StoreWatch(look, "")
        hasty, patient = asyncio.create_task(watch.sight()), asyncio.create_task(watch.sight())
        await asyncio.sleep(0)
        hasty.cancel()
        await asyncio.wait([hasty])
        may_answer.set()
        assert (await patient).found is not None

    run(work)


def test_questions_wait_for_each_other() -> None:
    """However many there are, the store is asked two at a time."""
    lock, now, most = threading.Lock(), 0, 0
    both = threading.Barrier(2)

    def look(_: Question) -> Snapshot:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        both.wait(SECONDS)
        with lock:
            now -= 1
        return job(EIGHT)

    async def work() -> None:
        watch = StoreWatch(look, "")
        await asyncio.gather(*(watch.ask(Question(search=str(each))) for each in range(8)))

    run(work)
    assert most == 2


# Viewers


@pytest.mark.usefixtures("hasty")
def test_a_viewer_who_is_slow_gets_the_whole_of_the_latest(store: ScriptedStore) -> None:
    async def work() -> None:
        watch = StoreWatch(store.look, "")
        slow, quick = watch.events(), watch.events()
        assert read(await anext(slow))[0] == "whole"
        async for event in quick:
            if read(event)[1] > 20:
                break
        kind, number, content = read(await anext(slow))
        assert kind == "whole"
        assert number > 20
        assert content["counts"]["expected"] == 8
        await slow.aclose()
        await quick.aclose()

    run(work)


@pytest.mark.usefixtures("hasty")
def test_when_the_last_viewer_has_left_nothing_more_is_asked(store: ScriptedStore) -> None:
    async def work() -> None:
        watch = StoreWatch(store.look, "")
        events = watch.events()
        await anext(events)
        assert watch._viewers == 1
        await events.aclose()
        assert watch._viewers == 0
        while watch._polling is not None:
            await asyncio.sleep(0)
        before = store.looks
        await asyncio.sleep(0)
        assert store.looks == before
        # Who comes now is not shown what was seen then.
        store.failure = ConnectError("gone meanwhile")
        assert set(read(await anext(watch.events()))[2]) == {"problem", "address", "every"}

    run(work)


def test_close_lets_all_viewers_go(store: ScriptedStore) -> None:
    async def work() -> None:
        watch = StoreWatch(store.look, "")
        viewers = [watch.events() for _ in range(3)]
        for each in viewers:
            await anext(each)
        waiting = [asyncio.ensure_future(anext(each, None)) for each in viewers]
        await asyncio.sleep(0)
        watch.close()
        assert await asyncio.gather(*waiting) == [None] * 3
        assert watch._viewers == 0

    run(work)


def test_a_defect_ends_the_streams_and_is_logged(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The page comes back, and would find out: nobody is left with a picture that never changes."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(watching, "next_frame", fail)

    async def work() -> None:
        watch = StoreWatch(store.look, "")
        assert await anext(watch.events(), None) is None

    run(work)
    assert "the page cannot be made" in caplog.text
