"""One machine's part in a job's meeting: it keeps to the rules of `roster`, through a store.

The roster is one key, changed by compare-and-set: a machine that was too late looks again. Each change
that others wait for has a number, and a key of that number: to wait for the next change is to wait for
the next number's key, so no machine polls. A sign of life is a counter of each machine's own, which
another one reads (`lookout`), and counts how often it has looked in vain. So no clocks are compared, and a
pause of all machines costs none of them its place.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rallypoint.errors import JoinTimeoutError, RallypointError, StoreTimeoutError
from rallypoint.launch.rendezvous.lookout import Lookout
from rallypoint.launch.rendezvous.roster import Member, Roster, Size, closed_error
from rallypoint.stores.base import Store
from rallypoint.stores.prefix import PrefixStore

logger = logging.getLogger("rallypoint.meeting")

_ROSTER = "roster"
_TURNS_KEPT = 64
_READ_EVERY = 10  # looks or beats: the whole roster is read then, whether there is news or not
_PARTING_SECONDS = 0.1  # between looks at the machines that are still there, at the end
_LOOK_SECONDS = 1.0  # between looks at the clock, while waiting


@dataclass(frozen=True)
class MeetingTimes:
    """How long things may take, in seconds."""

    join: float = 600.0
    """Until enough machines have come."""
    last_call: float = 30.0
    """How long to wait for more, once enough have come."""
    close: float = 30.0
    """How long the machine with the store waits at the end for the others to leave."""
    beat: float = 5.0
    """Between two signs of life."""
    beats_missed: int = 3
    """How many signs of life a machine may miss; then it counts as lost."""

    def outlasting(self, seconds: float) -> MeetingTimes:
        """The same, but no machine counts as lost that was silent for less than so many seconds."""
        return replace(self, beats_missed=max(self.beats_missed, math.ceil(seconds / self.beat)))


@dataclass(frozen=True)
class Round:
    """One machine's view of a complete round: its rank, all members, and the store."""

    number: int
    rank: int
    members: tuple[Member, ...]
    store: str


StartStore = Callable[[Roster], str]
"""Starts the round's store, when this machine is its keeper, and says where others reach it."""


