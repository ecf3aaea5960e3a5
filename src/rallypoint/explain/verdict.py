"""Which failure came first, and what it is. Pure.

Two tables decide. NOT_FATAL has the reasons for which a failure ended nothing. `tier` says how near to a
first cause each of the others can be: an exception is nearer than a lost connection, which is nearer than the
end of a process. Within a tier the order decides: what the launcher named as the first, then time, then
place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from rallypoint.explain.classify import class_of
from rallypoint.explain.events import (
    MILD,
    PROCESS_GONE,
    WORK,
    Event,
    History,
    Kind,
    Log,
    Raised,
    distinct_steps,
)
from rallypoint.explain.knowledge import knowledge

KNOWN: Final = "known cause"
CONSEQUENCE: Final = "consequence"
UNKNOWN: Final = "unknown error"
_MOST: Final = 50


@dataclass(frozen=True)
class Verdict:
    """The first failure, and why it was chosen."""

    event: Event
    certainty: str
    reason: str
    root: Raised | None = None
    """The exception of the chain to look at."""
    by: Event | None = None
    """The line in which a library itself says what happened."""

    @property
    def chain(self) -> list[Raised]:
        return self.event.raised.chain if self.event.raised is not None else []

    @property
    def became(self) -> Raised | None:
        """What the exception to look at ended as, before processes only passed it on."""
        if self.root is None:
            return None
        later = self.chain[self.chain.index(self.root) + 1 :]
        return next((each for each in later[::-1] if class_of(each) != "wrapper"), (later or [None])[-1])


@dataclass(frozen=True)
class Explanation:
    """What the logs of a job say."""

    verdict: Verdict | None = None
    consequences: tuple[Event, ...] = ()
    notices: tuple[Event, ...] = ()
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
    """Failures that ended nothing, each with the reason."""

    @property
    def lines(self) -> int:
        return sum(log.lines for log in self.logs)

    @property
    def found(self) -> bool:
        return self.verdict is not None or self.stop is not None


# The nearness to a first cause, from the nearest on
CAUSE, KILL, CRASH, LINE, SIGNAL, FOLLOWER, WRAPPER, ASKED = range(8)
_REASONS: Final = (
    "an exception or a known cause comes before lost connections, exit codes and error lines",
    "no exception stands before this process was killed",
    "native code failed, or a connection was lost, and no exception stands before",
    "no exception stands in the log, and this is the first line that states an error",
    "a process ended by a signal, and no line says why",
    "the log has only what follows from another failure",
    "the log only says that a process ended",
    "a process was asked to end, and nothing says why",
)
_WARNED: Final = "only a warning has a known cause, and everything else follows from another failure"
_ROLES: Final = {"cause": CAUSE, "ending": KILL, "consequence": CRASH, "wrapper": WRAPPER}
_KINDS: Final = {Kind.STALL: CAUSE, Kind.LIBRARY: CRASH, Kind.ENDED: WRAPPER, Kind.TOLD: WRAPPER}
_ASKED: Final = (-1, -2, -15)
"""Signals by which launchers end the other processes."""


# Which failures ended nothing ------------------------------------------------------------------------------

_STEPS: Final = 2
"""One step may have been on its way already when something failed; two were not."""
_MANY_STEPS: Final = 5
"""So many steps are not made without a process that takes part in them."""
_NEAR_END: Final = 15
_GOES_ON: Final = 5
_AT_THE_END: Final = 3
_STARTS_AGAIN: Final = re.compile(r"(?i)\b(?:re-?)(?:start|launch|spawn|sum|stor|boot|creat)\w*|\bstarting\b")
_MODULES: Final = ("ModuleNotFoundError", "ImportError")


def _was_restarted(event: Event, history: History) -> bool:
    """A later attempt, or a later run, is at work, and neither it nor a later one has a failure."""
    return history.last_worked > max(event.turn, history.last_failed)


def _was_survived(event: Event, history: History) -> bool:
    """The process made further steps, or finished its work."""
    after = history.work_after(event)
    if event.kind in (*PROCESS_GONE, Kind.TOLD):
        return _was_replaced(event, history)
    if not event.fatal and distinct_steps(e for e in history.work_after(event,anyone=True) if e.kind in (Kind.STEP,Kind.ANSWER)) >= _MANY_STEPS: return True
    if event.kind is Kind.LIBRARY or (not event.process and history.is_lost_after(event)):
        return False
    if event.fatal and event.raised is not None:  # torch puts the rank before its last words only
        after = [each for each in after if each.process.rank == event.process.rank]
    if any(each.kind in (Kind.READY, Kind.DONE) for each in after):
        return True
    steps = any(each.kind in (Kind.STEP, Kind.ANSWER) for each in after)
    return steps and distinct_steps(after) >= (_STEPS if event.raised is not None else 1)


def _was_replaced(event: Event, history: History) -> bool:
    """After the end of a process, only a new start and its work count, or the end of the job."""
    after = history.work_after(event, begins=True)
    started = [each for each in after if each.kind is Kind.READY or _STARTS_AGAIN.search(each.text)]
    work = [each for each in after if each.is_work]
    if started and distinct_steps(each for each in work if each.line > started[0].line) >= _STEPS:
        return True
    done = any(each.kind is Kind.DONE for each in work)
    return done or (event.kind in PROCESS_GONE and distinct_steps(work) >= _MANY_STEPS)


def _was_not_needed(event: Event, history: History) -> bool:
    """A module was missing, and the program went on without it."""
    if event.raised is None or event.raised.name not in _MODULES or event.fatal or event.log < 0:
        return False
    last = max(each.line for each in history.failures if each.log == event.log and each.kind is not Kind.TOLD)
    return last <= event.line and history.logs[event.log].lines - event.line > _GOES_ON


def _was_served(event: Event, history: History) -> bool:
    """A server that was at work was asked to end, or a job that was done."""
    served = (Kind.READY, Kind.ANSWER, Kind.DONE)
    unknown = event.kind is Kind.TOLD and event.match is None and "CANCELLED" not in event.text
    return unknown and (any(each.kind in served for each in history.work_before(event)) or any(each.kind is Kind.RESULT for each in history.work_after(event)))


def _is_aftermath(event: Event, history: History) -> bool:
    """The job was done, or was asked to end, before this failed."""
    if event.kind is Kind.TOLD:
        return False
    told = history.before(event, Kind.TOLD)
    if told and not any(_is_bad(each) for kind in _BAD for each in history.before(told[0], kind)):
        return not history.between(told[-1], event, WORK)
    if tier(event) == CAUSE:
        return False  # what a program does after its training can fail as well
    done = [each for each in history.before(event, Kind.DONE)[-_STEPS:] if history.work_before(each)]
    return bool(done) and not history.between(done[-1], event, (Kind.STEP, Kind.ANSWER, Kind.BEGIN))


_BAD: Final = (Kind.EXCEPTION, *PROCESS_GONE)


def _is_bad(event: Event) -> bool:
    return event.kind in _BAD and event.level not in MILD


def _was_warned(event: Event, _: History) -> bool:
    states_code = event.kind in PROCESS_GONE and event.level == "info"
    return event.level in MILD and event.kind is not Kind.TOLD and not states_code


def _is_passing(event: Event, history: History) -> bool:
    """The log goes on after a line that states an error, and reports no process that ended."""
    known = event.match is not None or event.fatal
    if event.kind is not Kind.ERROR or known or event.log < 0 or history.is_lost_after(event):
        return False
    return not event.loud or history.logs[event.log].lines - event.line > _NEAR_END


def _is_unheard(event: Event, history: History) -> bool:
    """A library's own account counts only beside a failure that it explains."""
    later = (each for each in history.failures if each.log != event.log or each.line > event.line)
    return event.kind is Kind.LIBRARY and event.match is None and not any(map(_is_bad, later))


