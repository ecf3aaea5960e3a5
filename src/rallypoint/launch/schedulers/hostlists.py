"""Lists as schedulers write them: names of machines, and counts for each of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

_PART: Final = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_LIST: Final = re.compile(rf"{_PART.pattern}(?:,{_PART.pattern})*")
_GROUP: Final = re.compile(r"\[([^\]]*)\]")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT: Final = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def first_host(text: str) -> str | None:
    """The first machine of a list such as `gpu[01-04,07],login3`; None if it is no such list."""
    return next(iter_hosts(text), None)


def iter_hosts(text: str) -> Iterator[str]:
    """All machines of a list such as `rack[1-2]-gpu[01-04,07]-ib,login3`, in its order."""
    if _LIST.fullmatch(text.strip()):
        for part in _PART.findall(text.strip()):
            yield from _expand(part)


def _expand(part: str) -> Iterator[str]:
    group = _GROUP.search(part)
    if group is None:
        yield part
        return
    for number in _numbers(group[1]):
        for rest in _expand(part[group.end() :]):
            yield f"{part[: group.start()]}{number}{rest}"


def _numbers(text: str) -> Iterator[str]:
    """`01-03,7` is 01, 02, 03 and 7; nothing for what is no such text."""
    for item in text.split(","):
        found = _RANGE.fullmatch(item.strip())
        if found is None:
            return
        width = len(found[1])
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield f"{number:0{width}}"


def count_at(text: str, place: int) -> int | None:
    """The count at a place of a list such as `2(x3),1`, which is 2, 2, 2, 1; None if there is none."""
    for item in text.split(","):
        found = _COUNT.fullmatch(item.strip())
        if found is None:
            return None
        times = int(found[2] or 1)
        if place < times:
            return int(found[1])
        place -= times
    return None


def distinct(hosts: Sequence[str]) -> list[str]:
    """Each machine once, in the order in which they come."""
    return list(dict.fromkeys(host for host in hosts if host))
