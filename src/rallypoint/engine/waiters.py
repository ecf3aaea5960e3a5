"""Who waits for which keys, indexed both ways.

From a key to its waits, so that the key's arrival wakes them in one pass; from a member to its waits, so
that a cancel or a close costs that member's own keys and no more.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from itertools import islice
from typing import Generic, TypeVar

Member = TypeVar("Member")


class _Wait(Generic[Member]):
    """One WAIT of one member: `left` of its keys have not arrived."""

    __slots__ = ("keys", "left", "member", "since")

    def __init__(self, member: Member, keys: Sequence[bytes], since: float) -> None:
        self.member = member
        self.keys = keys
        self.left = len(keys)
        self.since = since


class _Waits(dict[_Wait[Member], None]):
    """Several waits of one member, as an ordered set, and how many keys they name, arrived or not."""

    __slots__ = ("keys_named",)

    keys_named: int

    def __init__(self, first: _Wait[Member]) -> None:
        super().__init__({first: None})
        self.keys_named = len(first.keys)

    def add(self, wait: _Wait[Member]) -> None:
        self[wait] = None
        self.keys_named += len(wait.keys)

    def remove(self, wait: _Wait[Member]) -> None:
        del self[wait]
        self.keys_named -= len(wait.keys)


class Waiters(Generic[Member]):
    """All waits. A wait disappears when its last key arrives, or with `cancel`."""

    __slots__ = ("awaited", "by_member")

    def __init__(self) -> None:
        # Dicts serve as ordered sets: the first to come is woken first.
        self.awaited: dict[bytes, dict[_Wait[Member], None]] = {}
        """The keys that somebody waits for, with their waits; only to be read from outside."""
        self.by_member: dict[Member, _Wait[Member] | _Waits[Member]] = {}
        """Who waits, and the one wait that nearly all have, or several; only to be read from outside."""

    def add(self, member: Member, missing: Sequence[bytes], now: float = 0.0) -> None:
        """Let `member` wait for all of `missing`: distinct keys, at least one."""
        wait = _Wait(member, missing, now)
        awaited = self.awaited
        for key in missing:
            waits = awaited.get(key)
            if waits is None:
                awaited[key] = {wait: None}
            else:
                waits[wait] = None
        own = self.by_member.setdefault(member, wait)
        if own is not wait:
            if isinstance(own, _Wait):
                own = self.by_member[member] = _Waits(own)
            own.add(wait)

    def arrive(self, key: bytes) -> list[Member]:
        """`key` is there: return the members whose waits that completes, in the order in which they came."""
        woken = []
        for wait in self.awaited.pop(key):
            wait.left -= 1
            if not wait.left:
                self._forget(wait)
                woken.append(wait.member)
        return woken

    def arrive_for_one(self, key: bytes, away: Container[Member]) -> list[Member]:
        """`key` is there, but for one: return the first member whose wait that completes, if there is one.

        Members that are `away` are passed over, and go on waiting.
        """
        waits = self.awaited[key]
        woken: list[Member] = []
        while waits and not woken:
            wait = next((wait for wait in waits if wait.member not in away), None)
            if wait is None:
                break
            del waits[wait]
            wait.left -= 1
            if not wait.left:
                self._forget(wait)
                woken.append(wait.member)
        if not waits:
            del self.awaited[key]
        return woken

    def cancel(self, member: Member) -> None:
        """End all waits of `member`."""
        own = self._waits_of(member)
        self.by_member.pop(member, None)
        for wait in own:
            for key in wait.keys:
                waits = self.awaited.get(key)
                if waits is not None and wait in waits:
                    del waits[wait]
                    if not waits:
                        del self.awaited[key]

    def awaited_by(self, member: Member) -> list[bytes]:
        """The keys that `member` waits for and that have not arrived."""
        waits = self._waits_of(member)
        return [key for wait in waits for key in wait.keys if wait in self.awaited.get(key, ())]

    def pending_of(self, member: Member, most: int) -> list[tuple[list[bytes], int, float]]:
        """Of each wait of `member`: the first `most` keys that have not arrived, how many, and since when."""
        pending = []
        for wait in self._waits_of(member):
            missing = (key for key in wait.keys if wait in self.awaited.get(key, ()))
            pending.append((list(islice(missing, most)), wait.left, wait.since))
        return pending

    def count_of(self, member: Member) -> int:
        """How many keys the waits of `member` name, arrived or not."""
        own = self.by_member.get(member)
        if own is None:
            return 0
        return len(own.keys) if isinstance(own, _Wait) else own.keys_named

    def _waits_of(self, member: Member) -> Collection[_Wait[Member]]:
        own = self.by_member.get(member, ())
        return (own,) if isinstance(own, _Wait) else own

    def _forget(self, wait: _Wait[Member]) -> None:
        own = self.by_member[wait.member]
        if not isinstance(own, _Wait):
            own.remove(wait)
            if own:
                return
        del self.by_member[wait.member]

    def check_invariants(self) -> None:
        left: dict[_Wait[Member], int] = {}
        for key, waits in self.awaited.items():
            assert waits, f"an empty set of waits is kept for {key!r}"
            for wait in waits:
                assert key in wait.keys
                left[wait] = left.get(wait, 0) + 1
        known = {wait for member in self.by_member for wait in self._waits_of(member)}
        assert known == set(left), "the two indexes disagree"
        for member in self.by_member:
            assert self._waits_of(member)
            assert self.count_of(member) == sum(len(wait.keys) for wait in self._waits_of(member))
        for wait, count in left.items():
            assert wait.left == count > 0, f"a wait counts {wait.left} keys, the index {count}"
            assert wait in self._waits_of(wait.member)
