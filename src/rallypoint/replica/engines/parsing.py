"""Reading what an engine has of a log, which anybody may have written who may write there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.replica.core.records import FormatError


@contextmanager
def parsing(log: str, what: str) -> Iterator[None]:
    """FormatError if the block cannot make sense of this part of a log of this name."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError(
            f"{log}: {what} cannot be read: {error}",
            hint="another version of Rallypoint has written it, or somebody else; `rallypoint erase --engine "
            "URL` removes all of this job, if it is of no use any more",
        ) from error
