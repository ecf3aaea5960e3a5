"""Server processes: how they are started, spoken to and ended."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO

from rallypoint.errors import ServerStartError
from rallypoint.exits import exit_text, signal_name
from rallypoint.store.server.guard.secret import SECRET_VARIABLE
from rallypoint.store.server.process.line import ANSWER_MARK, END_NOW, give, pipe

START_SECONDS = 60.0
"""How long a child may take to be ready; a loaded machine needs seconds to start an interpreter."""

_STOP_SECONDS = 5.0

# The child finds the modules where its parent does, but not in the folder it happens to stand in.
_BOOTSTRAP = """# a server process of rallypoint
import sys
del sys.path[0]
import json
sys.path[:] = json.loads(sys.argv.pop())
from importlib import import_module
import_module(sys.argv.pop()).main()
"""


@dataclass(frozen=True)
class ServerKind:
    """A kind of server process."""

    name: str
    """For messages."""
    module: str
    """A module whose `main` calls `child.run`, or speaks over the `line` itself."""


class ServerProcess:
    """A server process: it waits for its order, or serves."""

    def __init__(self, kind: ServerKind) -> None:
        self.kind = kind
        self.popen = _spawn(kind)

    @property
    def is_there(self) -> bool:
        """Whether it has not died."""
        return self.popen.poll() is None

    def ask(self, order: dict[str, object], sockets: Sequence[socket.socket]) -> dict[str, str]:
        """Give it its whole order, and await its answer. If there is none, it is ended.

        ServerStartError if it ends, says nothing in time, or says that it failed.
        """
        try:
            self.give(order, sockets)
            return _await_answer(self.kind, self.popen)
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

    def end(self) -> None:
        """End it."""
        end_process(self.popen, os.getpid())


def _spawn(kind: ServerKind) -> subprocess.Popen[bytes]:
    path = json.dumps([entry for entry in sys.path if entry])
    command = [sys.executable, "-c", _BOOTSTRAP, kind.module, path]
    environ = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    errors = subprocess.DEVNULL if sys.stderr is None else None
    try:
        if sys.platform == "win32":
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            return subprocess.Popen(command, **pipes, stderr=errors, env=environ)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(True)  # this process may have another default
            ours.setblocking(True)
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environ,
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


def _await_answer(kind: ServerKind, process: subprocess.Popen[bytes]) -> dict[str, str]:
    """The child's answer; ServerStartError if it ends, says nothing, or failed."""
    deadline = time.monotonic() + START_SECONDS
    said = ""
    while not (line := _read_line(kind, process, deadline)).startswith(ANSWER_MARK):
        if not line:
            raise ServerStartError(
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
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise ServerStartError(
                    f"the {kind.name} process was not ready after {START_SECONDS:g} s",
                    hint="is the machine out of memory or CPU time?",
                )
    return stdout.readline().decode(errors="replace")


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
