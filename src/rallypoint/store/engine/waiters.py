"""Who waits for which keys, indexed both ways.

From a key to its waits, so that the key's arrival wakes them in one pass; from a member to its waits, so
that a cancel or a close costs that member's own keys and no more. If those are very many, the waits are over
at once, but the index of keys is tidied up a slice at a time, by `sweep`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from itertools import islice
from typing import Final, Generic, TypeVar

from rallypoint.store.engine.keyspace import Budget, State

Member = TypeVar("Member")

_WAIT_BYTES: Final = 400
"""What a wait takes in memory, with its entries in both indexes; and each of its keys, besides its bytes."""
_KEY_BYTES: Final = 300
_AT_ONCE = 1_024
"""How many keys are taken out of the index at a time."""


def size_of(keys: Sequence[bytes]) -> int:
    """What it takes in memory to wait for these keys, about."""
    if len(keys) == 1:  # nearly always
        return len(keys[0]) + _KEY_BYTES
    return sum(map(len, keys)) + _KEY_BYTES * len(keys)


class Wait(Generic[Member]):
    """One WAIT of one member: `left` of its keys have not arrived."""

    __slots__ = ("keys", "left", "member", "since", "size")

    def __init__(self, member: Member, keys: list[bytes], since: float) -> None:
        self.member = member
        self.keys = keys
        self.left = len(keys)
        self.since = since
        self.size = _WAIT_BYTES + size_of(keys)


class _Waits(dict[Wait[Member], None]):
    """Several waits of one member, as an ordered set, with the number of their keys and their size."""

    __slots__ = ("keys_named", "size")

    keys_named: int
    size: int

    def __init__(self, first: Wait[Member]) -> None:
        super().__init__({first: None})
        self.keys_named = len(first.keys)
        self.size = first.size

    def add(self, wait: Wait[Member]) -> None:
        self[wait] = None
        self.keys_named += len(wait.keys)
        self.size += wait.size

    def remove(self, wait: Wait[Member]) -> None:
        del self[wait]
        self.keys_named -= len(wait.keys)
        self.size -= wait.size


class Waiters(Generic[Member]):
    """All waits. A wait disappears when its last key arrives, or with `cancel`."""

    __slots__ = ("_abandoned", "_budget", "awaited", "by_member")

    def __init__(self, budget: Budget | None = None) -> None:
        """`budget`: where waits are counted, at what they take in memory."""
        self._abandoned: deque[list[Wait[Member]]] = deque()  # that are over, and still in the index of keys
        self._budget = budget or Budget()
        # Dicts serve as ordered sets: the first to come is woken first.
        self.awaited: dict[bytes, dict[Wait[Member], None]] = {}
        """The keys that somebody waits for, with their waits; only to be read from outside."""
        self.by_member: dict[Member, Wait[Member] | _Waits[Member]] = {}
        """Who waits, and the one wait that nearly all have, or several; only to be read from outside."""

    def add(self, member: Member, missing: list[bytes], now: float = 0.0) -> None:
        """Let `member` wait for all of `missing`: distinct keys, at least one."""
        wait = Wait(member, missing, now)
        awaited = self.awaited
        for key in missing:
            waits = awaited.get(key)
            if waits is None:
                awaited[key] = {wait: None}
            else:
                waits[wait] = None
        self._own(wait)

    def begin(self, member: Member, now: float) -> Wait[Member]:
        """A wait whose keys are named in pieces, by `extend`. It does not end before `settle`."""
        wait = Wait(member, [], now)
        wait.left = 1
        self._own(wait)
        return wait

    def extend(self, wait: Wait[Member], missing: Sequence[bytes]) -> None:
        """Let a wait that is not settled wait for these keys, too. It may wait for some of them already."""
        new = [key for key in missing if wait not in self.awaited.get(key, ())]
        for key in new:
            self.awaited.setdefault(key, {})[wait] = None
        size = size_of(new)
        wait.size += size
        self._budget.held += size
        wait.keys += new
        wait.left += len(new)
        own = self.by_member[wait.member]
        if isinstance(own, _Waits):
            own.keys_named += len(new)
            own.size += size

    def settle(self, wait: Wait[Member]) -> bool:
        """All keys of a wait have been named: return whether they are all there, and it is over."""
        wait.left -= 1
        return not wait.left and self._forget(wait)

    def _own(self, wait: Wait[Member]) -> None:
        member = wait.member
        self._budget.held += wait.size
        own = self.by_member.setdefault(member, wait)
        if own is not wait:
            if isinstance(own, Wait):
                own = self.by_member[member] = _Waits(own)
            own.add(wait)

    def arrive(self, key: bytes) -> list[Member]:
        """`key` is there: return the members whose waits that completes, in the order in which they came."""
        woken = []
        for wait in self.awaited.pop(key):
            wait.left -= 1
            if not wait.left and self._forget(wait):
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
            if not wait.left and self._forget(wait):
                woken.append(wait.member)
        if not waits:
            del self.awaited[key]
        return woken

    def cancel(self, member: Member) -> None:
        """End all waits of `member`."""
        if member not in self.by_member:
            return
        self._budget.held -= self.held_by(member)
        if self.count_of(member) > _AT_ONCE:
            self._abandoned.append(list(self._waits_of(member)))
            del self.by_member[member]
            return
        own = self._waits_of(member)
        del self.by_member[member]
        for wait in own:
            for key in wait.keys:
                self._take_out(wait, key)

    @property
    def is_untidy(self) -> bool:
        """Whether `sweep` has something to do."""
        return bool(self._abandoned)

    def sweep(self) -> bool:
        """Go on with taking waits out of the index that were cancelled; return whether there are more."""
        for _ in range(_AT_ONCE):
            if not self._abandoned:
                return False
            waits = self._abandoned[0]
            if not waits:
                self._abandoned.popleft()
            elif waits[-1].keys:
                self._take_out(waits[-1], waits[-1].keys.pop())
            else:
                waits.pop()
        return True

    def _take_out(self, wait: Wait[Member], key: bytes) -> None:
        waits = self.awaited.get(key)
        if waits is not None and wait in waits:
            del waits[wait]
            if not waits:
                del self.awaited[key]

    def awaited_by(self, member: Member) -> list[bytes]:
        """The keys that `member` waits for and that have not arrived."""
        return [key for wait in self._waits_of(member) for key in self._missing(wait)]

    def pending_of(self, member: Member, most: int) -> list[tuple[list[bytes], int, float]]:
        """Of each wait of `member`: the first `most` keys that have not arrived, how many, and since when."""
        waits = self._waits_of(member)
        return [(list(islice(self._missing(wait), most)), wait.left, wait.since) for wait in waits]

    @property
    def oldest(self) -> float | None:
        """When the longest wait began; None if nobody waits."""
        longest = next(iter(self.by_member), None)
        return None if longest is None else next(iter(self._waits_of(longest))).since

    def _missing(self, wait: Wait[Member]) -> Iterator[bytes]:
        for key in wait.keys:
            if wait in self.awaited.get(key, ()):
                yield key

    def held_by(self, member: Member) -> int:
        """Bytes that the waits of `member` take."""
        own = self.by_member.get(member)
        return 0 if own is None else own.size

    def count_of(self, member: Member) -> int:
        """How many keys the waits of `member` name, arrived or not."""
        own = self.by_member.get(member)
        if own is None:
            return 0
        return len(own.keys) if isinstance(own, Wait) else own.keys_named

    def _waits_of(self, member: Member) -> Collection[Wait[Member]]:
        own = self.by_member.get(member, ())
        return (own,) if isinstance(own, Wait) else own

    def _forget(self, wait: Wait[Member]) -> bool:
        """A wait is complete: return whether its member still waits for that."""
        own = self.by_member.get(wait.member, ())
        if isinstance(own, _Waits):
            if wait not in own:
                return False
            self._budget.held -= wait.size
            own.remove(wait)
            if own:
                return True
        elif own is wait:
            self._budget.held -= wait.size
        else:
            return False
        del self.by_member[wait.member]
        return True

    def state(self, name_of: Callable[[Member], State]) -> State:
        """All waits, as plain data, in their order: by member, and by key. To be asked when it is tidy."""
        assert not self._abandoned
        numbers: dict[Wait[Member], int] = {}
        members = []
        for member in self.by_member:
            waits = self._waits_of(member)
            numbers.update((wait, len(numbers) + number) for number, wait in enumerate(waits))
            members.append((name_of(member), [(list(wait.keys), wait.since) for wait in waits]))
        return [members, [(key, [numbers[wait] for wait in waits]) for key, waits in self.awaited.items()]]

    def take_state(self, state: State, member_of: Callable[[State], Member]) -> None:
        """Become what has given this state; until then it was empty."""
        members, awaited = state
        numbered = []
        for name, waits in members:
            member = member_of(name)
            for keys, since in waits:
                wait = Wait(member, list(keys), since)
                wait.left = 0
                numbered.append(wait)
                self._own(wait)
        for key, numbers in awaited:
            self.awaited[key] = {numbered[number]: None for number in numbers}
            for number in numbers:
                numbered[number].left += 1

    def check_invariants(self) -> None:
        left: dict[Wait[Member], int] = {}
        for key, waits in self.awaited.items():
            assert waits, f"an empty set of waits is kept for {key!r}"
            for wait in waits:
                assert key in wait.keys
                left[wait] = left.get(wait, 0) + 1
        over = {wait for waits in self._abandoned for wait in waits}
        left = {wait: count for wait, count in left.items() if wait not in over}
        known = {wait for member in self.by_member for wait in self._waits_of(member)}
        assert known == set(left), "the two indexes disagree"
        for member in self.by_member:
            assert self._waits_of(member)
            assert self.count_of(member) == sum(len(wait.keys) for wait in self._waits_of(member))
            assert self.held_by(member) == sum(wait.size for wait in self._waits_of(member))
        for wait, count in left.items():
            assert wait.left == count > 0, f"a wait counts {wait.left} keys, the index {count}"
            assert wait in self._waits_of(wait.member)


class PendingPops(Generic[Member]):
    """The members that a push has woken and that have not popped yet, by member and by queue.

    A push wakes ("calls") one member that waits for the queue. If that one leaves or gives up without a pop,
    the value is still there, and the next in line has to be called instead.
    """

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
        """`member` pops from `key`, whether it was called or not."""
        keys = self._by_member.get(member)
        if keys is not None and key in keys:
            del keys[key]
            if not keys:
                del self._by_member[member]
            self._uncount(key)

    def forget(self, member: Member) -> list[bytes]:
        """`member` will not pop; return the queues to which it was called."""
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
            assert keys, "an empty set of pending pops is kept"
            for key in keys:
                counts[key] = counts.get(key, 0) + 1
        assert counts == self._counts, "the pending pops are counted wrongly"
