"""One log on its way through: from blocks of bytes to evidence. Pure.

Most of a log is never looked at: the sieve names the lines that may matter. Only after a line that opens
something (a traceback, torchrun's table) are all lines read, until it is closed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

from rallypoint.diagnose.explain import tracebacks
from rallypoint.diagnose.explain.endings import IN_A_SCRIPT
from rallypoint.diagnose.explain.evidence import Evidence, Sighting, Source
from rallypoint.diagnose.explain.knowledge import Cause
from rallypoint.diagnose.explain.layers import LAST_ERROR, layer_of
from rallypoint.diagnose.explain.life import LAST_LINES, Life, look_for_life
from rallypoint.diagnose.explain.prefixes import MILD, SERIOUS, Line, Prefixes
from rallypoint.diagnose.explain.reasons import missed
from rallypoint.diagnose.explain.runs import NEAR, Opening
from rallypoint.diagnose.explain.sieve import ESCAPE, Sieve, blocks, reduce
from rallypoint.diagnose.explain.stamps import Stamp
from rallypoint.diagnose.explain.tracebacks import Raised, Traceback

_LONGEST_TEXT: Final = 4096
_MOST_WRITERS: Final = 100_000
_LINES_BACK: Final = 60
_TAIL_BYTES: Final = 1 << 16
_MESSAGE_LINES: Final = 12
_LONGEST_MORE: Final = 2_000
_MOST_LOOKS: Final = 20
_MOST_BACK: Final = 1_000
_MOST_ALIKE: Final = 10
_MOST_RUNS: Final = 200
_LONGEST_OPENING: Final = 100
_RESTARTS: Final = b"will restart worker group"
_LONGEST_FORM: Final = 200
# Colours whose escape character was lost when the log was copied.
_LOST_ESCAPE: Final = re.compile(rb"(?:\xef\xbf\xbd|\^\[)?\[\d{1,3}(?:;\d{1,3}){0,4}m")
_NO_DIGITS: Final = str.maketrans("", "", "0123456789")
# Words of a warning about an exception; other warnings may stand before any traceback.
_WARNED_OF: Final = re.compile(
    r"(?i)traceback|exception|error|fail|could not|cannot|can't|won't|unable|skip(?!\w*[=:])|ignor"
)
_WARNED_OF_LACK: Final = re.compile(r"(?i)\bnot (?:available|found|installed)\b|\b(?:unavailable|missing)\b")
_RETRIED: Final = re.compile(r"failed with retryable exception\b.{0,200}\b[1-9]\d* retries left")
_ASIDE: Final = re.compile(
    r"(?:\[\w+\] )?Exception in (?:thread|callback) |Task exception was never retrieved|Error in atexit"
    r"|Examining the path of \S+ raised:"
)
_LAST_WORD: Final = re.compile(r"\b(?:FATAL|CRITICAL|PANIC)\b")
_ITEM: Final = ("- ", "* ", "\t- ", "  - ", "  * ")
_ALONE: Final = re.compile(r"Process \S{1,80}:$")

Writer = tuple[object, ...]


@dataclass(frozen=True)
class Log:
    """A log to read, with what is known of it beforehand."""

    name: str
    chunks: Iterable[bytes]
    rank: int | None = None
    host: str | None = None
    attempt: int | None = None
    modified: float | None = None
    """When it was written last, in seconds since 1970: it tells the year of times that have none."""
    stamp: Stamp | None = None
    """The time of all its lines, if that is known."""


def scan(log: Log, evidence: Evidence, sieve: Sieve, progress: Callable[[int], None]) -> None:
    """Add what a log tells to the evidence; `progress` is called with the number of bytes of each block."""
    source = Source(log.name, log.modified, log.attempt)
    evidence.sources.append(source)
    scanner = _Scanner(log, evidence, source, sieve)
    for block in blocks(log.chunks):
        scanner.take_block(block)
        progress(len(block))
    scanner.close()


def decode(raw: bytes) -> str:
    """A line as text: without colours, cut if it is very long; bytes that are no UTF-8 are marked."""
    plain = ESCAPE.sub(b"", raw) if b"\x1b" in raw else raw
    plain = _LOST_ESCAPE.sub(b"", plain) if b"m" in plain and b"[" in plain else plain
    return plain[: 4 * _LONGEST_TEXT].decode(errors="replace")[:_LONGEST_TEXT].rstrip()


@dataclass
class _Pending:
    """An exception that no entry knows yet: more of its message, or of its chain, may tell what it is."""

    raised: Raised
    seen: Sighting
    message_lines: int = _MESSAGE_LINES
    """How many lines may still be part of the message."""
    block: bool = False
    """Whether the message is an indented block of lines, which may have empty ones."""
    became: Raised | None = None


class _Scanner:
    def __init__(self, log: Log, evidence: Evidence, source: Source, sieve: Sieve) -> None:
        self._log = log
        self._sieve = sieve
        self._evidence = evidence
        self._source = source
        self._index = len(evidence.sources) - 1
        self._prefixes = Prefixes()
        self._tracebacks: dict[Writer, Traceback] = {}
        self._pending: dict[Writer, _Pending] = {}
        self._lines: Sequence[bytes] = ()
        self._at = 0
        self._tail = b""
        """The bytes before the block that is being read."""
        self._looked_back: tuple[int, Stamp | None] = (-1, None)
        """Up to which line a time was looked for, and that time."""
        self._answering: set[Writer] = set()
        """Writers whose next line says what NCCL's last error was."""
        self._failures: set[str] = set()
        """Lines that speak of a failure, without their numbers: each was looked at once."""
        self._opening = Opening()
        self._runs = 1
        self._restarted = 0
        """The failure after which torchrun starts its ranks again: that is a try of the same run."""

    # Which lines -------------------------------------------------------------------------------------------

    def take_block(self, block: bytes) -> None:
        """The lines that the sieve selects; and all those between, while something is open."""
        selected = self._sieve.select(block)
        first = next(selected, None)
        if first is not None or self._busy or self._is_near(-1) or self._may_open:
            self._lines = block.split(b"\n")
            self._learn_opening()
            indexes = selected if first is None else chain((first,), selected)
            self._take_selected(indexes, len(self._lines), self._take, self._take_between)
        self._source.lines += block.count(b"\n")
        self._tail = (block if len(block) > _TAIL_BYTES else self._tail + block)[-_TAIL_BYTES:]

    def _take_selected(
        self,
        selected: Iterable[int],
        count: int,
        take: Callable[[int], None],
        take_between: Callable[[int], bool],
    ) -> None:
        """Take some of the items, and of those between as many as are wanted behind each."""
        done = -1
        for index in chain(selected, (count,)):
            while done + 1 < index and take_between(done + 1):
                done += 1
            if done < index < count:
                done = index
                take(index)

    def _take_between(self, index: int) -> bool:
        """Take a line that the sieve has not selected; returns whether it was wanted."""
        if self._busy:
            self._take(index)
            return True
        if self._is_near(index - 1):
            self._at = index
            self._look_for_a_run()
            return True
        return False

    @property
    def _may_open(self) -> bool:
        return not self._opening.is_known and self._source.lines < _LONGEST_OPENING

    def _learn_opening(self) -> None:
        before = self._source.lines
        for number, raw in enumerate(islice(self._lines, max(_LONGEST_OPENING - before, 0)), before + 1):
            if self._opening.is_known:
                break
            self._opening.learn(self._split(raw), number)

    def _is_near(self, index: int) -> bool:
        """Whether what comes behind a line is still near a failure, so that a further run may begin there."""
        last = self._source.ending.last
        return self._opening.end < last <= self._source.lines + index + 1 < last + NEAR

    def _look_for_a_run(self) -> None:
        last = self._source.ending.last
        if self._runs < _MOST_RUNS and self._is_near(self._at - 1):
            raw = self._lines[self._at]
            if _RESTARTS in raw:
                self._restarted = last
            begin = self._opening.begins_at(raw, self._number, self._split)
            if begin > last and self._restarted != last:
                self._begin_run(begin)

    def _begin_run(self, begin: int) -> None:
        """What comes from a line on is of a further run, which knows nothing of the one before."""
        self._settle_all()
        self._tracebacks.clear()
        self._answering.clear()
        self._failures.clear()
        read = self._source.lines
        self._close_run(islice(self._earlier(), self._number - begin, None), begin - 1)
        self._runs += 1
        self._source = self._source.next_run(begin, read)
        self._evidence.sources.append(self._source)
        self._index = len(self._evidence.sources) - 1

    def _close_run(self, backwards: Iterable[bytes], last: int) -> None:
        """Note what the lines of a run up to its last one show, which come backwards."""
        own = islice(backwards, last - self._source.begin + 1)
        self._source.life = self._look(own, last)
        self._source.lines = last

    def close(self) -> None:
        """The log is at its end: exceptions that still wait for more are unknown ones."""
        self._settle_all()
        lines = self._tail.removesuffix(b"\n").split(b"\n")
        self._close_run(reversed(lines), self._source.lines)

    def _look(self, backwards: Iterable[bytes], last: int) -> Life:
        """What the lines up to the one with the number `last` show.

        Ranks all say the same, and servers are asked for their health again and again. So of lines that
        differ in numbers only, a few are enough.
        """
        seen: Counter[bytes] = Counter()
        lines = []
        for number, raw in zip(range(last, 0, -1), islice(backwards, _MOST_BACK), strict=False):
            shown = raw.rstrip(b"\r").rpartition(b"\r")[2]  # of a progress bar, what it shows at its end
            form = reduce(shown)
            seen[form] += 1
            if seen[form] <= _MOST_ALIKE:
                lines.append((number, self._split(shown)))
            if len(lines) == LAST_LINES:
                break
        return look_for_life(lines[::-1])

    @property
    def _busy(self) -> bool:
        return bool(self._tracebacks or self._answering or not self._source.table.idle)

    def _take(self, index: int) -> None:
        """A line, or what matters of its parts: a progress bar may write a hundred thousand into one line."""
        self._at = index
        self._look_for_a_run()
        raw = self._lines[index]
        parts = raw.rstrip(b"\r").split(b"\r")
        selected = self._sieve.select(b"\n".join(parts)) if len(parts) > 1 else (0,)

        def take(at: int) -> None:
            self._take_part(raw, parts[at])

        def take_between(at: int) -> bool:
            busy = self._busy
            if busy:
                take(at)
            return busy

        self._take_selected(selected, len(parts), take, take_between)

    def _take_part(self, raw: bytes, part: bytes) -> None:
        if self._take_line(self._split(part)):
            self._sieve.keep(part)
            self._sieve.keep(raw)

    def _split(self, raw: bytes) -> Line:
        line = self._prefixes.split(decode(raw))
        if self._log.rank is None and self._log.host is None:
            return line
        return replace(
            line,
            rank=line.rank if line.rank is not None else self._log.rank,
            host=line.host or self._log.host,
        )

    # One line ----------------------------------------------------------------------------------------------

    def _take_line(self, line: Line) -> bool:
        """Read a line; returns whether it names an exception or a known cause."""
        tries = self._source.tries.count
        line = self._source.table.take(self._source.tries.take(line))
        self._evidence.note_contexts(line.text)
        is_frame, raised = self._follow_traceback(line)
        if is_frame or (raised is not None and raised.ignored):
            return raised is not None
        return self._judge(line, raised, tries) or raised is not None

    def _follow_traceback(self, line: Line) -> tuple[bool, Raised | None]:
        """Whether a line belongs to the frames of a traceback, and the exception if it is its end."""
        state = self._tracebacks.get(line.writer) or Traceback()
        if tracebacks.BEGIN in line.text:
            state.warned = self._is_warned_of(line, _WARNED_OF)
            state.aside = self._stands_behind(_ASIDE, 2) or (state.chained and state.aside)
            state.warned_of_lack = self._is_warned_of(line, _WARNED_OF_LACK)
            state.alone = self._stands_behind(_ALONE, 1)
            state.head = self._number - 1 if self._is_heading(line) else 0
        raised = state.take(line.text)
        if raised is not None and not (raised.warned or raised.ignored):
            self._evidence.suspects.forget(self._source.name, state.head)
        if state.idle or (tracebacks.BEGIN in line.text and not state.chained):
            self._settle(line.writer)
        if state.idle:
            self._tracebacks.pop(line.writer, None)
        elif len(self._tracebacks) < _MOST_WRITERS:
            self._tracebacks[line.writer] = state
        return state.frame, raised

    def _is_warned_of(self, head: Line, words: re.Pattern[str]) -> bool:
        """Whether a traceback belongs to a warning: a logger's, in its first line or in the one before."""
        before = next(self._earlier(), b"")
        record = head if head.record else self._split(before)
        if record.writer == head.writer and _RETRIED.search(record.text):
            return True
        return record.record and record.severity == MILD and bool(words.search(record.text))

    def _is_heading(self, head: Line) -> bool:
        """Whether the line before a traceback only announces it."""
        before = self._split(next(self._earlier(), b""))
        return before.writer == head.writer and not _LAST_WORD.search(before.text)

    def _stands_behind(self, head: re.Pattern[str], lines: int) -> bool:
        """Whether one of the lines before a traceback says where it comes from."""
        return any(head.match(self._split(raw).text) for raw in islice(self._earlier(), lines))

    def _judge(self, line: Line, raised: Raised | None, tries: int) -> bool:
        """Weigh a line outside of frames; returns whether it means a known cause."""
        matches = self._matches(line, tries)
        mild = (raised is None or raised.place is None) and self._is_mild(line)
        raised = None if mild else raised
        mild = mild or (raised is not None and raised.warned)
        for cause, facts in matches:
            self._evidence.add_known(cause, facts, raised, self._sighting(line, tries, cause, mild))
        before = self._source.ending.last
        ended = self._source.ending.take(line, self._number, raised, [cause.role for cause, _ in matches])
        if before < self._source.ending.last:
            self._look_between(before, line)
        if raised is None and not matches and (words := missed(line.text)):
            self._evidence.add_reason(words, self._plain_sighting(line, tries))
        if not matches and raised is None and (not mild or (ended and not line.handled)):
            self._note_line(line, tries, ended=ended)
        # An entry that needs a context may be dropped in the end.
        known = [cause for cause, _ in matches if not cause.context]
        if raised is not None and raised.instead:
            self._pending.pop(line.writer, None)
            writer = (self._index, *line.process, line.host, tries)
            self._evidence.forget_lack(writer, self._number - _LINES_BACK)
        if raised is not None and not raised.chained and not known:
            self._settle(line.writer)
            self._pending[line.writer] = _Pending(raised, self._sighting(line, tries, raised, mild))
            if line.writer not in self._tracebacks:  # there are too many writers: no more of it is read
                self._settle(line.writer)
        elif line.writer in self._pending:
            self._go_on(line, self._pending[line.writer], raised, {cause.role for cause in known})
        if raised is None and not known and not mild and self._source.table.idle:
            serious = line.severity == SERIOUS
            self._evidence.suspects.add(
                line.text, self._source.name, self._number, line.process, serious=serious
            )
        return bool(matches)

    def _is_mild(self, line: Line) -> bool:
        """Whether it is a warning, or an item of the list that one announces."""
        if line.severity == MILD or line.record or not line.text.startswith(_ITEM):
            return line.severity == MILD
        before = map(self._split, islice(self._earlier(), _MESSAGE_LINES))
        head = next((each for each in before if not each.text.startswith(_ITEM)), line)
        return head.record and head.severity == MILD and head.text.endswith(":")

    def _matches(self, line: Line, tries: int) -> list[tuple[Cause, dict[str, str]]]:
        """The causes that a line means. Those that are differences between lines are only noted."""
        matches = self._evidence.match(line.text) if line.text else []
        for cause, facts in matches:
            if cause.differs:
                where = (self._index, self._number, line.rank, line.host)
                stamp = line.stamp or self._log.stamp
                seen = Sighting(*where, stamp, stamp is not None, tries, line.text, line.process[1])
                self._evidence.add_told(cause, facts, seen)
        return [(cause, facts) for cause, facts in matches if not cause.differs]

    def _look_between(self, before: int, line: Line) -> None:
        """A further failure: whether the job went on after the one before, up to this one."""
        form = line.text[:_LONGEST_FORM].translate(_NO_DIGITS)
        if form in self._failures or len(self._failures) >= _MOST_LOOKS:
            return
        self._failures.add(form)
        between = self._number - 1 - before
        if before > 0 and between > 1:
            life = self._look(islice(self._earlier(), between), self._number - 1)
            self._source.ending.look_back(life, before, self._number)

    def _note_line(self, line: Line, tries: int, *, ended: bool) -> None:
        """A line that no entry knows: how a process ended, or what a library says by itself."""
        seen = self._plain_sighting(line, tries)
        asked = line.text.strip() == LAST_ERROR
        answer = f"{LAST_ERROR} {line.text}" if line.writer in self._answering and not asked else line.text
        if layer := layer_of(answer):
            self._evidence.add_said(layer, replace(seen, stamp=line.stamp or self._look_back()))
        elif ended:
            self._evidence.add_ending(replace(seen, stamp=line.stamp or self._look_back()))
        self._answering.discard(line.writer)
        if asked and len(self._answering) < _MOST_WRITERS:
            self._answering.add(line.writer)

    def _go_on(self, line: Line, pending: _Pending, raised: Raised | None, roles: set[str]) -> None:
        """A line after an exception that is not known: the next one of its chain, or more of its message."""
        if raised is not None:
            pending.message_lines = 0
            pending.became = raised
            if "cause" in roles or (pending.raised.only_waited and "symptom" in roles):
                del self._pending[line.writer]  # the last one of the chain says what it means
            return
        announced = pending.raised.message or pending.seen.text.endswith(":")
        if pending.message_lines == _MESSAGE_LINES and announced and pending.raised.goes_on_in(line.text):
            pending.block = not pending.raised.message
            message = f"{pending.raised.message} {line.text.strip()}".strip()
            pending.raised = replace(pending.raised, message=message)
            pending.seen = replace(pending.seen, line=self._number)
        empty = line.anonymous and not line.text and not pending.block
        if line.record or line.text.startswith("[") or empty or IN_A_SCRIPT.match(line.text):
            pending.message_lines = 0  # without names of writers, an empty line ends the message
        elif pending.message_lines:
            more = f"{pending.raised.more}\n{line.text}".strip()[:_LONGEST_MORE]
            pending.raised = replace(pending.raised, more=more)
        if pending.message_lines and roles & {"cause", "symptom"}:
            del self._pending[line.writer]
        pending.message_lines = max(pending.message_lines - 1, 0)

    def _settle_all(self) -> None:
        for writer in list(self._pending):
            self._settle(writer)

    def _settle(self, writer: Writer) -> None:
        """Nothing more of the message or the chain will come: the exception is an unknown one."""
        pending = self._pending.pop(writer, None)
        if pending is not None:
            self._evidence.add_unknown(pending.raised, pending.became, pending.seen)

    @property
    def _number(self) -> int:
        """The number of the line that is being read."""
        return self._source.lines + self._at + 1

    def _plain_sighting(self, line: Line, tries: int) -> Sighting:
        where = (self._index, self._number, line.rank, line.host)
        return Sighting(*where, line.stamp, False, tries, line.text, line.process[1])

    def _sighting(self, line: Line, tries: int, what: Cause | Raised, mild: bool = False) -> Sighting:
        stamp = line.stamp or self._log.stamp
        where = (self._index, self._number, line.rank, line.host)
        seen = Sighting(*where, stamp, stamp is not None, tries, line.text, line.process[1], mild)
        # Looking back is expensive, and only the first sighting of a writer counts.
        if stamp is not None or not self._evidence.is_news(what, seen.writer):
            return seen
        return replace(seen, stamp=self._look_back())

    def _look_back(self) -> Stamp | None:
        """The time of a line shortly before: a traceback has none of its own."""
        number = self._source.lines + self._at
        known_to, stamp = self._looked_back
        for distance, raw in enumerate(self._earlier(), 1):
            if number - distance < known_to:
                break  # the last look back has found the time of lines before that
            found = self._prefixes.split(decode(raw)).stamp
            if found is not None or distance == _LINES_BACK:
                stamp = found
                break
        self._looked_back = (number, stamp)
        return stamp

    def _earlier(self) -> Iterator[bytes]:
        """The lines before this one, the last one first."""
        yield from (self._lines[index] for index in range(self._at - 1, -1, -1))
        yield from reversed(self._tail.split(b"\n")[:-1])
