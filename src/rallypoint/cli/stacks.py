"""`rallypoint stacks`: what each rank of a job is doing."""

from __future__ import annotations

import json
import re
import time
from typing import Any, Final

from rallypoint.cli.command import JSON, Argument, command
from rallypoint.cli.signals import signals_as_interrupts
from rallypoint.codec import to_json
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.endpoint import Endpoint, parse_place
from rallypoint.rollcall.question import Question
from rallypoint.stacks.activity import RankActivity
from rallypoint.stacks.folding import is_library
from rallypoint.stacks.grouping import Group, Work, machines_of, only, put_together
from rallypoint.stacks.words import facts_lines, headline, stack_lines, summary_lines
from rallypoint.stores.client.deadline import Deadline
from rallypoint.stores.client.look import look
from rallypoint.text import printable_lines, shown

_ANSWER_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 2.0
_NOTHING: Final = "no launcher tells what the ranks do there"
_HINT: Final = (
    "ranks are looked at every ten seconds, if `rallypoint run` or torchrun with --rdzv-backend=rallypoint "
    "has started them, without --stacks=off, and not on Windows; `py-spy dump --pid PID` works everywhere"
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
    place, wanted = parse_place(store, "the store"), _ranks(ranks)
    with signals_as_interrupts():
        if not watch:
            return _show(place, wanted, all_threads, as_json)
        try:
            _watch(place, wanted, all_threads)
        except KeyboardInterrupt as stop:
            if stop.args:
                raise
        return 0  # Ctrl-C is how it is meant to end


def _show(place: Endpoint, wanted: frozenset[int] | None, all_threads: bool, as_json: bool) -> int:
    work, stall = _ask(place, wanted)
    if work.main is None:
        raise RallypointError(f"{_NOTHING}: {place}", hint=_HINT)
    if as_json:
        print(json.dumps({"stall": stall, "groups": [_content(each) for each in work.groups]}))
    else:
        print("\n".join(_lines(work, stall, all_threads)))
    return 1 if stall else 0


def _watch(place: Endpoint, wanted: frozenset[int] | None, all_threads: bool) -> None:
    before: list[str] = []
    while True:
        try:
            work, stall = _ask(place, wanted)
            lines = _lines(work, stall, all_threads)
        except RallypointError as error:
            lines = [f"no answer: {shown(error.message, 500)}"]
        # Times alone are no news.
        if [re.sub(r"\d+", "", line) for line in lines] != [re.sub(r"\d+", "", line) for line in before]:
            print(time.strftime("%H:%M:%S"), *lines, "", sep="\n", flush=True)
        before = lines
        time.sleep(_PAUSE_SECONDS)


def _ask(place: Endpoint, wanted: frozenset[int] | None) -> tuple[Work, str]:
    snapshot = look(*place, Question(), Deadline(_ANSWER_SECONDS))
    machines = machines_of(snapshot)
    return put_together(machines if wanted is None else only(machines, wanted)), snapshot.stall


def _lines(work: Work, stall: str, all_threads: bool) -> list[str]:
    if work.main is None:
        return [_NOTHING]
    lines = ["the job stands still:", *printable_lines(stall).splitlines(), ""] if stall else []
    if not stall:
        lines += [*summary_lines(work), ""]
    for group in work.groups:
        lines += [headline(group), *(f"  {line}" for line in facts_lines(group.example))]
        lines += [f"    {line}" for line in _stack(group.example)]
        if all_threads:
            for stack in group.example.threads:
                lines += ["  another thread:", *(f"    {line}" for line in stack_lines(stack))]
        for child in group.example.children:
            lines += [f"  its process {child.pid}:", *(f"    {line}" for line in stack_lines(child.stack))]
        lines.append("")
    return [*lines[:-1], *(["", *(shown(each, 500) for each in work.remarks)] if work.remarks else [])]


def _stack(example: RankActivity) -> list[str]:
    return stack_lines(example.stack) or ["its stack is not known"]


def _content(group: Group) -> dict[str, Any]:
    doing = group.doing
    return {
        "ranks": group.ranks,
        "hosts": group.hosts,
        "call": doing.call,
        "waits": doing.waits,
        "ended": group.ended,
        "own": [to_json(each) for each in group.example.stack if not is_library(each)],
        "members": [to_json(each) for each in group.members],
    }


def _ranks(text: str) -> frozenset[int] | None:
    """`0-7,12`; None for all."""
    if not text:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        if match is None:
            raise UsageError(f"--ranks is {text!r}", hint="write numbers and ranges: 0-7,12")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)
