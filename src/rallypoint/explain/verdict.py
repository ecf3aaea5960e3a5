"""Which failure came first, and what it is. Pure.

Three rules decide. NOT_FATAL lists the reasons for which a failure ended nothing. `tier` says how near to a
first cause each of the others can be: an exception is nearer than a lost connection, which is nearer than the
end of a process. Within a tier, the process that the launcher named comes first, then the earliest failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
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
_MORE: Final = 2


@dataclass(frozen=True)
class Verdict:
    """The first failure, and why it was chosen."""

    event: Event
    certainty: str
    reason: str
    root: Raised | None = None
    """The exception of the chain to look at."""
    by: Event | None = None
    """Another line that explains it."""

    @property
    def chain(self) -> list[Raised]:
        return self.event.raised.chain if self.event.raised is not None else []

    @property
    def quote(self) -> list[str]:
        """The line, or the exception's account; of an unknown exception also more of its text."""
        if self.root is None or not self.root.headline:
            return [self.event.text]
        account = self.root.account
        more = [line for line in self.root.more if line.strip() and line.strip() not in account]
        return [account, *more[:_MORE]] if self.certainty == UNKNOWN else [account]

    @property
    def became(self) -> Raised | None:
        """What the exception to look at ended as, before processes only passed it on."""
        if self.root not in self.chain:
            return None
        later = self.chain[: self.chain.index(self.root) : -1]
        return next((each for each in later if class_of(each) != "wrapper"), later[0] if later else None)


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


# Which failures ended nothing ------------------------------------------------------------------------------

_STEPS: Final = 2
"""One step may have been on its way already when something failed; two were not."""
_MANY_STEPS: Final = 5
"""So many steps are not made without a process that takes part in them."""
_NEAR_END: Final = 15
_GOES_ON: Final = 5
_AT_THE_END: Final = 3
_MODULES: Final = ("ModuleNotFoundError", "ImportError")


def _was_restarted(event: Event, history: History) -> bool:
    """A later attempt is at work, and neither it nor a later one has a failure."""
    return history.last_worked > max(event.attempt, history.last_failed)


def _was_survived(event: Event, history: History) -> bool:
    """The process made further steps, or finished its work; or the job did without it."""
    after, own = history.after(event), history.work_after(event)
    if event.kind in (*PROCESS_GONE, Kind.TOLD):
        return _was_replaced(event, after)
    if event.fatal and event.raised is not None:  # torch puts the rank before its last words only
        own = [each for each in own if each.process.rank == event.process.rank]
    elif distinct_steps(each for each in after if each.kind in _MOVES) >= _MANY_STEPS:
        return True
    if not event.process and history.is_lost_after(event):
        return False
    if any(each.kind in (Kind.READY, Kind.DONE) for each in own):
        return True
    least = _STEPS if event.raised is not None else 1
    return any(each.kind in _MOVES for each in own) and distinct_steps(own) >= least


def _was_replaced(event: Event, after: Sequence[Event]) -> bool:
    """After the end of a process, the job was done, or worked on: without it, or after a new beginning."""
    if any(each.kind is Kind.DONE for each in after):
        return True
    begun = next((each.line for each in after if each.kind in (Kind.BEGIN, Kind.READY)), None)
    if begun is None:
        return event.kind is not Kind.TOLD and distinct_steps(after) >= _MANY_STEPS
    return distinct_steps(each for each in after if each.is_work and each.line > begun) >= _STEPS


def _was_not_needed(event: Event, history: History) -> bool:
    """A module was missing, and nothing failed later on."""
    if event.raised is None or event.raised.name not in _MODULES or event.fatal or event.log < 0:
        return False
    later = (each for each in history.failures if each.log == event.log and each.line > event.line)
    goes_on = history.logs[event.log].lines - event.line > _GOES_ON
    return goes_on and all(each.kind is Kind.TOLD for each in later)


def _was_served(event: Event, history: History) -> bool:
    """A server that was at work was asked to end, or a job that was done or that saved its results."""
    if event.kind is not Kind.TOLD or event.match is not None or "CANCELLED" in event.text:
        return False
    served = any(each.kind in (Kind.READY, Kind.ANSWER, Kind.DONE) for each in history.work_before(event))
    return served or any(each.kind is Kind.RESULT for each in history.work_after(event))


