"""Random, mutated and guided streams, for the cores in memory and for live servers.

    python tests/tools/fuzz.py [--streams N] [--jobs N] [--target T ...] [--state FOLDER] [--seed N]
    python tests/tools/fuzz.py --replay FILE

It goes on where it has stopped, until that many streams have been run in all; Ctrl-C stops it. Each piece
of the work is a process of its own. The targets:

    store, relay, upstream    scripts for the cores: fuzz_cores says what is asserted
    texts, logs               texts from elsewhere, and their parsers: fuzz_texts
    live-...                  a server process on each backend, and a relay: fuzz_live

All but the last are guided: a stream that takes a branch of the code that none has taken (fuzz_branches) is
kept in the folder, and later ones are made of those that are kept (fuzz_scripts). A stream that breaks a rule
is kept as well, with the rule, and can be run again by --replay. It prints what it has done, as JSON. Exit
code 1 if a rule is broken.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import operator
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from hashlib import sha1
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from fuzz_cores import Script

SHARES: Final = {
    "store": 0.44,
    "relay": 0.2,
    "upstream": 0.2,
    "texts": 0.149,
    "logs": 0.001,
    "live-libuv": 0.004,
    "live-legacy": 0.003,
    "live-relay": 0.003,
}
"""The targets, and how many of the streams are for each."""
PIECE: Final = 40_000
"""Streams of a piece for all targets together."""
CPU_SECONDS: Final = 20.0
"""What one stream may take; far more than any does."""
GROWTH_MIB: Final = 32
"""How much memory one stream may take."""
MOST_FINDINGS: Final = 10
"""Of one piece; it ends then."""


# One piece, in a process of its own


class Piece(NamedTuple):
    """What a process is to do."""

    target: str
    number: int
    streams: int
    seed: int
    state: Path


@dataclass
class Outcome:
    """What has come of a piece."""

    streams: int = 0
    branches: int = 0
    """The branches that were taken, as bits."""
    all_branches: int = 0
    findings: list[str] = field(default_factory=list)


def work(piece: Piece, stopping: Any, sender: Connection) -> None:
    """The main function of a process. It ends early when `stopping` is set, or its parent has ended."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C is for the parent, which then says so
    parent = os.getppid()
    run = _run_live if piece.target.startswith("live-") else _run_guided
    sender.send(run(piece, lambda: stopping.is_set() or os.getppid() != parent))


def _run_live(piece: Piece, _: Callable[[], bool]) -> Outcome:
    from fuzz_live import FuzzError, fuzz

    outcome = Outcome(piece.streams)
    first = piece.number * 1_000_000
    try:
        fuzz(piece.target.removeprefix("live-"), piece.streams, piece.seed, first=first)
    except FuzzError as error:
        what = f"{piece.target}\n{piece.seed} {first} {piece.streams}\n"
        outcome.findings.append(_save_finding(piece, what, f"live {error}"[:200], str(error)))
    return outcome


def _run_guided(piece: Piece, is_to_stop: Callable[[], bool]) -> Outcome:
    import fuzz_branches

    fuzz_branches.install()
    from fuzz_cores import make_small
    from fuzz_scripts import from_text, make_script, to_text

    make_small()
    gc.freeze()
    gc.set_threshold(50_000)
    folder = piece.state / "corpus" / piece.target
    folder.mkdir(parents=True, exist_ok=True)
    rng = Random(f"{piece.seed}/{piece.number}")
    known: list[Script] = []
    outcome = Outcome(all_branches=len(fuzz_branches.MARKS))
    kinds: set[str] = set()

    def try_out(script: Script) -> int:
        """Run it; returns the branches that only this one has taken, as bits."""
        fuzz_branches.take()
        broken = broken_rule(piece.target, script)
        passed = fuzz_branches.take()
        if broken is None:
            return passed & ~outcome.branches
        if broken[0] not in kinds:
            kinds.add(broken[0])
            script = _shortened(
                script, lambda each: (broken_rule(piece.target, each) or [""])[0] == broken[0]
            )
            why = f"stream {outcome.streams} of piece {piece.number}\n{broken[1]}"
            outcome.findings.append(_save_finding(piece, to_text(piece.target, script), broken[0], why))
        return 0

    # The shortest first: a longer one that adds nothing to them is not needed any more.
    for text, path in sorted(_texts_in(folder), key=lambda each: (len(each[0]), each[0])):
        script = from_text(text)[1]
        if new := try_out(script):
            known.append(script)
            outcome.branches |= new
        else:
            path.unlink(missing_ok=True)
    while outcome.streams < piece.streams and len(kinds) < MOST_FINDINGS:
        script = make_script(rng, piece.target, known)
        if new := try_out(script):
            script = _shortened(script, lambda each: try_out(each) & new == new)
            known.append(script)
            outcome.branches |= new
            text = to_text(piece.target, script)
            _write_whole(folder / sha1(text.encode()).hexdigest()[:16], text)
        outcome.streams += 1
        if outcome.streams % 100 == 0 and is_to_stop():
            break
    return outcome


