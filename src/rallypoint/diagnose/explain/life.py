"""Signs that a job went on, or came to an end of its own, in the last lines of a log. Pure.

An exception that is followed by further training steps, or by requests that are answered, was caught: it
ended nothing. And a log that stops before it shows a step or an end was cut, or its job hangs: that is no
good news, even if no line speaks of an error. Only the last lines are looked at, so a large log costs no more
than a small one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LAST_LINES: Final = 40
"""How many lines are looked at."""
_ENOUGH: Final = 2
"""One step may have been on its way already when something failed; two are not."""

_NUMBER: Final = r"[\s\"'=:\[(|#]{1,6}-?\d"
_STEP: Final = re.compile(
    rf"(?i)(?:\b|_)(?:loss|ppl|perplexity|acc|accuracy|mIoU|reward)\w*(?:@\d+)?{_NUMBER}"
    rf"|\b(?:steps?|iter(?:ation)?s?|epochs?|batch|updates?|episodes?|rounds?)\b{_NUMBER}"
    r"|\d(?:it/s|s/it|\s?(?:samples?|tokens?|tok|img|images|ex)/s)"
    r"|\d%\|.*\d/\d"
    r'|"(?:GET|POST|PUT|HEAD) \S+ HTTP/[\d.]+" [2-4]\d\d|\bthroughput\b'
    r"|\[\s*\d+/\d+\]|\bbandwidth\b|\bbusbw\b"
)
_END: Final = re.compile(
    r"(?i)\b(?:finished|completed?|done|succeeded|success(?:ful|fully)?|saved|saving|passed|exiting"
    r"|goodbye|shut(?:ting)? down|terminated normally|serving|listening|ready|running on|ok|ended with 0)\b"
)
_NO_STEP: Final = re.compile(r"(?i)exception|traceback|fatal|fail(?:ed|ure)|abort|killed|error: ")
_NO_END: Final = re.compile(
    r"(?i)error|exception|fail|fatal|traceback|abort|killed|not |unable|cannot|waiting"
)


@dataclass(frozen=True)
class Life:
    """The numbers of the lines, among the last ones, that show a job at work or at its end."""

    steps: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    last: int = 0
    """The number of the last line that is not empty, and its text."""
    text: str = ""

    @property
    def shown(self) -> bool:
        """Whether the log ends with a job at work, or with one that is done."""
        return bool(self.steps or self.ends)

    def went_on_after(self, line: int) -> bool:
        """Whether the job went on after what a line says."""
        steps = sum(step > line for step in self.steps)
        return steps >= _ENOUGH or (steps > 0 and any(end > line for end in self.ends))


def look_for_life(texts: Sequence[str], last: int) -> Life:
    """The signs in the last lines of a log, the last of which has the number `last`."""
    steps, ends = [], []
    seen = Life()
    for number, text in enumerate(texts, last - len(texts) + 1):
        if text.strip():
            seen = Life(last=number, text=text.strip())
        if _STEP.search(text) and not _NO_STEP.search(text):
            steps.append(number)
        elif _END.search(text) and not _NO_END.search(text):
            ends.append(number)
    return Life(tuple(steps), tuple(ends), seen.last, seen.text)
