"""Reading what an engine has of a log: how much at once, and what if it makes no sense. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rallypoint.store.replica.core.records import FormatError

BYTES_PER_READ: Final = 4 << 20
"""How long the records of a read are, about."""

_FEWEST: Final = 32
_MOST: Final = 1024


class Pace:
    """As many as are likely to have `BYTES_PER_READ`, by those that were read before."""

    def __init__(self) -> None:
        self._next = _FEWEST

    def take(self) -> int:
        """How many to ask for. Unless `note` is called, few the next time: they may have been too long."""
        count, self._next = self._next, _FEWEST
        return count

    def note(self, records: Sequence[bytes]) -> None:
        """What has been read."""
        length = sum(map(len, records)) + 1
        self._next = min(max(BYTES_PER_READ * len(records) // length, _FEWEST), _MOST)


@contextmanager
def parsing(log: str, what: str) -> Iterator[None]:
    """FormatError if the block cannot make sense of this part of a log of this name.

    Anybody who may write there may have written it.
    """
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError(
            f"{log}: {what} cannot be read: {error}",
            hint="another version of Rallypoint has written it, or somebody else; `rallypoint erase --engine "
            "URL` removes all of this job, if it is of no use any more",
        ) from error
