"""A process that leads: the pump that serves its clients, and the threads that speak to the engine."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial

from rallypoint.errors import RallypointError
from rallypoint.store.core.turn import Durations
from rallypoint.store.replica.core.callers import Caller
from rallypoint.store.replica.core.leader import LeaderCore
from rallypoint.store.replica.core.replica import pack_state
from rallypoint.store.replica.log import MOST_BYTES, Follower, Log, LostRecordsError
from rallypoint.store.replica.workers import Mailbox, Workers
from rallypoint.store.rollcall.snapshot import Replication, Standby
from rallypoint.store.server.loops.loop import Callback, Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.server.process.binding import BACKLOG

logger = logging.getLogger("rallypoint.store.replica")

_MOST_NAMED = 100
"""Of the stores, in a snapshot."""
CHECKPOINT_BYTES = 32 << 20
"""After so many bytes of records, a checkpoint takes their place; or more, if the last one was longer."""
RECORD_BYTES = 3 << 10
"""So much counts for each record besides: to read many short ones takes as long as few long ones."""


def release_lead(log: Log, term: int) -> None:
    """Let somebody else lead at once. If the engine is away, others have to wait until the term is over."""
    try:
        log.release(term)
    except RallypointError as error:
        logger.warning("could not release the lead: %s", error.message)


def mark_lost(log: Log, error: LostRecordsError) -> None:
    """Let nobody go on with a log that has lost records: the others may not know them."""
    try:
        log.mark_lost(error.message.removeprefix(f"{log.name}: "))
    except RallypointError as failure:
        logger.warning("could not mark the log as one that has lost records: %s", failure.message)


class LeaderPump(Pump[Caller]):
    """Serves clients for one term. The sockets are bound, and listen when the first record is written."""

    def __init__(
        self,
        loop: Loop,
        core: LeaderCore,
        listeners: Sequence[socket.socket],
        log: Log,
        term: int,
        address: str = "",
    ) -> None:
        """`address` is where clients reach it, as snapshots tell."""
        super().__init__(loop, core, listeners)
        self.sockets = listeners
        self._leader = core
        self._log = log
        self._term = term
        self._address = address
        core.tell_replication = self._tell
        self._mailbox = Mailbox(loop, self._fail)
        self._workers = Workers(log, term, self._mailbox, self._end_term)
        self._on_tick: Callback = lambda: None
        self._leads = False
        self._has_ended = False
        self._sent_at = 0.0
        self._kept_bytes = 0
        self._is_keeping = False
        self.commits = Durations()
        self.error: RallypointError | None = None
        """Why the term is over; None if this process was told to end."""
        self.followers: Sequence[Follower] = ()
        self.stopped = threading.Event()
        """Set when this process is told to end."""

    def start(self, on_tick: Callback = lambda: None) -> None:
        self._on_tick = on_tick
        if self.stopped.is_set():  # before there was a loop to tell
            self.loop.stop()
        self._leader.begin(self._term)
        self._workers.start(self._leader.confirm, self._take_followers)
        self.deliver()

    def _stop(self) -> None:
        self.stopped.set()
        super()._stop()

    def _open_up(self) -> None:
        """The first record is written: all that the leader before has begun is known. Clients may come."""
        for each in self.sockets:
            each.listen(BACKLOG)
        super().start(self._on_tick)
        logger.info("leads from now on, in term %d", self._term)

    def close(self) -> None:
        is_told = self.error is None
        waits_for_engine = self._workers.absence.since is not None
        self._workers.close(wait=not (is_told and waits_for_engine))
        super().close()
        self._mailbox.close()
        if is_told and not waits_for_engine:
            release_lead(self._log, self._term)

    # Records

    def _flush(self) -> None:
        try:
            self._append_next()
        except Exception as error:
            self._fail(error)

    def _append_next(self) -> None:
        parts = self._leader.next_record(MOST_BYTES)
        if parts:
            self._sent_at = time.monotonic()
            self._workers.append(self._leader.replica.sequence + 1, parts, self._on_appended)
        self.deliver()

    def _on_appended(self) -> None:
        if self._has_ended:
            return
        self.commits.add(time.monotonic() - self._sent_at)
        self._leader.committed()
        for fault in self._leader.replica.faults:
            logger.error("the store failed to carry a request out", exc_info=fault)
        self._leader.replica.faults.clear()
        self.deliver()
        if not self._leads:
            self._leads = True
            self._open_up()
        self._keep_if_due()

    def _keep_if_due(self) -> None:
        replica = self._leader.replica
        taken = replica.taken_bytes + replica.taken_records * RECORD_BYTES
        if self._is_keeping or taken < max(CHECKPOINT_BYTES, self._kept_bytes):
            return
        self._is_keeping = True
        replica.taken_bytes = replica.taken_records = 0
        self._workers.keep(replica.sequence, partial(pack_state, replica.plain_state()), self._on_kept)

    def _on_kept(self, size: int) -> None:
        self._is_keeping = False
        self._kept_bytes = size

    def _take_followers(self, followers: Sequence[Follower]) -> None:
        self.followers = followers

    def _tell(self) -> Replication:
        workers, last = self._workers, self._leader.replica.sequence
        # The engine remembers for some seconds that this process stood by.
        others = [each for each in self.followers if each.name != self._address]
        since = workers.absence.since
        error = workers.absence.error if since is not None else None
        return Replication(
            engine=self._log.name,
            term=self._term,
            leader=self._address,
            standbys=tuple(Standby(each.name, max(last - each.sequence, 0)) for each in others),
            stores=tuple(sorted(filter(None, self._leader.replica.stores)))[:_MOST_NAMED],
            records=last,
            commit_p50=self.commits.quantile(0.5),
            commit_p99=self.commits.quantile(0.99),
            log_bytes=self._leader.replica.taken_bytes,
            checkpoint_bytes=self._kept_bytes,
            away_seconds=time.monotonic() - since if since is not None else -1.0,
            error=error.message if error is not None else "",
            hint=error.hint if error is not None else "",
        )

    def _fail(self, error: Exception) -> None:
        """What this process holds may not be what the log says: it has to end. A start reads the log anew."""
        logger.error("the leader failed", exc_info=error)
        self._end_term(RallypointError(f"the leader failed: {error!r}"))

    def _end_term(self, error: RallypointError) -> None:
        """Somebody else leads, or the log cannot be gone on with: no client hears anything more from here."""
        if not self._has_ended:
            self._has_ended = True
            self.error = error
            self.loop.stop()
