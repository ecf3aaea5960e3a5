"""The clients of the benchmarks: with real stores, and with some that answer wrongly, which they notice."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from bench_fakes import FakeStore, Twist, faking, in_pieces, needs_redis, serving, twist_one
from benchmarks import loads as bench_loads
from benchmarks.clients import Crowd, WideClients
from benchmarks.dialects import REDIS, TORCH
from benchmarks.loads import converse
from rallypoint.bench import clients as bench_clients
from rallypoint.bench.clients import ASKED, Clients, Dialect, Exchange, begin, leave
from rallypoint.bench.loads import check_counts
from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Load, LoadProcess, outcomes, together
from raw import SECONDS, until

DIALECTS = {"torch": TORCH, "redis": REDIS}
both_fakes = pytest.mark.parametrize("dialect", list(DIALECTS))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server of ours."""
    with serving("libuv") as port:
        yield port


def after(turns: int) -> Callable[[], bool]:
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


def test_a_connection_that_leaves_is_reset_and_its_port_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        with server.accept()[0] as other:
            leave([client])
            with pytest.raises(ConnectionResetError):
                other.recv(1)
    assert client.fileno() == -1


def test_a_client_may_come_from_another_address_and_waits_in_the_kernel_alone() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        begin(TORCH, "127.0.0.1", server.getsockname()[1], "127.1.2.3") as client,
    ):
        assert client.getsockname()[0] == "127.1.2.3"
        assert client.gettimeout() is None  # one of Python's would poll before each call
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        server.accept()[0].close()


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

    class Echo(FakeStore):
        def _serve(self, client: socket.socket) -> None:
            while piece := client.recv(1 << 16):
                client.sendall(piece)

    text = os.urandom(1024) * (8 << 10)
    store = Echo()
    try:
        with socket.create_connection(("127.0.0.1", store.port)) as client:
            converse(client, Exchange(text, text))
    finally:
        store.close()


