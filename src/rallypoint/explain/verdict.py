"""Which failure came first, and what it is. Pure.

Three tables decide, in this order. NOT_FATAL says which failures ended nothing. TIERS says how near to a first
cause a failure can be: an exception is nearer than a lost connection, which is nearer than a launcher's "a worker
failed". Within a tier, the order decides: what the launcher named as the first, then time, then the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rallypoint.explain.classify import class_of
from rallypoint.explain.events import (
    Event,
    History,
    Kind,
    Log,
    Process,
    Raised,
    distinct_steps,
)
from rallypoint.explain.knowledge import Knowledge, knowledge

KNOWN: Final = "known cause"
CONSEQUENCE: Final = "consequence"
UNKNOWN: Final = "unknown error"

_MOST: Final = 50
_NEAR_END: Final = 15
_ENOUGH_STEPS: Final = 2
"""One line may have been on its way already when something failed; two were not."""
_MANY_STEPS: Final = 5
"""So many steps are not made without a process that takes part in them."""
_CALM: Final = 5
_AT_THE_END: Final = 3


@dataclass(frozen=True)
class Verdict:
    """The first failure, and why it was chosen."""

    event: Event
    certainty: str
    """known cause, consequence or unknown error."""
    reason: str
    root: Raised | None = None
    """The exception of the chain to look at."""
    by: Event | None = None
    """The line in which a library itself says what happened."""

    @property
    def chain(self) -> tuple[Raised, ...]:
        return tuple(self.event.raised.chain) if self.event.raised is not None else ()


@dataclass(frozen=True)
class Explanation:
    """What the logs of a job say."""

    verdict: Verdict | None = None
    consequences: tuple[Event, ...] = ()
    notices: tuple[Event, ...] = ()
    suspects: tuple[Event, ...] = ()
    stop: Event | None = None
    """Where the log stops, if nothing failed and it shows no end."""
    attempts: int = 1
    earlier: tuple[Event, ...] = ()
    """The first failures of earlier attempts."""
    launcher: str = ""
    logs: tuple[Log, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    """Logs that could not be read, each with the reason."""
    worked: Event | None = None
    """The last sign of work."""
    set_aside: dict[Event, str] = field(default_factory=dict)
    """Why a failure ended nothing."""

    @property
    def lines(self) -> int:
        return sum(log.lines for log in self.logs)

    @property
    def found(self) -> bool:
        return self.verdict is not None or self.stop is not None


# Which failures ended nothing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A reason for which a failure ended nothing."""

    name: str
    reason: str
    holds: Callable[[Event, History], bool]


_PROCESS_GONE: Final = (Kind.KILLED, Kind.ENDED)
_MILD: Final = ("debug", "info", "warning")


def _is_notice(event: Event, history: History) -> bool:
    return event.role == "notice"


def _was_caught(event: Event, history: History) -> bool:
    return event.raised is not None and event.raised.caught


def _was_restarted(event: Event, history: History) -> bool:
    """A later attempt, or a later run, is at work, and has no failure of its own."""
    place = (event.run, event.attempt)
    later = [
        each for each in history.failures if (each.run, each.attempt) > place and each.level not in _MILD
    ]
    return not later and any((each.run, each.attempt) > place and each.is_work for each in history.events)


def _was_survived(event: Event, history: History) -> bool:
    """The process made further steps, or finished its work. After its end, only a new start counts."""
    if event.kind is Kind.LIBRARY:
        return False
    after = history.work_after(event)
    if event.fatal and event.kind is Kind.EXCEPTION:  # torch puts the rank before its last words only
        after = [each for each in after if each.process.rank == event.process.rank]
    if event.kind in (*_PROCESS_GONE, Kind.TOLD):
        ready = [each for each in after if each.kind is Kind.READY]
        if ready:
            return any(each.line > ready[0].line for each in after)
        done = any(each.kind is Kind.DONE for each in after)
        return done or (event.kind is Kind.ENDED and distinct_steps(after) >= _MANY_STEPS)
    if event.kind is Kind.EXCEPTION and not event.process and _is_process_lost(event, history):
        return False
    if any(each.kind in (Kind.READY, Kind.DONE) for each in after):
        return True
    enough = _ENOUGH_STEPS if event.kind is Kind.EXCEPTION else 1
    steps = [each for each in after if each.kind in (Kind.STEP, Kind.ANSWER)]
    return bool(steps) and distinct_steps(after) >= enough


