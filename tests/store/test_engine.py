"""The engine: all rules against a naive model, the rest by example, and what an operation costs.

Members that stand for several, are away, or wait in turn are a relay's sessions: see test_sessions.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.engine import Engine
from rallypoint.store.wire.limits import Limits

pytestmark = pytest.mark.windows

I64_MIN = -(1 << 63)
I64_MAX = (1 << 63) - 1


@pytest.fixture
def engine() -> Engine[str]:
    return Engine()


def snapshot(engine: Engine[str]) -> tuple[object, ...]:
    """All that an operation which raises must leave as it was."""
    engine.check_invariants()
    keys = sorted(engine.keys())
    queued = [engine.queue_length(key) for key in (b"k", b"q")]
    waiting = [engine.waiters.awaited_by(member) for member in "ABC"]
    return [(key, bytes(engine.get(key) or b"")) for key in keys], queued, waiting, engine.space.stored_bytes


# Numbers


def test_add_to_a_number_that_was_set(engine: Engine[str]) -> None:
    for number in (b"41", b"+41", b" 41", b"41\n", b"041"):
        engine.set(b"k", number)
        assert engine.add(b"k", 1)[0] == 42
        assert engine.get(b"k") == b"42"
        engine.check_invariants()


def test_add_to_no_number_raises_and_changes_nothing(engine: Engine[str]) -> None:
    words = [b"", b" ", b"abc", b"12abc", b"1_0", b"0x10", b"1.0", b"- 1", b"--1", b"\xb2"]
    for value in (*words, b"1" * 65, b"0" * 1000):
        for first, appended in ((value, None), (b"", value)):
            engine.set(b"k", first)
            if appended is not None:
                engine.append(b"k", appended)
            before = snapshot(engine)
            with pytest.raises(ProtocolError, match="number"):
                engine.add(b"k", 1)
            assert snapshot(engine) == before, value


# Waiting


def test_a_member_waits_for_no_more_keys_than_the_limit() -> None:
    engine: Engine[str] = Engine(Limits(keys_per_request=3))
    engine.wait("A", [b"a", b"b"])
    engine.barrier("A", b"x", 2)
    before = snapshot(engine)
    with pytest.raises(LimitError, match="keys_per_request"):
        engine.wait("A", [b"c"])
    with pytest.raises(LimitError, match="keys_per_request"):
        engine.barrier("A", b"y", 2)
    assert snapshot(engine) == before
    engine.wait("B", [b"a", b"b", b"c"])
    engine.withdraw("A")
    engine.wait("A", [b"a", b"b", b"c"])
    engine.check_invariants()


def test_a_barrier_of_the_largest_size_takes_no_room(engine: Engine[str]) -> None:
    assert not engine.barrier("A", b"k", I64_MAX)
    assert engine.barriers.arrived(b"k", I64_MAX) == ["A"]


def test_who_withdraws_while_it_is_away_is_forgotten(engine: Engine[str]) -> None:
    engine.barrier("A", b"k", 2)
    engine.suspend("A")
    engine.withdraw("A")
    assert not engine.barriers.count_at("A")


def test_who_arrives_while_it_is_away_counts_when_it_is_back(engine: Engine[str]) -> None:
    engine.suspend("A")
    assert not engine.barrier("A", b"k", 1)
    assert engine.barriers.count_at("A") == 1
    assert list(engine.resume("A")) == ["A"]


def test_who_waits_in_turn_waits_for_no_more_keys_than_the_limit() -> None:
    engine: Engine[str] = Engine(Limits(keys_per_request=2))
    engine.wait_in_turn("A", [b"a", b"b", b"a"])
    with pytest.raises(LimitError, match="keys_per_request"):
        engine.wait_in_turn("A", [b"c"])
    engine.check_invariants()


# All rules, against a model that takes the shortest way to each result


@dataclass
class ModelWait:
    member: str
    left: list[bytes]


class Model:
    """What the engine is to do, with lists that are searched from the front."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, list[bytes]] = {}
        self.waits: list[ModelWait] = []
        self.at_barriers: list[tuple[str, bytes, int]] = []
        self.called: list[tuple[str, bytes]] = []

    def is_there(self, key: bytes) -> bool:
        return key in self.values or bool(self.queues.get(key))

    def stored(self) -> tuple[int, int]:
        """Bytes, and entries."""
        queued = [value for queue in self.queues.values() for value in queue]
        names = [*self.values, *(key for key, queue in self.queues.items() if queue)]
        stored = [*names, *self.values.values(), *queued]
        return sum(map(len, stored)), len(self.values) + len(queued)

    def check_limits(self, before: tuple[int, int]) -> None:
        """Raise if more is stored than before, and too much."""
        (old_size, old_entries), (size, entries) = before, self.stored()
        if size > max(old_size, self.limits.stored_bytes):
            raise LimitError("stored_bytes")
        if entries > max(old_entries, self.limits.stored_entries):
            raise LimitError("stored_entries")

    def set(self, key: bytes, value: bytes) -> list[str]:
        return self.multi_set([(key, value)])

    def multi_set(self, pairs: list[tuple[bytes, bytes]]) -> list[str]:
        before, values = self.stored(), self.values
        self.values = values | dict(pairs)
        try:
            self.check_limits(before)
        except LimitError:
            self.values = values
            raise
        return [member for key, _ in pairs for member in self._arrive(key, len(self.waits))]

    def add(self, key: bytes, amount: int) -> tuple[int, list[str]]:
        value = self.values.get(key, b"0")
        if not re.fullmatch(rb"-?[0-9]{1,64}", value):
            raise ProtocolError("no number")
        total = int(value) + amount
        if not I64_MIN <= total <= I64_MAX:
            raise ProtocolError("beyond 64 bits")
        return total, self.set(key, str(total).encode())

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, list[str]]:
        if key not in self.values and expected:
            return expected, []
        if self.values.get(key, b"") != expected:
            return self.values[key], []
        return desired, self.set(key, desired)

    def push(self, key: bytes, value: bytes) -> list[str]:
        before, queue = self.stored(), self.queues.setdefault(key, [])
        queue.append(value)
        try:
            self.check_limits(before)
        except LimitError:
            queue.pop()
            raise
        return self._call(key)

    def pop(self, member: str, key: bytes) -> tuple[int, bytes | None]:
        self.called = [call for call in self.called if call != (member, key)]
        queue = self.queues.get(key, [])
        length = len(queue)
        return length, queue.pop(0) if queue else None

    def wait(self, member: str, keys: Sequence[bytes]) -> bool:
        missing = [key for key in dict.fromkeys(keys) if not self.is_there(key)]
        if missing:
            self.waits.append(ModelWait(member, missing))
        return not missing

    def barrier(self, member: str, key: bytes, size: int) -> list[str]:
        if (member, key, size) in self.at_barriers:
            raise ProtocolError("twice at a barrier")
        self.at_barriers.append((member, key, size))
        present = [place for place in self.at_barriers if place[1:] == (key, size)]
        if len(present) < size:
            return []
        self.at_barriers = [place for place in self.at_barriers if place not in present]
        return [place[0] for place in present]

    def withdraw(self, member: str) -> list[str]:
        self.waits = [wait for wait in self.waits if wait.member != member]
        self.at_barriers = [place for place in self.at_barriers if place[0] != member]
        calls = [call for call in self.called if call[0] == member]
        self.called = [call for call in self.called if call[0] != member]
        woken = []
        for _, key in calls:
            others = [call for call in self.called if call[1] == key]
            if len(self.queues.get(key, [])) > len(others):
                woken += self._call(key)
        return woken

    def _call(self, key: bytes) -> list[str]:
        woken = self._arrive(key, 1)
        for member in woken:
            if (member, key) not in self.called:
                self.called.append((member, key))
        return woken

    def _arrive(self, key: bytes, most: int) -> list[str]:
        woken: list[str] = []
        for wait in self.waits:
            if key in wait.left and len(woken) < most:
                wait.left.remove(key)
                if not wait.left:
                    woken.append(wait.member)
        self.waits = [wait for wait in self.waits if wait.left]
        return woken


