"""Random runs of relays on a failing network, and proof that their checker sees what is wrong.

Each broken rule below is one that somebody could think of as an improvement, or forget.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from linearizability import (
    REFUSED,
    Operation,
    apply_to_queue,
    apply_to_value,
    explain_barrier,
    is_linearizable,
    whole_store,
)
from rallypoint.store.core import sessions
from rallypoint.store.core.context import Rest
from rallypoint.store.core.sessions import Session, SessionConnection
from rallypoint.store.core.store import Connection
from rallypoint.store.core.tickets import StoreCarrier
from rallypoint.store.relay.core.combining import Combiner
from rallypoint.store.relay.core.relay_client import RelayClient
from rallypoint.store.relay.core.upstream import Upstream
from rallypoint.store.relay.core.upstream_requests import (
    CombinedAdd,
    OnAnswer,
    PopCall,
    RequestOrder,
    SharedRequest,
    SharedWait,
    UpstreamRequest,
    Waiter,
)
from rallypoint.store.wire import parser
from rallypoint.store.wire.encoding import unpack_i64
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import LongAnswers, Status
from simulation import in_batches, must_catch, simulate


@in_batches(300, 5_050)
def test_every_run_could_have_been_one_store(seeds: range) -> None:
    for seed in seeds:
        simulate(seed)


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in range(5):
        assert simulate(seed).report() == simulate(seed).report()


def test_requests_that_are_carried_out_in_slices_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server does as little as possible at once, so that clients come and go in the midst of requests."""
    monkeypatch.setattr(sessions, "STEPS_AT_ONCE", 1)
    monkeypatch.setattr(parser, "STEPS_AT_ONCE", 1)
    monkeypatch.setattr(parser, "BYTES_AT_ONCE", 20)
    for seed in range(60):
        simulate(seed)


# Broken rules


def test_a_read_that_joins_one_already_sent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Combiner._share

    def join_what_is_sent(
        self: Combiner, order: RequestOrder, op: Op, blobs: Sequence[bytes], on_answer: OnAnswer
    ) -> None:
        for request in self._sent.values():
            if (
                isinstance(request, SharedRequest)
                and request._blobs == blobs
                and (request._op is Op.CHECK) == (op is Op.CHECK)
            ):
                request.askers.append(on_answer)
                return
        read(self, order, op, blobs, on_answer)

    monkeypatch.setattr(Combiner, "_share", join_what_is_sent)
    must_catch("no order explains", first=29)


def test_a_wait_that_ends_with_one_from_before_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    end_wait = Combiner._end_wait

    def end_for_all(
        self: Combiner, request: SharedWait, waiters: list[Waiter], status: Status, content: bytes
    ) -> None:
        for waiter in waiters:
            waiter.since = 0
        end_wait(self, request, waiters, status, content)

    monkeypatch.setattr(Combiner, "_end_wait", end_for_all)
    must_catch("no order explains", 2_000, "waits", first=513)


def test_sums_that_are_told_to_all_alike_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell_all_the_last(self: CombinedAdd, status: Status, content: bytes) -> bool:
        for _, _, answer in self._parts:
            answer(status, content)
        return True

    monkeypatch.setattr(CombinedAdd, "receive", tell_all_the_last)
    must_catch("told twice", mix="adds", first=60)


def test_sums_that_are_dealt_out_backwards_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = CombinedAdd.receive

    def deal_backwards(self: CombinedAdd, status: Status, content: bytes) -> bool:
        self._parts.reverse()
        return receive(self, status, content)

    monkeypatch.setattr(CombinedAdd, "receive", deal_backwards)
    must_catch("no order explains", first=29)


