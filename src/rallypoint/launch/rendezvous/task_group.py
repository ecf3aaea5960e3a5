"""`rallypoint run --tasks`: one rank, and what it has in common with the job's other tasks.

The first rank's task holds the store, until all others have left it. When a rank fails, its task says so
there, and all other tasks end theirs: schedulers do not, and ranks may wait for a lost one for many minutes.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.codec import to_text
from rallypoint.errors import RallypointError, StoreTimeoutError
from rallypoint.launch.blame import Exit, find_blame, read_summary
from rallypoint.launch.command import Deliver, Ended, run_command
from rallypoint.launch.endpoint import Endpoint, StoreView
from rallypoint.launch.environment import name_relay
from rallypoint.launch.job import Task
from rallypoint.launch.rendezvous.attendance import RollCall
from rallypoint.launch.rendezvous.servers import LIFESPAN, openness, workers_for
from rallypoint.launch.reports import FIRST, Reports, report_exits
from rallypoint.launch.stacks.watching import Say, watching
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import is_this_machine
from rallypoint.store.relay.hosting import host_relay, host_store
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.question import Question
from rallypoint.store.server.guard.secret import job_secret
from rallypoint.store.server.loops.backend import choose
from rallypoint.store.server.process.hosting import HostedServer
from rallypoint.text import shown

_JOB = "rallypoint/tasks/job"
"""Whose tasks these are: the job's id. The first task writes it, the others look whether it is theirs."""
_TAKEN = "rallypoint/tasks/{job}/taken/{rank}"
"""Counts the tasks that are this rank; more than one are those of two jobs with the same id."""
_FIRST = "rallypoint/tasks/{job}/failed"
_NEWS = "rallypoint/tasks/{job}/news/{rank}"
"""What each task waits for: how the first rank failed that did; nothing: the task itself leaves."""

