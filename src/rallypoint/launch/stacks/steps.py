"""The step that a rank is in: one line of code in the script, a number in a file's memory for the launcher.

    rallypoint.step(n)

It takes a microsecond, and nothing is sent: the launcher reads the number with each sample of the
rank. Without a launcher that samples, it does nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from operator import index
from pathlib import Path
from typing import Final

from rallypoint.launch.handover import read_handover

_FORM: Final = struct.Struct("=qd")
_NAME: Final = "step-{rank}-{pid}"
_MOST: Final = 1 << 62

_place: mmap.mmap | None = None
_owner = -1
_last = -1
_rank = -1


def step(number: int | None = None) -> None:
    """Say which step this rank is in; without a number, that it is in the next one."""
    global _last
    _last = _last + 1 if number is None else min(max(index(number), 0), _MOST)
    if _owner != os.getpid():
        _open()
    if _place is not None:
        _FORM.pack_into(_place, 0, _last, time.time())


def be_rank(rank: int) -> None:
    """Make this process that rank, whatever its variables say."""
    global _rank, _owner
    if rank != _rank:
        _rank, _owner = rank, -1


def read_step(folder: Path, rank: int, pid: int) -> tuple[int, float]:
    """The step that a rank is in, and since when by the clock; -1: it has said none."""
    try:
        data = (folder / _NAME.format(rank=rank, pid=pid)).read_bytes()
        number, since = _FORM.unpack(data)
    except (OSError, struct.error):
        return -1, 0.0
    return (int(number), float(since)) if 0 <= number <= _MOST else (-1, 0.0)


def _open() -> None:
    """Map a file for this process; one that was forked gets a file of its own."""
    global _place, _owner
    _place, _owner = None, os.getpid()
    given = read_handover(os.environ)
    rank = str(_rank) if _rank >= 0 else os.environ.get("RANK", "")
    if given.reports is None or not rank.isdecimal() or not given.signals:
        return
    path = given.reports / _NAME.format(rank=int(rank), pid=_owner)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            os.write(file, bytes(_FORM.size))  # not a hole: a full disk is an error here, and not later
            _place = mmap.mmap(file, _FORM.size)
        finally:
            os.close(file)
    except OSError:
        pass  # the folder is gone, or the disk is full: the job does not end for that
