"""`rallypoint explain`: what a log says of a failed job."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rallypoint.cli.command import JSON, Argument, command
from rallypoint.cli.printing import print_rows, progress_bar
from rallypoint.diagnose.explain import Explanation, words
from rallypoint.diagnose.explain import explain as explain_logs
from rallypoint.diagnose.explain.knowledge import causes
from rallypoint.diagnose.explain.reading import find_logs, open_log, stream_log
from rallypoint.errors import UsageError
from rallypoint.stacks.flight import (
    MOST_BYTES,
    Dump,
    as_document,
    as_lines,
    compare,
    rank_of_dump,
    read_dump,
)


@command(
    Argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="Logs of one job, dumps of torch's Flight Recorder, or folders; - or none: standard input.",
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
    logs, dumps = _without_dumps(files)
    differences = compare(dumps)
    report = _read(logs or ["-"]) if logs or not dumps else explain_logs([])
    if as_json:
        flight = {"flight": as_document(dumps, differences)} if dumps else {}
        print(json.dumps({**words.as_json(report), **flight}, indent=2))
    else:
        if dumps:
            print("\n".join(as_lines(dumps, differences)))
        if logs or not dumps:
            print(("\n" if dumps else "") + words.as_text(report))
    return 1 if report.found or differences else 0


def _without_dumps(names: Sequence[str]) -> tuple[list[str], list[Dump]]:
    """The names without dumps of torch's Flight Recorder, and those; also such as lie in folders."""
    found: dict[Path, int] = {}
    logs: list[str] = []
    for name in names:
        path = Path(name)
        inside = [path] if path.is_file() else sorted(path.rglob("*trace_rank*")) if path.is_dir() else []
        dumps = {each: rank for each in inside if (rank := rank_of_dump(each.name)) is not None}
        found |= dumps
        if not dumps or (path.is_dir() and _has_logs(name)):
            logs.append(name)
    return logs, [read_dump(rank, _bytes_of(path)) for path, rank in found.items()]


def _has_logs(folder: str) -> bool:
    try:
        return bool(find_logs([folder]))
    except UsageError:
        return False


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the name") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} is too large for a dump", hint="a dump has some megabytes")
    return data


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
