"""`FileStore`: a store in a file, for processes on one machine or on several that share a disk.

Each object keeps an engine with all changes that are in the file. To act, it locks the file, applies the
changes of others, acts on the engine, and appends its own change (`filelog`). Waits look at the file's
length, more and more seldom. The file lives as long as a member has it open (`membership`).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from rallypoint.client.base import DEFAULT_TIMEOUT, Store, Timeout
from rallypoint.client.filelog import CALL_BYTES, MEMBER_BYTES, FileLog, Member, refusal
from rallypoint.client.local import LocalStore
from rallypoint.errors import RallypointError, UsageError
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.engine import Engine
from rallypoint.store.wire.encoding import encode
from rallypoint.store.wire.opcodes import Op

_Result = TypeVar("_Result")

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.05
# Network file systems may show an old length until the file is locked.
_LONGEST_TRUST = 1.0
# A wait that is over still needs the lock once, for a last look and to leave a barrier.
_GRACE = 1.0
_LEAVE_SECONDS = 10.0


class _Seat:
    """One member's place in the store: taken by a `FileStore`, shared by its clones, left with the last."""

    def __init__(self, path: str, world_size: int | None, deadline: Deadline) -> None:
        self.id = os.urandom(MEMBER_BYTES)
        self.log = FileLog(path)
        self._owner = os.getpid()
        # One entry for each user; the last user to go pops the True. There is no lock, because garbage
        # collection may call `give_up` at any point.
        self._users = [True]
        with self.log.locked(deadline, create=True):
            reason = refusal(self.log.members.values(), world_size)
            if reason is not None:
                raise self.log.belongs_to_others(reason)
            self.log.join(self.id, Member.current(world_size))

    def share(self) -> None:
        self._users.append(False)

    def give_up(self) -> None:
        """One user fewer; the last one leaves, and removes the file if no member is left in it.

        A child that was forked shares the seat, but it is not the child's to leave.
        """
        if self._owner != os.getpid() or not self._users.pop():
            return
        try:
            self._leave()
        except RallypointError:
            pass  # the file is gone, or cannot be locked: other members will see that this process has ended

    def _leave(self) -> None:
        with self.log.locked(Deadline(_LEAVE_SECONDS)):
            self.log.leave(self.id)
            if all(member.is_gone for member in self.log.members.values()):
                self.log.remove()


class FileStore(LocalStore):
    """The store in the file `file_name`, which the first member creates and the last one removes.

    A member is a `FileStore` with its clones; it leaves when they are closed, collected, or the
    interpreter exits. `world_size` is how many members there will be; None or -1 if that is not known.
    StaleFileError if the file is of another run, or none of this package's. Close the store only after all
    have joined (a `barrier` sees to it): if the only member leaves, what it stored is gone.

    A member that is killed at a barrier is not counted there any more, if it ran on the machine of the one
    that completes the barrier; if it ran elsewhere, that is not noticed.
    """

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(timeout)
        size = None if world_size == -1 else world_size
        if size is not None and size < 1:
            raise UsageError(
                f"the world size is {world_size}, but must be positive, or -1 if it is not known"
            )
        self._attach(_Seat(os.path.abspath(os.fspath(file_name)), size, Deadline(self._timeout)))

    def _attach(self, seat: _Seat) -> None:
        self._seat = seat
        self._log = seat.log
        self._let_go = weakref.finalize(self, seat.give_up)

    def __repr__(self) -> str:
        return f"FileStore({self.path!r})"

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._log.path

    def clone(self) -> FileStore:
        """Another object for the same member, which stays one until both are closed."""
        self._check_open()
        self._seat.share()
        twin = FileStore.__new__(FileStore)
        Store.__init__(twin, self._timeout)
        twin._attach(self._seat)
        return twin

    def close(self) -> None:
        """Leave, unless clones are still open; the last member that leaves removes the file."""
        self._closed = True
        self._let_go()

    def _at_once(self, act: Callable[[Engine[bytes]], _Result]) -> _Result:
        with self._log.locked(Deadline(self._timeout + _GRACE)) as engine:
            return act(engine)

    def _until(
        self, attempt: Callable[[Engine[bytes]], _Result | None], deadline: Deadline
    ) -> _Result | None:
        pause = _FIRST_PAUSE
        while True:
            self._check_open()
            with self._log.locked(Deadline(deadline.remaining + _GRACE)) as engine:
                seen = self._log.length
                result = attempt(engine)
            if result is not None or deadline.passed:
                return result
            pause = self._await_growth(seen, pause, deadline)

    def _await_growth(self, seen: int, pause: float, deadline: Deadline) -> float:
        """Sleep until the file has another length than the one seen; return how long to pause next."""
        trust = Deadline(_LONGEST_TRUST)
        while not (self._closed or deadline.passed or trust.passed):
            time.sleep(min(pause, deadline.remaining))
            pause = min(1.5 * pause, _LONGEST_PAUSE)
            if self._log.size_on_disk() != seen:
                break
        return pause

    def _record(self, op: Op, contents: Sequence[bytes], *, tail: bytes = b"", member: bytes = b"") -> None:
        self._log.write_change(member or self._seat.id + bytes(CALL_BYTES), encode(op, contents, tail))

    # Barriers

    def _new_member(self) -> bytes:
        return self._seat.id + os.urandom(CALL_BYTES)

    def _arrive(self, engine: Engine[bytes], member: bytes, name: bytes, world_size: int) -> None:
        present = engine.barriers.arrived(name, world_size)
        if len(present) + 1 >= world_size:
            for other in present:
                owner = self._log.members.get(other[:MEMBER_BYTES])
                if owner is None or owner.is_gone:
                    self._withdraw(engine, other)
        super()._arrive(engine, member, name, world_size)
