"""A snapshot, its roll and what ranks do as lines of text: one screen, or the whole of one thing. Pure.

In the summary no list is longer than its place on the screen: the rest is counted. Texts come from the store,
so any client may have written them: a terminal obeys nothing in a line.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, TypeVar

from rallypoint.frames import Stack
from rallypoint.launch.stacks import words
from rallypoint.launch.stacks.activity import RankActivity
from rallypoint.launch.stacks.frames import fold
from rallypoint.launch.stacks.progress import NO_ACTIVITY, JobActivity
from rallypoint.store.rollcall.clients import gather
from rallypoint.store.rollcall.identity import Role, Source
from rallypoint.store.rollcall.plan import JobRound
from rallypoint.store.rollcall.roll import (
    Awaited,
    Gathering,
    MachineRanks,
    RankState,
    Roll,
    Standing,
    headline,
    owed_text,
    waiting_text,
)
from rallypoint.store.rollcall.snapshot import Key, Mishap, Replication, Snapshot, Upstream
from rallypoint.text import (
    LONGEST_KEY,
    LONGEST_SENTENCE,
    counted,
    duration,
    fine_duration,
    named_ranks,
    ranks_text,
    rate,
    shown,
    size,
)

_HEADLINE_ROWS: Final = 4
_WAIT_ROWS: Final = 5
_BARRIER_ROWS: Final = 2
_MACHINE_ROWS: Final = 4
_ROUND_ROWS: Final = 2
_REMARK_ROWS: Final = 2
_NAME_ROWS: Final = 20
_MARGIN: Final = 10
_HOSTS_SHOWN: Final = 3
_KINDS_SHOWN: Final = 3
_PLACES_SHOWN: Final = 5
_LONGEST_REMARK: Final = 300
_STALL_LINES: Final = 200
_MOST_GROUPS: Final = 24
_MOST_FRAMES: Final = 20
_MOST_THREADS: Final = 16

_STATES: Final = {**{state: state.value for state in RankState}, RankState.UNSEEN: "not seen"}
_KNOWN_BY: Final = {
    Source.HELLO: "it said so itself",
    Source.PROCESS: "the environment of its process says so",
    Source.KEYS: "it wrote a key that only this rank writes",
    Source.NONE: "",
}

_T = TypeVar("_T")


# One screen


def first_line(roll: Roll, job: JobActivity) -> str:
    """The headline; if all ranks are here and the job stalls, first what holds it up."""
    why = words.standstill(job) if not (roll.trouble or roll.missing or roll.unseen) else ""
    stalled = f"no progress for {duration(job.idle_seconds)}: {why}; " if why else ""
    return stalled + headline(roll)


def summary(
    snapshot: Snapshot,
    roll: Roll,
    width: int | None = None,
    *,
    head: str = "",
    job: JobActivity = NO_ACTIVITY,
) -> list[str]:
    """All that matters, for a screen of 24 lines; they end at the width, if there is one.

    `head` is where the server of a relay is, if that is known; `job` is what the ranks do.
    """
    text = first_line(roll, job)
    rows = [text] if width is None else textwrap.wrap(text, width, break_on_hyphens=False)
    if len(rows) > _HEADLINE_ROWS:
        rows = [*rows[: _HEADLINE_ROWS - 1], f"{rows[_HEADLINE_ROWS - 1]} ..."]
    return [cut(line, width) for line in (*rows, "", *_sections(snapshot, roll, head))]


def _sections(snapshot: Snapshot, roll: Roll, head: str) -> Iterator[str]:
    states = {each.rank: each.state for each in roll.ranks}
    away = {each.rank for each in roll.ranks if not each.is_here}
    yield from _section("waits", roll.awaited, lambda each: _wait_row(roll, each), _WAIT_ROWS)
    yield from _section("barriers", roll.gatherings, _barrier_row, _BARRIER_ROWS)
    machines = sorted(roll.machines, key=lambda each: away.isdisjoint(each.ranks))  # these first
    yield from _section("machines", machines, lambda each: _machine_row(each, states), _MACHINE_ROWS)
    yield from _section("rounds", roll.meetings, _meeting_row, _ROUND_ROWS)
    yield from _section("store", [snapshot], _store_row)
    yield from _section("traffic", [snapshot], _traffic_row)
    kept = [snapshot.replication] if snapshot.replication is not None else []
    yield from _section("engine", kept, _engine_row)
    yield from _section("standbys", kept, _standbys_row)
    names = kept[0].stores if kept else snapshot.stores or ()
    yield from _section("stores", names, lambda each: f"--name {shown(each)}", _NAME_ROWS)
    yield from _section("errors", snapshot.errors[-1:], lambda each: _error_row(snapshot, each))
    upstream = [snapshot.upstream] if snapshot.upstream is not None else []
    yield from _section("upstream", upstream, _upstream_row)
    yield from _section(snapshot.kind, [snapshot], lambda each: _about_row(each, head))
    yield from _section("remarks", roll.remarks, _remark_row, _REMARK_ROWS)


def _section(label: str, items: Sequence[_T], row: Callable[[_T], str], most: int = 1) -> Iterator[str]:
    """A label and the rows beside it, up to the most; the last of them counts the rest."""
    fits = len(items) <= most
    rows = [row(each) for each in (items if fits else items[: most - 1])]
    if not fits:
        rows.append(f"and {len(items) - len(rows):,} more")
    for at, text in enumerate(rows):
        yield f"{shown(label) if not at else '':<{_MARGIN}}{text}"


def cut(line: str, width: int | None) -> str:
    """The line, as far as the width goes; None: it has no end."""
    return line if width is None or len(line) <= width else f"{line[: max(width - 3, 0)]}..."


def _wait_row(roll: Roll, each: Awaited) -> str:
    where = "at the barrier" if each.is_barrier else "for"
    seconds = f"{duration(each.seconds)}: " if each.seconds >= 0 else ""
    owed = owed_text(roll, each)
    return f"{seconds}{waiting_text(each)} {where} `{shown(each.key)}`" + (f"; {owed}" if owed else "")


def _barrier_row(each: Gathering) -> str:
    of = f" of {each.size:,}" if each.size >= 0 else ""
    seconds = f", for {duration(each.seconds)}" if each.seconds >= 0 else ""
    missing = f"; missing: {ranks_text(each.missing)}" if each.missing else ""
    return f"`{shown(each.key)}`: {each.arrived:,}{of} arrived{seconds}{missing}"


def _machine_row(machine: MachineRanks, states: dict[int, RankState]) -> str:
    counts = Counter(states[rank] for rank in machine.ranks)
    told = ", ".join(f"{counts[state]:,} {word}" for state, word in _STATES.items() if counts[state])
    name = shown(machine.host) or "machine not known"
    return f"{name}: {named_ranks(machine.ranks)}: {told}"


def _meeting_row(each: JobRound) -> str:
    of = f" of {each.expected:,}" if each.expected >= 0 else ""
    of += f" to {each.most:,}" if each.most > each.expected else ""
    name = f"{shown(each.job)}: " if each.job else ""
    parts = [f"{name}round {each.round}, {len(each.joined):,}{of} machines"]
    store = f"--name {each.name}" if each.name else each.store
    parts += [f"its store: {shown(store)}"] if store else []
    hosts = {"joined": each.joined, "waiting": each.waiting, "spare": each.spares, "lost": each.lost}
    parts += [f"{word}: {_listed(map(shown, names))}" for word, names in hosts.items() if names]
    parts += [f"not fit: {shown(each.sick[-1], LONGEST_SENTENCE)}"] if each.sick else []
    parts += [f"closed: {shown(each.closed)}"] if each.closed else []
    parts += [f"told: {shown(each.told[-1])}"] if each.told else []
    return "; ".join(parts)


def _listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    listed = list(names)
    more = len(listed) - _HOSTS_SHOWN
    return ", ".join([*listed[:_HOSTS_SHOWN], *([f"and {more:,} more"] if more > 0 else [])])


def _store_row(snapshot: Snapshot) -> str:
    queues = f", {counted(snapshot.queue_count, 'queue')}" if snapshot.queue_count else ""
    relays = f", {counted(len(snapshot.relays), 'relay')}" if snapshot.relays else ""
    workers = f"; {counted(snapshot.workers, 'worker')} counted in" if snapshot.workers else ""
    keys = f"{counted(snapshot.key_count, 'key')}, {size(snapshot.stored_bytes)}{queues}; "
    clients = sum(each.who.role is not Role.TOOL for each in snapshot.clients)
    here = f"{counted(clients, 'client')}{relays}{workers}"
    return here if snapshot.kind == "relay" else keys + here  # a relay holds no keys


def _traffic_row(snapshot: Snapshot) -> str:
    timed = [each.p99 for each in snapshot.history if each.p99 >= 0]
    p99 = f"; p99 {fine_duration(timed[-1])}" if timed else ""
    busiest = sorted(snapshot.operations, key=lambda each: -each.per_second)[:_KINDS_SHOWN]
    kinds = [f"{shown(each.name)} {rate(each.per_second)}" for each in busiest if each.per_second]
    total = sum(each.per_second for each in snapshot.operations)
    bulk = f"received {size(snapshot.received)}, sent {size(snapshot.sent)}"
    most = f"; most: {', '.join(kinds)}" if kinds else ""
    return f"{rate(total) if total else '0/s'}{p99}; {bulk}{most}"


def _error_row(snapshot: Snapshot, last: Mishap) -> str:
    ago = duration(snapshot.time - last.time)
    return f"{snapshot.error_count:,}; the last {ago} ago, {shown(last.peer)}: {_remark_row(last.reason)}"


def _engine_row(kept: Replication) -> str:
    """What keeps the store, and how it does; why it does not answer is in the headline."""
    commits = "no record was written yet"
    if kept.commit_p50 >= 0:
        commits = f"commits p50 {fine_duration(kept.commit_p50)}, p99 {fine_duration(kept.commit_p99)}"
    leader = f"leader {shown(kept.leader)}, term {kept.term:,} ({counted(kept.failovers, 'failover')})"
    log = f"{size(kept.log_bytes)} of log since a checkpoint of {size(kept.checkpoint_bytes)}"
    return f"{shown(kept.engine, LONGEST_SENTENCE)}; {leader}; {commits}; {log}"


def _standbys_row(kept: Replication) -> str:
    named = (f"{shown(each.address)} (lag {each.lag:,})" for each in kept.standbys)
    return _listed(named) or "none: nobody would take over"


def _upstream_row(upstream: Upstream) -> str:
    places = ", ".join(map(shown, upstream.places[:_PLACES_SHOWN]))
    if upstream.down_seconds >= 0:
        away = duration(upstream.down_seconds)
        return f"no connection for {away}: {shown(upstream.error or places, LONGEST_SENTENCE)}"
    return shown(upstream.place) + (f", of {places}" if upstream.moves else "")


def _about_row(snapshot: Snapshot, head: str) -> str:
    of = f"of the server {shown(head)}; " if head else ""
    up = f"up {duration(snapshot.seconds)}, last progress {duration(snapshot.quiet_seconds)} ago"
    workers = f" and {counted(len(snapshot.own_workers), 'worker')}" if snapshot.own_workers else ""
    name = f"process {snapshot.pid}{workers} on {shown(snapshot.host)}"
    return f"{of}{up}; {name}, Rallypoint {shown(snapshot.version)}, {shown(snapshot.backend)}"


def _remark_row(text: str) -> str:
    return shown(text, _LONGEST_REMARK)


def stall_lines(text: str) -> list[str]:
    """What a launcher has found out about a job that stands still, as it says it.

    The lines are indented, so that none is taken for one of the summary.
    """
    if not text.strip():
        return []
    lines = text.rstrip().split("\n")
    told = [f"  {shown(line, LONGEST_KEY)}".rstrip() for line in lines[:_STALL_LINES]]
    more = [f"  and {len(lines) - _STALL_LINES:,} more lines"] if len(lines) > _STALL_LINES else []
    return ["", *told, *more]


# The whole of one thing


def all_waits(roll: Roll) -> list[str]:
    """Every key and barrier that clients wait for."""
    return [_wait_row(roll, each) for each in roll.awaited] or ["nobody waits"]


def all_keys(snapshot: Snapshot) -> list[str]:
    """The keys that were asked for, with their sizes and last writers."""
    if not snapshot.keys:
        return [f"{counted(snapshot.keys_found, 'key')} found"]
    rows = [("size", "last writer", "key"), *map(_key_row, snapshot.keys)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows]
    more = snapshot.keys_found - len(snapshot.keys)
    return [*lines, *([f"and {more:,} more"] if more > 0 else [])]


def _key_row(each: Key) -> tuple[str, str, str]:
    queued = f" in {each.queued:,}" if each.queued else ""
    bulk = f"{size(each.size)}{queued}" if each.size >= 0 else f"{each.queued:,} queued"
    return bulk, shown(each.writer_is) or "not known", shown(each.key, LONGEST_KEY)


def one_rank(snapshot: Snapshot, roll: Roll, rank: int) -> list[str]:
    """All that is known about a rank."""
    standing = roll.standing(rank)
    if standing is None:
        return [f"rank {rank}: the store knows nothing of it", *map(_remark_row, roll.remarks)]
    presences = [each.client for each in gather(snapshot).by_rank.get(rank, [])]
    rows = {
        "machine": [_machine_of(standing)],
        "known": [_KNOWN_BY[standing.source]] if _KNOWN_BY[standing.source] else [],
        "clients": [f"{shown(each.peer)}, connected {duration(each.seconds)} ago" for each in presences],
        "traffic": [_traffic_of(standing)] if presences else [],
        "waits": [f"for `{shown(key)}`" for key in standing.waits],
        "owes": [f"`{shown(each.key)}`: {_waiters(each)}" for each in roll.awaited if each.owed_by == rank],
    }
    return [f"rank {rank}: {_state_text(standing)}", *_whole_sections(rows)]


def _whole_sections(rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    return chain.from_iterable(_section(label, texts, str, len(texts)) for label, texts in rows.items())


def _state_text(each: Standing) -> str:
    if each.state is RankState.LATE:
        return "late: it is expected, and has not come"
    if each.state is RankState.UNSEEN:
        return "not seen: it is expected, and may be one of the clients whose rank is not known"
    if each.state is RankState.GONE:
        ago = f" {duration(each.seconds)} ago" if each.seconds >= 0 else ""
        return f"gone{ago}" + (f": {_remark_row(each.why)}" if each.why else "")
    if each.state is RankState.WAITING:
        return f"here, and waiting for {duration(each.wait_seconds)}"
    return "here"


def _machine_of(each: Standing) -> str:
    process = f", process {each.pid}" if each.pid else ""
    local = f", local rank {each.local_rank}" if each.local_rank >= 0 else ""
    return f"{shown(each.host) or 'not known'}{process}{local}"


def _traffic_of(each: Standing) -> str:
    bulk = f"received {size(each.received)}, sent {size(each.sent)}"
    return f"{counted(each.operations, 'operation')}; {bulk}, as the store sees it"


def _waiters(each: Awaited) -> str:
    verb = "waits" if len(each.ranks) + each.others == 1 else "wait"
    seconds = f" for {duration(each.seconds)}" if each.seconds >= 0 else ""
    return f"{waiting_text(each)} {verb}{seconds}"


# What ranks do


def all_lines(job: JobActivity, *, with_summary: bool, with_threads: bool = False) -> list[str]:
    """What most do and who is elsewhere; then, of each group, the rank that is stillest.

    Without the summary for a job that stands still: what was found out about that has been printed.
    """
    if job.main is None:
        return ["what the ranks do is not known: no launcher tells"]
    groups = job.groups
    named = [*groups[: _MOST_GROUPS - 1], groups[-1]] if len(groups) > _MOST_GROUPS else groups
    lines = words.summary_lines(job) if with_summary else []
    for each in named:
        example = each.example
        of = f"; here rank {example.rank}" if len(each.members) > 1 else ""
        facts = ", ".join(words.facts_lines(example))
        lines += ["", f"{words.headline(each)}{of}", *([f"  {facts}"] if facts else [])]
        if example.stack and example.stack_seconds >= 0:
            lines.append(f"  its stack of {duration(example.stack_seconds)} ago:")
        lines += [*_stack(example.stack), *_family(example, with_threads)]
    if len(groups) > len(named):
        lines += ["", f"and {counted(len(groups) - len(named), 'other place')}"]
    return lines


def rank_lines(job: JobActivity, rank: int) -> list[str]:
    """What one rank does; nothing if no launcher tells."""
    activity = job.member(rank)
    if activity is None:
        return []
    where = words.chain_text(fold(activity.stack)) if activity.stack else "it has not told its stack yet"
    if activity.stack and activity.stack_seconds >= 0:
        where = f"{words.last_seen(activity)} in {where}"
    rows = {
        "does": [where, *_remarks(activity)],
        "system": words.facts_lines(activity),
        "stack": words.stack_lines(activity.stack),
    }
    return [*_whole_sections(rows), *_family(activity, with_threads=True)]


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
        told = words.facts_text(child.facts)
        head = f"its process {child.pid}{f': {told}' if told else ''}"
        yield from ("", head, *_stack(child.stack))


def _remarks(activity: RankActivity) -> Iterator[str]:
    if activity.ended:
        yield f"it has ended: {shown(activity.ended, LONGEST_SENTENCE)}"
    if activity.still_seconds >= words.STILL_SECONDS and not activity.ended:
        yield f"it has not moved for {duration(activity.still_seconds)}"
    if activity.silent_seconds >= 0:
        yield f"it has not answered for {duration(activity.silent_seconds)}"
    if activity.step >= 0:
        ago = f", {duration(activity.step_seconds)} ago" if activity.step_seconds >= 0 else ""
        speed = f"; {rate(activity.steps_per_second)}" if activity.steps_per_second >= 0 else ""
        yield f"step {activity.step:,}{ago}{speed}"


def _stack(stack: Stack) -> list[str]:
    lines = [f"  {line}" for line in words.stack_lines(stack[:_MOST_FRAMES])] or ["  its stack is not known"]
    more = len(stack) - _MOST_FRAMES
    return [*lines, f"  and {counted(more, 'more frame')}"] if more > 0 else lines