def test_a_big_request_with_a_wrong_answer_or_none_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in (b"", b"answe", b"answes", b"answer!"):
        with conversing(said) as client, pytest.raises(BenchError):
            converse(client, Exchange(b"ask", b"answer"))
    with conversing(b"ans", b"wer") as client:
        converse(client, Exchange(b"ask", b"answer"))
    monkeypatch.setattr(bench_loads, "ANSWER_LIMIT_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BenchError, match="no answer in time"):
        converse(ours, Exchange(b"ask", b"answer"))


# Clients


@pytest.fixture
def clients() -> Iterator[WideClients]:
    made = WideClients()
    yield made
    made.leave()


def come_up(clients: Clients, port: int, count: int, dialect: str = "torch") -> Load:
    return clients.come_up(DIALECTS[dialect], [("127.0.0.1", port, count)])


@pytest.mark.parametrize(
    ("name", "speech"), [("libuv", TORCH), pytest.param("redis", REDIS, marks=needs_redis)]
)
def test_busy_clients_do_what_they_say_they_did(name: str, speech: Dialect, clients: WideClients) -> None:
    with serving(name) as port:
        clients.come_up(speech, [("127.0.0.1", port, 3)])
        assert clients.ask_for(0, "store", 1).operations == 3
        assert clients.ask(after(20), ASKED["ADD"]).operations == 3 * 21
        assert clients.ask(after(0), ASKED["ADD"], 5).operations == 3 * 5  # it knows how far the counters are
        assert clients.ask(after(3), ASKED["CHECK"]).operations == 3 * 4
        assert clients.ask(after(10), ASKED["SET"]).operations == 3 * 11
        load = clients.ask(after(10), ASKED["GET"], 4)
        assert (load.operations, len(load.taken)) == (3 * 11 * 4, 11)


@some_wrong
def test_busy_clients_notice_one_wrong_answer_of_many(make: Callable[[bytes], Sequence[bytes]]) -> None:
    """Of two clients and three turns: the first answer, one between, and the last.

    What is too much behind the very last answer may show with the next run, which is soon enough.
    """
    for number in (1, 4, 6):
        clients = Clients()
        with faking("torch", twist_one("get", number, make)) as port:
            come_up(clients, port, 2)
            clients.ask_for(0, "store", 1)
            with pytest.raises((BenchError, ConnectionError)):
                ask_twice(clients)
            clients.leave()


def ask_twice(clients: Clients) -> None:
    for turns in (2, 1):
        clients.ask(after(turns), ASKED["GET"])


def test_ranks_that_trickle_find_the_count_full_only_at_the_end(clients: WideClients, port: int) -> None:
    total = bench_clients.AHEAD + 3 * bench_clients.BATCH
    clients.come_up(TORCH, [("127.0.0.1", port, total)], process=1)
    assert {rank.getsockname()[0] for rank in clients.sockets} == {"127.1.0.2"}
    at_once = clients.barrier("at once", total, True)
    trickled = clients.barrier("trickled", total, False)
    assert max(at_once.seen) == max(trickled.seen) == total
    assert trickled.seen.count(total) < total == at_once.seen.count(total)
    assert len(trickled.taken) == trickled.operations == total


@both_fakes
def test_clients_take_answers_in_pieces(dialect: str, clients: WideClients) -> None:
    with faking(dialect, in_pieces) as port:
        check_counts(come_up(clients, port, 5, dialect))
        check_counts(clients.barrier("1", 5, True))
        clients.wait("wake")
        assert clients.wake("wake", True, time.monotonic()).operations == 5
        if dialect == "torch":
            clients.ask_for(0, "store", 1)
            assert clients.ask(after(2), ASKED["GET"], 2).operations == 5 * 3 * 2


@both_fakes
@some_wrong
def test_ranks_notice_a_wrong_hello(
    make: Callable[[bytes], Sequence[bytes]], dialect: str, clients: WideClients
) -> None:
    with (
        faking(dialect, twist_one("ping", 3, make)) as port,
        pytest.raises((BenchError, OverflowError, ConnectionError)),
    ):
        come_up(clients, port, 5, dialect)


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
    operation: str, name: str, dialect: str, clients: WideClients
) -> None:
    """What is too much may come after all are done: the next barrier is soon enough."""
    number = 8 if operation == "add" else 3  # five of the ADDs are those at init/
    with faking(dialect, twist_one(operation, number, WRONG[name])) as port:
        come_up(clients, port, 5, dialect)
        with pytest.raises((BenchError, ConnectionError)):
            pass_two_barriers(clients)


def pass_two_barriers(clients: Clients) -> None:
    for name in ("1", "2"):
        check_counts(clients.barrier(name, 5, True))


@pytest.mark.parametrize(
    ("operation", "answers", "count", "words"),
    [
        ("add", [7], 1, "5 ADDs did not give each number from 1 on once"),
        ("look", [1, 2, 3, 4], 0, "a count was lower than it had been before"),
        ("look", [3], 99, "ranks counted from 1 to 99, and they are 5"),
    ],
)
@both_fakes
def test_ranks_notice_a_wrong_count(
    operation: str, answers: list[int], count: int, words: str, dialect: str, clients: WideClients
) -> None:
    """One that was given twice, one that fell, and one that is more than they are."""
    wrong = DIALECTS[dialect].number(count)
    twist: Twist = lambda name, at, reply: [wrong if name == operation and at in answers else reply]  # noqa: E731
    with faking(dialect, twist) as port:
        come_up(clients, port, 5, dialect)
        with pytest.raises(BenchError, match=words):
            check_counts(clients.barrier("1", 5, True))


@both_fakes
def test_ranks_notice_a_barrier_that_lets_the_first_pass_before_the_last_came(
    dialect: str, clients: WideClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_clients, "AHEAD", 8)
    monkeypatch.setattr(bench_clients, "BATCH", 4)
    with faking(dialect, wakes_early=True) as port:
        come_up(clients, port, 128, dialect)
        with pytest.raises(BenchError):
            clients.barrier("1", 128, False)


