"""An explanation as text for a terminal, and as JSON. Pure.

The text answers in this order: who failed and how sure that is, the line and its place, why, what followed,
what to do. By default it has at most 20 lines at 80 columns. Text from a log is cut where it is long, and
printed so that a terminal obeys nothing in it. Commands between backticks are never broken across lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from rallypoint.exits import exit_text, signal_name
from rallypoint.explain.events import Event, Kind, Process, Raised
from rallypoint.explain.knowledge import fill, knowledge
from rallypoint.explain.reported import LAUNCHER
from rallypoint.explain.verdict import Explanation, Verdict
from rallypoint.text import clock, columns, counted, excerpt, named_ranks, printable, short_path, wrapped

WIDTH: Final = 80
_MOST_LINES: Final = 20
_MOST_STEPS: Final = 3
_MOST_ROWS: Final = 20
_MOST_RANKS: Final = 100_000
_TITLES: Final = {
    Kind.ERROR: "the first line that states an error",
    Kind.KILLED: "a process was killed",
    Kind.ENDED: "a process ended with an error",
    Kind.TOLD: "the job was told to end",
    Kind.STALL: "the job makes no progress",
}
_EMPTY: Final = "The log is empty. Launchers write to standard error: `torchrun ... 2>&1 | tee train.log`."
_LOOK: Final = "`py-spy dump --pid PID` shows where a process waits, if it still runs."
_MEETING: Final = re.compile(r"(?i)rendezvous|process.group|\bstore\b|\b(?:ranks|nodes|machines|peers)\b")
_MISSING: Final = "`rallypoint status` names the ranks that are missing, if the store is Rallypoint's."
_AFTERWARDS: Final = {
    "slurm": "`sacct -j JOB --format=JobID,State,ExitCode,MaxRSS` shows how it ended, if it has.",
    "kubernetes": "`kubectl describe pod POD` shows how it ended, if it has.",
    "ray": "`ray status` shows which nodes and resources it has, and which it still needs.",
    "": "`dmesg -T | grep -i killed` shows whether the kernel ended it for its memory.",
}
_SENTENCE: Final = re.compile(r"(?<=[.!?;])\s+|\n")
_REMEDY: Final = re.compile(
    r"(?i)^(?:please |(?:or|and|instead),? |to \w[^,]{0,60}, )?(?:try|use|set|install|upgrade|downgrade|pass"
    r"|update|increase|decrease|reduce|specify|provide|enable|disable|add|remove|make sure|ensure|run|free)\b"
    r"|\bplease (?!report|file|open)|\byou (?:can|need|should|must|have to)\b|\bdid you (?:mean|forget)\b"
)
"""A sentence of an exception's own text that states a remedy."""


def as_text(found: Explanation, width: int = WIDTH, *, everything: bool = False) -> str:
    """The explanation, without a newline at its end. `everything` is for `--all`."""
    for steps in range(_MOST_STEPS, 0, -1):
        lines = list(_answer(found, width, steps))
        if len(lines) <= _MOST_LINES:
            break
    return "\n".join([*lines, *_rest(found, width)] if everything else lines)


def _answer(found: Explanation, width: int, most_steps: int) -> Iterator[str]:
    if found.verdict is not None:
        yield from _failure(found, found.verdict, width, most_steps)
    elif found.stop is not None:
        yield from _stop(found, found.stop, width)
    elif found.lines:
        yield from _nothing(found, width)
    else:
        yield from wrapped(_EMPTY, width, commands=True)
    unread = ", ".join(f"{short_path(name, width - 40)} ({why})" for name, why in found.unreadable)
    yield from _cut(unread, width, 1, "Not read: ")


