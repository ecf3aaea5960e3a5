"""The quick way through a large log: which lines need to be looked at. Pure.

Lines of a training log differ in their numbers and in little else. So each line is brought to a reduced form
without them, and each form is searched once for the texts that a line of interest must hold; a whole block of
lines whose forms are all known costs a translation, a split and a set. Nothing is lost: whatever holds a text
holds it in the reduced form as well (a test compares with looking at every line).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from rallypoint.diagnose.explain.literals import VARIABLE

BLOCK_BYTES: Final = 1 << 20
LONGEST_LINE: Final = 1 << 16
"""Bytes of a line that are kept; the rest of it is dropped."""

_MOST_FORMS: Final = 100_000
_LONGEST_FORM: Final = 1024
_LOWER: Final = bytes(range(256)).lower()
ESCAPE: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-~])")
"""What a terminal obeys: colours, titles, links. It goes first: a reduced form no longer shows its end."""


class Sieve:
    """Lets through the lines that hold one of some texts (in reduced form)."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self._texts = _without_needless(texts)
        self._clean: set[bytes] = set()

    def select(self, block: bytes) -> list[int]:
        """The indexes of the lines of a block that may be of interest."""
        plain = ESCAPE.sub(b"", block) if b"\x1b" in block else block
        forms = plain.translate(_LOWER, VARIABLE).split(b"\n")
        new = set(forms) - self._clean
        if not new:
            return []
        hits = self._examine(new)
        if len(self._clean) > _MOST_FORMS:
            self._clean.clear()
        self._clean.update(form for form in new - hits if len(form) <= _LONGEST_FORM)
        return [index for index, form in enumerate(forms) if form in hits] if hits else []

    def _examine(self, forms: set[bytes]) -> set[bytes]:
        everything = b"\n".join(forms)
        texts = [text for text in self._texts if text in everything]
        return {form for form in forms if any(text in form for text in texts)} if texts else set()


def _without_needless(texts: Iterable[bytes]) -> tuple[bytes, ...]:
    """Without texts that contain another one: where they are, that one is as well."""
    kept: list[bytes] = []
    for text in sorted(set(texts), key=len):
        if not any(shorter in text for shorter in kept):
            kept.append(text)
    return tuple(kept)


def blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, many at a time. A progress bar that never ends its line is cut where it returns."""
    rest, skipping = b"", False
    for chunk in chunks:
        data = rest + chunk
        cut = max(data.rfind(b"\n"), data.rfind(b"\r") if len(data) > BLOCK_BYTES else -1) + 1
        if skipping:
            head = data.find(b"\n")
            data, cut = (data[head:], cut - head) if head >= 0 else (b"", 0)
            skipping = head < 0
        if cut:
            yield data[:cut]
        rest = data[cut:]
        if len(rest) > BLOCK_BYTES:
            yield rest[:LONGEST_LINE]
            rest, skipping = b"", True
    if rest:
        yield rest
