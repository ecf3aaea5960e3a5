"""What must hold for the history of a whole run: for each key, each queue and each barrier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from linearizability import (
    Apply,
    Operation,
    TooHardError,
    apply_to_queue,
    apply_to_value,
    by_key,
    explain_barrier,
    is_linearizable,
    whole_store,
)
from simulated_ranks import CANCELLED, FailedError, Keys

_WHOLE_STORE = 45
"""Up to so many operations a history is also checked as one of the whole store."""


class History:
    """All operations of a run, and the steps at which nothing was under way."""

    def __init__(self, keys: Keys) -> None:
        self.operations: list[Operation] = []
        self.rests: list[int] = []
        self.counts: Counter[str] = Counter()
        self._keys = keys

    def check(self) -> None:
        """Raises FailedError. Everything has been read in the end, and that is a part of the history."""
        done = [operation for operation in self.operations if operation.result != CANCELLED]
        self.counts["operations"] += len(done)
        values = [operation for operation in done if operation.what != "BARRIER"]
        keys: dict[bytes, list[Operation]] = {key: [] for key in (*self._keys.values, *self._keys.queues)}
        for operation in values:
            for part in by_key(operation):
                keys[part.keys[0]].append(part)
        for key in self._keys.queues:
            _check_pops(key, keys[key])
            self._check_order(key.decode(), keys[key], (), apply_to_queue)
        for key in self._keys.counters:
            _check_sum(key, keys[key])
        for key in self._keys.values:
            self._check_order(key.decode(), keys[key], None, apply_to_value)
        for name in self._keys.barriers:
            self._check_barrier(*name)
        self._check_whole_store(values)

    def _check_order(self, name: str, operations: list[Operation], initial: Any, apply: Apply) -> None:
        try:
            if is_linearizable(operations, initial, apply):
                return
        except TooHardError:
            self.counts["undecided"] += 1
            return
        raise FailedError(f"no order explains the history of {name}:\n{_listed(operations)}")

    def _check_whole_store(self, operations: Sequence[Operation]) -> None:
        keys = self._keys.values
        # A WAIT for several keys is over when each has been there, not when all are there.
        touching = [
            operation
            for operation in operations
            if operation.what == "NUMKEYS"
            or (operation.keys[0] in keys and (operation.what != "WAIT" or len(operation.keys) == 1))
        ]
        if len(touching) <= _WHOLE_STORE:
            self.counts["whole"] += 1
            self._check_order("the whole store", touching, (None,) * len(keys), whole_store(keys))

    def _check_barrier(self, key: bytes, size: int) -> None:
        """Nobody is released unless as many as the size were there at one moment."""
        arrivals = [
            operation
            for operation in self.operations
            if operation.what == "BARRIER" and operation.keys == (key,) and operation.argument == size
        ]
        released = [(op.start, op.end) for op in arrivals if op.end is not None and op.result is None]
        # Who is dead counts until that has come through to the store: at the next rest it has.
        dead = [
            (op.start, next((rest for rest in self.rests if rest > op.died), op.died))
            for op in arrivals
            if op.died is not None
        ]
        if not explain_barrier(size, released, dead):
            raise FailedError(f"the barrier {key!r} of {size} has released too early:\n{_listed(arrivals)}")


def _check_sum(key: bytes, operations: list[Operation]) -> None:
    """What was added is there, each amount once, and each sum was told to one alone."""
    if any(operation.what not in ("ADD", "GET", "CHECK", "WAIT") for operation in operations):
        return
    adds = [operation for operation in operations if operation.what == "ADD"]
    told = [operation.result for operation in adds if operation.end is not None]
    if all(operation.argument > 0 for operation in adds) and len(set(told)) < len(told):
        raise FailedError(f"a sum of {key!r} was told twice:\n{_listed(adds)}")
    sums = {sum(operation.argument for operation in adds if operation.end is not None)}
    for operation in adds:
        if operation.end is None:
            sums |= {total + operation.argument for total in sums}
    seen = [op.result for op in operations if op.what == "GET" and op.end is not None]
    value = int(seen[-1] or b"0") if seen else 0
    if value not in sums:
        raise FailedError(f"{key!r} is {value}, but should be one of {sorted(sums)}:\n{_listed(operations)}")


def _check_pops(key: bytes, operations: list[Operation]) -> None:
    """Nothing is popped twice, and nothing that was pushed is lost. In the end all was popped."""
    pops = [operation for operation in operations if operation.what == "POP"]
    popped = [pop.result[1] for pop in pops if pop.end is not None and pop.result[1] is not None]
    unseen = sum(pop.end is None for pop in pops)
    pushes = [operation for operation in operations if operation.what == "PUSH"]
    pushed = {push.argument for push in pushes}
    lost = [push.argument for push in pushes if push.end is not None and push.argument not in popped]
    if len(set(popped)) < len(popped) or not pushed.issuperset(popped) or len(lost) > unseen:
        raise FailedError(f"the queue {key!r} has lost or doubled something:\n{_listed(operations)}")


def _listed(operations: Sequence[Operation]) -> str:
    return "\n".join(map(str, sorted(operations, key=lambda operation: operation.start)))
