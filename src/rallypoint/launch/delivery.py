"""Who is sent a signal that reaches a launcher: whoever it is meant for, and who has not got it yet."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rallypoint.launch.command import Deliver
from rallypoint.launch.lost_agent import signal_ranks

_FOR_RANKS = ("SIGUSR1", "SIGUSR2")
_HEARING_SECONDS, _PAUSE = 0.2, 0.01  # a scheduler signals the processes of a job one after the other
_BURST_SECONDS, _MOST_CHILDREN = 5.0, 8

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
        deadline = time.monotonic() + _HEARING_SECONDS
        while not any(child.shows(number) for child in self._children):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE)
        for child in self._children:
            child.seen.add(number)
        self._renew()
        return True

    def _renew(self) -> None:
        process = _start_probe()
        if process is not None:
            self._children.append(_Child(process, time.monotonic()))
        while len(self._children) > 1 and self._is_oldest_over():
            self._end_oldest()

    def _is_oldest_over(self) -> bool:
        since = self._children[1].began
        return time.monotonic() - since > _BURST_SECONDS or len(self._children) > _MOST_CHILDREN

    def _end_oldest(self) -> None:
        with self._children.pop(0).process as process:
            process.kill()


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    began: float
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
