"""`HashStore`: a store in the memory of this process, for its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from rallypoint.engine import Engine
from rallypoint.stores.base import DEFAULT_TIMEOUT, Timeout
from rallypoint.stores.client.deadline import Deadline
from rallypoint.stores.local import LocalStore
from rallypoint.wire.opcodes import Op

_Result = TypeVar("_Result")


class _Memory:
    """The engine that a store and its clones share, and its lock, which tells of each change."""

    def __init__(self) -> None:
        self.engine: Engine[bytes] = Engine()
        self.changed = threading.Condition()


class HashStore(LocalStore):
    """A store that threads of one process share, through the same object or through clones."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._memory = _Memory()

    def __repr__(self) -> str:
        return "HashStore()"

    def clone(self) -> HashStore:
        """Another object for the same keys; they live as long as one of the two."""
        self._check_open()
        twin = HashStore(self._timeout)
        twin._memory = self._memory
        return twin

    def close(self) -> None:
        """End this object; calls that wait in it raise. Its clones are not affected."""
        with self._memory.changed:
            self._closed = True
            self._memory.changed.notify_all()

    def _at_once(self, act: Callable[[Engine[bytes]], _Result]) -> _Result:
        with self._memory.changed:
            return act(self._memory.engine)

    def _until(
        self, attempt: Callable[[Engine[bytes]], _Result | None], deadline: Deadline
    ) -> _Result | None:
        changed = self._memory.changed
        with changed:
            while True:
                self._check_open()
                result = attempt(self._memory.engine)
                if result is not None or deadline.passed:
                    return result
                changed.wait(min(deadline.remaining, threading.TIMEOUT_MAX))

    def _record(self, op: Op, contents: Sequence[bytes], *, tail: bytes = b"", member: bytes = b"") -> None:
        del op, contents, tail, member  # the engine is all there is
        self._memory.changed.notify_all()
