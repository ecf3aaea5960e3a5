"""A file that is open and locked: for one holder at a time, among all threads, processes and machines.

The lock is the system's and belongs to the open file, so it ends with its holder, however that ends. It
is polled for, since the system's own wait for it has no deadline. When a caller gets the lock, the last user
of the file may just have removed it, and the path may name another file: then that one is opened instead.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.errors import StoreTimeoutError
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.system import open_movable

_FIRST_PAUSE = 0.000_05
_LONGEST_PAUSE = 0.005
_BUSY = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)

if sys.platform == "win32":
    import msvcrt

    # Windows lets no other process read locked bytes: so the lock is on a byte beyond the end of the file.
    _LOCKED_BYTE = 0x7FFF_0000

    def _lock_or_raise(descriptor: int) -> None:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _unlock(descriptor: int) -> None:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock_or_raise(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(descriptor: int) -> None:
        # Closing would not do: a child that was forked meanwhile has the same open file.
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def open_locked(path: str, deadline: Deadline, *, create: bool) -> Iterator[int]:
    """A descriptor of the file at `path`, locked; StoreTimeoutError if others hold the lock for too long.

    Raises FileNotFoundError if there is none, and it is not to be created; other OSErrors as they come.
    """
    flags = os.O_RDWR | os.O_CREAT if create else os.O_RDWR
    while True:
        descriptor = open_movable(path, flags)
        try:
            _lock(descriptor, path, deadline)
            try:
                if _is_at(path, descriptor):
                    yield descriptor
                    return
            finally:
                _unlock(descriptor)
        finally:
            os.close(descriptor)


def remove_locked(path: str, descriptor: int) -> None:
    """Remove the file that `open_locked` gave.

    It is emptied first, as an empty file is as good as none: Windows may not remove what a scanner reads.
    """
    os.ftruncate(descriptor, 0)
    try:
        if sys.platform == "win32":  # there, the name would be taken until all have closed the file
            path, taken = f"{path}.{uuid.uuid4().hex}", path
            os.rename(taken, path)
        os.unlink(path)
    except OSError:
        pass


def _lock(descriptor: int, path: str, deadline: Deadline) -> None:
    pause = _FIRST_PAUSE
    while not _try_lock(descriptor):
        if deadline.passed:
            raise StoreTimeoutError(
                f"the file {path} stayed locked by others for {deadline.seconds:g} s",
                hint="a process that uses it is stopped or hangs: end it",
            )
        time.sleep(min(pause, deadline.remaining))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _try_lock(descriptor: int) -> bool:
    try:
        _lock_or_raise(descriptor)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