@both_fakes
def test_ranks_notice_that_they_were_woken_before_anybody_woke_them(
    dialect: str, clients: WideClients
) -> None:
    with faking(dialect, wakes_early=True) as port:
        come_up(clients, port, 3, dialect)
        clients.wait("wake")
        clients.sockets[0].recv(1, socket.MSG_PEEK)  # it is awake
        with pytest.raises(BenchError):
            clients.check_asleep()


def test_ranks_that_wait_too_long_give_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_clients, "ANSWER_LIMIT_S", 1)
    clients = WideClients()
    come_up(clients, port, 3)
    with pytest.raises(BlockingIOError):  # a worker says it in words
        clients.barrier("never", 4, True)
    clients.leave()


# Crowds


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    made = Crowd()
    yield made
    made.leave()


@some_wrong
def test_a_crowd_notices_one_wrong_answer(make: Callable[[bytes], Sequence[bytes]], crowd: Crowd) -> None:
    with faking("torch", twist_one("ping", 5, make)) as port:
        crowd.gather(TORCH, port, 5)
        with pytest.raises(BenchError):
            crowd.arrive(SECONDS)


def test_a_crowd_that_is_turned_away_comes_again(crowd: Crowd) -> None:
    turns = iter(range(100))

    class Moody(FakeStore):
        def _serve(self, client: socket.socket) -> None:
            if next(turns) % 3 == 0:
                client.recv(100)
                leave([client])
            else:
                super()._serve(client)

    store = Moody()
    try:
        crowd.gather(TORCH, store.port, 10)
        load, turned_away = crowd.arrive(SECONDS)
    finally:
        store.close()
    assert load.operations == len(load.taken) == 10
    assert turned_away in range(4, 6)
    assert next(turns) == 10 + turned_away


def test_a_crowd_without_answers_or_a_server_is_a_fault(crowd: Crowd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        crowd.gather(TORCH, port, 3)
        with pytest.raises(BenchError, match="time is up, and 3 clients have no answer"):
            crowd.arrive(0.2)
    nobody = Crowd()
    nobody.gather(TORCH, port, 3)
    with pytest.raises(BenchError, match="nobody listens for new clients"):
        nobody.arrive(SECONDS)
    nobody.leave()


# Workers


@pytest.fixture
def worker() -> Iterator[LoadProcess]:
    with ExitStack() as resources:
        yield LoadProcess(resources, "benchmarks.clients:WideClients")


def test_a_worker_says_what_went_wrong_in_it(worker: LoadProcess, port: int) -> None:
    load = worker.ask(SECONDS, "come_up", dialect=TORCH, places=[("127.0.0.1", port, 2)])
    assert (load.operations, len(load.taken), len(load.counted)) == (2, 2, 2)
    with pytest.raises(KeyError, match="nothing"):
        worker.ask(SECONDS, "ask_for", seconds=0, operation="nothing", per_request=1)
    worker.ask(SECONDS, "ask_for", seconds=0, operation="store", per_request=1)
    with pytest.raises(BenchError, match="1 of 1 processes gave no answer within 0"):
        outcomes([worker.order("ask_for", seconds=SECONDS, operation="CHECK", per_request=1)], 0.1)
    worker.end()
    until(lambda: not os.path.exists(f"/proc/{worker.pid}"), "it has ended")


def test_loads_are_one_from_the_first_start_to_the_last_end() -> None:
    one = Load(30, 10.0, 12.0, share=0.5, taken=[0.2, 0.5], counted=[1])
    other = Load(10, 11.0, 14.0, share=0.9, taken=[0.1], counted=[2], seen=[2])
    both = together([one, other])
    assert (both.operations, both.seconds, both.share) == (40, 4.0, 0.9)
    assert (both.taken, both.counted, both.seen) == ([0.2, 0.5, 0.1], [1, 2], [2])
    assert (both.percentile(0.5), both.percentile(0.99)) == (0.2, 0.5)
    begun, load = time.monotonic(), Load()
    load.stop(7)
    assert begun <= load.start <= load.end <= time.monotonic()