def _is_process_lost(event: Event, history: History) -> bool:
    """Whether a process is reported gone after a failure."""
    return any(
        each.kind in _PROCESS_GONE and each.line > event.line and each.log == event.log
        for each in history.failures
    )


def _was_aside(event: Event, history: History) -> bool:
    """A thread or a task lost a connection: the program itself did not."""
    return event.raised is not None and event.raised.aside and class_of(root_of(event.raised)) == "follower"


def _was_not_needed(event: Event, history: History) -> bool:
    """A module was missing, and the program went on without it."""
    if event.raised is None or event.raised.name not in ("ModuleNotFoundError", "ImportError") or event.fatal:
        return False
    later = [each for each in history.failures if each.log == event.log and each.line > event.line]
    return not later and history.logs[event.log].lines - event.line > _CALM


def _was_at_work(event: Event, history: History) -> bool:
    """A server that was at work was asked to end, or a job that was done."""
    if event.kind is not Kind.TOLD or event.match is not None:
        return False
    return any(each.kind in (Kind.READY, Kind.ANSWER, Kind.DONE) for each in history.work_before(event))


def _is_aftermath(event: Event, history: History) -> bool:
    """The job was done, or was asked to end, before this failed."""
    if event.kind is Kind.TOLD:
        return False
    told = history.before(event, Kind.TOLD)
    if told and not _fatal_before(told[0], history):
        return not any(each.is_work and told[-1].line < each.line < event.line for each in history.events)
    done = [each for each in history.before(event, Kind.DONE) if history.work_before(each)]
    return bool(done) and not any(
        each.log == event.log and done[-1].line < each.line < event.line and each.kind in _BUSY
        for each in history.events
    )


_BUSY: Final = (Kind.STEP, Kind.ANSWER, Kind.BEGIN)


def _fatal_before(told: Event, history: History) -> bool:
    """Whether something had failed before the job was asked to end."""
    kinds = (Kind.EXCEPTION, *_PROCESS_GONE)
    return any(each.level not in _MILD for each in history.before(told, *kinds))


def _is_passing(event: Event, history: History) -> bool:
    """The log goes on after a line that states an error, and reports no process that ended."""
    if event.kind is not Kind.ERROR or event.match is not None or event.fatal:
        return False
    if event.log < 0 or _is_process_lost(event, history):
        return False
    return not event.loud or history.logs[event.log].lines - event.line > _NEAR_END


def _was_warned(event: Event, history: History) -> bool:
    states_code = event.kind in _PROCESS_GONE and event.code is not None
    return event.level in _MILD and event.kind is not Kind.TOLD and not states_code


def _is_unheard(event: Event, history: History) -> bool:
    """A library's own account counts only beside a failure that it explains."""
    if event.kind is not Kind.LIBRARY or event.match is not None:
        return False
    return not any(each.kind in (Kind.EXCEPTION, *_PROCESS_GONE) for each in history.failures)


NOT_FATAL: Final = (
    Rule("notice", "it is known to be harmless", _is_notice),
    Rule("caught", "the program caught it and went on", _was_caught),
    Rule("restarted", "the job was started again, and works", _was_restarted),
    Rule("survived", "the job made further steps after it", _was_survived),
    Rule("not needed", "the program went on without this module", _was_not_needed),
    Rule("at work", "the job was at work when it was asked to end", _was_at_work),
    Rule("aside", "only a thread or a task lost its connection", _was_aside),
    Rule("aftermath", "the job was over, or had been asked to end, before it", _is_aftermath),
    Rule("warned", "it was logged as a warning only", _was_warned),
    Rule("passing", "the log goes on, and no process is reported to have ended", _is_passing),
    Rule("unheard", "no failure follows from what the library says", _is_unheard),
)


