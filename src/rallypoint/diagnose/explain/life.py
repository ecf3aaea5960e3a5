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
"""One line may have been on its way already when something failed; two were not."""

_NUMBER: Final = r"[\s\"'=:\[(|#]{1,6}-?\d"
_STEP: Final = re.compile(
    rf"(?i)(?:\b|_)(?:loss|ppl|perplexity|acc|accuracy|mIoU|reward)\w*(?:@\d+)?{_NUMBER}"
    rf"|\b(?:steps?|iter(?:ation)?s?|epochs?|batch|updates?|episodes?|rounds?)\b{_NUMBER}"
    rf"|(?:\b|_)(?:f1|auc|mAP|bleu|rouge\w*|wer|cer|psnr|ssim|fid|top-?\d|precision|recall|score|metric|lr"
    rf"|learning[ _]rate|grad[ _]norm|eta|tflops|mfu)\b{_NUMBER}"
    r"|\d(?:it/s|s/it|\s?(?:samples?|tokens?|tok|img|images|ex|GB|MB)/s)"
    r"|\d%\|.*\d/\d"
    r'|"(?:GET|POST|PUT|HEAD) \S+ HTTP/[\d.]+" [2-4]\d\d|\bthroughput\b|\bbandwidth\b'
    r"|[\[(]\s*\d+/\s*\d+\b"
    r"|^[|\s]*(?:[\d.:e+-]{1,20}[|\s]+){3}|(?:\s\d+\.\d+){3}"  # rows of tables
)
_END: Final = re.compile(
    r"(?i)\b(?:finished|complete[ds]?|done|succeeded|success(?:ful|fully)?|saved|saving|wrote|written|passed"
    r"|exit(?:ing|ed normally|s successfully)|shut(?:ting)? ?down|terminated normally|ended with 0"
    r"|serving|listening|ready|running on|startup complete|ok|max_\w+=\d+` reached|total time|took \d"
    r"|ran \d+ tests?|uploaded|generated|resum(?:ed|ing)|recovered|reconnected|best)\b"
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
        """Whether the job went on after the failure that a line tells. Words alone may be of its message."""
        steps = sum(step > line for step in self.steps)
        return steps > 0 and steps + sum(end > line for end in self.ends) >= _ENOUGH

    def shows_after(self, line: int) -> bool:
        """Whether there is any sign after a line, which only looks like a failure."""
        return any(sign > line for sign in (*self.steps, *self.ends))


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
