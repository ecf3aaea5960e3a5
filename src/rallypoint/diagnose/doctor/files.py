"""File init: whether locks work in its folder, and what kind of file system that is on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rallypoint.client.filelock import open_locked
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, failure, ok
from rallypoint.errors import StoreTimeoutError
from rallypoint.store.connect.deadline import Deadline

_SECONDS: Final = 5.0

_SHARED: Final = (
    *("nfs", "nfs4", "cifs", "smb", "smbfs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph"),
    *("glusterfs", "fuse.glusterfs", "afs", "9p", "virtiofs", "orangefs", "pvfs2", "wekafs"),
    *("fuse.sshfs", "fuse.s3fs"),
)
_HELD: Final = "held"

# The test needs a second process: a process may get a lock again that it holds itself. It imports nothing
# from the folder it happens to stand in.
_INTRUDER: Final = f"""
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
    print({_HELD!r})
"""


def check_file_init(situation: Situation) -> Iterator[Finding]:
    """`file://` needs locks that hold between processes, and nothing else."""
    folder = situation.folder.resolve()
    kind = file_system_of(folder)
    where = f"{folder} ({kind})" if kind else str(folder)
    try:
        works = _try_locks(folder)
    except OSError as error:
        yield failure(
            "file-init",
            f"no file can be made and locked in {where}: {error.strerror or error}",
            "choose a folder with --folder, and give file:// a path in it",
        )
        return
    yield judge_locks(where, kind, works)


def judge_locks(where: str, kind: str, works: bool) -> Finding:
    """A folder whose locks hold between processes, or do not."""
    if not works:
        return failure(
            "file-init",
            f"in {where} a second process gets a lock that the first one holds: keys would get lost",
            "choose a local folder, or mount it with locks (for NFS: without nolock)",
        )
    what = f"locks hold in {where}"
    if kind in _SHARED:
        what += ", a shared file system: also for several machines, if its server keeps their locks"
        return ok("file-init", what)
    return ok("file-init", f"{what}: for jobs on this machine")


def _try_locks(folder: Path) -> bool:
    """Whether another process is kept out while this one holds a lock."""
    descriptor, path = tempfile.mkstemp(prefix=".rallypoint-doctor-", dir=folder)
    os.close(descriptor)
    intruder = [sys.executable, "-c", _INTRUDER, path]
    try:
        with open_locked(path, Deadline(_SECONDS), create=False):
            asked = subprocess.run(intruder, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except StoreTimeoutError as error:
        raise OSError(error.message) from error
    except subprocess.TimeoutExpired:
        raise OSError(f"asking for a lock takes longer than {_SECONDS:g} s") from None
    finally:
        os.unlink(path)
    if asked.returncode:
        raise OSError(asked.stderr.strip().splitlines()[-1] if asked.stderr.strip() else "the lock failed")
    return asked.stdout.strip() == _HELD


def file_system_of(folder: Path) -> str:
    """The type of the file system that a folder is on; empty if the system does not tell."""
    import psutil  # late: few commands need it

    try:
        mounts = psutil.disk_partitions(all=True)
    except (OSError, psutil.Error, RuntimeError):
        return ""
    above = [each for each in mounts if folder.resolve().is_relative_to(each.mountpoint)]
    return max(above, key=lambda each: len(each.mountpoint)).fstype if above else ""
