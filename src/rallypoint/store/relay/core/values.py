"""What a relay knows of the store's values: the long ones that were fetched last.

A read is always asked of the store. But a relay that knows a long value asks by RECALL, and the store answers
that the value is unchanged if this very value is the last that it sent for the key. Both sides remember
equally many values (`wire/sessions.py`), so the store knows what the relay has.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from rallypoint.errors import ProtocolError
from rallypoint.store.wire.sessions import REMEMBERED, REMEMBERED_BYTES, WORTH_REMEMBERING, Status


class KnownValues:
    """Long values by key, the one that was read last at the end."""

    __slots__ = ("_bytes", "_coming", "_recalls", "_values")

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._recalls: Counter[bytes] = Counter()  # under way; they may refer to what is known
        self._coming: Counter[bytes] = Counter()  # reads whose answers come in pieces

    def begin_recall(self, key: bytes) -> bool:
        """Whether the value is known, or is coming, so that a RECALL will do."""
        if key not in self._values and key not in self._coming:
            return False
        self._recalls[key] += 1
        return True

    def expect(self, key: bytes) -> None:
        """The answer to a read comes in pieces."""
        self._coming[key] += 1

    def learn(self, key: bytes, status: Status, content: bytes, *, recalled: bool, expected: bool) -> bytes:
        """Take the answer to a read; return the value. `expected`: it has come in pieces."""
        if recalled:
            _count_down(self._recalls, key)
        if expected:
            _count_down(self._coming, key)
        if status is Status.UNCHANGED:
            if key not in self._values:
                raise ProtocolError(f"the value of {key!r} is said to be unchanged, but is not known here")
            self._values.move_to_end(key)
            return self._values[key]
        if status is Status.DONE:
            self._forget(key)
            if len(content) >= WORTH_REMEMBERING:
                self._values[key] = content
                self._bytes += len(content)
                self._shrink()
        return content

    def _shrink(self) -> None:
        while len(self._values) > REMEMBERED or self._bytes > REMEMBERED_BYTES:
            oldest = next((key for key in self._values if key not in self._recalls), None)
            if oldest is None:
                return
            self._forget(oldest)

    def _forget(self, key: bytes) -> None:
        old = self._values.pop(key, None)
        if old is not None:
            self._bytes -= len(old)

    def check_invariants(self) -> None:
        assert self._bytes == sum(map(len, self._values.values()))
        assert all(count > 0 for count in [*self._recalls.values(), *self._coming.values()])


def _count_down(counter: Counter[bytes], key: bytes) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