def _is_aftermath(event: Event, history: History) -> bool:
    """The job was asked to end before this failed, or was done."""
    if event.kind is Kind.TOLD:
        return False
    told = history.before(event, Kind.TOLD)
    if told and not history.between(told[-1], event, WORK):
        return True
    if tier(event) == CAUSE:
        return False  # what a program does after its training can fail as well
    done = [each for each in history.before(event, Kind.DONE)[-_STEPS:] if history.work_before(each)]
    return bool(done) and not history.between(done[-1], event, (*_MOVES, Kind.BEGIN))


def _was_warned(event: Event, _: History) -> bool:
    """A logger calls it a warning. What a supervisor reports of a process, it reports as information."""
    reported = event.kind is Kind.TOLD or (event.kind in PROCESS_GONE and event.level == "info")
    return event.level in MILD and not reported


def _is_passing(event: Event, history: History) -> bool:
    """The log goes on after a line that states an error, and reports no process that ended."""
    known = event.match is not None or event.fatal
    if event.kind is not Kind.ERROR or known or event.log < 0 or history.is_lost_after(event):
        return False
    return not event.loud or history.logs[event.log].lines - event.line > _NEAR_END


_MOVES: Final = (Kind.STEP, Kind.ANSWER)


@dataclass(frozen=True)
class Rule:
    """A reason for which a failure ended nothing."""

    name: str
    reason: str
    holds: Callable[[Event, History], bool]


NOT_FATAL: Final = (
    Rule("notice", "it is known to be harmless", lambda event, _: event.role == "notice"),
    Rule("caught", "the program caught it and went on", lambda event, _: event.caught),
    Rule("restarted", "the job was started again, and works", _was_restarted),
    Rule("survived", "the job made further steps after it", _was_survived),
    Rule("not needed", "the program went on without this module", _was_not_needed),
    Rule("served", "a server or a job that was done was asked to end", _was_served),
    Rule("aftermath", "the job was over, or had been asked to end, before it", _is_aftermath),
    Rule("warned", "it was logged as a warning only", _was_warned),
    Rule("passing", "the log goes on, and no process is reported to have ended", _is_passing),
)


# How near to a first cause a failure can be ----------------------------------------------------------------

CAUSE, KILL, CRASH, REASON, LINE, FOLLOWS = range(6)
_REASONS: Final = (
    "an exception or a known cause comes before lost connections, exit codes and error lines",
    "no exception stands before this process was killed",
    "native code failed, or a connection was lost, and no exception stands before",
    "no exception stands in the log, and this line states the system's reason",
    "no exception stands in the log, and this is the first line that states an error",
    "the log has only what follows from another failure",
)
_WARNED: Final = "only a warning has a known cause, and everything else follows from another failure"
_ROLES: Final = {"cause": CAUSE, "ending": KILL, "consequence": CRASH, "wrapper": FOLLOWS}


def tier(event: Event) -> int:
    """How near to a first cause a failure is: the lower, the nearer."""
    passed_on = _class_of_root(event) != ""
    if event.role in _ROLES:
        return FOLLOWS if event.role == "ending" and passed_on else _ROLES[event.role]
    if (raised := event.raised) is not None and raised.native and not (raised.message and raised.type):
        return CRASH if raised.message else FOLLOWS
    if raised is not None:
        return FOLLOWS if passed_on else CAUSE
    if event.kind is Kind.KILLED:
        return KILL if event.code in (None, -9) else FOLLOWS
    if event.kind is Kind.ERROR:
        return KILL if event.fatal else REASON if event.reason else LINE if event.loud else FOLLOWS
    return {Kind.STALL: CAUSE, Kind.LIBRARY: CRASH}.get(event.kind, FOLLOWS)


def _class_of_root(event: Event) -> str:
    return class_of(root_of(event.raised)) if event.raised is not None else ""


_LOOKUPS: Final = ("KeyError", "AttributeError", "IndexError", "StopIteration", "LookupError", *_MODULES)
"""Programs look something up, and raise an exception of their own if it is not there."""


def root_of(raised: Raised) -> Raised:
    """The exception of a chain that is nearest to the cause.

    That is the earliest one; but what was raised while a lookup failed says more than the lookup.
    """
    found = raised
    while (earlier := found.earlier) is not None:
        if found.handling and earlier.name in _LOOKUPS:
            break
        found = earlier
    return found