def _failure(found: Explanation, verdict: Verdict, width: int, most_steps: int) -> Iterator[str]:
    event = verdict.event
    heading = (verdict.certainty, _who([event.process]), title_of(event, verdict.root))
    yield from _cut(": ".join(filter(None, heading)), width, 2)
    yield from _quote(found, verdict.quote, width, event, verdict.root)
    if (became := verdict.became) is not None:
        yield from _cut(f"which became {became.name}: {became.message}", width, 1, "  ")
    if (by := verdict.by) is not None:
        yield from _cut(f"see also line {_line(found, by)}: {by.text}", width, 2, "  ")
    yield from wrapped(why_of(verdict), width, "Why: ", commands=True)
    if verdict.certainty == "consequence" and event.kind is not Kind.KILLED:
        yield from wrapped(elsewhere(found, verdict), width)
    else:
        others = [each for each in found.consequences if each.process and each.process != event.process]
        yield from _cut("; ".join(_rows(others)[:2]), width, 2, "Then: ")
    yield from _numbered(steps_of(found, verdict)[:most_steps], width)


def _quote(
    found: Explanation, quote: Sequence[str], width: int, event: Event, root: Raised | None = None
) -> Iterator[str]:
    """The line or the exception, and where it is: in the code and in the log."""
    raised = root or event.raised
    said, *more = quote
    if columns(said) > 3 * (width - 8):
        said = " ".join(short_path(word, 40) if "/" in word else word for word in said.split())
    rows = [row for text in (said, *more) for row in _cut(text, width, 3, "  | ", "  | ")]
    yield from rows[:3]
    log = f"({_in_log(found, event, root, width - 40)})"
    place = raised.place if raised is not None else None
    at = f"at {short_path(str(place), max(width - 6 - columns(log), 30))} " if place is not None else ""
    yield from _cut(at + log, width, 2, "  ", "  ")


def _in_log(found: Explanation, event: Event, root: Raised | None, most: int) -> str:
    """The place in the log: `train.log, line 812, 14:36:19`. A structured report has none."""
    if event.log == LAUNCHER:
        return "as reported"
    parts = [short_path(found.logs[event.log].name, most), f"line {_line(found, event, root):,}"]
    parts += [clock(event.time)] if event.time is not None and event.raised is None else []
    parts += [f"attempt {event.attempt + 1} of {found.attempts}"] if found.attempts > 1 else []
    return ", ".join(parts)


def _line(found: Explanation, event: Event, root: Raised | None = None) -> int | None:
    """The number of the line as an editor counts it."""
    return None if event.log == LAUNCHER else found.logs[event.log].shown_line((root or event).line)


def _stop(found: Explanation, stop: Event, width: int) -> Iterator[str]:
    where = "in the midst of work" if found.worked is not None else "before any work"
    yield from wrapped(f"No failure in {counted(found.lines, 'line')}, but the log stops {where}:", width)
    yield from _quote(found, [stop.text], width, stop)
    more = [_MISSING] if found.worked is None and _MEETING.search(stop.text) else []
    yield from _numbered([_LOOK, *more, _AFTERWARDS.get(found.launcher, _AFTERWARDS[""])], width)


def _nothing(found: Explanation, width: int) -> Iterator[str]:
    last = f"; last: {found.worked.text}" if found.worked is not None else ", but no sign of work either."
    yield from _cut(f"No failure in {counted(found.lines, 'line')}{last}", width, 1)
    yield from _cut("; ".join(_rows(found.notices)), width, 2, "Harmless: ")


def _rest(found: Explanation, width: int) -> Iterator[str]:
    """What `--all` adds."""
    if found.verdict is not None:
        yield from ("", *wrapped(found.verdict.reason, width, "Chosen because: "))
    told = found.verdict.chain if found.verdict is not None else ()
    sections = {
        "Exceptions, the first one first": [each.headline for each in told] if len(told) > 1 else [],
        "What followed": _rows(found.consequences, found),
        "Harmless": _rows(found.notices),
        "Without effect": [f"{_rows([each])[0]}: {why}" for each, why in found.set_aside.items()],
        "First failures of earlier attempts": [_rows([each])[0] for each in found.earlier],
    }
    for heading, rows in sections.items():
        yield from ("", heading) if rows else ()
        for row in rows[:_MOST_ROWS]:
            yield from _cut(row, width, 2, "  - ")
        yield from [f"  and {len(rows) - _MOST_ROWS:,} more"] if len(rows) > _MOST_ROWS else ()


