"""Jobs of real processes under faults: a seed decides what is killed, stopped, cut, delayed or starved.

Each job has two machines with four ranks each: network namespaces with a bad cable between them, `rallypoint
run` on each, the store on the first, a relay on both. `chaos_plan` says which faults a job meets, `chaos_job`
does that to it, `chaos_judge` says what must hold after each. Several jobs run side by side, so that the time
goes into faults and not into starts. It needs the rights of root.

    python tests/tools/chaos.py [--seconds 600] [--seed 7] [--json FILE]
    python tests/tools/chaos.py --seed 7 --job 12

Exit code 1 if anything was wrong; the logs of that job are kept. 2: it cannot be run here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict
from itertools import count
from pathlib import Path

from chaos_job import what_is_missing
from chaos_judge import PEACE, HaltedError, Life, Outcome

_LANES = 2


class Run:
    """All jobs of one seed, some at a time, until the time is over."""

    def __init__(self, seed: int, seconds: float, job: int | None) -> None:
        self._seed = seed
        self._seconds = seconds
        self._began = time.monotonic()
        self._numbers = count() if job is None else iter([job])
        self._only_one = job is not None
        self._lock = threading.Lock()
        self.halt = threading.Event()
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.outcomes: list[Outcome] = []
        self.kept: list[Path] = []

    def is_over(self) -> bool:
        return not self._only_one and time.monotonic() - self._began > self._seconds

    def run(self) -> None:
        lanes = [threading.Thread(target=self._run_lane, args=(lane,)) for lane in range(_LANES)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            while lane.is_alive():
                lane.join(0.5)  # so that signals are heard
        if not self.kept:
            shutil.rmtree(self.folder)

    def _run_lane(self, lane: int) -> None:
        while not self.is_over() and not self.halt.is_set():
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            self._run_job(number, f"rp{os.getpid() % 100_000}{'uvwxyz'[lane]}")

    def _run_job(self, number: int, name: str) -> None:
        folder = self.folder / f"job-{number}"
        life = Life(self._seed, number, self.halt, self.is_over, self._tell)
        try:
            is_right = life.live(name, folder)
        except HaltedError:
            is_right = True
        except Exception as error:  # a fault of this program is no good outcome either
            self._tell(Outcome(number, "start", "start", "failed", 0.0, repr(error)))
            is_right = False
        if is_right:
            shutil.rmtree(folder)
        else:
            self.kept.append(folder)

    def _tell(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes.append(outcome)
            seconds = time.monotonic() - self._began
            print(f"chaos: {seconds:4.0f} s: {_in_words(outcome)}", file=sys.stderr, flush=True)


def _in_words(outcome: Outcome) -> str:
    after = f" after {outcome.seconds:.1f} s" if outcome.outcome != "not injected" else ""
    why = f": {outcome.why}" if outcome.why else ""
    return f"job {outcome.job}: {outcome.fault}: {outcome.outcome}{after}{why}"


def table_of(outcomes: list[Outcome]) -> list[str]:
    """The faults by group, as lines of a table: how many, what came of them, and how long that took."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.group].append(outcome)
    lines = [
        "| fault | injected | the job went on | it ended | wrong | longest, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for group, found in sorted(groups.items()):
        counts = [
            sum(each.outcome == outcome for each in found) for outcome in ("went on", "ended", "failed")
        ]
        longest = max(each.seconds for each in found)
        cells = [group, sum(counts), *counts, longest]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="jobs of real processes under faults")
    parser.add_argument("--seconds", type=float, default=600.0, help="no new fault after that")
    parser.add_argument("--seed", type=int, help="which faults meet which job; else one is drawn, and told")
    parser.add_argument("--job", type=int, help="only the job of this number")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all outcomes, in a file")
    arguments = parser.parse_args()
    missing = what_is_missing()
    if missing:
        print(f"chaos: cannot be run here: {missing}", file=sys.stderr)
        return 2
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    print(f"chaos: seed {seed}", file=sys.stderr)
    run = Run(seed, arguments.seconds, arguments.job)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: run.halt.set())
    run.run()
    if arguments.json:
        content = {"seed": seed, "outcomes": [asdict(each) for each in run.outcomes]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(table_of(run.outcomes)))
    return _judge(run, seed)


def _judge(run: Run, seed: int) -> int:
    not_injected = [each for each in run.outcomes if each.outcome == "not injected"]
    for outcome in not_injected:
        print(f"chaos: {_in_words(outcome)}", file=sys.stderr)
    failed = [each for each in run.outcomes if each.outcome == "failed"]
    for outcome in failed:
        again = f"again: --seed {seed} --job {outcome.job}"
        print(f"chaos: WRONG: {_in_words(outcome)}; logs: {run.folder / f'job-{outcome.job}'}; {again}")
    jobs = len({each.job for each in run.outcomes})
    faults = sum(each.fault != PEACE for each in run.outcomes)
    print(f"chaos: seed {seed}: {jobs} jobs, {faults} faults, {len(failed)} wrong", file=sys.stderr)
    if run.halt.is_set():
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
