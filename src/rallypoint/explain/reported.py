"""Facts that structured reports state, as events: Rallypoint's, torchrun's, and a launcher's own.

A report names the process that failed first and says how it ended, which outweighs any guess from words. Its
other lines are consumed, and never count as clues. Tests check the wording of every fact against what prints
the reports. A launcher has its facts without any text: it calls `failed`, `ended` and `lost`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rallypoint.exits import signal_name, signal_number
from rallypoint.explain.events import NOBODY, Event, Kind, Process, Raised
from rallypoint.explain.tracebacks import Reader

if TYPE_CHECKING:
    from rallypoint.explain.lines import Line

LAUNCHER: Final = -1
"""The number of the log of events that a launcher states itself."""
_LONGEST: Final = 1000
_MOST_LINES: Final = 300
_OURS: Final = "rallypoint: "
_FIRST_LINES: Final = (_OURS, r"failed \(exitcode: -?\d", r"Root Cause \(first ", r"Failures:")
STARTS: Final = tuple(map(re.compile, _FIRST_LINES))

# Rallypoint's own -------------------------------------------------------------------------------------------

_WHO: Final = (
    r"(?:rank (?P<rank>\d+)|\S.*?) \(process (?P<pid>\d+)(?: on (?P<host>[^\s,()]+))?(?:, at [^()]*)?\)"
)
_ODD: Final = r"ranks? (?P<rank>\d+)(?:[\d, ]|to|and|more)*(?:on (?P<host>[^\s,:]+))?[^:]*:"
_RAISED: Final = r": (?P<type>\w+)(?:: (?P<message>.*))?$"
_JOINED: Final = r"(?:attempt \d+: )?[\d,]+ of [\d,]+ ranks(?: of this machine)? have joined"
_ROWS: Final = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (Kind.RESTART, r"attempt \d+ has ended: .*; attempt \d+(?: of at most \d+)? follows$"),
        (Kind.KILLED, rf"{_WHO} (?:has )?ended by (?:signal )?(?P<signal>SIG\w+)"),
        (Kind.ENDED, rf"{_WHO} (?:has )?ended with exit code (?P<code>\d+)"),
        (Kind.TOLD, r"the launcher of \S+ \(process (?P<pid>\d+)\) was told to end|interrupted(?:: |$)"),
        (Kind.EXCEPTION, rf"{_WHO}(?: failed first)?(?P<follows>, as it lost another process)?{_RAISED}"),
        (Kind.READY, rf"{_JOINED} after [\d.]+ s|serving on "),
        (Kind.STEP, r"the ranks go on$"),
        (Kind.DONE, r"the job has ended, and this spare machine was not needed$"),
        (Kind.BEGIN, rf"(?:after \d+ s, )?(?:{_JOINED}|no rank has joined yet)"),
        (Kind.BEGIN, r"waiting (?:for|up to) |all machines are connected to |the job runs on "),
        (Kind.STALL, rf".*\branks? .*; (?:{_ODD}|.* elsewhere\b|nothing is known )"),
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


class OwnReports:
    """What Rallypoint itself prints. Feed it every line of a log."""

    def __init__(self, log: int) -> None:
        self._log = log
        self._spoke = False
        """Whether the log has a report of ours, and so may have advice of ours."""
        self._event: Event | None = None
        """The fact that the lines to come are about; or a message, which is an error if a hint follows."""
        self._lines: list[str] = []

    @property
    def busy(self) -> bool:
        """Whether the next line may belong to a report."""
        return self._event is not None

    def read(self, line: Line, number: int) -> tuple[bool, list[Event]]:
        """Whether the line is ours, and the facts that are complete now."""
        if line.text.startswith(_OURS):
            self._spoke = True
            return True, [*self.close(), *self._begin(line.text.removeprefix(_OURS), line, number)]
        if self._spoke and (advice := _ADVICE.match(line.text)):
            return True, self.close(hinted=bool(advice["hint"]))
        if not self._event or not line.text.strip() or line.marked:
            return False, []
        return self._continue(self._event.kind, line, number)

    def _continue(self, kind: Kind, line: Line, number: int) -> tuple[bool, list[Event]]:
        text, is_indented = line.text.strip(), line.text[0].isspace()
        found = _fact(text) if kind is not Kind.ERROR else None
        if found is not None and (found[0] is Kind.STALL or not is_indented):
            return True, [*self.close(), *self._begin(text, line, number)]
        if kind in _LONG and _FURTHER.match(line.text) and len(self._lines) < _MOST_LINES:
            self._lines += [line.text[2:]] if is_indented else []
            return True, []
        return False, self.close()

    def _begin(self, text: str, line: Line, number: int) -> list[Event]:
        found = _fact(text)
        kind, facts = found or (Kind.ERROR, {})
        event = Event(kind, self._log, number, text, _process(facts), line.time, code=_code(facts))
        event.first = kind in _LONG and kind is not Kind.STALL and not facts.get("follows")
        event.fatal = event.first or found is None
        if facts.get("type"):
            event.raised = Raised(facts["type"], facts["message"] or "", number)
        if found is None or kind in (Kind.BEGIN, *_LONG):
            self._event = event
            return []
        return [event]

    def close(self, *, hinted: bool = False) -> list[Event]:
        """The report ends here, or with a hint."""
        event, lines = self._event, self._lines
        self._event, self._lines = None, []
        if event is None or (event.kind is Kind.ERROR and not hinted):
            return []
        if (own := event.raised) is not None:
            found = _exception((*lines, own.headline), event.line)
            if found is not None and found.frames:
                event.raised = replace(found, type=own.type, message=own.message)
        elif event.kind is Kind.STALL and lines:
            odd = re.match(_ODD, lines[0])  # the rank that is elsewhere, and its place
            event.process = _process(odd.groupdict()) if odd is not None else event.process
            event.text += f" {lines[0]}"
        return [event]


def _fact(text: str) -> tuple[Kind, dict[str, str]] | None:
    found = ((kind, pattern.match(text[:_LONGEST])) for kind, pattern in _ROWS)
    return next(((kind, each.groupdict()) for kind, each in found if each is not None), None)


def _process(facts: dict[str, str], host: str | None = None) -> Process:
    rank, local, pid = (int(facts[name]) if facts.get(name) else None for name in ("rank", "local", "pid"))
    return Process(rank, local, facts.get("host") or host, pid)


def _code(facts: dict[str, str]) -> int | None:
    signal, code = facts.get("signal"), facts.get("code")
    if signal:
        return -signal_number(signal) or None
    return int(code) if code else None


def _exception(lines: Iterable[str], number: int) -> Raised | None:
    reader = Reader()
    for text in lines:
        reader.read(text, number)
    reader.close()
    return reader.done[-1] if reader.done else None


# torchrun's table -------------------------------------------------------------------------------------------

_HEADING: Final = re.compile(r"(?:(?P<root>Root Cause.*)|(?:Other )?Failures):$|\S+ FAILED$")
_FIELD: Final = re.compile(r" *(?:(?:time|host|rank|exitcode|error_file|traceback) *:|$)")
_BORDER: Final = re.compile(r"(?P<end>[=*]{20,})$|-{20,}$| *\[\d+\]:$| +<NO_OTHER_FAILURES>$")
_OF_AGENT: Final = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\) of (?:binary|fn):"
)
_ROW: Final = re.compile(
    r"(?: *host *: (?P<host>.*)\n)? *rank *: (?P<rank>\d+).*\n"
    r" *exitcode *: (?P<code>-?\d+) *\(pid: (?P<pid>\d+)\).*"
    r"(?:\n *error_file *:.*)?(?:\n *traceback *: (?P<trace>(?s:.*)))?"
)


class Tables:
    """torchrun's tables of failures, which accelerate prints as well. Feed it every line of a log."""

    def __init__(self, log: int) -> None:
        self._log = log
        self.busy = False
        """Whether the next line may belong to a table."""
        self._is_root = False
        self._lines: list[tuple[Line, int]] = []

    def read(self, line: Line, number: int) -> tuple[bool, list[Event]]:
        """Whether the line belongs to a table, and the failures that are complete now."""
        if found := _OF_AGENT.match(line.text):
            return True, [self._failure(found, line, number, first=True)]
        if found := _HEADING.match(line.text):
            done = self.close()
            self.busy, self._is_root = True, bool(found["root"])
            return True, done
        if not self.busy:
            return False, []
        border = _BORDER.match(line.text)
        if border is None and (self._lines or _FIELD.match(line.text)) and len(self._lines) < _MOST_LINES:
            self._lines.append((line, number))
            return True, []
        self.busy = border is not None and not border["end"]
        return border is not None, self.close()

    def close(self) -> list[Event]:
        """The row ends here."""
        lines, self._lines = self._lines, []
        found = _ROW.search("\n".join(line.text for line, _ in lines))
        if found is None:
            return []
        line, number = lines[found.string.count("\n", 0, found.start("code"))]
        event = self._failure(found, line, number, first=self._is_root)
        if raised := _exception((found["trace"] or "").splitlines(), number):
            event.kind, event.raised = Kind.EXCEPTION, raised
        return [event]

    def _failure(self, found: re.Match[str], line: Line, number: int, *, first: bool) -> Event:
        event = ended(_process(found.groupdict(), line.process.host), int(found["code"]), line.time)
        return replace(event, log=self._log, line=number, text=line.text.strip(), first=first)


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
