"""The threads of a process that leads: they wait for the engine, so that the loop need not."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from rallypoint.errors import RallypointError
from rallypoint.store.replica.absence import Absence
from rallypoint.store.replica.core.watch import RENEW_SECONDS
from rallypoint.store.replica.log import Checkpoint, EngineAwayError, Follower, Log
from rallypoint.store.server.loops.loop import Callback, Loop

logger = logging.getLogger("rallypoint.store.replica")

_PAUSE_SECONDS = 0.05
"""Before a call is made again that the engine has not answered."""
_HUNG_SECONDS = 10.0
"""After so long without a turn of the loop, the term is not renewed any more."""
_LOOK_SECONDS = 2.0
"""How often the engine is asked who stands by."""

_Keeping = tuple[int, Callable[[], bytes], Callable[[int], None]]


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
        loop.watch_readable(self._bell, self._take)

    def put(self, call: Callback) -> None:
        """Have the loop call this, soon. Safe for threads."""
        self._calls.append(call)
        try:
            self._ringer.send(b"\0")
        except OSError:  # it has been rung often enough, or is closed
            pass

    def _take(self) -> None:
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


class Workers:
    """The threads of one term. They end with `close`, or when the term is over."""

    def __init__(
        self, log: Log, term: int, mailbox: Mailbox, on_end: Callable[[RallypointError], None]
    ) -> None:
        """`on_end` is called by the loop, with the error that ends the term."""
        self._log = log
        self._term = term
        self._mailbox = mailbox
        self._on_end = on_end
        self._closed = threading.Event()
        self._records: queue.SimpleQueue[tuple[int, Sequence[bytes], Callback] | None] = queue.SimpleQueue()
        self._checkpoints: queue.SimpleQueue[_Keeping | None] = queue.SimpleQueue()
        self._heard = time.monotonic()
        """When the loop was last heard of."""
        self.absence = Absence(log.name, "what changes the store waits")
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"rallypoint-{name}", daemon=True)
            for name, work in (("append", self._append), ("renew", self._renew), ("keep", self._keep))
        ]

    def start(
        self, on_confirmed: Callable[[float], None], on_followers: Callable[[Sequence[Follower]], None]
    ) -> None:
        """`on_confirmed`: the term was confirmed when it was asked for at this moment. `on_followers`: who
        stands by. The loop calls both."""
        self._on_confirmed = on_confirmed
        self._on_followers = on_followers
        for thread in self._threads:
            thread.start()

    def append(self, sequence: int, parts: Sequence[bytes], on_done: Callback) -> None:
        """Append records from this number on, and have the loop call back then."""
        self._records.put((sequence, parts, on_done))

    def keep(self, sequence: int, pack: Callable[[], bytes], on_done: Callable[[int], None]) -> None:
        """Put a checkpoint of what `pack` makes, drop the records up to this one, and have the loop call back
        then, with its length. It is packed here, as that may take seconds."""
        self._checkpoints.put((sequence, pack, on_done))

    def close(self, *, wait: bool = True) -> None:
        """Have them end. A call of the engine that is under way may take its time: `wait` for that, if the
        log is to be used again."""
        self._closed.set()
        self._records.put(None)
        self._checkpoints.put(None)
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

    def _append(self) -> None:
        while (order := self._records.get()) is not None:
            sequence, parts, on_done = order
            for number, part in enumerate(parts, sequence):
                if not self._persist(partial(self._log.append, self._term, number, part)):
                    return
            self._mailbox.put(on_done)

    def _keep(self) -> None:
        while (order := self._checkpoints.get()) is not None:
            sequence, pack, on_done = order
            checkpoint = Checkpoint(sequence, pack())
            if not self._persist(partial(self._log.put_checkpoint, self._term, checkpoint)):
                return
            if not self._persist(partial(self._log.trim, self._term, sequence)):
                return
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
        next_look = time.monotonic()
        while not self._closed.is_set():
            begun = time.monotonic()
            self._mailbox.put(self._hear)
            try:
                if begun - self._heard < _HUNG_SECONDS:  # else the loop is stuck: let somebody else lead
                    self._log.renew(self._term)
                    self._mailbox.put(partial(self._on_confirmed, begun))
                    self.absence.end()
                if begun >= next_look:
                    next_look = begun + _LOOK_SECONDS
                    self._mailbox.put(partial(self._on_followers, self._log.followers()))
            except EngineAwayError as error:
                self.absence.begin(error)
            self._closed.wait(max(RENEW_SECONDS - (time.monotonic() - begun), 0.01))

    def _hear(self) -> None:
        self._heard = time.monotonic()
