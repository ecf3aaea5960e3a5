"""The quick way through a large log: which lines can match a pattern at all. Pure.

Every match of most regular expressions contains some fixed text, which is much faster to search for. Lines of
a training log differ in their numbers and in little else, so lines and texts are compared in a reduced form:
lower case, without digits, blanks and signs. Each form is searched once; a block whose forms are all known
costs a translation, a split and a set. Where a pattern asks for numbers, no line with its text is dropped.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

# The parser of the standard library's `re`. It has no public name since 3.11, but nothing else tells what a
# pattern consists of.
if sys.version_info >= (3, 11):
    from re import _parser  # type: ignore[attr-defined]
else:
    import sre_parse as _parser

BLOCK_BYTES: Final = 1 << 18
"""A whole block is tried at once, so its size bounds how many lines of one form are tried in vain."""
LONGEST_LINE: Final = 1 << 16
"""Bytes of a line that count."""
TRIES: Final = 5
"""Lines of one form that may be read in vain."""
ESCAPE: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-~])")
"""Escape sequences: colours, titles, links."""

_SHORTEST: Final = 3
"""Shorter texts are in too many lines to be of use."""
_MOST_FORMS: Final = 100_000
_LONGEST_FORM: Final = 1024
_LOWER: Final = bytes(range(256)).lower()
_VARIABLE: Final = b"0123456789 .+-"
"""Bytes that the reduced form leaves out."""
_ID: Final = re.compile(rb"[a-f]{5,}")
"""What is left of an id in hexadecimal digits."""
_NUMBER: Final = re.compile(r"\d|\\d")
_QUANTIFIER: Final = re.compile(r"\{\d*,?\d*\}")
_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")

# The fixed texts of a pattern ------------------------------------------------------------------------------


@cache
def fixed_texts(pattern: re.Pattern[str]) -> frozenset[bytes] | None:
    """Texts in lower case, one of which every match contains; None where the pattern has none."""
    return _of_sequence(_parser.parse(pattern.pattern, pattern.flags)) or None


def reduce(text: bytes) -> bytes:
    """The form in which lines and texts are compared."""
    return text.translate(_LOWER, _VARIABLE)


def _of_sequence(items: Any) -> frozenset[bytes]:
    """Of all choices the one whose shortest text is longest: long texts are rare."""
    choices = (choice for choice in _choices(items) if choice)
    return max(choices, key=lambda choice: min(len(reduce(text)) for text in choice), default=frozenset())


def _choices(items: Any) -> Iterator[frozenset[bytes]]:
    """For each part of a sequence texts one of which it contains; empty where it has none."""
    run = ""
    for code, value in items:
        if str(code) == "LITERAL" and _is_same_in_lower_case(chr(value)):
            run += chr(value)
        else:
            yield _usable(run)
            yield _of_part(str(code), value)
            run = ""
    yield _usable(run)


def _is_same_in_lower_case(character: str) -> bool:
    """Bytes have only the lower case of ASCII."""
    return character.isascii() or character.lower() == character.upper()


def _usable(run: str) -> frozenset[bytes]:
    text = run.encode(errors="replace").lower()
    return frozenset([text] if len(reduce(text)) >= _SHORTEST else [])


def _of_part(code: str, value: Any) -> frozenset[bytes]:
    if code == "SUBPATTERN":
        return _of_sequence(value[-1])
    if code == "ATOMIC_GROUP":
        return _of_sequence(value)
    if code in _REPEATS and value[0] > 0:
        return _of_sequence(value[2])
    if code == "BRANCH":
        branches = [_of_sequence(branch) for branch in value[1]]
        return frozenset().union(*branches) if all(branches) else frozenset()
    return frozenset()


def _asks_for_numbers(pattern: re.Pattern[str]) -> bool:
    return _NUMBER.search(_QUANTIFIER.sub("", pattern.pattern)) is not None


# The sieve -------------------------------------------------------------------------------------------------


class Sieve:
    """Finds the lines that may match one of some patterns, each of which must have a fixed text."""

    def __init__(self, patterns: Iterable[re.Pattern[str]]) -> None:
        self._any, self._numbered = _texts_of(frozenset(patterns))
        self._dull: set[bytes] = set()
        """Forms without any text, and those that were tried in vain."""
        self._tries: Counter[bytes] = Counter()
        self._kept: set[bytes] = set()

    def wanted(self, block: bytes) -> list[int]:
        """The numbers, from 0, of the lines of a block that may match."""
        forms = _forms(block)
        new = set(forms) - self._dull
        hits = {form for form in self._with_a_text(new) if self._is_worth_it(form)} if new else set()
        self._remember_dull(new - hits)
        found = [number for number, form in enumerate(forms) if form in hits] if hits else []
        self._tries.update(
            _kind(form) for form in map(forms.__getitem__, found) if len(form) <= _LONGEST_FORM
        )
        return found

    def keep(self, raw: bytes) -> None:
        """A line matched: never drop one of its form."""
        form = _forms(raw)[0]
        self._kept.add(_kind(form))
        self._dull.discard(form)

    def parts(self, raw: bytes) -> list[bytes]:
        """What a progress bar wrote over the same line: the parts that may match, and the last."""
        shown = raw.rstrip(b"\r").split(b"\r")
        if len(shown) == 1:
            return shown
        return [shown[at] for at in sorted({*self.wanted(b"\n".join(shown)), len(shown) - 1})]

    def _with_a_text(self, forms: set[bytes]) -> set[bytes]:
        # What follows the first text of a line is skipped, so there is one match in a line.
        joined = b"\n".join(forms)
        return {
            joined[joined.rfind(b"\n", 0, found.start()) + 1 : found.end()]
            for found in self._any.finditer(joined)
        }

    def _is_worth_it(self, form: bytes) -> bool:
        kind = _kind(form)
        return self._tries[kind] < TRIES or kind in self._kept or self._numbered.search(form) is not None

    def _remember_dull(self, forms: set[bytes]) -> None:
        if max(map(len, (self._dull, self._tries, self._kept))) > _MOST_FORMS:
            for known in (self._dull, self._tries, self._kept):
                known.clear()
        self._dull.update(form for form in forms if len(form) <= _LONGEST_FORM)


@cache
def _texts_of(patterns: frozenset[re.Pattern[str]]) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Patterns for the fixed texts of all patterns, and of those that ask for numbers."""
    texts: dict[bool, set[bytes]] = {False: set(), True: set()}
    for pattern in patterns:
        fixed = fixed_texts(pattern)
        if fixed is None:
            raise ValueError(f"no text is in every match of {pattern.pattern!r}")
        texts[_asks_for_numbers(pattern)].update(map(reduce, fixed))
    return _any_of(texts[False] | texts[True]), _any_of(texts[True])


