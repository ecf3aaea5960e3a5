"""Versions of engines. Pure."""

from __future__ import annotations

import re

Version = tuple[int, ...]


def parse_version(text: str) -> Version:
    """The numbers of a version; none if there are none."""
    return tuple(int(each) for each in re.findall(r"\d+", text.partition("-")[0])[:3])
