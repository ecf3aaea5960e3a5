"""What bounds a job's size: open files, clients that wait to be accepted, shared memory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Final

from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, ok, unknown, warning
from rallypoint.server.machine.limits import accept_backlog, open_files_allowed, syn_backlog

_SPARE_FILES: Final = 64
"""What the process that holds a store has open besides its clients."""

_FEW_FILES: Final = 1024
_LITTLE_SHARED_MEMORY: Final = 1 << 30
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - it is only looked at


def check_open_files(situation: Situation) -> Iterator[Finding]:
    """A store's server, and torch's, keeps one open file for each rank that is connected to it."""
    allowed = open_files_allowed()
    if allowed is None:
        yield unknown("open-files", "this system does not tell")
    else:
        yield judge_open_files(*allowed, situation.world_size)


def judge_open_files(soft: int, hard: int, world_size: int | None) -> Finding:
    """Whether as many ranks as there will be can be connected."""
    room = soft - _SPARE_FILES
    what = f"a process may open {_number(soft)} files"
    if world_size is not None and room < world_size:
        remedy = f"ulimit -n {world_size + _SPARE_FILES}"
        if hard < world_size + _SPARE_FILES:
            remedy = f"rallypoint run --relay=on; or have the limit of {_number(hard)} raised"
        return warning("open-files", f"{what}, too few for {world_size:,} ranks at one server", remedy)
    if soft < _FEW_FILES:
        return warning(
            "open-files", f"{what}, which is little for a training", f"ulimit -n {min(hard, 65_536)}"
        )
    return ok("open-files", f"{what}: room for {_number(room)} ranks at one server")


def check_backlog(situation: Situation) -> Iterator[Finding]:
    """Ranks that come at the same time wait to be accepted; who finds no place tries again a second later."""
    accepting, half_open = accept_backlog(), syn_backlog()
    if accepting is None or half_open is None:
        yield unknown("backlog", "this system does not tell how many clients may wait to be accepted")
    else:
        yield judge_backlog(accepting, half_open, situation.world_size)


def judge_backlog(accepting: int, half_open: int, world_size: int | None) -> Finding:
    """Whether as many ranks as there will be can knock at the same time."""
    what = f"{accepting:,} clients may wait on one socket (somaxconn), {half_open:,} half open (SYN backlog)"
    if world_size is not None and min(accepting, half_open) < world_size:
        return warning(
            "backlog",
            f"{what}: of {world_size:,} ranks that start at once, some wait a second or more",
            f"sysctl -w net.core.somaxconn={world_size} net.ipv4.tcp_max_syn_backlog={world_size}; "
            "Rallypoint's server listens on several sockets, and relays need one connection per machine",
        )
    return ok("backlog", what)


def check_shared_memory(_: Situation) -> Iterator[Finding]:
    """Loaders of data and NCCL use it; containers often have 64 MiB."""
    if sys.platform != "linux":
        return
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError as error:
        yield warning("shared-memory", f"there is no {_SHARED_MEMORY}: {error.strerror}")
        return
    yield judge_shared_memory(usage.total, usage.free)


def judge_shared_memory(total: int, free: int) -> Finding:
    what = f"{_SHARED_MEMORY} has {_gib(total)}, {_gib(free)} free"
    if free < _LITTLE_SHARED_MEMORY:
        return warning(
            "shared-memory",
            f"{what}: little for loaders of data and for NCCL",
            "start the container with --shm-size=8g, or --ipc=host",
        )
    return ok("shared-memory", what)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def _number(limit: int) -> str:
    return "any number of" if limit >= sys.maxsize - _SPARE_FILES else f"{limit:,}"
