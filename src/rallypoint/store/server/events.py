"""What a server reports besides its replies: the events file, and stalls in its log.

The events file has a line per event. A thread writes it, so that no disk delays the server: the loop only
puts events into a queue. A few times a second the thread turns them into lines, in slices so small that the
loop never waits long for the interpreter, and appends them. A file that would grow beyond its size becomes
`FILE.1`, `FILE.1` becomes `FILE.2`, and so on.

Events are for later, the store is for the job. So an event that finds the queue full, or that the disk
refuses, is dropped and counted. A line that was written in part is removed. When there is room again, a line
says how many events are missing.

The handlers of `logging` do not do this: the servers of a job share the file, so they have to notice when
another one rotates it; and at its end a process would wait for a handler's buffer, even if the disk never
answers.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from rallypoint.errors import ProtocolError, UsageError
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.machine.system import open_movable
from rallypoint.store.rollcall.question import Question
from rallypoint.text import counted

if TYPE_CHECKING:  # most servers write no events, and are up sooner without these
    from rallypoint.store.rollcall.events import Event, SnapshotChanges

logger = logging.getLogger("rallypoint.server")

_SNAPSHOT_SHARE: Final = 20
"""Following the clients behind relays takes at most a twentieth of the time."""
_LONGEST_SNAPSHOT: Final = 60.0
"""After this many seconds without an answer, a snapshot is requested again: it may have run out of memory."""

MOST_PENDING: Final = 1 << 17
"""The most events that wait to be written; further ones are dropped."""

_BATCH_SECONDS: Final = 0.1
"""How long the first event of a batch waits for others."""
_SLICE: Final = 64
_Pending = tuple["Event", str]
"""An event, and the name of its store."""
_SLICE_PAUSE: Final = 0.0005
_RETRY_SECONDS: Final = 1.0
"""How often a disk that has refused events is tried again, even without new events."""
_CLOSE_SECONDS: Final = 5.0


class Events:
    """Writes a store's events to a file, if one is named. Thread-safe. UsageError if it cannot be written."""

    def __init__(self, path: str = "") -> None:
        self._store = ""
        self._log: EventLog | None = None
        if path:
            self._log = EventLog(Path(path))

    @property
    def are_wanted(self) -> bool:
        return self._log is not None

    def of_store(self, name: str) -> Events:
        """Writes the events of another store to the same file, until this one is closed."""
        others = Events()
        others._store, others._log = name, self._log
        return others

    def put(self, event: Event) -> None:
        if self._log is not None:
            self._log.put(event, self._store)

    def close(self) -> None:
        if self._log is not None and not self._store:
            self._log.close()


