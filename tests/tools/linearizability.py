"""Whether a history of operations could have come from one store that does one thing at a time.

Each operation has an interval: from when it was asked to when its answer was read. The history is right if
there is a point in each interval such that the operations, done one by one in the order of their points,
give the results that were seen (Wing and Gong's search, with memory of what has been tried). An operation
without an answer has no end, and may or may not have been done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

REFUSED = "refused"
"""The result of an operation that got its connection closed."""

READS = frozenset({"GET", "CHECK", "WAIT", "LEN", "MULTI_GET", "NUMKEYS"})

_MOST_NODES = 30_000


class TooHardError(Exception):
    """The search was given up: nothing is known."""


@dataclass(eq=False, slots=True)
class Operation:
    """One operation of one client, on one key or on several."""

    who: str
    what: str
    keys: tuple[bytes, ...]
    argument: Any = None
    start: int = 0
    end: int | None = None
    """When its answer was read; None if it never was."""
    result: Any = None
    died: int | None = None
    """When its client died, if it did before the answer came."""
    at: str = ""

    def __str__(self) -> str:
        keys = ",".join(key.decode() for key in self.keys)
        end = "-" if self.end is None else str(self.end)
        result = "" if self.end is None else f" -> {_short(self.result)}"
        dead = "" if self.died is None else f" (died at {self.died})"
        argument = "" if self.argument is None else f" {_short(self.argument)}"
        return f"[{self.start:>6} {end:>6}] {self.who:<8}{self.what} {keys}{argument}{result}{dead}"

    @property
    def is_read(self) -> bool:
        """Whether it is known to have changed nothing."""
        if self.what in READS:
            return True
        if self.end is None:
            return False
        if self.result == REFUSED:
            return True
        if self.what == "DELETE":
            return bool(self.result == 0)
        if self.what == "CAS":
            return bool(self.result != self.argument[1])
        return self.what == "POP" and self.result[1] is None


def _short(value: Any) -> str:
    if isinstance(value, bytes) and len(value) > 24:
        return f"{value[:12]!r}..({len(value)})"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_short, value)) + ")"
    return repr(value)


State = Hashable
Apply = Callable[[Operation, Any], tuple[bool, State]]
"""Does an operation; whether it can have been done in that state, and the state afterwards."""


def apply_to_value(operation: Operation, state: bytes | None) -> tuple[bool, State]:
    """A key that has a value or None."""
    what, argument, result = operation.what, operation.argument, operation.result
    known = operation.end is not None
    if what == "SET":
        return True, argument
    if what == "GET":
        return not known or result == (state or b""), state
    if what == "ADD":
        try:
            total = int(state or b"0") + argument
        except ValueError:
            return not known or result == REFUSED, state
        return not known or result == total, b"%d" % total
    if what == "CHECK":
        return not known or (result == 0) == (state is not None), state
    if what == "WAIT":
        return not known or state is not None, state
    if what == "DELETE":
        return not known or result == (state is not None), None
    if what == "APPEND":
        return True, (state or b"") + argument
    assert what == "CAS", what
    expected, desired = argument
    if state is None and expected:
        return not known or result == expected, None
    if state is not None and state != expected:
        return not known or result == state, state
    return not known or result == desired, desired


def apply_to_queue(operation: Operation, state: tuple[bytes, ...]) -> tuple[bool, State]:
    """A key whose state is the values in its queue."""
    what, result = operation.what, operation.result
    known = operation.end is not None
    if what == "PUSH":
        return True, (*state, operation.argument)
    if what == "POP":
        return not known or result == (len(state), state[0] if state else None), state[1:]
    if what == "LEN":
        return not known or result == len(state), state
    if what == "CHECK":
        return not known or (result == 0) == bool(state), state
    assert what == "WAIT", what
    return not known or bool(state), state


def whole_store(keys: Sequence[bytes]) -> Apply:
    """All keys with values at once, so that what touches several must do so at one moment."""
    index = {key: number for number, key in enumerate(keys)}

    def apply(operation: Operation, state: tuple[bytes | None, ...]) -> tuple[bool, State]:
        known = operation.end is not None
        if operation.what == "NUMKEYS":
            return not known or operation.result == sum(value is not None for value in state), state
        if operation.what == "MULTI_GET":
            values = tuple(state[index[key]] or b"" for key in operation.keys)
            return not known or operation.result == values, state
        if operation.what == "MULTI_SET":
            new = list(state)
            for key, value in zip(operation.keys, operation.argument, strict=True):
                new[index[key]] = value
            return True, tuple(new)
        position = index[operation.keys[0]]
        possible, value = apply_to_value(operation, state[position])
        return possible, (*state[:position], value, *state[position + 1 :])

    return apply


def by_key(operation: Operation) -> list[Operation]:
    """An operation on several keys as one for each, at times of their own."""
    if operation.what == "NUMKEYS":
        return []
    if len(operation.keys) == 1 and not operation.what.startswith("MULTI"):
        return [operation]
    what = {"MULTI_GET": "GET", "MULTI_SET": "SET"}.get(operation.what, operation.what)
    parts = []
    for number, key in enumerate(operation.keys):
        argument = operation.argument[number] if operation.what == "MULTI_SET" else None
        result = operation.result[number] if operation.what == "MULTI_GET" and operation.result else None
        parts.append(Operation(operation.who, what, (key,), argument, operation.start, operation.end, result))
    return parts


@dataclass(slots=True)
class _Node:
    done: int
    state: State
    first: int  # all operations before this one, by their start, are done
    choices: list[tuple[int, State]] = field(default_factory=list)


def is_linearizable(operations: Sequence[Operation], initial: State, apply: Apply) -> bool:
    """Search for an order. The operations of one client are done in the order in which they stand here."""
    # One who is waiting is in no order with its other requests, but for what their intervals say.
    relevant = [
        operation
        for operation in operations
        if operation.end is not None or (operation.what not in READS and operation.result != REFUSED)
    ]
    search = _Search(sorted(relevant, key=lambda operation: operation.start), apply)
    return search.run(initial)


class _Search:
    def __init__(self, operations: list[Operation], apply: Apply) -> None:
        self._operations = operations
        self._apply = apply
        self._starts = [operation.start for operation in operations]
        never = 1 << 60
        self._ends = [never if operation.end is None else operation.end for operation in operations]
        self._by_end = sorted(range(len(operations)), key=self._ends.__getitem__)
        self._goal = sum(1 << number for number, end in enumerate(self._ends) if end != never)
        self._reads = [operation.is_read for operation in operations]
        self._before = self._order_in_lines()

    def _order_in_lines(self) -> list[int]:
        """For each operation, the bit of the one that its client asked before; 0 if there is none."""
        before: list[int] = []
        last: dict[str, int] = {}
        for number, operation in enumerate(self._operations):
            if operation.what == "WAIT":
                before.append(0)
                continue
            before.append(last.get(operation.who, 0))
            last[operation.who] = 1 << number
        return before

    def run(self, initial: State) -> bool:
        root = self._open(0, initial, 0)
        if root is None:
            return True
        stack = [root]
        seen = {(root.done, root.state)}
        nodes = 0
        while stack:
            node = stack[-1]
            if not node.choices:
                stack.pop()
                continue
            number, state = node.choices.pop()
            nodes += 1
            if nodes > _MOST_NODES:
                raise TooHardError
            child = self._open(node.done | 1 << number, state, node.first)
            if child is None:
                return True
            key = (child.done, child.state)
            if key not in seen:
                seen.add(key)
                stack.append(child)
        return False

    def _open(self, done: int, state: State, first: int) -> _Node | None:
        """Do all reads that fit, and see what could be next; None if all is done."""
        apply, operations, starts, before = self._apply, self._operations, self._starts, self._before
        count = len(operations)
        while True:
            if done & self._goal == self._goal:
                return None
            while first < count and done >> first & 1:
                first += 1
            # Nothing can be next that began after something else, which is not done, had ended.
            target = next(number for number in self._by_end if not done >> number & 1)
            limit = self._ends[target]
            again = False
            choices: list[tuple[tuple[int, int], int, State]] = []
            for number in range(first, count):
                if starts[number] > limit:
                    break
                if done >> number & 1 or before[number] & ~done:
                    continue
                possible, new = apply(operations[number], state)
                if not possible:
                    continue
                if self._reads[number]:
                    # A read that fits may as well be done now: it stands in nobody's way.
                    done |= 1 << number
                    again = True
                    continue
                choices.append(((self._rank(number, target, new), self._ends[number]), number, new))
            if not again:
                break
        choices.sort(key=lambda choice: choice[0], reverse=True)  # the most hopeful one is taken first
        return _Node(done, state, first, [(number, new) for _, number, new in choices])

    def _rank(self, number: int, target: int, new: State) -> int:
        """Writes that make the most urgent operation possible are tried first."""
        if number == target:
            return 0
        if self._reads[target]:
            return 0 if self._apply(self._operations[target], new)[0] else 1
        return 1


def explain_barrier(size: int, released: Sequence[tuple[int, int]], dead: Sequence[tuple[int, int]]) -> bool:
    """Whether all releases of one barrier come in groups of `size` that were there at one moment.

    An arrival is the interval in which its client may have been counted. Who died may have been released
    without anyone having seen it.
    """
    if not released:
        return True
    left = sorted(released, key=lambda interval: interval[1])
    earliest = left[0][1]
    size = max(size, 1)
    # All that began before the earliest end is there at that moment, as nothing has ended before.
    there = [interval for interval in left[1:] if interval[0] <= earliest]
    ghosts = sorted(
        (interval for interval in dead if interval[0] <= earliest <= interval[1]),
        key=lambda interval: interval[1],
    )
    for count in range(min(len(ghosts), size - 1) + 1):
        others = size - 1 - count
        if others > len(there):
            continue
        rest = list(left[1:])
        for interval in there[:others]:
            rest.remove(interval)
        ghosts_left = list(dead)
        for interval in ghosts[:count]:
            ghosts_left.remove(interval)
        if explain_barrier(size, rest, ghosts_left):
            return True
    return False
