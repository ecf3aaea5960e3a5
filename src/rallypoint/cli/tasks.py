"""`rallypoint run --tasks`: one rank, of a job whose scheduler has started a task for each."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rallypoint.codec import to_text
from rallypoint.launch import reports
from rallypoint.launch.blame import Exit, find_blame, read_summary
from rallypoint.launch.command import Deliver, Ended, run_command
from rallypoint.launch.endpoint import Endpoint, StoreView
from rallypoint.launch.environment import name_relay
from rallypoint.launch.rendezvous.servers import LIFESPAN, openness
from rallypoint.launch.rendezvous.task_group import EndedElsewhereError, TaskGroup
from rallypoint.launch.stacks.watching import Say, watching
from rallypoint.launch.tasks import Task
from rallypoint.pytorch.attendance import RollCall
from rallypoint.store.machine.addresses import is_this_machine
from rallypoint.store.relay.hosting import host_relay
from rallypoint.store.server.guard.secret import job_secret
from rallypoint.store.server.loops.backend import choose


def run_task(
    task: Task,
    command: Sequence[str],
    environ: dict[str, str],
    folder: Path,
    on_look: Callable[[], bool],
    deliver: Deliver,
    say: Say,
) -> Ended:
    """Run the command of a rank to its end, or until another rank fails. It starts when the store is there.

    The rank leaves its reports in `folder`. `on_look` is called every tenth of a second, until it returns
    False; `say` if the job stands still.
    """
    # The group is left last: the first task waits there for everybody who uses the store.
    with TaskGroup(task) as group, _roll_call(task), watching(folder, environ, say), ExitStack() as relay:

        def may_start(seconds: float) -> bool:
            is_ready = group.is_ready(seconds)
            if is_ready and job_secret() is not None and not is_this_machine(task.store.host):
                name_relay(environ, relay.enter_context(_relaying(task)), task.store)
            return is_ready

        if task.rank == 0 and task.nnodes > 1 and (warning := openness(str(task.store), environ)):
            say([warning])
        is_wanted = True

        def look() -> bool:
            """Look for the failure of another rank as long as this one runs."""
            nonlocal is_wanted
            group.check()
            is_wanted = is_wanted and on_look()
            return True

        try:
            ended = run_command(command, environ, look, is_agent=False, deliver=deliver, may_start=may_start)
        except EndedElsewhereError as error:
            reports.report_first(read_summary(str(error)))
            return Ended(0, 1, 0)
        group.went_well = ended.code == 0
        if ended.code and not ended.told_to:
            _exchange_failures(group, task, ended, folder)
        return ended


@contextmanager
def _relaying(task: Task) -> Iterator[Endpoint]:
    """A relay for this rank, which cannot prove the job's secret; where it is."""
    relay = host_relay([task.store], backend=choose(), lifespan=LIFESPAN)
    try:
        yield Endpoint(*relay.address)
    finally:
        relay.release()


@contextmanager
def _roll_call(task: Task) -> Iterator[None]:
    """The first task counts the ranks, for the line that says who has joined."""
    if task.rank != 0:
        yield
        return
    call = RollCall(task.store, StoreView(task.store), lambda *_: task.world_size, has_launcher=True)
    try:
        yield
    finally:
        call.stop()


def _exchange_failures(group: TaskGroup, task: Task, ended: Ended, folder: Path) -> None:
    """Tell the other tasks how this rank failed; or hear it, if this one only followed from another."""
    host = socket.gethostname()
    how = Exit(task.rank, ended.pid, ended.code, time.time(), task.local_rank, host)
    reports.report_exit(folder, how)
    first = find_blame(reports.Reports(folder).failures(), [how])
    if first is not None and not first.follows:
        group.tell(to_text(first.brief()))
    elif told := group.await_told():
        reports.report_first(read_summary(told))
