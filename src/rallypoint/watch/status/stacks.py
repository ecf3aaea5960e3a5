"""What the ranks do, as lines and as JSON: all of them, by what they do, or one. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from rallypoint.codec import to_json
from rallypoint.frames import Frame
from rallypoint.launch.stacks.activity import RankActivity
from rallypoint.launch.stacks.frames import fold
from rallypoint.launch.stacks.progress import Group, JobActivity
from rallypoint.launch.stacks.words import (
    STILL_SECONDS,
    chain_text,
    facts_lines,
    facts_text,
    headline,
    last_seen,
    stack_lines,
    summary_lines,
)
from rallypoint.text import LONGEST_SENTENCE, counted, duration, rate, shown
from rallypoint.watch.status.summary import section

_MOST_GROUPS: Final = 24
_MOST_FRAMES: Final = 20
_MOST_THREADS: Final = 16


def all_lines(job: JobActivity, *, with_summary: bool, with_threads: bool = False) -> list[str]:
    """What most do and who is elsewhere; then, of each group, the rank that is stillest.

    Without the summary for a job that stands still: what was found out about that has been printed.
    """
    if job.main is None:
        return ["what the ranks do is not known: no launcher tells"]
    groups = job.groups
    named = [*groups[: _MOST_GROUPS - 1], groups[-1]] if len(groups) > _MOST_GROUPS else groups
    lines = summary_lines(job) if with_summary else []
    for each in named:
        example = each.example
        of = f"; here rank {example.rank}" if len(each.members) > 1 else ""
        facts = ", ".join(facts_lines(example))
        lines += ["", f"{headline(each)}{of}", *([f"  {facts}"] if facts else [])]
        if example.stack and example.stack_seconds >= 0:
            lines.append(f"  its stack of {duration(example.stack_seconds)} ago:")
        lines += [*_stack(example.stack), *_family(example, with_threads)]
    if len(groups) > len(named):
        lines += ["", f"and {counted(len(groups) - len(named), 'other place')}"]
    return lines


def rank_lines(job: JobActivity, rank: int) -> list[str]:
    """What one rank does; nothing if no launcher tells."""
    activity = _find(job, rank)
    if activity is None:
        return []
    where = chain_text(fold(activity.stack)) if activity.stack else "it has not told its stack yet"
    if activity.stack and activity.stack_seconds >= 0:
        where = f"{last_seen(activity)} in {where}"
    rows = {
        "does": [where, *_remarks(activity)],
        "system": facts_lines(activity),
        "stack": stack_lines(activity.stack),
    }
    lines = (section(label, texts, str, len(texts)) for label, texts in rows.items())
    return [*chain.from_iterable(lines), *_family(activity, with_threads=True)]


def essence(job: JobActivity, rank: int | None) -> Hashable:
    """What of it is news when it changes: who is where, or where one rank is."""
    if rank is None:
        return tuple((tuple(each.ranks), each.doing, each.ended) for each in job.groups)
    activity = _find(job, rank)
    return activity and (fold(activity.stack), activity.ended)


def _family(activity: RankActivity, with_threads: bool) -> Iterator[str]:
    """The thread that holds the GIL; the other threads of a rank, and its processes."""
    if activity.lock_holder:
        yield from ("", "this thread of its process holds the interpreter lock (GIL):")
        yield from _stack(activity.lock_holder)
    threads = activity.threads if with_threads else ()
    for at, thread in enumerate(threads[:_MOST_THREADS]):
        yield from ("", f"thread {at + 2} of its process:", *_stack(thread))
    if (more := len(threads) - _MOST_THREADS) > 0:
        yield from ("", f"and {counted(more, 'more thread')}")
    for child in activity.children:
        told = facts_text(child.facts)
        head = f"its process {child.pid}{f': {told}' if told else ''}"
        yield from ("", head, *_stack(child.stack))


def _remarks(activity: RankActivity) -> Iterator[str]:
    if activity.ended:
        yield f"it has ended: {shown(activity.ended, LONGEST_SENTENCE)}"
    if activity.still_seconds >= STILL_SECONDS and not activity.ended:
        yield f"it has not moved for {duration(activity.still_seconds)}"
    if activity.silent_seconds >= 0:
        yield f"it has not answered for {duration(activity.silent_seconds)}"
    if activity.step >= 0:
        ago = f", {duration(activity.step_seconds)} ago" if activity.step_seconds >= 0 else ""
        speed = f"; {rate(activity.steps_per_second)}" if activity.steps_per_second >= 0 else ""
        yield f"step {activity.step:,}{ago}{speed}"


def _stack(stack: Sequence[Frame]) -> list[str]:
    lines = [f"  {line}" for line in stack_lines(stack[:_MOST_FRAMES])] or ["  its stack is not known"]
    more = len(stack) - _MOST_FRAMES
    return [*lines, f"  and {counted(more, 'more frame')}"] if more > 0 else lines


def _find(job: JobActivity, rank: int) -> RankActivity | None:
    members = (each for group in job.groups for each in group.members)
    return next((each for each in members if each.rank == rank), None)


# For JSON


def all_content(job: JobActivity) -> dict[str, Any]:
    """The summary, and all groups, the odd ones first, with all that is told of their ranks."""
    lines = summary_lines(job) if job.main is not None else []
    return {
        "summary": lines,
        "groups": [_group_content(each, each is job.main) for each in job.groups],
    }


def _group_content(group: Group, is_main: bool) -> dict[str, Any]:
    return {
        "ranks": group.ranks,
        "hosts": list(dict.fromkeys(group.hosts.values())),
        "is_main": is_main,
        "still_seconds": group.still_seconds,
        "ended": group.ended,
        **to_json(group.doing),
        "members": [to_json(each) for each in group.members],
    }


def rank_content(job: JobActivity, rank: int) -> dict[str, Any] | None:
    """What is told of a rank; None: nothing."""
    activity = _find(job, rank)
    return to_json(activity) if activity is not None else None
