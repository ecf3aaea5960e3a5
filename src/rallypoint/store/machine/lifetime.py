"""Children that end when their parent does, however it ends.

A parent that is killed cannot end its children. A child that runs our code reads a pipe of which the parent
holds the other end, which the kernel closes (`lifeline`, `on_parent_end`). For other programs, Linux signals
the child (`signal_with_parent`), and Windows ends a job object with all of its processes
(`children_end_with_us`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

logger = logging.getLogger("rallypoint.run")

# POSIX -----------------------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG: Final = 1  # of Linux's prctl


@contextmanager
def lifeline(text: str) -> Iterator[int]:
    """The descriptor of a pipe for a child: it has a line of text, and ends with this process."""
    theirs, ours = os.pipe()
    os.write(ours, f"{text}\n".encode(errors="replace"))
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def on_parent_end(pipe: int, act: Callable[[], object]) -> str:
    """In the child: call `act`, in a thread, when the parent has ended. Returns the line of text."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(pipe, 1)):
        line += byte

    def await_end() -> None:
        while os.read(pipe, 1):
            pass
        act()

    threading.Thread(target=await_end, daemon=True).start()
    return line.decode().strip()


def signal_with_parent(number: int = signal.SIGTERM) -> Callable[[], None] | None:
    """A `preexec_fn` that has the child get a signal when this process ends; None except on Linux."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()  # before the fork: nothing may be loaded after it

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the parent ended before that took effect

    return prepare


# Windows ---------------------------------------------------------------------------------------------------

_EXTENDED_LIMITS: Final = 9  # JobObjectExtendedLimitInformation
_LIMITS_BYTES: Final = 144 if ctypes.sizeof(ctypes.c_void_p) == 8 else 112
_LIMIT_FLAGS: Final = 2  # the place of LimitFlags in it, in units of 8 bytes
_KILL_ON_JOB_CLOSE: Final = 0x2000


@contextmanager
def children_end_with_us() -> Iterator[None]:
    """If this process ends inside the block, so do all processes that it has started there, and theirs.

    After an orderly end of the block, they go on. After an exception they do not, so that nothing outlives a
    launcher that fails. Does nothing except on Windows; nor where Windows refuses it, as before Windows 8 for
    a process in another job.
    """
    if sys.platform != "win32":
        yield
        return
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.CreateJobObjectW.restype = kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.CreateJobObjectW.argtypes = (ctypes.c_void_p, ctypes.c_wchar_p)
    kernel.AssignProcessToJobObject.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    pointer = ctypes.c_void_p
    kernel.SetInformationJobObject.argtypes = (pointer, ctypes.c_int, pointer, ctypes.c_uint32)

    def end_all_on_close(flags: int) -> bool:
        limits = (ctypes.c_uint64 * (_LIMITS_BYTES // 8))()
        limits[_LIMIT_FLAGS] = flags
        return bool(
            kernel.SetInformationJobObject(job, _EXTENDED_LIMITS, ctypes.byref(limits), _LIMITS_BYTES)
        )

    job = kernel.CreateJobObjectW(None, None)
    # This process is in the job as well, so its children are from their first moment, and theirs. It has the
    # only handle, which the system closes however this process ends.
    held = job and end_all_on_close(_KILL_ON_JOB_CLOSE)
    if not held or not kernel.AssignProcessToJobObject(job, kernel.GetCurrentProcess()):
        logger.debug("no job object: error %d", ctypes.get_last_error())
    yield
    if job:
        end_all_on_close(0)
