"""One machine's part in a job's rendezvous: it follows the rules of `roster`, through a store (`register`).

A machine requests a place in the next round, and waits for a key of its own, which will hold its assignment.
So no machine polls, and none reads the names of all others, except the first in the roster, the scribe: it
checks every second for pending requests. A heartbeat is a counter of each machine's own, which
another machine reads (`Lookout`), and counts how often it has read the same. So no clocks are compared, and a
pause of all machines costs none of them its place.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rallypoint.client.base import PrefixStore, Store
from rallypoint.errors import JoinTimeoutError, RallypointError, UsageError
from rallypoint.launch.options import RendezvousSettings
from rallypoint.launch.rendezvous.digest import (
    Assignment,
    Digest,
    Lookout,
    RoundEnd,
    assignment_of,
    assignment_of_refused,
)
from rallypoint.launch.rendezvous.register import Register
from rallypoint.launch.rendezvous.roster import (
    Ending,
    Member,
    Roster,
    RosterRequest,
    Settings,
    Sick,
    Size,
    closed_error,
    different_settings,
)
from rallypoint.launch.rendezvous.waiting import Waiting
from rallypoint.store.rollcall.plan import JobRound
from rallypoint.text import LONGEST_SENTENCE, counted, shown

logger = logging.getLogger("rallypoint.meeting")

_SELDOM = 10  # all other machines check so many times more seldom than the scribe
_PARTING_SECONDS = 0.1  # between looks at the machines that are still there, at the end
_NAMES_TOLD = 16  # of connected machines
_STATES_PER_SECOND = 100  # of all machines together that wait
_CHECK_SECONDS = 1.0  # between checks for pending requests


@dataclass(frozen=True)
class Round:
    """One machine's view of a complete round."""

    number: int
    rank: int
    size: int
    """How many machines it has."""
    name: str
    """A name that this round has, and no other one, also not of another job with the same id."""
    store: str
    clock_ahead: float = field(default=0.0, compare=False)
    """By how many seconds this machine's clock is ahead of the keeper's."""


StartStore = Callable[[Assignment], str]
"""Starts the round's store, when this machine is its keeper, and says where others reach it."""

OnEnd = Callable[[int, RoundEnd], object]
"""Hears how the round of that number has ended, while this machine waits for the next one."""


