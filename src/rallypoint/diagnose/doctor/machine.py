"""This machine: Python and its packages, the event loop, what bounds a job's size, the clock, file locks."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

import rallypoint
from rallypoint.build import in_use
from rallypoint.client.filelock import open_locked
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, failure, note, ok, unknown, warning
from rallypoint.errors import StoreTimeoutError
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.system import ABSENT, accept_backlog, installed, syn_backlog
from rallypoint.store.server.loops.backend import LOOP_PACKAGE
from rallypoint.text import size

_OTHERS: Final = ("torch", "accelerate", "deepspeed", "lightning", "numpy")

_SPARE_FILES: Final = 64
"""How many files a server process has open besides its clients."""
_FEW_FILES: Final = 1024
_MANY_FILES: Final = 65_536
_LITTLE_SHARED_MEMORY: Final = 1 << 30
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - it is only examined

_SET_CLOCK: Final = "timedatectl set-ntp true"
_SLACK_S: Final = 86_400.0  # a file's time may come from a file server, or from another time zone
_NOT_SYNCHRONISED: Final = 5  # adjtimex returns it (TIME_ERROR)
_TIMEX_BYTES: Final = 512  # more than any Linux needs for the structure; all zero, it only asks


# Packages --------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """The versions that should be the same on all machines of a job."""
    return {
        "python": platform.python_version(),
        "rallypoint": rallypoint.__version__,
        **{name: installed(name) for name in ("torch", "accelerate")},
    }


def check_python(_: Situation) -> Iterator[Finding]:
    where = "in a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    what = f"{platform.python_implementation()} {platform.python_version()}, {platform.platform(terse=True)}"
    yield ok(f"{what}, {where}")


def check_packages(_: Situation) -> Iterator[Finding]:
    found = {name: version for name in _OTHERS if (version := installed(name)) != ABSENT}
    ours = f"rallypoint {rallypoint.__version__} ({in_use()})"
    what = ", ".join([ours, *(f"{name} {version}" for name, version in found.items())])
    if "torch" in found and "numpy" not in found:
        yield warning(f"{what}; no numpy, which torch warns about", "pip install numpy")
    else:
        yield ok(what)


def check_event_loop(_: Situation) -> Iterator[Finding]:
    try:
        version = getattr(import_module(LOOP_PACKAGE), "__version__", "")
        yield ok(f"{LOOP_PACKAGE} {version}: the server runs on libuv")
    except ImportError as error:
        what = f"{LOOP_PACKAGE} cannot be imported ({error}): the server runs on the standard library, slower"
        limit = ", and refuses the 501st client" if sys.platform == "win32" else ""  # it has only `select`
        yield warning(what + limit, f"pip install {LOOP_PACKAGE}")


# Limits ----------------------------------------------------------------------------------------------------


def check_open_files(situation: Situation) -> Iterator[Finding]:
    """A store's server, and torch's, keeps one file open for each connected rank."""
    yield judge_open_files(*open_files_allowed(), situation.world_size)


def open_files_allowed() -> tuple[int, int]:
    """How many files a process may open: now, and at most if it raises the limit itself."""
    if sys.platform == "win32":
        return sys.maxsize, sys.maxsize  # it has no limit for sockets and handles that a job could reach
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (soft if soft >= 0 else sys.maxsize), (hard if hard >= 0 else sys.maxsize)  # -1: unlimited


def judge_open_files(soft: int, hard: int, world_size: int | None) -> Finding:
    """Whether all ranks can be connected to one server."""
    room = soft - _SPARE_FILES
    what = f"a process may open {_number(soft)} files"
    if world_size is not None and room < world_size:
        needed = world_size + _SPARE_FILES
        relay = "rallypoint run --relay=on; or " if hard < needed else ""
        found = f"{what}, too few for {world_size:,} ranks at one server"
        return warning(found, relay + _raise_limit(needed, hard))
    if soft < _FEW_FILES:
        wanted = min(max(hard, _FEW_FILES), _MANY_FILES)
        return warning(f"{what}, which is little for a training", _raise_limit(wanted, hard))
    return ok(f"{what}: room for {_number(room)} ranks at one server")


def _raise_limit(wanted: int, hard: int) -> str:
    """How to raise the limit: up to the hard one anybody may, above it an administrator alone."""
    if wanted <= hard:
        return f"ulimit -n {wanted}"
    wanted = max(wanted, _MANY_FILES)
    return (
        f"{_number(hard)} is the hard limit, which an administrator has to raise: for this shell, "
        f"sudo prlimit --pid $$ --nofile={wanted}; for good, `* - nofile {wanted}` in "
        f"/etc/security/limits.conf and a new login; for a service, LimitNOFILE={wanted}; for a container, "
        f"--ulimit nofile={wanted}"
    )


def _number(limit: int) -> str:
    return "any number of" if limit >= sys.maxsize - _SPARE_FILES else f"{limit:,}"


def check_backlog(situation: Situation) -> Iterator[Finding]:
    """Ranks that connect at once wait to be accepted. If the queue is full, they try again after a second."""
    accepting, half_open = accept_backlog(), syn_backlog()
    if accepting is None or half_open is None:
        yield unknown("this system does not tell how many clients may wait to be accepted")
    else:
        yield judge_backlog(accepting, half_open, situation.world_size)


def judge_backlog(accepting: int, half_open: int, world_size: int | None) -> Finding:
    """Whether all ranks can connect at the same time."""
    what = f"{accepting:,} clients may wait on one socket (somaxconn), {half_open:,} half open (SYN backlog)"
    if world_size is None or min(accepting, half_open) >= world_size:
        return ok(what)
    return warning(
        f"{what}: of {world_size:,} ranks that start at once, some wait a second or more",
        f"sysctl -w net.core.somaxconn={world_size} net.ipv4.tcp_max_syn_backlog={world_size}; "
        "Rallypoint's server listens on several sockets, and relays need one connection per machine",
    )


def check_shared_memory(_: Situation) -> Iterator[Finding]:
    """Data loaders and NCCL use it; containers often have 64 MiB."""
    if sys.platform != "linux":
        return
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError as error:
        yield warning(f"there is no {_SHARED_MEMORY}: {error.strerror}")
        return
    what = f"{_SHARED_MEMORY} has {size(usage.total)}, {size(usage.free)} free"
    if usage.free < _LITTLE_SHARED_MEMORY:
        hint = "start the container with --shm-size=8g, or --ipc=host"
        yield warning(f"{what}: little for data loaders and for NCCL", hint)
    else:
        yield ok(what)


# The clock -------------------------------------------------------------------------------------------------


def check_clock(situation: Situation) -> Iterator[Finding]:
    """Logs of several machines are ordered by their clocks, and torch's own rendezvous compares clocks."""
    try:
        installed_at = Path(str(rallypoint.__file__)).stat().st_mtime
    except OSError:
        installed_at = 0.0
    yield judge_clock(time.time(), installed_at, _is_synchronised(), situation.machines)


