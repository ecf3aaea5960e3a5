"""The limits for the number of connections: open files, and clients that wait to be accepted."""

from __future__ import annotations

import sys
from pathlib import Path


def open_files_allowed() -> tuple[int, int] | None:
    """How many files a process may open: now, and at most if it asks. None on systems that do not say."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _finite(soft), _finite(hard)


def _finite(limit: int) -> int:
    return limit if limit >= 0 else sys.maxsize  # -1: unlimited


def accept_backlog() -> int | None:
    """How many clients may wait on one socket to be accepted, at most (somaxconn)."""
    return _number_in("/proc/sys/net/core/somaxconn")


def syn_backlog() -> int | None:
    """How many connections may be half open on one socket."""
    return _number_in("/proc/sys/net/ipv4/tcp_max_syn_backlog")


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
