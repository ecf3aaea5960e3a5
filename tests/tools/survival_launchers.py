"""A job's launchers, whose rounds form again and again while the store at which they meet is killed.

Each is a thread with what `rallypoint run` uses: a `ReplicatedPlace`, which starts relays as processes of
their own, a `Participant` and its `Heartbeat`. In place of ranks it has one client of the round's store.
Sooner or later a launcher starts over, as if a rank had failed, or stays away for a while; rounds take two
launchers or three.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from rallypoint.client.tcp import TCPStore
from rallypoint.errors import MeetingClosedError, RallypointError
from rallypoint.launch.endpoint import Endpoints, parse_round_store
from rallypoint.launch.options import RendezvousSettings
from rallypoint.launch.rendezvous.digest import Assignment
from rallypoint.launch.rendezvous.participant import Heartbeat, Participant, Round
from rallypoint.launch.rendezvous.roster import Member, Size
from rallypoint.launch.rendezvous.servers import RendezvousPlace, open_place
from simulated_ranks import FailedError
from survival_clients import PATIENCE

JOB = "launchers"
SIZE = Size(2, 3)
_TIMES = RendezvousSettings(join_timeout=PATIENCE, last_call_timeout=0.3, keep_alive_interval=0.5)
_LOOK_SECONDS = 0.1
"""How often a launcher looks whether to start again."""


@dataclass(frozen=True)
class Entry:
    """A launcher has entered a round, with all its members."""

    who: str
    met: Round
    came: int
    """How many had come to the round's store, with this one."""
    at: float
    took: float
    """Seconds since it wanted to start again."""


class Launcher:
    """One launcher, in a thread of its own."""

    def __init__(self, number: int, places: Endpoints, rng: random.Random, stopped: threading.Event) -> None:
        self.name = f"launcher{number}"
        self._places = places
        self._rng = rng
        self._stopped = stopped
        self.entries: list[Entry] = []
        self.failure = ""
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            place = open_place(self._places, 2, JOB, local_address="127.0.0.1", seconds=PATIENCE)
            try:
                self._take_part(place)
            finally:
                place.close(alone=False)
        except (OSError, RallypointError, FailedError) as error:
            self.failure = f"{self.name}: {error!r}"

    def _take_part(self, place: RendezvousPlace) -> None:
        member = Member(self.name, "127.0.0.1", os.getpid())
        meeting = Participant(place.store, JOB, member, SIZE, _TIMES.outlasting(place.pause_seconds))
        heart = Heartbeat(meeting)
        try:
            while not self._stopped.is_set():
                self._enter(place, meeting)
                self._work(meeting)
        except MeetingClosedError:
            if not self._stopped.is_set():
                raise
        finally:
            heart.stop()
        meeting.close("the trial has ended")
        meeting.leave()

    def _enter(self, place: RendezvousPlace, meeting: Participant) -> None:
        """The next round: its store is reached through this launcher's relay, as ranks do."""
        begun = time.monotonic()

        def start_store(seat: Assignment) -> str:
            return str(place.start_round(seat.name))

        place.end_relay()
        met = meeting.next_round(start_store)
        relay = place.start_relay(parse_round_store(met.store))
        if relay is None:
            raise FailedError(f"no relay to the store of round {met.number}")
        with closing(TCPStore(*relay, timeout=PATIENCE)) as store:
            came = store.add("came", 1)
            if came == met.size:
                store.set("complete", "")
            store.wait(["complete"])
        now = time.monotonic()
        self.entries.append(Entry(self.name, met, came, now, now - begun))

    def _work(self, meeting: Participant) -> None:
        """Until a rank fails here, or all should start again because of another launcher.

        After some failures this one stays away for a while, and the others begin a round without it.
        """
        fails_at = time.monotonic() + self._rng.uniform(0, 1)
        while not self._stopped.wait(_LOOK_SECONDS) and time.monotonic() < fails_at:
            if meeting.wants_restart():
                return
        if self._rng.random() < 0.3:
            meeting.leave()
            self._stopped.wait(self._rng.uniform(1, 4))


class Warnings(logging.Handler):
    """What meetings warn of: a launcher was given up, or the store has not answered. Neither is to be.

    A launcher may wait for others: that is reported by `waiting`, and no fault.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.module != "waiting":
            self.texts.append(record.getMessage())


class Launchers:
    """All launchers of a job, from the first fault to the last."""

    def __init__(self, places: Endpoints, rng: random.Random) -> None:
        self.warnings = Warnings()
        self._stopped = threading.Event()
        self._all = [
            Launcher(number, places, random.Random(rng.random()), self._stopped)
            for number in range(SIZE.most)
        ]

    @property
    def entries(self) -> list[Entry]:
        return [entry for each in self._all for entry in each.entries]

    def go_on(self, since: float) -> bool:
        """Whether each has entered a round after a moment. FailedError if that will not be."""
        self._check_failures()
        return all(each.entries and each.entries[-1].at > since for each in self._all)

    def stop(self) -> None:
        self._stopped.set()

    def finish(self) -> None:
        """Have all leave, and judge. FailedError if something is wrong."""
        self.stop()
        for each in self._all:
            each.thread.join(PATIENCE)
            if each.thread.is_alive():
                raise FailedError(f"{each.name} hangs")
        self._check_failures()
        check_rounds(self.entries)

    def _check_failures(self) -> None:
        if found := [*filter(None, (each.failure for each in self._all)), *self.warnings.texts]:
            raise FailedError("launchers: " + "; ".join(found))


@contextmanager
def launching(places: Endpoints, rng: random.Random) -> Iterator[Launchers]:
    """Launchers that meet, and are judged when the block is left; after a failure they only end."""
    launchers = Launchers(places, rng)
    logger = logging.getLogger("rallypoint.meeting")
    logger.addHandler(launchers.warnings)
    try:
        yield launchers
        launchers.finish()
    finally:
        launchers.stop()
        logger.removeHandler(launchers.warnings)


def check_rounds(entries: Sequence[Entry]) -> None:
    """Each round is entered once by each of its members, who agree about it, and have one fresh store."""
    rounds = defaultdict(list)
    for entry in entries:
        rounds[entry.met.number].append(entry)
    if sorted(rounds) != list(range(len(rounds))):
        raise FailedError(f"there were rounds {sorted(rounds)}")
    for number, entered in rounds.items():
        size = entered[0].met.size
        if (
            not SIZE.least <= size <= SIZE.most
            or len({replace(each.met, rank=0) for each in entered}) > 1
            or len({each.who for each in entered}) < len(entered)
            or sorted(each.met.rank for each in entered) != list(range(size))
            or sorted(each.came for each in entered) != list(range(1, size + 1))
        ):
            raise FailedError(f"round {number} is not one:\n" + "\n".join(map(str, entered)))
