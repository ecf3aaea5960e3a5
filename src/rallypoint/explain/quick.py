"""The quick way through a large log: which lines can match a pattern at all. Pure.

Every match of most regular expressions contains some fixed text, which is much faster to search for. Lines of
a training log differ in little but their numbers, so lines and texts are compared in a reduced form: lower
case, without digits, blanks and signs. A form is searched once, and given up after some tries in vain, unless
it has the text of a pattern that asks for certain numbers.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import Any, Final

BLOCK_BYTES: Final = 1 << 18
"""A whole block is tried at once, so its size bounds how many lines of one form are tried in vain."""
LONGEST_LINE: Final = 1 << 16
"""Bytes of a line that count."""
TRIES: Final = 5
"""Lines of one form that may be read in vain."""
ESCAPE: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-~])")
"""Escape sequences: colours, titles, links."""

# Nothing but the parser of the standard library's `re` tells what a pattern consists of.
_PARSER: Final = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_SHORTEST: Final = 3
"""Shorter texts are in too many lines to be of use."""
_NEVER: Final = sys.maxsize
_MOST_FORMS: Final = 100_000
_LOWER: Final = bytes(range(256)).lower()
_VARIABLE: Final = b"0123456789 .+-"
"""Bytes that the reduced form leaves out."""
_NUMBER: Final = re.compile(r"(?<![\w\\])\d(?![^{]*\})")
"""In a pattern: certain digits, not those of a quantifier or a name."""


@cache
def fixed_texts(pattern: re.Pattern[str]) -> frozenset[bytes] | None:
    """Texts in lower case, one of which every match contains; None where the pattern has none."""
    return _of_sequence(_PARSER.parse(pattern.pattern, pattern.flags)) or None


def _reduce(text: bytes) -> bytes:
    return text.translate(_LOWER, _VARIABLE)


def _of_sequence(items: Any) -> frozenset[bytes]:
    """Of all parts the texts of the one whose shortest text is longest: long texts are rare."""
    parts = (part for is_fixed, run in groupby(items, _is_fixed) for part in _parts(is_fixed, run))
    useful = (part for part in parts if _shortest(part) >= _SHORTEST)
    return max(useful, key=_shortest, default=frozenset())


def _shortest(texts: frozenset[bytes]) -> int:
    return min((len(_reduce(text)) for text in texts), default=0)


def _is_fixed(item: Any) -> bool:
    """Whether it is a character that bytes show in lower case, as they have only that of ASCII."""
    code, value = item
    return str(code) == "LITERAL" and (value < 128 or chr(value).swapcase() == chr(value))


def _parts(is_fixed: bool, run: Iterator[Any]) -> Iterator[frozenset[bytes]]:
    """For each part of a pattern texts one of which it contains; empty where it has none."""
    if is_fixed:
        yield frozenset(["".join(chr(value) for _, value in run).encode(errors="replace").lower()])
    for code, value in run:
        name = str(code)
        if name == "BRANCH":
            branches = [_of_sequence(branch) for branch in value[1]]
            yield frozenset().union(*branches) if all(branches) else frozenset()
        elif name == "SUBPATTERN" or (name.endswith("_REPEAT") and value[0] > 0):
            yield _of_sequence(value[-1])


class Sieve:
    """Finds the lines that may match one of some patterns; those without a fixed text find none."""

    def __init__(self, patterns: Iterable[re.Pattern[str]]) -> None:
        self._any, self._numbered = _texts_of(frozenset(patterns))
        self._tries: Counter[int] = Counter()
        """How often lines of a form, given by its hash, were tried in vain."""

    def wanted(self, block: bytes) -> list[int]:
        """The numbers, from 0, of the lines of a block that may match."""
        if len(self._tries) > _MOST_FORMS:
            self._tries.clear()
        forms = _forms(block)
        hits = {form for form in set(forms) if self._may_match(form)}
        found = [number for number, form in enumerate(forms) if form in hits] if hits else []
        self._tries.update(hash(forms[number]) for number in found)
        return found

    def keep(self, raw: bytes) -> None:
        """A line matched: never drop one of its form."""
        self._tries[hash(_forms(raw)[0])] = -_NEVER

    def _may_match(self, form: bytes) -> bool:
        tries = self._tries[hash(form)]
        if tries == _NEVER or self._any.search(form) is None:
            self._tries[hash(form)] = _NEVER
            return False
        return tries < TRIES or self._numbered.search(form) is not None

    def parts(self, raw: bytes) -> list[bytes]:
        """What a progress bar wrote over the same line: the parts that may match, and the last."""
        *earlier, last = raw.rstrip(b"\r").split(b"\r")
        return [*(earlier[number] for number in self.wanted(b"\n".join(earlier))), last]


@cache
def _texts_of(patterns: frozenset[re.Pattern[str]]) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Patterns for the fixed texts of all patterns, and of those that ask for numbers."""
    texts: dict[bool, set[bytes]] = {False: set(), True: set()}
    for pattern in patterns:
        texts[_NUMBER.search(pattern.pattern) is not None].update(map(_reduce, fixed_texts(pattern) or ()))
    return re.compile(_tree(texts[False] | texts[True])), re.compile(_tree(texts[True]))


def _forms(block: bytes) -> list[bytes]:
    """The reduced form of each line. Of a bar's parts, those that differ in numbers count once."""
    forms = _reduce(ESCAPE.sub(b"", block)).split(b"\n")
    if b"\r" in block:
        forms = [b"\r".join(dict.fromkeys(form.strip(b"\r").split(b"\r"))) for form in forms]
    return [form[:LONGEST_LINE] for form in forms]


def _tree(texts: Iterable[bytes]) -> bytes:
    """A pattern for some texts. Those with a common beginning share it, so no character is tried for each."""
    ends: dict[bytes, set[bytes]] = {}
    for text in texts:
        ends.setdefault(text[:1], set()).add(text[1:])
    branches = [re.escape(head) + _tree(rest) for head, rest in ends.items() if head]
    return b"" if b"" in ends else b"(?:" + b"|".join(branches or [b"(?!)"]) + b")"


def blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, many at a time. A line that does not end is cut; a progress bar's where it returns."""
    rest = b""
    for chunk in chunks:
        for begin in range(0, len(chunk), BLOCK_BYTES):
            data = rest + chunk[begin : begin + BLOCK_BYTES]
            cut = max(data.rfind(b"\n"), data.rfind(b"\r") if len(data) > BLOCK_BYTES else -1) + 1
            if cut:
                yield data[:cut]
            rest = data[cut:] if len(data) - cut <= BLOCK_BYTES else data[cut:][:LONGEST_LINE]
    if rest:
        yield rest
