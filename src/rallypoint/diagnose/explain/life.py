"""Signs that a job went on, or came to an end of its own, in the lines around a failure. Pure.

An exception that is followed by further training steps, or by requests that are answered, was caught: it
ended nothing. And a log that stops before it shows a step or an end was cut, or its job hangs: that is no
good news, even if no line speaks of an error. Only a few lines are looked at, so a large log costs no more
than a small one.

A job that dies draws its bars once more and sums up what it has done: a step counts only if it is a further
one. Where steps came before a failure, those after it have to be of the same form: tables, uploads and what
others count are not. A server that only tells its health counts where nothing has failed. What a line shows
by itself is in `signs`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint.diagnose.explain.denials import without_denials
from rallypoint.diagnose.explain.prefixes import MILD, NOBODY, Line, Process
from rallypoint.diagnose.explain.signs import (
    ANSWERED,
    ANSWERED_ALL,
    BEAT,
    BEGIN,
    DRAWN,
    DUE,
    END,
    IS_BEGUN,
    LAST,
    LAST_WORDS,
    OVER,
    PROMPTS,
    READY,
    REFUSED,
    ROW,
    SHUT,
    STEP,
    STUCK,
    SUCCESS,
    UP,
    Sign,
    form_of,
    read_signs,
)
from rallypoint.diagnose.explain.suspects import is_played_down
from rallypoint.diagnose.explain.tracebacks import BEGIN as BEGIN_OF_TRACEBACK
from rallypoint.diagnose.explain.tracebacks import CLIENT_LOST, IGNORED

Who = tuple[Process, int | None]
"""A process by its rank, else by its number, as far as a line tells."""
ANYBODY: Final[Who] = (NOBODY, None)
LAST_LINES: Final = 100
"""How many lines are looked at, at most."""
_ENOUGH: Final = 2
"""One line may have been on its way already when something failed; two were not."""
_NEAR: Final = 2
"""So many plain lines may follow the end of a job; after more of them it was the end of something else."""
_SHELL: Final = re.compile(r"(?:\d+: )?\++ ")
_CLOSES: Final = re.compile(r"NCCL INFO .{0,200}(?:Connection closed by|Destroy COMPLETE)")
"""NCCL, when its communicators are taken down."""
_INFO: Final = ("I", "INFO", "D", "DEBUG")
_SAYS_INFO: Final = re.compile(r"(?:\S+ )?\[?(?:NCCL )?INFO\b")
_REPORTS: Final = 3
"""A server may need two reports long for a single step of a large request."""
_UNMOVED: Final = re.compile(r"(?:\b0it \[00:00, |\b0%\|[^|]*\| *0/\d+ \[00:00<)\?")
"""A bar that was drawn, and has not moved: a job that stops there has made no step of this part."""
_BEHIND_LABEL: Final = re.compile(r"[:%|\[].*")
_TAIL: Final = 15
_LOSS: Final = re.compile(
    r"(?i)(?<![a-z_/])(?P<other>(?:val|eval|test|dev|best|min|lowest|aux)[a-z]{0,8}[ _/.:-]{1,3})?"
    r"(?:(?:train|training|total|avg|mean|running)[_ /]?)?loss[\"']?(?: [=:]|[=:])? ?"
    r"(?:(?P<lost>[-+]?(?:nan|inf(?:inity)?)\b)|[-+]?\d)"
)
"""The loss that is trained with; that of a validation may have nothing to be made of."""
_LOST_FOR_GOOD: Final = 3
"""A single step may overflow: scalers skip it, and make the next one smaller."""
_CALM: Final = 3
"""A program whose last words are an exception does not go on with so many others."""
_SPEAKS_OF_END: Final = re.compile(
    rf"{LAST_WORDS.pattern}|(?i:error|exception|exit|shut|clos|clean|sigterm|sending|received|\bto fix\b)"
    r"|^(?:[\s=*#+-]*$|wandb|\$)"
)
_MANY: Final = 5
"""So many further steps of others are not made without a process that takes part in them."""


@dataclass(frozen=True)
class Life:
    """What some lines of a log show of a job."""

    signs: tuple[Sign, ...] = ()
    last: int = 0
    """The number of the last line that is not empty, and its text."""
    text: str = ""
    plain: tuple[int, ...] = ()
    """The numbers of the lines that are no warnings, and belong to no other line."""
    calm: tuple[int, ...] = ()
    """The numbers of those among them that speak of no failure and of no end."""
    tail: tuple[tuple[int, str], ...] = ()
    """The last lines, with their numbers."""
    begun: tuple[int, ...] = ()
    """The numbers of the lines that say that something has begun."""
    last_words: tuple[int, str] | None = None
    """Behind the last step, the first line that speaks of an end in any way: its number and its text."""
    diverged: tuple[int, str] | None = None
    """The first of these lines, if from it on no loss was a finite number: its number and its text."""

    @property
    def teed(self) -> bool:
        """Whether the rank stands before steps as well: then a launcher put it there, and not torch."""
        return len(_steps([sign for sign in self.signs if sign.marked])) >= _ENOUGH

    @property
    def shown(self) -> bool:
        """Whether the log ends with a job at work, or with one that is done."""
        if self._is_stuck or self._has_not_moved:
            return False
        ready = max(self._lines(READY), default=0)
        if any(line > ready for line in self._lines(STEP, UP, OVER)) or (ready and not self._began(ready)):
            return True
        ends = self._lines(END)
        end = max(self._lines(END, SHUT), default=0) if ends else 0
        near = sum(number > end for number in self.plain) <= _NEAR
        return self.last == end or (end > 0 and near and not IS_BEGUN.search(self.text))

    def _began(self, ready: int) -> bool:
        """Whether a server that was ready has begun something since, of which nothing more is told."""
        later = [sign for sign in self.signs if sign.line > ready]
        begun = max((sign.line for sign in later if BEGIN in sign.kinds and not sign.full), default=0)
        return begun > max((sign.line for sign in later if END in sign.kinds or sign.full), default=0)

    @property
    def _is_stuck(self) -> bool:
        """Whether a server has had nothing but requests that wait, for the time of several reports."""
        last_step = max(self._lines(STEP), default=0)
        return sum(number > last_step for number in self._lines(STUCK)) >= _REPORTS

    @property
    def _has_not_moved(self) -> bool:
        """Whether the last line is a bar that has not moved, of something that was not done before."""
        if not _UNMOVED.search(self.text) or self._lines(OVER, SUCCESS):
            return False
        forms = [sign.form for sign in self.signs if STEP in sign.kinds]
        label = _BEHIND_LABEL.sub("", form_of(self.text))
        return all(_BEHIND_LABEL.sub("", form) != label for form in forms)

    @property
    def in_the_midst(self) -> bool:
        """Whether the log ends with a step, and with no word of an end after it."""
        steps = self._lines(STEP)
        if self._is_stuck or self._has_not_moved:
            return False
        ends = self._lines(END, OVER, SUCCESS, SHUT)
        return bool(steps) and max(ends, default=0) < steps[-1] and not self.is_over_before(steps[-1] + 1)

    @property
    def is_cut_short(self) -> bool:
        """Whether words of an end come right after a step, and after them no more than what was saved."""
        if self.last_words is None or self.is_over_before(self.last_words[0]):
            return False
        steps = self._lines(STEP)
        return bool(steps) and max(self._lines(OVER, SUCCESS, SHUT), default=0) < steps[-1]

    def went_on_after(self, line: int, who: Who = ANYBODY) -> bool:
        """Whether the job, or one process of it, went on after the failure that a line tells.

        Words alone may be of its message, so it takes a step; and bars may have been drawn a second time.
        """
        if any(number > line for number in self._lines(SUCCESS, REFUSED)):
            return True
        later = self._later(line)
        if len(_steps(later)) < _MANY:
            later = [sign for sign in later if _is_of(sign, who)]
        ends = sum(number > line for number in self._lines(END))
        if not _steps(later) or len({sign.step for sign in later}) + ends < _ENOUGH:
            return False
        return self.is_over_after(line) or self._goes_on(line, [sign for sign in later if STEP in sign.kinds])

    def _goes_on(self, line: int, later: Sequence[Sign]) -> bool:
        """Whether steps are those of the job: the same as before the failure, else several of one kind.

        A job that dies sums up what it has done, and others go on to count beside it.
        """
        if any(READY in sign.kinds or sign.form == ANSWERED for sign in later):
            return True
        before = [sign for sign in self.signs if STEP in sign.kinds and sign.line <= line]
        forms = {sign.form for sign in before if sign.kinds.isdisjoint((BEAT, READY))}
        if any(sign.form in forms for sign in later):
            return True
        if len({sign.step for sign in later if sign.kinds.isdisjoint((ROW, BEAT))}) >= _MANY:
            return True
        if forms:
            return False
        kinds = Counter(form for form, _ in {(sign.form, sign.step) for sign in later})
        return max(kinds.values()) >= _ENOUGH

    def is_calm_after(self, line: int, times: int = 1) -> bool:
        """Whether the program goes on to speak after a line, and of no failure."""
        return sum(number > line for number in self.calm) >= _CALM * times

    def steps_before(self, line: int) -> bool:
        """Whether there is a step before a line."""
        return any(number < line for number in self._lines(STEP))

    def steps_after(self, line: int) -> bool:
        """Whether there is a further step after a line."""
        return bool(_steps(self._later(line)))

    def _later(self, line: int) -> list[Sign]:
        drawn = {sign.step for sign in self.signs if sign.line <= line and sign.step.startswith(DRAWN)}
        return [sign for sign in self.signs if sign.line > line and sign.step and sign.step not in drawn]

    def began_after(self, line: int) -> bool:
        """Whether the job made its first step after a line, or went on: then that cannot have ended it."""
        steps = self._lines(STEP)
        return self.went_on_after(line) or (bool(steps) and steps[0] > line)

    def is_first_after(self, line: int) -> bool:
        """The same for a line with weaker words, after which an end or a result is enough."""
        no_step = not any(number < line for number in self._lines(STEP))
        return self.began_after(line) or (no_step and self.shows_after(line))

    def began_again_after(self, line: int) -> bool:
        """Whether the job was started again after a line and made a step since, or came to a good end."""
        begins = [number for number in self._lines(BEGIN, READY) if number > line]
        if (begins and self.works_after(begins[0])) or any(each > line for each in self._lines(SUCCESS)):
            return True
        first = next((sign for sign in self.signs if STEP in sign.kinds), None)
        return first is not None and first.line > line and set(first.step.split()) <= {"0", "1"}

    def works_after(self, line: int) -> bool:
        """Whether there is a step after a line, and not only a server that could be asked."""
        return any(sign.line > line and STEP in sign.kinds and READY not in sign.kinds for sign in self.signs)

    @property
    def makes_many_steps(self) -> bool:
        """Whether there are more steps than those that ranks make when one of them is gone."""
        return len(_steps(self.signs)) >= _MANY

    def is_shut_by(self, line: int) -> bool:
        """Whether a server that was told to end in a line was at work, or ended in good order after it."""
        before = [sign for sign in self.signs if sign.line < line and not sign.kinds.isdisjoint((STEP, UP))]
        shut = any(number > line for number in self._lines(SHUT))
        return bool(before) and (shut or before[-1].form == ANSWERED)

    def is_over_before(self, line: int) -> bool:
        """Whether the job had come to its end before a line: after steps, or what is done is but its start.

        Its bar may be drawn once more after that, and its result be tested. What it has begun since has to
        be done. A server that ends in good order has been one.
        """
        before = [sign for sign in self.signs if sign.line < line]
        closed = max((sign.line for sign in before if sign.sums_up or END in sign.kinds), default=0)
        over = max(
            (
                sign.line
                for sign in before
                if sign.kinds & {OVER, SHUT} or (LAST in sign.kinds and sign.line < closed)
            ),
            default=0,
        )
        steps = [sign for sign in before if STEP in sign.kinds]
        was = over in self._lines(SHUT) or any(sign.line <= over for sign in steps)
        drawn = {sign.step for sign in steps if sign.line <= over and sign.step.startswith(DRAWN)}
        later = [sign for sign in before if sign.line > over and sign.kinds - {BEGIN}]
        due = bool(later) and DUE in later[-1].kinds
        further = (sign for sign in later if STEP in sign.kinds and sign.step not in drawn)
        return was and not due and all(sign.sums_up or sign.full for sign in further)

    def is_done_before(self, line: int) -> bool:
        """Whether the last sign before a line is the end of something, after steps."""
        before = [sign for sign in self.signs if sign.line < line]
        return bool(before) and END in before[-1].kinds and any(STEP in sign.kinds for sign in before)

    def has_answered_before(self, line: int) -> bool:
        """Whether a script that does nothing but ask vLLM had all its prompts answered before a line."""
        before = [sign for sign in self.signs if sign.line < line and sign.kinds - {END, ROW}]
        asks = all(PROMPTS in sign.kinds for sign in before if STEP in sign.kinds)
        if not before or not asks or ANSWERED_ALL not in before[-1].kinds:
            return False
        return not any(before[-1].line < number < line for number in self.begun)

    def is_shut_for_good(self, line: int) -> bool:
        """Whether a server that answered requests began to end in a line, and nothing has begun since."""
        before = [sign for sign in self.signs if sign.line < line and sign.kinds & {STEP, UP, STUCK}]
        later = (sign for sign in self.signs if sign.line > line)
        answered = bool(before) and before[-1].form == ANSWERED
        return answered and not any(sign.kinds & {STEP, UP, BEGIN, READY, DUE} for sign in later)

    def is_over_after(self, line: int) -> bool:
        """Whether the job has come to its end after a line."""
        return any(number > line for number in self._lines(OVER))

    def shows_after(self, line: int) -> bool:
        """Whether there is any sign after a line, which only looks like a failure."""
        return any(number > line for number in self._lines(STEP, END))

    def is_there_after(self, line: int) -> bool:
        """The same for a line with the weakest words, after which a server that still is there is enough."""
        return any(number > line for number in self._lines(STEP, END, UP, SHUT))

    def _lines(self, *kinds: str) -> list[int]:
        return [sign.line for sign in self.signs if not sign.kinds.isdisjoint(kinds)]


def _is_of(sign: Sign, who: Who) -> bool:
    """Whether a process may have written a line: it has, if the line tells a rank, or none tells."""
    process, pid = who
    return sign.process == process if process != NOBODY else pid is None or sign.pid in (None, pid)


def _steps(signs: Sequence[Sign]) -> set[str]:
    return {sign.step for sign in signs if STEP in sign.kinds}


def look_for_life(lines: Sequence[tuple[int, Line]]) -> Life:
    """What some lines of a log show, each of which comes with its number."""
    signs = read_signs(lines)
    last, text = next(
        ((number, line.text.strip()) for number, line in reversed(lines) if line.text.strip()), (0, "")
    )
    behind = max(
        (sign.line for sign in signs if sign.kinds - {BEGIN, END, DUE} and not sign.sums_up), default=last
    )
    outlived = {form_of(line.text) for number, line in lines if number < behind}
    said = list(_without_ignored(lines))
    words = _last_words(
        (number, line) for number, line in said if number > behind and form_of(line.text) not in outlived
    )
    plain = tuple(number for number, line in said if _is_plain(line))
    calm = tuple(number for number, line in lines if number in plain and not _SPEAKS_OF_END.search(line.text))
    tail = tuple((number, line.text) for number, line in lines[-_TAIL:])
    begun = tuple(number for number, line in lines if IS_BEGUN.search(line.text))
    return Life(signs, last, text, plain, calm, tail, begun, words, _diverged(lines))


def _diverged(lines: Iterable[tuple[int, Line]]) -> tuple[int, str] | None:
    """The first of several lines, the last ones with a loss, in which that is no finite number."""
    first, count = None, 0
    for number, line in lines:
        if found := next((each for each in _LOSS.finditer(line.text) if not each["other"]), None):
            lost = found["lost"] is not None
            first, count = (first or (number, line.text.strip()), count + 1) if lost else (None, 0)
    return first if count >= _LOST_FOR_GOOD else None


def _is_plain(line: Line) -> bool:
    """Whether a line is the program's own: no warning, no part of another line, no command of a shell."""
    own = bool(line.text) and not line.text[0].isspace() and not _SHELL.match(line.text)
    own = own and not _CLOSES.search(line.text)
    return own and (line.severity != MILD or line.level in _INFO or _SAYS_INFO.match(line.text) is not None)


def _without_ignored(lines: Iterable[tuple[int, Line]]) -> Iterator[tuple[int, Line]]:
    """The lines that do not belong to an exception that is ignored."""
    ignored = False
    for number, line in lines:
        if line.text.startswith(IGNORED) or f"{CLIENT_LOST}(" in line.text:
            ignored = True
        elif ignored:  # the last line, which names the exception, begins with it
            ignored = line.text[:1] in ("", " ", "\t") or line.text.startswith(BEGIN_OF_TRACEBACK)
        else:
            yield number, line


def _last_words(lines: Iterable[tuple[int, Line]]) -> tuple[int, str] | None:
    """The first line that speaks of an end, with its number."""
    for number, line in lines:
        played_down = line.severity == MILD or is_played_down(line.text)
        if not played_down and LAST_WORDS.search(without_denials(line.text)):
            return number, line.text.strip()
    return None
