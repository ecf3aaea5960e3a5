"""The loads of `rallypoint bench`: with real stores, and with some that answer wrongly, which they notice."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from bench_fakes import FakeStore, Twist, faking, in_pieces, needs_redis, serving, twist_one
from benchmarks import loads as bench_loads
from benchmarks.dialects import REDIS, TORCH
from benchmarks.loads import converse
from benchmarks.swarm import WideSwarm as Swarm
from rallypoint.bench import swarm
from rallypoint.bench.clients import (
    KEY,
    VALUE,
    BusyClients,
    Dialect,
    Exchange,
    add,
    come_from,
    connect,
    exists,
    get,
    leave,
    port_range,
    seek_port_quickly,
    store,
)
from rallypoint.bench.loads import check_counts
from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Load, Stopwatch, Worker, ask_each, start, together
from raw import SECONDS, until

Times = Callable[[], bool]


DIALECTS = {"torch": TORCH, "redis": REDIS}
both_fakes = pytest.mark.parametrize("dialect", list(DIALECTS))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server of ours, with KEY in it."""
    with serving("libuv") as port:
        with connect(port, TORCH) as client:
            converse(client, TORCH.store(KEY, VALUE))
        yield port


def after(turns: int) -> Times:
    """Over when it has been asked so often."""
    left = iter([False] * turns)
    return lambda: next(left, True)


