"""What tests that run side by side may only do in turns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

NETWORK = "network"
"""A new interface or address of this machine makes a browser drop the requests that it has under way."""


@contextmanager
def in_turns(name: str, *, shared: bool = False) -> Iterator[None]:
    """Wait until no other test does what has this name; those that share it do so together."""
    import fcntl  # Windows has none, and no network to change

    path = os.path.join(tempfile.gettempdir(), "..", f"rallypoint-tests-{name}-{os.geteuid()}.lock")
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
