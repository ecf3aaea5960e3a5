"""Lines that look like the cause of a failure, for a log in which no cause is known. Pure.

The score of a line is the sum of the points below.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from rallypoint.diagnose.explain.denials import without_denials
from rallypoint.diagnose.explain.prefixes import Process

_WORDS: Final = (
    (r"\bfatal\b", 5),
    (r"segmentation fault|core dumped", 5),
    (r"\bterminate called\b|\bwhat\(\):", 5),
    (r"\babort(?:ed|ing)?\b|\bpanic", 4),
    (r"\bkilled\b", 4),
    (
        r"(?<![\w-])(?:\w+)?(?:error|exception)(?:s?\b)"
        r"(?!(?: rate)?\s*(?:(?:[:=|]|is|of)\s*)?-?[\d.]+(?:e-?\d+)?\b)"
        r"(?!(?: \w{1,20}){1,4}[:=| ]{1,3}-?\d+(?:\.\d|e-\d))",
        3,
    ),
    (r"\bfailed\b|\bfailure\b(?! rate)", 3),
    (r"\bcannot\b|\bunable to\b|\bcould not\b", 2),
    (r"\bld: cannot find\b", 3),
    (r"\brefused\b|\bdenied\b|\binvalid\b", 2),
    (r"\btimed out\b|\btimeout\b", 2),
    (r"\bwarn(?:ing)?\b|\bretry(?:ing)?\b", -3),
    (r"\bdeprecat|\bfuturewarning\b", -5),
    (
        r"\bresolved\b|\bresum(?:ed|ing)\b|\brecovered\b|sent help message|help / error messages",
        -6,
    ),  # it is over, or was said
    (
        r"\bof \d+ (?:\w+ )?failed\b|^failed \w+: \d|\bcompleted\b.{0,80}\b\d+ errors?\b",
        -6,
    ),  # a count, such as that of a validation
    (r"^Exception raised from \w+ at |^frame #\d+: ", -9),  # where in C++ a message above comes from
    (r"^frame #\d+|^\S+ FAILED$", -9),  # a C++ backtrace; the heading of torchrun's table
    (r"^\s*raise \w+[.(]|^\s+(?:raise \w|(?:warnings\.)?warn\()|^[\s^~]+$|^\s*\d* *[│|] ", -9),  # source code
    (
        r"^During handling of |^The above exception was |^Last error:$|^Error in atexit|^--- Logging error"
        r"|^(?:\[ERROR\] |\W*ERROR \| asyncio \| )?Exception in (?:thread|callback) ",
        -9,
    ),  # the answer is in the next lines
    (r"^Token indices sequence length is longer than ", -9),  # transformers, of a text that may be cut later
    (r"^Vulnerability [\w ]{1,40}: +(?:Not affected|Mitigation|Vulnerable)\b", -9),  # of a processor
    (r"^#(?!#\[)", -3),  # a table's head, or a comment
    (r"^slurmstepd: error: _", -9),  # Slurm's own book-keeping, by the name of a function
    (
        r"^(?:wandb|comet|neptune|mlflow|clearml|tensorboard)\b",
        -9,
    ),  # who notes what a job does, and is no part of it
)
_SCORES: Final = tuple((re.compile(pattern, re.IGNORECASE), points) for pattern, points in _WORDS)
_LEAST: Final = 3
PATTERNS: Final = tuple(pattern for pattern, points in _SCORES if points >= _LEAST)
"""The sieve lets a line through only if it may match one of these."""
_MOST: Final = 5
_MOST_FORMS: Final = 10_000
# A line that states an error, and not one that talks of errors.
_LOUD: Final = re.compile(
    r"(?i)(?:\W*|(?:\[[\w. -]{1,30}\] ?){1,3}\[(?=FATAL|CRITICAL|ERROR)|[\w./@ -]{0,40}: |UCX +"
    r"| {0,8}(?:[a-z]:)?[^\s:]{1,200}(?::\d+(?::\d+)?|\(\d+\)): (?=(?:fatal )?error:)| {0,8}(?:nvcc|ptxas) )"
    r"(?:an )?(?:fatal error|error|fatal|failed|critical|panic)\b[]: ]| {0,8}\S{0,200}\bld: cannot find "
)
_FATAL: Final = re.compile(
    r"(?:\[[\w. -]{1,30}\] ?){0,3}[\w./@ :-]{0,40}\[?"
    r"(?:FATAL\b|CRITICAL\b|(?<![Nn]on-)[Ff]atal error\b|Fatal:)"
)
# The report of one who started something: why it failed stands before, if anywhere.
_COMMAND: Final = re.compile(
    r"(?i)\b(?:sub)?command\b.{0,300}\b(?:failed|returned|exited)\b|\bsubprocess-exited\b|\bld returned \d"
    r"|\bfailed (?:to compile|to build|building)\b|\bCANCELLED AT\b"
)
_NUMBERS: Final = re.compile(r"\d+")


@dataclass(frozen=True)
class Suspect:
    """A line, and how much it looks like a cause."""

    text: str
    log: str
    line: int
    rank: int | None
    score: int
    local_rank: int | None = None
    """The rank within its machine, where the one in the whole job is not known."""
    loud: bool = False
    """Whether it states an error: by its first words, or by its logger's level."""


@dataclass
class Suspects:
    """The lines with the highest scores; of lines that differ in numbers only, the first."""

    _kept: dict[str, Suspect] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def add(self, text: str, log: str, line: int, process: Process, *, serious: bool = False) -> None:
        form = _NUMBERS.sub("", text)
        if form in self._seen:
            return
        if len(self._seen) < _MOST_FORMS:
            self._seen.add(form)
        points = score(text)
        if points < _LEAST:
            return
        rank, local = process
        self._kept[form] = Suspect(text, log, line, rank, points, local, serious or is_loud(text))
        if len(self._kept) > _MOST:
            # Of several with the lowest score, the last one goes: earlier lines are nearer to the cause.
            worst = min(reversed(self._kept.items()), key=lambda each: each[1].score)[0]
            del self._kept[worst]

    def forget(self, log: str, line: int) -> None:
        """A line was only the heading of what comes behind it."""
        for form, suspect in list(self._kept.items()):
            if (suspect.log, suspect.line) == (log, line):
                del self._kept[form]

    def best(self) -> list[Suspect]:
        """The suspects: first the lines that state an error, as they came, then the others by their score."""
        return sorted(self._kept.values(), key=lambda each: (not each.loud, 0 if each.loud else -each.score))


def is_loud(text: str) -> bool:
    """Whether a line states an error by its first words."""
    return _LOUD.match(text) is not None


def is_fatal(text: str) -> bool:
    """Whether a line states an error after which its program does not go on."""
    return _FATAL.match(text) is not None


def says_a_command_failed(text: str) -> bool:
    """Whether a line only reports the end of something that said itself what was wrong."""
    return _COMMAND.search(text) is not None


def is_played_down(text: str) -> bool:
    """Whether a line has words after which those of a failure mean less."""
    return any(points < 0 and pattern.search(text) for pattern, points in _SCORES)


def score(text: str) -> int:
    """How much a line looks like a cause."""
    plain = without_denials(text)
    return sum(points for pattern, points in _SCORES if pattern.search(plain))
