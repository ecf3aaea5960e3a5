"""A process that leads: the pump that serves its clients, and the threads that wait for the engine.

The loop never waits for the engine. It hands records and checkpoints to threads (`EngineThreads`), and these
have the loop call back (`Mailbox`). An engine that is away is asked again until it answers (`EngineAbsence`).
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from rallypoint.errors import RallypointError
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.turn import Durations
from rallypoint.store.replica.core.leader import RENEW_SECONDS, Caller, LeaderCore
from rallypoint.store.replica.core.replica import pack_state
from rallypoint.store.replica.log import (
    MOST_BYTES,
    Checkpoint,
    EngineAwayError,
    Follower,
    Log,
    LostRecordsError,
)
from rallypoint.store.rollcall.snapshot import Replication, Standby
from rallypoint.store.server.loops.loop import Callback, Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.server.process.binding import BACKLOG
from rallypoint.text import duration

logger = logging.getLogger("rallypoint.replica")

_MOST_NAMED = 100
"""Of the stores, in a snapshot."""
CHECKPOINT_BYTES = 32 << 20
"""After so many bytes of records, a checkpoint takes their place; or more, if the last one was longer."""
RECORD_BYTES = 3 << 10
"""So much counts for each record besides: to read many short ones takes as long as few long ones."""

_PAUSE_SECONDS = 0.05
"""Before a call is made again that the engine has not answered."""
_HUNG_SECONDS = 10.0
"""After so long without a turn of the loop, the term is not renewed any more."""
_LOOK_SECONDS = 2.0
"""How often the engine is asked who stands by."""

_Queue = queue.SimpleQueue[Callback | None]
REMIND_SECONDS = 60.0
_HINT: Final = "`rallypoint doctor --engine URL` examines it"


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
        core.describe_replication = self._describe
        self._mailbox = Mailbox(loop, self._fail)
        self._workers = EngineThreads(
            log,
            term,
            self._mailbox,
            on_confirmed=core.confirm,
            on_followers=self._set_followers,
            on_end=self._end_term,
        )
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
        self._workers.start()
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

    def _set_followers(self, followers: Sequence[Follower]) -> None:
        self.followers = followers

    def _describe(self) -> Replication:
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


class Mailbox:
    """Calls from threads, which the loop makes."""

    def __init__(self, loop: Loop, on_failure: Callable[[Exception], None]) -> None:
        """`on_failure` is called if a call fails: some loops would go on as if nothing were."""
        self._loop = loop
        self._on_failure = on_failure
        self._calls: deque[Callback] = deque()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        loop.watch_readable(self._bell, self._call_all)

    def put(self, call: Callback) -> None:
        """Have the loop call this, soon. Safe for threads."""
        self._calls.append(call)
        try:
            self._ringer.send(b"\0")
        except OSError:  # it has been rung often enough, or is closed
            pass

    def _call_all(self) -> None:
        try:
            self._bell.recv(4096)
        except OSError:
            pass
        while self._calls:
            try:
                self._calls.popleft()()
            except Exception as error:
                self._on_failure(error)

    def close(self) -> None:
        self._loop.watch_readable(self._bell, None)
        self._bell.close()
        self._ringer.close()


class EngineThreads:
    """The threads of one term. They end with `close`, or when the term is over."""

    def __init__(
        self,
        log: Log,
        term: int,
        mailbox: Mailbox,
        *,
        on_confirmed: Callable[[float], None],
        on_followers: Callable[[Sequence[Follower]], None],
        on_end: Callable[[RallypointError], None],
    ) -> None:
        """The loop calls `on_confirmed` with the moment at which a term was asked for that was confirmed,
        `on_followers` with who stands by, and `on_end` with the error that ends the term."""
        self._log = log
        self._term = term
        self._mailbox = mailbox
        self._on_confirmed = on_confirmed
        self._on_followers = on_followers
        self._on_end = on_end
        self._closed = threading.Event()
        self._appends: _Queue = queue.SimpleQueue()
        self._keeps: _Queue = queue.SimpleQueue()
        self._heard = time.monotonic()
        """When the loop was last heard of."""
        self.absence = EngineAbsence(log.name, "what changes the store waits")
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"rallypoint-{name}", daemon=True)
            for name, work in (
                ("append", partial(self._work_off, self._appends)),
                ("renew", self._renew),
                ("keep", partial(self._work_off, self._keeps)),
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def append(self, sequence: int, parts: Sequence[bytes], on_done: Callback) -> None:
        """Append records from this number on, and have the loop call back then."""
        self._appends.put(partial(self._append, sequence, parts, on_done))

    def keep(self, sequence: int, pack: Callable[[], bytes], on_done: Callable[[int], None]) -> None:
        """Put a checkpoint of what `pack` makes, drop the records up to this one, and have the loop call back
        then, with its length. It is packed here, as that may take seconds."""
        self._keeps.put(partial(self._keep, sequence, pack, on_done))

    def close(self, *, wait: bool = True) -> None:
        """Have them end. A call of the engine that is under way may take its time: `wait` for that, if the
        log is to be used again."""
        self._closed.set()
        self._appends.put(None)
        self._keeps.put(None)
        for thread in self._threads:
            if wait and thread.ident is not None:
                thread.join()

    def _guard(self, work: Callback) -> None:
        try:
            work()
        except RallypointError as error:
            self._mailbox.put(partial(self._on_end, error))
        except Exception as error:
            logger.exception("a thread of the leader failed")
            failure = RallypointError(f"a thread of the leader failed: {error}")
            self._mailbox.put(partial(self._on_end, failure))

    def _work_off(self, calls: _Queue) -> None:
        while (call := calls.get()) is not None:
            call()

    def _append(self, sequence: int, parts: Sequence[bytes], on_done: Callback) -> None:
        for number, part in enumerate(parts, sequence):
            if not self._persist(partial(self._log.append, self._term, number, part)):
                return
        self._mailbox.put(on_done)

    def _keep(self, sequence: int, pack: Callable[[], bytes], on_done: Callable[[int], None]) -> None:
        checkpoint = Checkpoint(sequence, pack())
        if self._persist(partial(self._log.put_checkpoint, self._term, checkpoint)) and self._persist(
            partial(self._log.trim, self._term, sequence)
        ):
            self._mailbox.put(partial(on_done, len(checkpoint.data)))

    def _persist(self, call: Callback) -> bool:
        """Make a call until the engine answers; False if there is no use any more."""
        while not self._closed.is_set():
            try:
                call()
            except EngineAwayError as error:
                self.absence.begin(error)
                self._closed.wait(_PAUSE_SECONDS)
            else:
                return True
        return False

    def _renew(self) -> None:
        pause = Deadline(0.0)
        while not self._closed.is_set():
            begun = time.monotonic()
            self._mailbox.put(self._note_turn)
            try:
                if begun - self._heard < _HUNG_SECONDS:  # else the loop is stuck: let somebody else lead
                    self._log.renew(self._term)
                    self._mailbox.put(partial(self._on_confirmed, begun))
                    self.absence.end()
                if pause.passed:
                    pause = Deadline(_LOOK_SECONDS)
                    self._mailbox.put(partial(self._on_followers, self._log.followers()))
            except EngineAwayError as error:
                self.absence.begin(error)
            self._closed.wait(max(RENEW_SECONDS - (time.monotonic() - begun), 0.01))

    def _note_turn(self) -> None:
        self._heard = time.monotonic()


class EngineAbsence:
    """What is known of an engine that is away. Threads may share it: at worst, a line is logged twice."""

    def __init__(self, name: str, then: str) -> None:
        """`name` is the engine's; `then` is what happens as long as it is away, for the log."""
        self._name = name
        self._then = then
        self._remind_at = 0.0
        self.since: float | None = None
        """Since when it has not answered, by the monotonic clock; None if it does."""
        self.error: EngineAwayError | None = None
        """The last one."""

    def begin(self, error: EngineAwayError) -> None:
        """It has not answered: the log says so, and again every minute."""
        now = time.monotonic()
        self.error = error
        since = self.since
        if since is None:
            since = self.since = now
        elif now < self._remind_at:
            return
        self._remind_at = now + REMIND_SECONDS
        so_far = f" (for {duration(now - since)})" if now > since else ""
        logger.warning("%s%s; %s. hint: %s", error.message, so_far, self._then, error.hint or _HINT)

    def end(self) -> None:
        """It has answered."""
        since, self.since = self.since, None
        if since is not None:
            logger.warning("%s answers again after %.1f s", self._name, time.monotonic() - since)
