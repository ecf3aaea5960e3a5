"""How many requests of each kind there have been: the same as were sent, whatever came together or in pieces.

GETs are not counted by themselves: they are what is left. So every other kind has to be right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ends import (
    BYE,
    PRESENT,
    Desk,
    End,
    Played,
    arrive,
    batch,
    leave,
    recall,
    relay_on,
    session,
    wait_in_turn,
)
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.store import Core
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.rollcall.clients import whole
from rallypoint.store.rollcall.snapshot import Operation, Snapshot
from rallypoint.store.wire import requests
from rallypoint.store.wire.encoding import VALIDATE, counted_request, request
from rallypoint.store.wire.opcodes import Op
from test_core import CANCEL_WAIT, add, barrier, get, pop, push, set_, wait
from test_snapshots import PING, seen_by, told

pytestmark = pytest.mark.windows

repeatable = settings(derandomize=True, deadline=None, max_examples=60)

CHECK = counted_request(Op.CHECK, [b"k"])
KINDS = {
    Op.SET: set_(b"k", b"v"),
    Op.COMPARE_SET: request(Op.COMPARE_SET, b"k", b"", b"v"),
    Op.GET: get(b"k"),
    Op.ADD: add(b"n", 1),
    Op.CHECK: CHECK,
    Op.WAIT: wait(b"n"),
    Op.GETNUMKEYS: request(Op.GETNUMKEYS),
    Op.DELETE_KEY: request(Op.DELETE_KEY, b"k"),
    Op.APPEND: request(Op.APPEND, b"a", b"v"),
    Op.MULTI_GET: counted_request(Op.MULTI_GET, [b"k", b"n"]),
    Op.MULTI_SET: counted_request(Op.MULTI_SET, [b"k", b"v"], blobs_each=2),
    Op.CANCEL_WAIT: CANCEL_WAIT,
    Op.PING: PING,
    Op.QUEUE_PUSH: push(b"q", b"v"),
    Op.QUEUE_POP: pop(b"q"),
    Op.QUEUE_LEN: request(Op.QUEUE_LEN, b"q"),
    Op.LIST_KEYS: request(Op.LIST_KEYS),
    Op.BARRIER: barrier(b"b", 1),
    Op.REPORT: request(Op.REPORT, b"text"),
}
"""A request of each kind, by which no client does anything that it may not do twice."""

IN_BATCHES: list[Op] = [op for op in KINDS if op not in (Op.CANCEL_WAIT, Op.PING, Op.BARRIER, Op.REPORT)]

some_kinds = st.lists(
    st.sampled_from([*KINDS] + 4 * [Op.GET] + 2 * [Op.SET, Op.ADD, Op.CHECK, Op.WAIT, Op.PING]), max_size=12
)


each_front = pytest.mark.parametrize(
    "make", [lambda: Desk(Core()), lambda: relay_on(Desk(Core()))[0]], ids=["server", "relay"]
)


@pytest.fixture(autouse=True, scope="module")
def _relays_read_on() -> Iterator[None]:
    """However many replies are due: nobody answers them here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rallypoint.store.relay.core.relay_client._MOST_DUE", 1_000)
        yield


def counted(front: ServerCore[object]) -> Counter[Op]:  # type: ignore[type-var]
    """What a front says that it was asked, without what it was not."""
    return Counter({op: count for op, count in front.counts().items() if count})


class Tally:
    """One client, what it has sent as a whole, and a rest that has not come yet."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.sent: Counter[Op] = Counter()
        self._pending: list[tuple[int, Op]] = []  # how many bytes each request still lacks
        self._unsent = b""
        self._barriers = 0

    def plan(self, kinds: list[Op]) -> None:
        for op in kinds:
            self._barriers += op is Op.BARRIER  # a relay does not know at once that one is complete
            data = barrier(b"%d" % self._barriers, 1) if op is Op.BARRIER else KINDS[op]
            self._unsent += data
            self._pending.append((len(data), op))

    def send(self, size: int) -> None:
        data, self._unsent = self._unsent[:size], self._unsent[size:]
        if not data:
            return
        self.end.send(data)
        left = len(data)
        while self._pending and self._pending[0][0] <= left:
            length, op = self._pending.pop(0)
            left -= length
            self.sent[op] += 1
        if left:
            length, op = self._pending[0]
            self._pending[0] = (length - left, op)


@each_front
@repeatable
@given(data=st.data())
def test_whatever_is_sent_in_whatever_pieces_is_counted(
    data: st.DataObject, make: Callable[[], Desk]
) -> None:
    desk = make()
    clients = [Tally(end) for end in desk.open(3)]
    gone: Counter[Op] = Counter()
    for _ in range(data.draw(st.integers(1, 12))):
        client = data.draw(st.sampled_from(clients))
        client.plan(data.draw(some_kinds))
        client.send(data.draw(st.one_of(st.just(1_000_000), st.integers(0, 60))))
        if data.draw(st.integers(0, 7)) == 0:
            client.end.close()
            gone += client.sent
            clients[clients.index(client)] = Tally(desk.open()[0])
        assert counted(desk.front) == sum((each.sent for each in clients), gone)
        for each in clients:
            assert each.end.connection.operations == each.sent.total()
    assert desk.front.clients.operations == sum((each.sent for each in clients), gone).total()


@each_front
def test_what_all_clients_say_alike_is_counted(make: Callable[[], Desk]) -> None:
    """Data that has come before is known by its bytes, and is not read again."""
    alike = [[op] for op in KINDS] + [[Op.ADD, Op.WAIT, Op.PING], [Op.SET, Op.GET], [*KINDS]]
    for kinds, times in product(alike, [1, 2, 3, 10]):
        desk = make()
        clients = desk.open(times)
        for client in clients:
            client.send(b"".join(KINDS[op] for op in kinds))
        assert counted(desk.front) == Counter({op: times * kinds.count(op) for op in kinds})
        assert {client.connection.operations for client in clients} == {len(kinds)}


def test_what_was_known_once_is_counted_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so much data is known at a time; it is forgotten all at once."""
    monkeypatch.setattr(requests, "_MOST_ENTRIES", 4)
    desk = Desk(Core())
    (client,) = desk.open()
    for number in range(20):
        for _ in range(5):
            client.send(set_(b"%d" % number) + PING)
            client.send(CHECK)
            client.send(CHECK)
    assert counted(desk.front) == {Op.SET: 100, Op.PING: 100, Op.CHECK: 200}
    assert client.connection.operations == 400


