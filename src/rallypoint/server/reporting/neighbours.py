"""The processes behind the clients of this machine, found by a child process while the loop goes on.

`neighbours_program` is the program that the child runs, and says what can be found. It is started only when
somebody asks, one at a time, with a pause after each; what it prints is read in small portions
between the loop's other work. Whatever goes wrong with it, the answer is that nobody is known.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from rallypoint.server.loops.loop import Loop
from rallypoint.server.reporting import neighbours_program as program

logger = logging.getLogger("rallypoint.server")

LIMIT_SECONDS: Final = 5.0
"""How long a look may take. With thousands of processes it takes less than one."""

PAUSE_SECONDS: Final = 2.0
"""Until the next look; who asks meanwhile is told what the last one has found."""

_BYTES_AT_ONCE: Final = 1 << 14
"""Some 500 lines, which are read in about a millisecond."""

_LONGEST_LINE: Final = 256
_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 1.0
_CLOSE_SECONDS: Final = 1.0


class Process(NamedTuple):
    """A process of this machine, and the rank that it was started as; -1: not known."""

    pid: int
    rank: int = -1
    local_rank: int = -1
    world_size: int = -1


Found = Mapping[tuple[str, int], Process]
"""By address and port of a client, as `accept` gives them: `found.get(address[:2])`."""


def command_for(ports: Iterable[int]) -> list[str]:
    """The command that looks for the clients of these ports.

    It runs the program by its file, in an interpreter that takes nothing from the environment and looks for
    no packages: that starts in 10 ms, and runs no `sitecustomize` of a job.
    """
    return [sys.executable, "-I", "-S", program.__file__, *map(str, sorted(set(ports)))]


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
        self._look: _Look | None = None
        self._rests_until = 0.0
        self._has_failed = False

    def ask(self, on_done: Callable[[Found], None]) -> None:
        """Call back with what is found, in a later turn of the loop; never, if closed before that.

        That may be what was found some seconds ago. It says nothing of clients that have come since that look
        `began`: the next one finds them, and an address that is found may have been another client's before.
        """
        self._asking.append(on_done)
        if self._look is not None and not self._look.has_ended:
            return
        if self._may_look():
            self._start()
        else:
            self._loop.later(0, self._tell)

    def close(self) -> None:
        """End what is running; nobody is called back any more."""
        self._asking.clear()
        if self._look is not None:
            self._look.close()

    def _may_look(self) -> bool:
        is_busy = self._look is not None and not self._look.is_reaped
        return sys.platform == "linux" and not is_busy and time.monotonic() >= self._rests_until

    def _start(self) -> None:
        on_end = partial(self._on_end, time.monotonic())
        try:
            self._look = _Look(self._loop, self._command, self._limit_seconds, on_end)
        except OSError as error:
            self._settle(time.monotonic(), {}, f"it cannot be started: {error}")
            self._loop.later(0, self._tell)

    def _on_end(self, began: float, found: Found, trouble: str) -> None:
        self._settle(began, found, trouble)
        self._tell()

    def _settle(self, began: float, found: Found, trouble: str) -> None:
        if trouble and not self._has_failed:
            self._has_failed = True
            command = " ".join(self._command)
            logger.debug("the processes behind the clients are not known, by %s: %s", command, trouble)
        self.began, self._found = began, found
        self._rests_until = time.monotonic() + self._pause_seconds

    def _tell(self) -> None:
        asking, self._asking = self._asking, []
        for on_done in asking:
            on_done(self._found)


class _Look:
    """One run of the program, from its start until it is reaped; OSError if it cannot be started."""

    def __init__(
        self,
        loop: Loop,
        command: Sequence[str],
        limit_seconds: float,
        on_end: Callable[[Found, str], None],
    ) -> None:
        self._loop = loop
        self._on_end = on_end
        self._limit_seconds = limit_seconds
        self._report = Report()
        self.has_ended = False
        """All is told that will be."""
        self.is_reaped = False
        self._pid, self._file = _spawn(command)
        loop.watch_readable(self._file, self._read)
        loop.later(limit_seconds, self._expire)

    def _read(self) -> None:
        try:
            data = os.read(self._file, _BYTES_AT_ONCE)
        except BlockingIOError:
            return
        try:
            self._report.add(data)
        except ValueError as error:
            self._end({}, f"what it says cannot be read: {error}")
            return
        if self._report.is_complete:
            self._end(self._report.found)
        elif not data:
            self._end({}, "it ended too early")

    def _expire(self) -> None:
        if not self.has_ended:
            self._end({}, f"it took longer than {self._limit_seconds:g} s")

    def _end(self, found: Found, trouble: str = "") -> None:
        self._let_go()
        self._reap(_FIRST_PAUSE)
        self._on_end(found, trouble)

    def _let_go(self) -> None:
        """Nothing is read any more, so there is nothing left to do for the process."""
        if self.has_ended:
            return
        self.has_ended = True
        self._loop.watch_readable(self._file, None)
        os.close(self._file)
        self._report = Report()  # the loop refers to this object until the time limit
        if not self._has_gone():
            try:
                os.kill(self._pid, signal.SIGKILL)
            except ProcessLookupError:  # gone by now, and reaped as `_has_gone` says
                pass

    def _reap(self, pause: float) -> None:
        if not self._has_gone():
            self._loop.later(pause, partial(self._reap, min(2 * pause, _LONGEST_PAUSE)))

    def _has_gone(self) -> bool:
        if not self.is_reaped:
            try:
                self.is_reaped = os.waitpid(self._pid, os.WNOHANG)[0] != 0
            except ChildProcessError:  # SIGCHLD is ignored here, so the system has reaped it
                self.is_reaped = True
        return self.is_reaped

    def close(self) -> None:
        """End the process, and wait for that; not for ever, as the system may hold it up."""
        self._let_go()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while not self._has_gone() and time.monotonic() < deadline:
            time.sleep(0.001)


class Report:
    """What the program prints, as it comes; ValueError for what it would not print."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], Process] = {}
        self.is_complete = False
        self._rest = ""
        self._processes: dict[str, Process] = {}  # a process may have very many connections

    def add(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data.decode("ascii")).split("\n")
        if len(self._rest) > _LONGEST_LINE:
            raise ValueError(f"a line begins with {self._rest[:40]!r} and does not end")
        for line in lines:
            if self.is_complete:
                raise ValueError(f"{line[:40]!r} comes behind the end")
            self.is_complete = line == program.END
            if not self.is_complete:
                self._add(line)

    def _add(self, line: str) -> None:
        address, port, text = line.split(" ", 2)
        process = self._processes.get(text)
        if process is None:
            pid, rank, local_rank, world_size = map(int, text.split(" "))
            process = self._processes[text] = Process(pid, rank, local_rank, world_size)
        self.found[address, int(port)] = process


def _spawn(command: Sequence[str]) -> tuple[int, int]:
    """Start a process; its pid, and the file from which its output is read.

    Not by `subprocess`: it waits until the child has let go of all files of the server, which takes
    milliseconds with thousands of clients. What the child may inherit it closes by itself.
    """
    ours, theirs = os.pipe()
    try:
        pid = os.posix_spawn(
            command[0],
            list(command),
            os.environ,
            file_actions=(
                (os.POSIX_SPAWN_DUP2, theirs, 1),  # first: `theirs` may be 0 or 2
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ),
            setpgroup=0,  # what a terminal or a launcher does to the server's group is not meant for it
        )
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    os.set_blocking(ours, False)
    return pid, ours
