"""From the lines of logs to events. Pure: the bytes come in as chunks.

Most lines of a large log are steps, and steps matter only around a failure and at the end. So `quick` names
the lines that may speak of a failure, and only around these, and at the end of the log, every line is read.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from rallypoint.explain.classify import classify, table
from rallypoint.explain.events import FAILURES, MOST_EVENTS, Event, Kind, Log, Process, Raised
from rallypoint.explain.knowledge import Knowledge
from rallypoint.explain.lines import Line, Prefixes, decode
from rallypoint.explain.quick import Sieve, blocks, fixed_texts
from rallypoint.explain.reported import STARTS, OwnReports, Tables
from rallypoint.explain.tracebacks import Part, Reader

_BEFORE: Final = 60
_AFTER: Final = 200
_TAIL: Final = 100
_KEPT_TAIL: Final = 15
_MOST_WRITERS: Final = 4_096
_MOST_ALIKE: Final = 20
_NEXT_RUN: Final = 15
"""A further run begins at most so many lines after the failure of the one before."""
_SHORTEST_OPENING: Final = 8
_DIGITS: Final = re.compile(r"\d+")
_FIGURES: Final = re.compile(r"-?\d+(?:[.:,]\d+)*(?:e[+-]?\d+)?")
_FRACTION: Final = re.compile(r"(?<![\d.:])\d+\.\d+(?![\d.])")
_NO_RHYTHM: Final = re.compile(
    r"(?i)\b(?:warn\w*|retr\w+|attempt|time\w*|stuck|stall\w*|lost|still|no|since|wait\w*|rank|gpu|cuda|device|node"
    r"|host|worker|process|pid|alive|heartbeats?|uptime|cpu|mem(?:ory)?|util\w*|temp\w*|HTTP|GET|POST|size|load\w*|init\w*)\b"
)
_OWN_LINES: Final = (Kind.KILLED, Kind.ENDED, Kind.TOLD)
"""No part of a message, though they follow it."""
_RHYTHM: Final = 3
"""So many lines of one form with other values are steps, in any words."""
_CAUGHT: Final = re.compile(
    r"(?i)\b(?:retr(?:y|ies|ying)|ignor(?:ed|ing)|falling back|fall back|skipp(?:ed|ing)|continuing)\b"
)
_IGNORED: Final = re.compile(
    r"^Exception ignored|^--- Logging error|_call_connection_lost\b|\b(?:retryable|retries left)\b"
)
_ASIDE: Final = re.compile(
    r"(?:\W*ERROR\W+)?(?:Exception in (?:thread|callback)|Task exception was never|Error in atexit)"
)


_STARTS: Final = tuple(
    map(
        re.compile,
        (
            r"(?i)traceback \(most recent call last",
            r'\bFile "',
            r"what\(\): ",
            "terminate called",
            "panicked at ",
            "Fatal Python error: ",
            r"(?i)\b(?:error|exception|interrupt|exit|timeout|fault|critical|fatal)\b",
            "Exception ignored",
            r"\*\*\* (?:SIG|Process received)",
        ),
    )
)
"""What begins something that needs every line after it."""


@dataclass
class Source:
    """A log to be read: a named stream of bytes, and what its name says about the writer."""

    name: str
    chunks: Iterable[bytes]
    rank: int | None = None
    host: str | None = None
    attempt: int | None = None


@dataclass
class _Heading:
    """What stands at and before the first line of a traceback."""

    number: int
    line: Line
    before: str = ""
    time: float | None = None


def scan(
    sources: Iterable[Source], known: Knowledge, progress: Callable[[int], None] = lambda _: None
) -> tuple[list[Log], list[Event]]:
    """All logs, and their events in the order of logs and lines."""
    patterns = [each for each in (*table().failures, *STARTS, *_STARTS, *known.patterns) if fixed_texts(each)]
    logs: list[Log] = []
    events: list[Event] = []
    for index, source in enumerate(sources):
        reader = _LogReader(source, index, known, Sieve(patterns))
        logs.append(reader.read(progress))
        events += sorted(reader.events, key=lambda each: each.line)
    return logs, events


class _LogReader:
    """Reads one log."""

    def __init__(self, source: Source, index: int, known: Knowledge, sieve: Sieve) -> None:
        self._source = source
        self._index = index
        self._known = known
        self._sieve = sieve
        self._log = Log(source.name, rank=source.rank, host=source.host, attempt=source.attempt)
        self.events: list[Event] = []
        self._prefixes = Prefixes()
        self._own = OwnReports(index)
        self._tables = Tables(index)
        self._readers: dict[Process, Reader] = {}
        self._headings: dict[Process, list[_Heading]] = {}
        self._part: dict[Process, Part] = {}
        self._lines: list[bytes] = []
        self._at = 0
        self._before: list[bytes] = []
        self._looked_up_to = 0
        """The number of the last line that was read for work as well."""
        self._watch = 0
        self._time: float | None = None
        self._forms: Counter[tuple[Kind, str]] = Counter()
        self._rhythm: dict[tuple[Process, str], list[tuple[int, str]]] = {}
        self._restarts: dict[str, int] = {}
        """The lines that begin a further attempt. The agents of several machines report the same one."""
        self._runs: list[int] = []
        """The lines that begin a further run."""
        self._opening = _Opening()
        self._failed_at = -_NEXT_RUN - 1
        self._before_last = ""

    # Blocks ------------------------------------------------------------------------------------------------

    def read(self, progress: Callable[[int], None]) -> Log:
        for block in self._blocks(progress):
            self._read_block(block)
        self._close()
        return self._log

    def _blocks(self, progress: Callable[[int], None]) -> Iterator[bytes]:
        """Blocks of whole lines; a log whose newest line comes first is turned round."""
        found = blocks(_counted(self._source.chunks, progress))
        first = next(found, b"")
        if not _is_newest_first(first):
            yield first
            yield from found
            return
        self._log.newest_first = True
        yield b"\n".join(b"".join([first, *found]).removesuffix(b"\n").split(b"\n")[::-1])

    def _read_block(self, block: bytes) -> None:
        if not block:
            return
        block = block.removesuffix(b"\n")
        self._lines = block.split(b"\n")
        wanted = deque(self._sieve.wanted(block))
        at = 0
        while at < len(self._lines):
            while wanted and wanted[0] < at:
                wanted.popleft()
            if not (self._busy or self._opening.learning):
                if not wanted:
                    break
                at = wanted.popleft()
            self._at = at
            self._take(self._lines[at])
            at += 1
        self._log.lines += len(self._lines)
        self._before = [*self._before, *self._lines][-_TAIL:]
        self._lines = []

    @property
    def _busy(self) -> bool:
        return self._watch > 0 or bool(self._readers) or self._own.busy or self._tables.busy

    @property
    def _number(self) -> int:
        return self._log.lines + self._at + 1

    def _close(self) -> None:
        for process in list(self._readers):
            self._readers[process].close()
            self._drain(process)
        self._add_all([*self._own.close(), *self._tables.close()])
        self._look_at_the_end()
        first = self._source.attempt or 0
        for event in self.events:
            event.attempt = first + sum(line < event.line for line in self._restarts.values())
            event.run = sum(line <= event.line for line in self._runs)

    def _look_at_the_end(self) -> None:
        """Read the last lines for work, and keep some of them."""
        self._at = 0
        last = len(self._before)
        base = self._log.lines - last
        for offset, raw in enumerate(self._before):
            if base + offset + 1 > self._looked_up_to:
                self._look_at(raw, base + offset + 1)
        tail = [
            (base + offset + 1, text)
            for offset, raw in enumerate(self._before)
            if (text := self._split(_shown(raw)).text).strip()
        ]
        self._log.tail = tuple(tail[-_KEPT_TAIL:])
        if (
            self._log.tail
            and (found := classify(self._log.tail[-1][1])) is not None
            and found.kind is not None
        ):
            self._log.last_line = Event(found.kind, self._index, *self._log.tail[-1])

    # Lines -------------------------------------------------------------------------------------------------

    def _take(self, raw: bytes) -> None:
        number = self._number
        if self._watch:
            self._watch -= 1
            self._looked_up_to = number
        for part in self._sieve.parts(raw):
            self._take_part(part, number)

    def _take_part(self, raw: bytes, number: int) -> None:
        line = self._split(raw)
        self._time = line.time if line.time is not None else self._time
        near = bool(self._readers) or self._failed_at >= number - _NEXT_RUN
        if near and self._opening.comes_again(line.text):
            self._begin_run(number)
        for report in (self._own, self._tables):
            taken, events = report.take(line, number)
            self._add_all(events)
            if taken:
                return
        part = self._follow(line, number)
        failed = part in (Part.FRAME, Part.HEADER) or self._judge(line, number, part)
        if failed:
            self._sieve.keep(raw)
        if line.text.strip():
            self._opening.learn("" if failed else line.text)
            self._before_last = line.text

    def _split(self, raw: bytes) -> Line:
        return self._prefixes.split(decode(raw))

    def _writer(self, line: Line) -> Process:
        own = line.process
        if (self._source.rank is None or own.rank is not None) and (self._source.host is None or own.host):
            return own
        rank = own.rank if own.rank is not None else self._source.rank
        return Process(rank, own.local, own.host or self._source.host, own.pid)

    def _follow(self, line: Line, number: int) -> Part:
        """Give the line to the reader of its writer's traceback."""
        writer = line.process
        reader = self._readers.get(writer)
        if reader is None:
            reader = Reader()
        part = reader.take(line.text, number, record=line.record)
        if part is not Part.NONE or not reader.idle or reader.done:
            if len(self._readers) < _MOST_WRITERS:
                self._readers[writer] = reader
            if part in (Part.FRAME, Part.HEADER) and self._part.get(writer) is not Part.FRAME:
                self._drop_heading(number)
                self._headings.setdefault(writer, []).append(_Heading(number, line, self._before_last, self._time))
            self._part[writer] = part
        self._drain(writer)
        return part

    def _drop_heading(self, number: int) -> None:
        """The line before a traceback only announces it."""
        last = self.events[-1] if self.events else None
        if last is not None and last.kind is Kind.ERROR and last.line == number - 1 and last.match is None:
            self.events.pop()

    def _drain(self, writer: Process) -> None:
        reader = self._readers.get(writer)
        if reader is None:
            return
        done, reader.done = reader.done, []
        for raised in done:
            self._add_exception(raised, writer)
        if reader.idle:
            for found in (self._readers, self._headings, self._part):
                found.pop(writer, None)

    def _add_exception(self, raised: Raised, writer: Process) -> None:
        headings = self._headings.get(writer, [])
        first = raised.chain[0].line
        heading = next((each for each in reversed(headings) if each.number <= first), None)
        heading = heading or _Heading(raised.line, Line("", writer))
        line, before = heading.line, heading.before
        mild = line.level in ("debug", "info", "warning")
        caught = bool(
            _CAUGHT.search(line.text) or _IGNORED.search(before) or (mild and _CAUGHT.search(before))
        )
        raised = replace(raised, caught=raised.caught or caught, aside=_ASIDE.match(before) is not None)
        own = [each.line for each in self.events if each.line > raised.line and each.kind in _OWN_LINES]
        raised = replace(raised, more=raised.more[: min(own) - raised.line - 1]) if own else raised
        event = Event(
            Kind.TOLD if raised.name == "KeyboardInterrupt" else Kind.EXCEPTION,
            self._index,
            raised.line,
            raised.headline,
            self._writer(line),
            heading.time,
            line.level,
            raised=raised,
            fatal=line.marked,
        )
        self._add(event)

    def _judge(self, line: Line, number: int, part: Part) -> bool:
        """Make an event of a line outside of frames; return whether it speaks of a failure."""
        text = line.text
        if not text.strip():
            return False
        found = classify(text)
        kind = found.kind if found is not None else None
        speakers = self._known.speakers(text)
        self._log.heard |= speakers
        match = self._known.match(text, speakers, None)
        if found is not None and kind is None and match is None:
            return False
        if part is Part.MORE and kind is Kind.ERROR:
            return True
        if found is None and match is None and line.record and line.level in ("error", "fatal"):
            kind = Kind.ERROR
        if kind is None and match is None:
            self._beat(line, number)
            return False
        if match is not None and (kind is None or kind not in FAILURES):
            kind = Kind.ERROR
        assert kind is not None
        if kind not in FAILURES and kind is not Kind.RESTART and not self._watch:
            return False  # work is looked at around failures only
        event = Event(
            kind,
            self._index,
            number,
            text,
            self._writer(line),
            line.time if line.time is not None else self._time,
            line.level,
            match=match,
            code=found.code if found is not None else None,
            fatal=line.level == "fatal" or (found is not None and found.fatal),
            loud=(found is not None and found.loud) or line.level in ("error", "fatal"),
        )
        self._add(event)
        return event.is_failure

    def _beat(self, line: Line, number: int) -> None:
        """A line in unknown words: it is a step if lines of its form come again with other values."""
        if not self._watch or not _FRACTION.search(line.text) or _NO_RHYTHM.search(line.text):
            return
        form = _FIGURES.sub("", line.text)
        values = " ".join(_FIGURES.findall(line.text))
        beats = self._rhythm.setdefault((line.process, form), [])
        if all(values != each for _, each in beats):
            beats.append((number, values))
        if len(beats) >= _RHYTHM:
            self._add(Event(Kind.STEP, self._index, number, line.text, self._writer(line), line.time))

    # Events ------------------------------------------------------------------------------------------------

    def _add_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._add(event)

    def _add(self, event: Event) -> None:
        if event.kind is Kind.RESTART and event.text not in self._restarts:
            self._restarts[event.text] = event.line
        if event.is_failure:
            self._failed_at = max(self._failed_at, event.line)
            if event.level not in ("debug", "info"):
                self._look_back()
                self._watch = _AFTER
            self._forms[event.kind, form := _DIGITS.sub("", event.text)] += 1
            if self._forms[event.kind, form] > _MOST_ALIKE:
                same = [
                    each
                    for each in self.events
                    if each.kind is event.kind and _DIGITS.sub("", each.text) == form
                ]
                same[-1].count += 1
                same[-1].line = event.line
                return
        if len(self.events) < MOST_EVENTS:
            self.events.append(event)

    def _begin_run(self, number: int) -> None:
        for process in list(self._readers):
            self._readers[process].close()
            self._drain(process)
        self._runs.append(number)
        self._rhythm.clear()

    def _look_back(self) -> None:
        """Read the lines before a failure for work, unless they were read already."""
        if not self._lines:
            return
        here = self._number
        earlier = [*self._before, *self._lines[: self._at]][-_BEFORE:]
        first = here - len(earlier)
        start, self._looked_up_to = self._looked_up_to, here
        for offset, raw in enumerate(earlier):
            if first + offset > start:
                self._look_at(raw, first + offset)

    def _look_at(self, raw: bytes, number: int) -> None:
        """Read a line that `quick` did not name: it may show work."""
        line = self._split(_shown(raw))
        found = classify(line.text) if line.text.strip() else None
        self._watch += 1
        if found is None:
            self._beat(line, number)
        elif (found.kind is Kind.TOLD and self._failed_at < number) or (
            found.kind not in (*FAILURES, Kind.RESTART) and found.kind is not None
        ):
            event = Event(found.kind, self._index, number, line.text, self._writer(line), line.time)
            self._add(event)
        self._watch -= 1


