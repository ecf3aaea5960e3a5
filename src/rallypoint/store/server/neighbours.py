"""Finds the processes behind the clients of this machine, in a child process while the loop goes on.

The child runs `neighbours_program`, which says what can be found. `ProcessNames` starts it only when the core
asks, one at a time, with a pause after each; a thread waits for it (`Search`). If it fails, no process is
known.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from rallypoint.store.core.clients import Client
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.rollcall.identity import NOBODY, Identity, Role, Source
from rallypoint.store.server.loops.loop import Loop

logger = logging.getLogger("rallypoint.server")

LIMIT_SECONDS = 5.0
"""How long a search may take. With thousands of sockets it takes less than one."""

PAUSE_SECONDS = 2.0
"""For how long the result of a search is used again."""

_POLL_SECONDS: Final = 0.01
_CLOSE_SECONDS: Final = 1.0
_NAMED_AT_ONCE: Final = 500

# An interpreter that takes nothing from the environment and looks for no packages by itself starts quickly,
# and runs no `sitecustomize` of a job.
_START: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from rallypoint.store.server.neighbours_program import main
main()
"""


class Process(NamedTuple):
    """A process of this machine, and the rank that it was started as; -1: unknown."""

    pid: int
    rank: int = -1
    local_rank: int = -1
    world_size: int = -1


Found = Mapping[tuple[str, int], Process]
"""By address and port of a client, as `accept` gives them: `found.get(address[:2])`."""


def command_for(ports: Iterable[int]) -> list[str]:
    """The command that finds the clients of these ports."""
    path = json.dumps([entry for entry in sys.path if entry])
    return [sys.executable, "-I", "-S", "-c", _START, path, *map(str, sorted(set(ports)))]


class Search(threading.Thread):
    """One run of the program, which begins at once. When it has ended, `found` has the result."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(name="rallypoint-neighbours", daemon=True)
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closing = False
        self.began = self.ended = time.monotonic()
        """The result says nothing of clients that have connected since it began."""
        self.found: Found = {}
        self.error: Exception | None = None
        """Why nothing was found. After a TimeoutExpired (a busy machine), it is worth another try."""
        try:
            self.start()
        except RuntimeError as error:  # the system gives no thread
            self.error = error

    def run(self) -> None:
        try:
            self.found = _read(self._output())
        except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
            self.error = error
        finally:
            self.ended = time.monotonic()

    def _output(self) -> bytes:
        with subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals to the server's group do not reach it
        ) as process:
            self._process = process
            try:
                if self._is_closing:
                    process.kill()
                output, _ = process.communicate(timeout=LIMIT_SECONDS)
            finally:
                process.kill()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, self._command)
        return output

    def close(self) -> None:
        """End the process, and wait for that, but not for ever: the system may hold it up."""
        self._is_closing = True
        if self._process is not None:
            self._process.kill()
        if self.is_alive():
            self.join(_CLOSE_SECONDS)


def _read(output: bytes) -> Found:
    """Parse what the program prints; ValueError or TypeError for anything else."""
    found: dict[tuple[str, int], Process] = {}
    for line in output.splitlines():  # in small steps: while a thread parses JSON, the loop stands still
        pid, rank, local_rank, world_size, ends = json.loads(line)
        process = Process(pid, rank, local_rank, world_size)
        found.update(dict.fromkeys(map(tuple, ends), process))
    return found


class ProcessNames:
    """Names the clients of a server or relay by their processes, for a snapshot. Close it before the loop."""

    def __init__(
        self,
        loop: Loop,
        core: ServerCore[Any],
        listeners: Iterable[socket.socket],
        command: Sequence[str] = (),
    ) -> None:
        self._loop = loop
        self._core = core
        ports = {listener.getsockname()[1] for listener in listeners}
        self._command = command or (command_for(ports) if ports else ())
        self._search: Search | None = None
        self._is_closed = False
        self._has_failed = False

    def find(self) -> None:
        """Name the clients that have no name, in later turns of the loop. The core asks once at a time."""
        if not self._command:
            self._core.processes_found()
            return
        if self._search is None or time.monotonic() >= self._search.ended + PAUSE_SECONDS:
            self._search = Search(self._command)
        nameless = [each for each in self._core.clients if each.is_nameless]
        self._loop.later(0, partial(self._await, self._search, nameless))

    def close(self) -> None:
        """End a search that is running, and name nobody any more."""
        self._is_closed = True
        if self._search is not None:
            self._search.close()

    def _await(self, search: Search, nameless: Sequence[Client]) -> None:
        if self._is_closed:
            return
        if search.is_alive():
            self._loop.later(_POLL_SECONDS, partial(self._await, search, nameless))
            return
        if search.error is not None and not self._has_failed:
            self._has_failed = True
            logger.debug("the processes behind the clients are not known: %s", search.error)
        self._name(search, nameless)

    def _name(self, search: Search, clients: Sequence[Client]) -> None:
        """Name some clients at a time: there may be thousands."""
        for client in clients[:_NAMED_AT_ONCE]:
            if client.since >= search.began:
                continue  # another process may have had this address before
            address, _, port = client.peer.rpartition(":")
            process = search.found.get((address, int(port)))
            client.tries += not isinstance(search.error, subprocess.TimeoutExpired)
            if process is not None and client.who is NOBODY and client in self._core.clients:
                self._core.clients.name(client, _identity(self._core.about.host, process))
        if len(clients) > _NAMED_AT_ONCE:
            self._loop.later(0, partial(self._name, search, clients[_NAMED_AT_ONCE:]))
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
