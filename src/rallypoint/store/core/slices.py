"""Long requests, carried out a slice at a time, so that other clients need not wait for them.

A request reads or writes at one moment. What takes long is to prepare that, or to put the reply together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final, TypeVar

from rallypoint.store.wire.parser import STEPS_AT_ONCE

Slices = Generator[bytes | None, None, bytes]
"""A request under way: it yields after each slice but the last, and returns the reply. If that is long, it
yields pieces of it first."""

SLICE = STEPS_AT_ONCE
"""How many keys are a slice; an even number, as keys and values alternate in some requests."""

PIECE_BYTES: Final = 1 << 18
"""How much of a long reply is made and sent at a time."""

T = TypeVar("T")

Rest = Iterator[None]
"""Work under way for which nobody waits: it yields after each slice but the last."""


def sliced(keys: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(keys), SLICE):
        yield keys[start : start + SLICE]