@dataclass
class _Opening:
    """The first two lines of a log: where they come again after a failure, a further run begins."""

    forms: list[str] = field(default_factory=list)
    _seen_first: bool = False

    @property
    def learning(self) -> bool:
        return len(self.forms) < 2

    def learn(self, text: str) -> None:
        """Take a line of the beginning; one that speaks of a failure makes the opening useless."""
        if self.learning and (form := _DIGITS.sub("", text).strip()) not in self.forms:
            self.forms.append(form)

    def comes_again(self, text: str) -> bool:
        form = _DIGITS.sub("", text).strip()
        if self.learning or min(map(len, self.forms)) < _SHORTEST_OPENING or not form:
            return False
        again = self._seen_first and form == self.forms[1]
        self._seen_first = form == self.forms[0]
        return again


def _shown(raw: bytes) -> bytes:
    """Of a progress bar, what it shows at its end."""
    return raw.rstrip(b"\r").rpartition(b"\r")[2]


def _counted(chunks: Iterable[bytes], progress: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        progress(len(chunk))
        yield chunk


def _is_newest_first(block: bytes) -> bool:
    """Whether the times of a log's first lines fall, and never rise."""
    prefixes = Prefixes()
    lines = (prefixes.split(decode(raw)) for raw in block[: 1 << 16].split(b"\n")[:200])
    times = [line.time for line in lines if line.time is not None]
    steps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return sum(each < 0 for each in steps) >= 3 and all(each <= 0 for each in steps)
