"""Barriers that count members, not arrivals.

A barrier is named by its key and its size. A member that cancels, times out or leaves is uncounted; once
as many members as its size are there, they are all released and the barrier is gone, so that the same key
synchronises again. Members that name different sizes for one key are at different barriers.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from rallypoint.errors import ProtocolError

Member = TypeVar("Member")

_Name = tuple[bytes, int]


class Barriers(Generic[Member]):
    """All barriers at which somebody waits."""

    __slots__ = ("_by_member", "_by_name")

    def __init__(self) -> None:
        self._by_name: dict[_Name, dict[Member, None]] = {}
        self._by_member: dict[Member, dict[_Name, None]] = {}

    def arrive(self, member: Member, key: bytes, size: int) -> list[Member]:
        """Count `member` in; return all members of the barrier, it included, if that completes it.

        A barrier of one, or of fewer, is complete at once.
        """
        name = (key, size)
        present = self._by_name.setdefault(name, {})
        if member in present:
            raise ProtocolError(f"BARRIER at key {key!r} by a client that already waits there")
        present[member] = None
        self._by_member.setdefault(member, {})[name] = None
        if len(present) < size:
            return []
        del self._by_name[name]
        for each in present:
            self._forget(each, name)
        return list(present)

    def withdraw(self, member: Member) -> None:
        """Count `member` out of every barrier at which it waits."""
        for name in self._by_member.pop(member, ()):
            present = self._by_name[name]
            del present[member]
            if not present:
                del self._by_name[name]

    def arrived(self, key: bytes) -> dict[int, list[Member]]:
        """Who waits at the barriers of `key`: for each size that was named, the members in their order."""
        return {size: list(members) for (name, size), members in self._by_name.items() if name == key}

    def count_of(self, member: Member) -> int:
        """At how many barriers `member` waits."""
        return len(self._by_member.get(member, ()))

    def _forget(self, member: Member, name: _Name) -> None:
        names = self._by_member[member]
        del names[name]
        if not names:
            del self._by_member[member]

    def check_invariants(self) -> None:
        for (key, size), members in self._by_name.items():
            assert 0 < len(members) < size, f"the barrier {key!r} of {size} holds {len(members)} members"
            for member in members:
                assert (key, size) in self._by_member[member]
        places = sum(len(names) for names in self._by_member.values())
        assert places == sum(len(members) for members in self._by_name.values())
        assert all(names for names in self._by_member.values())
