"""A request for a `snapshot` of a server or relay, and the names of keys in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from rallypoint.codec import Within, from_text, to_text
from rallypoint.errors import ProtocolError

KEYS_NAMED: Final = 8
"""How many keys of one wait are named; the rest is counted."""

PLAN: Final = "rallypoint/roll"
"""The key with a launcher's plan: which machine has which ranks; see `plan`."""

STALL: Final = "rallypoint/stall"
"""The key with a launcher's report of a stalled job, as text. It deletes the key when the job goes on."""

STALL_BYTES: Final = 65_536
"""The rest of that text is ignored."""

_Count = Annotated[int, Within(0, 1 << 62)]


@dataclass(frozen=True)
class Question:
    """What to report besides clients, barriers and figures, which are always reported."""

    keys: _Count = 0
    """How many keys to list at most."""
    search: str = ""
    """Only keys that contain this text."""
    value: str | None = None
    """A key whose value to report, up to `value_bytes`."""
    value_bytes: _Count = 4096

    def to_json(self) -> bytes:
        return to_text(self).encode()

    @staticmethod
    def from_json(data: bytes) -> Question:
        """Raises ProtocolError for an invalid question."""
        try:
            return from_text(Question, data or b"{}")
        except ValueError as error:
            raise ProtocolError(f"LOOK asks what cannot be understood: {error}") from None


def key_name(wire_key: bytes) -> str:
    """A key as scripts name it; bytes that are no UTF-8 become surrogates, as in Python's file names."""
    return wire_key.removeprefix(b"/").decode(errors="surrogateescape")