class EventLog:
    """Writes events to a file until it is closed. Every thread may put events."""

    def __init__(self, path: Path, most_bytes: int = 64 << 20, kept: int = 3) -> None:
        """Append to `path`; keep `kept` older files, at least one. UsageError if it cannot be written."""
        try:
            # The target of a link is rotated, not the link.
            self._path = path.resolve() if path.is_file() else path.absolute()
            self._file = _RotatingFile(self._path, most_bytes, kept)
        except OSError as error:
            raise UsageError(
                f"cannot write events to {path}: {error.strerror or error}",
                hint="name a file in a folder that exists and that this process may write to",
            ) from error
        self._pid = os.getpid()
        self._pending: SimpleQueue[_Pending | None] = SimpleQueue()
        self._lost = 0
        self._lost_lock = threading.Lock()
        self._closing = threading.Event()
        self._complained = False
        self._writer = threading.Thread(target=self._write_all, name="rallypoint-events", daemon=True)
        self._writer.start()

    def put(self, event: Event, store: str = "") -> None:
        """Write an event of a store soon. Never blocks; does nothing once the log is closed."""
        if self._closing.is_set():
            return
        if self._pending.qsize() < MOST_PENDING:
            self._pending.put((event, store))
        else:
            self._lose(1)

    def close(self) -> None:
        """Write what is pending, and end the thread; give up on a disk that does not answer."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._pending.put(None)
        self._writer.join(_CLOSE_SECONDS)
        if self._writer.is_alive():
            logger.warning("the last events are lost: %s does not take them", self._path)

    def _lose(self, count: int) -> None:
        with self._lost_lock:
            self._lost += count

    # What the thread does

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            events = self._await_events()
            self._closing.wait(_BATCH_SECONDS)
            while True:
                is_open = is_open and None not in events
                self._write([event for event in events if event is not None])
                time.sleep(_SLICE_PAUSE)  # the loop's turn
                events = self._take_slice()
                if not events:
                    break
        self._file.close()

    def _await_events(self) -> list[_Pending | None]:
        """Wait for the next event; none if lost ones are to be reported meanwhile."""
        try:
            return [self._pending.get(timeout=_RETRY_SECONDS if self._lost else None)]
        except Empty:
            return []

    def _take_slice(self) -> list[_Pending | None]:
        events: list[_Pending | None] = []
        try:
            while len(events) < _SLICE:
                events.append(self._pending.get_nowait())
        except Empty:
            pass
        return events

    def _write(self, events: list[_Pending]) -> None:
        with self._lost_lock:
            lost, self._lost = self._lost, 0
        try:
            from rallypoint.store.rollcall.events import Lost, to_line  # late: most servers write no events

            lines = [to_line(event, self._pid, store) for event, store in events]
            if lost:
                lines.append(to_line(Lost(time.time(), lost), self._pid))
            refused, reason = self._file.append("".join(f"{line}\n" for line in lines).encode())
        except MemoryError:  # there may be enough for the next ones
            self._lose(len(events) + lost)
            return
        if refused:
            # The line about the lost ones is the last, so it is among the refused.
            self._lose(refused + (lost - 1 if lost else 0))
        self._say(refused, lost, reason)

    def _say(self, refused: int, lost: int, reason: str) -> None:
        """Log once when the disk begins to refuse events, and once when it takes them again."""
        if refused and not self._complained:
            logger.warning(
                "cannot write events to %s: %s; they are dropped until that works again", self._path, reason
            )
        elif self._complained and not refused:
            logger.warning("events are written to %s again; %s lost", self._path, counted(lost, "event"))
        self._complained = bool(refused)


class _RotatingFile:
    """A file of lines of limited size, and older ones beside it. Other servers may write to it as well.

    A pipe or a device is never rotated.
    """

    def __init__(self, path: Path, most_bytes: int, kept: int) -> None:
        """Raises OSError if it cannot be written."""
        self._path = path
        self._most_bytes = most_bytes
        self._older = [path.with_name(f"{path.name}.{number + 1}") for number in range(kept)]
        self._open()

    def _open(self) -> None:
        self._file = io.FileIO(self._path, "ab", opener=_open_at_once)
        self._rotates = self._path.is_file()
        if self._rotates and not _ends_with_line(self._path):
            self._file.write(b"\n")

    def append(self, lines: bytes) -> tuple[int, str]:
        """Write whole lines; return how many the disk has refused, and why."""
        whole = lines
        try:
            self._follow()
            if self._rotates and self._size() > 0 and self._size() + len(lines) > self._most_bytes:
                self._rotate()
            while lines:
                lines = lines[self._file.write(lines) :]
        except OSError as error:
            written = whole[: len(whole) - len(lines)]
            self._take_back(len(written) - (written.rfind(b"\n") + 1))
            self.close()
            return lines.count(b"\n"), error.strerror or str(error)
        return 0, ""

    def close(self) -> None:
        with suppress(OSError):  # a network disk may report only now that it is full
            self._file.close()

    def _take_back(self, torn: int) -> None:
        """Cut off the bytes of a partial line, unless another server has written after it.

        If that fails, the line is ended when the file is opened again.
        """
        if not torn or not self._rotates:
            return
        with suppress(OSError):
            end = self._file.tell()
            if self._size() == end:
                self._file.truncate(end - torn)

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _follow(self) -> None:
        """Open the file again if it was rotated by another server, or moved."""
        if not self._file.closed and self._rotates and not self._is_in_place():
            self._file.close()
        if self._file.closed:
            self._open()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        """Rename the file, unless another server has done so before this one got the lock."""
        _lock(self._file)
        if self._is_in_place():
            for after, before in zip(self._older[::-1], [*self._older[-2::-1], self._path], strict=True):
                if before.exists():
                    before.replace(after)
        self._file.close()
        self._open()


if sys.platform == "win32":
    import msvcrt

    _LOCKED_BYTE = 0x7FFF_0000  # beyond the end: locked bytes can be neither read nor written

    def _lock(file: io.FileIO) -> None:
        """Until it is closed. Where there are no locks, it goes on without."""
        try:
            file.seek(_LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        except OSError:
            pass

else:
    import fcntl

    def _lock(file: io.FileIO) -> None:
        """Until it is closed. Where there are no locks, it goes on without."""
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        except OSError:
            pass


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe: OSError if nobody reads it."""
    if sys.platform == "win32":
        return open_movable(path, flags)
    descriptor = open_movable(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def _ends_with_line(path: Path) -> bool:
    """Whether a line can follow. A file that cannot be read gets an empty line, to be sure."""
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return True
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
    except OSError:
        return False


def _start_thread(work: Callable[..., None], *values: object) -> None:
    """Run work that takes longer than the loop may stand still, as reading a snapshot of thousands of
    clients.

    RuntimeError if the system gives no thread. `threading` is no choice: out of memory, a thread may die
    before it has reported that it runs, and `Thread.start` waits for that for ever.
    """
    start_new_thread(work, values)


class RelayEvents:
    """Makes events of what happens behind the relays of a server, from snapshots."""

    def __init__(self, core: ServerCore[Any], events: Events) -> None:
        self._core = core
        self._events = events
        self._heard: SnapshotChanges | None = None
        self._next_snapshot = 0.0

    def tick(self) -> None:
        """Called about once a second."""
        if not self._events.are_wanted or not len(self._core.sessions):
            return
        now = time.monotonic()
        if now >= self._next_snapshot:
            self._next_snapshot = now + _LONGEST_SNAPSHOT
            self._core.snapshots.start(Question(), self._take)

    def _take(self, snapshot: bytes) -> None:
        try:
            _start_thread(self._follow, snapshot)
        except RuntimeError:  # the system gives no thread: the next tick may get one
            self._next_snapshot = 0.0

    def _follow(self, snapshot: bytes) -> None:
        began = time.monotonic()
        try:
            from rallypoint.store.rollcall.events import SnapshotChanges
            from rallypoint.store.rollcall.snapshot import Snapshot

            self._heard = self._heard or SnapshotChanges()
            for event in self._heard.read(Snapshot.from_json(snapshot), self._core.has_key):
                self._events.put(event)
        except ProtocolError as error:
            logger.debug("a snapshot with the relays' reports cannot be read: %s", error.message)
        except Exception:  # a fault of ours, which must not end all other events
            logger.exception("the relays' reports could not be turned into events")
        finally:
            now = time.monotonic()
            self._next_snapshot = now + _SNAPSHOT_SHARE * (now - began)


class StallReports:
    """Logs a stall that has lasted `Limits.stall_seconds`, and again each time it is twice as long."""

    def __init__(self, core: ServerCore[Any], events: Events) -> None:
        self._core = core
        self._events = events
        self._due = core.limits.stall_seconds

    def tick(self) -> None:
        """Called about once a second."""
        core = self._core
        lasted = core.stalled_seconds
        if lasted < core.limits.stall_seconds:
            self._due = core.limits.stall_seconds
        elif lasted >= self._due:
            self._due = 2 * lasted
            core.snapshots.start(Question(), partial(self._report, lasted))

    def _report(self, seconds: float, snapshot: bytes) -> None:
        try:
            _start_thread(self._judge, snapshot, seconds)
        except RuntimeError as error:  # the system gives no thread
            logger.warning("no progress for %.0f s; who waits cannot be told: %s", seconds, error)

    def _judge(self, snapshot: bytes, seconds: float) -> None:
        from rallypoint.store.rollcall.clients import whole
        from rallypoint.store.rollcall.events import Stalled  # late: every server would start later
        from rallypoint.store.rollcall.judgement import judge
        from rallypoint.store.rollcall.roll import stall_text
        from rallypoint.store.rollcall.snapshot import Snapshot

        try:
            roll = judge(whole(Snapshot.from_json(snapshot)))
        except ProtocolError as error:
            text = f"no progress for {seconds:.0f} s; {error.message}"
        else:
            if not roll.awaited:  # only launchers and tools wait
                return
            text = stall_text(roll, seconds)
        logger.warning("%s", text)
        self._events.put(Stalled(time.time(), seconds, text))
