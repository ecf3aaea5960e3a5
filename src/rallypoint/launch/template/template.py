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
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TextIO

from rallypoint.launch.template.fresh_process import (
    Dispositions,
    close_inherited,
    forget_parent,
    inherited_dispositions,
    run_as_new_process,
    show_process,
    why_not_shown,
)
from rallypoint.launch.template.preloading import Unsafe, import_all, why_unsafe

_HEADER = struct.Struct("!I")
_STREAMS = 3
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl


class Prepare(NamedTuple):
    """A request to fork ranks that wait for their command; the answer is the list of all that wait."""

    ranks: int


class Start(NamedTuple):
    """A request to start a rank, with its three streams; the answer is its process."""

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
        self.returncode = None  # as while a process runs
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._input = None
        self._communication_started = False


def fork_process(
    words: Sequence[str], environ: Mapping[str, str], kept: int, prepare: Callable[[], object]
) -> ForkedProcess:
    """Fork this process to be a new Python process, with one more descriptor than the standard streams."""
    dispositions = inherited_dispositions()
    if pid := os.fork():
        return ForkedProcess(words, pid)
    with _exiting():
        close_inherited(kept)
        forget_parent()
        run_as_new_process(words, environ, dispositions, prepare)
    raise AssertionError  # not reached


class Template:
    """The agent's side of the template process."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.ranks: list[ForkedProcess] = []
        """The ranks of this attempt, and of those before."""
        self._pid = pid
        self._channel = channel
        self._started = 0  # in this attempt
        self._count = 0  # of ranks in an attempt
        self._unread = 0  # answers
        self._waiting: list[int] = []
        """Ranks that wait for their command."""
        self._successor: socket.socket | None = None
        self._modules: Sequence[str] = ()
        self._excluded: set[str] = set()

    def prepare(self, count: int) -> None:
        """Fork ranks that wait for their command; does not wait for that."""
        _adopt(True)  # until the next answer
        with contextlib.suppress(OSError):
            _send(self._channel, Prepare(count))
            self._unread += 1

    def prepare_again(self) -> None:
        """Once all ranks of an attempt are started: fork as many for the next one."""
        self.poll()
        if self._started:
            self._count, self._started = self._started, 0
        if (missing := self._count - len(self._waiting)) > 0:
            try:
                self._waiting = self._ask(Prepare(missing))
            except (OSError, EOFError):  # the next start reports it
                self._count = 0

    def start(
        self, words: Sequence[str], environ: Mapping[str, str], out: TextIO | None, err: TextIO | None
    ) -> ForkedProcess | Refused:
        """Start a rank as `subprocess.Popen` would, in a session of its own."""
        streams = [0, out.fileno() if out else 1, err.fileno() if err else 2]
        try:
            answer = self._ask(Start(list(words), dict(environ)), streams)
        except (OSError, EOFError) as error:
            return Refused(f"the template process has ended ({error})")
        if isinstance(answer, Refused):
            return answer
        if _parent_of(answer) != os.getpid():
            os.kill(answer, signal.SIGKILL)
            return Refused("this system does not let a process adopt another one's children")
        self._started += 1
        self._waiting = [each for each in self._waiting if each != answer]
        rank = ForkedProcess(words, answer)
        self.ranks = [*(each for each in self.ranks if each.returncode is None), rank]
        return rank

    def await_end(self, seconds: float) -> None:
        """Return when a rank has ended, or after a time."""
        descriptors = []
        try:
            descriptors = [os.pidfd_open(each.pid) for each in self.ranks if each.returncode is None]
            select.select(descriptors, [], [], seconds)
        except OSError:  # a process that is gone
            time.sleep(seconds)
        finally:
            for each in descriptors:
                os.close(each)

    def _ask(self, request: object, streams: Sequence[int] = ()) -> Any:
        _adopt(True)
        try:
            _send(self._channel, request, streams)
            while self._unread:
                self._waiting = _receive(self._channel)[0]
                self._unread -= 1
            return _receive(self._channel)[0]
        finally:
            _adopt(False)

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules in a new template, which replaces this one once it has them; returns at once."""
        wanted = [each for each in modules if each.partition(".")[0] not in self._excluded]
        if self._successor is not None or not wanted:
            return
        self._modules = wanted
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
        _adopt(True)  # the successor, too
        self.close()
        _adopt(False)
        self._pid, self._channel = found, successor
        return None

    def close(self) -> None:
        """End the template and the ranks that wait, and wait for that."""
        self._channel.close()
        for each in (self._pid, *self._waiting):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each, 0)
        self._waiting = []


def start_template(prepare: Callable[[], object] = lambda: None) -> Template | Refused:
    """Fork the template from this process, with all that it has imported.

    `prepare` is called in each rank.
    """
    if reason := why_unsafe() or why_not_shown():
        return Refused(reason)
    ours, theirs = socket.socketpair()
    rank_setup = _RankSetup(inherited_dispositions(), prepare)
    if pid := os.fork():
        theirs.close()
        return Template(pid, ours)
    with _exiting():
        os.setsid()  # signals of the terminal are for the agent and its ranks
        _become_template(theirs, rank_setup)
        os._exit(0)


