"""`rallypoint explain`: what the logs of a failed job say."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rallypoint.cli.command import JSON, Argument, command
from rallypoint.cli.printing import print_rows, progress_bar
from rallypoint.errors import UsageError
from rallypoint.explain import Explanation, Source
from rallypoint.explain import explain as explain_logs
from rallypoint.explain.events import Entry, Event
from rallypoint.explain.knowledge import knowledge
from rallypoint.explain.reading import Opener, find_logs
from rallypoint.explain.report import WIDTH, as_text
from rallypoint.explain.report import as_json as document_of
from rallypoint.launch.stacks.flight_recorder import (
    MOST_BYTES,
    Dump,
    as_document,
    as_events,
    as_lines,
    compare,
    rank_of_dump,
    read_dump,
)

_WIDEST = 120
"""Longer lines are hard to read, however wide the terminal is."""


@command(
    Argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="Logs of one job, dumps of torch's Flight Recorder, or folders; - or none: standard input.",
    ),
    Argument(
        "--all", dest="everything", action="store_true", help="Also show what followed, and the reasons."
    ),
    Argument("--list", dest="as_list", action="store_true", help="List everything that the explainer knows."),
    JSON,
)
def explain(files: list[str], everything: bool, as_list: bool, as_json: bool) -> int:
    """Find the first failure in the logs of a job: who failed, where, why, and what to do.

    Exit 1 if something is wrong, 0 if nothing is.
    """
    if as_list:
        if files:
            raise UsageError("--list takes no files", hint="leave out one of them")
        _print_list(as_json)
        return 0
    names, dumps = _without_dumps(files)
    differences = compare(dumps)
    found = _read(names or ([] if dumps else ["-"]), list(as_events(differences)))
    if as_json:
        flight = {"flight": as_document(dumps, differences)} if dumps else {}
        print(json.dumps({**document_of(found), **flight}, indent=2))
    else:
        parts = ["\n".join(as_lines(dumps, differences))] if dumps else []
        parts += [as_text(found, _width(), everything=everything)] if names or not dumps else []
        print("\n\n".join(parts))
    return 1 if found.found else 0


def _width() -> int:
    columns = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    return min(columns, _WIDEST)


def _without_dumps(names: Sequence[str]) -> tuple[list[str], list[Dump]]:
    """The names without dumps of torch's Flight Recorder, and those; also such as lie in folders."""
    found: dict[Path, int] = {}
    logs: list[str] = []
    for name in names:
        path = Path(name)
        is_folder = os.path.isdir(name)  # unlike a Path, it takes any name
        inside = sorted(path.rglob("*trace_rank*")) if is_folder else [path]
        dumps = {each: rank for each in inside if (rank := rank_of_dump(each.name)) is not None}
        found |= dumps
        if not dumps or (is_folder and _has_logs(name)):
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


def _read(names: Sequence[str], reported: Sequence[Event]) -> Explanation:
    """What the logs say, together with what was reported beside them."""
    if names == ["-"] and sys.stdin.isatty():
        raise UsageError(
            "there is no log to read", hint="name a file, or pipe one in: rallypoint explain train.log"
        )
    paths = find_logs([name for name in names if name != "-"])
    opener = Opener()
    sources = [opener.open(path) for path in paths]
    if "-" in names:
        sources.append(opener.stream(sys.stdin.buffer))
    found = _with_progress(sources, _total_of(paths) if "-" not in names else None, reported)
    if sources and len(opener.unreadable) == len(sources):
        name, reason = opener.unreadable[0]
        raise UsageError(f"cannot read {name}: {reason}", hint="name the logs of the job")
    return replace(found, unreadable=tuple(opener.unreadable))


def _total_of(paths: Iterable[Path]) -> int | None:
    """The number of bytes to be read, if that is known."""
    plain = all(path.suffix != ".gz" and path.is_file() for path in paths)
    return sum(path.stat().st_size for path in paths) if plain else None


def _with_progress(sources: Iterable[Source], total: int | None, reported: Sequence[Event]) -> Explanation:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    with progress_bar(TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task("", total=total)
        return explain_logs(sources, reported, lambda size: bar.advance(task, size))


def _print_list(as_json: bool) -> None:
    entries = knowledge().entries
    if as_json:
        print(json.dumps([_entry_json(entry) for entry in entries], indent=2))
    else:
        print_rows([(entry.id, entry.role, entry.title) for entry in entries])


def _entry_json(entry: Entry) -> dict[str, object]:
    lists = {name: list(getattr(entry, name)) for name in ("do", "sources")}
    sets = {name: sorted(getattr(entry, name)) for name in ("by", "heard")}
    texts = {name: getattr(entry, name) for name in ("id", "role", "title", "example", "why")}
    return {**texts, **lists, **sets, "patterns": [each.pattern for each in entry.patterns]}
