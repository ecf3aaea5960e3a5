"""Rallypoint's server against torch's: the same loads, in turns, in one run.

Run it as `python benchmarks/against_torch.py`. All load stays on this machine's loopback, and is bounded in
count and time. The exit code says only whether every server lived and answered rightly: the speed is in the
table.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import report
from contest import Contest, Outcome, say
from scenarios import SCENARIOS, Plan
from servers import COMMANDS, TORCH

INTERRUPTED = 130


def positive(text: str) -> int:
    """A number of rounds."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1 round is needed")
    return number


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of names with commas between them."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return names


def arguments() -> argparse.Namespace:
    """The command line."""
    rivals = [name for name in COMMANDS if name != TORCH]
    parser = argparse.ArgumentParser(description="Compare Rallypoint's server to torch's, in turns.")
    add = parser.add_argument
    add(
        "--rounds", type=positive, metavar="N", help="rounds of each scenario (default 5; fewer of slow ones)"
    )
    add("--quick", action="store_true", help="fewer and shorter rounds")
    add("--json", metavar="FILE", type=Path, help="write the results of every round there")
    add("--only", metavar="NAME", type=names_of(SCENARIOS), help=f"of: {', '.join(SCENARIOS)}")
    add("--targets", metavar="NAMES", type=names_of(rivals), help=f"of: {', '.join(rivals)}")
    parser.set_defaults(only=list(SCENARIOS), targets=["libuv", "legacy"])
    return parser.parse_args()


def plan_of(options: argparse.Namespace) -> Plan:
    """How long to measure."""
    if options.quick:
        return Plan(options.rounds or 3, seconds=0.4, slow_rounds=1, slowest_rounds=1)
    return Plan(options.rounds or 5, seconds=0.8, slow_rounds=3, slowest_rounds=2)


def raise_open_file_limit() -> None:
    """Allow as many open files as may be: the servers and the load generators inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def interrupt(*_: object) -> NoReturn:
    """Let SIGTERM end this program as Ctrl-C does: with every process that it started."""
    raise KeyboardInterrupt


def run(options: argparse.Namespace, outcomes: list[Outcome]) -> bool:
    """All contests; whether none was interrupted."""
    try:
        for name in options.only:
            with Contest(SCENARIOS[name], [TORCH, *options.targets], plan_of(options)) as contest:
                outcomes.append(contest.run())
    except KeyboardInterrupt:
        say("interrupted: what follows is what was finished before")
        return False
    return True


def main() -> int:
    """Measure, then report."""
    options = arguments()
    signal.signal(signal.SIGTERM, interrupt)
    raise_open_file_limit()
    facts = report.machine()
    report.print_header(facts)
    outcomes: list[Outcome] = []
    finished = run(options, outcomes)
    report.print_table(outcomes)
    report.print_storms(outcomes)
    report.print_verdicts(outcomes)
    if options.json:
        options.json.write_text(json.dumps(report.as_json(facts, outcomes), indent=1) + "\n")
    if not finished:
        return INTERRUPTED
    return int(any(entry.fault for outcome in outcomes for entry in outcome.entries.values()))


if __name__ == "__main__":
    sys.exit(main())