def _rows(events: Iterable[Event], found: Explanation | None = None) -> list[str]:
    """Each title once: who wrote it, how often, and if asked where first; those of most processes first."""
    by_title: dict[str, list[Event]] = {}
    for event in events:
        title = title_of(event) if event.match or event.raised or event.code else event.text.strip()
        by_title.setdefault(excerpt(title, 120), []).append(event)
    rows = []
    for title, group in sorted(by_title.items(), key=lambda item: -len({each.process for each in item[1]})):
        often = f"{len(group):,} times" if len(group) > 1 else ""
        place = _in_log(found, group[0], None, 40) if found is not None else ""
        told = filter(None, (_who([each.process for each in group]), often, place))
        rows.append(f"{title} ({', '.join(told)})".removesuffix(" ()"))
    return rows


def title_of(event: Event, root: Raised | None = None) -> str:
    """What happened, in words: the entry's title, the exception's type, or how the process ended."""
    raised = root or event.raised
    if event.match is not None:
        return fill(event.match.entry.title, _facts(event))
    if raised is not None and raised.name:
        return raised.name
    if code := event.code or 0:
        return f"ended by {signal_name(-code)}" if code < 0 else f"ended with {exit_text(code)}"
    return _TITLES.get(event.kind, event.text.strip())


def why_of(verdict: Verdict) -> str:
    """Why it happened; empty if that is not known."""
    match = verdict.event.match
    return (
        fill(match.entry.why, _facts(verdict.event)) if match and verdict.certainty == "known cause" else ""
    )


def steps_of(found: Explanation, verdict: Verdict, *, code: bool = True) -> list[str]:
    """The entry's advice; else the user's own line, perhaps with its code, and what the exception advises."""
    event, raised = verdict.event, verdict.root or verdict.event.raised
    if event.match is not None:
        return knowledge().steps(event.match.entry, _facts(event), found.launcher)
    if event.kind is Kind.KILLED:
        return [_AFTERWARDS.get(found.launcher, _AFTERWARDS[""])]
    if raised is None or verdict.certainty == "consequence":
        return []
    frame = raised.users_frame
    source = excerpt(frame.source, 80) if frame and code else ""
    steps = [f"Look at {short_path(str(frame), 80)}: {source}"] if frame else []
    said = map(str.strip, _SENTENCE.split("\n".join((raised.message, *raised.more))))
    remedies = [f'The error says: "{excerpt(each, 150)}"' for each in said if _REMEDY.search(each)]
    return [_harmless(each).removesuffix(": ") for each in (*steps, *remedies[:1])]


def elsewhere(found: Explanation, verdict: Verdict) -> str:
    """Where to look for the cause of a mere consequence."""
    writers = (each.process.rank for each in (*found.consequences, *found.notices, verdict.event))
    wrote = {rank for rank in (*writers, *(log.rank for log in found.logs)) if rank is not None}
    peer = _facts(verdict.event).get("peer", "")
    silent = sorted(set(range(min(max(wrote, default=0), _MOST_RANKS))) - wrote)
    absent = [int(peer)] if peer.isdecimal() and len(peer) < 7 else silent
    place = named_ranks(absent) if absent else "the other ranks' logs from before that time"
    silence = ", which wrote nothing here" if absent and not wrote & set(absent) else ""
    logs = "this log" if len(found.logs) == 1 else "these logs"
    return f"The cause is not in {logs}: look at {place}{silence}."


def _facts(event: Event) -> dict[str, str]:
    """The facts of an event, which are from a log: none may begin or end a command."""
    return {name: _harmless(value) for name, value in event.match.facts.items()} if event.match else {}


