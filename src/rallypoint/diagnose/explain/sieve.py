"""The quick way through a large log: which lines need to be looked at. Pure.

Every match of a regular expression contains some fixed text, and a search for plain text is many times faster
than a regular expression. So the sieve looks for the fixed texts of all patterns, and lets only those lines
through that have one.

Lines of a training log differ in their numbers and in little else. So lines and texts are compared in a
reduced form (`reduce`): lower case, without digits, blanks and signs. Each form is searched once; a block of
lines whose forms are all known costs a translation, a split and a set. A line that holds a text also holds it
in the reduced form (a test compares with looking at every line). Where numbers decide, all are looked at.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from itertools import takewhile
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

_ENOUGH: Final = 5
_ID: Final = re.compile(rb"[a-f]{5,}")
"""What is left of an id or an address in hexadecimal digits."""
_SHORTEST: Final = 4
"""Shorter texts are in too many lines to be of use."""
VARIABLE: Final = b"0123456789 .+-\r"
"""Bytes that the reduced form leaves out."""

_NUMBER: Final = re.compile(r"\d|\\d")
_REPEATED: Final = re.compile(r"\{\d*,?\d*\}")
_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def reduce(text: bytes) -> bytes:
    """The form in which lines and literals are compared."""
    return text.lower().translate(None, VARIABLE)


@cache
def required_literals(pattern: re.Pattern[str]) -> frozenset[bytes]:
    """Texts in reduced form, one of which is in every match; empty if a match need not have any."""
    return _of_sequence(_parser.parse(pattern.pattern, pattern.flags))


@cache
def asks_for_numbers(pattern: re.Pattern[str]) -> bool:
    """Whether it may depend on the numbers of a line, which the reduced form leaves out, that it matches."""
    return _NUMBER.search(_REPEATED.sub("", pattern.pattern)) is not None


def _of_sequence(items: Any) -> frozenset[bytes]:
    choices = [choice for choice in _choices(items) if choice]
    # Long texts are rare. Of a choice between several, the shortest one decides.
    return max(choices, key=lambda choice: min(map(len, choice)), default=frozenset())


def _choices(items: Any) -> Iterator[frozenset[bytes]]:
    """For each part of a sequence, texts one of which it must contain; empty if there are none."""
    run = ""
    for code, value in items:
        if _is_left_out(str(code), value):
            continue
        if _is_plain(str(code), value):
            run += chr(value)
            continue
        yield _of_runs([run + head for head in _heads(str(code), value)])
        run = ""
        yield _of_part(str(code), value)
    yield _of_runs([run])


def _is_plain(code: str, value: Any) -> bool:
    """Whether it is a character that has the same reduced form wherever it stands."""
    return code == "LITERAL" and (value < 128 or chr(value).lower() == chr(value).upper())


def _is_left_out(code: str, value: Any) -> bool:
    """Whether the reduced form leaves out all that it matches."""
    if code == "IN":
        return all(_is_left_out(str(each), of) for each, of in value)
    if code == "RANGE":
        return bool(ord("0") <= value[0] <= value[1] <= ord("9"))
    if code == "SUBPATTERN" or code in _REPEATS:
        return all(_is_left_out(str(each), of) for each, of in value[-1])
    return code == "LITERAL" and value < 128 and value in VARIABLE


def _heads(code: str, value: Any) -> list[str]:
    """What each of some branches begins with; one empty text for anything else."""
    if code == "SUBPATTERN" and len(value[-1]) == 1:
        return _heads(str(value[-1][0][0]), value[-1][0][1])
    return [_head(branch) for branch in value[1]] if code == "BRANCH" else [""]


def _head(items: Any) -> str:
    plain = takewhile(lambda item: _is_plain(str(item[0]), item[1]), items)
    return "".join(chr(value) for _, value in plain)


def _of_runs(runs: Iterable[str]) -> frozenset[bytes]:
    reduced = frozenset(reduce(run.encode()) for run in runs)
    return reduced if all(len(each) >= _SHORTEST for each in reduced) else frozenset()


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


class Literals:
    """Finds which of many texts are in a form, by the first bytes of each: to look for one by one is slow."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self._by_head: dict[bytes, list[bytes]] = {}
        for text in texts:
            self._by_head.setdefault(text[:_SHORTEST], []).append(text)

    def found_in(self, form: bytes) -> Iterator[bytes]:
        """The texts that the form has, as they come."""
        for at in range(len(form) - _SHORTEST + 1):
            for text in self._by_head.get(form[at : at + _SHORTEST], ()):
                if form.startswith(text, at):
                    yield text


# The sieve -------------------------------------------------------------------------------------------------


class Sieve:
    """Lets through the lines that contain one of some texts (in reduced form).

    Of lines of the same form with none but the texts of `few`, a few are looked at: an `error: 0.25` in every
    step. If one of them matters (`keep`), all of that form are let through.
    """

    def __init__(self, texts: Iterable[bytes], few: Iterable[bytes] = ()) -> None:
        always = frozenset(texts)
        self._always = _without_needless(always)
        self._texts = _without_needless(always.union(few))
        self._clean: set[bytes] = set()
        self._looks: Counter[bytes] = Counter()
        self._kept: set[bytes] = set()

    def select(self, block: bytes) -> Iterator[int]:
        """The indexes of the lines of a block that may be of interest, each when it is asked for."""
        forms = _forms(block)
        new = set(forms) - self._clean
        if not new:
            return iter(())
        hits = _with_any(self._texts, new)
        if max(map(len, (self._clean, self._looks, self._kept))) > _MOST_FORMS:
            for known in (self._clean, self._looks, self._kept):
                known.clear()
        self._clean.update(form for form in new - hits if len(form) <= _LONGEST_FORM)
        return self._asked_for(forms, hits, _with_any(self._always, hits))

    def keep(self, line: bytes) -> None:
        """A line mattered: let all lines of its form through, here and in the blocks that follow."""
        form = _forms(line)[0]
        kind = _ID.sub(b"", form)
        if kind in self._looks:
            self._kept.add(kind)
            self._clean.discard(form)

    def _asked_for(self, forms: Iterable[bytes], hits: set[bytes], always: set[bytes]) -> Iterator[int]:
        for index, form in enumerate(forms):
            if form in hits and form not in self._clean and (form in always or self._is_worth_a_look(form)):
                yield index

    def _is_worth_a_look(self, form: bytes) -> bool:
        kind = _ID.sub(b"", form)
        if kind in self._kept or len(form) > _LONGEST_FORM:
            return True
        self._looks[kind] += 1
        if self._looks[kind] >= _ENOUGH:
            self._clean.add(form)
        return self._looks[kind] <= _ENOUGH


def _with_any(texts: Iterable[bytes], forms: set[bytes]) -> set[bytes]:
    """The forms that contain one of some texts."""
    everything = b"\n".join(forms)
    there = [text for text in texts if text in everything]
    return {form for form in forms if any(text in form for text in there)} if there else set()


def _forms(block: bytes) -> list[bytes]:
    plain = ESCAPE.sub(b"", block) if b"\x1b" in block else block
    return plain.translate(_LOWER, VARIABLE).split(b"\n")


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
