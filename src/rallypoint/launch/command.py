"""Starting a job's command, passing signals on to it, and ending as it ended.

The command runs in this process's own group, so the signals of a terminal (Ctrl-C, and on Windows Ctrl-Break)
reach it by themselves; signals to this process alone are passed on. The output of the command is not touched.
If this process is killed, the command ends as well, by `store.machine.lifetime`: torchrun's agent
(`pytorch.agent`) sees a pipe end, any other command is sent SIGTERM, on Linux. If that agent is killed, its
ranks are ended from here. A signal goes to the process that it is meant for, unless that has had it already.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from rallypoint.errors import UsageError
from rallypoint.exits import ENDED_BY_CONSOLE, exit_text, signal_name
from rallypoint.launch.blame import LostServer
from rallypoint.launch.handover import read_handover
from rallypoint.launch.switches import can_fork
from rallypoint.launch.template.fresh_process import show_process
from rallypoint.launch.template.preloading import why_unsafe
from rallypoint.launch.template.template import fork_process
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.lifetime import children_end_with_us, lifeline, signal_with_parent
from rallypoint.store.server.guard.secret import SECRET_VARIABLE

if TYPE_CHECKING:
    import psutil

_ENDINGS = ("SIGINT", "SIGTERM", "SIGBREAK")
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGBREAK")

POLL_SECONDS = 0.1
GRACE_SECONDS = 30.0
"""How long a command that is told to end may take to do so; torchrun gives its ranks as long."""

_FOR_RANKS: Final = ("SIGUSR1", "SIGUSR2")
_HEARING_SECONDS = 0.2  # a scheduler signals the processes of a job one after the other
_SAME_SIGNAL_SECONDS = 1.0  # and before a time limit, Slurm signals them twice
_NOTE = struct.Struct("=id")  # a signal that the probe was sent, and when
_PARENT_SECONDS = 0.5  # between checks whether the parent lives
_ORPHAN_SECONDS: Final = 2.0  # for ranks that want to end in order


class Ended(NamedTuple):
    """How a command ended: its exit code, or minus the number of the signal that ended it."""

    pid: int
    code: int
    end_signal: int
    """The SIGINT, SIGTERM or SIGBREAK that this process was sent, or 0; before a start, any signal."""


Deliver = Callable[[subprocess.Popen[bytes], int], object]
"""Does what there is to do about a signal that the launcher of a process was sent."""


def run_command(
    command: Sequence[str],
    environ: Mapping[str, str],
    poll: Callable[[], bool],
    *,
    is_agent: bool,
    deliver: Deliver = subprocess.Popen.send_signal,
    may_start: Callable[[float], bool] = lambda _: True,
    on_end: Callable[[], object] = lambda: None,
) -> Ended:
    """Run a command to its end. `poll` is called every tenth of a second, until it returns False.
    `on_end` is called by the first signal to end.

    If it raises, the command is told to end, and killed if it does not. Before the command is started,
    `may_start` is asked again and again, with how long it may wait; a signal that would end the command ends
    that as well.
    """
    secret = environ.get(SECRET_VARIABLE, "")
    with children_end_with_us(), _passing_signals(deliver, on_end) as forwarder, lifeline(secret) as pipe:
        while not may_start(POLL_SECONDS):
            if forwarder.first:
                return Ended(0, -forwarder.first, forwarder.first)
        process = _start(command, environ, pipe if is_agent else None)
        forwarder.open(process)
        try:
            code = _await_end(process, poll)
        except BaseException:
            _end(process)
            raise
    return Ended(process.pid, code, forwarder.end_signal)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_end(process: subprocess.Popen[bytes], poll: Callable[[], bool]) -> int:
    polling = True
    while True:
        polling = polling and poll()
        try:
            return process.wait(POLL_SECONDS if polling else None)
        except subprocess.TimeoutExpired:
            continue


def end_as(code: int) -> NoReturn:
    """End this process as a command ended: with its exit code, or by the same signal."""
    if sys.platform == "win32":
        code = code if code >= 0 else ENDED_BY_CONSOLE
        sys.exit(code - (1 << 32) if code >> 31 else code)  # 32 bits with a sign are all that it takes
    if code >= 0:
        sys.exit(code)
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    sys.exit(128 - code)  # only if the signal was blocked


def comes_from_terminal(number: int, had_terminal: bool) -> bool:
    """Whether the command has been sent a signal as well: a terminal sends these to its whole group."""
    if sys.platform == "win32":
        return number in (signal.SIGINT, getattr(signal, "SIGBREAK", None))
    if number == signal.SIGHUP:  # that of a terminal which is gone
        return had_terminal and not has_terminal()
    return number in (signal.SIGINT, signal.SIGQUIT) and has_terminal()


def has_terminal() -> bool:
    """Whether this process is in the foreground of a terminal."""
    if sys.platform == "win32":
        return True
    try:
        with open("/dev/tty", encoding="utf-8") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _start(command: Sequence[str], environ: Mapping[str, str], pipe: int | None) -> subprocess.Popen[bytes]:
    try:
        if sys.platform == "win32":  # neither descriptors nor signals pass there
            # Windows by itself would look beside this Python first, which in a venv is not the venv's.
            program = shutil.which(command[0]) or command[0]
            return subprocess.Popen([program, *command[1:]], env=dict(environ))
        if pipe is not None:
            environ = {**environ, **read_handover(environ)._replace(lifeline=pipe).variables()}
            environ.pop(SECRET_VARIABLE, None)  # it is in the pipe, and ranks do not need it
            if can_fork(environ) and not why_unsafe():
                return fork_process(command, environ, pipe, _prepare)
            return subprocess.Popen(command, env=environ, pass_fds=[pipe])
        return subprocess.Popen(command, env=dict(environ), preexec_fn=signal_with_parent())
    except OSError as error:
        raise UsageError(
            f"cannot start {command[0]!r}: {error.strerror}",
            hint="is it installed, and on the PATH?" if isinstance(error, FileNotFoundError) else "",
        ) from error


def _prepare() -> None:
    """Do what `sitecustomize` does in a process that is started."""
    import rallypoint_prepare  # type: ignore[import-not-found]  # its folder is on the path of each job

    rallypoint_prepare.prepare()


class _SignalForwarder:
    """Takes signals, and has them delivered once there is a process."""

    def __init__(self, deliver: Deliver, on_end: Callable[[], object]) -> None:
        self._deliver = deliver
        self._on_end = on_end
        self.end_signal = 0
        """The first signal that was one to end."""
        self.first = 0
        """The first signal of those that end a process that has not asked for them."""
        self._waiting: list[int] = []
        self._is_passing = threading.Lock()
        self._had_terminal = has_terminal()
        self._process: subprocess.Popen[bytes] | None = None

    def open(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pass_on()  # the signals that came while the process was started

    def receive(self, number: int, _: FrameType | None) -> None:
        if not self.end_signal and signal.Signals(number).name in _ENDINGS:
            self.end_signal = number
            self._on_end()
        if not self.first and number != getattr(signal, "SIGCONT", 0):
            self.first = number
        self._waiting.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass each signal on once, one after the other, also if another one comes meanwhile."""
        while self._process is not None and self._waiting and self._is_passing.acquire(blocking=False):
            try:
                number = self._waiting.pop(0)
                if not comes_from_terminal(number, self._had_terminal):
                    self._deliver(self._process, number)
            finally:
                self._is_passing.release()


