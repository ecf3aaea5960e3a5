"""What becomes of a round: which ranks have joined it, and what of it has failed on this machine.

The first machine's agent calls the roll: it writes the plan into the store, and counts the ranks.

The plan says which machine has which ranks: torchrun's agents tell each other, and every tool that looks at
the store finds the plan there. The agent reports again and again how many ranks have come: to the launcher;
or to the log, if there is no launcher of ours and it takes long. Ranks count themselves in, so that costs
nothing. The names of the missing ranks cost the server a tenth of a second with thousands of ranks: the agent
asks for them only when no rank has come for a while, and less and less often. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Final

from rallypoint.client.snapshots import HEAD, absent_text, fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import RallypointError
from rallypoint.launch import reports
from rallypoint.launch.blame import FailureSummary, LostServer, find_blame
from rallypoint.launch.endpoint import Endpoint, RoundStore, StoreView, parse_endpoint
from rallypoint.launch.rendezvous.roster import Member
from rallypoint.launch.rendezvous.servers import RendezvousPlace
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.store.rollcall.question import PLAN, Question
from rallypoint.store.rollcall.roll import RankState, Roll

AGENTS: Final = "rallypoint/agents"
"""Where the agents have their keys in a round's store."""

ROLE_INFO: Final = f"{AGENTS}/torchelastic/role_info"
"""Below it, each agent's key of how many ranks it has, which comes before its ranks."""

logger = logging.getLogger("rallypoint.torchrun")

_ANSWER_SECONDS: Final = 5.0
_FIRST_REMARK: Final = 30.0  # seconds; then twice as long each time
_COUNT_SECONDS: Final = 0.5
_STILL_SECONDS: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
_PROBE_SECONDS: Final = 1.0
_TORCHS_AGENT: Final = "torch.distributed.elastic.agent.server.api"
_REST: Final = 50  # after a question, a pause of this many times the time that it took


def plan_of(number: int, members: Sequence[Member], sizes: Sequence[int]) -> Plan:
    """The plan of a round whose machines, in the order of their ranks, have `sizes` ranks each."""
    firsts = accumulate(sizes, initial=0)
    rows = zip(members, firsts, sizes, strict=False)  # the last of the sums is the number of all
    return Plan(number, tuple(PlannedMachine(member.host, first, size) for member, first, size in rows))


def named(roll: Roll, counted: int) -> reports.JoinProgress | None:
    """The report on a roll, with names; `counted` is how many ranks have counted themselves in.

    A rank that has gone had joined: at the end of a round, all go. A client that never sent its rank makes
    that rank look late, and fewer ranks seem here than were counted. Then the result is None, as no missing
    rank can be named.
    """
    absent = tuple(each for each in roll.ranks if each.state in (RankState.LATE, RankState.UNSEEN))
    late = sum(each.state is RankState.LATE for each in absent)
    if counted > roll.expected - late:
        return None
    joined = max(counted, roll.expected - len(absent))
    # If no rank has come, a list of all of them helps nobody.
    return reports.JoinProgress(
        joined, roll.expected, absent_text(replace(roll, ranks=absent)) if joined else ""
    )


class AskingSchedule:
    """When to ask for names: no rank has come for a while, and the last time was long enough ago."""

    def __init__(self, now: float) -> None:
        self.count = -1
        """How many ranks have come."""
        self._came = now
        self._pause = 0.0
        self._due = now

    @property
    def is_satisfied(self) -> bool:
        """Whether the names have been asked for since the last rank came."""
        return self._pause > 0

    def note(self, count: int, now: float) -> bool:
        """Note how many ranks have come; whether that is news."""
        is_news = count != self.count
        if is_news:
            self.count, self._came, self._pause = count, now, 0.0
        return is_news

    def is_due(self, now: float) -> bool:
        return now >= max(self._due, self._came + _STILL_SECONDS)

    def note_asked(self, began: float, now: float) -> None:
        """The names have been asked for."""
        self._pause = min(max(_STILL_SECONDS, 2 * self._pause), _LONGEST_PAUSE)
        self._due = now + max(self._pause, _REST * (now - began))