def set_aside(history: History) -> dict[Event, Rule]:
    """The failures that ended nothing, each with its rule."""
    found = {}
    for event in history.failures:
        if (rule := next((each for each in NOT_FATAL if each.holds(event, history)), None)) is not None:
            found[event] = rule
    return found


# How near to a first cause a failure can be -------------------------------------------------------------------

CAUSE, KILL, CRASH, LINE, SIGNAL, FOLLOWER, WRAPPER, ASKED = range(8)
_REASONS: Final = {
    CAUSE: "an exception, or a message with a known cause",
    KILL: "no process reported an error before this one was killed",
    CRASH: "native code crashed, and no exception stands before",
    LINE: "no exception stands in the log; this line states an error",
    SIGNAL: "a process ended by a signal, and no line says why",
    FOLLOWER: "only consequences of another failure stand in the log",
    WRAPPER: "the log only says that a process ended",
    ASKED: "a process was asked to end, and nothing says why",
}
_ROLES: Final = {"cause": CAUSE, "ending": KILL, "consequence": CRASH, "wrapper": WRAPPER}


_ASKED: Final = (-1, -2, -15)
"""Signals by which launchers end the other processes."""


def tier(event: Event) -> int:
    """How near to a first cause a failure is: the lower, the nearer."""
    if event.kind is Kind.KILLED and event.code in _ASKED:
        return ASKED
    if event.role == "ending" and event.raised is not None and class_of(root_of(event.raised)) == "wrapper":
        return SIGNAL
    if event.role in _ROLES:
        return _ROLES[event.role]
    if event.raised is not None:
        kind = class_of(root_of(event.raised))
        if event.raised.native and not event.raised.message:
            return SIGNAL
        if event.raised.native and not event.raised.type:
            return CRASH
        return {"wrapper": WRAPPER, "follower": FOLLOWER}.get(kind, CAUSE)
    if event.kind is Kind.KILLED:
        return KILL if event.code in (None, -9) else SIGNAL
    if event.kind is Kind.ERROR and event.fatal:
        return KILL
    return {Kind.STALL: CAUSE, Kind.ENDED: WRAPPER, Kind.TOLD: FOLLOWER}.get(event.kind, LINE)


_LOOKUPS: Final = frozenset(
    (
        "KeyError",
        "AttributeError",
        "IndexError",
        "ImportError",
        "ModuleNotFoundError",
        "StopIteration",
        "LookupError",
    )
)
"""Programs look something up, and raise an exception of their own if it is not there."""


def root_of(raised: Raised) -> Raised:
    """The exception of a chain that is nearest to the cause.

    That is the earliest one. But what was raised while a lookup failed says more than the lookup, and an
    exception says more than a wrapper.
    """
    found = raised
    while (earlier := found.earlier) is not None:
        if found.handling and earlier.name in _LOOKUPS and not class_of(found):
            break
        if class_of(earlier) == "wrapper" and not class_of(found):
            break
        found = earlier
    return found


def telling_line(event: Event) -> str:
    """The line that says what happened: the one by which the entry knows it, otherwise the exception's point."""
    if event.raised is None:
        return event.text.strip()
    lines = [line for each in event.raised.chain for line in (each.headline, *each.more)]
    patterns = event.match.entry.patterns if event.match is not None else ()
    known = (line.strip() for line in lines if any(each.search(line) for each in patterns))
    return next(known, "") or point_of(root_of(event.raised))


_LIST: Final = re.compile(r"\d+ validation errors? for ")


def point_of(raised: Raised) -> str:
    """The line of an exception's text that says what happened: not one that only announces the next."""
    if _LIST.search(raised.message) and (items := [text for text in raised.more if text.startswith("  ")]):
        return items[0].strip()
    lines = [raised.message, *raised.more]
    for at, text in enumerate(lines[:-1]):
        if text.strip() == "Last error:":
            return lines[at + 1].strip()
    if not raised.message.strip() or raised.message.rstrip().endswith(":"):
        return next((text.strip() for text in raised.more if text.strip()), raised.message)
    return raised.message


