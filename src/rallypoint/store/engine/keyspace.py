"""Keys with values, queues, and the bytes that they take; and the budget of what is held besides."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.wire.limits import Limits

Value = bytes | bytearray
"""A value. It is a bytearray, owned by the keyspace and growing in place, once it has been appended to."""

State = Any
"""Plain data: numbers, texts, bytes, None, and lists of such."""

_I64_MIN: Final = -(1 << 63)
_I64_MAX: Final = (1 << 63) - 1
_SMALL: Final = 1 << 60  # compiled code compares smaller numbers without an object for each

# A 64-bit number has at most 20 characters; the rest is room for white space, as torch allows it.
_NUMBER_CHARACTERS = 64


class Keyspace:
    """What is stored. A key may have a value and a queue at a time; they are apart, as in torch."""

    __slots__ = (
        *("_digits", "_most_bytes", "_most_entries", "_sum"),
        *("queued", "queues", "stored_bytes", "values"),
    )

    def __init__(self, most_bytes: int, most_entries: int) -> None:
        self.values: dict[bytes, Value] = {}
        self.queues: dict[bytes, deque[bytes]] = {}  # never an empty one
        self.queued = 0  # values in all queues
        self.stored_bytes = 0
        # The result of the last ADD as it was stored, and as a number: at a barrier all add to the same key,
        # and a caller that finds these very digits there need not read them.
        self._digits: bytes | None = None
        self._sum = 0
        self._most_bytes = most_bytes
        self._most_entries = most_entries

    def put(self, key: bytes, value: Value) -> None:
        old = self.values.get(key)
        if old is None:
            self._take(len(key) + len(value), 1)
        else:
            self._take(len(value) - len(old))
        self.values[key] = value

    def put_all(self, new: Mapping[bytes, bytes]) -> None:
        """Put all of these, or none when they do not fit. There may be very many."""
        # In the order of the keys: in that of a set of them, each would be looked for all over the memory.
        old = list(map(self.values.get, new))
        added = [key for key, value in zip(new, old, strict=True) if value is None]
        more = sum(map(len, new.values())) - sum(map(len, filter(None, old)))
        self._take(sum(map(len, added)) + more, len(added))
        self.values.update(new)

    def append(self, key: bytes, value: bytes) -> None:
        old = self.values.get(key)
        if old is None:
            self.put(key, value)
            return
        self._take(len(value))
        if isinstance(old, bytearray):
            old += value
        else:
            self.values[key] = bytearray(old) + value

    def add(self, key: bytes, amount: int) -> int:
        """Add to the number stored at `key`, 0 if there is none; raises ProtocolError if it is no number."""
        old = self.values.get(key)
        if old is None:
            total, room, entries = amount, -len(key), 1
        elif old is self._digits:
            if not amount:
                return self._sum
            total, room, entries = self._sum + amount, len(old), 0
        else:
            total, room, entries = _number(key, old) + amount, len(old), 0
        if not -_SMALL < total < _SMALL and not _I64_MIN <= total <= _I64_MAX:
            raise ProtocolError(f"ADD of {amount} to key {key!r} goes beyond 64 bits")
        digits = b"%d" % total
        more = len(digits) - room
        if more:
            self._take(more, entries)
        self.values[key] = self._digits = digits
        self._sum = total
        return total

    def delete(self, key: bytes) -> bool:
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.stored_bytes -= len(key) + len(value)
        return True

    def push(self, key: bytes, value: bytes) -> None:
        queue = self.queues.get(key)
        self._take(len(value) if queue is not None else len(key) + len(value), 1)
        if queue is None:
            queue = self.queues[key] = deque()
        queue.append(value)
        self.queued += 1

    def pop(self, key: bytes) -> bytes | None:
        queue = self.queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        self.queued -= 1
        self.stored_bytes -= len(value)
        if not queue:
            del self.queues[key]
            self.stored_bytes -= len(key)
        return value

    def queue_length(self, key: bytes) -> int:
        return len(self.queues.get(key, ()))

    def state(self) -> State:
        """All of it, as plain data. The order of the keys counts, and whether a value grows in place."""
        values: list[Value] = list(self.values.values())
        growing: list[bytes] = []
        if bytearray in set(map(type, values)):  # few have any, and all clients wait for this
            growing = [key for key, value in self.values.items() if type(value) is bytearray]
            values = [bytes(value) if type(value) is bytearray else value for value in values]
        queues = [(key, list(queue)) for key, queue in self.queues.items()]
        return [list(self.values), values, growing, queues]

    def take_state(self, state: State) -> None:
        """Become what has given this state, whatever the limits are now; until then it was empty."""
        keys, values, growing, queues = state
        self.values.update(zip(keys, values, strict=True))
        self.values.update((key, bytearray(self.values[key])) for key in growing)
        self.queues.update((key, deque(queue)) for key, queue in queues)
        self.queued = sum(map(len, self.queues.values()))
        stored = [*keys, *values, *self.queues, *chain.from_iterable(self.queues.values())]
        self.stored_bytes = sum(map(len, stored))

    def _take(self, count: int, entries: int = 0) -> None:
        """Count more bytes, in new entries; LimitError if there is no room for them."""
        stored = self.stored_bytes + count
        if count > 0 and stored > self._most_bytes:
            limit = self._most_bytes
            raise LimitError(f"the store would hold {stored:,} bytes; the limit stored_bytes is {limit:,}")
        if entries and len(self.values) + self.queued + entries > self._most_entries:
            limit = self._most_entries
            raise LimitError(f"the store would hold more than {limit:,} entries, the limit stored_entries")
        self.stored_bytes = stored

    def check_invariants(self) -> None:
        size = sum(len(key) + len(value) for key, value in self.values.items())
        for key, queue in self.queues.items():
            assert queue, f"an empty queue is kept for {key!r}"
            size += len(key) + sum(map(len, queue))
        assert self.queued == sum(map(len, self.queues.values()))
        assert size == self.stored_bytes, f"{size} bytes are stored, but {self.stored_bytes} are counted"
        assert self._digits is None or self._digits == b"%d" % self._sum


def _number(key: bytes, value: Value) -> int:
    # int() would take underscores, and any length of digits at a price that grows with their square.
    # To look for one takes twice as long as the rest, and most numbers are nothing but digits.
    if len(value) <= _NUMBER_CHARACTERS and (value.isdigit() or b"_" not in value):
        try:
            return int(value)
        except ValueError:
            pass
    raise ProtocolError(f"ADD to key {key!r}, whose value {bytes(value[:32])!r} is no number")


class Budget:
    """What all clients of a process make it hold besides keys and values, in bytes.

    That is waits, unread replies, incomplete requests, clients' reports, and sessions. Each is counted where
    it is held, at what it occupies. All stores of a server share one budget.
    """

    __slots__ = ("ending", "held", "is_reported", "limit")

    def __init__(self, limits: Limits | None = None) -> None:
        self.limit = (limits or Limits()).held_bytes
        self.held = 0
        self.ending = 0
        """How many ended sessions still have waits to withdraw."""
        self.is_reported = False
        """Whether the driver has been asked to lighten the load."""

    @property
    def is_over(self) -> bool:
        """Whether all clients together hold too much. Not while the waits of an ended session are
        being withdrawn: that frees memory.
        """
        return self.held > self.limit and not self.ending
