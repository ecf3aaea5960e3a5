"""From the lines of logs to events. Pure: the bytes come in as chunks.

Most lines of a large log are steps, and steps matter only around a failure and at the end. So `quick` names
the lines that may speak of a failure. They are read, with the lines before them; after a failure and at the
end of the log, every line is.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Final

from rallypoint.explain.classify import FAILURE_PATTERNS, class_of, classify
from rallypoint.explain.events import FAILURES, MOST_EVENTS, Event, Kind, Log, Process, Raised
from rallypoint.explain.knowledge import knowledge
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
_NEXT_START: Final = 15
"""A job is started again by hand at most so many lines after its failure."""
_OPENING_LINES: Final = 20
_SHORTEST_OPENING: Final = 8
_RHYTHM: Final = 3
"""So many lines of one form with other values are steps, in any words."""
_NO_RHYTHM: Final = re.compile(
    r"(?i)\b(?:warn\w*|retr\w+|attempt|time\w*|stuck|stall\w*|lost|still|no|since|wait\w*|rank|gpu|cuda|device"
    r"|node|host|worker|process|pid|alive|heartbeats?|uptime|cpu|mem(?:ory)?|util\w*|temp\w*|HTTP|GET|POST|size"
    r"|load\w*|init\w*)\b"
)
_DIGITS: Final = re.compile(r"\d+")
_FIGURES: Final = re.compile(r"-?\d+(?:[.:,]\d+)*(?:e[+-]?\d+)?")
_FRACTION: Final = re.compile(r"(?<![\d.:])\d+\.\d+(?![\d.])")
_OUTSIDE: Final = (Kind.KILLED, Kind.ENDED, Kind.TOLD)
"""No part of an exception's message, though they follow it."""
_IGNORED: Final = re.compile(
    r"^Exception ignored|^--- Logging error|_call_connection_lost\b|\b(?:retryable|retries left)\b"
)
_ASIDE: Final = re.compile(
    r"(?:\W*ERROR\W+)?(?:Exception in (?:thread|callback)|Task exception was never|Error in atexit)"
)
_OPENS: Final = re.compile(
    r"(?i)traceback \(most recent call last|\bFile \"|what\(\): |terminate called|panicked at "
    r"|Fatal Python error: |\b(?:error|exception|interrupt|exit|timeout|fault|critical|fatal)\b"
    r"|Exception ignored|\*\*\* (?:SIG|Process received)"
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


def scan(
    sources: Iterable[Source], progress: Callable[[int], None] = lambda _: None
) -> tuple[list[Log], list[Event]]:
    """All logs, and their events in the order of logs and lines."""
    known = knowledge()
    patterns = [each for each in (*FAILURE_PATTERNS, *STARTS, _OPENS, *known.patterns) if fixed_texts(each)]
    logs: list[Log] = []
    events: list[Event] = []
    for index, source in enumerate(sources):
        reader = _LogReader(source, index, Sieve(patterns))
        logs.append(reader.read(progress))
        events += sorted(reader.events, key=lambda each: each.line)
    return logs, events


@dataclass
class _Heading:
    """What stands at and before the first line of a traceback."""

    number: int
    line: Line
    before: str = ""
    time: float | None = None
    announced: Event | None = None


@dataclass
class _Writer:
    """The traceback that one process is writing, between the lines of others."""

    reader: Reader = field(default_factory=Reader)
    headings: list[_Heading] = field(default_factory=list)
    part: Part = Part.NONE

    def heading_of(self, raised: Raised) -> _Heading | None:
        first = raised.chain[0].line
        return next((each for each in reversed(self.headings) if each.number <= first), None)


class _LogReader:
    """Reads one log: the lines that the sieve wants, those around a failure, and the last ones."""

    def __init__(self, source: Source, index: int, sieve: Sieve) -> None:
        self._source = source
        self._index = index
        self._sieve = sieve
        self._log = Log(source.name, rank=source.rank, host=source.host, attempt=source.attempt)
        self.events: list[Event] = []
        self._prefixes = Prefixes()
        self._reports = (OwnReports(index), Tables(index))
        self._writers: dict[Process, _Writer] = {}
        self._recent: list[bytes] = []
        """The last lines so far."""
        self._read_up_to = 0
        self._watch_up_to = 0
        """The lines up to this one are read, whatever they say."""
        self._time: float | None = None
        self._last = ""
        self._failed_at = -_NEXT_START - 1
        self._alike: Counter[tuple[Kind, str]] = Counter()
        self._latest: dict[tuple[Kind, str], Event] = {}
        self._kept: Counter[bool] = Counter()
        """How many failures are kept, and how many other events."""
        self._work: deque[Event] = deque(maxlen=_TAIL)
        """Work that counts if a failure or the end follows soon."""
        self._rhythm: dict[tuple[Process, str], set[str]] = {}
        self._restarts: list[int] = []
        """The lines behind which a further attempt begins."""
        self._opening = _Opening()

    # Blocks ------------------------------------------------------------------------------------------------

    def read(self, progress: Callable[[int], None]) -> Log:
        for block in self._blocks(progress):
            self._read_block(block)
        self._read_the_end()
        self.events += self._latest.values()
        for event in self.events:
            event.attempt = (self._source.attempt or 0) + bisect_left(self._restarts, event.line)
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
        number = self._log.lines + 1
        block = block.removesuffix(b"\n")
        wanted = deque(number + each for each in self._sieve.wanted(block))
        lines = [*self._recent, *(block.split(b"\n") if block else ())]
        self._log.lines += len(lines) - len(self._recent)
        while number <= self._log.lines:
            while wanted and wanted[0] < number:
                wanted.popleft()
            if not self._is_busy(number):
                if not wanted:
                    break
                number = wanted.popleft()
                self._read_lines(lines, number - _BEFORE, number - 1)
            self._read_lines(lines, number, number)
            number += 1
        self._recent = lines[-_TAIL:]

    def _is_busy(self, number: int) -> bool:
        """Whether a line has to be read, though the sieve does not want it."""
        reports = any(each.busy for each in self._reports)
        return number <= self._watch_up_to or bool(self._writers) or reports or self._opening.is_learning

    def _read_lines(self, lines: Sequence[bytes], first: int, last: int) -> None:
        """Read those of the last lines that were not read yet, from one number to another."""
        for number in range(max(first, self._read_up_to + 1, self._log.lines - len(lines) + 1), last + 1):
            self._read_up_to = number
            for part in self._sieve.parts(lines[number - self._log.lines - 1]):
                self._read_part(part, number)

    def _read_the_end(self) -> None:
        """Read the last lines, and keep some of them."""
        lines, end = self._recent, self._log.lines
        self._watch_up_to = end
        self._keep(*self._work)
        self._read_lines(lines, 1, end)
        self._complete()
        self._add(*(event for report in self._reports for event in report.close()))
        shown = (raw.rstrip(b"\r").rpartition(b"\r")[2] for raw in lines)
        texts = ((number, self._split(raw).text) for number, raw in enumerate(shown, end - len(lines) + 1))
        self._log.tail = tuple([each for each in texts if each[1].strip()][-_KEPT_TAIL:])

    # Lines -------------------------------------------------------------------------------------------------

    def _read_part(self, raw: bytes, number: int) -> None:
        line = self._split(raw)
        self._time = line.time if line.time is not None else self._time
        near = bool(self._writers) or self._failed_at >= number - _NEXT_START
        if near and self._opening.recurs(line.text):
            self._restart(number - 1)
        for report in self._reports:
            taken, events = report.read(line, number)
            self._add(*events)
            if taken:
                return
        part = self._follow(line, number)
        failed = part in (Part.FRAME, Part.HEADER) or self._judge(line, number, part)
        if failed:
            self._sieve.keep(raw)
        if line.text.strip():
            self._opening.learn("" if failed else line.text)
            self._last = line.text

    def _split(self, raw: bytes) -> Line:
        return self._prefixes.split(decode(raw))

    def _follow(self, line: Line, number: int) -> Part:
        """Give the line to the reader of its writer's traceback."""
        writer = self._writers.get(line.process) or _Writer()
        part = writer.reader.read(line.text, number, record=line.record)
        if part is not Part.NONE or not writer.reader.idle or writer.reader.done:
            if len(self._writers) < _MOST_WRITERS:
                self._writers[line.process] = writer
            if part in (Part.FRAME, Part.HEADER) and writer.part is not Part.FRAME:
                announced = self._take_announcement(number)
                writer.headings.append(_Heading(number, line, self._last, self._time, announced))
            writer.part = part
        self._drain(line.process)
        return part

    def _take_announcement(self, number: int) -> Event | None:
        """A failure right before a traceback, which may explain it; a mere error line only announces it."""
        last = self.events[-1] if self.events else None
        if last is None or not last.is_failure or last.line != number - 1:
            return None
        if last.kind is Kind.ERROR and last.match is None:
            self._alike[last.kind, _DIGITS.sub("", last.text)] -= 1
            self.events.pop()
        return last

    def _complete(self) -> None:
        """Nothing follows the exceptions that are being written."""
        for process in list(self._writers):
            self._writers[process].reader.close()
            self._drain(process)

    def _drain(self, process: Process) -> None:
        """Make events of the exceptions that are complete."""
        if (writer := self._writers.get(process)) is None:
            return
        done, writer.reader.done = writer.reader.done, []
        for raised in done:
            self._add_exception(raised, writer.heading_of(raised) or _Heading(raised.line, Line("", process)))
        if writer.reader.idle:
            del self._writers[process]

    def _add_exception(self, raised: Raised, heading: _Heading) -> None:
        line, before = heading.line, heading.before
        aside = _ASIDE.match(before) is not None and class_of(raised) == "follower"
        later = takewhile(lambda each: each.line > raised.line, reversed(self.events))
        outside = [each.line for each in later if each.kind in _OUTSIDE]
        more = raised.more[: min(outside) - raised.line - 1] if outside else raised.more
        raised = replace(raised, more=more)
        kind = Kind.TOLD if raised.name == "KeyboardInterrupt" else Kind.EXCEPTION
        event = self._event(kind, raised.line, replace(line, text=raised.headline), heading.time)
        event.raised, event.fatal, event.announced = raised, line.marked, heading.announced
        event.caught = aside or _IGNORED.search(before) is not None
        self._add(event)

    def _event(self, kind: Kind, number: int, line: Line, time: float | None = None) -> Event:
        own = line.process
        rank = own.rank if own.rank is not None else self._source.rank
        process = Process(rank, own.local, own.host or self._source.host, own.pid)
        return Event(kind, self._index, number, line.text, process, time or line.time, line.level)

    def _judge(self, line: Line, number: int, part: Part) -> bool:
        """Make an event of a line outside of frames; return whether it speaks of a failure."""
        found = classify(line.text)
        kind = found.kind if found is not None else None
        known = knowledge()
        speakers = known.speakers(line.text)
        self._log.heard |= speakers
        match = known.match(line.text, speakers, None)
        if part is Part.MORE and kind is Kind.ERROR:
            return True
        if match is not None and kind not in FAILURES:
            kind = Kind.ERROR
        if found is None and match is None:
            states = line.record and line.level in ("error", "fatal") and not line.text.endswith(":")
            kind = Kind.ERROR if states else self._beat(line)
        if kind is None:
            return False
        event = self._event(kind, number, line, self._time)
        event.match, event.code = match, found.code if found is not None else None
        event.fatal = line.level == "fatal" or (found is not None and found.fatal)
        event.loud = (found is not None and found.loud) or line.level in ("error", "fatal")
        event.reason = found is not None and found.reason
        self._add(event)
        return event.is_failure

    def _beat(self, line: Line) -> Kind | None:
        """A line in unknown words is a step, if lines of its form come again with other values."""
        if not _FRACTION.search(line.text) or _NO_RHYTHM.search(line.text):
            return None
        beats = self._rhythm.setdefault((line.process, _FIGURES.sub("", line.text)), set())
        if len(beats) < _RHYTHM and len(self._rhythm) < _MOST_WRITERS:
            beats.add(" ".join(_FIGURES.findall(line.text)))
        return Kind.STEP if len(beats) >= _RHYTHM else None

    # Events ------------------------------------------------------------------------------------------------

    def _add(self, *events: Event) -> None:
        for event in events:
            if event.kind is Kind.RESTART:
                self._restart(event.line)
            if event.kind not in (*FAILURES, Kind.RESTART) and event.line > self._watch_up_to:
                self._work.append(event)
            elif not event.is_failure or self._is_news(event):
                self._keep(event)

    def _keep(self, *events: Event) -> None:
        for event in events:
            self._kept[event.is_failure] += 1
            if self._kept[event.is_failure] <= MOST_EVENTS:
                self.events.append(event)

    def _restart(self, line: int) -> None:
        """Begin a further attempt behind a line; the agents of several machines report the same one."""
        self._complete()
        latest = self._restarts[-1] if self._restarts else -_AFTER
        if line - latest >= _AFTER or self._failed_at > latest:
            self._restarts.append(line)

    def _is_news(self, event: Event) -> bool:
        """Note a failure. Of many that are alike, the first ones and the last one are kept."""
        self._failed_at = max(self._failed_at, event.line)
        form = (event.kind, _DIGITS.sub("", event.text))
        if len(self._alike) < MOST_EVENTS:
            self._alike[form] += 1
        if self._alike[form] > _MOST_ALIKE:
            self._latest[form] = event
            return False
        if event.level not in ("debug", "info"):
            self._keep(*self._work)
            self._work.clear()
            self._watch_up_to = max(self._watch_up_to, self._read_up_to + _AFTER)
        return True


@dataclass
class _Opening:
    """The first two lines of a log: where they recur after a failure, the job was started again."""

    forms: list[str] = field(default_factory=list)
    _lines: int = 0
    _seen_first: bool = False

    @property
    def is_learning(self) -> bool:
        return len(self.forms) < 2 and self._lines < _OPENING_LINES

    def learn(self, text: str) -> None:
        """Take a line of the beginning; one that speaks of a failure makes the opening useless."""
        if self.is_learning and (form := _DIGITS.sub("", text).strip()) not in self.forms:
            self.forms.append(form)
        self._lines += 1

    def recurs(self, text: str) -> bool:
        form = _DIGITS.sub("", text).strip()
        if len(self.forms) < 2 or min(map(len, self.forms)) < _SHORTEST_OPENING or not form:
            return False
        again = self._seen_first and form == self.forms[1]
        self._seen_first = form == self.forms[0]
        return again


def _counted(chunks: Iterable[bytes], progress: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        progress(len(chunk))
        yield chunk


def _is_newest_first(block: bytes) -> bool:
    """Whether the times of a log's first lines fall, and never rise."""
    prefixes = Prefixes()
    lines = (prefixes.split(decode(raw)) for raw in block[: 1 << 16].split(b"\n")[:200])
    times = [line.time for line in lines if line.time is not None]
    steps = [later - earlier for earlier, later in pairwise(times)]
    return sum(each < 0 for each in steps) >= 3 and all(each <= 0 for each in steps)