@contextmanager
def _passing_signals(deliver: Deliver, on_end: Callable[[], object]) -> Iterator[_SignalForwarder]:
    """Take signals while the block runs, except those that are ignored, as under nohup."""
    forwarder = _SignalForwarder(deliver, on_end)
    previous = {}
    for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, forwarder.receive)
    try:
        yield forwarder
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# Who is sent a signal ---------------------------------------------------------------------------------------

Heard = Callable[[int], bool]
"""Whether the processes of the job have been sent a signal as well that this one was sent."""


def to_agent(folder: str, heard: Heard) -> Deliver:
    """torchrun's agent, or its ranks themselves where torchrun passes nothing on; they report to `folder`.

    SIGTERM is always passed on: it must not be lost, and a second one does the agent no harm.
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
    """A child that notes each signal, and so shows which ones were sent to all processes of a job.

    Slurm sends a signal to every process of a step, or to those alone that it has started: that depends on
    how a cluster is set up. Needs Linux; elsewhere no signal is ever seen.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self._noted: dict[int, float] = {}
        self.pid, self._pipe = _fork_probe() if wanted and sys.platform == "linux" else (0, -1)

    def __enter__(self) -> SignalProbe:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._pipe)

    def has_heard(self, number: int) -> bool:
        """Whether it is sent a signal within a moment, or was sent it less than a second ago."""
        deadline = Deadline(_HEARING_SECONDS)
        while self.pid and not self._has_noted(number) and not deadline.passed:
            if select.select([self._pipe], [], [], deadline.remaining)[0]:
                self._noted.update(_NOTE.iter_unpack(os.read(self._pipe, 64 * _NOTE.size)))
        return self._has_noted(number)

    def _has_noted(self, number: int) -> bool:
        return time.monotonic() - self._noted.get(number, -math.inf) < _SAME_SIGNAL_SECONDS


def _fork_probe() -> tuple[int, int]:
    """A child that writes the number of each signal into a pipe, and that pipe. No thread may run yet."""
    parent, (ours, theirs) = os.getpid(), os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child == 0:
        try:
            _note_signals(theirs, parent)
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(theirs)
    return child, ours


def _note_signals(pipe: int, parent: int) -> None:
    """Run in the child, until its parent ends; in a session of its own, as torchrun's ranks are."""
    os.setsid()
    with suppress(OSError):  # an old kernel: this looks like a second launcher then
        show_process(["rallypoint: notes signals"], {})
    os.dup2(pipe, 0)
    os.closerange(1, 1 << 16)  # somebody may wait for the end of the output
    while os.getppid() == parent:
        found = signal.sigtimedwait(signal.valid_signals(), _PARENT_SECONDS)
        if found is not None:
            os.write(0, _NOTE.pack(found.si_signo, time.monotonic()))


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
    _end_ranks(ranks)
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


def _end_ranks(ranks: Sequence[psutil.Process]) -> None:
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
        _, ranks = psutil.wait_procs(ranks, _ORPHAN_SECONDS)


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