Prepare = Callable[[TCPStore, threading.Event], int]
"""Says how many ranks are expected, once that is known; 0 if the event comes first."""


def planned(view: StoreView, number: int, members: Sequence[Member]) -> Prepare:
    """Waits until torchrun's agents have told each other how many ranks each has, and writes the plan."""
    keys = [f"{ROLE_INFO}/{rank}" for rank in range(len(members))]

    def prepare(store: TCPStore, stopped: threading.Event) -> int:
        while not store.check(keys):
            if stopped.wait(_COUNT_SECONDS):
                return 0
        sizes = [int(json.loads(each)["local_world_size"]) for each in store.multi_get(keys)]
        plan = plan_of(number, members, sizes)
        store.multi_set([PLAN, HEAD], [plan.to_json(), json.dumps(_head(view))])
        return plan.world_size

    return prepare


def _head(view: StoreView) -> tuple[str, int, str]:
    """Where all machines find the store."""
    return (*(parse_endpoint(view.shown) if view.shown else view.place), view.name)


class RollCall:
    """Reports to the launcher until all ranks have joined, or until it is stopped."""

    def __init__(self, place: Endpoint, view: StoreView, prepare: Prepare, has_launcher: bool) -> None:
        """`place`: the store, or a relay of it. `has_launcher`: one of ours, that says what it is told."""
        self._place = place
        self._view = view
        self._prepare = prepare
        self._has_launcher = has_launcher
        self._began = time.monotonic()
        self._remark_after = _FIRST_REMARK
        self._stopped = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="rallypoint roll call", daemon=True)
        self._thread.start()

    def stop(self, *, without_store: bool = False) -> None:
        """Ask the store once more for the missing ranks, as the round is over, and then no more."""
        self._stopped.set()
        if without_store:  # there is no answer to wait for
            self._is_abandoned = True
        else:
            self._thread.join()

    def _run(self) -> None:
        with (
            suppress(RallypointError),  # the round's store has gone: others report that
            TCPStore(*self._place, timeout=_ANSWER_SECONDS, role=Role.AGENT) as store,
        ):
            if expected := self._prepare(store, self._stopped):
                self._report(store, expected)

    def _report(self, store: TCPStore, expected: int) -> None:
        attention = AskingSchedule(time.monotonic())
        while True:
            if attention.note(min(store.count_workers(), expected), time.monotonic()):
                self._report_progress(reports.JoinProgress(attention.count, expected))
            if attention.count == expected:
                return
            if self._stopped.is_set():
                break
            if attention.is_due(time.monotonic()) and self._name(attention):
                return
            self._stopped.wait(_COUNT_SECONDS)
        if not attention.is_satisfied:
            self._name(attention)

    def _name(self, attention: AskingSchedule) -> bool:
        """Report the missing ranks, as far as they can be known; True if there are none."""
        began = time.monotonic()
        report, view = None, self._view
        with suppress(RallypointError):  # the server has not answered, this time
            roll = judge(fetch_snapshot(*view.place, Question(), Deadline(_ANSWER_SECONDS), view.name))
            report = named(roll, attention.count)
        attention.note_asked(began, time.monotonic())
        if report is not None:
            self._report_progress(report)
            self._remark(report)
        return report is not None and report.complete

    def _report_progress(self, roll: reports.JoinProgress) -> None:
        if not self._is_abandoned:
            reports.ROLL.leave(replace(roll, store=self._view.address))

    def _remark(self, roll: reports.JoinProgress) -> None:
        """Under a torchrun of the user's own there is no launcher to say it."""
        seconds = time.monotonic() - self._began
        if self._has_launcher or seconds < self._remark_after or roll.complete:
            return
        self._remark_after = 2 * seconds
        logger.warning(
            "%d of %d ranks have joined after %.0f s%s; see `rallypoint status %s`",
            *(roll.joined, roll.expected, seconds, f"; {roll.absent}" if roll.absent else ""),
            self._view.address,
        )