def _forms(block: bytes) -> list[bytes]:
    """The reduced form of each line."""
    plain = ESCAPE.sub(b"", block) if b"\x1b" in block else block
    forms = plain.translate(_LOWER, _VARIABLE).split(b"\n")
    if b"\r" in plain:
        forms = [_without_repeats(form) if b"\r" in form else form for form in forms]
    return [form[:LONGEST_LINE] for form in forms] if len(plain) > LONGEST_LINE else forms


def _without_repeats(form: bytes) -> bytes:
    """A progress bar writes thousands of parts into one line; those that differ in numbers count once."""
    return b"\r".join(dict.fromkeys(form.strip(b"\r").split(b"\r")))


def _kind(form: bytes) -> bytes:
    return _ID.sub(b"", form)


def _any_of(texts: Iterable[bytes]) -> re.Pattern[bytes]:
    """A pattern for any of some texts and the rest of the line."""
    branches = _tree(sorted(texts))
    return re.compile((branches or b"(?!)") + b"[^\n]*")


def _tree(texts: list[bytes]) -> bytes:
    """Texts with a common beginning share it, so that no character is tried for each of them."""
    if not texts or b"" in texts:
        return b""
    ends: dict[bytes, list[bytes]] = {}
    for text in texts:
        ends.setdefault(text[:1], []).append(text[1:])
    branches = [re.escape(head) + _tree(rest) for head, rest in ends.items()]
    return branches[0] if len(branches) == 1 else b"(?:" + b"|".join(branches) + b")"


def blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, many at a time. A line that does not end is cut; a progress bar's where it returns."""
    rest, skipping = b"", False
    for piece in _pieces(chunks):
        data = rest + piece
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


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        for begin in range(0, len(chunk), BLOCK_BYTES):
            yield chunk[begin : begin + BLOCK_BYTES]
