"""What the tasks of a job have in common whose scheduler has started one for each rank.

The first rank's task holds the store, until all others have left it. When a rank fails, its task says so
there, and all other tasks end theirs: schedulers do not, and ranks may wait for a lost one for many minutes.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress

from rallypoint.errors import RallypointError, StoreTimeoutError
from rallypoint.launch.rendezvous.servers import LIFESPAN, workers_for
from rallypoint.launch.tasks import Task
from rallypoint.relay.hosting import host_store
from rallypoint.rollcall.identity import Role
from rallypoint.rollcall.question import Question
from rallypoint.server.loops.backend import choose
from rallypoint.server.process.hosting import HostedServer
from rallypoint.stores.client.deadline import Deadline
from rallypoint.stores.client.look import look
from rallypoint.stores.tcp import TCPStore

_FIRST = "rallypoint/tasks/failed"
_NEWS = "rallypoint/tasks/news/{rank}"
"""What each task waits for: how the first rank failed that did; nothing: the task itself leaves."""

_WAIT_SECONDS = 3600.0  # a wait that ends without news is begun again
_TOLD_SECONDS = 5.0  # for the task of a rank that failed to say so
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # between looks at who uses the store
_PARTING_SECONDS = 10.0  # for the tasks of other ranks to hear of a failure, and to end


class EndedElsewhereError(Exception):
    """Another rank has failed: this one is to end."""


class TaskGroup:
    """One task's part: the store, if it is the first, and who of the others has failed."""

    def __init__(self, task: Task) -> None:
        """Start the store, or begin to look for it. PortInUseError and others if it cannot be started."""
        self._server: HostedServer | None = None
        if task.rank == 0:
            host, port = task.store
            ports, workers = range(port, port + 1), workers_for(task.nnodes, have_relays=False)
            self._server = host_store(host, ports, backend=choose(), lifespan=LIFESPAN, workers=workers)
        self._task = task
        self._store: TCPStore | None = None
        self.went_well = False
        """Whether this task's rank has ended as it should; to be set."""
        self._failure = ""
        self._heard = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="rallypoint task", daemon=True)
        self._listener.start()

    def __enter__(self) -> TaskGroup:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave. The store stays for the ranks and tasks that use it, if this task's rank went well."""
        if self._store is not None:  # else it was never reached
            with suppress(RallypointError):
                self._store.set(_NEWS.format(rank=self._task.rank), "")
            self._listener.join(_TOLD_SECONDS)
            self._store.close()
        if self._server is not None:
            self._await_others(self._server, math.inf if self.went_well else _PARTING_SECONDS)
            self._server.release()

    def _await_others(self, server: HostedServer, seconds: float) -> None:
        """Until no rank and no task uses the store any more. Those who only look do not count."""
        pause, deadline = _FIRST_PAUSE, Deadline(seconds)
        while not server.how_it_ended() and not deadline.passed:
            with suppress(RallypointError):
                seen = look(*server.address, Question(), Deadline(_TOLD_SECONDS))
                if all(client.who.role is Role.TOOL for client in seen.clients):
                    return
            server.await_end(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def check(self) -> None:
        """EndedElsewhereError if another rank has failed."""
        if self._heard.is_set():
            raise EndedElsewhereError(self._failure)

    def tell(self, text: str) -> None:
        """Say what has become of this task's rank; only the first that is said counts."""
        with suppress(RallypointError), self._connect(_TOLD_SECONDS) as store:
            if store.compare_set(_FIRST, "", text) == text.encode():
                keys = [_NEWS.format(rank=rank) for rank in range(self._task.world_size)]
                store.multi_set(keys, [text] * len(keys))

    def await_told(self) -> str:
        """What another task has said of its rank, giving it some time; nothing if none has."""
        self._heard.wait(_TOLD_SECONDS)
        return self._failure

    def _listen(self) -> None:
        """Wait for the failure of another rank. Without a store, ranks say themselves that there is none."""
        with suppress(RallypointError, OSError):
            self._store = self._connect(self._task.join_seconds)
            self._failure = self._await_news(self._store).decode(errors="replace")
            if self._failure:
                self._heard.set()

    def _await_news(self, store: TCPStore) -> bytes:
        key = _NEWS.format(rank=self._task.rank)
        while True:
            with suppress(StoreTimeoutError):
                store.wait([key], _WAIT_SECONDS)
                return store.get(key)

    def _connect(self, seconds: float) -> TCPStore:
        return TCPStore(*self._task.store, timeout=seconds, role=Role.AGENT)
