"""Who waits for which keys, indexed both ways.

From a key to its waits, so that the key's arrival wakes them in one pass; from a member to its waits, so
that a cancel or a close costs that member's own keys and no more.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Generic, TypeVar

Member = TypeVar("Member")


class _Wait(Generic[Member]):
    """One WAIT of one member: `left` of its keys have not arrived."""

    __slots__ = ("keys", "left", "member")

    def __init__(self, member: Member, keys: Sequence[bytes]) -> None:
        self.member = member
        self.keys = keys
        self.left = len(keys)


class _Waits(dict[_Wait[Member], None]):
    """The waits of one member, as an ordered set, and how many keys they name, arrived or not."""

    __slots__ = ("keys_named",)

    keys_named: int

    def __init__(self) -> None:
        super().__init__()
        self.keys_named = 0


class Waiters(Generic[Member]):
    """All waits. A wait disappears when its last key arrives, or with `cancel`."""

    __slots__ = ("_by_member", "awaited")

    def __init__(self) -> None:
        # Dicts serve as ordered sets: who came first is woken first.
        self.awaited: dict[bytes, dict[_Wait[Member], None]] = {}
        """The keys that somebody waits for, with their waits; only to be read from outside."""
        self._by_member: dict[Member, _Waits[Member]] = {}

    def add(self, member: Member, missing: Sequence[bytes]) -> None:
        """Let `member` wait for all of `missing`: distinct keys, at least one."""
        wait = _Wait(member, missing)
        awaited = self.awaited
        for key in missing:
            waits = awaited.get(key)
            if waits is None:
                awaited[key] = {wait: None}
            else:
                waits[wait] = None
        own = self._by_member.get(member)
        if own is None:
            own = self._by_member[member] = _Waits()
        own[wait] = None
        own.keys_named += len(missing)

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
        for wait in self._by_member.pop(member, ()):
            for key in wait.keys:
                waits = self.awaited.get(key)
                if waits is not None and wait in waits:
                    del waits[wait]
                    if not waits:
                        del self.awaited[key]

    def awaited_by(self, member: Member) -> list[bytes]:
        """The keys that `member` waits for and that have not arrived."""
        waits = self._by_member.get(member, ())
        return [key for wait in waits for key in wait.keys if wait in self.awaited.get(key, ())]

    def count_of(self, member: Member) -> int:
        """How many keys the waits of `member` name, arrived or not."""
        own = self._by_member.get(member)
        return own.keys_named if own is not None else 0

    def _forget(self, wait: _Wait[Member]) -> None:
        own = self._by_member[wait.member]
        del own[wait]
        own.keys_named -= len(wait.keys)
        if not own:
            del self._by_member[wait.member]

    def check_invariants(self) -> None:
        left: dict[_Wait[Member], int] = {}
        for key, waits in self.awaited.items():
            assert waits, f"an empty set of waits is kept for {key!r}"
            for wait in waits:
                assert key in wait.keys
                left[wait] = left.get(wait, 0) + 1
        known = {wait for waits in self._by_member.values() for wait in waits}
        assert known == set(left), "the two indexes disagree"
        for own in self._by_member.values():
            assert own
            assert own.keys_named == sum(len(wait.keys) for wait in own)
        for wait, count in left.items():
            assert wait.left == count > 0, f"a wait counts {wait.left} keys, the index {count}"
            assert wait in self._by_member[wait.member]
