"""The logs of tests/explain/corpus, with what is known of each. `rallypoint explain` is measured with them.

A log re-enacts a public thread: the programs' own messages are real, everything else is made up. The failing
ones of reproduced.txt were written by torch itself. A file holds the logs of one family of projects. A log
begins with `%%% NAME`; then come fields, an empty line, and its text:

    job         failing or healthy
    address     the thread
    cause, fix  what went wrong, and what helped
    decisive    a part of a line that shows the cause; there may be several. Only failing jobs have it.
    words       a pattern for advice that helps; `-` where the place of a mistake is all the help there is
    rank        the rank that failed first
    kind        what the cause is about; jobs of the kind `silent` hang, or stop without a message

A hash of the address splits the threads: two thirds are to work with, and nobody reads the last third, which
is only for measuring.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "explain" / "corpus"
MARK: Final = "%%% "
REPRODUCED: Final = "reproduced"
WORK: Final = "work"
HELD_OUT: Final = "held out"
FIELDS: Final = frozenset(("job", "address", "cause", "fix", "decisive", "words", "rank", "kind"))


@dataclass(frozen=True, eq=False)
class Sample:
    """One log, and what is known of it. Each is equal to itself alone."""

    name: str
    family: str
    """The name of its file."""
    fields: dict[str, tuple[str, ...]]
    text: str

    @property
    def is_failing(self) -> bool:
        return self["job"] == "failing"

    @property
    def decisive(self) -> tuple[str, ...]:
        return self.fields.get("decisive", ())

    @property
    def part(self) -> str:
        """The part of the corpus that it counts for: work, held out or reproduced."""
        if self.family == REPRODUCED:
            return REPRODUCED
        held_out = hashlib.sha256(self["address"].encode()).digest()[0] % 3 == 0
        return HELD_OUT if held_out else WORK

    @property
    def data(self) -> bytes:
        return self.text.encode()

    def __getitem__(self, name: str) -> str:
        (value,) = self.fields[name]
        return value

    def line(self, number: int) -> str:
        """The line with this number, counted from 1."""
        return self.text.split("\n")[number - 1]

    def shows_cause(self, text: str) -> bool:
        """Whether a text has what decides."""
        return any(each in text for each in self.decisive)


@cache
def samples(part: str) -> tuple[Sample, ...]:
    """The logs of a part: failing ones first, then by name."""
    found = [each for path in sorted(FOLDER.glob("*.txt")) for each in _of_file(path) if each.part == part]
    return tuple(sorted(found, key=lambda each: (not each.is_failing, each.name)))


def _of_file(path: Path) -> Iterator[Sample]:
    # Bytes, because a log keeps its carriage returns.
    text = "\n" + path.read_bytes().decode()
    for each in text.split("\n" + MARK)[1:]:
        head, _, log = each.partition("\n\n")
        name, *lines = head.split("\n")
        yield Sample(name, path.stem, _fields(lines), log)


def _fields(lines: list[str]) -> dict[str, tuple[str, ...]]:
    fields: dict[str, tuple[str, ...]] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        fields[name] = (*fields.get(name, ()), value)
    return fields
