"""How well `rallypoint explain` does on the logs of tests/explain/corpus: `make explain-score`.

A trivial program is measured beside it, which shows what the knowledge and the rules are worth: it names the
first exception that is not a launcher's report, otherwise the first line with an alarming word.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from explain_corpus import HELD_OUT, REPRODUCED, WORK, Sample, samples
from rallypoint.explain import Source, explain
from rallypoint.explain.report import as_text
from rallypoint.explain.verdict import Verdict

RIGHT: Final = "right"
CONSEQUENCE: Final = "consequence"
UNKNOWN: Final = "unknown"
WRONG: Final = "wrong"
ALL_CLEAR: Final = "all clear"
OUTCOMES: Final = (RIGHT, CONSEQUENCE, UNKNOWN, WRONG, ALL_CLEAR)


@dataclass(frozen=True)
class Said:
    """What a program says of a log."""

    found: bool
    """Whether it says that anything is wrong."""
    first: str | None = None
    """What it names as the first failure: the line, and what it quotes of the exception."""
    consequence: bool = False
    """Whether it says that what it names is only a consequence."""
    stops: bool = False
    """Whether it says that the log stops before the work ends."""
    advice: str = ""


Program = Callable[[Sample], Said]


# Programs --------------------------------------------------------------------------------------------------


@cache
def explained(sample: Sample) -> Said:
    """What `rallypoint explain` says."""
    told = explain([Source(sample.name, [sample.data])])
    verdict = told.verdict
    return Said(
        told.found,
        None if verdict is None else _named(sample, verdict),
        verdict is not None and verdict.certainty == "consequence",
        told.stop is not None,
        as_text(told),
    )


def _named(sample: Sample, verdict: Verdict) -> str:
    """All that the report quotes of the first failure."""
    texts = [sample.line(verdict.event.line), *verdict.quote]
    if (root := verdict.root) is not None:
        frame = root.users_frame
        texts += [sample.line(root.line), frame.source if frame is not None else ""]
    texts += [verdict.became.headline] if verdict.became is not None else []
    texts += [sample.line(verdict.by.line)] if verdict.by is not None else []
    return "\n".join(texts)


_EXCEPTION: Final = re.compile(
    r"(?:^|[\s:\]>)])((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))(?:: |\s*$)"
)
_WRAPPERS: Final = re.compile(
    r"ChildFailedError|CalledProcessError|ProcessRaisedException|SystemExit|RayTaskError"
)
_ALARMING: Final = re.compile(
    r"error|fail|fatal|exception|abort|killed|cannot|can't|could not|denied", re.IGNORECASE
)


def trivial(sample: Sample) -> Said:
    """What a few lines of Python say."""
    lines = sample.text.split("\n")
    in_traceback = False
    for line in lines:
        in_traceback = in_traceback or "Traceback (most recent call last)" in line
        if in_traceback and (found := _EXCEPTION.search(line)):
            in_traceback = False
            if not _WRAPPERS.search(found[1]):
                return Said(True, line)
    first = next(filter(_ALARMING.search, lines), None)
    return Said(first is not None, first)


# Scores ----------------------------------------------------------------------------------------------------


def outcome(sample: Sample, said: Said) -> str:
    """How good an answer to a failing log is."""
    if said.first is None:
        return UNKNOWN if said.found else ALL_CLEAR
    if sample.shows_cause(said.first):
        return RIGHT
    return CONSEQUENCE if said.consequence else WRONG


def is_helpful(sample: Sample, said: Said) -> bool:
    """Whether the advice has what helped; the help for a mistake of the script is its place."""
    if sample["words"] == "-":
        return outcome(sample, said) == RIGHT
    return re.search(sample["words"], said.advice, re.IGNORECASE) is not None


def alarms(logs: Sequence[Sample], program: Program = explained) -> list[str]:
    """The names of healthy logs that the program takes for failing ones."""
    return [each.name for each in logs if not each.is_failing and program(each).found]


def score(logs: Sequence[Sample], program: Program = explained) -> dict[str, int]:
    """How many logs have each outcome, and other numbers."""
    failing = [(each, program(each)) for each in logs if each.is_failing]
    outcomes = [(outcome(each, said), each, said) for each, said in failing]
    counts = Counter(name for name, _, _ in outcomes)
    return {
        "failing logs": len(failing),
        **{name: counts[name] for name in OUTCOMES},
        "unknown, with the place where the log stops": sum(
            name == UNKNOWN and said.stops for name, _, said in outcomes
        ),
        "helpful advice": sum(is_helpful(each, said) for each, said in failing),
        "healthy logs": len(logs) - len(failing),
        "false alarms": len(alarms(logs, program)),
    }


# Output ----------------------------------------------------------------------------------------------------


def _table(scores: dict[str, int], others: dict[str, int]) -> str:
    rows = [f"{'':42}{'explain':>12}{'trivial program':>20}"]
    for name, count in scores.items():
        if name.endswith(" logs"):
            of = count
            rows.append(f"{name:42}{count:7}")
        else:
            rows.append(f"{name:42}{count:7}{count / of:5.0%}{others[name]:15}{others[name] / of:5.0%}")
    return "\n".join(rows)


def _misses(logs: Sequence[Sample]) -> list[str]:
    """A line for each log that is not explained well."""
    rows = []
    for each in logs:
        if not each.is_failing:
            continue
        said = explained(each)
        result, helpful = outcome(each, said), is_helpful(each, said)
        if result != RIGHT or not helpful:
            help_ = "" if helpful else "no help"
            named = (said.first or "").strip()[:90]
            rows.append(f"{result:12}{help_:8}{each.name}: {named!r} for {each.decisive[0][:90]!r}")
    return [*rows, *(f"false alarm: {name}" for name in alarms(logs))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", action="store_true", help="the logs to work with, with each miss")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts = [WORK, REPRODUCED] if options.work else [HELD_OUT]
    scores = {part: (score(samples(part)), score(samples(part), trivial)) for part in parts}
    if options.json:
        print(
            json.dumps(
                {part: {"explain": ours, "trivial": others} for part, (ours, others) in scores.items()}
            )
        )
        return 0
    for part, both in scores.items():
        print(f"{part}\n{_table(*both)}\n")
        if options.work:
            print(*_misses(samples(part)), "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