class Participant:
    """A machine's part. Safe to use from the thread that joins and one that sends heartbeats."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        member: Member,
        size: Size,
        conf: RendezvousSettings,
        clock: Callable[[], float] = time.monotonic,
        *,
        settings: Settings = (),
        endpoint: str = "the endpoint",
        find_jobs: Callable[[], Sequence[JobRound]] = tuple,
        on_end: OnEnd = lambda *_: None,
    ) -> None:
        """`settings`: what all machines must have been started with alike. `endpoint`: its name, for people.

        `find_jobs` finds the jobs at that endpoint, this one included.
        """
        self._run_id = run_id
        self._settings = settings
        self._endpoint = endpoint
        self._find_jobs = find_jobs
        self._on_end = on_end
        self._rivals = ""  # other jobs at the endpoint, in words, as they were last seen
        self._misled: UsageError | None = None  # the endpoint is not where machines meet
        self.prefix = f"rallypoint/meeting/{run_id}"
        """That of all keys of the meeting."""
        self._register = Register(PrefixStore(self.prefix, store), member.id, size)
        self.member = member
        self.size = size
        self.conf = conf
        self._clock = clock
        self._has_joined = False
        self._sick_named = ""
        self._desk = 0  # where this machine asked to be in a round
        self._round: Round | None = None
        self._lookout = Lookout(conf.keep_alive_max_attempt)

    @property
    def roster(self) -> Roster:
        """The latest roster. It has the names of all machines: not to be read by all of them."""
        return self._register.roster()

    @property
    def is_closed(self) -> bool:
        return bool(self._register.digest().closed)

    def next_round(self, start_store: StartStore, ending: Ending | None = None) -> Round:
        """Leave the round before, if any, for the reason of `ending`, and take part in the next one.

        Raises JoinTimeoutError, MeetingClosedError, UsageError (a rank that cannot be had), or what
        the store raises when it is gone.
        """
        before, self._round = self._round, None
        while self._round is None:
            assignment = self._await_assignment(before, ending)
            before = ending = None
            if error := assignment.error:
                self.leave()
                raise error
            if not assignment.again:
                ahead = time.time() - assignment.time if assignment.store else 0.0
                if store := assignment.store or self._keep_store(assignment, start_store):
                    self._round = Round(
                        assignment.round, assignment.rank, assignment.size, assignment.name, store, ahead
                    )
        return self._round

    def members_of(self, met: Round) -> tuple[Member, ...]:
        """All machines of a round, by rank; none if it is over. One machine of the round is to ask."""
        roster = self.roster
        return roster.members if roster.name == met.name else ()

    def wants_restart(self) -> bool:
        """Whether the machines should start again: one is lost, one may come in, or this one was given up.

        Cheap to ask again and again: one small request.
        """
        digest = self._read_digest()
        given_up = self._round is not None and digest.round != self._round.number
        return (given_up and not digest.closed) or digest.wants_restart

    def close(self, reason: str) -> None:
        """Let no machine join any more."""
        if not self.is_closed:
            self._register.post(RosterRequest(close=reason))

    def leave(self, ending: Ending | None = None, close: str = "") -> None:
        """Take no part any more, for the reason of `ending`; `close`: nor shall any other machine."""
        if self._has_joined or close:
            leave = self.member if self._has_joined else None
            self._register.post(RosterRequest(leave=leave, close=close, ending=ending))

    def first_failure(self, seconds: float) -> Ending | None:
        """What failed first in the round that this machine has left; None: nobody knows.

        Other machines have so many seconds to leave that round as well. After that, it is what is known.
        """
        met, end = self._round, self._clock() + seconds
        while met is not None:
            self._read_digest()
            left = end - self._clock()
            if ended := self._register.await_end(met.number, min(_CHECK_SECONDS, left)):
                return ended.first
            if left <= 0:
                roster = self.roster
                endings = roster.endings if roster.round == met.number else ()
                return endings[0] if endings else roster.ended
        return None

    def give_up(self) -> None:
        """Leave in the middle of a round: the others start again."""
        if self._has_joined:
            ending = Ending(f"the launcher of {self.member} was told to end", self._keepers_time())
            self._register.post(RosterRequest(leave=self.member, lost=True, ending=ending))

    def stay_out(self, reason: str) -> None:
        """Take no part, as this machine is not fit; wait until nobody could need it any more.

        That is when the meeting is closed, or when no machine is there for as long as they may take to come.
        If it is in a round, the others start again without it.
        """
        now, self._round = self._keepers_time(), None
        self._sick_named = str(Sick(self.member.host, self.member.pid, reason))  # this machine says it itself
        ending = Ending(self._sick_named, now)
        digest = self._register.post(RosterRequest(leave=self.member, lost=True, sick=reason, ending=ending))
        seen = self._clock()
        while not digest.closed and self._clock() < seen + self.conf.join_timeout:
            self._register.await_closed(_CHECK_SECONDS * _SELDOM)
            digest = self._read_digest()
            seen = self._clock() if digest.everybody else seen

    def open_again(self) -> None:
        """Let this job meet where one with the same id has ended.

        Its machines may have been killed before they left. They count as lost if they are silent for as long
        as any other may be. MeetingClosedError if one of them lives.
        """
        before: dict[str, bytes] = {}
        silent_checks = 0
        while self.is_closed and (roster := self.roster).closed:
            now = self._register.beats_of_all([each.id for each in roster.everybody])
            if any(now[each] != before.get(each, now[each]) for each in now):
                raise closed_error(roster.closed)
            silent_checks = silent_checks + 1 if now.keys() == before.keys() else 0
            if not now or silent_checks > self.conf.keep_alive_max_attempt:
                self._reopen_without(set(roster.everybody))
            else:
                if not before:
                    who = _list(roster.everybody)
                    logger.warning("rallypoint: the last job with this id is over: waiting for %s to go", who)
                before = now
                self._pause(self.conf.keep_alive_interval)

    def _reopen_without(self, lost: set[Member]) -> None:
        self._register.change(lambda latest: latest.lose(lost, self.size).reopen())

    def _pause(self, seconds: float) -> None:
        end = self._clock() + seconds
        while (left := end - self._clock()) > 0:
            time.sleep(min(_PARTING_SECONDS, left))

    def await_others_gone(self) -> bool:
        """Wait until all others have left; False if that took longer than `conf.close_timeout`."""
        end = self._clock() + self.conf.close_timeout
        while True:
            # So many requests may be pending that all others have left.
            digest = self._register.sweep(max(1, self._register.digest().everybody - 1))
            if digest.everybody == 0 or (digest.everybody == 1 and digest.scribe == self.member.id):
                return True
            if self._clock() >= end:
                return False
            time.sleep(min(_PARTING_SECONDS, end - self._clock()))

    def beat(self) -> None:
        """Send a heartbeat, and check those of others; to be called every `keep_alive_interval` seconds."""
        digest = self._follow(self._register.beat())
        silent = self._lookout.find_silent(self._register.ring(digest), self._register.beats_of)
        if silent:
            self._lose(silent)

    def _lose(self, silent: set[str]) -> None:
        lost = tuple(each for each in self.roster.everybody if each.id in silent)
        if lost:
            who, silence = "it" if len(lost) == 1 else "them", self.conf.silence
            text = f"{_list(lost)} gave no sign of life for {silence:.0f} s"
            logger.warning("%s: going on without %s", text, who)
            ending = Ending(text, self._keepers_time() - silence)
            self._register.change(lambda latest: latest.lose(set(lost), self.size, ending))
            self._register.recall(lost)

    def _keepers_time(self) -> float:
        """What the clock of the round's keeper shows, as far as this machine knows."""
        return time.time() - (self._round.clock_ahead if self._round is not None else 0.0)

    # Joining

    def _read_digest(self) -> Digest:
        """The latest digest."""
        return self._follow(self._register.digest())

    def _follow(self, digest: Digest) -> Digest:
        """The latest digest. The scribe folds pending requests in first; so do all while there is none."""
        if digest.scribe in ("", self.member.id):
            digest = self._register.fold_pending()
        if digest.sick not in ("", self._sick_named):
            self._sick_named = digest.sick
            logger.warning("rallypoint: %s", shown(digest.sick, LONGEST_SENTENCE))
        return digest

    def _await_assignment(self, before: Round | None, ending: Ending | None) -> Assignment:
        """Request a place in the next round; wait until the one before has ended, then for the assignment."""
        is_first = not self._has_joined
        digest = self._join(ending)
        patience = _Patience(self._clock)
        patience.note(digest)
        # All machines ask the machine with the store: of very many, each more seldom.
        update = self.size.most / _STATES_PER_SECOND
        with Waiting(lambda: self._state(patience), at_start=is_first, update_seconds=update):
            return self._await_answer(digest, patience, before)

    def _await_answer(self, digest: Digest, patience: _Patience, before: Round | None) -> Assignment:
        while True:
            seconds = _CHECK_SECONDS * (1 if digest.scribe in ("", self.member.id) else _SELDOM)
            left = patience.left(self.conf.join_timeout)
            # When that is over and it is still here, enough have come, and there is nothing to hurry for.
            seconds = min(seconds, left) if left > 0 else seconds
            if before is not None:
                is_over = digest.round != before.number  # then its end is known, unless that machine has died
                patient = min(seconds, _CHECK_SECONDS) if is_over else seconds
                if (end := self._register.await_end(before.number, patient)) is not None:
                    self._on_end(before.number, end)
                before = None if is_over or end is not None else before
            assignment = self._register.await_assignment(self.member, seconds) if before is None else None
            if assignment is None:
                digest = self._read_digest()
                patience.note(digest)  # before it is judged: a roster that has just changed is no old one
                assignment = self._assignment_by(digest, patience)
            if assignment is not None:
                return assignment

    def _join(self, ending: Ending | None = None) -> Digest:
        if self._has_joined:
            self._register.forget_assignment(self.member)
            self.member = replace(self.member, visit=self.member.visit + 1)
        self._has_joined = True
        return self._ask_for_place(ending)

    def _ask_for_place(self, ending: Ending | None = None) -> Digest:
        least, most = self.size.least, self.size.most
        request = RosterRequest(
            self.member,
            least=least,
            most=most,
            spares=self.conf.spares,
            settings=self._settings,
            ending=ending,
        )
        digest = self._register.post(request)
        self._desk = digest.desk
        return digest

    def _assignment_by(self, digest: Digest, patience: _Patience) -> Assignment | None:
        """What a machine without an assignment finds out by itself: the writer of it may have died."""
        if digest.closed:
            return assignment_of_refused(closed_error(digest.closed))
        if digest.desk != self._desk:
            self._ask_for_place()
        if not digest.complete:
            self._check_patience(digest, patience)
        elif digest.keeper == self.member.id and not digest.store:
            roster = self.roster
            rank = roster.rank_of(self.member.id)
            return assignment_of(roster, rank, time.time()) if rank is not None else None
        elif digest.wants_restart and patience.since_change >= self.conf.silence:
            return Assignment(again=True)  # harmless if this machine waits for the next round
        return None

    def _check_patience(self, digest: Digest, patience: _Patience) -> None:
        if self._misled is not None:
            self.leave()
            raise self._misled
        if digest.present >= self.size.least:
            if digest.scribe == self.member.id and patience.since_change >= self.conf.last_call_timeout:
                self._register.change(
                    lambda latest: latest.fill() if len(latest.present) == digest.present else latest
                )
        elif patience.left(self.conf.join_timeout) <= 0:
            roster = self.roster
            if len(roster.present) < self.size.least:  # or some have just come
                self.leave()
                raise self._missing(roster)

    def _state(self, patience: _Patience) -> str:
        """What this machine waits for, in words. Reads names only if they are few, or as the scribe."""
        digest = self._register.digest()
        is_complete, count = digest.complete, digest.present
        if is_complete and not digest.store:
            return f"all machines are connected to {self._endpoint}; the round's store starts"
        if is_complete and digest.wants_restart:
            return f"waiting for {counted(count, 'machine')} to end the last attempt"
        if is_complete:
            return f"the job runs on {counted(count, 'machine')}; this machine waits for a place"
        names = others = ""
        if digest.everybody <= _NAMES_TOLD or digest.scribe == self.member.id:
            roster = self.roster
            present = [shown(each.host) for each in roster.present]
            count, rest = len(present), "" if len(present) <= _NAMES_TOLD else ", ..."
            names = f" (connected: {', '.join(present[:_NAMES_TOLD]) or 'none yet'}{rest})"
            others = _refused_before(roster) + self._name_rivals()
        if count < self.size.least:
            missing = f"{self.size.least - count} of {self.size.least} machines"
            left = patience.left(self.conf.join_timeout)
        else:
            missing = f"up to {counted(self.size.most - count, 'more machine')}"
            left = self.conf.last_call_timeout - patience.since_change
        where = f"{self._endpoint}{names}"
        return f"waiting for {missing} at {where}, {max(left, 0.0):.0f} s left{others}"

    def _name_rivals(self) -> str:
        """That other jobs use the endpoint whose machines may be meant for this one."""
        try:
            jobs = self._find_jobs()
        except RallypointError:  # it is torch's own store, which has no answer to this
            return ""
        others = [each for each in jobs if each.job != self._run_id and each.joined and not each.closed]
        rivals = "".join(
            f"; another job is using this endpoint: ID {shown(each.job)} ({len(each.joined)} of "
            f"{each.expected} machines); this job's ID is {shown(self._run_id)}"
            for each in others
            if each.job
        )
        self._rivals = rivals or self._rivals
        # A job of one machine meets nowhere: the endpoint is where it has its ranks' store.
        alone = next((each for each in others if not each.job), None)
        if alone is not None:
            here, theirs = str(self.size), str(alone.expected)
            self._misled = different_settings(self.member, "--nnodes", here, shown(alone.joined[0]), theirs)
        return rivals

    def _missing(self, roster: Roster) -> JoinTimeoutError:
        asked = {each.rank for each in roster.present}
        absent = [str(rank) for rank in range(self.size.least) if rank not in asked]
        named = f"; missing: machine rank {', '.join(absent)}" if -1 not in asked else ""
        before = roster.gone + roster.lost
        lost = f"; lost before: {_list(before)}" if before else ""
        lost += "".join(f"; {each}" for each in roster.sick)
        # The only reason to wait for an open round is a rank that another machine has.
        rivals = f"; waiting for a rank that is taken: {_list(roster.waiting)}" if roster.waiting else ""
        seconds = self.conf.join_timeout
        return JoinTimeoutError(
            f"{len(roster.present)} of {self.size.least} machines connected within {seconds:g} s: "
            f"{_list(roster.present)}{named}{lost}{rivals}{_refused_before(roster)}{self._rivals}",
            hint="look at the launcher's log on the machines that did not connect: same endpoint, same id, "
            "same --nnodes, same secret if there is one, and the endpoint's port reachable from there?",
        )

    def _keep_store(self, assignment: Assignment, start_store: StartStore) -> str:
        """Start the round's store; nothing if the round is over by then."""
        try:
            place = start_store(assignment)
        except BaseException:
            self.leave()  # so that another keeps it
            raise
        roster = self._register.change(lambda now: now.publish(place) if now.name == assignment.name else now)
        return place if roster.name == assignment.name else ""


