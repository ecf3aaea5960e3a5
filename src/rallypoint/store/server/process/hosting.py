"""The store server in a process of its own: as a thread it would share the interpreter lock with a training.

The parent binds and listens, so there is no race for the port. The child serves the sockets that it is
handed, reports when it is ready, and ends with its parent, however that ends; or later, with its last client,
or earlier, with the connections that own it (`Lifespan`).

`ServerProcess` is a process that may be started before its order is known. `HostedServer` is one that serves,
with a count of the stores that use it.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO

from rallypoint.errors import ServerStartError
from rallypoint.exits import exit_text, signal_name
from rallypoint.store.server.guard.secret import SECRET_VARIABLE, job_secret
from rallypoint.store.server.loops.backend import Choice
from rallypoint.store.server.process.binding import addresses_for, adopt, describe, listen, reachable_at
from rallypoint.store.server.process.line import ANSWER_MARK, END_NOW, give, pipe
from rallypoint.store.server.process.startup import limits_of_environment
from rallypoint.store.wire.limits import Limits

logger = logging.getLogger("rallypoint.server")

START_SECONDS = 60.0
"""How long a child may take to be ready; a loaded machine needs seconds to start an interpreter."""

_STOP_SECONDS = 5.0

# The child finds modules where its parent does, but not in its current folder.
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


STORE_SERVER = ServerKind("store server", "rallypoint.store.server.process.child")


class ServerProcess:
    """A child process that waits for its order, or serves."""

    def __init__(self, kind: ServerKind) -> None:
        self.kind = kind
        self.popen = _spawn(kind)

    @property
    def is_there(self) -> bool:
        """Whether it still runs."""
        return self.popen.poll() is None

    def give(self, order: dict[str, object], sockets: Sequence[socket.socket]) -> None:
        """Send its order and the sockets to serve on. `await_answer` comes next."""
        try:
            give(self.popen, order, sockets)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended: `await_answer` reports how
        except OSError as error:
            self.end()
            raise ServerStartError(f"the {self.kind.name} cannot be given its sockets: {error}") from error

    def await_answer(self) -> dict[str, str]:
        """Its answer to the order; ServerStartError if it has ended or failed, or does not answer."""
        name, deadline = self.kind.name, time.monotonic() + START_SECONDS
        said = ""
        while not (line := self._read_line(deadline)).startswith(ANSWER_MARK):
            if not line:
                raise ServerStartError(
                    f"the {name} process ended before it was ready, {self._ending()}" + said,
                    hint="its own message stands above, on standard error",
                )
            said += f"\n  it printed: {line.rstrip()}"
        answer: dict[str, str] = json.loads(line.removeprefix(ANSWER_MARK))
        if "error" in answer:
            raise ServerStartError(f"the {name} process failed at its start:\n{answer['error'].rstrip()}")
        return answer

    def _read_line(self, deadline: float) -> str:
        stdout = pipe(self.popen.stdout)
        if sys.platform != "win32":  # where pipes cannot be polled; but the child always answers or ends
            with selectors.DefaultSelector() as selector:
                selector.register(stdout, selectors.EVENT_READ)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ServerStartError(
                        f"the {self.kind.name} process was not ready after {START_SECONDS:g} s",
                        hint="is the machine out of memory or CPU time?",
                    )
        return stdout.readline().decode(errors="replace")

    def _ending(self) -> str:
        try:
            return ending(self.popen.wait(_STOP_SECONDS))
        except subprocess.TimeoutExpired:
            return "with its output closed"

    def end(self) -> None:
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
                bufsize=0,  # so that unread bytes are in the pipe, which a selector sees
                start_new_session=True,  # signals of a terminal or launcher to the group do not reach it
            )
            process.stdin = FileIO(ours.detach(), "w")
            return process
    except OSError as error:
        raise ServerStartError(
            f"cannot start {sys.executable!r} for the {kind.name}: {error.strerror}",
            hint="start one by hand with `rallypoint serve` and connect to that",
        ) from error


def ending(code: int) -> str:
    """How a process has ended, by its exit code: `by signal SIGKILL`, `with exit code 1`."""
    return f"by signal {signal_name(-code)}" if code < 0 else f"with {exit_text(code)}"


def end_process(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a child of the process `owner`, and wait for it. Does nothing in a fork of that."""
    if os.getpid() != owner:
        return
    try:
        pipe(process.stdin).write(END_NOW)
    except (OSError, ValueError):  # it has ended, or its standard input is closed
        pass
    for each in (process.stdin, process.stdout):
        with suppress(OSError):  # its reader is gone
            pipe(each).close()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class HostedServer:
    """A child process that serves, counting the stores that use it; the last one to release it ends it."""

    def __init__(self, process: ServerProcess, listeners: Sequence[socket.socket], backend: str) -> None:
        self.address = reachable_at(listeners[0])
        """Host and port at which this machine reaches it."""
        self.places = describe(listeners)
        self._hosts = {listener.getsockname()[0] for listener in listeners}
        self.backend = backend
        self.pid = process.popen.pid
        self._process = process
        self._users = 1
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a collection may release one store while another is retained
        self._stop = weakref.finalize(self, end_process, process.popen, os.getpid())

    @property
    def port(self) -> int:
        return self.address[1]

    def abandon(self, seconds: float = 0.0) -> None:
        """Leave a server that stays to its clients: it ends with the last one, or now if there is none.

        Waits up to `seconds` for that.
        """
        if self._owner != os.getpid():
            return
        with self._lock:
            self._users = 0
            if self._stop.detach() is not None:
                popen = self._process.popen
                for each in (popen.stdin, popen.stdout):
                    pipe(each).close()
                if not self.await_end(seconds):
                    popen.returncode = 0  # or Python would warn that it still runs

    def await_end(self, seconds: float | None) -> bool:
        """Whether the process ends within `seconds`; None: wait for ever."""
        try:
            self._process.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def how_it_ended(self) -> str:
        """How the process has ended: `by signal SIGKILL`, `with exit code 1`; empty while it runs."""
        code = self._process.popen.poll()
        return "" if code is None else ending(code)

    def listen_again(self) -> list[socket.socket]:
        """Listen at its addresses, once its process has ended. PortInUseError or BindError if that fails."""
        listeners: list[socket.socket] = []
        for host in sorted(self._hosts):
            listeners += listen(host, self.port)
        return listeners

    def listens_for(self, host: str) -> bool:
        """Whether it listens on all addresses of `host`."""
        return bool(self._hosts & {"::", "0.0.0.0"}) or self._hosts.issuperset(addresses_for(host).addresses)

    def retain(self) -> bool:
        """Count one user more; False if the server has ended."""
        with self._lock:
            if self._users == 0:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """Count one user less. The last one ends the server and waits for that; never in a forked child."""
        if self._owner != os.getpid():
            return
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stop()