class Meeting:
    """A machine's part. Safe to use from the thread that joins and one that beats."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        member: Member,
        size: Size,
        times: MeetingTimes,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store = PrefixStore(f"rallypoint/meeting/{run_id}", store)
        self.member = member
        self.size = size
        self.times = times
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.RLock()
        self._text = b""  # the roster as it was last read
        self._roster = Roster()
        self._round: Round | None = None
        self._turn_seen = -1  # the last turn whose key was there when this machine waited for it
        self._beats = 0
        self._lookout = Lookout(times.beats_missed)

    @property
    def roster(self) -> Roster:
        """The latest roster, read from the store."""
        with self._lock:
            # Compared with nothing, it is created if need be, and read in any case.
            self._take(self._store.compare_set(_ROSTER, "", self._text or Roster().to_json()))
            return self._roster

    def next_round(self, start_store: StartStore) -> Round:
        """Leave the round before, if any, and take part in the next one.

        Raises JoinTimeoutError, MeetingClosedError, UsageError (a rank that cannot be had), or what
        the store raises when it is gone.
        """
        self._round = None
        while self._round is None:
            self.leave()
            roster = self._await_complete()
            if roster.keeper == self.member:
                self._keep_store(roster, start_store)
            self._round = self._await_store(roster)
        return self._round

    def wants_restart(self) -> bool:
        """Whether the machines should start again: one is lost, one may come in, or this one was given up.

        Cheap to ask again and again: one small request, unless there is news.
        """
        roster = self._news()
        given_up = self._round is not None and not self._takes_part(roster, self._round.number)
        return (given_up and not roster.closed) or roster.wants_restart(self.size)

    def close(self, reason: str) -> None:
        """Let no machine join any more."""
        self._change(lambda roster: roster.close(reason))

    def tell(self, text: str) -> None:
        """Say what failed on this machine, for the others to know."""
        self._change(lambda roster: roster.tell(text))

    def await_told(self, seconds: float) -> tuple[str, ...]:
        """What machines have said of their failures, giving them some time to do so."""
        end = self._clock() + seconds
        while not (roster := self.roster).told and roster.everybody and self._clock() < end:
            self._await_turn(roster, min(_LOOK_SECONDS, end - self._clock()))
        return roster.told

    def leave(self) -> None:
        """Take no part any more."""
        self._change(lambda roster: roster.leave(self.member.id, self.size))

    def reopen(self) -> None:
        """Let another job with the same id meet here, if this one has ended and all have left."""
        self._change(lambda roster: roster.reopen())

    def await_others_gone(self) -> bool:
        """Wait until all others have left; False if that took longer than `times.close`."""
        end = self._clock() + self.times.close
        while True:
            roster = self.roster
            if all(each.id == self.member.id for each in roster.everybody):
                return True
            if self._clock() >= end:
                return False
            self._await_turn(roster, min(_PARTING_SECONDS, end - self._clock()))

    def beat(self) -> None:
        """Give a sign of life, and look for those of others; to be called every `times.beat` seconds."""
        self._store.add(f"beat/{self.member.id}", 1)
        self._beats += 1
        roster = self.roster if self._beats % _READ_EVERY == 1 else self._news()
        silent = self._lookout.look(_ring_after(roster, self.member.id), self._signs_of)
        if silent:
            lost = [each for each in roster.everybody if each.id in silent]
            seconds = (self.times.beats_missed + 1) * self.times.beat
            who = "it" if len(lost) == 1 else "them"
            logger.warning(
                "%s gave no sign of life for %.0f s: going on without %s", _list(lost), seconds, who
            )
            self._change(lambda latest: latest.lose(silent, self.size))

    def _signs_of(self, member_id: str) -> int:
        return self._store.add(f"beat/{member_id}", 0)

    # Coming together

    def _await_complete(self) -> Roster:
        """Join, and wait for the round to be complete."""
        patience = _Patience(self._clock)
        while True:
            roster = self._change(lambda now: now.join(self.member, self.size))
            if roster.rank_of(self.member.id) is not None:
                return roster
            if roster.closed:
                self.leave()
                raise closed_error(roster.closed)
            if self.member in roster.present:
                patience.note(roster)
                self._check_patience(roster, patience)
            else:
                patience.reset()  # a round is under way without this machine: it may take as long as it likes
            self._await_news(roster, patience)

    def _await_news(self, roster: Roster, patience: _Patience) -> None:
        """Wait until there may be something to do.

        Of the machines in an open round, only the first looks every second for others that have come: if all
        did, a thousand machines would read a thousand names each, every second.
        """
        for _ in range(1 if self.member in roster.present[:1] else _READ_EVERY):
            if self._await_turn(roster, _LOOK_SECONDS) or patience.since_joined >= self.times.join:
                return

    def _check_patience(self, roster: Roster, patience: _Patience) -> None:
        if len(roster.present) >= self.size.least:
            if patience.since_change >= self.times.last_call:
                self._change(lambda latest: latest.fill() if latest == roster else latest)
        elif patience.since_joined >= self.times.join:
            self.leave()
            raise self._missing(roster)

    def _missing(self, roster: Roster) -> JoinTimeoutError:
        asked = {each.rank for each in roster.present}
        absent = [str(rank) for rank in range(self.size.least) if rank not in asked]
        named = f"; missing: machine rank {', '.join(absent)}" if -1 not in asked else ""
        before = roster.gone + roster.lost
        lost = f"; lost before: {_list(before)}" if before else ""
        # The only reason to wait for an open round is a rank that another machine has.
        rivals = f"; waiting for a rank that is taken: {_list(roster.waiting)}" if roster.waiting else ""
        return JoinTimeoutError(
            f"{len(roster.present)} of {self.size.least} machines came within {self.times.join:g} s: "
            f"{_list(roster.present)}{named}{lost}{rivals}",
            hint="look at the launcher's log on the machines that did not come: same endpoint, same id, "
            "same --nnodes, same secret if there is one, and the endpoint's port reachable from there?",
        )

    def _keep_store(self, complete: Roster, start_store: StartStore) -> None:
        try:
            place = start_store(complete)
        except BaseException:
            self.leave()  # so that another keeps it
            raise
        self._change(lambda now: now.publish(place) if now.round == complete.round and now.complete else now)

    def _await_store(self, complete: Roster) -> Round | None:
        """The round, once its store is up; None if its keeper went before that."""
        while True:
            roster = self.roster
            if not self._takes_part(roster, complete.round) or not roster.is_kept:
                return None
            if roster.store:
                rank = roster.rank_of(self.member.id)
                assert rank is not None  # it takes part
                return Round(roster.round, rank, roster.members, roster.store)
            self._await_turn(roster, _LOOK_SECONDS)

    def _takes_part(self, roster: Roster, number: int) -> bool:
        return roster.round == number and roster.rank_of(self.member.id) is not None

    # The roster in the store

    def _change(self, rule: Callable[[Roster], Roster]) -> Roster:
        """Apply a rule to the latest roster, again if another machine was quicker."""
        with self._lock:
            before = self.roster
            while (wanted := rule(before)) != before:
                turn = before.turn + wanted.turned_from(before, self.size)
                text = replace(wanted, version=before.version + 1, turn=turn).to_json().encode()
                found = self._store.compare_set(_ROSTER, self._text, text)
                self._take(found)
                if found == text:
                    self._announce(before.turn)
                    break
                before = self._roster
            return self._roster

    def _news(self) -> Roster:
        """The latest roster, unless nothing has changed that others wait for: then as it was last read."""
        with self._lock:
            if self._store.check([_turn_key(self._roster.turn + 1)]):
                return self.roster
            return self._roster

    def _announce(self, turn: int) -> None:
        """Wake the machines that wait for what this one has just changed."""
        if self._roster.turn > turn:
            self._store.set(_turn_key(self._roster.turn), "")
            self._store.delete_key(_turn_key(self._roster.turn - _TURNS_KEPT))

    def _take(self, text: bytes) -> None:
        if text != self._text:
            self._text, self._roster = text, Roster.from_json(text)

    def _await_turn(self, roster: Roster, seconds: float) -> bool:
        """Whether there is a next change that others wait for, waiting for it as long as `seconds`.

        The machine that made a change may have died before it could announce it: look again after a while.
        And any client can write the key of a turn that has not come. Then it takes the whole time: otherwise
        the caller, who reads the same roster again, would be back at once, thousands of times a second.
        """
        turn = roster.turn + 1
        try:
            self._store.wait([_turn_key(turn)], max(seconds, 0.001))
        except StoreTimeoutError:
            return False
        if turn == self._turn_seen:
            self._sleep(max(seconds, 0.001))
        self._turn_seen = turn
        return True


class _Patience:
    """How long a machine has been in an open round, and how long no other has come."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._round: int | None = None
        self._version = -1
        self._joined = self._changed = clock()

    def note(self, roster: Roster) -> None:
        """See the round as it is now."""
        if self._round != roster.round:
            self._round, self._joined = roster.round, self._clock()
        if self._version != roster.version:
            self._version, self._changed = roster.version, self._clock()

    def reset(self) -> None:
        self._round = None

    @property
    def since_joined(self) -> float:
        return self._clock() - self._joined

    @property
    def since_change(self) -> float:
        return self._clock() - self._changed


class Heartbeat:
    """Beats for a meeting, in a thread, until it is stopped."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rallypoint heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._meeting.beat()
            except RallypointError as error:
                if not self._stopped.is_set():
                    logger.warning("the meeting place does not answer: %s", error.message)
            if self._stopped.wait(self._meeting.times.beat):
                return


def _ring_after(roster: Roster, member_id: str) -> list[str]:
    """The ids of all others, as they follow this machine in the ring; none if it is not in it."""
    ids = [each.id for each in roster.everybody]
    if member_id not in ids:
        return []
    place = ids.index(member_id)
    return ids[place + 1 :] + ids[:place]


def _list(members: Sequence[Member]) -> str:
    return ", ".join(map(str, members))


def _turn_key(turn: int) -> str:
    return f"turn/{turn}"
