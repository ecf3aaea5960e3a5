"""Whether data holds nothing but whole requests, and whether these only read: without parsing it."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from rallypoint.errors import LimitError
from rallypoint.store.wire.form import Form
from rallypoint.store.wire.handlers import Handler
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import SHAPES, Op

READS: Final = frozenset((Op.GET, Op.CHECK, Op.GETNUMKEYS, Op.MULTI_GET, Op.PING, Op.QUEUE_LEN, Op.LIST_KEYS))
"""Operations that change nothing. A WAIT for keys that are there is one, too."""
_MOST_KNOWN: Final = 4_096
_KNOWN_BYTES: Final = range(65, 1_025)
"""How long data is that is worth to be known by its bytes: what is shorter is looked at as quickly."""


class Nature(Enum):
    """What some data is."""

    READS = "requests that change nothing"
    WRITES = "requests of which some may change something"
    OTHER = "not, or not only, whole requests: it has to be parsed"


class Found(NamedTuple):
    """What some data is, and the keys that it waits for, if it does nothing but read."""

    nature: Nature
    awaited: list[bytes]


_OTHER: Final = Found(Nature.OTHER, [])
_WRITES: Final = Found(Nature.WRITES, [])
_READS: Final = Found(Nature.READS, [])


class Scanner:
    """Finds out what data is. What all ranks say alike is known by its bytes."""

    __slots__ = ("_forms", "_known", "_limits")

    def __init__(self, limits: Limits, raw: frozenset[Op]) -> None:
        """`raw`: the operations that may be handed on as they are; others have to be parsed."""
        self._limits = limits
        self._forms = {
            int(op): (Form[Handler](op, lambda *_: b"", limits), op is Op.WAIT, op in READS)
            for op in SHAPES
            if op in raw
        }
        self._known: dict[bytes, Found] = {}

    def look(self, data: bytes) -> Found:
        """What data is that begins with a request."""
        if len(data) not in _KNOWN_BYTES:
            return self._find(data)
        found = self._known.get(data)
        if found is None:
            found = self._find(data)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[data] = found
        return found

    def _find(self, data: bytes) -> Found:
        start, stop, limits = 0, len(data), self._limits
        only_reads = True
        awaited: list[bytes] = []
        while start < stop:
            found = self._forms.get(data[start])
            if found is None:
                return _OTHER
            form, waits, reads = found
            try:
                blobs, end = form.read(data, start, stop, limits.keys_per_request)
            except LimitError:
                return _OTHER
            if end > stop or end - start > limits.request_bytes:
                return _OTHER
            if waits:
                awaited += blobs
            elif not reads:
                only_reads = False
            start = end
        if not only_reads:
            return _WRITES
        return Found(Nature.READS, awaited) if awaited else _READS