@dataclass(frozen=True)
class Lifespan:
    """How long a server process serves; by default, as long as its parent lives."""

    owner_key: str = ""
    """If given, the server ends when the last connection that deleted this key has closed (see `Core`)."""

    stays_for_clients: bool = False
    """Whether it outlives its parent, until its last client has gone."""


WITH_PARENT = Lifespan()


def host_server(
    host: str,
    port: int,
    *,
    backend: Choice = Choice.AUTO,
    listen_fd: int | None = None,
    lifespan: Lifespan = WITH_PARENT,
) -> HostedServer:
    """Start a server process for `host` and `port`, or for a socket that is bound already.

    Raises PortInUseError, BindError, UsageError, or ServerStartError with the child's own words.
    """
    listeners = [adopt(listen_fd)] if listen_fd is not None else listen(host, port)
    return host_on(listeners, STORE_SERVER, {}, backend=backend, lifespan=lifespan)


def whole_order(
    order: dict[str, object], limits: Limits, backend: Choice, lifespan: Lifespan = WITH_PARENT
) -> dict[str, object]:
    """An order with what every server process needs. Nobody else reads the pipe, so it has the secret."""
    secret = job_secret()
    text = secret.text if secret is not None else ""
    return {**order, "backend": backend.value, "limits": asdict(limits), "secret": text, **asdict(lifespan)}


def host_on(
    sockets: Sequence[socket.socket],
    kind: ServerKind,
    order: dict[str, object],
    *,
    backend: Choice = Choice.AUTO,
    lifespan: Lifespan = WITH_PARENT,
    prepared: ServerProcess | None = None,
) -> HostedServer:
    """Let a prepared or a new process serve on these sockets, and wait until it does.

    Its module gets `order`. The sockets are closed here.
    """
    began = time.monotonic()
    try:
        process = prepared or ServerProcess(kind)
        try:
            process.give(whole_order(order, limits_of_environment(), backend, lifespan), sockets)
            answer = process.await_answer()
            server = HostedServer(process, sockets, answer["backend"])
        except BaseException:
            process.end()
            raise
    finally:
        for each in sockets:
            each.close()
    # At the end of this process, the child loses its standard input, and decides for itself.
    server._stop.atexit = not lifespan.stays_for_clients
    if answer["warning"]:
        logger.warning("%s", answer["warning"])
    facts = (kind.name, server.places, server.backend, server.pid, time.monotonic() - began)
    logger.info("%s on %s (%s), process %d, up in %.2f s", *facts)
    return server


_shared: weakref.WeakValueDictionary[int, HostedServer] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def _share_anew() -> None:
    """Forget the servers of the parent after a fork; one of its threads may hold the lock."""
    global _sharing
    _sharing = threading.Lock()
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_share_anew)


def share_server(
    host: str, port: int, *, backend: Choice = Choice.AUTO, listen_fd: int | None = None
) -> HostedServer:
    """The shared server of this process on `port`, which is started if there is none."""
    with _sharing:
        server = _shared.get(port)
        if server is None or not server.retain():
            server = host_server(host, port, backend=backend, listen_fd=listen_fd)
            _shared[server.port] = server
            return server
    if listen_fd is not None:
        os.close(listen_fd)  # it is ours, and not needed
    if not server.listens_for(host):
        logger.warning("port %d is served already, but not where %s says: on %s", port, host, server.places)
    return server
