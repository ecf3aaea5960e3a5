"""One process of a replicated store: it stands by, and leads when nobody else does."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.replica.core.leader import SILENCE_SECONDS, LeaderCore
from rallypoint.store.replica.core.replica import Replica
from rallypoint.store.replica.leading import EngineAbsence, LeaderPump, mark_lost, release_lead
from rallypoint.store.replica.log import (
    EngineAwayError,
    FencedError,
    Follower,
    Leadership,
    Log,
    LostRecordsError,
    TrimmedError,
)
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import about_this_process, stop_on_signals
from rallypoint.store.server.process.binding import reserve_again
from rallypoint.store.wire.limits import Limits

logger = logging.getLogger("rallypoint.replica")

_LOOK_SECONDS = 0.1
_ANNOUNCE_SECONDS = 1.0


class LeaderWatch:
    """What has been seen of the leader."""

    __slots__ = ("_since", "seen")

    def __init__(self) -> None:
        self.seen: Leadership | None = None
        """What was seen last."""
        self._since = 0.0

    def should_take_over(self, now: float, seen: Leadership) -> bool:
        """Whether to take over, by what the engine has answered now: then call `Log.acquire` with `seen`.

        That fails if there was a sign of the leader meanwhile.
        """
        if seen != self.seen:
            self.seen, self._since = seen, now
        return not seen.address or now - self._since >= SILENCE_SECONDS


class Node:
    """Stands by, or leads. For the main thread of a process, as signals are."""

    def __init__(
        self,
        log: Log,
        limits: Limits,
        address: str,
        sockets: Sequence[socket.socket],
        open_loop: Callable[[], Loop],
        prepare: Callable[[LeaderPump], None] = lambda _: None,
    ) -> None:
        """`address` is where clients reach it; `sockets` are bound there, and do not listen. `prepare` is
        called with the pump of each term, before it serves."""
        self._log = log
        self._limits = limits
        self._address = address
        self._sockets = sockets
        self._open_loop = open_loop
        self._prepare = prepare
        self._stopped = threading.Event()
        self._on_ready: Callable[[], None] = lambda: None
        self._absence = EngineAbsence(log.name, "trying again")

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Stand by, and lead when it is due, until SIGINT, SIGTERM or Ctrl-Break.

        `on_ready` is called when it has read the log for the first time, so that it could take over.

        Raises RallypointError if it can do neither: the log is of another version, or has lost records.
        """
        stop_on_signals(self._stopped.set)
        self._on_ready = on_ready
        replica = Replica(self._limits)
        try:
            while not self._stopped.is_set():
                replica, term = self._follow(replica)
                if term and self._stopped.is_set():
                    release_lead(self._log, term)
                elif term and not self._lead(replica, term):
                    return
        except LostRecordsError as error:
            mark_lost(self._log, error)
            raise
        finally:
            for each in self._sockets:
                each.close()
            self._log.close()

    # Standing by

    def _follow(self, replica: Replica) -> tuple[Replica, int]:
        """Read what the leader writes, until there is none; return the term in which this process leads, or 0
        if it was stopped."""
        watch, pause = LeaderWatch(), Deadline(0.0)
        while not self._stopped.is_set():
            try:
                replica = self._catch_up(replica)
                if self._stopped.is_set():
                    break
                if pause.passed:
                    pause = Deadline(_ANNOUNCE_SECONDS)
                    self._log.announce(Follower(self._address, replica.sequence))
                seen = self._log.read_leadership()
                self._be_ready()
                if watch.should_take_over(time.monotonic(), seen):
                    term = self._log.acquire(seen, self._address)
                    return self._read_all(replica), term
                self._absence.end()
            except FencedError:
                watch = LeaderWatch()  # the leader is alive, or somebody else was faster
            except EngineAwayError as error:
                self._absence.begin(error)
            self._stopped.wait(_LOOK_SECONDS)
        return replica, 0

    def _be_ready(self) -> None:
        on_ready, self._on_ready = self._on_ready, lambda: None
        on_ready()

    def _read_all(self, replica: Replica) -> Replica:
        """All that the leader before has written. Nobody but this process can write any more."""
        while not self._stopped.is_set():
            try:
                return self._check(self._catch_up(replica))
            except EngineAwayError as error:
                self._absence.begin(error)
                self._stopped.wait(_LOOK_SECONDS)
        return replica

    def _check(self, replica: Replica) -> Replica:
        """LostRecordsError if the log has lost its tail, and has grown again to the same length."""
        if not replica.sequence:
            return replica
        try:
            records = self._log.read(replica.sequence)
        except TrimmedError:  # a checkpoint has its place
            return self._restore(at_least=replica.sequence)
        if not records:
            raise LostRecordsError(f"{self._log.name}: record {replica.sequence} is gone")
        replica.check_last(records[0])
        return replica

    def _catch_up(self, replica: Replica) -> Replica:
        """Read the log to its end, or until this process is told to end."""
        while not self._stopped.is_set():
            try:
                records = self._log.read(replica.sequence + 1)
            except TrimmedError:
                replica = self._restore(at_least=replica.sequence + 1)
                gc.collect()  # the one before refers to itself, and collections of this process are rare
                continue
            if not records:
                return replica
            for record in records:
                replica.apply(record)
            replica.faults.clear()
        return replica

    def _restore(self, at_least: int) -> Replica:
        """The state of the last checkpoint: it was put before the records up to it were dropped."""
        checkpoint = self._log.checkpoint()
        if checkpoint is None or checkpoint.sequence < at_least:
            raise LostRecordsError(f"{self._log.name}: the checkpoint of record {at_least} is gone")
        return Replica.of(checkpoint.data, self._limits)

    # Leading

    def _lead(self, replica: Replica, term: int) -> bool:
        """Lead until the term is over; return whether to stand by then."""
        loop = self._open_loop()
        core = LeaderCore(replica, time.monotonic, self._limits, loop.turn, about_this_process(loop))
        pump = LeaderPump(loop, core, self._sockets, self._log, term, self._address)
        self._prepare(pump)
        pump.stopped = self._stopped
        places = [each.getsockname() for each in self._sockets]
        pump.serve()
        if pump.error is None:
            return False
        if not isinstance(pump.error, FencedError):
            raise pump.error
        self._sockets = reserve_again(places)
        stop_on_signals(self._stopped.set)
        logger.warning("leads no more: %s", pump.error.message)
        return True
