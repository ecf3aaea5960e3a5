"""Facts that structured reports state, as events: Rallypoint's own reports, torchrun's table, a launcher's records.

A report says in so many words which process failed first, and how. That outweighs whatever its other lines seem
to mean: they repeat a traceback, list what followed, or advise, so they are consumed and never count as clues.
`_ROWS` holds the wording of every fact; the tests check it against the functions that print the reports. A
launcher, which has the facts at hand, calls `failed`, `ended`, `lost` and `behind` and prints nothing first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rallypoint.exits import signal_name
from rallypoint.explain.events import NOBODY, Event, Frame, Kind, Process, Raised

if TYPE_CHECKING:
    from rallypoint.explain.lines import Line
    from rallypoint.stacks.flight import Difference

LAUNCHER: Final = -1
"""The log of events that a launcher states itself."""

_OURS: Final = "rallypoint: "
_WHO: Final = (
    r"(?:rank (?P<rank>\d+)|\S.*?) \(process (?P<pid>\d+)(?: on (?P<host>[^\s,()]+))?(?:, at [^()]*)?\)"
)
_SOME: Final = r"(?:all [\d,]+ ranks|[\d,]+ of [\d,]+ ranks|ranks? \d[\d, and to]*(?: on \S+)?)"
_ODD: Final = r"ranks? (?P<rank>\d+)\b[^:]*?(?: on (?P<host>[^\s,:]+))?[^:]*:"
_JOINED: Final = r"(?:attempt \d+: )?(?P<joined>[\d,]+) of (?P<expected>[\d,]+) ranks(?: of this machine)? have joined"

_ROWS: Final = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (Kind.KILLED, rf"{_WHO} (?:has )?ended by (?:signal )?(?P<signal>SIG\w+)"),
        (Kind.ENDED, rf"{_WHO} (?:has )?ended with exit code (?P<code>\d+)"),
        (Kind.TOLD, r"the launcher of \S+ \(process (?P<pid>\d+)\) was told to end|interrupted(?:: |$)"),
        (
            Kind.EXCEPTION,
            rf"{_WHO}(?: failed first)?(?P<follows>, as it lost another process)?"
            r": (?P<type>\w+)(?:: (?P<message>.*))?$",
        ),
        (Kind.STALL, rf"(?:.*: )?{_SOME} (?:waits?|is|are|ha(?:s|ve)|do(?:es)?) .*; (?:{_ODD}|.* elsewhere\b)"),
        (Kind.STALL, rf"(?:.*: )?{_SOME} waits? .*; nothing is known of "),
        (Kind.RESTART, r"attempt \d+ has ended: .*; attempt \d+(?: of at most \d+)? follows$"),
        (Kind.READY, rf"{_JOINED} after [\d.]+ s|serving on "),
        (Kind.STEP, r"the ranks go on$"),
        (Kind.DONE, r"the job has ended, and this spare machine was not needed$"),
        (Kind.BEGIN, rf"(?:after \d+ s, )?(?:{_JOINED}|no rank has joined yet)(?!.* after )"),
        (Kind.BEGIN, r"waiting (?:for|up to) |all machines are connected to |the job runs on "),
        (Kind.ERROR, r"this machine is not fit, and stays out of the job: |.* gave no sign of life for \d+ s"),
    )
)
_FURTHER: Final = re.compile(
    r"\s|(?:what followed from that|before that, the job stood still|shortly before that):$"
    r"|rank \d+ was last seen |Flight Recorder: |see `rallypoint "
)
_ADVICE: Final = re.compile(r"hint: |cause \([a-z ]+\): |do first: |whole report: ")
_ELSEWHERE: Final = re.compile(rf" +(?:{_ODD})")
_FRAME: Final = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_CHAINED: Final = re.compile(r"\s*(?:The above exception was the direct cause|(?P<handling>During handling of the))")
_HEADER: Final = re.compile(r"\s*(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")


class _Traceback:
    """The frames below a report's headline; what is chained before it keeps its own."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._last = ""

    def take(self, text: str) -> None:
        raised = self._event.raised
        if raised is None:
            return
        if found := _FRAME.match(text):
            frame = Frame(found["file"], int(found["line"]), found["function"] or "")
            raised = replace(raised, frames=(*raised.frames, frame))
        elif raised.frames and _FRAME.match(self._last):
            raised = replace(raised, frames=(*raised.frames[:-1], replace(raised.frames[-1], source=text.strip())))
        elif found := _CHAINED.match(text):
            raised = self._chain(raised, handling=bool(found["handling"]))
        self._event.raised = raised
        self._last = text if text.strip() and not _CHAINED.match(text) else self._last

    def _chain(self, raised: Raised, *, handling: bool) -> Raised:
        """The lines so far were an earlier exception's, which the last of them names."""
        header = _HEADER.match(self._last)
        if header is None:
            return replace(raised, frames=())
        earlier = Raised(
            header["type"], header["message"] or "", raised.line, (), raised.frames, raised.earlier, raised.handling
        )
        return replace(raised, frames=(), earlier=earlier, handling=handling)


