"""Whether data holds nothing but whole requests, and whether these only read: without parsing it."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from rallypoint.errors import LimitError
from rallypoint.wire.form import Form
from rallypoint.wire.handlers import Handler
from rallypoint.wire.limits import Limits
from rallypoint.wire.opcodes import SHAPES, Op

READS: Final = frozenset((Op.GET, Op.CHECK, Op.GETNUMKEYS, Op.MULTI_GET, Op.PING, Op.QUEUE_LEN, Op.LIST_KEYS))
"""Operations that change nothing. A WAIT for keys that are there is one, too."""
_MOST_KNOWN: Final = 256
_LONGEST_KNOWN: Final = 1_024


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


class Scanner:
    """Finds out what data is. What all ranks say alike is known by its bytes."""

    __slots__ = ("_forms", "_known", "_limits")

    def __init__(self, limits: Limits, raw: frozenset[Op]) -> None:
        """`raw`: the operations that may be handed on as they are; others have to be parsed."""
        self._limits = limits
        self._forms = {int(op): Form[Handler](op, lambda *_: b"", limits) for op in SHAPES if op in raw}
        self._known: dict[bytes, Found] = {}

    def look(self, data: bytes) -> Found:
        """What data is that begins with a request."""
        found = self._known.get(data)
        if found is None:
            found = self._find(data)
            if len(data) <= _LONGEST_KNOWN:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[data] = found
        return found

    def _find(self, data: bytes) -> Found:
        start, stop = 0, len(data)
        reads, awaited = True, []
        while start < stop:
            form = self._forms.get(data[start])
            if form is None:
                return _OTHER
            try:
                blobs, end = form.read(data, start, stop, self._limits.keys_per_request)
            except LimitError:
                return _OTHER
            if end > stop or end - start > self._limits.request_bytes:
                return _OTHER
            if form.op is Op.WAIT:
                awaited += blobs
            elif form.op not in READS:
                reads = False
            start = end
        return Found(Nature.READS, awaited) if reads else Found(Nature.WRITES, [])