@dataclass(frozen=True)
class Rule:
    """A reason for which a failure ended nothing."""

    name: str
    reason: str
    holds: Callable[[Event, History], bool]


NOT_FATAL: Final = (
    Rule("notice", "it is known to be harmless", lambda event, _: event.role == "notice"),
    Rule(
        "caught",
        "the program caught it and went on",
        lambda event, _: event.raised is not None and event.raised.caught,
    ),
    Rule("restarted", "the job was started again, and works", _was_restarted),
    Rule("survived", "the job made further steps after it", _was_survived),
    Rule("not needed", "the program went on without this module", _was_not_needed),
    Rule("served", "a server or a job that was done was asked to end", _was_served),
    Rule(
        "aside",
        "only a thread or a task lost its connection",
        lambda event, _: event.raised is not None and event.raised.aside and tier(event) == FOLLOWER,
    ),
    Rule("aftermath", "the job was over, or had been asked to end, before it", _is_aftermath),
    Rule("warned", "it was logged as a warning only", _was_warned),
    Rule("passing", "the log goes on, and no process is reported to have ended", _is_passing),
    Rule("unheard", "no failure follows from what the library says", _is_unheard),
)


# How near to a first cause a failure can be ----------------------------------------------------------------


def tier(event: Event) -> int:
    """How near to a first cause a failure is: the lower, the nearer."""
    if event.kind is Kind.KILLED and event.code in _ASKED:
        return ASKED
    chain_class = class_of(root_of(event.raised)) if event.raised is not None else ""
    if event.role in _ROLES:
        return SIGNAL if event.role == "ending" and chain_class == "wrapper" else _ROLES[event.role]
    if event.raised is not None:
        if event.raised.native and not (event.raised.message and event.raised.type):
            return CRASH if event.raised.message else SIGNAL
        return {"wrapper": WRAPPER, "follower": FOLLOWER}.get(chain_class, CAUSE)
    if event.kind is Kind.KILLED:
        return KILL if event.code in (None, -9) else SIGNAL
    return KILL if event.kind is Kind.ERROR and event.fatal else _KINDS.get(event.kind, LINE)


