"""Where a server or a relay runs, as its snapshots and its first event tell. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    version: str = ""
    host: str = ""
    pid: int = 0
    backend: str = ""
