"""Facts that structured reports state, as events: Rallypoint's, torchrun's, and a launcher's own.

A report names the process that failed first and says how it ended, which outweighs any guess from words. Its
other lines repeat a traceback, list what followed, or advise: they are consumed, and never count as clues.
`_ROWS` holds the wording of every fact, and tests check it against the functions that print the reports. A
launcher has the facts without any text: it calls `failed`, `ended`, `lost` and `behind`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rallypoint.exits import signal_name
from rallypoint.explain.events import NOBODY, Event, Kind, Process, Raised
from rallypoint.explain.tracebacks import Reader

if TYPE_CHECKING:
    from rallypoint.explain.lines import Line
    from rallypoint.stacks.flight import Difference

LAUNCHER: Final = -1
"""The number of the log of events that a launcher states itself."""
_LONGEST: Final = 1000
_MOST_LINES: Final = 300
STARTS: Final = tuple(
    map(re.compile, (r"rallypoint: ", r"failed \(exitcode: -?\d", r"Root Cause \(first ", r"Failures:"))
)
"""Every report has a line that one of these finds."""

# Rallypoint's own -------------------------------------------------------------------------------------------

_OURS: Final = "rallypoint: "
_WHO: Final = (
    r"(?:rank (?P<rank>\d+)|\S.*?) \(process (?P<pid>\d+)(?: on (?P<host>[^\s,()]+))?(?:, at [^()]*)?\)"
)
_SOME: Final = r"(?:all [\d,]+ ranks|[\d,]+ of [\d,]+ ranks|ranks? \d[\d, and to]*(?: on \S+)?)"
_ODD: Final = (
    r"ranks? (?P<rank>\d+)(?:[\d, ]|to|and|more)*?(?: on (?P<host>[^\s,:]+)(?:, \S+)*(?: and \S+)?)?"
    r"(?::| (?:is|are|do|does|has|have) [^:]*:)"
)
_DOES: Final = r"(?:waits?|is|are|has|have|does|do)"
_JOINED: Final = r"(?:attempt \d+: )?[\d,]+ of [\d,]+ ranks(?: of this machine)? have joined"
_ROWS: Final = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (Kind.RESTART, r"attempt \d+ has ended: .*; attempt \d+(?: of at most \d+)? follows$"),
        (Kind.KILLED, rf"{_WHO} (?:has )?ended by (?:signal )?(?P<signal>SIG\w+)"),
        (Kind.ENDED, rf"{_WHO} (?:has )?ended with exit code (?P<code>\d+)"),
        (Kind.TOLD, r"the launcher of \S+ \(process (?P<pid>\d+)\) was told to end|interrupted(?:: |$)"),
        (
            Kind.EXCEPTION,
            rf"{_WHO}(?: failed first)?(?P<follows>, as it lost another process)?"
            r": (?P<type>\w+)(?:: (?P<message>.*))?$",
        ),
        (Kind.STALL, rf"(?:.*: )?{_SOME} {_DOES} .*; (?:{_ODD}|.* elsewhere\b|nothing is known )"),
        (Kind.READY, rf"{_JOINED} after [\d.]+ s|serving on "),
        (Kind.STEP, r"the ranks go on$"),
        (Kind.DONE, r"the job has ended, and this spare machine was not needed$"),
        (Kind.BEGIN, rf"(?:after \d+ s, )?(?:{_JOINED}|no rank has joined yet)"),
        (Kind.BEGIN, r"waiting (?:for|up to) |all machines are connected to |the job runs on "),
        (Kind.ERROR, r"this machine is not fit, and stays out of the job: |.* gave no sign of life for "),
        (Kind.ERROR, r"closed \S+: .*\bsecret\b"),
    )
)
_LONG: Final = (Kind.EXCEPTION, Kind.KILLED, Kind.ENDED, Kind.STALL)
"""What a report has further lines about."""
_FURTHER: Final = re.compile(
    r"\s|(?:what followed from that|before that, the job stood still|shortly before that):$"
    r"|rank \d+ was last seen |Flight Recorder: |see `rallypoint "
)
_ADVICE: Final = re.compile(r"(?P<hint>hint: )|cause(?: \([a-z]+\))?: |do first: |whole report: ")
_ONE_OF_ODD: Final = re.compile(rf" +{_ODD}")


class OwnReports:
    """What Rallypoint itself prints. Feed it every line of a log."""

    def __init__(self, log: int) -> None:
        self._log = log
        self._spoke = False
        """Whether the log has a report of ours, and so may have advice of ours."""
        self._is_open = False
        self._event: Event | None = None
        """The fact that the lines to come are about."""
        self._lines: list[str] = []
        self._message: Event | None = None
        """A message of ours that states no fact. If a hint follows, it is an error."""

    @property
    def busy(self) -> bool:
        """Whether the next line may belong to a report."""
        return self._is_open or self._message is not None

    def take(self, line: Line, number: int) -> tuple[bool, list[Event]]:
        """Whether the line is ours, and the facts that are complete now."""
        if line.text.startswith(_OURS):
            self._spoke = True
            text = line.text.removeprefix(_OURS)
            return True, [*self.close(), *self._begin(text, _fact(text), line, number)]
        if self._spoke and (advice := _ADVICE.match(line.text)):
            return True, [*self.close(), *self._take_message(is_error=bool(advice["hint"]))]
        if not line.text.strip() or line.marked:
            return False, []
        return self._continue(line, number)

    def close(self) -> list[Event]:
        """The report ends here."""
        event, lines = self._event, self._lines
        self._event, self._lines, self._is_open = None, [], False
        if event is None:
            return []
        if event.raised is not None:
            event.raised = _with_traceback(event.raised, lines)
        elif event.kind is Kind.STALL:
            _add_odd(event, lines)
        return [event]

    def _continue(self, line: Line, number: int) -> tuple[bool, list[Event]]:
        found = _fact(line.text.strip()) if self._is_open else None
        if found is not None and (found[0] is Kind.STALL or not line.text[0].isspace()):
            return True, [*self.close(), *self._begin(line.text.strip(), found, line, number)]
        if self._event is not None and _FURTHER.match(line.text) and len(self._lines) < _MOST_LINES:
            self._lines.append(line.text)
            return True, []
        return False, [*self.close(), *self._take_message(is_error=False)]

    def _begin(
        self, text: str, found: tuple[Kind, re.Match[str]] | None, line: Line, number: int
    ) -> list[Event]:
        if found is None:
            self._message = Event(
                Kind.ERROR, self._log, number, text, line.process, line.time, "error", fatal=True
            )
            return []
        kind, facts = found[0], found[1].groupdict()
        event = Event(
            kind, self._log, number, text, _process(facts), line.time, line.level, code=_code(facts)
        )
        event.first = event.fatal = kind in _LONG and kind is not Kind.STALL and not facts.get("follows")
        if facts.get("type"):
            event.raised = Raised(facts["type"], facts["message"] or "", number)
        self._is_open = kind in _LONG or kind is Kind.BEGIN
        self._event = event if kind in _LONG else None
        return [] if kind in _LONG else [event]

    def _take_message(self, *, is_error: bool) -> list[Event]:
        message, self._message = self._message, None
        return [message] if message is not None and is_error else []


def _fact(text: str) -> tuple[Kind, re.Match[str]] | None:
    text = text[:_LONGEST]
    return next(((kind, found) for kind, pattern in _ROWS if (found := pattern.match(text))), None)


def _process(facts: dict[str, str]) -> Process:
    rank, pid = facts.get("rank"), facts.get("pid")
    return Process(int(rank) if rank else None, None, facts.get("host"), int(pid) if pid else None)


def _code(facts: dict[str, str]) -> int | None:
    if name := facts.get("signal"):
        return next((-number for number in range(1, 65) if signal_name(number) == name), None)
    return int(facts["code"]) if facts.get("code") else None


def _with_traceback(raised: Raised, lines: Sequence[str]) -> Raised:
    """An exception with the frames and the chain that stand below its headline."""
    found = _exception((*(each[2:] for each in lines if each[:1].isspace()), raised.headline), raised.line)
    if found is None or not found.frames:
        return raised
    return replace(found, type=raised.type, message=raised.message)


def _exception(lines: Iterable[str], number: int) -> Raised | None:
    reader = Reader()
    for text in lines:
        reader.take(text, number)
    reader.close()
    return reader.done[-1] if reader.done else None


def _add_odd(stall: Event, lines: Sequence[str]) -> None:
    """The rank that is elsewhere, and its place: the first line below the summary has them."""
    if lines and lines[0][:1].isspace():
        odd = _ONE_OF_ODD.match(lines[0])
        if not stall.process and odd is not None:
            stall.process = _process(odd.groupdict())
        stall.text += f" {lines[0].strip()}"


# torchrun's table -------------------------------------------------------------------------------------------

_HEADING: Final = re.compile(r"(?:(?P<root>Root Cause \(first observed failure\))|(?:Other )?Failures):$")
_FIELD: Final = re.compile(r" *(?P<name>time|host|rank|exitcode|error_file|traceback) *: (?P<value>.*)")
_BORDER: Final = re.compile(r"(?P<end>[=*]{20,})$|-{20,}$| *\[\d+\]:$| +<NO_OTHER_FAILURES>$|\S+ FAILED$")
_OF_AGENT: Final = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\) of (?:binary|fn):"
)
_CODE: Final = re.compile(r"(?P<code>-?\d+) *\(pid: (?P<pid>\d+)\)")
_RANK: Final = re.compile(r"(?P<rank>\d+)")


class Tables:
    """torchrun's tables of failures, which accelerate prints as well. Feed it every line of a log."""

    def __init__(self, log: int) -> None:
        self._log = log
        self.busy = False
        """Whether the next line may belong to a table."""
        self._is_root = False
        self._fields: dict[str, str] = {}
        self._event: Event | None = None
        self._lines: list[str] = []

    def take(self, line: Line, number: int) -> tuple[bool, list[Event]]:
        """Whether the line belongs to a table, and the failures that are complete now."""
        if found := _OF_AGENT.match(line.text):
            process = Process(None, int(found["local"]), line.process.host, int(found["pid"]))
            return True, [self._failure(process, int(found["code"]), line, number, first=True)]
        if found := _HEADING.match(line.text):
            done = self.close()
            self.busy, self._is_root = True, bool(found["root"])
            return True, done
        if found := _BORDER.match(line.text):
            done, was_busy = self.close(), self.busy
            self.busy = was_busy and not found["end"]
            return was_busy or line.text.endswith(" FAILED"), done
        return self._take_field(line, number) if self.busy else (False, [])

    def close(self) -> list[Event]:
        """The row ends here."""
        event, lines = self._event, self._lines
        self._event, self._lines, self._fields = None, [], {}
        if event is None:
            return []
        if raised := _exception(lines, event.line):
            event.kind, event.raised = Kind.EXCEPTION, raised
        return [event]

    def _take_field(self, line: Line, number: int) -> tuple[bool, list[Event]]:
        if found := _FIELD.match(line.text):
            self._fields[found["name"]] = found["value"]
            if found["name"] == "exitcode":
                self._event = self._row(line, number)
            elif found["name"] == "traceback":
                self._lines = [found["value"]]
        elif self._lines and len(self._lines) < _MOST_LINES:
            self._lines.append(line.text)
        elif line.text.strip():
            self.busy = False
            return False, self.close()
        return True, []

    def _row(self, line: Line, number: int) -> Event | None:
        code, rank = _CODE.match(self._fields["exitcode"]), _RANK.match(self._fields.get("rank", ""))
        if code is None:
            return None
        process = Process(int(rank[0]) if rank else None, None, self._fields.get("host"), int(code["pid"]))
        return self._failure(process, int(code["code"]), line, number, first=self._is_root)

    def _failure(self, process: Process, code: int, line: Line, number: int, *, first: bool) -> Event:
        return replace(
            ended(process, code, line.time), log=self._log, line=number, text=line.text.strip(), first=first
        )


