"""What ranks are doing, in words. Pure. Names and paths come from elsewhere: all go through `shown`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from rallypoint.frames import Frame
from rallypoint.launch.stacks.activity import Child, MachineActivity, ProcessFacts, RankActivity
from rallypoint.launch.stacks.flight_recorder import Dump, as_lines, compare
from rallypoint.launch.stacks.frames import Doing, file_name, fold, is_library
from rallypoint.launch.stacks.progress import Group, JobActivity
from rallypoint.text import LONGEST_SENTENCE, counted, duration, joined_by_and, named_ranks, shown, size

_CHAIN: Final = 3
_MOST_ODD: Final = 8
_MOST_HOSTS: Final = 3
_MOST_THREADS: Final = 3
STILL_SECONDS: Final = 1.0
"""Who has stood still for less than this may just as well have moved."""
_LONG_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 20.0
"""Two samples. A launcher waits for longer before it reports a stall."""
_ORDINARY: Final = ("sleeps", "runs")


def summary_lines(job: JobActivity) -> list[str]:
    """What most ranks do, and who is elsewhere: the first line, and one or more for each odd group."""
    if job.main is None:
        return ["nothing is known of what the ranks do"]
    first = f"{_how_many(job)} {_verb(job.main)} {_place(job.main)}{_lasting(job.main)}"
    silent = [f"nothing is known of {named_ranks(job.unknown)}"] if job.unknown else []
    if not job.odd:
        riddle = ": do sizes or order differ, or is the network cut?" if _is_riddle(job) else ""
        return [f"{first}; {silent[0] if silent else f'no rank is elsewhere{riddle}'}"]
    if len(job.odd) == 1:
        [odd] = job.odd
        who = f"{who_text(odd)} {_is_elsewhere(odd)}:"
        return [f"{first}; {who}", *(f"  {line}" for line in group_lines(odd)), *silent]
    count = _count(job.odd)
    lines = [f"{first}; {counted(count, 'rank')} {'is' if count == 1 else 'are'} elsewhere:"]
    for each in job.odd[:_MOST_ODD]:
        inner = list(group_lines(each))
        ended = f" {_is_elsewhere(each)}:" if each.ended or each.is_silent else ":"
        lines += [f"  {who_text(each)}{ended} {inner[0]}", *(f"    {line}" for line in inner[1:])]
    if rest := job.odd[_MOST_ODD:]:
        lines.append(f"  and {counted(_count(rest), 'rank')} at {counted(len(rest), 'other place')}")
    return [*lines, *silent]


def _count(groups: Sequence[Group]) -> int:
    return sum(len(each.members) for each in groups)


def _is_riddle(job: JobActivity) -> bool:
    """Whether all wait for each other, and have for long."""
    main = job.main
    if main is None or not main.doing.waits or len(main.members) == 1:
        return False
    return main.still_seconds >= _LONG_SECONDS


def standstill(job: JobActivity) -> str:
    """Who holds up a job that makes no progress, in a line; nothing while it makes some."""
    if job.main is None or not job.is_stalled(_QUIET_SECONDS):
        return ""
    if not job.odd:
        return summary_lines(job)[0]
    first, *others = job.odd
    more = f"; {counted(_count(others), 'more rank')} elsewhere" if others else ""
    return f"{who_text(first)} {_is_elsewhere(first)}: {chain_text(first.doing) or 'no stack yet'}{more}"


def stall_lines(job: JobActivity) -> list[str]:
    """The report of a job that stands still."""
    dumps = [Dump.of(each.rank, each.recorded) for each in job.members if each.recorded]
    return [*summary_lines(job), *(as_lines(dumps, compare(dumps)) if dumps else [])]


def last_place(machine: MachineActivity, rank: int) -> list[str]:
    """Where one rank was seen last; nothing if it was not."""
    stack = next((each.stack for each in machine.ranks if each.rank == rank), ())
    return [f"rank {rank} was last seen in {chain_text(fold(stack))}"] if stack else []


def headline(group: Group) -> str:
    """Who is in this group, and where, for how long."""
    return f"{who_text(group)} {_verb(group)} {_place(group)}{_lasting(group)}"


def group_lines(group: Group) -> Iterator[str]:
    """Where the ranks of a group are, for how long, and the facts of the one that has stood still longest."""
    example = group.example
    doing = group.doing
    chain = chain_text(doing) if doing.own or doing.call else "it has not told its stack yet"
    if group.ended:
        yield f"{last_seen(example)} in {chain}{_step(group)}"
        return
    # The call of one that waits for others is known; the system call beneath it adds nothing.
    facts = facts_text(replace(example.facts, call="") if doing.waits else example.facts)
    if group.is_silent:
        silent = f"has not answered for {duration(max(example.silent_seconds, 0.0))}"
        yield f"{f'{facts}, ' if facts else ''}{silent}; {last_seen(example)} in {chain}{_step(group)}"
        return
    yield f"{chain}{_step(group)}{_lasting(group)}{f': {facts}' if facts else ''}"
    yield from _family_lines(example)


def chain_text(doing: Doing) -> str:
    """`load_batch (data.py:88) <- train (train.py:33)`."""
    own = [each for each in doing.own if each.function != "<module>"] or list(doing.own)
    names = [_frame(each) for each in own[:_CHAIN]]
    return " <- ".join([shown(doing.call), *names] if doing.call else names)


def last_seen(each: RankActivity) -> str:
    """`last seen 12 s ago`: how old the stack of a rank is that has not answered since."""
    return f"last seen {duration(each.stack_seconds)} ago" if each.stack_seconds >= 0 else "last seen"


def stack_lines(stack: Sequence[Frame]) -> list[str]:
    """All frames, the innermost first, each in a line."""
    width = max((len(shown(each.function)) for each in stack), default=0)
    return [
        f"{shown(each.function).ljust(min(width, 40))}  {shown(each.file, LONGEST_SENTENCE)}"
        + (f":{each.line}" if each.line else "")
        for each in stack
    ]


def facts_lines(each: RankActivity) -> list[str]:
    """What the system knows of a rank."""
    facts = each.facts
    told = [facts.state, facts.call, facts.gpu]
    if facts.memory > 0:
        swap = f" ({size(facts.swapped)} swapped out)" if facts.swapped > 0 else ""
        told.append(f"{size(facts.memory)} of memory{swap}")
    if facts.cores >= 0:
        told.append(f"{facts.cores:.0%} of a core")
    return [shown(text, LONGEST_SENTENCE) for text in told if text]


def _how_many(job: JobActivity) -> str:
    assert job.main is not None
    count, size = len(job.main.members), len(job.members)
    if count == size:
        return f"all {count:,} ranks" if count > 1 else who_text(job.main)
    return f"{count:,} of {size:,} ranks"


def _verb(group: Group) -> str:
    if group.ended or group.is_silent:
        return f"{_is_elsewhere(group)}, {last_seen(group.example)} in"
    one = len(group.members) == 1
    if group.doing.waits:
        return "waits in" if one else "wait in"
    return "is in" if one else "are in"


def _place(group: Group) -> str:
    """`all_reduce (train.py:41, step 1,204)`."""
    doing = group.doing
    if not doing.own:
        return shown(doing.call) or "a place that is not known"
    where = _where(doing.own[0])
    step = _step(group).removeprefix(", ")
    inner = f"{where}, {step}" if step else where
    return f"{shown(doing.call) or shown(doing.own[0].function)} ({inner})"


def _step(group: Group) -> str:
    first, last = group.steps
    if first < 0:
        return ""
    return f", step {first:,}" if first == last else f", steps {first:,} to {last:,}"


def _lasting(group: Group) -> str:
    seconds, is_past = group.still_seconds, bool(group.ended) or group.is_silent
    return f", for {duration(seconds)}" if seconds >= STILL_SECONDS and not is_past else ""


def who_text(group: Group) -> str:
    """`rank 2 on node-b`, `ranks 0, 1 and 3`."""
    hosts = list(dict.fromkeys(group.hosts.values()))
    on = f" on {joined_by_and([shown(each) for each in hosts])}" if len(hosts) <= _MOST_HOSTS else ""
    return f"{named_ranks(group.ranks)}{on}"


def _is_elsewhere(group: Group) -> str:
    one = len(group.members) == 1
    if group.ended:
        return f"{'has' if one else 'have'} ended ({shown(group.ended)})"
    if group.is_silent:
        return f"{'does' if one else 'do'} not answer"
    return f"{'is' if one else 'are'} elsewhere"


def facts_text(facts: ProcessFacts) -> str:
    """The facts that explain why a process stands still; figures are rough, so that they seldom change."""
    told = [facts.state] if facts.state not in _ORDINARY else []
    told.append(facts.call)
    if facts.computes:
        told.append(f"runs, at {round(facts.cores, 1):.0%} of a core" if facts.cores >= 0 else "runs")
    if facts.swapped > 0:
        told.append(f"{size(facts.swapped)} swapped out")
    told.append(facts.gpu)
    return ", ".join(shown(each, LONGEST_SENTENCE) for each in told if each)


def _family_lines(each: RankActivity) -> Iterator[str]:
    """The thread that holds the GIL; other threads that are in the user's own code; its processes."""
    if each.lock_holder:
        holder = chain_text(fold(each.lock_holder))
        yield f"another thread of rank {each.rank} holds the interpreter lock (GIL): {holder}"
    own = (fold(stack) for stack in each.threads if stack != each.lock_holder)
    # Of a thread without any frame of the user's, `fold` gives its innermost one.
    threads = [doing for doing in own if not all(map(is_library, doing.own))]
    for doing in dict.fromkeys(threads[:_MOST_THREADS]):
        yield f"another thread of rank {each.rank}: {chain_text(doing)}"
    for child in each.children[:_MOST_THREADS]:
        yield f"its process {child.pid}: {_child_text(child)}"


def _child_text(child: Child) -> str:
    where = chain_text(fold(child.stack)) if child.stack else "its stack is not known"
    told = facts_text(child.facts)
    return f"{where}: {told}" if told else where


def _frame(frame: Frame) -> str:
    return f"{shown(frame.function)} ({_where(frame)})"


def _where(frame: Frame) -> str:
    return f"{shown(file_name(frame)) or '?'}:{frame.line or '?'}"
