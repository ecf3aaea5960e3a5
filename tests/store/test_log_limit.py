"""The log of a server while somebody floods it: a few lines a second, and a count of the others."""

from __future__ import annotations

import re

import pytest

from processes import serving
from rallypoint.store.core.turn import PeerLimit, address_of
from raw import RawClient, until

pytestmark = pytest.mark.windows

FLOOD = 300


def test_a_flood_of_bad_connections_writes_few_lines_and_counts_the_others() -> None:
    with serving("auto") as server:
        for _ in range(FLOOD):
            with RawClient(server.port, shake_hands=False) as client:
                client.send(b"GET / HTTP/1.1\r\n\r\n")
                client.read_rest()
        until(lambda: sum(told(server.read_log())) == FLOOD, "all are told of, or counted")
        written, left_out = told(server.read_log())
        assert written < FLOOD / 2
        assert left_out > FLOOD / 2


def told(log: str) -> tuple[int, int]:
    """How many lines tell of a connection, and how many are said to be left out."""
    counts = re.findall(r"^rallypoint: ([\d,]+) more such lines? of 127\.0\.0\.1 w\w+ left out$", log, re.M)
    return log.count("closed 127.0.0.1:"), sum(int(count.replace(",", "")) for count in counts)


def test_each_peer_and_kind_has_its_own_limit_and_all_together_have_one() -> None:
    limit = PeerLimit(most=2, most_of_all_peers=5)
    asked = [("a", "10.0.0.5:1"), ("a", "10.0.0.5:2"), ("a", "10.0.0.5:3"), ("b", "10.0.0.5:4")]
    assert [limit.admits(*each, now=7.0) for each in asked] == [True, True, False, True]
    assert [limit.admits("a", f"10.0.0.6:{port}", 7.5) for port in range(3)] == [True, True, False]
    assert not limit.admits("a", "10.0.0.7:1", 7.9), "five in all"
    assert limit.take_left_out(7.99) == [], "the second is not over"
    assert limit.take_left_out(8.0) == [("10.0.0.5", 1), ("10.0.0.6", 1), ("10.0.0.7", 1)]
    assert limit.take_left_out(9.0) == [], "each is told once"
    assert limit.admits("a", "10.0.0.5:9", 9.0)


def test_many_peers_are_counted_together() -> None:
    limit = PeerLimit(most=0)
    for number in range(5_000):
        limit.admits("a", f"10.0.{number // 250}.{number % 250}:1", 0.0)
    left_out = limit.take_left_out(1.0)
    assert [address for address, _ in left_out] == ["10.0.0.0", "10.0.0.1", "10.0.0.2", "other addresses"]
    assert sum(count for _, count in left_out) == 5_000


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("10.0.0.5:4000", "10.0.0.5"),
        ("fe80::1%eth0:4000", "fe80::1%eth0"),
        ("client 3", "client 3"),
        ("", ""),
    ],
)
def test_an_address_has_no_port(peer: str, address: str) -> None:
    assert address_of(peer) == address