# The order ----------------------------------------------------------------------------------------------------


def first_failure(events: Sequence[Event]) -> Event | None:
    """The first failure among events that have all ended something."""
    if not events:
        return None
    best = min(events, key=lambda each: _order(each, events))
    named = [each for each in events if each.first and tier(each) != ASKED]
    if not named or named[0].raised is not None:
        return best
    own = [
        each
        for each in events
        if each not in named and any(_is_same(each.process, one.process) for one in named)
    ]
    own = [each for each in own if tier(each) <= LINE and _explains(each, named)]
    if own:
        return min(own, key=lambda each: _order(each, events))
    first = min(named, key=lambda each: _order(each, events))
    if best.role == "consequence" and (_is_other(best.process, first.process) or first.code not in (1, -6)):
        return first
    known = best.role == "cause" and not best.process
    return (
        first
        if all(each.kind is Kind.KILLED and tier(each) == KILL for each in named) and not known
        else best
    )


def _explains(event: Event, named: Sequence[Event]) -> bool:
    """Whether a failure can be why its process ended as the launcher says: Python exits with 1, or aborts."""
    codes = {each.code for each in named}
    return (
        event.kind is not Kind.EXCEPTION
        or event.raised is None
        or event.raised.native
        or bool(codes & {1, -6, None})
    )


def _is_same(one: Process, other: Process) -> bool:
    """Whether two writers are the same process; on one machine, the local rank is the rank."""
    mine, others = (each.rank if each.rank is not None else each.local for each in (one, other))
    return (
        mine is not None
        and mine == others
        and (one.host is None or other.host is None or one.host == other.host)
    )


def _is_other(one: Process, other: Process) -> bool:
    """Whether two writers are known to be different processes."""
    pairs = ((one.rank, other.rank), (one.local, other.local))
    return any(a is not None and b is not None and a != b for a, b in pairs)


def _order(event: Event, events: Sequence[Event]) -> tuple[int, float, int, int]:
    """By tier; then by time, if the events stand in several logs and all have one; then by place."""
    timed = len({each.log for each in events}) > 1 and all(each.time is not None for each in events)
    return (tier(event), event.time or 0.0 if timed else 0.0, event.log, event.line)


# What it is ---------------------------------------------------------------------------------------------------


def identified(event: Event, known: Knowledge | None = None) -> Event:
    """The event with the entry of the knowledge base that its exception matches."""
    known = known or knowledge()
    if event.match is not None:
        return event
    if event.raised is None:
        event.match = known.match(event.text, known.speakers(event.text), None)
        return event
    root = root_of(event.raised)
    chain = [root, *(each for each in event.raised.chain if each is not root)]
    for raised in chain:
        files = "\n".join(frame.file for frame in raised.frames)
        match = known.match(raised.text, known.speakers(f"{raised.text}\n{files}"), None)
        if match is not None and (raised is root or match.entry.role == "cause"):
            event.match = match
            return event
    return event


def judge(events: Sequence[Event], logs: Sequence[Log], known: Knowledge | None = None) -> Explanation:
    """The explanation of some logs."""
    known = known or knowledge()
    heard = set().union(*(log.heard for log in logs)) if logs else set()
    for event in events:
        identified(event, known)
        if event.match is not None and event.match.entry.heard and not heard & set(event.match.entry.heard):
            event.match = None
    history = History(events, logs)
    aside = set_aside(history)
    fatal = [each for each in history.failures if each not in aside]
    chosen, fatal = _last_attempt(fatal)
    warned = [each for each, rule in aside.items() if rule.name == "warned" and each.role == "cause"]
    bad_end = any(each.kind in (*_PROCESS_GONE, Kind.TOLD) for each in history.failures)
    if warned and (bad_end if chosen is None else tier(chosen) >= FOLLOWER or chosen.role == "consequence"):
        chosen = first_failure(warned)
    launcher = next((name for name in known.launchers if name in heard), "")
    common = Explanation(
        notices=tuple(each for each in aside if each.role == "notice" or each.kind is Kind.EXCEPTION)[:_MOST],
        attempts=1 + max((each.attempt for each in events), default=0),
        launcher=launcher,
        logs=tuple(logs),
        worked=history.last_work(),
        set_aside={event: rule.reason for event, rule in aside.items()},
    )
    if chosen is None:
        return replace(common, stop=_stop(history))
    rest = [each for each in fatal if each is not chosen]
    earlier = [each for each in history.failures if each.attempt < chosen.attempt and each not in aside]
    return replace(
        common,
        verdict=_verdict(chosen, history),
        consequences=tuple(rest[:_MOST]),
        earlier=tuple(first for _, first in sorted(_by_attempt(earlier).items())),
    )


