"""`rallypoint stacks`: what each rank of a job is doing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from rallypoint.cli.command import JSON, Argument, command
from rallypoint.cli.signals import ChangedLines, check_watch, repeat, signals_as_interrupts, until_ctrl_c
from rallypoint.client.snapshots import fetch_job_snapshot, fetch_snapshot
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.endpoint import Endpoints, parse_store
from rallypoint.launch.stacks.progress import (
    JobActivity,
    awaited_keys,
    machine_activities,
    only,
    put_together,
)
from rallypoint.store.connect.connecting import first_to_answer
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.watch.status.report import activity_content, essence
from rallypoint.watch.status.views import all_lines, stall_lines

_ANSWER_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 2.0
_NOTHING: Final = "no launcher tells what the ranks do there"
_HINT: Final = (
    "ranks are looked at every ten seconds, if `rallypoint run` or torchrun with --rdzv-backend=rallypoint "
    "has started them, without --stacks=off; `py-spy dump --pid PID` works everywhere"
)


@command(
    Argument("store", metavar="HOST:PORT", variable="RALLYPOINT_STORE", help="The job's store, or a relay."),
    Argument("--ranks", metavar="LIST", default="", help="Only these ranks: 0-7,12."),
    Argument("--all-threads", action="store_true", help="The other threads, too, where Python answers."),
    Argument("--watch", action="store_true", help="Show it again whenever something changes, until Ctrl-C."),
    JSON,
)
def stacks(store: str, ranks: str, all_threads: bool, watch: bool, as_json: bool) -> int:
    """Show what each rank of a job is doing: ranks that do the same together, the odd ones first.

    The stacks are those of the last look of each machine's launcher, at most ten seconds ago. It only reads.
    Exit 1 if the job stands still, or if nobody tells.
    """
    check_watch(watch, as_json)
    places, wanted = parse_store(store, "the store"), _ranks(ranks)
    if not watch:
        with signals_as_interrupts():
            return _show(places, wanted, all_threads, as_json)
    changes = ChangedLines()
    with until_ctrl_c():
        repeat(lambda: _show_changes(changes, places, wanted, all_threads), _PAUSE_SECONDS)
    return 0


def _show(places: Endpoints, wanted: Sequence[range], all_threads: bool, as_json: bool) -> int:
    job, stall = _read(places, wanted)
    if job.main is None:
        raise RallypointError(f"{_NOTHING}: {places}", hint=_HINT)
    if as_json:
        print(json.dumps({"stall": stall, **activity_content(job)}))
    else:
        print("\n".join(_lines(job, stall, all_threads)))
    return 1 if stall else 0


def _show_changes(
    changes: ChangedLines, places: Endpoints, wanted: Sequence[range], all_threads: bool
) -> None:
    try:
        job, stall = _read(places, wanted)
    except RallypointError as error:
        changes.miss(error)
    else:
        changes.show((essence(job), stall), _lines(job, stall, all_threads))


def _read(places: Endpoints, wanted: Sequence[range]) -> tuple[JobActivity, str]:
    snapshot = first_to_answer(places, _read_snapshot)
    machines = machine_activities(snapshot)
    if wanted:
        machines = only(machines, wanted)
    return put_together(machines, awaited_keys(snapshot)), snapshot.stall


def _read_snapshot(host: str, port: int, store: str = "") -> Snapshot:
    """The job's store. A relay only knows its own machine: from there, the store is looked up."""
    question, deadline = Question(), Deadline(_ANSWER_SECONDS)
    found = (
        fetch_snapshot(host, port, question, deadline, store)
        if store
        else fetch_job_snapshot(host, port, question, deadline)
    )
    upstream = found.upstream
    if upstream is None:
        return found
    try:
        return first_to_answer(
            upstream.addresses, lambda host, port: _read_snapshot(host, port, upstream.store)
        )
    except RallypointError as error:
        raise RallypointError(
            f"{format_address(host, port)} is a relay, and the job's store behind it cannot be reached: "
            f"{error.message}",
            hint="run this on a machine that reaches the store, or give the store's HOST:PORT",
        ) from error


def _lines(job: JobActivity, stall: str, all_threads: bool) -> list[str]:
    """The summary of a job that stands still is that of the moment; below it is what is so now."""
    told = ["the job stands still:", *stall_lines(stall)] if stall else []
    return [*told, *all_lines(job, with_summary=not stall, with_threads=all_threads)]


def _ranks(text: str) -> list[range]:
    """`0-7,12`; nothing for all."""
    found = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None:
            raise UsageError(f"--ranks is {text!r}", hint="write numbers and ranges: 0-7,12")
        found.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found