class OwnReports:
    """What Rallypoint itself prints. Feed it every line of a log."""

    def __init__(self, log: int) -> None:
        self._log = log
        self._spoke = False
        """Whether the log has a report of ours, and so may have advice of ours."""
        self._in_report = False
        self._event: Event | None = None
        self._traceback: _Traceback | None = None
        self._message: Event | None = None
        """A message of ours without a meaning of its own: an error, if a hint follows it."""

    def take(self, line: Line, number: int) -> tuple[bool, Event | None]:
        """Whether the line is ours, and the fact that it states."""
        if line.text.startswith(_OURS):
            return True, self._begin(line, number)
        if self._spoke and _ADVICE.match(line.text):
            return True, self._take_message() if line.text.startswith("hint: ") else None
        if not line.text.strip():
            self._in_report = False
            return False, None
        if not self._in_report:
            self._message = None
            return False, None
        return self._continue(line, number)

    def _begin(self, line: Line, number: int) -> Event | None:
        self._spoke = self._in_report = True
        text = line.text.removeprefix(_OURS)
        event = self._read(text, line, number)
        self._message = None if event else _event(Kind.ERROR, self._log, number, text, line)
        return event

    def _continue(self, line: Line, number: int) -> tuple[bool, Event | None]:
        """A further line of a report: a fact of its own, or about the one before."""
        if _FURTHER.match(line.text):
            return True, self._further(line, number)
        event = self._read(line.text, line, number)
        self._in_report = event is not None
        return self._in_report, event

    def _further(self, line: Line, number: int) -> Event | None:
        event = self._event
        if self._traceback is not None and line.text[:1].isspace():
            self._traceback.take(line.text)
        if event is None or event.kind is not Kind.STALL:
            stall = _fact(line.text.strip()) if line.text[:1].isspace() else None
            return self._read(line.text.strip(), line, number) if stall and stall[0] is Kind.STALL else None
        if not event.process and (odd := _ELSEWHERE.match(line.text)):
            event.process = _process(odd, line.process)
        if number == event.line + 1:
            event.text += f" {line.text.strip()}"
        return None

    def _read(self, text: str, line: Line, number: int) -> Event | None:
        found = _fact(text)
        self._event = self._traceback = None
        if found is None:
            return None
        event = _event(found[0], self._log, number, text, line, found[1])
        self._event, self._traceback = event, _Traceback(event)
        return event

    def _take_message(self) -> Event | None:
        message, self._message = self._message, None
        return message


def _fact(text: str) -> tuple[Kind, re.Match[str]] | None:
    return next(((kind, found) for kind, pattern in _ROWS if (found := pattern.match(text))), None)


def _event(
    kind: Kind, log: int, number: int, text: str, line: Line, found: re.Match[str] | None = None
) -> Event:
    facts = found.groupdict() if found is not None else {}
    process = _process(found, line.process) if found is not None else line.process
    event = Event(kind, log, number, text, process, line.time, line.level)
    event.code = _code(facts)
    event.first = kind in (Kind.EXCEPTION, Kind.KILLED, Kind.ENDED) and not facts.get("follows")
    event.fatal = event.first or kind is Kind.ERROR
    if facts.get("type"):
        event.raised = Raised(facts["type"], facts["message"] or "", number)
    return event


def _code(facts: dict[str, str]) -> int | None:
    if name := facts.get("signal"):
        return next((-number for number in range(1, 65) if signal_name(number) == name), None)
    return int(facts["code"]) if facts.get("code") else None


def _process(found: re.Match[str], otherwise: Process) -> Process:
    facts = found.groupdict()
    rank, pid, host = facts.get("rank"), facts.get("pid"), facts.get("host")
    if not (rank or pid or host):
        return NOBODY if "rank" in facts else otherwise
    return Process(int(rank) if rank else None, host=host, pid=int(pid) if pid else None)


# torchrun's table -------------------------------------------------------------------------------------------