_LOOKUPS: Final = ("KeyError", "AttributeError", "IndexError", "StopIteration", "LookupError", *_MODULES)
"""Programs look something up, and raise an exception of their own if it is not there."""


def root_of(raised: Raised) -> Raised:
    """The exception of a chain that is nearest to the cause.

    That is the earliest one. But what was raised while a lookup failed says more than the lookup, and any
    exception says more than a wrapper.
    """
    found = raised
    while (earlier := found.earlier) is not None and class_of(found) != "":
        found = earlier
    while (earlier := found.earlier) is not None:
        replaced = found.handling and earlier.name in _LOOKUPS
        if replaced or class_of(earlier) == "wrapper":
            break
        found = earlier
    return found


# The order -------------------------------------------------------------------------------------------------


def first_failure(events: Sequence[Event]) -> Event | None:
    """The first failure among events that have all ended something."""
    if not events:
        return None
    best = _earliest(events)
    named = [each for each in events if each.first and tier(each) != ASKED]
    if not named or named[0].raised is not None:
        return best
    first = _earliest(named)
    processes = {each.process for each in named}
    same = [each for each in events if any(each.process.is_same(one) for one in processes)]
    own = [each for each in same if not each.first and tier(each) <= LINE and _can_cause(each, named)]
    if own and tier(_earliest(own)) <= tier(best):
        return _earliest(own)
    if best.role == "consequence" and (not best.process.may_be(first.process) or first.code not in (1, -6)):
        return first
    says_nothing = best.raised is None or class_of(root_of(best.raised)) == "wrapper"
    if (tier(best) >= WRAPPER and says_nothing) or (
        tier(first) == KILL and not (best.role == "cause" and not best.process)
    ):
        return first
    return best


