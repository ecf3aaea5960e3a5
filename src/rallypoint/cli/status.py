"""`rallypoint status`: who is here, who is missing, who waits for what."""

from __future__ import annotations

import json
import shutil
import time
from typing import Final, NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rallypoint.cli.command import JSON, Argument, command, not_negative
from rallypoint.cli.signals import (
    ChangedLines,
    check_watch,
    in_a_line,
    repeat,
    signals_as_interrupts,
    until_ctrl_c,
)
from rallypoint.errors import NotOursError, RallypointError, UsageError
from rallypoint.launch.endpoint import parse_store
from rallypoint.text import duration
from rallypoint.watch.status.report import StatusReport, StatusRequest, report_on

_PAUSE_SECONDS: Final = 1.0


@command(
    Argument("store", metavar="HOST:PORT", variable="RALLYPOINT_STORE", help="The store, or relay, to ask."),
    Argument("--watch", action="store_true", help="Show it again every second, until Ctrl-C."),
    Argument("--waits", action="store_true", help="Every key and barrier that is waited for."),
    Argument("--keys", action="store_true", help="The keys, with size and last writer."),
    Argument("--search", metavar="TEXT", default="", help="With --keys: only keys that hold this text."),
    Argument("--stacks", action="store_true", help="Below the summary, what the ranks do, and where."),
    Argument("--rank", type=not_negative, metavar="N", help="All that is known about one rank."),
    Argument(
        "--name",
        metavar="NAME",
        default="",
        help="Of a server that holds the stores of several jobs and rounds: this one. Without it, the store "
        "of the round, if one job meets there.",
    ),
    JSON,
)
def status(
    store: str,
    watch: bool,
    waits: bool,
    keys: bool,
    search: str,
    stacks: bool,
    rank: int | None,
    name: str,
    as_json: bool,
) -> int:
    """Show who is here, who is missing, and who waits for what.

    Of a server, the whole job; of a relay, its part; of torch's own server, what its protocol tells. It only
    reads. Exit 1 if ranks are missing, or the engine of a replicated store does not answer; with --rank, if
    that one is not known to be here.
    """
    request = StatusRequest(parse_store(store, "the store"), waits, keys, search, rank, name, stacks)
    _check(request, watch, as_json)
    if not watch:
        with signals_as_interrupts():
            return _show(request, as_json)
    with until_ctrl_c():
        _watch(request)
    return 0


def _check(request: StatusRequest, watch: bool, as_json: bool) -> None:
    if sum((request.waits, request.keys, request.stacks, request.rank is not None)) > 1:
        raise UsageError(
            "--waits, --keys, --stacks and --rank are for different things", hint="give one of them"
        )
    if request.search and not request.keys:
        raise UsageError("--search is for keys", hint="give --keys with it")
    check_watch(watch, as_json)


def _show(request: StatusRequest, as_json: bool) -> int:
    """Print the report once; 1 if ranks are missing."""
    report = report_on(request)
    if as_json:
        print(json.dumps(report.content()))
    else:
        console = Console(highlight=False)
        lines = report.lines(shutil.get_terminal_size().columns if console.is_terminal else None)
        for at, line in enumerate([*lines, *report.below]):
            style = "" if at else "bold" if report.is_good else "bold red"
            console.print(Text(line, style), soft_wrap=True)
    return 0 if report.is_good else 1


def _watch(request: StatusRequest) -> NoReturn:
    """Show it until KeyboardInterrupt. Raises NotOursError if there is nothing to show."""
    console = Console(highlight=False)
    if not console.is_terminal:
        lines = _Lines()
        repeat(lambda: _show_on(lines, request), _PAUSE_SECONDS)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        screen = _Screen(live)
        repeat(lambda: _show_on(screen, request), _PAUSE_SECONDS)


def _show_on(view: _Screen | _Lines, request: StatusRequest) -> None:
    """Show the report; or that the store does not answer, which is request again."""
    try:
        view.show_report(report_on(request))
    except NotOursError:
        raise
    except RallypointError as error:
        view.miss(error)


class _Screen:
    """On a terminal: the lines are drawn over. While the store does not answer, the last lines stay."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._last: StatusReport | None = None
        self._seen = time.monotonic()

    def show_report(self, report: StatusReport) -> None:
        self._last, self._seen = report, time.monotonic()
        self._update([Text(line) for line in self._lines_of(report)], report.is_good)

    def miss(self, error: RallypointError) -> None:
        rows = [Text(f"no answer for {duration(time.monotonic() - self._seen)}: {in_a_line(error)}")]
        if self._last is not None:
            rows += [Text(line, "dim") for line in ["", *self._lines_of(self._last)]]
        self._update(rows, is_good=False)

    def _lines_of(self, report: StatusReport) -> list[str]:
        return [*report.lines(self._live.console.width), *report.below]

    def _update(self, rows: list[Text], is_good: bool) -> None:
        rows[0].stylize("bold" if is_good else "bold red")
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        self._live.update(Group(*rows), refresh=True)


class _Lines(ChangedLines):
    """Without a terminal."""

    def show_report(self, report: StatusReport) -> None:
        self.show(report.essence, [*report.lines(), *report.below])