_ROOT: Final = re.compile(r"Root Cause \(first observed failure\):")
_OTHERS: Final = re.compile(r"(?:Other )?[Ff]ailures:$")
_FIELD: Final = re.compile(r" *(?P<name>time|host|rank|exitcode|error_file|traceback) *: (?P<value>.*)")
_NUMBER: Final = re.compile(r" *\[\d+\]:$| +<NO_OTHER_FAILURES>$")
_RULE: Final = re.compile(r"[=*-]{20,}$")
_TITLE: Final = re.compile(r" *\S+ (?:FAILED|NOT_?TERMINATED)\b")
_OF_AGENT: Final = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\) of (?:binary|fn): "
)
_PID: Final = re.compile(r"\(pid: (\d+)\)")
_WHOLE: Final = re.compile(r"-?\d+")


class Table:
    """torchrun's table of failures, which accelerate prints as well. Feed it every line of a log."""

    def __init__(self, log: int) -> None:
        self._log = log
        self._inside = self._is_root = False
        self._fields: dict[str, str] = {}
        self._traceback: _Traceback | None = None

    def take(self, line: Line, number: int) -> tuple[bool, Event | None]:
        """Whether the line belongs to the table, and the failure that it completes."""
        if found := _OF_AGENT.match(line.text):
            return True, self._of_agent(found, line, number)
        if (root := bool(_ROOT.match(line.text))) or _OTHERS.match(line.text):
            self._inside, self._is_root = True, root
            return True, None
        if not self._inside:
            return bool(_TITLE.match(line.text) or _RULE.match(line.text)), None
        return self._row(line, number)

    def _of_agent(self, found: re.Match[str], line: Line, number: int) -> Event:
        process = Process(line.process.rank, int(found["local"]), line.process.host, int(found["pid"]))
        return self._failure(int(found["code"]), process, line, number, first=True)

    def _row(self, line: Line, number: int) -> tuple[bool, Event | None]:
        if _RULE.match(line.text) or _NUMBER.match(line.text):
            self._inside = not line.text.startswith(("=", "*"))
            self._fields, self._traceback = {}, None
            return True, None
        if found := _FIELD.match(line.text):
            self._fields[found["name"]] = found["value"]
            return True, self._complete(line, number) if found["name"] == "exitcode" else None
        if self._traceback is not None:
            self._traceback.take(line.text)
            return True, None
        self._inside = False
        return False, None

    def _complete(self, line: Line, number: int) -> Event | None:
        code = _WHOLE.match(self._fields["exitcode"])
        if code is None:
            return None
        rank, pid = _WHOLE.match(self._fields.get("rank", "")), _PID.search(self._fields["exitcode"])
        process = Process(
            int(rank[0]) if rank else None,
            host=self._fields.get("host"),
            pid=int(pid[1]) if pid else None,
        )
        event = self._failure(int(code[0]), process, line, number, first=self._is_root)
        self._traceback = _Traceback(event)
        return event

    def _failure(self, code: int, process: Process, line: Line, number: int, *, first: bool) -> Event:
        event = ended(process, code, line.time)
        event.log, event.line, event.text, event.level = self._log, number, line.text.strip(), line.level
        event.first = first
        return event


# A launcher's own records -----------------------------------------------------------------------------------


def failed(process: Process, raised: Raised, time: float, attempt: int = 0) -> Event:
    """An exception that ended a process, as the process itself has reported it."""
    text = raised.headline.partition("\n")[0]
    return Event(
        Kind.EXCEPTION, LAUNCHER, 0, text, process, time, attempt=attempt, raised=raised, fatal=True
    )


def ended(process: Process, code: int, time: float | None) -> Event:
    """A process that ended without a report; the code is a signal's number where it is negative."""
    kind = Kind.KILLED if code < 0 else Kind.ENDED
    text = f"ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return Event(kind, LAUNCHER, 0, text, process, time, code=code, fatal=True)


def lost(text: str, time: float) -> Event:
    """A server or an agent that is gone although nobody told it to end: which one, and how."""
    found = _fact(text)
    code = _code(found[1].groupdict()) if found is not None else None
    kind = found[0] if found is not None else Kind.ERROR
    return Event(kind, LAUNCHER, 0, text, NOBODY, time, code=code, fatal=True)


def behind(differences: Sequence[Difference]) -> Iterator[Event]:
    """The ranks that torch's Flight Recorder shows apart from the others: who is missing, or calls something else."""
    for each in differences:
        what = f"group {each.group}, collective {each.number}"
        for rank in each.absent:
            yield Event(Kind.STALL, LAUNCHER, 0, f"rank {rank} has not reached {what}", Process(rank))
        if each.kind == "differs":
            call, ranks, place = each.calls[0]
            text = f"{what}: {call}{f', at {place}' if place else ''}, unlike the others"
            yield from (Event(Kind.ERROR, LAUNCHER, 0, text, Process(rank)) for rank in ranks)