# The order -------------------------------------------------------------------------------------------------


def first_failure(events: Sequence[Event]) -> Event | None:
    """The first failure among events that have all ended something.

    It is the earliest one of the lowest tier. But if the launcher named another process, a failure of that
    process and tier counts instead, and before what only followed, its end.
    """
    lowest = min(map(tier, events), default=FOLLOWS)
    nearest = [each for each in events if tier(each) == lowest]
    best = _earliest(nearest)
    named = [each for each in events if each.first]
    if best is None or any(each.process.is_same(best.process) for each in named):
        return best
    if best.process.number is None:
        is_bare = lowest == FOLLOWS and (best.kind in PROCESS_GONE or _class_of_root(best) == "wrapper")
    else:
        own = [each for each in nearest if any(each.process.is_same(one.process) for one in named)]
        if own:
            return _earliest(own)
        is_bare = best.role == "consequence" and not {each.code for each in named} & {1, -6}
    return (_earliest(named) if is_bare else None) or best


def _earliest(events: Sequence[Event]) -> Event | None:
    """By time if all of them have one, otherwise by place. An exception tells more than its own line."""
    if not events:
        return None
    timed = all(each.time is not None for each in events)
    first, *later = sorted(events, key=lambda each: (each.time or 0.0 if timed else 0.0, each.log, each.line))
    return next((each for each in later if each.raised and not first.raised and _is_same(each, first)), first)


def _is_same(event: Event, other: Event) -> bool:
    """Whether a process tells the same known failure twice."""
    entries = [each.match.entry for each in (event, other) if each.match is not None]
    return len(entries) == 2 and entries[0] is entries[1] and event.process.may_be(other.process)


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
        if match is not None and (raised is root or match.entry.role in ("cause", "notice")):
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
    chosen, fatal = _last_attempt([each for each in history.failures if each not in rules])
    stops = (_stop_of(index, log, history) for index, log in enumerate(logs))
    stop = next(filter(None, stops), None) if chosen is None else None
    warned = first_failure(
        _warned([each for each, rule in rules.items() if rule.name == "warned"], chosen, stop, history)
    )
    notices = tuple(each for each, rule in rules.items() if rule.name == "notice")[:_MOST]
    said = Explanation(
        notices=notices,
        attempts=1 + max((each.attempt for each in events), default=0),
        launcher=next((name for name in sorted(knowledge().launchers) if name in heard), ""),
        logs=tuple(logs),
        worked=history.last_work(),
        set_aside={each: rule.reason for each, rule in rules.items() if each not in (warned, *notices)},
    )
    if (first := warned or chosen) is None:
        return replace(said, stop=stop)
    before = [each for each in history.failures if each.attempt < first.attempt and each not in rules]
    return replace(
        said,
        verdict=_verdict(first, fatal, history, _WARNED if warned else ""),
        consequences=tuple(each for each in fatal if each is not first)[:_MOST],
        earlier=tuple(one for one, _ in _attempts(before)),
    )


def _rule_for(event: Event, history: History) -> Rule | None:
    return next((each for each in NOT_FATAL if each.holds(event, history)), None)


def _warned(
    warned: Sequence[Event], chosen: Event | None, stop: Event | None, history: History
) -> list[Event]:
    """The warnings that explain a failure of which nothing else tells the cause.

    If the log only stops, or somebody only ended the job, that is any known failure after the last work.
    """
    ended = stop or (chosen if chosen is not None and chosen.kind is Kind.TOLD and not chosen.match else None)
    if ended is not None:
        known = (each for each in warned if each.role in _ROLES and each.log == ended.log)
        return [each for each in known if not history.work_after(each)]
    if chosen is None:
        is_weak = any(each.kind in (*PROCESS_GONE, Kind.TOLD) for each in history.failures)
    else:
        is_weak = tier(chosen) >= LINE or chosen.role == "consequence"
    return [each for each in warned if each.role == "cause"] if is_weak else []


