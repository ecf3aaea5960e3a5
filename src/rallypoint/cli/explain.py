"""`rallypoint explain`: what a log says of a failed job."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from rallypoint.cli.command import JSON, Argument, command
from rallypoint.cli.printing import print_rows, progress_bar
from rallypoint.diagnose.explain import Explanation, words
from rallypoint.diagnose.explain import explain as explain_logs
from rallypoint.diagnose.explain.knowledge import causes
from rallypoint.diagnose.explain.reading import find_logs, open_log, stream_log
from rallypoint.errors import UsageError


@command(
    Argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="Logs of one job, or folders of them; - or none: standard input.",
    ),
    Argument("--list", dest="as_list", action="store_true", help="List all causes that are known."),
    JSON,
)
def explain(files: list[str], as_list: bool, as_json: bool) -> int:
    """Find the first cause in the logs of a failed job: what happened, why, what to do, how sure.

    Exit 1 if something was found, 0 if nothing was, or only what is mostly harmless.
    """
    if as_list:
        if files:
            raise UsageError("--list takes no files", hint="leave out one of them")
        _print_list(as_json)
        return 0
    report = _read(files or ["-"])
    print(json.dumps(words.as_json(report), indent=2) if as_json else words.as_text(report))
    return 1 if report.found else 0


def _read(names: Sequence[str]) -> Explanation:
    if names == ["-"] and sys.stdin.isatty():
        raise UsageError(
            "there is no log to read", hint="name a file, or pipe one in: rallypoint explain train.log"
        )
    paths = find_logs([name for name in names if name != "-"])
    logs = [open_log(path) for path in paths]
    if "-" in names:
        logs.append(stream_log(sys.stdin.buffer, "standard input", time.time()))
    plain = all(path.suffix != ".gz" for path in paths) and "-" not in names
    total = sum(path.stat().st_size for path in paths) if plain else None
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    with progress_bar(TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task("", total=total)
        return explain_logs(logs, progress=lambda size: bar.advance(task, size))


def _print_list(as_json: bool) -> None:
    if as_json:
        print(json.dumps([cause.as_json() for cause in causes()], indent=2))
        return
    print_rows([(cause.id, cause.part, cause.title) for cause in causes()])
