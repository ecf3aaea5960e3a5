"""`rallypoint status --watch`: a report every second, in its place; without a terminal, when it changes.

A store that goes away is no reason to end: it is said, and tried again.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from types import TracebackType
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rallypoint.errors import NotOursError, RallypointError
from rallypoint.text import duration, printable
from rallypoint.watch.status.report import Asked, StatusReport, report_on

_PAUSE_SECONDS: Final = 1.0


def live(asked: Asked) -> None:
    """Show it until KeyboardInterrupt. Raises NotOursError if there is nothing to show."""
    console = Console(highlight=False)
    with _Screen(console) if console.is_terminal else _Log() as view:
        while True:
            begin = time.monotonic()
            try:
                view.show(report_on(asked))
            except NotOursError:
                raise
            except RallypointError as error:
                view.miss(error)
            time.sleep(max(begin + _PAUSE_SECONDS - time.monotonic(), 0.0))


class _Screen:
    """The lines in their place; those of a store that is away stay, below what is wrong with it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._last: StatusReport | None = None
        self._seen = time.monotonic()

    def __enter__(self) -> _Screen:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, report: StatusReport) -> None:
        self._last, self._seen = report, time.monotonic()
        self._update([Text(line) for line in report.lines(self._console.width)], report.is_good)

    def miss(self, error: RallypointError) -> None:
        rows = [Text(f"no answer for {duration(time.monotonic() - self._seen)}: {_in_a_line(error)}")]
        if self._last is not None:
            rows += [Text(line, "dim") for line in ["", *self._last.lines(self._console.width)]]
        self._update(rows, is_good=False)

    def _update(self, rows: list[Text], is_good: bool) -> None:
        rows[0].stylize("bold" if is_good else "bold red")
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        self._live.update(Group(*rows), refresh=True)


class _Log:
    """A block of lines each time that something but the time has changed."""

    def __init__(self) -> None:
        self._last: Hashable = None

    def __enter__(self) -> _Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, report: StatusReport) -> None:
        self._print(report.essence, report.lines())

    def miss(self, error: RallypointError) -> None:
        self._print(type(error).__name__, [f"no answer: {_in_a_line(error)}"])

    def _print(self, essence: Hashable, lines: list[str]) -> None:
        if essence != self._last:
            print(time.strftime("%H:%M:%S"), *lines, "", sep="\n")
        self._last = essence


def _in_a_line(error: RallypointError) -> str:
    return printable(" ".join(error.message.split()))