members = st.sampled_from("ABC")
# One of the queues is never given a value: a key that has one keeps nobody waiting.
ALL_KEYS = [b"k", b"", b"q", b"r"]
keys = st.sampled_from(ALL_KEYS[:3])
queues = st.sampled_from(ALL_KEYS[2:])
values = st.sampled_from([b"", b"0", b"12", b"-7", b"9223372036854775807", b"abc"])
amounts = st.sampled_from([0, 1, -3, 1000, I64_MAX, I64_MIN])
sizes = st.sampled_from([1, 2, 2, 2, 3, 0])


def listed(result: Any) -> Any:
    """The members that an operation woke as a list, be they alone or behind its result."""
    if isinstance(result, tuple) and len(result) == 2 and not isinstance(result[1], bytes | None):
        return result[0], list(result[1])
    return list(result) if isinstance(result, tuple) and not result else result


class Comparison(RuleBasedStateMachine):
    """Whatever is done gives what the model gives, and wakes whom it wakes, in the same order."""

    limits = Limits()

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine[str] = Engine(self.limits)
        self.model = Model(self.limits)

    def agree(self, ours: Callable[[], Any], models: Callable[[], Any]) -> None:
        try:
            expected = models()
        except ProtocolError as error:
            with pytest.raises(type(error), match=error.message if type(error) is LimitError else None):
                ours()
        else:
            assert listed(ours()) == expected

    @invariant()
    def all_parts_agree(self) -> None:
        self.engine.check_invariants()

    @invariant()
    def the_store_is_the_models(self) -> None:
        engine, model = self.engine, self.model
        assert sorted(engine.keys()) == sorted(model.values)
        assert engine.space.stored_bytes == model.stored()[0]
        assert {key: engine.get(key) for key in model.values} == model.values
        for key in ALL_KEYS:
            assert engine.queue_length(key) == len(model.queues.get(key, []))

    @invariant()
    def the_same_members_wait(self) -> None:
        for member in "ABC":
            waits = [key for wait in self.model.waits if wait.member == member for key in wait.left]
            assert sorted(self.engine.waiters.awaited_by(member)) == sorted(waits)
        arrived: dict[tuple[bytes, int], list[str]] = {}
        for member, key, size in self.model.at_barriers:
            arrived.setdefault((key, size), []).append(member)
        assert {(key, size): members for key, size, _, members in self.engine.barriers.all()} == arrived


