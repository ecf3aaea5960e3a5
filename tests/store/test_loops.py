"""What every loop does, and what sends for many links at a time."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from time import monotonic

import pytest

from rallypoint.store.machine import system
from rallypoint.store.server.loops.backend import Choice, make_loop
from rallypoint.store.server.loops.loop import Loop, make_sending

SECONDS = 20.0

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=[(Choice.LIBUV, 1), (Choice.LIBUV, 16), (Choice.LEGACY, 1)], ids=str)
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """A loop that ends by itself if nothing else ends it, and the test fails then."""
    choice, cores = request.param
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    made, _ = make_loop(choice)
    with closing(made):
        yield made


def run(loop: Loop) -> None:
    is_late = False

    def give_up() -> None:
        nonlocal is_late
        is_late = True
        loop.stop()

    loop.later(SECONDS, give_up)
    loop.run()
    assert not is_late


@contextmanager
def pairs(count: int) -> Iterator[list[Pair]]:
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(count)]
        for pair in made:
            for end in pair:
                end.setblocking(False)
                stack.enter_context(end)
        yield made


def test_a_file_is_told_of_until_it_is_not_watched_any_more(loop: Loop) -> None:
    seen: list[bytes] = []

    def read() -> None:
        seen.append(ours.recv(1))
        if len(seen) == 3:
            loop.watch_readable(ours, None)
            loop.later(0.05, loop.stop)

    with pairs(1) as [(ours, theirs)]:
        theirs.send(b"abcd")
        loop.watch_readable(ours, read)
        run(loop)
    assert seen == [b"a", b"b", b"c"]


@contextmanager
def busy(loop: Loop) -> Iterator[list[float]]:
    """A file that can always be read; when it was told of."""
    told: list[float] = []
    with pairs(1) as [(ours, theirs)]:
        theirs.send(b"for ever")
        loop.watch_readable(ours, lambda: told.append(monotonic()))
        yield told
        loop.watch_readable(ours, None)


def test_what_is_due_comes_in_order_beside_a_file_that_can_always_be_read(loop: Loop) -> None:
    came: list[tuple[str, float]] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: came.append((name, monotonic()))

    def at_last() -> None:
        note("at last")()
        loop.stop()

    begun = monotonic()
    loop.later(0.2, at_last)
    loop.later(0.05, note("later"))
    loop.later(0.05, lambda: loop.later(0, note("behind it")))
    loop.later(0, note("soon"))
    with busy(loop) as told:
        run(loop)
    assert [name for name, _ in came] == ["soon", "later", "behind it", "at last"]
    times = [at - begun for _, at in came]
    assert times[1] >= 0.049
    assert times[3] >= 0.199
    assert times[2] < 0.2, "what is due soon does not wait for the next time"
    assert len(told) > 10


@pytest.mark.parametrize("beside", [False, True])
def test_a_file_is_told_of_when_it_can_be_written(loop: Loop, beside: bool) -> None:
    """It is full at first, and another one empties it, while nothing else happens or very much."""

    def fill() -> None:
        try:
            while True:
                ours.send(bytes(1 << 16))
        except BlockingIOError:
            loop.watch_writable(ours, written)

    def empty() -> None:
        try:
            while theirs.recv(1 << 16):
                pass
        except BlockingIOError:
            pass

    def written() -> None:
        loop.watch_writable(ours, None)
        loop.stop()

    with pairs(1) as [(ours, theirs)], ExitStack() as stack:
        if beside:
            stack.enter_context(busy(loop))
        loop.later(0.01, fill)
        loop.later(0.05, empty)
        run(loop)


def test_it_can_be_stopped_from_another_thread_while_it_waits(loop: Loop) -> None:
    loop.later(0.01, threading.Timer(0.05, loop.stop).start)
    run(loop)


class FakeLink:
    """A link that holds what could not be sent."""

    def __init__(self, pair: Pair) -> None:
        self.ours, self.theirs = pair
        self.put = b""
        self.held = b""
        self.errors: list[int] = []

    def send_now(self, data: bytes) -> None:
        try:
            self.held += data if self.held else data[self.ours.send(data) :]
        except BlockingIOError:
            self.held += data

    def was_sent(self, data: bytes, count: int) -> None:
        self.held += data[max(count, 0) :]

    def go_on(self, count: int) -> None:
        if count < 0 and count != -errno.EAGAIN:
            self.errors.append(-count)
            self.held = b""

    def received(self) -> bytes:
        said = b""
        try:
            while some := self.theirs.recv(1 << 20):
                said += some
        except BlockingIOError:
            pass
        return said


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_what_is_sent_together_arrives_whole_and_in_order(helpers: int) -> None:
    """To some once, to some often; short and long; with some that are gone, and some that are full; and some
    are closed."""
    sending = make_sending(helpers)
    if sending is None:
        pytest.skip("it is not compiled")
    choose = random.Random(helpers)
    with pairs(300) as made:
        links = [FakeLink(pair) for pair in made]
        for link in links[:20]:
            link.theirs.close()
        for link in links[20:40]:
            link.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        for _ in range(20):
            for link in choose.sample(links, choose.randrange(1, 300)):
                data = choose.randbytes(choose.choice([1, 8, 60, 4_000, 5_000]))
                if link.held:  # as a link does
                    link.held += data
                elif link not in links[:20] or len(data) <= 4_000:
                    sending.put(link, link.ours.fileno(), data)
                link.put += data
            if choose.random() < 0.5:
                sending.flush()
            else:
                sending.flush_of(choose.choice(links).ours.fileno())
        for link in links[200:]:
            if choose.random() < 0.5:
                sending.put(link, link.ours.fileno(), b"last words")
                link.put += b"last words"
            sending.put_close(link.ours.detach())
        sending.flush()
        assert all(set(link.errors) == {errno.EPIPE} for link in links[:20])
        assert any(link.held for link in links[20:40])
        assert not any(link.held for link in links[40:])
        for link in links[20:]:
            assert not link.errors
            assert link.received() + link.held == link.put
        for link in links[20:200]:
            with pytest.raises(BlockingIOError):
                link.theirs.recv(1)
        assert all(link.theirs.recv(1) == b"" for link in links[200:])


class Dropping(FakeLink):
    """A link that has others sent something when it is closed."""

    def __init__(self, pair: Pair, then: Callable[[], None]) -> None:
        super().__init__(pair)
        self._then = then

    def go_on(self, count: int) -> None:
        super().go_on(count)
        self._then()


@pytest.mark.parametrize("raises", [False, True])
def test_who_is_sent_something_because_another_is_closed_gets_it_behind_what_was_before(raises: bool) -> None:
    """Both could not be sent all, and the one that is closed hears of it first."""
    sending = make_sending(0)
    if sending is None:
        pytest.skip("it is not compiled")
    with pairs(2) as [gone, full]:
        gone[1].close()
        link = FakeLink(full)
        with suppress(BlockingIOError):
            while True:
                full[0].send(bytes(1 << 10))

        def tell() -> None:
            full[1].recv(1 << 22)  # it has room from now on
            assert link.held == b"first"
            link.send_now(b"second")
            if raises:
                raise ZeroDivisionError

        sending.put(Dropping(gone, tell), gone[0].fileno(), b"reply")
        sending.put(link, full[0].fileno(), b"first")
        with pytest.raises(ZeroDivisionError) if raises else nullcontext():
            sending.flush()
        assert link.held == b"firstsecond"


def test_a_callback_that_fails_keeps_nobody_from_being_sent_a_reply() -> None:
    loop, _ = make_loop(Choice.LIBUV)
    with closing(loop), pairs(2) as [(ours, theirs), (other, beside)]:
        if loop.sending is None:
            pytest.skip("it is not compiled")
        link = FakeLink((ours, theirs))

        def reply() -> None:
            assert loop.sending is not None
            ours.recv(9)
            loop.sending.put(link, ours.fileno(), b"reply")

        def fail() -> None:
            other.recv(9)
            raise ZeroDivisionError

        loop.watch_readable(ours, reply)
        loop.watch_readable(other, fail)
        loop.watch_readable(theirs, loop.stop)
        theirs.send(b"request")
        beside.send(b"request")
        run(loop)
        assert link.received() == b"reply"


@pytest.mark.parametrize(
    ("quota", "cores"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("9900000 100000", 8)]
)
def test_the_cores_of_a_container_are_what_it_may_use(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(system, "_GROUP_QUOTAS", ((str(tmp_path / "cpu.max"),), ("/nowhere",)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert system.usable_cores() == cores