WRONG: dict[str, Callable[[bytes], Sequence[bytes]]] = {
    "another": lambda reply: [reply[:-1] + bytes([reply[-1] ^ 1])],
    "another at its beginning": lambda reply: [bytes([reply[0] ^ 1]) + reply[1:]],
    "too much": lambda reply: [reply + b"!"],
    "too much in pieces": lambda reply: [reply[:1], reply],
    "closes": lambda _: [],
    "closes in the middle": lambda reply: [reply[: len(reply) // 2], b""],
}
some_wrong = pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)


# Sockets


@pytest.mark.parametrize("name", ["another", "closes"])
def test_a_wrong_hello_is_noticed_and_its_socket_closed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    create = socket.create_connection

    def note(*args: object, **options: object) -> socket.socket:
        opened.append(create(*args, **options))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(socket, "create_connection", note)
    with faking("torch", twist_one("ping", 1, WRONG[name])) as port, pytest.raises(BenchError):
        connect(port, TORCH)
    was_open = opened[0].fileno() >= 0
    opened[0].close()
    assert not was_open


def test_a_connection_that_leaves_is_reset_and_its_port_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        with server.accept()[0] as other:
            leave([client])
            with pytest.raises(ConnectionResetError):
                other.recv(1)
    assert client.fileno() == -1


def test_a_client_may_come_from_another_address_and_a_port_of_the_range() -> None:
    low, high = struct_of(port_range())
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        seek_port_quickly(client, port_range())
        come_from(client, "127.1.2.3")
        client.connect(server.getsockname())
        host, port = client.getsockname()
        assert (host, low <= port <= high) == ("127.1.2.3", True)
        server.accept()[0].close()


def struct_of(ports: bytes) -> tuple[int, int]:
    both = int.from_bytes(ports, sys.byteorder)
    return both & 0xFFFF, both >> 16


@contextmanager
def conversing(*answers: bytes) -> Iterator[socket.socket]:
    """A client whose other end has sent that already, and ends with it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(answers))
        theirs.shutdown(socket.SHUT_WR)
        yield ours


def test_a_big_request_and_a_big_reply_pass_each_other() -> None:
    """More than any buffer, both ways at once: a client that first sends everything could wait forever."""
    size = 8 << 20
    with faking_echo() as port, socket.create_connection(("127.0.0.1", port)) as client:
        text = os.urandom(1024) * (size // 1024)
        converse(client, Exchange(text, text))


@contextmanager
def faking_echo() -> Iterator[int]:
    class Echo(FakeStore):
        def _serve(self, client: socket.socket) -> None:
            while piece := client.recv(1 << 16):
                client.sendall(piece)

    store = Echo()
    try:
        yield store.port
    finally:
        store.close()


def test_a_big_request_with_a_wrong_answer_is_a_fault() -> None:
    for said in (b"", b"answe", b"answes", b"answer!"):
        with conversing(said) as client, pytest.raises(BenchError):
            converse(client, Exchange(b"ask", b"answer"))
    with conversing(b"ans", b"wer") as client:
        converse(client, Exchange(b"ask", b"answer"))


def test_a_big_request_without_an_answer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_loads, "ANSWER_LIMIT_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BenchError, match="no answer in time"):
        converse(ours, Exchange(b"ask", b"answer"))


# Busy clients


@pytest.mark.parametrize(
    ("name", "speech"), [("libuv", TORCH), pytest.param("redis", REDIS, marks=needs_redis)]
)
def test_busy_clients_do_what_they_say_they_did(name: str, speech: Dialect) -> None:
    with serving(name) as port, closing(BusyClients(port, speech, 3)) as clients:
        for client in clients._clients:
            assert client.gettimeout() is None  # one of Python's would poll before each call
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        with connect(port, speech) as client:
            converse(client, speech.store(KEY, VALUE))
        assert clients.run(after(20), add).operations == 3 * 21
        assert clients.run(after(0), add, 5).operations == 3 * 5  # it knows how far the counters are
        assert clients.run(after(3), exists).operations == 3 * 4
        assert clients.run(after(10), store).operations == 3 * 11
        assert clients.run(after(10), get, 4).operations == 3 * 11 * 4
        assert len(clients.taken) == 11


@some_wrong
def test_busy_clients_notice_one_wrong_answer_of_many(make: Callable[[bytes], Sequence[bytes]]) -> None:
    """Of two clients and three turns: the first answer, one between, and the last."""
    for number in (1, 4, 6):
        with fake_clients(twist_one("get", number, make)) as clients, pytest.raises(BenchError):
            run_twice(clients)


def run_twice(clients: BusyClients) -> None:
    """What is too much behind the very last answer may show with the next run, which is soon enough."""
    for turns in (2, 1):
        clients.run(after(turns), get)


@contextmanager
def fake_with_key(twist: Twist) -> Iterator[int]:
    with faking("torch", twist) as port:
        with connect(port, TORCH) as client:
            converse(client, TORCH.store(KEY, VALUE))
        yield port


@contextmanager
def fake_clients(twist: Twist) -> Iterator[BusyClients]:
    """Two busy clients of a store that answers so."""
    with fake_with_key(twist) as port, closing(BusyClients(port, TORCH, 2)) as clients:
        yield clients


def test_busy_clients_take_answers_in_pieces() -> None:
    with fake_clients(in_pieces) as clients:
        assert clients.run(after(2), get, 2).operations == 2 * 3 * 2


# Workers


StartWorker = Callable[[str], Worker]
BUSY = "rallypoint.bench.clients:BusyWorker"


@pytest.fixture
def start_worker() -> Iterator[StartWorker]:
    """Starts workers, which are ended afterwards."""
    with ExitStack() as resources:
        yield lambda kind: start(resources, kind, "a worker")


def test_a_busy_worker_that_reads_two_orders_at_once_goes_on(start_worker: StartWorker, port: int) -> None:
    """On a machine that lets it sleep for a while, both lie in its pipe; it ends when its orders do."""
    worker = start_worker(BUSY)
    worker.ask(SECONDS, do="connect", port=port, dialect=TORCH, count=1)
    worker.order(do="run", ask=get, per_request=1)
    answer = worker.ask(SECONDS, do="stop")
    assert answer["load"].operations == len(answer["taken"]) >= 1
    worker.line.close()
    worker._process.join(SECONDS)
    assert worker._process.exitcode == 0


def test_a_worker_that_ends_early_tells_its_last_words(start_worker: StartWorker) -> None:
    worker = start_worker("no_such_module:Worker")
    with pytest.raises(BenchError, match=r"a worker ended early; its log ends: .*No module named"):
        worker.ask(SECONDS, do="anything")
    worker.order(do="more")  # to nobody, which is no fault


def test_a_worker_without_an_answer_is_named(start_worker: StartWorker) -> None:
    slow = start_worker("rallypoint.bench.swarm:Swarm")
    with pytest.raises(BenchError, match=r"no answer within -14\.9 s from a worker$"):
        ask_each([slow], -14.9, [{"do": "leave"}])


# Swarms


@pytest.fixture
def ranks() -> Iterator[Swarm]:
    swarm = Swarm()
    yield swarm
    swarm.leave()


def come_up(ranks: Swarm, port: int, count: int, dialect: str = "torch") -> dict[str, Any]:
    return ranks.connect(DIALECTS[dialect], [("127.0.0.1", port, "", count)], SECONDS)


def test_ranks_that_trickle_find_the_count_full_only_at_the_end(ranks: Swarm, port: int) -> None:
    total = swarm.UNCOUNTED + 3 * swarm.BEGIN_TOGETHER
    places = [("127.0.0.1", port, "", total - 6), ("127.0.0.1", port, "127.1.1.9", 6)]
    ranks.connect(TORCH, places, SECONDS)
    assert {rank.getsockname()[0] for rank in [*ranks._ranks.values()][-6:]} == {"127.1.1.9"}
    at_once = ranks.barrier("at once", total, True, SECONDS)
    trickled = ranks.barrier("trickled", total, False, SECONDS)
    assert max(at_once["seen"]) == max(trickled["seen"]) == total
    assert trickled["seen"].count(total) < total
    assert len(trickled["taken"]) == total


@both_fakes
def test_ranks_take_answers_in_pieces(dialect: str, ranks: Swarm) -> None:
    with faking(dialect, in_pieces) as port:
        check_counts(5, [come_up(ranks, port, 5, dialect)])
        check_counts(5, [ranks.barrier("1", 5, True, SECONDS)])
        ranks.wait("wake")
        assert ranks.wake("wake", True, time.monotonic(), SECONDS)["load"].operations == 5


@both_fakes
@some_wrong
def test_ranks_notice_a_wrong_hello(
    make: Callable[[bytes], Sequence[bytes]], dialect: str, ranks: Swarm
) -> None:
    twist, words = twist_one("ping", 3, make), r"coming up: .*of 5 ranks"
    with faking(dialect, twist) as port, pytest.raises(BenchError, match=words):
        come_up(ranks, port, 5, dialect)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        *(("add", name) for name in ("another at its beginning", "too much", "closes")),
        *(("look", name) for name in ("too much", "closes")),
        *(("wait", name) for name in WRONG),
    ],
)
@both_fakes
def test_ranks_notice_a_wrong_answer_at_a_barrier(
    operation: str, name: str, dialect: str, ranks: Swarm
) -> None:
    number = 8 if operation == "add" else 3  # five of the ADDs are those at init/
    with faking(dialect, twist_one(operation, number, WRONG[name])) as port:
        come_up(ranks, port, 5, dialect)
        with pytest.raises((BenchError, OverflowError, ValueError)):  # all of them end a worker with a fault
            pass_two_barriers(ranks, 5)


def pass_two_barriers(ranks: Swarm, count: int) -> None:
    """What is too much may come after all are done: the next barrier is soon enough."""
    for name in ("1", "2"):
        check_counts(count, [ranks.barrier(name, count, True, 5)])


@pytest.mark.parametrize(
    ("operation", "answers", "count", "words"),
    [
        ("add", [7], 1, "5 ADDs did not give each number from 1 on once"),
        ("look", [1, 2, 3, 4], 1, "a count was lower than it had been before"),
        ("look", [3], 99, "found up to 99"),
    ],
)
@both_fakes
def test_ranks_notice_a_wrong_count(
    operation: str, answers: list[int], count: int, words: str, dialect: str, ranks: Swarm
) -> None:
    """One that was given twice, one that fell, and one that is more than they are."""
    wrong = DIALECTS[dialect].number(count)
    twist: Twist = lambda name, at, reply: [wrong if name == operation and at in answers else reply]  # noqa: E731
    with faking(dialect, twist) as port:
        come_up(ranks, port, 5, dialect)
        with pytest.raises(BenchError, match=words):
            check_counts(5, [ranks.barrier("1", 5, True, SECONDS)])


@both_fakes
def test_ranks_notice_a_barrier_that_lets_the_first_pass_before_the_last_came(
    dialect: str, ranks: Swarm
) -> None:
    count = 2 * swarm.UNCOUNTED // 8
    with faking(dialect, wakes_early=True) as port, pytest.MonkeyPatch.context() as patch:
        patch.setattr(swarm, "UNCOUNTED", 8)
        patch.setattr(swarm, "BEGIN_TOGETHER", 4)
        come_up(ranks, port, count, dialect)
        with pytest.raises(BenchError):
            ranks.barrier("1", count, False, SECONDS)


@both_fakes
def test_ranks_notice_that_they_were_woken_before_anybody_woke_them(dialect: str, ranks: Swarm) -> None:
    with faking(dialect, wakes_early=True) as port:
        come_up(ranks, port, 3, dialect)
        ranks.wait("wake")
        until(lambda: len(ranks._poll.poll(0)) == 3, "all are awake")
        with pytest.raises(BenchError):
            ranks.check_asleep()


def test_a_second_answer_to_one_rank_is_not_taken_for_that_of_another(ranks: Swarm) -> None:
    over = threading.Event()

    def twist(name: str, count: int, reply: bytes) -> Sequence[bytes]:
        if name == "wait" and count == 2:
            over.wait(SECONDS)
        return [reply, reply] if name == "wait" and count == 1 else [reply]

    with faking("torch", twist) as port:
        come_up(ranks, port, 2)
        try:
            with pytest.raises(BenchError, match=r"more than the reply to WAIT; of 2 ranks .*, 1 are done"):
                ranks.barrier("1", 2, True, SECONDS)
        finally:
            over.set()


def test_ranks_look_for_more_when_they_are_done(ranks: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between the last answer and the look: so the look is put off until it is there."""
    stray = lambda _: until(lambda: ranks._poll.poll(0), "more has come")  # noqa: E731
    with faking("torch", twist_one("wait", 1, lambda reply: [reply, b"?"])) as port:
        come_up(ranks, port, 1)
        monkeypatch.setattr(swarm.Step, "check", stray)
        with pytest.raises(BenchError, match="1 ranks got more than they had asked for"):
            ranks.barrier("1", 1, True, SECONDS)


def test_ranks_that_wait_too_long_say_how_far_they_are(ranks: Swarm, port: int) -> None:
    come_up(ranks, port, 3)
    words = (
        "of 3 ranks 0 had not begun, 0 wait for ADD of 1, 0 wait for ADD of 0, 3 wait for WAIT, 0 are done"
    )
    with pytest.raises(BenchError, match=f"barrier never: time is up; {words}"):
        ranks.barrier("never", 4, True, 0.3)


@some_wrong
def test_a_crowd_notices_one_wrong_answer(make: Callable[[bytes], Sequence[bytes]], ranks: Swarm) -> None:
    with faking("torch", twist_one("ping", 5, make)) as port:
        ranks.gather(TORCH, port, 5)
        with pytest.raises(BenchError, match=r"arriving: .*of 5 ranks"):
            ranks.arrive(SECONDS)


def test_a_crowd_that_is_turned_away_comes_again(ranks: Swarm) -> None:
    turns = iter(range(100))

    class Moody(FakeStore):
        def _serve(self, client: socket.socket) -> None:
            if next(turns) % 3 == 0:
                client.recv(100)
                leave([client])
            else:
                super()._serve(client)

    with closing(Moody()) as store:
        ranks.gather(TORCH, store.port, 10)
        answer = ranks.arrive(SECONDS)
    assert answer["load"].operations == len(answer["taken"]) == 10
    assert answer["turned_away"] in range(4, 6)
    assert next(turns) == 10 + answer["turned_away"]


def test_a_crowd_without_answers_or_a_server_is_a_fault(ranks: Swarm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ranks.gather(TORCH, port, 3)
        with pytest.raises(BenchError, match="arriving: time is up; of 3 ranks 0 had not begun, 3 wait for"):
            ranks.arrive(0.2)
    ranks.leave()
    ranks.gather(TORCH, port, 3)
    with pytest.raises(BenchError, match="nobody listens for new clients"):
        ranks.arrive(SECONDS)


# What a load tells of itself


def test_a_stopwatch_has_the_quantiles_of_what_was_timed() -> None:
    begun, watch = time.monotonic(), Stopwatch()
    load = watch.stop(7, [n / 100 for n in range(100, 0, -1)])
    assert (load.operations, load.p50, load.p99) == (7, 0.51, 1.0)
    assert begun <= load.start <= load.end <= time.monotonic()
    assert (watch.stop(1).p50, watch.stop(1).p99) == (None, None)


def test_loads_are_one_from_the_first_start_to_the_last_end() -> None:
    loads = [Load(30, 10.0, 12.0, 1.0, 0.5), Load(10, 11.0, 14.0, 2.5, 0.9)]
    assert together(loads, [0.2, 0.5, 0.1]) == Load(40, 10.0, 14.0, 3.5, 0.9, 0.2, 0.5)