# Sessions


@each_front
def test_the_requests_of_a_relay_are_counted_by_their_kinds_and_its_batches_too(
    make: Callable[[], Desk],
) -> None:
    desk = make()
    relay = Played(desk)
    relay.send(*[KINDS[op] for op in (Op.SET, Op.GET, Op.GET, Op.ADD)])
    relay.send(recall(b"k"), arrive(b"b", 5, 2), leave(5), wait_in_turn(b"w"), told(b"{}"))
    relay.send()
    once = [
        Op.SESSION,
        Op.PRESENT,
        Op.SET,
        Op.ADD,
        Op.RECALL,
        Op.ARRIVE,
        Op.LEAVE,
        Op.WAIT_IN_TURN,
        Op.RELAY_REPORT,
    ]
    assert counted(desk.front) == {Op.BATCH: 3, Op.GET: 2, **dict.fromkeys(once, 1)}
    assert relay.end.connection.operations == 5, "a batch is one"
    relay.end.send(BYE)
    relay.lose()
    assert counted(desk.front)[Op.BATCH] == 3


# Violations


@pytest.mark.parametrize("violation", [b"\xff", add(b"word", 1), b"\x01" + b"\xff" * 8])
def test_what_came_before_a_violation_counts_and_nothing_is_less_than_none(violation: bytes) -> None:
    for before in ([], [Op.SET], [Op.SET, Op.PING, Op.ADD]):
        desk = Desk(Core())
        other, client = desk.open(2)
        other.send(set_(b"word", b"x") + get(b"k"))
        client.send(get(b"k") + b"".join(KINDS[op] for op in before) + violation)
        assert client.error is not None
        refused = Counter({Op.ADD: 1} if violation[0] == Op.ADD else {})  # read, though not carried out
        assert counted(desk.front) == Counter(before) + refused + Counter({Op.SET: 1, Op.GET: 1})
        assert min(desk.front.counts().values()) >= 0


def test_a_relay_counts_what_its_clients_ask_not_what_it_asks() -> None:
    relay, wire = relay_on(Desk(Core()))
    ranks = relay.open(5)
    for each in ranks:
        each.send(add(b"n", 1) + get(b"k"))
    wire.run()
    assert counted(relay.front) == {Op.ADD: 5, Op.GET: 5}
    assert isinstance(relay.front, RelayCore)
    once = [Op.SESSION, Op.PRESENT, Op.BATCH, Op.ADD, Op.GET]
    assert counted(wire.upstream.front) == dict.fromkeys(once, 1)


# Workers


def work(desk: Desk, number: int, told: Snapshot) -> End:
    """A worker of a server, which has told this."""
    end = End(desk, desk.front.open(f"worker-{number}:4711"))
    desk.ends[end.connection] = end
    end.send(VALIDATE + session(bytes([number]) * 16, keep=0) + PRESENT)
    end.send(batch(1, 0, request(Op.RELAY_REPORT, told.to_json().encode())))
    return end


def test_what_a_worker_has_told_last_counts_on_when_it_has_ended() -> None:
    """Also while no worker is there at all."""
    desk = Desk(Core())

    def counted_by_all() -> tuple[int, int, int, int, dict[str, tuple[int, float]]]:
        seen = whole(seen_by(desk.front))
        asked = [each for each in seen.operations if each.name in ("GET", "SET")]  # of the worker's clients
        operations = {each.name: (each.count, each.per_second) for each in asked}
        return seen.received, seen.sent, seen.accepted, seen.error_count, operations

    told = replace(seen_by(Core()), received=10, sent=20, accepted=3, error_count=1)
    first = work(desk, 1, replace(told, operations=(Operation("GET", 5, 2.5), Operation("SET", 1, 0.0))))
    assert counted_by_all() == (10, 20, 3, 1, {"GET": (5, 2.5), "SET": (1, 0.0)})
    first.close()
    assert counted_by_all() == (10, 20, 3, 1, {"GET": (5, 0.0), "SET": (1, 0.0)})
    second = work(desk, 1, replace(told, operations=(Operation("GET", 2, 1.0),)))
    assert counted_by_all() == (20, 40, 6, 2, {"GET": (7, 1.0), "SET": (1, 0.0)})
    second.close()
    assert counted_by_all() == (20, 40, 6, 2, {"GET": (7, 0.0), "SET": (1, 0.0)})


def test_what_a_worker_has_told_may_be_no_snapshot() -> None:
    desk = Desk(Core())
    end = work(desk, 1, replace(seen_by(Core()), accepted=3))
    end.send(batch(2, 0, request(Op.RELAY_REPORT, b"{")))
    end.close()
    assert whole(seen_by(desk.front)).accepted == 0
