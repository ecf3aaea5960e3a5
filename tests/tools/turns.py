"""What tests that run side by side may only do in turns."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

NETWORK = "network"
"""A new interface or address of this machine makes a browser drop the requests that it has under way."""

_FOLDER = Path("/tmp")
"""The same for all processes, whatever their TMPDIR."""
_SHARED = "-shared"
_own: list[str] = []


@contextmanager
def in_turns(name: str, *, shared: bool = False) -> Iterator[None]:
    """Wait until no other test does what has this name; those that share it do so together.

    Turns come in the order in which they were requested. The wait does not count towards the test's timeout.
    A process may have one turn at a time, so that no two processes can wait for each other.
    """
    assert not _own, f"a turn ({name}) within a turn ({_own[0]}) would wait for ever"
    with ExitStack() as stack:
        earlier = _queue_up(stack, _FOLDER / f"rallypoint-tests-{name}-{os.geteuid()}", shared)
        with _timeout_paused():
            for ticket in earlier:
                if not (shared and ticket.name.endswith(_SHARED)):
                    _await_end(ticket)
        _own.append(name)
        stack.callback(_own.clear)
        yield


def _queue_up(stack: ExitStack, queue: Path, shared: bool) -> list[Path]:
    """Add a ticket, which is a locked file until the stack is left; return those before it."""
    queue.mkdir(exist_ok=True)
    with _locked(queue / "gate"):
        earlier = sorted(queue.glob("[0-9]*"))
        number = int(earlier[-1].name.partition("-")[0]) + 1 if earlier else 0
        ticket = queue / f"{number:09}{_SHARED if shared else ''}"
        stack.enter_context(_locked(ticket))
        stack.callback(ticket.unlink)
    return earlier


def _await_end(ticket: Path) -> None:
    """Wait until its process unlocks it or ends; remove what a killed process has left."""
    with suppress(FileNotFoundError), _locked(ticket, "r"):
        ticket.unlink()


@contextmanager
def _locked(path: Path, mode: str = "w") -> Iterator[None]:
    import fcntl  # Windows has none, and no network to change

    with path.open(mode) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough while a forked child has the file, too


@contextmanager
def _timeout_paused() -> Iterator[None]:
    """pytest-timeout measures by the timer that sends SIGALRM."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