class Queues(Comparison):
    """Little but queues, so that random histories come to who is called, leaves, and hands on."""

    @rule(key=queues, value=values)
    def push(self, key: bytes, value: bytes) -> None:
        self.agree(lambda: self.engine.push(key, value), lambda: self.model.push(key, value))

    @rule(member=members, key=queues)
    def pop(self, member: str, key: bytes) -> None:
        self.agree(lambda: self.engine.pop(member, key), lambda: self.model.pop(member, key))

    @rule(order=st.permutations("ABC"), key=queues)
    def line_up(self, order: list[str], key: bytes) -> None:
        """All wait at an empty queue, which random steps alone would seldom bring about."""
        while self.model.queues.get(key):
            self.pop("outsider", key)
        for member in order:
            self.wait_in_line(member, key)

    @rule(member=members, key=queues)
    def wait_in_line(self, member: str, key: bytes) -> None:
        self.agree(lambda: self.engine.wait(member, [key]), lambda: self.model.wait(member, [key]))

    @rule(member=members)
    def withdraw(self, member: str) -> None:
        self.agree(lambda: self.engine.withdraw(member), lambda: self.model.withdraw(member))


class Operations(Queues):
    """All operations."""

    @rule(key=keys, value=values)
    def set(self, key: bytes, value: bytes) -> None:
        self.agree(lambda: self.engine.set(key, value), lambda: self.model.set(key, value))

    @rule(key=keys, value=values)
    def append(self, key: bytes, value: bytes) -> None:
        old = self.model.values.get(key, b"")
        self.agree(lambda: self.engine.append(key, value), lambda: self.model.set(key, old + value))

    @rule(key=keys, amount=amounts)
    def add(self, key: bytes, amount: int) -> None:
        self.agree(lambda: self.engine.add(key, amount), lambda: self.model.add(key, amount))

    @rule(key=keys, expected=values, desired=values)
    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> None:
        self.agree(
            lambda: self.engine.compare_set(key, expected, desired),
            lambda: self.model.compare_set(key, expected, desired),
        )

    @rule(pairs=st.lists(st.tuples(keys, values), max_size=4))
    def multi_set(self, pairs: list[tuple[bytes, bytes]]) -> None:
        flat = [content for pair in pairs for content in pair]
        self.agree(
            lambda: self.engine.multi_set(flat),
            lambda: self.model.multi_set(pairs),
        )

    @rule(key=keys)
    def delete(self, key: bytes) -> None:
        self.agree(lambda: self.engine.delete(key), lambda: self.model.values.pop(key, None) is not None)

    @rule(member=members, wanted=st.lists(keys | queues, max_size=4))
    def wait(self, member: str, wanted: list[bytes]) -> None:
        self.agree(lambda: self.engine.wait(member, wanted), lambda: self.model.wait(member, wanted))

    @rule(member=members, key=keys, size=sizes)
    def barrier(self, member: str, key: bytes, size: int) -> None:
        self.agree(
            lambda: self.engine.barrier(member, key, size), lambda: self.model.barrier(member, key, size)
        )


class Crowded(Operations):
    """Little room: an operation that finds none changes nothing, and what it replaces counts as free."""

    limits = Limits(stored_bytes=9, stored_entries=3)


TestQueues = Queues.TestCase
TestOperations = Operations.TestCase
TestCrowded = Crowded.TestCase
TestOperations.settings = settings(derandomize=True, deadline=None, max_examples=100, stateful_step_count=40)
TestQueues.settings = settings(TestOperations.settings, max_examples=60)
TestCrowded.settings = TestOperations.settings


