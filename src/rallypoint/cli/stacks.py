"""`rallypoint stacks`: what each rank of a job is doing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Hashable, Sequence
from typing import Final

from rallypoint.cli.command import JSON, Argument, command
from rallypoint.cli.signals import signals_as_interrupts
from rallypoint.client.look import look, look_at_job
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.endpoint import Endpoints, parse_store
from rallypoint.launch.stacks.grouping import Work, awaited_keys, machines_of, only, put_together
from rallypoint.store.connect.connecting import first_to_answer
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.text import LONGEST_SENTENCE, shown
from rallypoint.watch.status.stacks import all_content, all_lines, essence
from rallypoint.watch.status.summary import stall_lines

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
    if watch and as_json:
        raise UsageError("--watch shows no JSON", hint="ask for --json again and again")
    places, wanted = parse_store(store, "the store"), _ranks(ranks)
    with signals_as_interrupts():
        if not watch:
            return _show(places, wanted, all_threads, as_json)
        try:
            _watch(places, wanted, all_threads)
        except KeyboardInterrupt as stop:
            if stop.args:
                raise
        return 0  # Ctrl-C is how it is meant to end


def _show(places: Endpoints, wanted: Sequence[range], all_threads: bool, as_json: bool) -> int:
    work, stall = _ask(places, wanted)
    if work.main is None:
        raise RallypointError(f"{_NOTHING}: {places}", hint=_HINT)
    if as_json:
        print(json.dumps({"stall": stall, **all_content(work)}))
    else:
        print("\n".join(_lines(work, stall, all_threads)))
    return 1 if stall else 0


def _watch(places: Endpoints, wanted: Sequence[range], all_threads: bool) -> None:
    before: Hashable = None
    while True:
        news: Hashable
        try:
            work, stall = _ask(places, wanted)
            news, lines = (essence(work, None), stall), _lines(work, stall, all_threads)
        except RallypointError as error:
            news, lines = error.message, [f"no answer: {shown(error.message, LONGEST_SENTENCE)}"]
        if news != before:
            print(time.strftime("%H:%M:%S"), *lines, "", sep="\n", flush=True)
        before = news
        time.sleep(_PAUSE_SECONDS)


def _ask(places: Endpoints, wanted: Sequence[range]) -> tuple[Work, str]:
    snapshot = first_to_answer(places, _look)
    machines = machines_of(snapshot)
    if wanted:
        machines = only(machines, wanted)
    return put_together(machines, awaited_keys(snapshot)), snapshot.stall


def _look(host: str, port: int, store: str = "") -> Snapshot:
    """The job's store. A relay only knows its own machine: from there, the store is looked up."""
    question, deadline = Question(), Deadline(_ANSWER_SECONDS)
    found = (
        look(host, port, question, deadline, store) if store else look_at_job(host, port, question, deadline)
    )
    upstream = found.upstream
    if upstream is None:
        return found
    try:
        return first_to_answer(upstream.addresses, lambda host, port: _look(host, port, upstream.store))
    except RallypointError as error:
        raise RallypointError(
            f"{format_address(host, port)} is a relay, and the job's store behind it cannot be reached: "
            f"{error.message}",
            hint="run this on a machine that reaches the store, or give the store's HOST:PORT",
        ) from error


def _lines(work: Work, stall: str, all_threads: bool) -> list[str]:
    """The summary of a job that stands still is that of the moment; below it is what is so now."""
    told = ["the job stands still:", *stall_lines(stall)] if stall else []
    return [*told, *all_lines(work, with_summary=not stall, with_threads=all_threads)]


def _ranks(text: str) -> list[range]:
    """`0-7,12`; nothing for all."""
    found = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None:
            raise UsageError(f"--ranks is {text!r}", hint="write numbers and ranges: 0-7,12")
        found.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found