def _can_cause(event: Event, named: Sequence[Event]) -> bool:
    """Whether a failure can be why its process ended as it did: Python exits with 1, or aborts."""
    native = event.raised is None or event.raised.native
    return native or bool({each.code for each in named} & {1, -6, None})


def _earliest(events: Sequence[Event]) -> Event:
    """The first event of the lowest tier: by time if all of them have one, otherwise by place."""
    lowest = min(map(_rank, events))
    nearest = [each for each in events if _rank(each) == lowest]
    timed = all(each.time is not None for each in nearest)
    best= min(nearest, key=lambda each: (each.time or 0.0 if timed else 0.0, each.log, each.line))
    if best.raised is None and best.match is not None:
        same = [e for e in nearest if e.raised is not None and e.match is not None and e.match.entry is best.match.entry and e.process.may_be(best.process)]
        return min(same, key=lambda each: (each.log, each.line), default=best)
    return best


# What it is ------------------------------------------------------------------------------------------------


def _identify(event: Event, heard: frozenset[str]) -> None:
    """Give the event the entry of the knowledge base that fits, given the speakers of the whole log."""
    known = knowledge()
    find = partial(known.match, heard=heard)
    if event.raised is None:
        event.match = find(event.text)
        return
    event.match = None
    root = root_of(event.raised)
    for raised in (root, *(each for each in event.raised.chain if each is not root)):
        files = "\n".join(frame.file for frame in raised.frames)
        match = find(raised.text, known.speakers(files))
        if match is not None and (raised is root or match.entry.role == "cause"):
            event.match = match
            return


def judge(events: Sequence[Event], logs: Sequence[Log]) -> Explanation:
    """The explanation of some logs."""
    heard = frozenset[str]().union(*(log.heard for log in logs))
    for event in events:
        if event.is_failure:
            _identify(event, heard)
    history = History(events, logs)
    rules = {each: rule for each in history.failures if (rule := _rule_for(each, history)) is not None}
    reason = ""
    chosen, fatal = _last_attempt([each for each in history.failures if each not in rules])
    warned = [each for each, rule in rules.items() if rule.name == "warned" and each.role == "cause"]
    stops = (_stop_of(index, log, history) for index, log in enumerate(logs))
    stop = next(filter(None, stops), None) if chosen is None else None
    where = stop or (chosen if chosen is not None and chosen.kind is Kind.TOLD and chosen.match is None else None)
    if where is not None:
        warned = [each for each, rule in rules.items() if rule.name == "warned" and each.role in _ROLES]
        warned = [each for each in warned if each.log==where.log and not history.work_after(each)]
    if warned and (_is_weak(chosen, history) or where):
        chosen = first_failure(warned)
        reason = _WARNED
    notices = tuple(each for each, rule in rules.items() if rule.name == "notice")[:_MOST]
    said = Explanation(
        notices=notices,
        attempts=1 + max((each.attempt for each in events), default=0),
        launcher=next((name for name in sorted(knowledge().launchers) if name in heard), ""),
        logs=tuple(logs),
        worked=history.last_work(),
        set_aside={each: rule.reason for each, rule in rules.items() if each not in (chosen, *notices)},
    )
    if chosen is None:
        return replace(said, stop=stop)
    before = [each for each in history.failures if each.attempt < chosen.attempt and each not in rules]
    return replace(
        said,
        verdict=_verdict(chosen, history, reason),
        consequences=tuple(each for each in fatal if each is not chosen)[:_MOST],
        earlier=tuple(first for first, _ in _attempts(before)),
    )


def _rule_for(event: Event, history: History) -> Rule | None:
    return next((each for each in NOT_FATAL if each.holds(event, history)), None)


