"""Server processes: how they are started, spoken to, kept and ended.

To start an interpreter takes longer than all that follows. So a process whose store was closed waits for a
few seconds, with nothing open, for the next store of its parent: one that is made anew, or that of the next
test of a suite.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from typing import IO, Final

from rallypoint.errors import ServerStartError
from rallypoint.exits import exit_text, signal_name
from rallypoint.server.guard.secret import SECRET_VARIABLE
from rallypoint.server.process.line import ANSWER_MARK, END_NOW, LET_GO, give, pipe

START_SECONDS = 60.0
"""How long a child may take to be ready; a loaded machine needs seconds to start an interpreter."""

_STOP_SECONDS = 5.0

KEPT_SECONDS = 5.0
"""How long a process is kept for the next server. It waits for longer: an order always finds it there."""

# The child finds the modules where its parent does, but not in the folder it happens to stand in.
_BOOTSTRAP = """# a server process of rallypoint
import sys
del sys.path[0]
import json
sys.path[:] = json.loads(sys.argv.pop())
from importlib import import_module
import_module(sys.argv.pop()).main()
"""


_NETWORK: Final = "/proc/thread-self/ns/net"


class NoAnswerError(ServerStartError):
    """A process that was to serve has ended, or does not answer."""


@dataclass(frozen=True)
class ServerKind:
    """A kind of server process."""

    name: str
    """For messages."""
    module: str
    """A module whose `main` calls `child.run`, or speaks over the `line` itself."""
    is_kept: bool = False
    """Whether its processes are kept for the next server, for a while."""


class ServerProcess:
    """A server process: it waits for its order, or serves."""

    def __init__(self, kind: ServerKind) -> None:
        self.kind = kind
        self._began_in = _circumstances(kind) if kind.is_kept else None
        self.was_kept = False
        self._kept_until = 0.0
        self.popen = _spawn(kind)

    @property
    def is_there(self) -> bool:
        """Whether it has not died."""
        return self.popen.poll() is None

    @property
    def is_late(self) -> bool:
        """Whether it was kept for long enough."""
        return time.monotonic() >= self._kept_until

    @property
    def may_be_kept(self) -> bool:
        """Whether it can serve again, in place of one that would be started."""
        return self._began_in is not None

    def is_for(self, kind: ServerKind) -> bool:
        """Whether it is as one would be that is started now for this kind of server."""
        return self.is_there and not self.is_late and self._began_in == _circumstances(kind)

    def ask(
        self, order: dict[str, object], sockets: Sequence[socket.socket], seconds: float | None = None
    ) -> dict[str, str]:
        """Give it its whole order, and await its answer. If there is none, it is ended.

        NoAnswerError if it ends, or says nothing in time; ServerStartError if it says that it failed.
        """
        try:
            self.give(order, sockets)
            return _await_answer(self.kind, self.popen, START_SECONDS if seconds is None else seconds)
        except BaseException:
            self.end()
            raise

    def give(self, order: dict[str, object], sockets: Sequence[socket.socket]) -> None:
        """Give it its whole order. It will answer."""
        try:
            give(self.popen, order, sockets)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended; its exit code comes when its answer is awaited
        except OSError as error:
            self.end()
            raise ServerStartError(f"the {self.kind.name} cannot be given its sockets: {error}") from error

    def let_go(self) -> bool:
        """Have it end its server, and wait for another order; False: it does not, and is to be ended."""
        self.was_kept = True
        self._kept_until = time.monotonic() + KEPT_SECONDS
        try:
            pipe(self.popen.stdin).write(LET_GO)
            _await_answer(self.kind, self.popen, _STOP_SECONDS)
        except (OSError, ServerStartError):
            return False
        return True

    def end(self) -> None:
        """End it."""
        end_process(self.popen, os.getpid())


_kept: deque[tuple[ServerProcess, weakref.finalize[..., ServerProcess]]] = deque()
"""What waits for the next server, one at most, and its end, which it has with this process."""


def _forget_kept() -> None:
    """They are the parent's: this is a fork."""
    for process, _ in _kept:
        process.popen.returncode = 0  # or Python would complain that it still runs
        for each in (process.popen.stdin, process.popen.stdout):
            pipe(each).close()
    _kept.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_kept)


def keep(process: ServerProcess) -> None:
    """Have a process end its server, and keep it for another one, for a while; or end it, if that fails."""
    try:
        is_kept = process.may_be_kept and process.let_go()
    except BaseException:  # Ctrl-C
        process.end()
        raise
    if not is_kept:
        process.end()
        return
    _kept.append((process, weakref.finalize(process, end_process, process.popen, os.getpid())))
    while len(_kept) > 1:
        _end_first()
    timer = threading.Timer(KEPT_SECONDS, _end_late)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # the system has no thread to give, or this process is about to end
        end_kept()


