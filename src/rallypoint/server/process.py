"""What a process is told and does first that does nothing but serve a store."""

from __future__ import annotations

import gc
import os
import sys

from rallypoint.wire.limits import Limits

LIMITS_VARIABLE = "RALLYPOINT_LIMITS"

# A collection looks at every object. Connections come and go without leaving cycles, so a storm of
# them should not set off one collection after the other, as the default of 700 would.
_COLLECT_AFTER = 100_000


def settle_in() -> None:
    """Make this process fit for many connections: all the open files it may have, and few collections."""
    _raise_file_limit()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def limits_of_environment() -> Limits:
    """The limits as the variable RALLYPOINT_LIMITS changes them: NAME=VALUE pairs, commas between them."""
    return Limits().override(filter(None, os.environ.get(LIMITS_VARIABLE, "").split(",")))


def _raise_file_limit() -> None:
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):  # macOS says "unlimited" but does not allow it
        pass
