"""The events of a job's logs, in order: what happened, to which process, and in which words. Pure.

`scan` makes them from lines, `reported` from structured reports, and `verdict` asks questions of the list.
"""

from __future__ import annotations

import enum
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rallypoint.frames import QuotedFrame, is_library_file

MOST_EVENTS: Final = 20_000
"""Kept of one log."""
_LIST: Final = re.compile(r"\d+ validation errors? for ")
_INSTALLED: Final = re.compile(r"^<|[/\\](?:bin|Lib)[/\\]")
"""Besides libraries: programs that are installed, and the library of Windows' Python."""


class Kind(enum.Enum):
    """What an event says of its process or of the job."""

    EXCEPTION = "exception"
    """A traceback, or an exception's header that stands alone."""
    ERROR = "error"
    """A line that states an error, without an exception."""
    LIBRARY = "library"
    """A library's or a driver's own account of what fails: it explains the exception that follows."""
    KILLED = "killed"
    """A process ended by a signal, as its parent, its shell or the kernel reports it."""
    ENDED = "ended"
    """A process ended with an exit code other than 0, as its launcher reports it."""
    TOLD = "told"
    """Somebody asked the job to end: a signal, a scheduler, Ctrl-C."""
    STEP = "step"
    ANSWER = "answer"
    """A server has answered a request."""
    READY = "ready"
    """A server or a service is up."""
    DONE = "done"
    """The job, or a part of it, has finished well."""
    RESULT = "result"
    """A figure or a table of results."""
    BEGIN = "begin"
    """Something begins, and its end is to follow: loading, compiling, connecting."""
    RESTART = "restart"
    """A launcher starts the job again: a new attempt."""
    STALL = "stall"
    """A report on a job that makes no progress."""


FAILURES: Final = frozenset(
    (Kind.EXCEPTION, Kind.ERROR, Kind.LIBRARY, Kind.KILLED, Kind.ENDED, Kind.TOLD, Kind.STALL)
)
PROCESS_GONE: Final = (Kind.KILLED, Kind.ENDED)
MILD: Final = ("debug", "info", "warning")
"""Levels at which nothing ends a process."""
WORK: Final = frozenset((Kind.STEP, Kind.ANSWER, Kind.READY, Kind.DONE, Kind.RESULT))


@dataclass(frozen=True)
class Raised:
    """An exception: Python's, a C++ one, a panic; or a native crash with a backtrace."""

    type: str
    """As written, with its module; empty for a native backtrace without an exception."""
    message: str
    """The first line of its text."""
    line: int
    """The number of its header's line."""
    more: tuple[str, ...] = ()
    """Further lines of its text."""
    frames: tuple[QuotedFrame, ...] = ()
    """The innermost frame is the last."""
    earlier: Raised | None = None
    """The exception that it follows in a chain."""
    handling: bool = False
    """Whether it was raised while the earlier one was handled; otherwise that is its stated cause."""
    native: bool = False

    @property
    def headline(self) -> str:
        return f"{self.type}: {self.message}" if self.type and self.message else self.type or self.message

    @property
    def name(self) -> str:
        """The type without its module."""
        return self.type.rpartition(".")[2]

    @property
    def chain(self) -> list[Raised]:
        """From the first exception of the chain to this one."""
        found: list[Raised] = [self]
        while (earlier := found[0].earlier) is not None and len(found) < 50:
            found.insert(0, earlier)
        return found

    @property
    def users_frame(self) -> QuotedFrame | None:
        """The innermost frame of the user's own code; without one, None."""
        own = (each for each in self.frames[::-1] if not _INSTALLED.search(each.file))
        return next((each for each in own if not is_library_file(each.file)), None)

    @property
    def place(self) -> QuotedFrame | None:
        """Where to look: the user's innermost frame, otherwise the innermost."""
        return self.users_frame or (self.frames[-1] if self.frames else None)

    @property
    def text(self) -> str:
        """All of its text, for patterns that cover several lines."""
        return "\n".join((self.headline, *self.more))

    @property
    def account(self) -> str:
        """The headline and, where that only announces it, the line that says what happened.

        That is a line of its text, or the line of code of an assertion that says nothing.
        """
        more = [line.strip() for line in self.more if line.strip()]
        if _LIST.search(self.message):
            more = [line.strip() for line in self.more if line.startswith("  ")]
        elif "Last error:" in (self.message, *more):
            more = [line for line in more[more.index("Last error:") + 1 :] if line != "Last error:"]
        elif not self.message and not more and self.frames:
            more = [self.frames[-1].source] if self.frames[-1].source.startswith("assert") else []
        elif self.message.strip() and not self.message.rstrip().endswith(":"):
            more = []
        return ": ".join((self.headline.removesuffix(":"), *more[:1])) if more else self.headline