def take_kept(kind: ServerKind) -> ServerProcess | None:
    """A process that was kept, if one would be started like that now."""
    if not kind.is_kept:
        return None
    try:
        process, end = _kept.popleft()
    except IndexError:
        return None
    end.detach()
    if process.is_for(kind):
        return process
    process.end()
    return None


def end_kept() -> None:
    """End what waits for the next server of this process: that will have a new one."""
    while _kept:
        _end_first()


def _end_late() -> None:
    """End what has waited for long enough."""
    try:
        process, _ = _kept[0]
    except IndexError:
        return
    if process.is_late:
        _end_first()


def _end_first() -> None:
    try:
        _, end = _kept.popleft()
    except IndexError:  # another thread has taken it
        return
    end()


def _command(kind: ServerKind) -> list[str]:
    path = json.dumps([entry for entry in sys.path if entry])
    return [sys.executable, "-c", _BOOTSTRAP, kind.module, path]


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}


def _circumstances(kind: ServerKind) -> tuple[object, ...] | None:
    """What a process takes over from this one when it is started; None if that cannot be told."""
    if sys.platform == "win32":
        return None
    import resource

    try:
        errors = os.fstat(2)
        return (
            *(_command(kind), _environ(), os.getcwd(), errors.st_dev, errors.st_ino),
            *(os.geteuid(), os.getegid(), os.getgroups(), os.getpriority(os.PRIO_PROCESS, 0)),
            resource.getrlimit(resource.RLIMIT_NOFILE),
            *((os.sched_getaffinity(0), os.readlink(_NETWORK)) if sys.platform == "linux" else ()),
        )
    except OSError:  # the folder has gone, or there is nowhere to write errors to
        return None


def _spawn(kind: ServerKind) -> subprocess.Popen[bytes]:
    errors = subprocess.DEVNULL if sys.stderr is None else None
    try:
        if sys.platform == "win32":
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            return subprocess.Popen(_command(kind), **pipes, stderr=errors, env=_environ())
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(True)  # this process may have another default
            ours.setblocking(True)
            process = subprocess.Popen(
                _command(kind),
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environ(),
                bufsize=0,  # so that what can be read is in the pipe, where it can be waited for
                start_new_session=True,  # what a terminal or a launcher does to its group is not meant for it
            )
            process.stdin = FileIO(ours.detach(), "w")
            return process
    except OSError as error:
        raise ServerStartError(
            f"cannot start {sys.executable!r} for the {kind.name}: {error.strerror}",
            hint="start one by hand with `rallypoint serve` and connect to that",
        ) from error


def _await_answer(kind: ServerKind, process: subprocess.Popen[bytes], seconds: float) -> dict[str, str]:
    """The child's next answer; NoAnswerError if it ends or says nothing, ServerStartError if it failed."""
    deadline = time.monotonic() + seconds
    said = ""
    while not (line := _read_line(kind, process, deadline)).startswith(ANSWER_MARK):
        if not line:
            raise NoAnswerError(
                f"the {kind.name} process ended before it was ready, {_exit_of(process)}" + said,
                hint="its own message stands above, on standard error",
            )
        said += f"\n  it printed: {line.rstrip()}"
    answer: dict[str, str] = json.loads(line.removeprefix(ANSWER_MARK))
    if "error" in answer:
        raise ServerStartError(f"the {kind.name} process failed at its start:\n{answer['error'].rstrip()}")
    return answer


def _read_line(kind: ServerKind, process: subprocess.Popen[bytes], deadline: float) -> str:
    stdout = pipe(process.stdout)
    if sys.platform != "win32":  # pipes cannot be polled there; the child always answers or ends
        _await_output(kind, stdout, deadline)
    return stdout.readline().decode(errors="replace")


def _await_output(kind: ServerKind, stdout: IO[bytes], deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise NoAnswerError(
                f"the {kind.name} process was not ready after {START_SECONDS:g} s",
                hint="is the machine out of memory or CPU time?",
            )


def _exit_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        return "with its output closed"
    return ending(code)


def ending(code: int) -> str:
    """How a process has ended, by its exit code: `by signal SIGKILL`, `with exit code 1`."""
    return f"by signal {signal_name(-code)}" if code < 0 else f"with {exit_text(code)}"


def end_process(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process that was begun by the process `owner`, and wait for that."""
    if os.getpid() != owner:  # a fork of the parent has a copy of everything, but the server is not its own
        return
    try:
        pipe(process.stdin).write(END_NOW)
    except (OSError, ValueError):  # it has ended, or its standard input is closed
        pass
    for each in (process.stdin, process.stdout):
        try:
            pipe(each).close()
        except OSError:  # what was to be written has nobody to read it any more
            pass
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