def _texts_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """The texts that are kept, and their files. Other processes add some and remove some meanwhile."""
    for path in folder.glob("[!.]*"):
        try:
            yield path.read_text(), path
        except FileNotFoundError:
            pass


def _write_whole(path: Path, text: str) -> None:
    """Nobody reads a part of it."""
    part = path.with_name(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def broken_rule(target: str, script: Script) -> tuple[str, str] | None:
    """The rule that a script breaks, in words that are the same for all that break it; and why."""
    from fuzz_cores import STAGES, play
    from fuzz_texts import read

    try:
        with _bounded():
            if target in STAGES:
                play(target, script)
            else:
                for step in script:
                    read(step.verb, step.data)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = [each for each in frames if "rallypoint" in each.filename] or frames
        return f"{type(error).__name__} {last[-1].filename}:{last[-1].lineno}", traceback.format_exc()
    return None


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise an error if a stream takes too long or too much memory, where the system can tell."""
    if not hasattr(signal, "SIGVTALRM"):
        yield
        return
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGVTALRM, _be_late)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > GROWTH_MIB << (20 if sys.platform == "darwin" else 10):
        raise MemoryError(f"one stream took {grown:,} KiB")


def _be_late(_: int, __: FrameType | None) -> None:
    raise TimeoutError(f"one stream took {CPU_SECONDS:g} s of CPU time")


def _shortened(script: Script, is_good: Callable[[Script], bool]) -> Script:
    """The script without the steps that do not matter."""
    for at in reversed(range(len(script))):
        shorter = [*script[:at], *script[at + 1 :]]
        if shorter and is_good(shorter):
            script = shorter
    return script


def _save_finding(piece: Piece, what: str, rule: str, why: str) -> str:
    folder = piece.state / "findings"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{piece.target}-{sha1(rule.encode()).hexdigest()[:8]}"
    path.write_text(what)
    path.with_suffix(".txt").write_text(why)
    return str(path)


# All pieces


@dataclass
class State:
    """What has been done so far, by target, as a file keeps it."""

    seed: int
    pieces: int = 0
    streams: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHARES, 0))
    branches: dict[str, str] = field(default_factory=dict)
    """The branches that were taken, as bits."""
    all_branches: int = 0


class Run:
    """The processes that do what is left."""

    def __init__(self, folder: Path, wanted: int, targets: list[str], jobs: int, seed: int | None) -> None:
        self._folder = folder
        self._file = folder / "state.json"
        self._state = State(Random().getrandbits(32))
        if self._file.exists():
            self._state = State(**json.loads(self._file.read_text()))
        if seed is not None:
            self._state.seed = seed
        total = sum(SHARES[target] for target in targets)
        self._goals = {target: math.ceil(wanted * SHARES[target] / total) for target in targets}
        self._jobs = jobs
        self._context = multiprocessing.get_context("spawn")
        self._stopping = self._context.Event()
        self._under_way: dict[Connection, tuple[Piece, Any]] = {}

    def work(self) -> None:
        """Until all is done, or Ctrl-C, or SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._stopping.set())
        while True:
            while len(self._under_way) < self._jobs and self._start_one():
                pass
            if not self._under_way:
                return
            for receiver in wait(list(self._under_way)):
                assert isinstance(receiver, Connection)
                self._collect(receiver)

    def _start_one(self) -> bool:
        left = {name: goal - self._state.streams[name] for name, goal in self._goals.items()}
        for piece, _ in self._under_way.values():
            left[piece.target] -= piece.streams
        target = max(left, key=lambda name: left[name] / self._goals[name])
        if left[target] <= 0 or self._stopping.is_set():
            return False
        size = min(left[target], max(math.ceil(PIECE * SHARES[target]), 100))
        piece = Piece(target, self._state.pieces, size, self._state.seed, self._folder)
        self._state.pieces += 1
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=work, args=(piece, self._stopping, sender))
        process.start()
        sender.close()
        self._under_way[receiver] = piece, process
        return True

    def _collect(self, receiver: Connection) -> None:
        piece, process = self._under_way.pop(receiver)
        try:
            outcome: Outcome = receiver.recv()
            process.join()
        except EOFError:
            process.join()
            why = f"the process of {piece} ended with {process.exitcode}"
            outcome = Outcome(findings=[_save_finding(piece, "", "died", why)])
        for path in outcome.findings:
            print(f"found: {path}; the reason is in {path}.txt", file=sys.stderr)
        if not outcome.streams:
            self._stopping.set()  # or it would never end
        state = self._state
        state.streams[piece.target] += outcome.streams
        if outcome.all_branches:
            if outcome.all_branches != state.all_branches:  # the code has changed
                state.branches.clear()
            state.all_branches = outcome.all_branches
            state.branches[piece.target] = hex(outcome.branches)
        self._folder.mkdir(parents=True, exist_ok=True)
        _write_whole(self._file, json.dumps(asdict(state)))
        count = sum(state.streams[name] for name in self._goals)
        print(f"{count:,} of {sum(self._goals.values()):,} streams", file=sys.stderr)

    @property
    def findings(self) -> list[str]:
        return sorted(str(path) for path in self._folder.glob("findings/*") if not path.suffix)

    def report(self) -> dict[str, Any]:
        taken = {name: int(bits, 16) for name, bits in self._state.branches.items()}
        return {
            "seed": self._state.seed,
            "streams": sum(self._state.streams.values()),
            "branches": reduce(operator.or_, taken.values(), 0).bit_count(),
            "all_branches": self._state.all_branches,
            "targets": {
                name: {
                    "streams": count,
                    "kept": len(list(self._folder.glob(f"corpus/{name}/[!.]*"))),
                    "branches": taken.get(name, 0).bit_count(),
                }
                for name, count in self._state.streams.items()
            },
            "findings": self.findings,
        }


