"""The long answers of a relay's session: sent in pieces, so that short ones need not wait for them. Pure."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from rallypoint.store.engine.keyspace import Value
from rallypoint.store.wire.sessions import PIECE_BYTES, Status, item


class _Rest(NamedTuple):
    """What is left of an answer."""

    tag: int
    status: Status
    key: bytes | None
    head: bytes
    body: Value
    start: int
    stop: int
    """Where in `body` it begins and ends: a value that is appended to meanwhile only grows."""


class LongAnswers:
    """Answers that are not sent yet, or not all of them, in their order."""

    __slots__ = ("_keys", "_rests", "bytes")

    def __init__(self) -> None:
        self._rests: deque[_Rest] = deque()
        self._keys: Counter[bytes | None] = Counter()
        self.bytes = 0
        """How much is left to be sent."""

    def __bool__(self) -> bool:
        return bool(self._rests)

    def has(self, key: bytes) -> bool:
        """Whether an answer to a read of this key is among them."""
        return key in self._keys

    def add(self, tag: int, status: Status, head: bytes, body: Value, key: bytes | None = None) -> None:
        """An answer of two parts, so that a value need not be copied. `key`: it answers a read of that."""
        self._rests.append(_Rest(tag, status, key, head, body, 0, len(body)))
        self._keys[key] += 1
        self.bytes += len(head) + len(body)

    def take_piece(self) -> bytes:
        """The next item to be sent."""
        tag, status, key, head, body, start, stop = self._rests.popleft()
        end = min(start + PIECE_BYTES, stop)
        piece = head + body[start:end]
        self.bytes -= len(piece)
        if end < stop:
            self._rests.appendleft(_Rest(tag, status, key, b"", body, end, stop))
            return item(tag, Status.PIECE, piece)
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]
        return item(tag, status, piece)

    def state(self) -> list[object]:
        """All of them, as plain data."""
        return [
            [each.tag, int(each.status), each.head, bytes(each.body[each.start : each.stop]), each.key]
            for each in self._rests
        ]

    def check_invariants(self) -> None:
        assert self.bytes == sum(len(rest.head) + rest.stop - rest.start for rest in self._rests)
        assert self._keys == Counter(rest.key for rest in self._rests)
