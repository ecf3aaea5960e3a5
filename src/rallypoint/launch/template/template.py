"""The template process, and the agent's side of it."""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TextIO

from rallypoint.launch.template.fresh_process import (
    Dispositions,
    forget_loggers,
    inherited_dispositions,
    run_as_new_process,
)
from rallypoint.launch.template.preloading import Unsafe, import_all, why_unsafe

_HEADER = struct.Struct("!I")
_STREAMS = 3
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl


class Fork(NamedTuple):
    """A request to fork a rank, with its three streams."""

    words: Sequence[str]
    environ: Mapping[str, str]


class Preload(NamedTuple):
    """A request to fork a template that imports modules; its descriptor is that template's channel."""

    modules: Sequence[str]


class Refused(NamedTuple):
    """An answer: no rank was forked, and why."""

    reason: str


class ForkedProcess(subprocess.Popen[bytes]):
    """A child of this process that the template has forked. It can be polled, awaited and signalled."""

    def __init__(self, words: Sequence[str], pid: int) -> None:
        self.args = words
        self.pid = pid
        self.returncode = None  # type: ignore[assignment]  # as while a process runs
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._input = None
        self._communication_started = False


class Template:
    """The agent's side of the template process."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.ranks: set[int] = set()
        """The processes that it has forked so far."""
        self._pid = pid
        self._channel = channel
        self._successor: socket.socket | None = None
        self._modules: Sequence[str] = ()
        self._excluded: set[str] = set()

    def fork(
        self, words: Sequence[str], environ: Mapping[str, str], out: TextIO | None, err: TextIO | None
    ) -> ForkedProcess | Refused:
        """Start a rank as `subprocess.Popen` would, in a session of its own."""
        self.poll()
        streams = [0, out.fileno() if out else 1, err.fileno() if err else 2]
        try:
            with _adopting():
                _send(self._channel, Fork(list(words), dict(environ)), streams)
                answer = _receive(self._channel)[0]
        except (OSError, EOFError) as error:
            return Refused(f"the template process has ended ({error})")
        if isinstance(answer, Refused):
            return answer
        if _parent_of(answer) != os.getpid():
            os.kill(answer, signal.SIGKILL)
            return Refused("this system does not let a process adopt another one's children")
        self.ranks.add(answer)
        return ForkedProcess(words, answer)

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules in a new template, which replaces this one once it has them; returns at once."""
        self._modules = [each for each in modules if each.partition(".")[0] not in self._excluded]
        if self._successor is not None or not self._modules:
            return
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            _send(self._channel, Preload(self._modules), [theirs.fileno()])
        self._successor = ours

    def preload_now(self, modules: Sequence[str]) -> list[Unsafe]:
        """Import modules in a new template, and wait for it; what could not be imported before a fork."""
        found = []
        self.preload(modules)
        while self._successor is not None:
            if (refused := self.poll(None)) is not None:
                found.append(refused)
        return found

    def poll(self, seconds: float | None = 0.0) -> Unsafe | None:
        """Give way to the successor if it is ready, or ask for one without the package that this returns."""
        if self._successor is None or not select.select([self._successor], [], [], seconds)[0]:
            return None
        successor, self._successor = self._successor, None
        try:
            found: int | Unsafe = _receive(successor)[0]
        except (OSError, EOFError):  # an import has ended its process
            successor.close()
            return None
        if isinstance(found, Unsafe):
            successor.close()
            self._excluded.add(found.package)
            self.preload(self._modules)
            return found
        with _adopting():  # the successor, too
            self.close()
        self._pid, self._channel = found, successor
        return None

    def close(self) -> None:
        """End the template, and wait for that."""
        self._channel.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def start_template(prepare: Callable[[], object] = lambda: None) -> Template | Refused:
    """Fork the template from this process, with all that it has imported.

    `prepare` is called in each rank.
    """
    if reason := why_unsafe():
        return Refused(reason)
    ours, theirs = socket.socketpair()
    rank_setup = _RankSetup(inherited_dispositions(), prepare)
    if pid := os.fork():
        theirs.close()
        return Template(pid, ours)
    try:
        os.setsid()  # signals of the terminal are for the agent and its ranks
        _become_template(theirs, rank_setup)
    finally:
        os._exit(0)


