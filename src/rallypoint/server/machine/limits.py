"""How many clients may wait to be accepted."""

from __future__ import annotations

from pathlib import Path


def accept_backlog() -> int | None:
    """How many clients may wait on one socket to be accepted, at most (somaxconn)."""
    return _number_in("/proc/sys/net/core/somaxconn")


def syn_backlog() -> int | None:
    """How many connections may be half open on one socket."""
    return _number_in("/proc/sys/net/ipv4/tcp_max_syn_backlog")


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
