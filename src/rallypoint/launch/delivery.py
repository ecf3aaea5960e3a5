"""The ranks below a launcher: which signals reach them, and their end where their agent was killed.

A signal that reaches the launcher goes to the process that it is meant for, unless that has had it already.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rallypoint.exits import exit_text, signal_name
from rallypoint.launch.blame import LostServer
from rallypoint.launch.command import Deliver, Ended
from rallypoint.launch.handover import read_handover
from rallypoint.store.connect.deadline import Deadline

if TYPE_CHECKING:
    import psutil

_FOR_RANKS: Final = ("SIGUSR1", "SIGUSR2")
_HEARING_SECONDS, _PAUSE = 0.2, 0.01  # a scheduler signals the processes of a job one after the other
_BURST_SECONDS, _MOST_CHILDREN = 5.0, 8
_GRACE_SECONDS: Final = 2.0  # for ranks that want to end in order

Heard = Callable[[int], bool]
"""Whether the processes of the job have been sent a signal as well that this one was sent."""


def to_agent(folder: str, heard: Heard) -> Deliver:
    """torchrun's agent, or its ranks themselves where torchrun passes nothing on; they report to `folder`.

    SIGTERM is always passed on: it must not be lost, and the agent does not mind to hear it again.
    """

    def deliver(agent: subprocess.Popen[bytes], number: int) -> None:
        if number != signal.SIGTERM and heard(number):
            return
        if signal.Signals(number).name in _FOR_RANKS:
            signal_ranks(folder, number)
        else:
            agent.send_signal(number)

    return deliver


def to_rank(heard: Heard) -> Deliver:
    """The one rank that this launcher has.

    SIGTERM is always passed on, as it must not be lost; but once: Slurm sends it again and again.
    """
    told: list[int] = []

    def deliver(rank: subprocess.Popen[bytes], number: int) -> None:
        if number == signal.SIGTERM:
            if not told:
                rank.send_signal(number)
            told.append(number)
        elif not heard(number):
            rank.send_signal(number)

    return deliver


# An agent that was killed -----------------------------------------------------------------------------------


def end_orphans(ended: Ended, folder: str) -> list[LostServer]:
    """End the ranks that an agent has left behind, and name the agent, for the report; [] if it left none.

    The ranks report to `folder`. Not what they have started in sessions of their own: torchrun leaves that
    alone, too.
    """
    if ended.code == 0 or (ended.code > 0 and sys.platform != "win32"):
        return []  # it has ended by itself, and then its ranks have ended before it
    ranks = _find_ranks(folder)
    if ended.code > 0 and not ranks:  # Windows: an exit code does not tell who has ended a process
        return []
    _end(ranks)
    name = f"torchrun's agent (process {ended.pid} on {socket.gethostname()})"
    by_signal = f"by signal {signal_name(-ended.code)}"
    how = by_signal if ended.code < 0 else f"with {exit_text(ended.code)} before its ranks"
    return [LostServer(name, f"has ended {how}", time.time())]


def signal_ranks(folder: str, number: int) -> None:
    """Send a signal to the ranks that report to a folder."""
    import psutil

    for rank in _find_ranks(folder):
        with suppress(psutil.Error):  # it has just ended
            rank.send_signal(number)


def _end(ranks: Sequence[psutil.Process]) -> None:
    """Tell ranks to end, and kill those that run 2 seconds later; on Windows, end them and their children."""
    import psutil  # late: hardly any job needs it

    if sys.platform == "win32":
        for process in [each for rank in ranks for each in (rank, *_children(rank))]:
            with suppress(psutil.Error):  # it has just ended
                process.kill()
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            with suppress(OSError):  # it has just ended
                os.killpg(rank.pid, number)
        _, ranks = psutil.wait_procs(ranks, _GRACE_SECONDS)


def _children(rank: psutil.Process) -> list[psutil.Process]:
    import psutil

    try:
        return rank.children(recursive=True)
    except psutil.Error:
        return []  # it has just ended


def _find_ranks(folder: str) -> list[psutil.Process]:
    """The processes that the agent has started: the eldest of each rank, as its children inherit RANK."""
    import psutil

    eldest: dict[str, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            rank = environ.get("RANK", "") if str(read_handover(environ).reports) == folder else ""
            if rank and (rank not in eldest or process.create_time() < eldest[rank].create_time()):
                eldest[rank] = process
        except psutil.Error:  # it has ended, or is another user's
            continue
    return list(eldest.values())


# Who has been sent a signal ---------------------------------------------------------------------------------


class SignalProbe:
    """A child that every signal waits for: so it shows which ones were sent to all processes of a job.

    Slurm sends a signal to every process of a step, or to those alone that it has started: that depends on
    how a cluster is set up. Needs Linux; elsewhere no signal is ever seen. A signal that was seen stays with
    the child, so another one comes for the next time. The former is kept for a moment: Slurm sends SIGCONT
    before others, and so several signals may be on their way to the same processes.
    """

    def __init__(self) -> None:
        self._children: list[_Child] = []
        self._renew()

    def __enter__(self) -> SignalProbe:
        return self

    def __exit__(self, *_: object) -> None:
        while self._children:
            self._end_oldest()

    @property
    def pids(self) -> list[int]:
        """Those of the child, and of the ones before it that are still there."""
        return [child.process.pid for child in self._children]

    def has_heard(self, number: int) -> bool:
        """Whether it was sent a signal, now or in a moment. A signal that was seen does not count again."""
        deadline = Deadline(_HEARING_SECONDS)
        while not any(child.shows(number) for child in self._children):
            if deadline.passed:
                return False
            time.sleep(_PAUSE)
        for child in self._children:
            child.seen.add(number)
        self._renew()
        return True

    def _renew(self) -> None:
        process = _start_probe()
        if process is not None:
            self._children.append(_Child(process))
        while len(self._children) > 1 and self._is_oldest_over():
            self._end_oldest()

    def _is_oldest_over(self) -> bool:
        return self._children[1].burst.passed or len(self._children) > _MOST_CHILDREN

    def _end_oldest(self) -> None:
        with self._children.pop(0).process as process:
            process.kill()


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    burst: Deadline = field(default_factory=lambda: Deadline(_BURST_SECONDS))
    seen: set[int] = field(default_factory=set)
    """Signals that wait for it, and were asked for; or that will, as they have reached another one."""

    def shows(self, number: int) -> bool:
        return number not in self.seen and _is_waiting(self.process.pid, number)


def _start_probe() -> subprocess.Popen[bytes] | None:
    """A process that does nothing, and ends with this one. It inherits that all signals are blocked."""
    if not hasattr(signal, "pthread_sigmask"):
        return None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # In a session of its own, as torchrun's ranks are. Without variables, by which ranks are found.
        return subprocess.Popen(
            ["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={}, start_new_session=True
        )
    except OSError:
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _is_waiting(pid: int, number: int) -> bool:
    """Whether a signal has been sent to a process that does not take it."""
    try:
        # As bytes: this is called when a signal comes, and then a codec may be half imported.
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return False
    return any(line.startswith(b"ShdPnd:") and int(line.split()[1], 16) >> (number - 1) & 1 for line in lines)