# The template ---------------------------------------------------------------------------------------------


class _RankSetup(NamedTuple):
    """What all ranks of a template are given."""

    dispositions: Dispositions
    prepare: Callable[[], object]


def _become_template(channel: socket.socket, setup: _RankSetup) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    for number, handler in setup.dispositions.items():
        if callable(signal.getsignal(number)):
            signal.signal(number, handler)
    os.closerange(_STREAMS, channel.fileno())
    os.closerange(channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    forget_loggers()
    _serve(channel, setup)


def _serve(channel: socket.socket, setup: _RankSetup) -> None:
    """Fork ranks until the agent has ended."""
    gc.collect()
    gc.freeze()  # collections in ranks leave the shared pages alone
    while True:
        try:
            request, descriptors = _receive(channel)
        except (OSError, EOFError):
            return
        if isinstance(request, Preload):
            if os.fork() == 0:
                channel.close()
                _succeed(socket.socket(fileno=descriptors[0]), request.modules, setup)
                os._exit(0)
        else:
            _send(channel, _fork_rank(channel, request, descriptors, setup))
        for each in descriptors:
            os.close(each)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)  # a successor that has been refused


def _succeed(channel: socket.socket, modules: Sequence[str], setup: _RankSetup) -> None:
    """Import modules, and become the template unless one of them makes that unsafe."""
    found = import_all(modules)
    _send(channel, found or os.getpid())
    if found is None:
        _serve(channel, setup)


def _fork_rank(
    channel: socket.socket, request: Fork, streams: Sequence[int], setup: _RankSetup
) -> int | Refused:
    """Fork a rank that is not this process's child, and return its id."""
    if reason := why_unsafe():
        return Refused(reason)
    reading, writing = os.pipe()
    intermediate = os.fork()
    if not intermediate:
        try:
            os.close(reading)
            this = os.getpid()
            if os.fork() == 0:
                channel.close()
                _become_rank(this, writing, request, streams, setup)
        except OSError as error:
            os.write(writing, f"fork: {error.strerror}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(intermediate, 0)
    with open(reading, "rb") as pipe:
        text = pipe.read().decode()
    return int(text) if text.isdecimal() else Refused(text or "the template cannot fork")


def _become_rank(
    intermediate: int, writing: int, request: Fork, streams: Sequence[int], setup: _RankSetup
) -> NoReturn:
    while os.getppid() == intermediate:  # it exits at once, and then the agent is the parent
        time.sleep(0.0002)
    os.setsid()
    os.write(writing, b"%d" % os.getpid())
    os.close(writing)
    for number, each in enumerate(streams):
        os.dup2(each, number)
    for each in streams:
        os.close(each)
    run_as_new_process(request.words, request.environ, *setup)


# Between both -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of processes below this one whose own parent exits."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SUBREAPER, 0, 0, 0, 0)


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def _send(channel: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    data = pickle.dumps(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    channel.sendmsg([_HEADER.pack(len(data))], rights)
    channel.sendall(data)


def _receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """The next message, with its descriptors; EOFError at the end."""
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(_STREAMS * descriptors.itemsize)
    header, rights, _, _ = channel.recvmsg(_HEADER.size, room)
    if len(header) < _HEADER.size:
        raise EOFError("its socket is closed")
    for _, _, data in rights:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    with channel.makefile("rb") as stream:
        data = stream.read(_HEADER.unpack(header)[0])
    return pickle.loads(data), list(descriptors)  # noqa: S301 - from a process that this one has forked
