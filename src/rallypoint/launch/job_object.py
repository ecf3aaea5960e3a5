"""Windows: no process of a job outlives the process that started it.

Windows tells no process that its parent has ended. A job object does: it holds processes, and all that these
start; and when the last handle to it is closed, they end. The only handle is the launcher's, and the system
closes it, however the launcher ends.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("rallypoint.run")

_EXTENDED_LIMITS = 9  # JobObjectExtendedLimitInformation
_KILL_ON_JOB_CLOSE = 0x2000


class _BasicLimits(ctypes.Structure):
    _fields_ = (
        ("per_process_user_time", ctypes.c_int64),
        ("per_job_user_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("minimum_working_set", ctypes.c_size_t),
        ("maximum_working_set", ctypes.c_size_t),
        ("active_processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority_class", ctypes.c_uint32),
        ("scheduling_class", ctypes.c_uint32),
    )


class _ExtendedLimits(ctypes.Structure):
    _fields_ = (
        ("basic", _BasicLimits),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("peak_process_memory", ctypes.c_size_t),
        ("peak_job_memory", ctypes.c_size_t),
    )


@contextmanager
def children_end_with_us() -> Iterator[None]:
    """If this process is ended inside the block, so is all that it has started there, and what that started.

    After an orderly end of the block that is over: what still runs then was meant to. After an exception it
    goes on, so that nothing outlives a launcher that fails. Elsewhere than on Windows, this does nothing; nor
    where Windows refuses it, which before Windows 8 it does for a process in another job.
    """
    if sys.platform != "win32":
        yield
        return
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.CreateJobObjectW.restype = kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.CreateJobObjectW.argtypes = (ctypes.c_void_p, ctypes.c_wchar_p)
    kernel.AssignProcessToJobObject.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    kernel.SetInformationJobObject.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int),
        *(ctypes.POINTER(_ExtendedLimits), ctypes.c_uint32),
    )

    def end_all_on_close(flags: int) -> bool:
        limits = _ExtendedLimits(basic=_BasicLimits(flags=flags))
        place, size = ctypes.byref(limits), ctypes.sizeof(limits)
        return bool(kernel.SetInformationJobObject(job, _EXTENDED_LIMITS, place, size))

    job = kernel.CreateJobObjectW(None, None)
    # This process is in the job as well, so a child is in it from its first moment, and so are its own.
    held = job and end_all_on_close(_KILL_ON_JOB_CLOSE)
    if not held or not kernel.AssignProcessToJobObject(job, kernel.GetCurrentProcess()):
        logger.debug("no job object: error %d", ctypes.get_last_error())
    yield
    if job:
        end_all_on_close(0)