def test_a_batch_that_is_carried_out_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    last: dict[bytes, list[tuple[bytes, int]]] = {}
    batch, carry, attach = Session.begin_batch, StoreCarrier.carry, Session.attach

    def begin(self: Session, payload: bytes) -> None:
        last[self.token] = []
        batch(self, payload)

    def remember(
        self: StoreCarrier, session: Session, tag: int, op: Op, blobs: list[bytes], tail: bytes
    ) -> Rest | None:
        if op is Op.ADD:
            last[session.token].append((blobs[0], unpack_i64(tail)[0]))
        return carry(self, session, tag, op, blobs, tail)

    def repeat_adds(self: Session, connection: SessionConnection, taken: int) -> None:
        attach(self, connection, taken)
        if isinstance(self._carrier, StoreCarrier):
            requester = self._carrier._requester(self)
            assert isinstance(requester, Connection)
            for key, amount in last.pop(self.token, []):
                if key.startswith(b"c"):  # the others are no numbers
                    requester.add(key, amount)

    monkeypatch.setattr(Session, "begin_batch", begin)
    monkeypatch.setattr(StoreCarrier, "carry", remember)
    monkeypatch.setattr(Session, "attach", repeat_adds)
    must_catch("should be one of", mix="adds")


def test_the_dead_who_are_counted_at_a_barrier_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = RelayClient.leave

    def stay_at_barriers(self: RelayClient) -> Rest:
        self._arrivals.clear()
        return leave(self)

    monkeypatch.setattr(RelayClient, "leave", stay_at_barriers)
    must_catch("barrier", mix="barriers", first=35)


def test_relays_that_count_while_they_are_away_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreCarrier, "suspend", lambda self, session: iter(()))
    must_catch("barrier", mix="barriers", first=14)


def test_joining_before_an_earlier_request_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    find = Combiner._find

    def forget_the_order(
        self: Combiner, order: RequestOrder, name: tuple[object, ...]
    ) -> UpstreamRequest | None:
        order.last = 0
        return find(self, order, name)

    monkeypatch.setattr(Combiner, "_find", forget_the_order)
    must_catch("no order explains", first=6)


def test_a_call_that_nobody_gives_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Combiner, call: PopCall) -> None:
        pass

    monkeypatch.setattr(Combiner, "dismiss", keep)
    must_catch("is not told that its wait is over|which nobody waits for", mix="queues", first=39)


def test_a_silence_that_no_beat_finds_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Upstream, "beat", lambda _: b"")
    must_catch("has no answer to")


def test_a_value_that_is_wrongly_taken_for_unchanged_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_read = Session.answer_read

    def trust(
        self: Session, tag: int, key: bytes, same: object, head: bytes, value: bytes = b"", *, recalled: bool
    ) -> None:
        same = self._remembered.get(key, (same, 0))[0]
        answer_read(self, tag, key, same, head, value, recalled=recalled)

    monkeypatch.setattr(Session, "answer_read", trust)
    must_catch("no order explains")


def test_a_recall_that_overtakes_the_value_it_relies_on_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LongAnswers, "has", lambda _, __: False)
    must_catch("is said to be unchanged, but is not known here|no order explains", mix="reads", first=35)


# The checker by itself


def _op(what: str, start: int, end: int | None, argument: object = None, result: object = None) -> Operation:
    return Operation(f"{what}{start}", what, (b"k",), argument, start, end, result)


