"""The dialects of `rallypoint bench`: their bytes by example, and that real stores understand them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_fakes import needs_redis, serving
from benchmarks import targets
from benchmarks.clients import connect
from benchmarks.dialects import REDIS, TORCH, WideDialect
from benchmarks.loads import converse
from benchmarks.targets import RedisTarget
from rallypoint.bench.clients import Exchange
from rallypoint.bench.results import BenchError

# Bytes


@pytest.mark.parametrize("dialect", [TORCH, REDIS], ids=["torch", "redis"])
@given(value=st.integers(-(2**63), 2**63 - 1))
def test_a_number_is_read_as_it_was_written(dialect: WideDialect, value: int) -> None:
    assert number_in(dialect, dialect.number(value)) == value


def number_in(dialect: WideDialect, reply: bytes) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(reply)
        theirs.shutdown(socket.SHUT_WR)
        return dialect.read_number(ours)


def test_an_answer_of_redis_that_is_no_number_is_a_fault() -> None:
    for reply in (b"-ERR max number of clients reached\r\n", b"+OK\r\n", b"$1\r\n", b"::5\r\n", b":12\n"):
        with pytest.raises(BenchError, match="no number"):
            number_in(REDIS, reply)


# Real stores


STORES = [
    pytest.param("libuv", id="ours on libuv"),
    pytest.param("legacy", id="ours on legacy"),
    pytest.param("redis", marks=needs_redis),
    pytest.param("torch-libuv", marks=pytest.mark.slow),
    pytest.param("torch-legacy", marks=pytest.mark.slow),
]


class Client:
    """A client of a real store."""

    def __init__(self, port: int, dialect: WideDialect) -> None:
        self.socket = connect(port, dialect)

    def ask(self, exchange: Exchange) -> None:
        """Fails unless the reply is right, and nothing comes behind it."""
        converse(self.socket, exchange)
        self.expect_nothing()

    def expect_nothing(self) -> None:
        with pytest.raises(BlockingIOError):
            self.socket.recv(1, socket.MSG_DONTWAIT)


@pytest.fixture(params=STORES, scope="module")
def place(request: pytest.FixtureRequest) -> Iterator[tuple[int, WideDialect]]:
    """Where a store is, and how it is spoken to."""
    with serving(request.param) as port:
        yield port, REDIS if request.param == "redis" else TORCH


@pytest.fixture
def clients(place: tuple[int, WideDialect]) -> Iterator[tuple[Client, Client]]:
    both = (Client(*place), Client(*place))
    yield both
    for client in both:
        client.socket.close()


Place = tuple[int, WideDialect]
Clients = tuple[Client, Client]


def test_a_counter_counts(place: Place, clients: Clients) -> None:
    _, dialect = place
    first, second = clients
    first.ask(Exchange(dialect.add(b"counter", 5), dialect.number(5)))
    second.ask(Exchange(dialect.add(b"counter", -12), dialect.number(-7)))
    first.ask(Exchange(dialect.add(b"counter", 0), dialect.number(-7)))


def test_a_release_ends_waits_of_now_and_later_however_often_it_comes(place: Place, clients: Clients) -> None:
    _, dialect = place
    waiter, releaser = clients
    waiter.socket.sendall(dialect.wait(b"gate").request)
    releaser.ask(dialect.store(b"another", b"1"))
    waiter.expect_nothing()
    for _ in range(2):
        releaser.socket.setblocking(True)
        releaser.socket.sendall(dialect.release(b"gate"))
        releaser.ask(dialect.store(b"another", b"1"))  # so there was no reply to the release
    waiter.ask(Exchange(b"", dialect.wait(b"gate").reply))
    waiter.ask(dialect.wait(b"gate"))


def test_many_keys_at_once(place: Place, clients: Clients) -> None:
    _, dialect = place
    first, second = clients
    keys, values = [b"many/%d" % n for n in range(50)], [b"v" * n for n in range(50)]
    first.ask(dialect.multi_set(keys, values))
    second.ask(dialect.multi_get(keys, values))
    second.ask(dialect.multi_get(keys[::-1], values[::-1]))


def test_waits_are_given_up_while_another_waits(place: Place, clients: Clients) -> None:
    _, dialect = place
    if dialect is REDIS:
        return  # which has no such thing
    waiter, quitter = clients
    waiter.ask(TORCH.wait_for_missing([b"missing/%d" % n for n in range(10)]))
    for _ in range(3):
        quitter.ask(TORCH.give_up(b"nobody sets this"))
    waiter.expect_nothing()


# redis


@needs_redis
def test_a_redis_that_does_not_start_is_a_fault_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "most_connections", lambda: -1)
    with pytest.raises(BenchError, match=r"(?s)did not start.*maxclients"):
        RedisTarget("redis").start()