# What it costs


class Counted:
    """A member that counts how often any of its kind is hashed or compared."""

    touched = 0

    def __hash__(self) -> int:
        Counted.touched += 1
        return id(self) >> 4

    def __eq__(self, other: object) -> bool:
        Counted.touched += 1
        return self is other


def count_steps(action: Callable[[], object]) -> int:
    """How many instructions of Python an action takes, and how often it touches a member in a container."""
    count = 0
    Counted.touched = 0

    def on_event(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return on_event

    previous = sys.gettrace()
    gc.disable()  # a collection may call back, which would be counted
    sys._getframe().f_trace_opcodes = True  # Python 3.12 counts opcodes only if a frame had this before
    sys.settrace(on_event)
    try:
        action()
    finally:
        sys.settrace(previous)
        gc.enable()
    return count + Counted.touched


def names(count: int) -> list[bytes]:
    return [b"/key/%d" % number for number in range(count)]


def crowd(count: int, key: bytes) -> tuple[Engine[Counted], list[Counted]]:
    """An engine in which `count` members wait for a key and at a barrier."""
    engine: Engine[Counted] = Engine()
    waiting = [Counted() for _ in range(count)]
    for member in waiting:
        engine.wait(member, [key])
        engine.barrier(member, key, 1 << 20)
    return engine, waiting


def withdraw_from_a_crowd(count: int, position: int = 50) -> Callable[[], object]:
    engine, waiting = crowd(count, b"k")
    return lambda: engine.withdraw(waiting[position])


def among_the_keys_of_another(count: int, own: Sequence[bytes]) -> tuple[Engine[Counted], Counted]:
    """A member that waits for `own`, and another one that waits for `count` keys."""
    engine: Engine[Counted] = Engine()
    other, member = Counted(), Counted()
    engine.wait(other, names(count))
    engine.wait(member, own)
    return engine, member


def withdraw_beside_many_keys(count: int) -> Callable[[], object]:
    engine, member = among_the_keys_of_another(count, [b"/key/0"])
    return lambda: engine.withdraw(member)


def withdraw_with_many_keys(count: int) -> Callable[[], object]:
    engine, member = among_the_keys_of_another(count, names(count))
    return lambda: engine.withdraw(member)


def wake_beside_many_keys(count: int) -> Callable[[], object]:
    engine, _ = among_the_keys_of_another(count, [b"k"])
    return lambda: engine.set(b"k", b"")


def wake_a_crowd(count: int) -> Callable[[], object]:
    engine, _ = crowd(count, b"k")
    return lambda: engine.set(b"k", b"")


def release_a_barrier(count: int) -> Callable[[], object]:
    engine: Engine[Counted] = Engine()
    for _ in range(count - 1):
        engine.barrier(Counted(), b"k", count)
    return lambda: engine.barrier(Counted(), b"k", count)


def push_to_a_crowd(count: int) -> Callable[[], object]:
    engine, _ = crowd(count, b"q")
    return lambda: engine.push(b"q", b"v")


def drain_a_crowd(count: int) -> Callable[[], object]:
    """A container that slows down as its front is taken away would make this quadratic."""
    engine, waiting = crowd(count, b"q")

    def drain() -> None:
        for member in waiting:
            engine.push(b"q", b"v")
            engine.pop(member, b"q")

    return drain


@pytest.mark.parametrize(
    ("prepare", "few", "many", "factor"),
    [
        *((partial(withdraw_from_a_crowd, position=position), 100, 3_000, 1) for position in (0, 50, -1)),
        (withdraw_beside_many_keys, 10, 3_000, 1),
        (withdraw_with_many_keys, 1_000, 4_000, 5),
        (wake_beside_many_keys, 10, 3_000, 1),
        (wake_a_crowd, 1_000, 4_000, 4.5),
        (release_a_barrier, 1_000, 4_000, 4.5),
        (push_to_a_crowd, 100, 3_000, 1),
        (drain_a_crowd, 500, 2_000, 4.5),
    ],
)
def test_an_operation_costs_nothing_for_others_and_one_pass_for_its_own(
    prepare: Callable[[int], Callable[[], object]], few: int, many: int, factor: float
) -> None:
    assert count_steps(prepare(many)) <= factor * count_steps(prepare(few))


def test_appending_piece_by_piece_does_not_copy_the_value() -> None:
    engine: Engine[str] = Engine()
    engine.append(b"k", b"x")
    engine.append(b"k", b"x")
    value = engine.get(b"k")
    for _ in range(1_000):
        engine.append(b"k", b"x" * 100)
    assert engine.get(b"k") is value
