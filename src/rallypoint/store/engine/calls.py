"""The members that a push has woken and that have not popped yet.

A push wakes one member that waits for the queue. Should that one leave or give up without a pop, the value is
still there: the next in line has to be called in its stead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from rallypoint.store.engine.keyspace import State

Member = TypeVar("Member")


class Calls(Generic[Member]):
    """The calls that have not been answered, by member and by queue."""

    __slots__ = ("_by_member", "_counts")

    def __init__(self) -> None:
        self._by_member: dict[Member, dict[bytes, None]] = {}
        self._counts: dict[bytes, int] = {}

    def add(self, member: Member, key: bytes) -> None:
        """`member` was woken by a push to `key`."""
        keys = self._by_member.setdefault(member, {})
        if key not in keys:
            keys[key] = None
            self._counts[key] = self._counts.get(key, 0) + 1

    def answer(self, member: Member, key: bytes) -> None:
        """`member` pops from `key`, called or not."""
        keys = self._by_member.get(member)
        if keys is not None and key in keys:
            del keys[key]
            if not keys:
                del self._by_member[member]
            self._uncount(key)

    def forget(self, member: Member) -> list[bytes]:
        """`member` answers no more; return the queues for which it was called."""
        keys = list(self._by_member.pop(member, ()))
        for key in keys:
            self._uncount(key)
        return keys

    def includes(self, member: Member) -> bool:
        """Whether `member` has been called to any queue and has not popped."""
        return member in self._by_member

    def count(self, key: bytes) -> int:
        """How many have been called to the queue `key` and have not popped."""
        return self._counts.get(key, 0)

    def _uncount(self, key: bytes) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]

    def state(self, name_of: Callable[[Member], State]) -> State:
        """All of them, as plain data, in their order."""
        return [(name_of(member), list(keys)) for member, keys in self._by_member.items()]

    def take_state(self, state: State, member_of: Callable[[State], Member]) -> None:
        """Become what has given this state; until then there was none."""
        for name, keys in state:
            for key in keys:
                self.add(member_of(name), key)

    def check_invariants(self) -> None:
        counts: dict[bytes, int] = {}
        for keys in self._by_member.values():
            assert keys, "an empty set of calls is kept"
            for key in keys:
                counts[key] = counts.get(key, 0) + 1
        assert counts == self._counts, "the calls are counted wrongly"
