"""Which machines a machine looks after, and which of them have been silent for too long: pure.

The machines of a roster are a ring, and each looks after the next one. While that one is silent, those
behind it may have nobody who looks after them. So the look goes on, up to the first machine that is seen to
live: that one looks after those behind it. It goes several times as far as the look before, so that a
machine that is silent by chance costs little. Machines that died together are thus missed together, soon
after the time that one alone would take; and while all live, each look is at one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

_FURTHER = 8


class _Sign(NamedTuple):
    """What was last seen of a machine, and how many looks since then have seen nothing new."""

    number: int
    looks_in_vain: int


class Lookout:
    """One machine's looks at those that follow it."""

    def __init__(self, patience: int) -> None:
        """`patience`: how many looks at a machine may be in vain."""
        self._patience = patience
        self._seen: dict[str, _Sign] = {}

    def look(self, ring: Iterable[str], signs_of: Callable[[str], int]) -> set[str]:
        """Look once. Returns the machines that have been silent for too long.

        `ring` has the ids of all others, beginning with the next one; `signs_of` says how many signs of
        life a machine has given. If that raises an error, it was no look.
        """
        seen: dict[str, _Sign] = {}
        for each in islice(ring, _FURTHER * max(1, len(self._seen))):
            number, before = signs_of(each), self._seen.get(each)
            if before and before.number != number:
                seen[each] = _Sign(number, 0)
                break
            seen[each] = _Sign(number, before.looks_in_vain + 1 if before else 0)
        silent = {each for each, sign in seen.items() if sign.looks_in_vain > self._patience}
        self._seen = {each: sign for each, sign in seen.items() if each not in silent}  # it may come back
        return silent