_WAIT_SECONDS = 3600.0  # a wait that ends without news is begun again
_NAMING_SECONDS = 60.0  # for the first task to name its job, once its store is up
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
        self._lock = threading.Lock()
        """For `_store` and `_has_left`: the listener may reach the store when this task leaves already."""
        self._has_left = False
        self.went_well = False
        """Whether this task's rank has ended as it should; to be set."""
        self._failure = ""
        """What the task of another rank that failed has said."""
        self._error: Exception | None = None
        self._is_known = threading.Event()
        """Whether the store is this job's: it is, or `_error` says what it is."""
        self._listener = threading.Thread(target=self._listen, name="rallypoint task", daemon=True)
        self._listener.start()

    def __enter__(self) -> TaskGroup:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave. The store stays for the ranks and tasks that use it, if this task's rank went well."""
        with self._lock:
            self._has_left, store = True, self._store
        if store is not None:  # else it was not reached
            if self._error is None:  # else it is lost, or another job's, which may have the same id
                with suppress(RallypointError):
                    store.set(self._news_of(self._task.rank), "")
            self._listener.join(_TOLD_SECONDS)
            store.close()
        if self._server is not None:
            self._await_others(self._server, math.inf if self.went_well else _PARTING_SECONDS)
            self._server.release()

    def _await_others(self, server: HostedServer, seconds: float) -> None:
        """Until no rank and no task uses the store any more. Those who only look do not count."""
        pause, deadline = _FIRST_PAUSE, Deadline(seconds)
        while not server.how_it_ended() and not deadline.passed:
            with suppress(RallypointError):
                seen = fetch_snapshot(*server.address, Question(), Deadline(_TOLD_SECONDS))
                if all(client.who.role is Role.TOOL for client in seen.clients):
                    return
            server.await_end(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def is_ready(self, seconds: float) -> bool:
        """Whether this job's store is there; no rank may use another's. RallypointError if it will not be."""
        if not self._is_known.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def check(self) -> None:
        """EndedElsewhereError if another rank has failed."""
        if self._failure:
            raise EndedElsewhereError(self._failure)

    def report_failure(self, text: str) -> None:
        """Say what has become of this task's rank; only the first that is said counts."""
        with suppress(RallypointError), self._connect(_TOLD_SECONDS) as store:
            self._check_job(store)
            if store.compare_set(_FIRST.format(job=self._task.run_id), "", text) == text.encode():
                keys = [self._news_of(rank) for rank in range(self._task.world_size)]
                store.multi_set(keys, [text] * len(keys))

    def await_report(self) -> str:
        """What another task has said of its rank, giving it some time; nothing if none has."""
        self._listener.join(_TOLD_SECONDS)
        return self._failure

    def _listen(self) -> None:
        """Wait for the failure of another rank. If the store is lost, ranks say so themselves."""
        try:
            store = self._connect(self._task.join_seconds)
            if self._keep(store):
                self._check_job(store)
                self._claim_rank(store)
                self._is_known.set()
                self._failure = self._await_news(store).decode(errors="replace")
        except (RallypointError, OSError) as error:
            self._error = error
        self._is_known.set()

    def _keep(self, store: TCPStore) -> bool:
        """Keep the connection as long as this task is here; False, and close it, if it has left."""
        with self._lock:
            if not self._has_left:
                self._store = store
                return True
        store.close()
        return False

    def _check_job(self, store: TCPStore) -> None:
        """Let the others know this job, or see that the store is its store; RallypointError if not."""
        ours = self._task.run_id
        if self._task.rank == 0:
            store.set(_JOB, ours)
            return
        theirs: str | None = None
        with suppress(StoreTimeoutError):
            store.wait([_JOB], _NAMING_SECONDS)
            theirs = store.get(_JOB).decode(errors="replace")
        if theirs != ours:
            whose = f"the tasks there are of job {shown(theirs)}" if theirs is not None else "it has no tasks"
            raise RallypointError(
                f"the store at {self._task.store} belongs to another job: {whose}, and this one is of job "
                f"{shown(ours)}",
                hint="give this job another port, with --master-port, the same for all its tasks",
            )

    def _claim_rank(self, store: TCPStore) -> None:
        job, rank = self._task.run_id, self._task.rank
        if store.add(_TAKEN.format(job=job, rank=rank), 1) > 1:
            raise RallypointError(
                f"the store at {self._task.store} belongs to another job, which has the id {shown(job)} as "
                f"well: rank {rank} is there already",
                hint="give each job another id and another port, with --rdzv-id and --master-port",
            )

    def _await_news(self, store: TCPStore) -> bytes:
        key = self._news_of(self._task.rank)
        while True:
            with suppress(StoreTimeoutError):
                store.wait([key], _WAIT_SECONDS)
                return store.get(key)

    def _news_of(self, rank: int) -> str:
        return _NEWS.format(job=self._task.run_id, rank=rank)

    def _connect(self, seconds: float) -> TCPStore:
        return TCPStore(*self._task.store, timeout=seconds, role=Role.AGENT)


# A task's rank ----------------------------------------------------------------------------------------------


def run_task(
    task: Task,
    command: Sequence[str],
    environ: dict[str, str],
    folder: Path,
    poll: Callable[[], bool],
    deliver: Deliver,
    say: Say,
) -> Ended:
    """Run the command of a rank to its end, or until another rank fails. It starts when the store is there.

    The rank leaves its reports in `folder`. `poll` is called every tenth of a second, until it returns
    False; `say` if the job stands still.
    """
    # The group is left last: the first task waits there for everybody who uses the store.
    with TaskGroup(task) as group, watching(folder, environ, say), ExitStack() as held:
        if task.rank == 0:  # it counts the ranks, for the line that says who has joined
            call = RollCall(task.store, StoreView(task.store), lambda *_: task.world_size, has_launcher=True)
            held.callback(call.stop)

        def may_start(seconds: float) -> bool:
            is_ready = group.is_ready(seconds)
            if is_ready and job_secret() is not None and not is_this_machine(task.store.host):
                # This rank cannot prove the job's secret.
                relay = host_relay([task.store], backend=choose(), lifespan=LIFESPAN)
                held.callback(relay.release)
                name_relay(environ, Endpoint(*relay.address), task.store)
            return is_ready

        if task.rank == 0 and task.nnodes > 1 and (warning := openness(str(task.store), environ)):
            say([warning])
        is_wanted = True

        def find_failure() -> bool:
            """Look for the failure of another rank as long as this one runs."""
            nonlocal is_wanted
            group.check()
            is_wanted = is_wanted and poll()
            return True

        try:
            ended = run_command(
                command, environ, find_failure, is_agent=False, deliver=deliver, may_start=may_start
            )
        except EndedElsewhereError as error:
            FIRST.leave(read_summary(str(error)))
            return Ended(0, 1, 0)
        group.went_well = ended.code == 0
        if ended.code and not ended.end_signal:
            _exchange_failures(group, task, ended, folder)
        return ended


def _exchange_failures(group: TaskGroup, task: Task, ended: Ended, folder: Path) -> None:
    """Tell the other tasks how this rank failed; or hear it, if this one only followed from another."""
    host = socket.gethostname()
    how = Exit(task.rank, ended.pid, ended.code, time.time(), task.local_rank, host)
    report_exits([how], folder)
    first = find_blame(Reports(folder).failures(), [how])
    if first is not None and not first.follows:
        group.report_failure(to_text(first.brief()))
    elif told := group.await_report():
        FIRST.leave(read_summary(told))