def judge_clock(now: float, installed_at: float, is_synchronised: bool | None, machines: int = 1) -> Finding:
    """A clock is wrong if it shows a time before the installation of this package."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < installed_at - _SLACK_S:
        since = time.strftime("%Y-%m-%d", time.gmtime(installed_at))
        return failure(f"{text} lies before Rallypoint was installed, {since}", _SET_CLOCK)
    if is_synchronised is False:
        what = "the system says that it is not synchronised: times of several machines may not compare"
        hint = f"{_SET_CLOCK}, on the machine itself if this is a container"
        return (warning if machines > 1 else note)(f"{text}; {what}", hint)
    return ok(f"{text}, synchronised" if is_synchronised else text)


def _is_synchronised() -> bool | None:
    """What the kernel knows of its clock; None if it cannot be asked."""
    if sys.platform != "linux":
        return None
    try:
        state: int = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _NOT_SYNCHRONISED


# File init --------------------------------------------------------------------------------------------------

_LOCK_SECONDS: Final = 5.0

_SHARED: Final = (
    *("nfs", "nfs4", "cifs", "smb", "smbfs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph"),
    *("glusterfs", "fuse.glusterfs", "afs", "9p", "virtiofs", "orangefs", "pvfs2", "wekafs"),
    *("fuse.sshfs", "fuse.s3fs"),
)

# The test needs a second process: a process may get a lock again that it holds itself. It imports nothing
# from the folder it happens to stand in.
_INTRUDER: Final = """
import sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
from rallypoint.store.connect.deadline import Deadline
from rallypoint.errors import StoreTimeoutError
from rallypoint.client.filelock import open_locked
try:
    with open_locked(sys.argv[1], Deadline(0.0), create=False):
        print("free")
except StoreTimeoutError:
    print("held")
"""


def check_file_init(situation: Situation) -> Iterator[Finding]:
    """`file://` needs locks that hold between processes, and nothing else."""
    folder = situation.folder.resolve()
    kind = file_system_of(folder)
    where = f"{folder} ({kind})" if kind else str(folder)
    try:
        yield judge_locks(where, kind, _try_locks(folder))
    except OSError as error:
        found = f"no file can be made and locked in {where}: {error.strerror or error}"
        yield failure(found, "choose a folder with --folder, and give file:// a path in it")


def judge_locks(where: str, kind: str, works: bool) -> Finding:
    """A folder whose locks hold between processes, or do not."""
    if not works:
        return failure(
            f"in {where} a second process gets a lock that the first one holds: keys would get lost",
            "choose a local folder, or mount it with locks (for NFS: without nolock)",
        )
    shared = ", a shared file system: also for several machines, if its server keeps their locks"
    return ok(f"locks hold in {where}{shared if kind in _SHARED else ': for jobs on this machine'}")


def _try_locks(folder: Path) -> bool:
    """Whether another process is kept out while this one holds a lock."""
    descriptor, path = tempfile.mkstemp(prefix=".rallypoint-doctor-", dir=folder)
    os.close(descriptor)
    intruder = [sys.executable, "-c", _INTRUDER, path]
    try:
        with open_locked(path, Deadline(_LOCK_SECONDS), create=False):
            done = subprocess.run(
                intruder, capture_output=True, text=True, timeout=_LOCK_SECONDS, check=False
            )
    except StoreTimeoutError as error:
        raise OSError(error.message) from error
    except subprocess.TimeoutExpired:
        raise OSError(f"asking for a lock takes longer than {_LOCK_SECONDS:g} s") from None
    finally:
        os.unlink(path)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the lock failed")
    return done.stdout.strip() == "held"


def file_system_of(folder: Path) -> str:
    """The type of the file system that a folder is on; empty if the system does not tell."""
    import psutil  # late: few commands need it

    try:
        mounts = psutil.disk_partitions(all=True)
    except (OSError, psutil.Error, RuntimeError):
        return ""
    above = [each for each in mounts if folder.resolve().is_relative_to(each.mountpoint)]
    return max(above, key=lambda each: len(each.mountpoint)).fstype if above else ""