def replay(path: Path) -> int:
    """Run what a file says: a script, or a piece of live streams."""
    target, *lines = path.read_text().splitlines()
    if target.startswith("live-"):
        from fuzz_live import FuzzError, fuzz

        seed, first, count = map(int, lines[0].split())
        try:
            print(fuzz(target.removeprefix("live-"), count, seed, first=first))
            return 0
        except FuzzError as error:
            print(error, file=sys.stderr)
            return 1
    from fuzz_cores import make_small
    from fuzz_scripts import from_text

    make_small()
    broken = broken_rule(*from_text(path.read_text()))
    print(broken[1] if broken is not None else f"{path} breaks no rule")
    return 1 if broken is not None else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the store, the relay and all parsers.")
    option = parser.add_argument
    option("--streams", type=int, default=10_000_000, help="how many in all, earlier runs included")
    option("--jobs", type=int, default=os.cpu_count() or 1, help="how many processes at a time")
    option("--target", choices=SHARES, nargs="+", default=list(SHARES))
    option("--state", type=Path, default=Path("build/fuzz"), help="where it is written how far it is")
    option("--seed", type=int, help="with the same one, a new run of one job is the same")
    option("--replay", type=Path, metavar="FILE", help="run one stream that broke a rule")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return replay(arguments.replay)
    run = Run(arguments.state, arguments.streams, arguments.target, arguments.jobs, arguments.seed)
    run.work()
    print(json.dumps(run.report(), indent=1))
    return 1 if run.findings else 0


if __name__ == "__main__":
    sys.exit(main())
