"""Barriers that count members, not arrivals.

A barrier is named by its key and its size. A member that cancels, times out or leaves is uncounted; once
as many as its size are there, they are all released and the barrier is gone, so that the same key
synchronises again. Members that name different sizes for one key are at different barriers.

A member may stand for several (a relay, for its ranks), and may be away for a while: it does not count
then, and counts again when it is back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from rallypoint.errors import ProtocolError
from rallypoint.store.engine.keyspace import Budget, State

Member = TypeVar("Member")

_Name = tuple[bytes, int]

_PLACE_BYTES: Final = 800
"""What a member at a barrier takes in memory, besides the key."""


class _Barrier(dict[Member, int]):
    """Who waits at one barrier, in the order of arrival, and for how many each; and their sum."""

    __slots__ = ("total",)

    total: int

    def __init__(self) -> None:
        super().__init__()
        self.total = 0


class Barriers(Generic[Member]):
    """All barriers at which somebody waits."""

    __slots__ = ("_budget", "_by_name", "away", "by_member")

    def __init__(self, budget: Budget | None = None) -> None:
        """`budget`: where the members that are not away are counted."""
        self._budget = budget or Budget()
        self._by_name: dict[_Name, _Barrier[Member]] = {}
        self.by_member: dict[Member, dict[_Name, float]] = {}
        """Where each member waits that is not away, and since when; only to be read from outside."""
        self.away: dict[Member, dict[_Name, tuple[int, float]]] = {}
        """The members that are away: where they wait, for how many they count there, and since when."""

    def arrive(
        self, member: Member, key: bytes, size: int, weight: int = 1, now: float = 0.0
    ) -> list[Member]:
        """Count `member` in, `weight` times; return the members that are released, itself included.

        Of a member that stands for several, some may be released: `count_at` tells how many are left. A
        barrier of one, or of fewer, is complete at once. A member that is away counts from `resume` on.
        """
        name = (key, size)
        if member in self.away:
            self.away[member][name] = weight, now
            return []
        present = self._by_name.get(name)
        if present is None:
            present = self._by_name[name] = _Barrier()
        if member in present:
            raise ProtocolError(f"BARRIER at key {key!r} by a client that already waits there")
        present[member] = weight
        present.total += weight
        self.by_member.setdefault(member, {})[name] = now
        self._budget.held += _PLACE_BYTES + len(key)
        return self._release(name, present) if present.total >= size else []

    def withdraw(self, member: Member) -> None:
        """Count `member` out of every barrier at which it waits, for all for whom it stands."""
        self.away.pop(member, None)
        for name in list(self.by_member.get(member, ())):
            present = self._by_name[name]
            self._reduce(name, present, member, present[member])

    def leave(self, member: Member, count: int) -> int:
        """Count `member` out `count` times; return how many times it was counted."""
        left = 0
        places = self.away.get(member, {})
        for name, (weight, since) in list(places.items()):
            step = min(weight, count - left)
            left += step
            places[name] = weight - step, since
            if step == weight:
                del places[name]
        for name in list(self.by_member.get(member, ())):
            present = self._by_name[name]
            step = min(present[member], count - left)
            left += step
            self._reduce(name, present, member, step)
        return left

    def suspend(self, member: Member) -> None:
        """`member` is away: it is not counted until `resume`."""
        if member not in self.away:
            waits = self.by_member.get(member, {})
            places = {name: (self._by_name[name][member], since) for name, since in waits.items()}
            self.withdraw(member)
            self.away[member] = places

    def resume(self, member: Member) -> list[Member]:
        """`member` is back: count it where it was; return the members that are released, itself included."""
        released: list[Member] = []
        for (key, size), (weight, since) in self.away.pop(member, {}).items():
            released += self.arrive(member, key, size, weight, since)
        return released

    def arrived(self, key: bytes, size: int) -> list[Member]:
        """Who waits at a barrier, in the order of arrival."""
        return list(self._by_name.get((key, size), ()))

    def all(self) -> list[tuple[bytes, int, int, list[Member]]]:
        """Every barrier: its key, its size, how many have arrived, and the members."""
        return [(key, size, each.total, list(each)) for (key, size), each in self._by_name.items()]

    def count_at(self, member: Member) -> int:
        """For how many `member` waits at barriers, be it away or not."""
        present = sum(self._by_name[name][member] for name in self.by_member.get(member, ()))
        return present + sum(weight for weight, _ in self.away.get(member, {}).values())

    @property
    def oldest(self) -> float | None:
        """When the longest wait at a barrier began; None if nobody waits there."""
        longest = next(iter(self.by_member.values()), None)
        return None if longest is None else min(longest.values())

    def count_of(self, member: Member) -> int:
        """At how many barriers `member` waits."""
        return len(self.by_member.get(member, ()))

    def held_by(self, member: Member) -> int:
        """Bytes that the places of `member` at barriers take."""
        return sum(_PLACE_BYTES + len(key) for key, _ in self.by_member.get(member, ()))

    def _release(self, name: _Name, present: _Barrier[Member]) -> list[Member]:
        """While the barrier is full, release those that fill it, in the order of arrival."""
        size = max(name[1], 1)
        left = present.total // size * size
        released: list[Member] = []
        for member, weight in list(present.items()):
            step = min(weight, left)
            if not step:
                break
            left -= step
            released.append(member)
            self._reduce(name, present, member, step)
        return released

    def _reduce(self, name: _Name, present: _Barrier[Member], member: Member, count: int) -> None:
        present.total -= count
        present[member] -= count
        if present[member]:
            return
        del present[member]
        if not present:
            del self._by_name[name]
        self._budget.held -= _PLACE_BYTES + len(name[0])
        names = self.by_member[member]
        del names[name]
        if not names:
            del self.by_member[member]

    def state(self, name_of: Callable[[Member], State]) -> State:
        """All of it, as plain data, in its order."""
        present = [
            (*name, [(name_of(member), weight) for member, weight in members.items()])
            for name, members in self._by_name.items()
        ]
        since = [
            (name_of(member), [(*name, begin) for name, begin in names.items()])
            for member, names in self.by_member.items()
        ]
        away = [
            (name_of(member), [(*name, *place) for name, place in places.items()])
            for member, places in self.away.items()
            if places
        ]
        return [present, since, away]

    def take_state(self, state: State, member_of: Callable[[State], Member]) -> None:
        """Become what has given this state; until then it was empty."""
        present, since, away = state
        for key, size, members in present:
            barrier = self._by_name[key, size] = _Barrier()
            for name, weight in members:
                barrier[member_of(name)] = weight
                barrier.total += weight
        for name, places in since:
            member = member_of(name)
            self.by_member[member] = {(key, size): begin for key, size, begin in places}
            self._budget.held += self.held_by(member)
        for name, places in away:
            self.away[member_of(name)] = {(key, size): (weight, begin) for key, size, weight, begin in places}

    def check_invariants(self) -> None:
        for (key, size), members in self._by_name.items():
            assert 0 < members.total < size, f"the barrier {key!r} of {size} holds {members.total}"
            assert members.total == sum(members.values())
            assert all(weight > 0 for weight in members.values())
            for member in members:
                assert (key, size) in self.by_member[member]
                assert member not in self.away
        places = sum(len(names) for names in self.by_member.values())
        assert places == sum(len(members) for members in self._by_name.values())
        assert all(names for names in self.by_member.values())
        assert all(weight > 0 for away in self.away.values() for weight, _ in away.values())