def _harmless(text: str) -> str:
    return printable(text).replace("`", "'")


def _who(processes: Sequence[Process]) -> str:
    """`ranks 0 to 2 on node-a`; machines if the ranks are not known, or the process."""
    ranks = sorted({each.rank for each in processes if each.rank is not None})
    local = sorted({each.local for each in processes if each.local is not None})
    hosts = [excerpt(each, 40) for each in dict.fromkeys(each.host for each in processes if each.host)]
    if name := named_ranks(ranks) if ranks else f"local {named_ranks(local)}" if local else "":
        return f"{name} on {hosts[0]}" if len(hosts) == 1 else name
    pids = [f"process {each}" for each in {each.pid for each in processes if each.pid is not None}]
    return ", ".join(hosts[:3] or pids[:3])


def _numbered(steps: Sequence[str], width: int) -> Iterator[str]:
    yield from ["Do:"] if steps else ()
    for number, text in enumerate(steps, 1):
        yield from wrapped(text, width, f"  {number}. ", commands=True)


def _cut(text: str, width: int, most: int, first: str = "", later: str | None = None) -> list[str]:
    """A text from a log, in as many lines at most; nothing if it is empty."""
    lines = wrapped(text, width, first, later)
    if len(lines) > most:
        last = lines[most - 1]
        lines[most - 1 :] = [f"{last if columns(last) <= width - 2 else last[:-2]} …"]
    return lines


def as_json(found: Explanation) -> dict[str, Any]:
    """The whole explanation, with stable keys.

    The headline, line and place of the verdict are those of the exception to look at. `by` is a line to see
    also. Of a chain of exceptions, the first one comes first.
    """
    lists = _picked(found, "consequences", "notices", "earlier")
    logs = ("name", "lines", "rank", "host", "attempt", "newest_first")
    return {
        **_picked(found, "found", "lines", "launcher", "attempts"),
        "verdict": _verdict_json(found, found.verdict) if found.verdict is not None else None,
        **{name: [_event_json(found, each) for each in events] for name, events in lists.items()},
        "set_aside": [{**_event_json(found, each), "reason": why} for each, why in found.set_aside.items()],
        "stop": _event_json(found, found.stop) if found.stop is not None else None,
        "worked": _event_json(found, found.worked) if found.worked is not None else None,
        "logs": [_picked(each, *logs) for each in found.logs],
        "unreadable": [{"name": name, "reason": reason} for name, reason in found.unreadable],
    }


def _verdict_json(found: Explanation, verdict: Verdict) -> dict[str, Any]:
    return {
        **_event_json(found, verdict.event, verdict.root),
        **_picked(verdict, "certainty", "reason"),
        "why": why_of(verdict),
        "do": steps_of(found, verdict),
        "elsewhere": elsewhere(found, verdict) if verdict.certainty == "consequence" else "",
        "by": _event_json(found, verdict.by) if verdict.by is not None else None,
    }


def _event_json(found: Explanation, event: Event, root: Raised | None = None) -> dict[str, Any]:
    raised, match = root or event.raised, event.match
    chain = event.raised.chain if event.raised else []
    return {
        "kind": event.kind.value,
        "title": title_of(event, root),
        "headline": raised.account if raised is not None and raised.headline else event.text,
        "place": str(raised.place) if raised and raised.place else None,
        "log": found.logs[event.log].name if event.log != LAUNCHER else None,
        "line": _line(found, event, root),
        **asdict(event.process),
        **_picked(event, "text", "time", "level", "attempt", "code", "first"),
        "count": 1,
        "role": event.role,
        "id": match.entry.id if match else None,
        "facts": match.facts if match else {},
        "sources": list(match.entry.sources) if match else [],
        "exceptions": [_picked(each, "type", "text", "line") for each in chain],
    }


def _picked(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}