VALUES: list[tuple[list[Operation], bool]] = [
    ([_op("SET", 1, 2, b"a"), _op("GET", 3, 4, None, b"a")], True),
    ([_op("SET", 1, 2, b"a"), _op("GET", 3, 4, None, b"")], False),
    ([_op("SET", 1, 4, b"a"), _op("GET", 2, 3, None, b"")], True),
    ([_op("SET", 1, None, b"a"), _op("GET", 8, 9, None, b"a")], True),
    ([_op("SET", 1, None, b"a"), _op("GET", 5, 6, None, b"a"), _op("GET", 8, 9, None, b"")], False),
    ([_op("ADD", 1, 5, 1, 1), _op("ADD", 2, 6, 1, 2)], True),
    ([_op("ADD", 1, 5, 1, 1), _op("ADD", 2, 6, 1, 1)], False),
    ([_op("ADD", 1, 2, 1, 2), _op("ADD", 3, 4, 1, 1)], False),
    ([_op("SET", 1, 2, b"a"), _op("ADD", 3, 4, 1, REFUSED)], True),
    ([_op("ADD", 3, 4, 1, REFUSED)], False),
    ([_op("SET", 1, 2, b"a"), _op("DELETE", 3, 4, None, 1), _op("WAIT", 5, 6)], False),
    ([_op("SET", 1, 2, b"a"), _op("DELETE", 3, 9, None, 1), _op("WAIT", 5, 6)], True),
    ([_op("APPEND", 1, 5, b"a"), _op("APPEND", 2, 4, b"b"), _op("GET", 6, 7, None, b"ba")], True),
    ([_op("CAS", 1, 5, (b"", b"a"), b"a"), _op("CAS", 2, 4, (b"", b"b"), b"b")], False),
    ([_op("CAS", 1, 5, (b"", b"a"), b"b"), _op("CAS", 2, 4, (b"", b"b"), b"b")], True),
]


def test_the_search_tells_right_from_wrong() -> None:
    for operations, is_right in VALUES:
        assert is_linearizable(operations, None, apply_to_value) is is_right, operations


QUEUES: list[tuple[list[Operation], bool]] = [
    ([_op("PUSH", 1, 2, b"a"), _op("PUSH", 3, 4, b"b"), _op("POP", 5, 6, None, (2, b"a"))], True),
    ([_op("PUSH", 1, 2, b"a"), _op("PUSH", 3, 4, b"b"), _op("POP", 5, 6, None, (2, b"b"))], False),
    ([_op("PUSH", 1, 4, b"a"), _op("PUSH", 2, 3, b"b"), _op("POP", 5, 6, None, (2, b"b"))], True),
    ([_op("PUSH", 1, 2, b"a"), _op("POP", 3, 4, None, (0, None))], False),
    ([_op("PUSH", 1, 2, b"a"), _op("POP", 3, None), _op("POP", 5, 6, None, (0, None))], True),
    ([_op("PUSH", 1, 2, b"a"), _op("LEN", 3, 4, None, 0)], False),
]


def test_the_search_knows_queues() -> None:
    for operations, is_right in QUEUES:
        assert is_linearizable(operations, (), apply_to_queue) is is_right, operations


def test_requests_of_one_client_are_done_in_their_order() -> None:
    write = Operation("r", "SET", (b"k",), b"a", 1, 5)
    read = Operation("r", "GET", (b"k",), None, 1, 5, b"")
    assert is_linearizable([read, write], None, apply_to_value)
    assert not is_linearizable([write, read], None, apply_to_value)


def test_a_torn_multi_set_is_wrong_for_the_whole_store() -> None:
    keys = (b"k", b"l")
    write = Operation("r", "MULTI_SET", keys, (b"a", b"b"), 1, 9)
    torn = Operation("s", "MULTI_GET", keys, None, 2, 8, (b"a", b""))
    assert not is_linearizable([write, torn], (None, None), whole_store(keys))
    torn.result = (b"a", b"b")
    assert is_linearizable([write, torn], (None, None), whole_store(keys))


@pytest.mark.parametrize(
    ("size", "released", "dead", "is_right"),
    [
        (2, [(1, 5), (2, 6)], [], True),
        (2, [(1, 3), (4, 6)], [], False),
        (2, [(1, 9)], [], False),
        (2, [(1, 9)], [(2, 9)], True),
        (2, [(1, 1), (0, 10), (9, 10)], [(0, 5)], True),
        (3, [(1, 9), (2, 9), (3, 9), (4, 9)], [], False),
        (1, [(1, 2), (5, 6)], [], True),
    ],
)
def test_releases_come_in_groups(
    size: int, released: list[tuple[int, int]], dead: list[tuple[int, int]], is_right: bool
) -> None:
    assert explain_barrier(size, released, dead) is is_right