@dataclass(frozen=True)
class Process:
    """Who wrote a line, as far as the line tells."""

    rank: int | None = None
    local: int | None = None
    """The rank within its machine, where the log does not give the rank in the job."""
    host: str | None = None
    pid: int | None = None

    def __bool__(self) -> bool:
        return self != NOBODY

    def may_be(self, other: Process) -> bool:
        """Whether nothing speaks against it that both are the same process."""
        mine, others = vars(self).values(), vars(other).values()
        return all(a is None or b is None or a == b for a, b in zip(mine, others, strict=True))

    @property
    def number(self) -> int | None:
        """Its rank; on one machine, the local rank is the rank."""
        return self.local if self.rank is None else self.rank

    def is_same(self, other: Process) -> bool:
        """Whether both have the same rank."""
        same_host = None in (self.host, other.host) or self.host == other.host
        return self.number is not None and self.number == other.number and same_host


NOBODY: Final = Process()


@dataclass(frozen=True, eq=False)
class Entry:
    """Something that logs show, with its advice. Entries are compared by identity."""

    id: str
    title: str
    role: str
    """One of ROLES: an ending is that of a process, for a reason that is outside of the log."""
    patterns: tuple[re.Pattern[str], ...]
    example: str
    why: str
    do: tuple[str, ...]
    """A step that begins with `@` names a remedy, whose text depends on the launcher."""
    sources: tuple[str, ...]
    by: frozenset[str] = frozenset()
    heard: frozenset[str] = frozenset()
    unlike: tuple[str, ...] = ()
    """Lines that resemble it and mean something else."""


@dataclass(frozen=True)
class Match:
    """An entry that a text matches, and what its groups captured."""

    entry: Entry
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Event:
    """One thing that a log states. Two events are never equal: each stands for its own line."""

    kind: Kind
    log: int
    """The number of its log."""
    line: int
    text: str
    """The line without its prefixes."""
    process: Process = NOBODY
    time: float | None = None
    """Seconds since the epoch, or since some midnight where the log has no dates."""
    level: str = ""
    """debug, info, warning, error or fatal, where a logger gave it."""
    attempt: int = 0
    """How often the job had been started again before, by a launcher or by hand."""
    """A log may hold several runs of the job, one after the other."""
    raised: Raised | None = None
    match: Match | None = None
    code: int | None = None
    """An exit code; the negative number of a signal."""
    first: bool = False
    """The launcher named this process as the first that failed."""
    fatal: bool = False
    """The line says itself that the process ends with it."""
    loud: bool = True
    """The line states an error, and does not only have the words of one."""
    reason: bool = False
    """The line states the operating system's reason."""
    caught: bool = False
    """The log says that the program caught the exception and went on."""
    announced: Event | None = None
    """The failure that is stated right before this exception, and may explain it."""

    @property
    def is_failure(self) -> bool:
        return self.kind in FAILURES

    @property
    def is_work(self) -> bool:
        return self.kind in WORK

    @property
    def role(self) -> str:
        """cause, ending, consequence, wrapper or notice by its entry; empty without one."""
        return self.match.entry.role if self.match is not None else ""

    @property
    def headline(self) -> str:
        """The exception, otherwise the line."""
        return self.raised.headline if self.raised is not None and self.raised.headline else self.text.strip()


@dataclass
class Log:
    """One log, once it has been read."""

    name: str
    lines: int = 0
    rank: int | None = None
    host: str | None = None
    attempt: int | None = None
    tail: tuple[tuple[int, str], ...] = ()
    """The last lines, without their prefixes, each with its number."""
    newest_first: bool = False
    heard: set[str] = field(default_factory=set)
    """The speakers of the knowledge base that it shows."""

    def shown_line(self, line: int) -> int:
        """The number of a line as an editor counts it."""
        return self.lines + 1 - line if self.newest_first else line


