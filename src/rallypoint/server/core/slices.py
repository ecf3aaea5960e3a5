"""Requests that take long, carried out a slice at a time, so that other clients need not wait for them. Pure.

What a request reads or writes, it reads or writes at one moment. To prepare that, or to put the reply
together, is what takes long.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final, TypeVar

from rallypoint.compiling import mypyc_attr
from rallypoint.wire.parser import STEPS_AT_ONCE

Slices = Generator[bytes | None, None, bytes]
"""A request under way: it yields behind each slice but the last, and returns the reply. If that is long, it
yields pieces of it before."""

SLICE = STEPS_AT_ONCE
"""How many keys are a slice; an even number, as keys and values alternate in some requests."""

PIECE_BYTES: Final = 1 << 18
"""How much of a long reply is made and sent at a time."""

T = TypeVar("T")

Rest = Generator[None, None, None]
"""Work under way for which nobody waits: it stops behind each slice but the last."""


def nothing() -> Rest:
    yield from ()


def one_after_the_other(*rests: Rest) -> Rest:
    for rest in rests:
        yield from rest


def sliced(keys: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(keys), SLICE):
        yield keys[start : start + SLICE]


@mypyc_attr(allow_interpreted_subclasses=True)
class Worker:
    """Carries out one request at a time, in slices."""

    __slots__ = ("_slices",)

    def __init__(self) -> None:
        self._slices: Slices | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether a request is under way: `go_on` is to be called."""
        return self._slices is not None

    def begin(self, slices: Slices) -> bytes | None:
        """The first slice of a request; returns what `go_on` does."""
        self._slices = slices
        return self.go_on()

    def go_on(self) -> bytes | None:
        """Carry out the next slice: the reply after the last one; before that, a piece of it or None."""
        slices, self._slices = self._slices, None
        assert slices is not None, "there is a request under way"
        try:
            piece = next(slices)
        except StopIteration as end:
            reply: bytes = end.value
            return reply
        self._slices = slices
        return piece
