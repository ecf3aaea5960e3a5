"""The processes behind the clients of this machine, found by a child process while the loop goes on.

`neighbours_program` is the program that the child runs, and says what can be found. It is started only when
a caller asks, one at a time, with a pause after each; a thread waits for it. If anything goes wrong with it,
the answer is that no process is known. `ProcessNames` names the clients by what is found.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from rallypoint.store.core.clients import Client
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.rollcall.identity import NOBODY, Identity, Role, Source
from rallypoint.store.server.loops.loop import Loop

logger = logging.getLogger("rallypoint.server")

LIMIT_SECONDS: Final = 5.0
"""How long a look may take. With thousands of sockets it takes less than one."""

PAUSE_SECONDS: Final = 2.0
"""Until the next look; a caller that asks meanwhile is told what the last one has found."""

_POLL_SECONDS: Final = 0.01
_CLOSE_SECONDS: Final = 1.0
_NAMED_AT_ONCE: Final = 500

# An interpreter that takes nothing from the environment and looks for no packages by itself starts quickly,
# and runs no `sitecustomize` of a job.
_START: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from rallypoint.store.server.reporting.neighbours_program import main
main()
"""


class Process(NamedTuple):
    """A process of this machine, and the rank that it was started as; -1: not known."""

    pid: int
    rank: int = -1
    local_rank: int = -1
    world_size: int = -1


Found = Mapping[tuple[str, int], Process]
"""By address and port of a client, as `accept` gives them: `found.get(address[:2])`."""


def command_for(ports: Iterable[int]) -> list[str]:
    """The command that looks for the clients of these ports."""
    path = json.dumps([entry for entry in sys.path if entry])
    return [sys.executable, "-I", "-S", "-c", _START, path, *map(str, sorted(set(ports)))]


class Neighbours:
    """Finds the processes behind the clients of a server or relay, by the ports on which it listens.

    Close it before the loop.
    """

    def __init__(
        self,
        loop: Loop,
        ports: Iterable[int],
        *,
        command: Sequence[str] = (),
        limit_seconds: float = LIMIT_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        self._loop = loop
        self._command = command or command_for(ports)
        self._limit_seconds = limit_seconds
        self._pause_seconds = pause_seconds
        self._asking: list[Callable[[Found], None]] = []
        self._found: Found = {}
        self.began = 0.0
        """When the look began that has found what is told, by `time.monotonic`: see `ask`."""
        self.timed_out = False
        """Whether that look was given up, as on a machine that is too busy: it says nothing of any client."""
        self._look: _Look | None = None
        self._rests_until = 0.0
        self._has_failed = False

    def ask(self, on_done: Callable[[Found], None]) -> None:
        """Call back with what is found, in a later turn of the loop; never, if closed before that.

        That may be what was found some seconds ago. It says nothing of clients that have come since that look
        `began`: the next one finds them, and an address that is found may have been another client's before.
        """
        self._asking.append(on_done)
        if len(self._asking) > 1:
            return  # the answer to the first is the answer to all
        if time.monotonic() >= self._rests_until:
            self._look = _Look(self._command, self._limit_seconds)
        self._loop.later(0, self._tell)

    def close(self) -> None:
        """End what is running; nobody is called back any more."""
        self._asking.clear()
        if self._look is not None:
            self._look.close()
            self._look = None

    def _tell(self) -> None:
        """Answer all callers, as soon as there is an answer."""
        if self._look is not None:
            if self._look.is_alive():
                self._loop.later(_POLL_SECONDS, self._tell)
                return
            self._take(self._look)
            self._look = None
        asking, self._asking = self._asking, []
        for on_done in asking:
            on_done(self._found)

    def _take(self, look: _Look) -> None:
        self.began, self.timed_out, self._found = look.began, look.timed_out, look.found
        self._rests_until = time.monotonic() + self._pause_seconds
        if look.trouble and not self._has_failed:
            self._has_failed = True
            logger.debug("the processes behind the clients are not known: %s", look.trouble)


class _Look(threading.Thread):
    """One run of the program."""

    def __init__(self, command: Sequence[str], limit_seconds: float) -> None:
        super().__init__(name="rallypoint-neighbours", daemon=True)
        self._command = command
        self._limit_seconds = limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closing = False
        self.began = time.monotonic()
        self.found: Found = {}
        self.trouble = ""
        self.timed_out = False
        try:
            self.start()
        except RuntimeError as error:  # the system has no thread to give
            self.trouble = str(error)

    def run(self) -> None:
        try:
            self.found = _read(self._output())
        except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
            self.trouble = str(error)
            self.timed_out = isinstance(error, subprocess.TimeoutExpired)

    def _output(self) -> bytes:
        with subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what a terminal or a launcher does to the server's group is not for it
        ) as process:
            self._process = process
            try:
                if self._is_closing:
                    process.kill()
                output, _ = process.communicate(timeout=self._limit_seconds)
            finally:
                process.kill()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, self._command)
        return output

    def close(self) -> None:
        """End the process, and wait for that; not for ever, as the system may hold it up."""
        self._is_closing = True
        if self._process is not None:
            self._process.kill()
        if self.is_alive():
            self.join(_CLOSE_SECONDS)


def _read(output: bytes) -> Found:
    """What the program prints; ValueError or TypeError for anything else."""
    found: dict[tuple[str, int], Process] = {}
    for line in output.splitlines():  # by small steps: while a thread reads JSON, the loop stands still
        pid, rank, local_rank, world_size, ends = json.loads(line)
        process = Process(pid, rank, local_rank, world_size)
        found.update(dict.fromkeys(map(tuple, ends), process))
    return found


class ProcessNames:
    """Names the clients of one server or relay, when somebody looks."""

    def __init__(self, loop: Loop, core: ServerCore[Any], listeners: Iterable[socket.socket]) -> None:
        self._loop = loop
        self._core = core
        self._ports = [listener.getsockname()[1] for listener in listeners]
        self._neighbours = Neighbours(loop, self._ports)

    def find(self) -> None:
        """Ask the system for the clients that have no name; it knows them by the ports of the listeners."""
        if not self._ports:
            self._core.processes_found()
            return
        nameless = [each for each in self._core.clients if each.is_nameless]
        self._neighbours.ask(partial(self._name, nameless))

    def close(self) -> None:
        self._neighbours.close()

    def _name(self, clients: Sequence[Client], found: Found) -> None:
        """Some at a time: there may be thousands."""
        for client in clients[:_NAMED_AT_ONCE]:
            if client.since >= self._neighbours.began:
                continue  # the process that was found may be another one, which had this address before
            address, _, port = client.peer.rpartition(":")
            process = found.get((address, int(port)))
            client.tries += not self._neighbours.timed_out
            if process is not None and client.who is NOBODY and client in self._core.clients:
                self._core.clients.name(client, _identity(self._core.about.host, process))
        if len(clients) > _NAMED_AT_ONCE:
            self._loop.later(0, partial(self._name, clients[_NAMED_AT_ONCE:], found))
        else:
            self._core.processes_found()


def _identity(host: str, process: Process) -> Identity:
    return Identity(
        host=host,
        pid=process.pid,
        rank=process.rank,
        local_rank=process.local_rank,
        world_size=process.world_size,
        role=Role.RANK if process.rank >= 0 else Role.UNKNOWN,
        source=Source.PROCESS,
    )
