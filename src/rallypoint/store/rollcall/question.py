"""What somebody asks of a server or a relay, and how keys are named in questions and answers.

The answer is a `snapshot`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from rallypoint.codec import Within, from_text, to_text
from rallypoint.errors import ProtocolError

KEYS_NAMED: Final = 8
"""How many keys of one wait are named; the rest is counted."""

PLAN: Final = "rallypoint/roll"
"""The key at which a launcher says which machine has which ranks; see `plan`."""

STALL: Final = "rallypoint/stall"
"""The key at which a launcher says, as text, what it has found out about a job that stands still. It deletes
the key when the job goes on."""

STALL_BYTES: Final = 65_536
"""No more of that text is read."""

_Count = Annotated[int, Within(0, 1 << 62)]


@dataclass(frozen=True)
class Question:
    """What is wanted beside the clients, barriers and figures, which are always told."""

    keys: _Count = 0
    """How many keys are listed at most."""
    search: str = ""
    """Only keys that hold this text."""
    value: str | None = None
    """A key whose value is wanted, as far as `value_bytes` go."""
    value_bytes: _Count = 4096

    def to_json(self) -> bytes:
        return to_text(self).encode()

    @staticmethod
    def from_json(data: bytes) -> Question:
        """Raises ProtocolError for what is no question."""
        try:
            return from_text(Question, data or b"{}")
        except ValueError as error:
            raise ProtocolError(f"LOOK asks what cannot be understood: {error}") from None


def key_name(wire_key: bytes) -> str:
    """A key as scripts name it; bytes that are no UTF-8 become surrogates, as in Python's file names."""
    return wire_key.removeprefix(b"/").decode(errors="surrogateescape")