class _Patience:
    """How long a machine has been in an open round, and how long nothing has changed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._round: int | None = None
        self._version = -1
        self._joined = self._changed = clock()

    def note(self, digest: Digest) -> None:
        """See the round as it is now; one that is under way may take as long as it likes."""
        if self._version != digest.version:
            self._version, self._changed = digest.version, self._clock()
        if digest.complete:
            self._round = None
        elif self._round != digest.round:
            self._round, self._joined = digest.round, self._clock()

    def left(self, seconds: float) -> float:
        """How much of that time is left."""
        return math.inf if self._round is None else self._joined + seconds - self._clock()

    @property
    def since_change(self) -> float:
        return self._clock() - self._changed


class Heartbeat:
    """Sends a participant's heartbeats, in a thread, until it is stopped."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rallypoint heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._participant.beat()
            except RallypointError as error:
                if not self._stopped.is_set():
                    logger.warning("the meeting place does not answer: %s", error.message)
            if self._stopped.wait(self._participant.conf.keep_alive_interval):
                return


def _refused_before(roster: Roster) -> str:
    """Why machines have gone that had come before the first round: nothing else is told before it."""
    return (
        ""
        if roster.has_run or not roster.told
        else f"; before that, {shown(roster.told[-1], LONGEST_SENTENCE)}"
    )


def _list(members: Sequence[Member]) -> str:
    return ", ".join(map(str, members))