def _is_weak(chosen: Event | None, history: History) -> bool:
    """Whether nothing but consequences speaks against a warning of a known cause."""
    if chosen is None:
        return any(each.kind in (*PROCESS_GONE, Kind.TOLD) for each in history.failures)
    return tier(chosen) >= LINE or chosen.role == "consequence"


def _attempts(fatal: Sequence[Event]) -> list[tuple[Event, list[Event]]]:
    """For each run and attempt, the first failure and all of them."""
    parts = [[each for each in fatal if each.turn == turn] for turn in sorted({each.turn for each in fatal})]
    return [(first, part) for part in parts if (first := first_failure(part)) is not None]


def _last_attempt(fatal: Sequence[Event]) -> tuple[Event | None, list[Event]]:
    """The last attempt that shows more than consequences: its first failure, and all of them."""
    attempts = _attempts(fatal)
    telling = [each for each in attempts if tier(each[0]) <= LINE and each[0].role != "consequence"]
    return (telling or attempts)[-1] if attempts else (None, [])


def _verdict(event: Event, history: History, reason: str) -> Verdict:
    level = tier(event)
    certainty = KNOWN if event.role in ("cause", "ending") or event.kind is Kind.STALL else UNKNOWN
    unexplained = event.kind is Kind.KILLED and event.match is None
    if event.role == "consequence" or level in (FOLLOWER, WRAPPER) or unexplained:
        certainty = CONSEQUENCE
    root = root_of(event.raised) if event.raised is not None else None
    return Verdict(event, certainty, reason or _REASONS[level], root, _said_beside(event, history))


_WORD: Final = re.compile(r"[A-Za-z]{4,}")


def _said_beside(event: Event, history: History) -> Event | None:
    """What a library said itself about an exception, or the last error before a process was killed."""
    if event.kind is Kind.KILLED and event.match is None:
        errors = history.before(event, Kind.ERROR)
        return errors[-1] if errors and event.line - errors[-1].line <= _AT_THE_END else None
    if event.raised is None or tier(event) == FOLLOWER:
        return None
    if event.match is not None:
        for e in history.failures:
            if e.turn==event.turn and e.raised is None and e.match is not None and e.match.entry is event.match.entry and e.process.may_be(event.process) and (e.log,e.line)<(event.log,event.line):
                return e
    text = "\n".join(each.headline for each in event.raised.chain)
    said = (each for each in history.failures if each.kind is Kind.LIBRARY and each.log == event.log)
    return next((each for each in said if each.run == event.run and _is_about(text, each.text)), None)


def _is_about(exception: str, said: str) -> bool:
    """Whether an exception is about the library that speaks, or about what could not be loaded."""
    known = knowledge()
    missed = set(_WORD.findall(said.rpartition(": ")[0])) - {"could", "import", "load"}
    return bool(known.speakers(said) & known.speakers(exception)) or (
        len(missed & set(_WORD.findall(exception))) > 1
    )


# The end of a log without a failure ------------------------------------------------------------------------


def _stop_of(index: int, log: Log, history: History) -> Event | None:
    """Where a log stops that shows neither a failure nor an end."""
    last, failed = log.last_line, [each for each in history.failures if each.log == index]
    if not log.tail or (last is not None and last.kind is Kind.BEGIN):
        return last
    weak = [each for each in failed if not each.loud and each.level not in MILD]
    if weak and log.lines - weak[-1].line <= _AT_THE_END and not history.work_after(weak[-1]):
        return weak[-1]
    worked, first = history.last_work(index), log.tail[0][0]
    outlived = any(each.line >= first for each in failed)
    says_only_that = {number for number, _ in log.tail} <= {each.line for each in failed}
    silent = not says_only_that if worked is None else worked.line < first and not outlived
    return (last or Event(Kind.BEGIN, index, *log.tail[-1])) if silent else None


def _rank(event: Event) -> int:
    return min(tier(event), SIGNAL)