def _by_attempt(events: Sequence[Event]) -> dict[int, Event]:
    found: dict[int, Event] = {}
    for number in sorted({each.attempt for each in events}):
        first = first_failure([each for each in events if each.attempt == number])
        if first is not None:
            found[number] = first
    return found


def _last_attempt(fatal: Sequence[Event]) -> tuple[Event | None, list[Event]]:
    """The first failure of the last attempt that shows more than consequences, and the failures of that attempt."""
    firsts: list[tuple[Event, list[Event]]] = []
    for place in sorted({(each.run, each.attempt) for each in fatal}):
        part = [each for each in fatal if (each.run, each.attempt) == place]
        if (first := first_failure(part)) is not None:
            firsts.append((first, part))
    if not firsts:
        return None, []
    telling = [each for each in firsts if tier(each[0]) <= LINE]
    return (telling or firsts)[-1]


def _verdict(event: Event, history: History) -> Verdict:
    root = root_of(event.raised) if event.raised is not None else None
    level = tier(event)
    certainty = KNOWN if event.role in ("cause", "ending") else UNKNOWN
    if event.role == "consequence" or level in (FOLLOWER, WRAPPER):
        certainty = CONSEQUENCE
    return Verdict(event, certainty, _REASONS[level], root, _said_by_library(event, history))


def _said_by_library(event: Event, history: History) -> Event | None:
    """What a library said itself about an exception, or the last error before a process was killed."""
    if event.kind is Kind.KILLED and event.match is None:
        near = [each for each in history.before(event, Kind.ERROR) if event.line - each.line <= _AT_THE_END]
        return near[-1] if near else None
    if event.raised is None or class_of(root_of(event.raised)) == "follower":
        return None
    said = [
        each
        for each in history.failures
        if each.kind is Kind.LIBRARY and each.log == event.log and each.run == event.run
    ]
    return next((each for each in said if _is_about(event, each)), None)


def _is_about(event: Event, said: Event) -> bool:
    """Whether an exception is about the library that speaks, or about what could not be loaded."""
    known = knowledge()
    text = "\n".join(each.headline for each in event.raised.chain) if event.raised is not None else event.text
    if known.speakers(said.text) & known.speakers(text):
        return True
    missed = set(_WORD.findall(said.text.partition(": ")[0])) - {"could", "import", "load"}
    return len(missed & set(_WORD.findall(text))) > 1


_WORD: Final = re.compile(r"[A-Za-z]{4,}")


# The end of a log without a failure ---------------------------------------------------------------------------


def _stop(history: History) -> Event | None:
    """Where a log stops that shows neither a failure nor an end."""
    for index, log in enumerate(history.logs):
        last = log.last_line
        if not log.tail:
            continue
        worked = history.last_work(index, settled=True)
        if last is not None and last.kind is Kind.BEGIN:
            return last
        ends = [
            each
            for each in history.failures
            if each.log == index and not each.loud and each.level not in _MILD
        ]
        if ends and log.lines - ends[-1].line <= _AT_THE_END and not history.work_after(ends[-1]):
            return ends[-1]
        outlived = any(each.log == index and each.line >= log.tail[0][0] for each in history.failures)
        if worked is None or (worked.line < log.tail[0][0] and not outlived):
            return last or Event(Kind.BEGIN, index, *log.tail[-1])
    return None