def _attempts(fatal: Sequence[Event]) -> list[tuple[Event, list[Event]]]:
    """For each attempt, the first failure and all of them."""
    numbers = sorted({each.attempt for each in fatal})
    parts = [[each for each in fatal if each.attempt == number] for number in numbers]
    return [(first, part) for part in parts if (first := first_failure(part)) is not None]


def _last_attempt(fatal: Sequence[Event]) -> tuple[Event | None, list[Event]]:
    """The last attempt that shows more than consequences: its first failure, and all of them."""
    attempts = _attempts(fatal)
    telling = [each for each in attempts if tier(each[0]) <= LINE and each[0].role != "consequence"]
    return (telling or attempts)[-1] if attempts else (None, [])


def _verdict(event: Event, fatal: Sequence[Event], history: History, reason: str) -> Verdict:
    unexplained = event.kind is Kind.KILLED and event.match is None
    certainty = UNKNOWN
    if event.role in ("cause", "ending") or event.kind is Kind.STALL:
        certainty = KNOWN
    elif (
        event.role == "consequence"
        or unexplained
        or (tier(event) == FOLLOWS and event.kind is not Kind.ERROR)
    ):
        certainty = CONSEQUENCE
    root = root_of(event.raised) if event.raised is not None else None
    return Verdict(
        event, certainty, reason or _REASONS[tier(event)], root, _said_beside(event, fatal, history)
    )


_DIGITS: Final = re.compile(r"\d+")


def _said_beside(event: Event, fatal: Sequence[Event], history: History) -> Event | None:
    """Another line that explains it: with the same cause, of a library, or an error that was stated before.

    Of several lines that only state an error, the last one is shown beside the first; of a job that was told
    to end, what it did then.
    """
    if event.kind is Kind.KILLED and event.match is None:
        errors = history.before(event, Kind.ERROR)
        return errors[-1] if errors and event.line - errors[-1].line <= _AT_THE_END else None
    if event.kind is Kind.TOLD and event.raised is None:
        return history.at(event)
    own_words = _DIGITS.sub("", event.headline)
    others = [each for each in fatal if _DIGITS.sub("", each.headline) != own_words]
    if REASON <= tier(event) <= LINE:
        return next((each for each in reversed(others) if REASON <= tier(each) <= LINE), None)
    same = (each for each in others if each.raised is None and _is_same(each, event))
    here = (each for each in history.failures if each.log == event.log and each.attempt == event.attempt)
    said = (each for each in here if each.kind is Kind.LIBRARY and each is not event)
    stated = (each for each in others if each.log == event.log and each.line < event.line)
    earlier = (each for each in stated if each.role != "consequence" and _class_of_root(each) == "")
    rivals = [each for each in others if tier(each) == tier(event)]
    if event.role == "cause":
        return next(
            chain(same, said, (each for each in rivals if each.match and not _is_same(each, event))), None
        )
    return next(chain(same, said, earlier, filter(None, [event.announced]), rivals), None)


# The end of a log without a failure ------------------------------------------------------------------------

_COUNTER: Final = re.compile(r"(?<![\d.:/-])(\d+)/(\d+)(?![\d.:/-])")


def _stop_of(index: int, log: Log, history: History) -> Event | None:
    """Where a log stops that shows neither a failure nor an end."""
    if not log.tail:
        return None
    failed = [each for each in history.failures if each.log == index]
    last = history.last_of(index)
    is_near = last is not None and log.lines - last.line < _AT_THE_END
    if last is not None and is_near and (last.kind is Kind.BEGIN or _is_last_but_few(last)):
        return last
    weak = [each for each in failed if not each.loud and each.level not in MILD]
    goes_on = weak and any(each.kind is not Kind.RESULT for each in history.work_after(weak[-1]))
    if weak and log.lines - weak[-1].line <= _AT_THE_END and not goes_on:
        return weak[-1]
    worked, first = history.last_work(index), log.tail[0][0]
    outlived = any(each.line >= first for each in failed)
    silent = worked is None or (worked.line < first and not outlived)
    return Event(Kind.BEGIN, index, *log.tail[-1]) if silent else None


def _is_last_but_few(step: Event) -> bool:
    """Whether a few steps of many are missing: many hangs are at the end of an epoch."""
    counted = _COUNTER.search(step.text)
    return counted is not None and int(counted[2]) >= 20 and 0.95 <= int(counted[1]) / int(counted[2]) < 1
