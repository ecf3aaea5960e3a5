"""How much memory this process may use."""

from __future__ import annotations

import os
from typing import Final

_GROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container is told how much is for it, by the two versions of control groups."""


def memory_bytes() -> int | None:
    """The memory of this machine, or of the container if that may use less; None where nobody says."""
    known = []
    try:
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # Windows
        pass
    for path in _GROUP_LIMITS:
        try:
            with open(path, encoding="utf-8") as file:
                known.append(int(file.read()))
        except (OSError, ValueError):  # there is none, or it says "max"
            pass
    return min(known, default=None)
