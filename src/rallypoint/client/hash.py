"""`HashStore`: a store in the memory of this process, for its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from rallypoint.client.base import DEFAULT_TIMEOUT, Timeout
from rallypoint.client.local import LocalStore
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.engine import Engine
from rallypoint.store.wire.opcodes import Op

_Result = TypeVar("_Result")


class HashStore(LocalStore):
    """A store that threads of one process share, through the same object or through clones."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        # Clones share the engine, and its lock, which tells of each change.
        self._engine: Engine[bytes] = Engine()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return "HashStore()"

    def clone(self) -> HashStore:
        """Another object for the same keys; they live as long as one of the two."""
        self._check_open()
        twin = HashStore(self._timeout)
        twin._engine, twin._changed = self._engine, self._changed
        return twin

    def close(self) -> None:
        """End this object; calls that wait in it raise. Its clones are not affected."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _at_once(self, act: Callable[[Engine[bytes]], _Result]) -> _Result:
        with self._changed:
            return act(self._engine)

    def _until(
        self, attempt: Callable[[Engine[bytes]], _Result | None], deadline: Deadline
    ) -> _Result | None:
        with self._changed:
            while True:
                self._check_open()
                result = attempt(self._engine)
                if result is not None or deadline.passed:
                    return result
                self._changed.wait(min(deadline.remaining, threading.TIMEOUT_MAX))

    def _record(self, op: Op, contents: Sequence[bytes], *, tail: bytes = b"", member: bytes = b"") -> None:
        del op, contents, tail, member  # the engine is all there is
        self._changed.notify_all()
