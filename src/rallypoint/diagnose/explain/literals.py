"""Text that every match of a regular expression must contain. Pure.

That is what makes a quick search possible: a line without any of these texts cannot match, and looking for
plain text is many times faster than a regular expression. Texts are compared in a reduced form (`reduce`):
lower case, and without what varies from line to line in a training log (digits, blanks, signs), so that lines
which differ in nothing else need to be looked at once only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

# The parser of the standard library's `re`: no public name for it since 3.11, but no other way to ask what a
# pattern consists of.
if sys.version_info >= (3, 11):
    from re import _parser  # type: ignore[attr-defined]
else:
    import sre_parse as _parser

_SHORTEST: Final = 4
VARIABLE: Final = b"0123456789 .+-\r"
"""Bytes that the reduced form leaves out."""

_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def reduce(text: bytes) -> bytes:
    """The form in which lines and literals are compared."""
    return text.lower().translate(None, VARIABLE)


@cache
def required_literals(pattern: re.Pattern[str]) -> frozenset[bytes]:
    """Texts in reduced form, one of which is in every match; empty if nothing of that kind can be said."""
    return _of_sequence(_parser.parse(pattern.pattern, pattern.flags))


def _of_sequence(items: Any) -> frozenset[bytes]:
    choices = [choice for choice in _choices(items) if choice]
    # Long texts are rare texts; of a choice between several, the shortest decides.
    return max(choices, key=lambda choice: min(map(len, choice)), default=frozenset())


def _choices(items: Any) -> Iterator[frozenset[bytes]]:
    """For each part of a sequence that must be there, the texts one of which it brings."""
    run = ""
    for code, value in items:
        if str(code) == "LITERAL" and value < 128:
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