# A launcher's own records -----------------------------------------------------------------------------------


def failed(process: Process, kind: str, message: str, trace: str, time: float) -> Event:
    """An exception that ended a process, as it has reported itself."""
    raised = _exception(trace.splitlines(), 0)
    if raised is None or raised.name != kind:  # cut, or of another language
        first, *more = message.strip().splitlines() or [""]
        raised = Raised(kind, first, 0, tuple(more))
    return Event(Kind.EXCEPTION, LAUNCHER, 0, raised.headline, process, time, raised=raised, fatal=True)


def ended(process: Process, code: int, time: float | None) -> Event:
    """A process that ended without a report; the code is the negative number of a signal, or an exit code."""
    kind = Kind.KILLED if code < 0 else Kind.ENDED
    text = f"ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return Event(kind, LAUNCHER, 0, text, process, time, code=code, fatal=True)


def lost(text: str, time: float) -> Event:
    """A server or an agent that is gone although nobody told it to end: which one, and how."""
    return Event(Kind.ENDED, LAUNCHER, 0, text, NOBODY, time, fatal=True)


def behind(differences: Sequence[Difference]) -> Iterator[Event]:
    """The ranks that torch's Flight Recorder shows apart from the others."""
    for each in differences:
        where = f"group {each.group}, collective {each.number}"
        for rank in each.absent:
            yield Event(Kind.STALL, LAUNCHER, 0, f"rank {rank} has not reached {where}", Process(rank))
        call, ranks, place = each.calls[0]
        text = f"{call}{f', at {place}' if place else ''}, unlike the other ranks: {where}"
        for rank in ranks if each.kind == "differs" else ():
            yield Event(Kind.ERROR, LAUNCHER, 0, f"rank {rank} calls {text}", Process(rank))
