"""The store's operations, over the keyspace, the waits and the barriers.

Operations that can end the waiting of members return those members, in the order in which they began to
wait: the caller sends each one its STOP_WAITING. An operation either is carried out whole or raises
ProtocolError and changes nothing. Who wants to know more asks the parts, and changes nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.engine.barriers import Barriers
from rallypoint.store.engine.keyspace import Budget, Keyspace, State, Value
from rallypoint.store.engine.waiters import PendingPops, Waiters
from rallypoint.store.wire.limits import Limits

Member = TypeVar("Member")

_BARRIERS_AT_ONCE = 1_024
"""A client waits at one. To leave very many would hold up others."""
_DIGITS: Final = 18
"""A number with so many is surely one of 64 bits."""


class Engine(Generic[Member]):
    """One store. Not safe for threads; the caller serialises."""

    __slots__ = ("_awaited", "_limits", "barriers", "get", "pops", "space", "waiters")

    get: Callable[[bytes], Value | None]
    """The value of a key, or None. A bytearray is the engine's own: copy it before the next operation."""

    def __init__(self, limits: Limits | None = None, budget: Budget | None = None) -> None:
        self._limits = limits or Limits()
        self.space = Keyspace(self._limits.stored_bytes, self._limits.stored_entries)
        self.waiters: Waiters[Member] = Waiters(budget)
        self.barriers: Barriers[Member] = Barriers(budget)
        self.pops: PendingPops[Member] = PendingPops()
        self._awaited = self.waiters.awaited  # a key is looked up there with each write
        self.get = self.space.values.get

    # Values

    def set(self, key: bytes, value: bytes) -> Sequence[Member]:
        self.space.put(key, value)
        return self.waiters.arrive(key) if key in self._awaited else ()

    def multi_set(self, keys_and_values: Sequence[bytes]) -> Sequence[Member]:
        """Set keys to values, which alternate in the argument, all at one moment."""
        return self.set_all(dict(zip(keys_and_values[::2], keys_and_values[1::2], strict=True)))

    def set_all(self, new: Mapping[bytes, bytes]) -> Sequence[Member]:
        """Set keys to values, all at one moment."""
        self.space.put_all(new)
        arrive, awaited = self.waiters.arrive, self._awaited
        return [member for key in new if key in awaited for member in arrive(key)] if awaited else ()

    def has_all(self, keys: Sequence[bytes]) -> bool:
        """Whether none of `keys` is missing."""
        if len(keys) == 1 and keys[0] in self.space.values:
            return True
        wanted = set(keys)
        return wanted <= self.space.values.keys() or not self.missing(wanted)

    def append(self, key: bytes, value: bytes) -> Sequence[Member]:
        self.space.append(key, value)
        return self.waiters.arrive(key) if key in self._awaited else ()

    def add(self, key: bytes, amount: int) -> tuple[int, Sequence[Member]]:
        """Add to a number, and return the sum with the members that woke."""
        total = self.space.add(key, amount)
        return total, self.waiters.arrive(key) if key in self._awaited else ()

    def add_times(self, key: bytes, amount: int, times: int) -> int | None:
        """Add so many times, and return the last sum; None if one might fail, or would wake somebody.

        It only counts up, from a number that is far from the limit: the last sum is then the longest one, and
        if it can be stored, so can those before it.
        """
        old = self.space.values.get(key)
        if amount < 0 or key in self._awaited:
            return None
        if old is not None and (len(old) > _DIGITS or not old.isdigit()):
            return None
        try:
            return self.space.add(key, amount * times)
        except (LimitError, ProtocolError):
            return None

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[Value, Sequence[Member]]:
        """Set if the value is the expected one, and return the value after that.

        A missing key takes `desired` if `expected` is empty; else it stays away and `expected` comes back.
        """
        current = self.space.values.get(key)
        if current is None and expected:
            return expected, ()
        if current is not None and current != expected:
            return current, ()
        return desired, self.set(key, desired)

    def delete(self, key: bytes) -> bool:
        return self.space.delete(key)

    def keys(self) -> Iterable[bytes]:
        """The keys that have a value; not the queues."""
        return self.space.values.keys()

    def num_keys(self) -> int:
        return len(self.space.values)

    # Queues

    def push(self, key: bytes, value: bytes) -> Sequence[Member]:
        """Append to a queue; wakes one member, as there is one more value to pop."""
        self.space.push(key, value)
        return self._call_one(key)

    def pop(self, member: Member, key: bytes) -> tuple[int, bytes | None]:
        """Take the first value of a queue; return the length before, and the value if there was one."""
        self.pops.answer(member, key)
        length = self.space.queue_length(key)
        return length, self.space.pop(key)

    def queue_length(self, key: bytes) -> int:
        return self.space.queue_length(key)

    # Waiting

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of `keys` that are not there, each once; a queue that holds something is there."""
        values, queues = self.space.values, self.space.queues
        return [key for key in dict.fromkeys(keys) if key not in values and key not in queues]

    def wait(self, member: Member, keys: Sequence[bytes], now: float = 0.0) -> bool:
        """Let `member` wait until all keys are there; True if they are, and it need not."""
        if len(keys) == 1:
            missing = [] if keys[0] in self.space.values or keys[0] in self.space.queues else [keys[0]]
        else:
            missing = self.missing(keys)
        if not missing:
            return True
        self._check_waits(member, len(missing))
        self.waiters.add(member, missing, now)
        return False

    def wait_in_slices(
        self, member: Member, slices: Iterable[Sequence[bytes]], now: float
    ) -> Generator[None, None, bool]:
        """As `wait`, for very many keys, a slice at a time. If it raises ProtocolError, withdraw `member`."""
        wait = self.waiters.begin(member, now)
        for keys in slices:
            missing = self.missing(keys)
            self._check_waits(member, len(missing))
            self.waiters.extend(wait, missing)
            yield
        return self.waiters.settle(wait)

    def waits_held_by(self, member: Member) -> int:
        """Bytes that the waits of `member` take, those at barriers included."""
        return self.waiters.held_by(member) + self.barriers.held_by(member)

    @property
    def is_untidy(self) -> bool:
        """Whether `sweep` has something to do."""
        return self.waiters.is_untidy

    def sweep(self) -> bool:
        """Free a slice of the waits of members that waited for many keys; return whether there is more."""
        return self.waiters.sweep()

    def wait_in_turn(self, member: Member, keys: Sequence[bytes], now: float = 0.0) -> bool:
        """As `wait`, but a queue's item does not count while a member that was woken for it may still pop it.

        For a member that was passed over once. True if it need not wait; it is then called to those of the
        keys that are queues.
        """
        values = self.space.values
        missing = [key for key in dict.fromkeys(keys) if key not in values and not self._has_uncalled(key)]
        if missing:
            self._check_waits(member, len(missing))
            self.waiters.add(member, missing, now)
            return False
        for key in dict.fromkeys(keys):
            if key not in values:
                self.pops.add(member, key)
        return True

    def barrier(
        self, member: Member, key: bytes, size: int, weight: int = 1, now: float = 0.0
    ) -> Sequence[Member]:
        """Let `member` wait at a barrier and count `weight` times; return the members that are released.

        A member may wait for several: `Barriers.count_at` says how many are left. If it is away, it counts
        from `resume` on.
        """
        self._check_waits(member, 1)
        return self.barriers.arrive(member, key, size, weight, now)

    def leave_barrier(self, member: Member, count: int) -> int:
        """Take back `count` of the arrivals of `member` at a barrier; return how many there were to take."""
        return self.barriers.leave(member, count)

    def suspend(self, member: Member) -> Sequence[Member]:
        """Mark `member` as away: it does not count at barriers, and is not called to queues.

        Its waits go on, and so do the calls that it has had. Nobody wakes.
        """
        self.barriers.suspend(member)
        return ()

    def resume(self, member: Member) -> Sequence[Member]:
        """`member` is back: it counts at its barriers, and is called to queues that hold something.

        Returns the members that wake.
        """
        woken = self.barriers.resume(member)
        for key in self.waiters.awaited_by(member):
            if self._has_uncalled(key):
                woken += self._call_one(key)
        return woken

    def withdraw(self, member: Member) -> Sequence[Member]:
        """End all that `member` waits for, because it cancels or leaves."""
        self.waiters.cancel(member)
        self.barriers.withdraw(member)
        return self._pass_on_pops(member)

    @property
    def waiting(self) -> int:
        """How many members wait: for keys, or at barriers. A member that does both counts twice."""
        return len(self.waiters.by_member) + len(self.barriers.by_member)

    @property
    def oldest_wait(self) -> float | None:
        """When the longest wait began, for keys or at a barrier; None if nobody waits."""
        began = (self.waiters.oldest, self.barriers.oldest)
        return min((each for each in began if each is not None), default=None)

    def _pass_on_pops(self, member: Member) -> Sequence[Member]:
        """`member` will not pop: call others to the items that it was called to, if they are still there."""
        woken: list[Member] = []
        for key in self.pops.forget(member):
            if self._has_uncalled(key):
                woken += self._call_one(key)
        return woken

    def _has_uncalled(self, key: bytes) -> bool:
        return self.space.queue_length(key) > self.pops.count(key)

    def _call_one(self, key: bytes) -> Sequence[Member]:
        if key not in self._awaited:
            return ()
        woken = self.waiters.arrive_for_one(key, self.barriers.away)
        for member in woken:
            self.pops.add(member, key)
        return woken

    def _check_waits(self, member: Member, more: int) -> None:
        if more == 1 and member not in self.waiters.by_member and member not in self.barriers.by_member:
            return  # as nearly always: no limit is less than one
        barriers = self.barriers.count_of(member)
        if barriers >= _BARRIERS_AT_ONCE:
            raise LimitError(f"waits at {barriers:,} barriers at a time, which is the limit")
        limit = self._limits.keys_per_request
        count = self.waiters.count_of(member) + barriers + more
        if count > limit:
            raise LimitError(f"waits for {count:,} keys at a time; the limit keys_per_request is {limit:,}")

    def state(self, name_of: Callable[[Member], State]) -> State:
        """Who waits for what, as plain data, with `name_of` for each member; `take_state` restores it.

        What is stored is not in it: `Keyspace.state` has that. Call it only when `is_untidy` is False.
        """
        away = sorted(name_of(member) for member in self.barriers.away)
        parts = (self.waiters, self.barriers, self.pops)
        return [away, *[part.state(name_of) for part in parts]]

    def take_state(self, state: State, member_of: Callable[[State], Member]) -> None:
        away, waits, barriers, calls = state
        self.barriers.away.update((member_of(name), {}) for name in away)
        self.waiters.take_state(waits, member_of)
        self.barriers.take_state(barriers, member_of)
        self.pops.take_state(calls, member_of)

    def check_invariants(self) -> None:
        """Assert that all parts agree; for tests, as it looks at everything."""
        self.space.check_invariants()
        self.waiters.check_invariants()
        self.barriers.check_invariants()
        self.pops.check_invariants()
        for key in self.space.values:
            assert key not in self._awaited, f"{key!r} is there, but is waited for"