# The template ---------------------------------------------------------------------------------------------


class _RankSetup(NamedTuple):
    """What all ranks of a template are given."""

    dispositions: Dispositions
    prepare: Callable[[], object]


class _Waiting(NamedTuple):
    """A rank that waits for its command."""

    pid: int
    channel: socket.socket


def _become_template(channel: socket.socket, setup: _RankSetup) -> None:
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ending, signal.SIG_IGN)
    for number, handler in setup.dispositions.items():
        if callable(signal.getsignal(number)):
            signal.signal(number, handler)
    close_inherited(channel.fileno())
    forget_parent()
    show_process(["rallypoint: template of ranks"])
    _Server(channel, setup).serve()


class _Server:
    """The template process: forks ranks until the agent has ended. Its sockets are its only descriptors."""

    def __init__(self, channel: socket.socket, setup: _RankSetup) -> None:
        self._channel = channel
        self._setup = setup
        self._waiting: list[_Waiting] = []
        self._received: list[int] = []
        """Descriptors that came with the request."""

    def serve(self) -> None:
        """Carry out requests until the agent's end of the channel is closed."""
        gc.freeze()  # collections in ranks leave the shared pages alone
        while True:
            try:
                request, self._received = _receive(self._channel)
            except (OSError, EOFError):
                return
            if isinstance(request, Preload):
                if os.fork() == 0:
                    self._succeed(socket.socket(fileno=self._received.pop()), request.modules)
                    os._exit(0)
            elif isinstance(request, Prepare):
                self._fork_ranks(request.ranks)
                _send(self._channel, [each.pid for each in self._waiting])
            else:
                if not self._waiting:
                    self._fork_ranks(1)
                _send(self._channel, self._start_rank(request, self._received))
            _close(self._received)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)  # a successor that has been refused

    def _succeed(self, channel: socket.socket, modules: Sequence[str]) -> None:
        """In a fork: import modules, and become the template unless one of them makes that unsafe."""
        self._close()
        found = import_all(modules)
        _send(channel, found or os.getpid())
        if found is None:
            _Server(channel, self._setup).serve()

    def _fork_ranks(self, count: int) -> None:
        """Fork ranks that wait for their command, and that are not this process's children."""
        pairs = [socket.socketpair() for _ in range(count)]
        intermediate = os.fork()
        if not intermediate:
            try:
                this = os.getpid()
                self._close()
                for number, (ours, theirs) in enumerate(pairs):
                    if os.fork() == 0:
                        with _exiting():
                            _close([ours, *chain(*pairs[number + 1 :])])
                            _await_start(theirs, this, self._setup)
                    _close([ours, theirs])
            finally:
                os._exit(0)
        os.waitpid(intermediate, 0)
        for ours, theirs in pairs:
            theirs.close()
            with contextlib.suppress(OSError, EOFError):  # it could not be forked
                self._waiting.append(_Waiting(_receive(ours)[0], ours))

    def _start_rank(self, request: Start, streams: Sequence[int]) -> int | Refused:
        if not self._waiting:
            return Refused("the system could not fork")
        rank = self._waiting.pop(0)
        with rank.channel:
            if reason := why_unsafe():
                return Refused(reason)
            try:
                _send(rank.channel, request, streams)
            except OSError as error:
                return Refused(f"the forked process {rank.pid} has ended ({error.strerror})")
        return rank.pid

    def _close(self) -> None:
        """In a fork: close what is the template's."""
        _close([self._channel, *(each.channel for each in self._waiting), *self._received])


def _await_start(channel: socket.socket, intermediate: int, setup: _RankSetup) -> NoReturn:
    """A rank: wait for the command, and become it."""
    while os.getppid() == intermediate:  # it exits at once, and then the agent is the parent
        time.sleep(0.0002)
    os.setsid()
    show_process(["rallypoint: a rank that waits for its start"])
    _send(channel, os.getpid())
    try:
        request, streams = _receive(channel)
    except (OSError, EOFError):
        os._exit(0)
    channel.close()
    for number, each in enumerate(streams):
        os.dup2(each, number)
    _close(streams)
    run_as_new_process(request.words, request.environ, *setup)


# Between both -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _exiting() -> Iterator[NoReturn]:
    """In a fork: never return to the code of the process that was forked. An exception is printed."""
    try:
        yield  # type: ignore[misc]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _close(descriptors: Iterable[socket.socket | int]) -> None:
    for each in descriptors:
        each.close() if isinstance(each, socket.socket) else os.close(each)


def _adopt(adopts: bool) -> None:
    """Whether to become the parent of processes below this one whose own parent exits."""
    ctypes.CDLL(None).prctl(_SUBREAPER, int(adopts), 0, 0, 0)


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
    (size,), received = _HEADER.unpack(header), bytearray()
    while len(received) < size:  # and not more: the next message may be there already
        if not (part := channel.recv(size - len(received))):
            raise EOFError("its socket was closed in the middle of a message")
        received += part
    return pickle.loads(received), list(descriptors)  # noqa: S301 - from a process that this one has forked
