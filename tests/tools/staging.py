"""What it takes to make a job fail: ports that are held, a network of one's own, processes that end.

Nothing outlives the process that started it: Linux ends a child with its parent. No port is found free and
closed again: it is held by whoever needs it to be taken, or to be nobody's. For tests/tools/reproducing.py.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NoReturn

DEADLINE_SECONDS = 120

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWNET, _CLONE_NEWUSER = 0x20000, 0x40000000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41

Rank = Callable[[], object]


class ImpossibleError(Exception):
    """The case cannot be brought about here."""


@dataclass
class Stage:
    """The ranks of a case, and what an explanation should tell of it."""

    ranks: list[Rank]
    facts: dict[str, str] = field(default_factory=dict)
    held: list[socket.socket] = field(default_factory=list)
    """What has to stay open until the ranks have ended."""
    asks_names: bool = False
    """Whether the ranks may ask a name server."""


Case = Callable[[Path], Stage]
"""Sets the stage, in a folder of its own; ImpossibleError if it cannot."""


def cases_in(module: ModuleType) -> dict[str, Case]:
    """The public functions of a module that set a stage, by their names."""
    return {
        name: each
        for name, each in vars(module).items()
        if not name.startswith("_") and getattr(each, "__annotations__", {}).get("return") == "Stage"
    }


# Sockets that are held -------------------------------------------------------------------------------------


def bind(port: int = 0) -> socket.socket:
    """A port that is nobody else's, and refuses connections; 0: any."""
    held = socket.socket()
    try:
        held.bind(("", port))
    except OSError:
        held.close()
        raise
    return held


def listen() -> socket.socket:
    """A port that is taken."""
    held = bind()
    held.listen()
    return held


def listen_below(limit: int) -> socket.socket:
    """A port that is taken, and not among those that the system gives to connections."""
    for port in random.sample(range(10_000, limit), 100):
        try:
            held = bind(port)
        except OSError:
            continue
        held.listen()
        return held
    raise ImpossibleError(f"no port below {limit} is free")


# Namespaces ------------------------------------------------------------------------------------------------


def enter_namespaces() -> None:
    """Leave the network and the mounts of the machine: for loopback alone, and for mounts of one's own."""
    try:
        _unshare()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING))
    except OSError as error:
        raise ImpossibleError(f"namespaces are not permitted here: {error}") from error


def _unshare() -> None:
    flags = _CLONE_NEWNS | _CLONE_NEWNET | (_CLONE_NEWUSER if os.geteuid() != 0 else 0)
    user, group = os.geteuid(), os.getegid()
    _call("unshare", flags)
    if flags & _CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def mount_over(file: Path, target: Path) -> None:
    """Let a file be seen in the place of another one, in this namespace."""
    try:
        _call("mount", bytes(file), bytes(target), None, _MS_BIND, None)
    except OSError as error:
        raise ImpossibleError(f"{target} cannot be mounted over: {error}") from error


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# Processes -------------------------------------------------------------------------------------------------


def run(work: Rank, log: Path) -> int:
    """A process that writes to a log, from its beginning to its end; its exit code, or minus its signal."""
    return wait_for(start(work, log))


def start(work: Rank, log: Path) -> int:
    """Start such a process."""

    def live() -> None:
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        work()

    return fork(live)


def fork(work: Rank) -> int:
    """A process that does this, and ends with its parent, or after a while."""
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _live(parent, work)
    return pid


def _live(parent: int, work: Rank) -> NoReturn:
    code = 1
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.alarm(DEADLINE_SECONDS)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for(pid: int) -> int:
    """How a process ended: its exit code, or minus its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