class Joining:
    """The ranks of a round while they join: the roll call; and a line in the log when all have joined.

    There is no such line for the first attempt: the launcher itself reports that.
    """

    def __init__(self) -> None:
        self._attempt: tuple[int, float] | None = None  # whose ranks still start, and since when
        self._roll_call: RollCall | None = None

    def begin(self, attempt: int) -> None:
        """The ranks of an attempt, counted from 0, start now."""
        self._attempt = (attempt, time.monotonic()) if attempt else None

    def call_roll(self, roll_call: RollCall) -> None:
        """This machine calls the roll."""
        self._roll_call = roll_call

    def announce(self) -> None:
        """Log that all ranks have joined, and how long that took, once that is so."""
        folder = reports.folder_of(os.environ)
        if self._attempt is None or folder is None:
            return
        roll, (number, began) = reports.Reports(folder).roll(), self._attempt
        if roll.complete:
            self._attempt = None
            seconds = time.monotonic() - began
            logger.warning("rallypoint: attempt %d: %s after %.1f s", number + 1, roll.text, seconds)

    def stop(self, *, without_store: bool = False) -> None:
        """The round is over."""
        if self._roll_call is not None:
            self._roll_call.stop(without_store=without_store)
            self._roll_call = None
        self.announce()


class RoundFailures:
    """What has failed on this machine in the last round: its servers, and its ranks as they have reported."""

    def __init__(self, place: RendezvousPlace) -> None:
        self._place = place
        self._lost: list[LostServer] = []
        self._store: RoundStore | None = None
        self._head: Endpoint | None = None

    def enter(self, store: RoundStore, head: Endpoint | None) -> None:
        """A round begins, with this store. `head`: the way to it, if its ranks know a relay alone."""
        self._store, self._head = store, head

    def forget(self) -> None:
        """The last round is over, and its failures have been told."""
        self._lost.clear()

    @property
    def has_lost_server(self) -> bool:
        """Whether a server of this machine has died."""
        return bool(self._lost)

    def log_lost(self) -> None:
        """Say at once which servers of this machine have died."""
        for lost, then in self._place.take_lost():
            logger.error("rallypoint: %s %s: %s", lost.server, lost.how, then)
            self._lost.append(lost)
            logging.getLogger(_TORCHS_AGENT).addFilter(_is_no_consequence)

    def first(self) -> FailureSummary | None:
        """What failed first in the attempt that has just ended."""
        folder = reports.folder_of(os.environ)
        if folder is None:
            return find_blame([], [], self._lost)
        found = reports.Reports(folder)
        return find_blame(found.failures(), found.exits(), self._lost)

    def look_for_store(self) -> None:
        """Note that the store is gone, if it is: ranks behind a relay name the relay in their errors."""
        if self._head is None or self._store is None:
            return
        seconds = _PROBE_SECONDS + self._place.pause_seconds
        try:
            with TCPStore(*self._head, timeout=seconds, role=Role.AGENT) as store:
                is_lost = not store.check([f"{ROLE_INFO}/0"])
                how = "has lost what was in it" if is_lost else ""
        except RallypointError:
            how = "cannot be reached any more"
        if how:
            name = f"the job's store at {self._place.whereabouts(self._store)}"
            self._lost.append(LostServer(name, how, time.time()))

    def report(self) -> None:
        """Tell the launcher which servers are gone."""
        reports.LOST.leave(tuple(self._lost))


def _is_no_consequence(record: logging.LogRecord) -> bool:
    """Whether a line of torch's agent is news where the store is gone: its traceback of the end is not."""
    return not str(record.msg).startswith("Error waiting on exit barrier")
