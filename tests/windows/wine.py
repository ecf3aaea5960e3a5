"""Runs a command of Windows, under Wine, in a root folder of its own.

Each command has a mount and a process namespace to itself. When it ends, or its time is over, all that it has
started ends with it: Wine's services as well, which would keep pipes open for ever.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

DRIVE = "wine/drive_c"
"""C:, below the root folder. On Z:, which is the root folder itself, Linux would shine through."""

_LIMIT = 124
"""The exit code of a command whose time is over, as `timeout` has it."""

# The shell stays, as the first process of the namespace: it buries what others have left behind.
_ENTER = """
set -e
root=$1; shift
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
exec chroot "$root" /bin/sh -c 'cd "$FOLDER"; "$@"; exit $?' - "$@"
"""


def emulator() -> list[str]:
    """What runs programs of x86_64 on this machine, below the root folder."""
    return [] if platform.machine() == "x86_64" else ["/usr/bin/box64"]


def what_is_missing() -> str:
    """Why nothing can be run here, in words; empty if all is there."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return "it needs Linux on x86_64 or aarch64"
    if os.geteuid() != 0:
        return "it needs the rights of root, to change the root folder"
    missing = [name for name in ("apt-get", "dpkg-deb", "unshare", "chroot") if shutil.which(name) is None]
    return f"it needs {' and '.join(missing)}" if missing else ""


def run(
    root: Path,
    command: Sequence[str],
    *,
    seconds: float,
    output: IO[bytes],
    variables: Mapping[str, str] | None = None,
    folder: str = "",
) -> int:
    """Run `command` (with paths of the root folder) in `folder` of C:; what it prints goes to a file.

    Returns its exit code, of which Linux keeps 8 bits; 124 if its time was over.
    """
    environment = {
        "HOME": "/root",
        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        "LC_ALL": "C.UTF-8",  # for names of files; the code page of Windows is 1252
        "FOLDER": str(Path("/", DRIVE, folder)),
        "WINEPREFIX": "/wine",
        "WINESERVER": "/usr/bin/wineserver",
        "WINEDEBUG": "-all",
        # Wine's own ucrtbase makes numpy abort, and gives wrong error numbers.
        "WINEDLLOVERRIDES": "mscoree,mshtml,winemenubuilder.exe=d;ucrtbase=n,b",
        "WINEPATH": r"C:\python;C:\python\Scripts;C:\windows\system32;C:\windows",
        "KMP_AFFINITY": "disabled",  # torch's OpenMP asks Wine in vain for NUMA nodes
        "BOX64_NOBANNER": "1",
        "BOX64_LOG": "0",
        "BOX64_LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu",
        **(variables or {}),
    }
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _ENTER, "-", str(root)]
    process = subprocess.Popen(
        [*apart, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return _LIMIT
    finally:
        process.kill()  # and with it, by --kill-child, the first process of the namespace, and so all others
        process.wait()
