"""Who is sent a signal that reaches a launcher: whoever it is meant for, and who has not got it yet."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rallypoint.launch.command import Deliver
from rallypoint.launch.lost_agent import signal_ranks

_FOR_RANKS = ("SIGUSR1", "SIGUSR2")
_HEARING_SECONDS, _PAUSE = 0.2, 0.01  # a scheduler signals the processes of a job one after the other

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
    """The one rank that this launcher has. SIGTERM is always passed on: it must not be lost."""

    def deliver(rank: subprocess.Popen[bytes], number: int) -> None:
        if number == signal.SIGTERM or not heard(number):
            rank.send_signal(number)

    return deliver


class Witness:
    """A child that every signal waits for: so it shows which ones were sent to all processes of a job.

    Slurm sends a signal to every process of a step, or to those alone that it has started: that depends on
    how a cluster is set up. Needs Linux; elsewhere no signal is ever seen.
    """

    def __init__(self) -> None:
        self._child = _start_witness()

    def __enter__(self) -> Witness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """The child's; 0 if there is none."""
        return self._child.pid if self._child is not None else 0

    def has_heard(self, number: int) -> bool:
        """Whether it was sent a signal, now or in a moment. A signal that was seen does not count again."""
        deadline = time.monotonic() + _HEARING_SECONDS
        while not _is_waiting(self.pid, number):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        self._end()
        self._child = _start_witness()
        return True

    def _end(self) -> None:
        if self._child is not None:
            with self._child as child:
                child.kill()


def _start_witness() -> subprocess.Popen[bytes] | None:
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
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("ShdPnd:") and int(line.split()[1], 16) >> (number - 1) & 1 for line in lines)
