"""How well `rallypoint explain` does on the logs of tests/corpus: `make explain-score`, or with --work.

Each log re-enacts a failure of a public thread: the messages are the programs' own, all else is made up. Its
head has the thread's address, the cause, and which line shows it. The logs are split once, by a hash of the
address: two thirds are to work with (`--work` shows each miss), and the last third is only measured. Logs of
the kind `silent` stop in the midst of the work: their jobs hang, or were ended without a word.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from rallypoint.diagnose.explain import Log, explain
from rallypoint.diagnose.explain.words import as_json

CORPUS: Final = Path(__file__).parent / "corpus"
RIGHT: Final = "right"
WRONG: Final = "wrong"
ALL_CLEAR: Final = "all clear"
CONSEQUENCE: Final = "consequence"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True)
class Sample:
    """One log of the corpus, and what is known of it."""

    name: str
    head: dict[str, list[str]]
    text: str

    @property
    def is_kept_back(self) -> bool:
        """Whether it is only for measuring."""
        return hashlib.sha256(self.head["address"][0].encode()).digest()[0] % 3 == 0

    @cached_property
    def said(self) -> dict[str, Any]:
        """What the tool says of it."""
        return as_json(explain([Log(self.name, iter([self.text.encode()]))]))

    @property
    def outcome(self) -> str:
        verdict = self.said["verdict"]
        if verdict is None:
            return UNKNOWN if self.said["found"] else ALL_CLEAR
        line = self.text.splitlines()[verdict["line"] - 1]
        if any(each in line or each in verdict["title"] for each in self.head["decisive"]):
            return RIGHT
        return WRONG if verdict["role"] == "cause" else CONSEQUENCE

    @property
    def is_among_suspects(self) -> bool:
        return any(
            each in suspect["text"] for suspect in self.said["suspects"] for each in self.head["decisive"]
        )

    @property
    def is_helpful(self) -> bool:
        """Whether the advice has what helps; for a mistake of the script, the place is the help."""
        words = self.head["words"][0]
        if words == "-":
            return self.outcome == RIGHT
        told = [each for each in (self.said["verdict"], self.said["stop"]) if each]
        advice = " ".join(text for each in told for text in (each.get("what", ""), each["why"], *each["do"]))
        return re.search(words, advice, re.IGNORECASE) is not None


def samples(kind: str) -> list[Sample]:
    """The logs of a folder, `failing` or `healthy`."""
    return [_read(path) for path in sorted((CORPUS / kind).glob("*.log"))]


def _read(path: Path) -> Sample:
    head, _, text = path.read_text(encoding="utf-8").partition("\n\n")
    fields: dict[str, list[str]] = {}
    for line in head.splitlines():
        name, _, value = line.partition(": ")
        fields.setdefault(name, []).append(value)
    return Sample(path.stem, fields, text)


def _miss(sample: Sample) -> str:
    verdict = sample.said["verdict"] or {"id": None, "text": ""}
    said = f"{verdict['id']} {verdict['text'][:90]!r}"
    help_ = "" if sample.is_helpful else "no help"
    return f"{sample.outcome:12}{help_:8}{sample.name}: {said} for {sample.head['decisive'][0][:90]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", action="store_true", help="the two thirds to work with, with each miss")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    failing = [each for each in samples("failing") if each.is_kept_back != options.work]
    healthy = [each for each in samples("healthy") if each.is_kept_back != options.work]
    outcomes = Counter(each.outcome for each in failing)
    alarms = [each.name for each in healthy if each.said["found"]]
    result = {
        "logs": len(failing),
        **{name: outcomes[name] for name in (RIGHT, CONSEQUENCE, UNKNOWN, WRONG, ALL_CLEAR)},
        "unknown, with the line among the suspects": sum(
            each.outcome == UNKNOWN and each.is_among_suspects for each in failing
        ),
        "all clear, but in the midst of steps": sum(
            each.outcome == ALL_CLEAR and each.said["midst"] is not None for each in failing
        ),
        "helpful advice": sum(each.is_helpful for each in failing),
        "healthy logs": len(healthy),
        "false alarms": len(alarms),
    }
    if options.json:
        print(json.dumps(result))
        return 0
    for name, count in result.items():
        of = "" if name in ("logs", "healthy logs", "false alarms") else f"  {count / len(failing):4.0%}"
        print(f"{name:42}{count:5}{of}")
    if options.work:
        for each in failing:
            if each.outcome != RIGHT or not each.is_helpful:
                print(_miss(each))
        for name in alarms:
            print(f"false alarm: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
