"""What `rallypoint torch watch` shows of a build: a bar on a terminal, lines elsewhere, and what failed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from rallypoint.diagnose.builds.commands import running_command
from rallypoint.diagnose.builds.progress import BuildProgress, Libuv
from rallypoint.diagnose.builds.watch import BuildWatch
from rallypoint.text import duration, printable

_BAR_SECONDS: Final = 1.0
_LINE_SECONDS: Final = 10.0
"""Between two looks, on a terminal and elsewhere."""
_END_LINES: Final = 40


def watch_build(
    build: Path, command: list[str], log: Path | None, once: bool, as_json: bool
) -> BuildProgress:
    """Watch it to its end, or run it and watch it; what it has come to."""
    with running_command(command, log) as (process, written):
        seen = BuildWatch(build, written if process else log, process)
        snapshot = _follow(seen, once, as_json)
        if snapshot.state in ("failed", "stopped"):
            _print_failure(snapshot, written)
    return snapshot


def _follow(seen: BuildWatch, once: bool, as_json: bool) -> BuildProgress:
    """Look again and again, until the build has ended."""
    lines = as_json or once or not Console(stderr=True).is_terminal
    with _Bar(shown=not lines) as bar:
        while (snapshot := seen.look()).state == "running" and not once:
            if lines:
                _print_line(snapshot, as_json)
            bar.show(snapshot)
            seen.wait(_LINE_SECONDS if lines else _BAR_SECONDS)
    _print_line(snapshot, as_json)
    return snapshot


def _print_line(snapshot: BuildProgress, as_json: bool) -> None:
    print(json.dumps(asdict(snapshot)) if as_json else describe(snapshot))


class _Bar:
    """Progress on standard error, where that is a terminal: a bar, and a line below it."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._progress = Progress(
            BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.description}"), expand=True
        )
        self._task = self._progress.add_task("", total=None)
        self._live = Live(
            self._progress,
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # it would turn data into messages on standard error
            redirect_stderr=False,
        )

    def __enter__(self) -> _Bar:
        if self._shown:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._live.stop()

    def show(self, snapshot: BuildProgress) -> None:
        left = "" if snapshot.seconds_left is None else f"{duration(snapshot.seconds_left)} left"
        self._progress.update(
            self._task, completed=snapshot.done, total=snapshot.total, description=left, refresh=False
        )
        self._live.update(Group(self._progress, Text("; ".join(_parts(snapshot)))))


def describe(snapshot: BuildProgress) -> str:
    """A line about a build."""
    total = "?" if snapshot.total is None else f"{snapshot.total:,}"
    left = [] if snapshot.seconds_left is None else [f"{duration(snapshot.seconds_left)} left"]
    ended = [f"the command {_describe_end(snapshot)}"] if snapshot.exit_code else []
    counts = f"{snapshot.state}: {snapshot.done:,} of {total} steps"
    return "; ".join([counts, *ended, *left, *_parts(snapshot)])


def _describe_end(snapshot: BuildProgress) -> str:
    code = snapshot.exit_code or 0
    return f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"


def _parts(snapshot: BuildProgress) -> Iterator[str]:
    if snapshot.steps_per_minute is not None:
        yield f"{snapshot.steps_per_minute:,.0f} a minute"
    if snapshot.load is not None:
        load = snapshot.load
        yield f"{load.steps} at work, {load.cpu_percent:.0f} % CPU, {load.memory_bytes / 2**20:,.0f} MiB"
    if snapshot.libuv is not None:
        yield _describe_libuv(snapshot.libuv)


def _describe_libuv(libuv: Libuv) -> str:
    if libuv.total == 0:
        return "no libuv in this build"
    files = "libuv is built" if libuv.done == libuv.total else f"libuv: {libuv.done} of {libuv.total} files"
    server = {True: "its server too", False: "its server is not", None: "there is no server for it"}
    return f"{files}, {server[libuv.server]}"


def _print_failure(snapshot: BuildProgress, log: Path | None) -> None:
    """The steps that failed with the ends of their output; else what is known."""
    for failure in snapshot.failures:
        print(f"\nFAILED: {printable(failure.step)}", file=sys.stderr)
        _print_end(failure.lines)
    if snapshot.failures:
        return
    if log is not None:
        _print_output(snapshot, log)
        return
    _print_next(snapshot)
    print(
        "\nhint: ninja writes failures to no file; give what it prints with --log, or run it from here: "
        "rallypoint torch watch BUILD_DIR -- COMMAND",
        file=sys.stderr,
    )


def _print_output(snapshot: BuildProgress, log: Path) -> None:
    """Of a build that says of no step that it failed: the end of it, or what else is known."""
    who = "the build" if snapshot.exit_code is None else f"the command {_describe_end(snapshot)}, and"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if lines:
        print(f"\n{who} names no step that failed; the end of what was printed:", file=sys.stderr)
        _print_end(lines)
        return
    print(f"\n{who} has printed nothing", file=sys.stderr)
    _print_next(snapshot)


def _print_next(snapshot: BuildProgress) -> None:
    if snapshot.next_steps:
        print("\nthe first steps that are left to do:", file=sys.stderr)
        _print_end(snapshot.next_steps)
    elif snapshot.done == snapshot.total:
        print("nothing was left to build", file=sys.stderr)


def _print_end(lines: Sequence[str]) -> None:
    """The last lines, so written that a terminal obeys nothing in them."""
    for line in lines[-_END_LINES:]:
        print(f"  | {printable(line.expandtabs())}", file=sys.stderr)
