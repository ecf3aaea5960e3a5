"""Signs that a job went on, or came to an end of its own, in the lines around a failure. Pure.

An exception that is followed by further training steps, or by requests that are answered, was caught: it
ended nothing. And a log that stops before it shows a step or an end was cut, or its job hangs: that is no
good news, even if no line speaks of an error. Only a few lines are looked at, so a large log costs no more
than a small one.

Not everything with a number is a step. The settings that a job prints at its start are none, nor are the bars
of what it loads, nor one that stands at 0. A job that dies draws its bars once more, saves what it can, and
wandb sums it up: a step counts only if it is a further one, and none of these.

Every program has words of its own for its steps. But steps come again and again: lines that differ in their
numbers only, and have values among them, are steps in any words (`_rhythm`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rallypoint.diagnose.explain.denials import without_denials
from rallypoint.diagnose.explain.prefixes import NOBODY, Line, Process

LAST_LINES: Final = 100
"""How many lines are looked at, at most."""
_ENOUGH: Final = 2
"""One line may have been on its way already when something failed; two were not."""
_MANY: Final = 5
"""So many further steps of others are not made without a process that takes part in them."""

STEP: Final = "step"
LOAD: Final = "load"
"""A bar of what a job loads before its first step."""
END: Final = "end"
"""The end of something, or a value that was computed."""
SUCCESS: Final = "success"
"""A launcher or a library says that all went well."""
OVER: Final = "over"
"""The end of all, in words that mean nothing less."""

_SIGN: Final = r"[\s\"'=:\[(|#]{1,6}"
_NUMBER: Final = rf"{_SIGN}-?\d"
_STEP: Final = re.compile(
    rf"(?i)(?:\b|_)(?:loss|ppl|perplexity|acc|accuracy|mIoU|reward)\w*(?:@\d+)?{_NUMBER}"
    rf"|(?:\b|fit_|global_)(?:step|iter(?:ation)?|epoch|batch|update|episode|round|trial|fold|sample|game)\b{_NUMBER}"
    rf"|\b(?:steps|iter(?:ation)?s|epochs|batches|samples|it)\b{_SIGN}\d+(?:\s?(?:/|of)\s?\d|\b.{{1,200}}\d\.\d)"
    rf"|(?:\b|_)(?:f1|auc|mAP|bleu|rouge\w*|wer|cer|psnr|ssim|fid|top-?\d|precision|recall|score|metric"
    rf"|grad[ _]norm|eta|tflops|mfu|pass@\d+|err@\d)\b{_NUMBER}"
    r"|\berr(?:or)?(?: \w{1,20}){0,4}[\s=:]{1,3}\d+(?:\.\d|e-)"
    r"|\d(?:it/s|s/it|\s?(?:samples?|tokens?|tok|img|images|ex|docs|GB|MB)(?:/s| per second))"
    r"|\d%\|.*\d/\d"
    r'|"(?:GET|POST|PUT|HEAD) \S+ HTTP/[\d.]+" [2-4]\d\d'
    r'|\b[2-4]\d\d\b.{0,60}\b(?:GET|POST|PUT|HEAD)\b[ "]{1,9}/'
    r"|\bthroughput\b|\bbandwidth\b"
    r"|[\[(]\s*\d+/\s*\d+\b"
    r"|^[|\s]*(?:[\d.:e+-]{1,20}[|\s]+){3}|(?:\s\d+\.\d+){3}"  # rows of tables
    r"|^\|\s*\w[\w/ .@%-]{0,60}\|\s*-?\d[\d.,e+-]*\s*\|"
)
# The numbers that grow from step to step: two lines with the same ones are one step.
_COUNTERS: Final = re.compile(
    r"(?i)(?:\b|_)(?:steps?|iter(?:ation)?s?|epochs?|batch|updates?|episodes?|rounds?)"
    r"[\s\"'=:\[(|#]{1,12}(\d+(?:\.\d+)?)|(?<!\d)(\d+)\s{0,9}(?:/\s{0,9}\d|\[)"
)
_FIGURE: Final = re.compile(r"(?i)-?\d+(?:[.:,]\d+){0,9}(?:e[+-]?\d+)?")
_VALUE_OF_STEP: Final = re.compile(r"(?<![\d.])(?<!\d:)\d+\.\d+(?![\d.])")
"""A number with a fraction that is neither an address, a version nor a time."""
_STEPS: Final = 3
"""So many lines that differ in their numbers only are steps; two are values."""
_BAR: Final = re.compile(r"\d%\|")
_DRAWN: Final = "bar "
"""Stands before the counters of a bar, which may be drawn a second time."""
_NO_STEP: Final = re.compile(
    r"(?i)exception|traceback|fatal|fail(?:ed|ure)|abort|killed|error: "
    r"|\|\s*0/\d+ \[|\?(?:it/s|s/it)"  # a bar at 0
    # what is said and done at an end, also at a bad one
    r"|^wandb: |\b(?:emergency|crash|checkpoint|ckpt|sav(?:ed|ing)|dump(?:ed|ing)?)\b"
    r"|\b(?:overall|total) (?:training|time|wall)"
    r"|^\w*(?:namespace|config|args|arguments|params)\w*\("
)
_IDLE: Final = r"(?! (?:new |incoming )?(?:requests?|jobs?|work|tasks?|input)\b)"
"""A server that waits for these is at work."""
_START: Final = re.compile(
    r"(?i)\b(?:initiali[sz]ing|load(?:ed|ing)|starting|connecting|building|setting up|set up|moving|preparing"
    r"|creating|joining|launching|downloading|fetching|compiling|tokenizing"
    rf"|(?<!done )waiting (?:for|on)\b{_IDLE})(?!\w)|\.\.\.$"
)
_END: Final = re.compile(
    r"(?i)\b(?:finished|complete[ds]?|done|succeeded|success(?:ful|fully)?|saved|saving|wrote|written|passed"
    r"|exit(?:ing|ed normally|s successfully)|terminated normally|ended with 0|executed in \d|waiting for"
    r"|serving|listening|ready|running on|ok|okay|max_\w+=\d+` reached|total time|took \d"
    r"|(?<!out )in \d+\.\d+ ?s(?:ec(?:onds)?)?|reached max\w*"
    r"|ran \d+ tests?|uploaded|generated|resum(?:ed|ing)|recovered|reconnected|best|early stopping|synced"
    r"|exit(?:s|ed)?(?: with)?(?: exit)?(?: code| status)?[ :=]{1,3}0|connected all (?:rings|trees))\b"
    r"|\d/\d+ +(?:running|completed)\b|built target|(?-i:\bPASS\b)|^true$|完成|成功"
)
_NO_END: Final = re.compile(
    r"(?i)error|exception|fail|fatal|traceback|abort|killed|not |unable|cannot"
    rf"|(?<!done )waiting (?:for|on)\b{_IDLE}"
)
_NO_RHYTHM: Final = (
    *(_NO_STEP, _START, _NO_END),
    re.compile(
        r"(?i)\b(?:warn\w*|retr(?:y|ies|ying)|attempt|time(?:d )?out|stuck|stall\w*|lost|still|no|since)\b"
        r"|^frame #|\b(?:rank|gpu|cuda|device|node|host|worker|process|pid)\W{0,3}\d"
    ),
)
"""What a job that hangs or dies says again and again, and what is said once for each part of it."""
_VALUE: Final = re.compile(
    r"(?i)\btensor\(|\bhas (?:data|value)\b|\b(?:gave|results?|sum|output|answer)[^a-z]{1,20}\d"
    r"|\bis (?:approximately |about )?-?\d+\.\d|\b(?:equal|close|match(?:es)?|same): true\b"
)
_READY: Final = re.compile(
    r"(?i)\bapplication startup complete\b|\brunning on (?:\w+ )?(?:url\b|https?:)"
    r"|\bstarted (?:http|grpc)\w*service\b"
)
"""A server that can be asked has outlived its start."""
_RESULT: Final = re.compile(r"(?i)\b(?:final|pass@\d+)\b")
_SUCCESS: Final = re.compile(
    r"(?i)\(success\)|WorkerState\.SUCCEEDED|worker group successfully finished"
    r"|max_(?:epochs|steps)=\d+` reached|^=+ \d+ passed\b"
    r"|^(?-i:OK)(?: \([\w =,]{1,80}\))?$|^100% tests passed\b"
)
_OVER: Final = re.compile(
    r"(?i)(?:\btraining (?:is |has )?(?:finished|completed?|done)|\bfinished training)\b"
    r"(?! (?:(?:of|for|on|the) ){0,2}(?:iter|epoch|step|round|batch|fold|client|stage|phase))"
    r"|(?:\ball |^)(?:finished|completed?|done)\W*$"
    r"|\breached max(?:imum)?[_ ](?:step|epoch|iter|update)|\btrain_runtime\b"
)


@dataclass(frozen=True)
class Sign:
    """A line that shows a job at work, or at its end."""

    line: int
    kinds: frozenset[str]
    step: str
    """What tells this step from others."""
    process: Process
    marked: bool = False
    """Whether it begins with the rank, as torch puts it before each line of an exception."""


@dataclass(frozen=True)
class Life:
    """What some lines of a log show of a job."""

    signs: tuple[Sign, ...] = ()
    last: int = 0
    """The number of the last line that is not empty, and its text."""
    text: str = ""

    @property
    def teed(self) -> bool:
        """Whether the rank stands before steps as well: then a launcher put it there, and not torch."""
        return len(_steps([sign for sign in self.signs if sign.marked])) >= _ENOUGH

    @property
    def shown(self) -> bool:
        """Whether the log ends with a job at work, or with one that is done."""
        ends = self._lines(END)
        return bool(self._lines(STEP)) or (bool(ends) and (self.last in ends or not _START.search(self.text)))

    def went_on_after(self, line: int, process: Process = NOBODY) -> bool:
        """Whether the job, or one process of it, went on after the failure that a line tells.

        Words alone may be of its message, so it takes a step; and bars may have been drawn a second time.
        """
        if any(number > line for number in self._lines(SUCCESS)):
            return True
        later = self._later(line)
        if process != NOBODY and len(_steps(later)) < _MANY:
            later = [sign for sign in later if sign.process == process]
        ends = sum(number > line for number in self._lines(END))
        return bool(_steps(later)) and len({sign.step for sign in later}) + ends >= _ENOUGH

    def steps_after(self, line: int) -> bool:
        """Whether there is a further step after a line."""
        return bool(_steps(self._later(line)))

    def _later(self, line: int) -> list[Sign]:
        drawn = {sign.step for sign in self.signs if sign.line <= line and sign.step.startswith(_DRAWN)}
        return [sign for sign in self.signs if sign.line > line and sign.step and sign.step not in drawn]

    def began_after(self, line: int) -> bool:
        """Whether the job made its first step after a line, or went on: then that cannot have ended it."""
        steps = self._lines(STEP)
        return self.went_on_after(line) or (bool(steps) and steps[0] > line)

    def is_first_after(self, line: int) -> bool:
        """The same for a line with weaker words, after which an end or a result is enough."""
        no_step = not any(number < line for number in self._lines(STEP))
        return self.began_after(line) or (no_step and self.shows_after(line))

    def is_over_before(self, line: int) -> bool:
        """Whether the job had come to its end before a line: after steps, or what is done is but its start.

        Its bar may be drawn once more after that.
        """
        over = max((number for number in self._lines(OVER) if number < line), default=0)
        steps = [sign for sign in self.signs if STEP in sign.kinds and sign.line < line]
        later = (sign for sign in steps if sign.line > over)
        return any(sign.line <= over for sign in steps) and all(
            sign.step.startswith(_DRAWN) for sign in later
        )

    def is_over_after(self, line: int) -> bool:
        """Whether the job has come to its end after a line."""
        return any(number > line for number in self._lines(OVER))

    def shows_after(self, line: int) -> bool:
        """Whether there is any sign after a line, which only looks like a failure."""
        return any(number > line for number in self._lines(STEP, END))

    def _lines(self, *kinds: str) -> list[int]:
        return [sign.line for sign in self.signs if not sign.kinds.isdisjoint(kinds)]


def _steps(signs: Sequence[Sign]) -> set[str]:
    return {sign.step for sign in signs if STEP in sign.kinds}


def look_for_life(lines: Sequence[Line], last: int) -> Life:
    """The signs in some lines of a log, the last of which has the number `last`."""
    signs = []
    seen = Life()
    plain = [replace(line, text=without_denials(line.text)) for line in lines]
    rhythm = _rhythm(plain)
    for number, line in enumerate(plain, last - len(lines) + 1):
        if line.text.strip():
            seen = Life(last=number, text=lines[number - last - 1].text.strip())
        kinds = _kinds_of(line.text)
        step = (_step_of(line.text) or f"line {number}") if kinds & {STEP, LOAD} else ""
        if not step and line in rhythm:
            step = rhythm[line]
            kinds |= {STEP if step else END}
        if kinds:
            marked = line.marked and not line.text[:1].isspace()  # and it is no source code of a frame
            signs.append(Sign(number, kinds, step, line.process, marked))
    return Life(tuple(signs), seen.last, seen.text)


def _rhythm(lines: Iterable[Line]) -> dict[Line, str]:
    """The lines that a writer repeats with other numbers: steps with these numbers, others with nothing."""
    forms: dict[tuple[object, ...], dict[Line, str]] = {}
    for line in lines:
        if _VALUE_OF_STEP.search(line.text) and not any(each.search(line.text) for each in _NO_RHYTHM):
            form = "".join(_FIGURE.sub("", line.text).split())
            forms.setdefault((*line.writer, form), {})[line] = " ".join(_FIGURE.findall(line.text))
    several = [found for found in forms.values() if len(set(found.values())) > 1]
    return {
        line: figures if len(set(found.values())) >= _STEPS else ""
        for found in several
        for line, figures in found.items()
    }


def _kinds_of(text: str) -> frozenset[str]:
    """What a line shows."""
    starts = _START.search(text) is not None
    if _READY.search(text) and not _NO_STEP.search(text):
        return frozenset([STEP, END])
    over = [OVER] if _OVER.search(text) else []
    if _STEP.search(text) and not _NO_STEP.search(text):
        if starts and _BAR.search(text):
            return frozenset([LOAD])
        return frozenset([STEP, *([END] if _RESULT.search(text) else []), *over])
    if _SUCCESS.search(text):
        return frozenset([END, SUCCESS, OVER])
    if _NO_END.search(text):
        return frozenset()
    if _VALUE.search(text):
        return frozenset([END])
    if _END.search(text) and not starts:
        return frozenset([END, *over])
    return frozenset()


def _step_of(text: str) -> str:
    """The counters of a line, as a text."""
    counters = " ".join(found[1] or found[2] for found in _COUNTERS.finditer(text))
    return f"{_DRAWN}{counters}" if counters and _BAR.search(text) else counters