class History:
    """The events of all logs, indexed for the rules."""

    def __init__(self, events: Sequence[Event], logs: Sequence[Log]) -> None:
        self.logs = logs
        self.failures = [each for each in events if each.is_failure]
        serious = (each.attempt for each in self.failures if each.level not in MILD)
        self.last_failed = max(serious, default=0)
        """The last attempt with a failure that is more than a warning."""
        self.last_worked = max((each.attempt for each in events if each.is_work), default=0)
        """The last attempt that shows work."""
        self._work: dict[int, list[Event]] = {}
        self._by_kind: dict[tuple[int, int, Kind], list[Event]] = {}
        self._last_gone: dict[int, int] = {}
        for each in events:
            self._by_kind.setdefault((each.log, each.attempt, each.kind), []).append(each)
            if each.is_work or each.kind is Kind.BEGIN:
                self._work.setdefault(each.log, []).append(each)
            if each.kind in PROCESS_GONE:
                self._last_gone[each.log] = max(self._last_gone.get(each.log, 0), each.line)

    def before(self, event: Event, kind: Kind) -> list[Event]:
        """The events of a kind before another event, in its log and attempt."""
        found = self._by_kind.get((event.log, event.attempt, kind), [])
        return found[: bisect_left(found, event.line, key=_line_of)]

    def between(self, earlier: Event, later: Event, kinds: Iterable[Kind]) -> bool:
        """Whether there is an event of some kinds between two of a log and attempt."""
        found = (self.before(later, kind) for kind in kinds)
        return any(each and each[-1].line > earlier.line for each in found)

    def is_lost_after(self, event: Event) -> bool:
        """Whether a process is reported gone after a failure."""
        return self._last_gone.get(event.log, 0) > event.line

    def work_before(self, event: Event) -> list[Event]:
        """The work that the log shows before an event, in its attempt."""
        work = self._work.get(event.log, [])
        end = bisect_left(work, event.line, key=_line_of)
        return [
            each
            for each in work[max(end - _ENOUGH, 0) : end]
            if each.attempt == event.attempt and each.is_work
        ]

    def at(self, event: Event) -> Event | None:
        """What the log shows last before an event: work, or a beginning."""
        work = self._work.get(event.log, [])
        return next(iter(work[: bisect_left(work, event.line, key=_line_of)][-1:]), None)

    def last_of(self, log: int) -> Event | None:
        """The last line of a log that shows work or a beginning."""
        return self._work[log][-1] if log in self._work else None

    def after(self, event: Event) -> list[Event]:
        """The work and the beginnings that the log shows after an event.

        A bar that is only drawn again is no work.
        """
        drawn = {step_of(each) for each in self.work_before(event) if each.kind is not Kind.ANSWER}
        work = self._work.get(event.log, [])
        begin = bisect_right(work, event.line, key=_line_of)
        return [each for each in work[begin : begin + _ENOUGH] if step_of(each) not in drawn]

    def work_after(self, event: Event) -> list[Event]:
        """The work of the event's process after it."""
        return [each for each in self.after(event) if each.is_work and each.process.may_be(event.process)]

    def last_work(self, log: int | None = None) -> Event | None:
        """The last line that shows work, of one log or of any."""
        logs = self._work.values() if log is None else [self._work.get(log, [])]
        return next((each for work in reversed(list(logs)) for each in reversed(work) if each.is_work), None)


_ENOUGH: Final = 100
"""So many lines of work before or after an event count."""


def step_of(event: Event) -> str:
    """What tells a step from others: a bar's counters, as it may be drawn twice; an answer's line."""
    if event.kind is Kind.ANSWER:
        return str(event.line)
    return " ".join(re.findall(r"\d+/\d+", event.text)) or event.text if "%|" in event.text else event.text


def distinct_steps(work: Iterable[Event]) -> int:
    """How many different steps some lines show."""
    return len(set(map(step_of, work)))


def _line_of(event: Event) -> int:
    return event.line
