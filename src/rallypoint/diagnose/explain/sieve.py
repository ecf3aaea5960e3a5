"""The quick way through a large log: which lines need to be looked at. Pure.

Every match of a regular expression contains some fixed text, and a search for plain text is many times faster
than a regular expression. So the sieve looks for the fixed texts of all patterns, and lets only those lines
through that have one.

Lines of a training log differ in their numbers and in little else. So lines and texts are compared in a
reduced form (`reduce`): lower case, without digits, blanks and signs. Each form is searched once; a block of
lines whose forms are all known costs a translation, a split and a set. Nothing is lost: a line that holds a
text also holds it in the reduced form (a test compares with looking at every line).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import Any, Final

# The parser of the standard library's `re`. It has no public name since 3.11, but nothing else tells what
# a pattern consists of.
if sys.version_info >= (3, 11):
    from re import _parser  # type: ignore[attr-defined]
else:
    import sre_parse as _parser

BLOCK_BYTES: Final = 1 << 20
LONGEST_LINE: Final = 1 << 16
"""Bytes of a line that are kept; the rest of it is dropped."""

_MOST_FORMS: Final = 100_000
_LONGEST_FORM: Final = 1024
_LOWER: Final = bytes(range(256)).lower()
ESCAPE: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-~])")
"""Escape sequences: colours, titles, links. They are removed first, since a reduced form hides their end."""

_ENOUGH: Final = 3
_SHORTEST: Final = 4
"""Shorter texts are in too many lines to be of use."""
VARIABLE: Final = b"0123456789 .+-\r"
"""Bytes that the reduced form leaves out."""

_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def reduce(text: bytes) -> bytes:
    """The form in which lines and literals are compared."""
    return text.lower().translate(None, VARIABLE)


@cache
def required_literals(pattern: re.Pattern[str]) -> frozenset[bytes]:
    """Texts in reduced form, one of which is in every match; empty if a match need not have any."""
    return _of_sequence(_parser.parse(pattern.pattern, pattern.flags))


def _of_sequence(items: Any) -> frozenset[bytes]:
    choices = [choice for choice in _choices(items) if choice]
    # Long texts are rare. Of a choice between several, the shortest one decides.
    return max(choices, key=lambda choice: min(map(len, choice)), default=frozenset())


def _choices(items: Any) -> Iterator[frozenset[bytes]]:
    """For each part of a sequence, texts one of which it must contain; empty if there are none."""
    run = ""
    for code, value in items:
        if str(code) == "LITERAL" and (value < 128 or chr(value).lower() == chr(value).upper()):
            run += chr(value)
            continue
        yield _of_run(run)
        run = ""
        yield _of_part(str(code), value)
    yield _of_run(run)


def _of_run(run: str) -> frozenset[bytes]:
    reduced = reduce(run.encode())
    return frozenset([reduced]) if len(reduced) >= _SHORTEST else frozenset()


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


# The sieve -------------------------------------------------------------------------------------------------


class Sieve:
    """Lets through the lines that contain one of some texts (in reduced form).

    Of lines of the same form with none but `once`, the first few are enough: an `error_rate` in every step.
    """

    def __init__(self, texts: Iterable[bytes], once: Iterable[bytes] = ()) -> None:
        always = frozenset(texts)
        self._always = _without_needless(always)
        self._texts = _without_needless(always.union(once))
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
        enough = {form for form in hits if not any(text in form for text in self._always)}
        self._clean.update(form for form in (new - hits) | enough if len(form) <= _LONGEST_FORM)
        return list(_few(forms, hits, enough)) if hits else []

    def _examine(self, forms: set[bytes]) -> set[bytes]:
        everything = b"\n".join(forms)
        texts = [text for text in self._texts if text in everything]
        return {form for form in forms if any(text in form for text in texts)} if texts else set()


def _few(forms: Iterable[bytes], hits: set[bytes], enough: set[bytes]) -> Iterator[int]:
    """Where the hits are; of those forms of which a few are enough, the first few."""
    seen: Counter[bytes] = Counter()
    for index, form in enumerate(forms):
        if form in hits:
            seen[form] += 1
            if seen[form] <= _ENOUGH or form not in enough:
                yield index


@lru_cache(maxsize=8)  # to compare each text with all others takes longer than to read a short log
def _without_needless(texts: frozenset[bytes]) -> tuple[bytes, ...]:
    """Without the texts that contain another one: the shorter one finds their lines as well."""
    kept: list[bytes] = []
    for text in sorted(texts, key=lambda text: (len(text), text)):
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
