"""What the operating system knows of a process: its state, the call that it is in, its memory. Linux.

Elsewhere it is only known that it is there, and how much it works. A process of another user tells less.
Linux also counts how much data a process has moved: a rank in a large transfer is not stuck. What the
programs nvidia-smi and py-spy know is asked of them, if they are there.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from rallypoint.frames import MOST_FRAMES, Frame, Stack
from rallypoint.launch.stacks.activity import ProcessFacts

HAS_PROC: Final = sys.platform == "linux"
_PROC: Final = Path("/proc")
_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

_STATES: Final = {
    "R": "runs",
    "S": "sleeps",
    "D": "is in the kernel, and cannot be interrupted",
    "T": "is stopped (by SIGSTOP, or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "Z": "has ended, and its parent has not noticed",
    "X": "has ended",
}
_UNINTERRUPTIBLE: Final = "D"
_WAKES: Final = 50
"""In a second of CPU time: so one that takes more than some hundredths of a core moves (see `Movement`)."""


class Process(NamedTuple):
    """A process at one moment."""

    state: str
    """A letter of `_STATES`; nothing: it is gone."""
    facts: ProcessFacts
    wakes: int = -1
    """How often its main thread has been put to sleep and woken, so far; -1: not known."""
    began: int = 0
    """When it was started, in the system's ticks: a number that is used again is another process."""
    cpu: float = 0.0
    """Seconds of CPU time so far."""
    parent: int = 0

    @property
    def is_here(self) -> bool:
        return self.state not in ("", "Z", "X")

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")


GONE: Final = Process("", ProcessFacts())


def read_process(pid: int) -> Process:
    """A process of this machine."""
    if not HAS_PROC:
        return read_process_elsewhere(pid)
    folder = _PROC / str(pid)
    stat = _read(folder / "stat").rpartition(")")[2].split()
    if len(stat) < 20:
        return GONE
    status = _table(folder / "status")
    state = stat[0]
    memory, swapped = (1024 * _whole(status, name, 0) for name in ("VmRSS", "VmSwap"))
    call = _call_text(folder) if state in "SD" else ""
    return Process(
        state,
        ProcessFacts(_state_text(folder, state, status), call, memory, swapped),
        _whole(status, "voluntary_ctxt_switches", -1),
        began=int(stat[19]),
        cpu=(int(stat[11]) + int(stat[12])) / _TICKS,
        parent=int(stat[1]),
    )


def read_process_elsewhere(pid: int) -> Process:
    """A process of a system without /proc. Its CPU time stands for how often it was woken."""
    import psutil

    try:
        found = psutil.Process(pid)
        cpu = sum(found.cpu_times()[:2])
        began, memory = int(found.create_time() * 100), found.memory_info().rss
        parent = found.ppid()
    except psutil.Error:
        return GONE
    return Process("?", ProcessFacts(memory=memory), int(cpu * _WAKES), began, cpu, parent)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    found: list[int] = []
    waiting = [pid]
    while waiting and len(found) < 256:
        for task in _entries(_PROC / str(waiting.pop()) / "task"):
            fresh = [int(each) for each in _read(task / "children").split()]
            found += fresh
            waiting += fresh
    return found


def opens(pid: int, path: Path) -> bool:
    """Whether a process has this file open."""
    try:
        wanted = path.stat()
    except OSError:
        return False
    for each in _entries(_PROC / str(pid) / "fd"):
        with suppress(OSError):  # closed meanwhile, or a socket's
            if os.path.samestat(os.stat(each), wanted):
                return True
    return False


_KILLED: Final = re.compile(r"(?:[Oo]ut of memory|oom-kill).{0,400}?(?:Killed process|pid=) ?(\d+)")
_KERNEL_LOG_BYTES: Final = 1 << 20


def killed_for_memory(pid: int) -> bool:
    """Whether the kernel has killed this process because memory ran out, as far as its log can be read."""
    text = b""
    if not HAS_PROC:
        return False
    with suppress(OSError):  # it may not be read, or there is no more
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(log, "rb", buffering=0):
            end = time.monotonic() + 0.5
            while len(text) < _KERNEL_LOG_BYTES and time.monotonic() < end:
                text += os.read(log, 8192)
    return str(pid) in _KILLED.findall(text.decode(errors="replace"))


# Threads and signals ---------------------------------------------------------------------------------------

_TGKILL: Final = {"x86_64": 234, "aarch64": 131}
_HELPER: Final = "rallypoint\n"
"""The name of the thread that answers, as `rallypoint_hooks` has it."""


class Task(NamedTuple):
    """One thread of a process at one moment."""

    tid: int
    state: str
    seconds: float
    """Of CPU time so far."""
    call: str
    """The name of its system call; nothing: it is in none, or in one that has no name here."""
    argument: int
    """The first one of that call."""


def tasks_of(pid: int) -> list[Task]:
    """The threads of a process."""
    found = []
    for each in _entries(_PROC / str(pid) / "task"):
        stat, ran = _read(each / "stat").rpartition(")")[2].split(), _read(each / "schedstat").split()
        if stat and ran:
            call, arguments = _call_of(each)
            found.append(Task(int(each.name), stat[0], int(ran[0]) / 1e9, call, next(iter(arguments), 0)))
    return found


def helper_of(pid: int) -> int:
    """The number of the helper thread that answers for a process; 0: it has none."""
    tasks = sorted(_entries(_PROC / str(pid) / "task"), key=lambda each: int(each.name))
    return next((int(each.name) for each in tasks if _read(each / "comm") == _HELPER), 0)


class Mask(NamedTuple):
    """What becomes of the signals that are sent to one thread: a bit for each."""

    blocked: int = 0
    caught: int = 0
    pending: int = 0


def mask_of(pid: int, tid: int) -> Mask:
    status = _table(_PROC / str(pid) / "task" / str(tid) / "status")
    return Mask(*(_whole(status, name, 0, 16) for name in ("SigBlk", "SigCgt", "SigPnd")))


def memory_words(pid: int, address: int, length: int) -> tuple[int, ...]:
    """Memory of a process, in words of 8 bytes, as far as it may be read."""
    data = _memory(_PROC / str(pid), address, length)
    return tuple(memoryview(data[: len(data) // 8 * 8]).cast("Q"))


def signal_thread(pid: int, tid: int, number: int) -> bool:
    """Send a signal to one thread: no other one handles it, and no other one's system call is interrupted."""
    tgkill = _TGKILL.get(platform.machine())
    if tgkill is None:
        return False
    import ctypes

    return bool(ctypes.CDLL(None).syscall(tgkill, pid, tid, number) == 0)


# States and system calls in words --------------------------------------------------------------------------

_WITH_FILE: Final = """
read 0 63, write 1 64, pread64 17 67, readv 19 65, recvfrom 45 207, recvmsg 47 212, accept 43 202,
accept4 288 242, connect 42 203, flock 73 32, fcntl 72 25, fsync 74 82, ioctl 16 29
"""
"""The system calls in which processes wait for a file, with their numbers on x86_64 and aarch64."""
_OTHERS: Final = """
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_wait 232 -, epoll_pwait 281 22,
futex 202 98, nanosleep 35 101, clock_nanosleep 230 115, wait4 61 260, waitid 247 95, openat 257 56,
rt_sigtimedwait 128 137
"""
_COLUMNS: Final = {"x86_64": 1, "aarch64": 2}
_IN_WORDS: Final = {
    "futex": "waits for a lock, or for another thread",
    "nanosleep": "sleep()",
    "clock_nanosleep": "sleep()",
    "wait4": "waits for a process that it has started",
    "waitid": "waits for a process that it has started",
}
_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")


def names_of(architecture: str, *tables: str) -> dict[int, str]:
    """The calls by their numbers; nothing for an architecture that is not in the tables."""
    column = _COLUMNS.get(architecture, 0)
    rows = (each.split() for table in tables or (_WITH_FILE, _OTHERS) for each in table.split(","))
    return {int(row[column]): row[0] for row in rows if column and row[column].isdigit()}


_NAMES: Final = names_of(platform.machine())
_NAMES_WITH_FILE: Final = names_of(platform.machine(), _WITH_FILE).values()


def _state_text(folder: Path, state: str, status: dict[str, str]) -> str:
    text = _STATES.get(state, "")
    if state == _UNINTERRUPTIBLE and (inside := _read(folder / "wchan").strip("\x000 \n")):
        text = f"{text} ({inside})"
    tracer = _whole(status, "TracerPid", 0)
    return f"{text}, and process {tracer} traces it" if tracer else text


def _call_of(folder: Path) -> tuple[str, list[int]]:
    """The name of the system call that a thread is in, if it has one here, and its arguments."""
    number, *arguments = _read(folder / "syscall").split() or [""]
    return _NAMES.get(int(number), "") if number.isdigit() else "", [int(each, 16) for each in arguments]


def _call_text(folder: Path) -> str:
    """The system call that its main thread is in: `read() of /data/shard-17.tar`."""
    name, arguments = _call_of(folder)
    if name == "openat":  # its second argument is where the path is
        path = _memory(folder, arguments[1], 256).partition(b"\0")[0].decode(errors="replace")
        return f"open() of {path}" if path else "open()"
    if name in ("poll", "ppoll"):  # its first argument is where the files are, each with a number of 4 bytes
        number = _memory(folder, arguments[0], 4)
        file = int.from_bytes(number, sys.byteorder)
        return f"poll() of {_file_text(folder, file)}" if number else "poll()"
    if name in _NAMES_WITH_FILE:
        return f"{name.removesuffix('64')}() of {_file_text(folder, arguments[0])}"
    return _IN_WORDS.get(name, f"{name}()" if name else "")


def _file_text(folder: Path, number: int) -> str:
    try:
        target = os.readlink(folder / "fd" / str(number))
    except OSError:
        return f"file {number}"
    if found := _SOCKET.fullmatch(target):
        target = _socket_text(folder, found[1])
    elif target.startswith("pipe:"):
        target = "a pipe"
    return f"standard input ({target})" if number == 0 else target


def _socket_text(folder: Path, inode: str) -> str:
    """A socket by the other end of its connection."""
    for name in ("tcp", "tcp6"):
        for line in _read(folder / "net" / name).splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[9] == inode:
                host, _, port = words[2].rpartition(":")
                return f"a connection to {_host(host)} port {int(port, 16)}"
    return "a socket"


def _host(text: str) -> str:
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


# Reading /proc ---------------------------------------------------------------------------------------------


def _memory(folder: Path, address: int, length: int) -> bytes:
    """Some bytes of the process, as far as they may be read."""
    try:
        with (folder / "mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(length)
    except (OSError, ValueError, OverflowError):
        return b""


def _table(path: Path) -> dict[str, str]:
    return dict(line.split(":", 1) for line in _read(path).splitlines() if ":" in line)


def _whole(status: dict[str, str], name: str, otherwise: int, base: int = 10) -> int:
    """A number, whatever unit stands behind it."""
    try:
        return int(status[name].split()[0], base)
    except (KeyError, IndexError, ValueError):
        return otherwise


def _entries(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from folder.iterdir()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it is gone, or of another user
        return ""


# How much data a process has moved -------------------------------------------------------------------------

_DIAG: Final = 4  # NETLINK_SOCK_DIAG; its structures are those of linux/inet_diag.h and linux/tcp.h
_BY_FAMILY: Final = 20
_DUMP: Final = 0x301
_WITH_INFO: Final = 2
_ESTABLISHED: Final = 1 << 1
_DONE: Final = (2, 3)  # an error, or the end
_INODE_AT: Final = 16 + 68
_ATTRIBUTES_AT: Final = 16 + 72
_BYTES_AT: Final = 120


def bytes_moved(pid: int, by_socket: Mapping[int, int]) -> int:
    """Bytes that a process has read from files, and moved over the TCP connections it has, so far."""
    moved = 0
    folder = _PROC / str(pid)
    with suppress(OSError):  # it is gone, or of another user
        for each in (folder / "fd").iterdir():
            with suppress(FileNotFoundError):
                found = _SOCKET.fullmatch(os.readlink(each))
                moved += by_socket.get(int(found[1]), 0) if found else 0
        moved += int((folder / "io").read_text().split()[1])  # rchar, which leaves out sockets
    return moved


def bytes_by_socket() -> dict[int, int]:
    """By inode: the bytes that each TCP connection of this machine has moved so far."""
    found: dict[int, int] = {}
    if sys.platform == "linux":
        with suppress(OSError, struct.error):
            for family in (socket.AF_INET, socket.AF_INET6):
                _read_from_kernel(family, found)
    return found


def _read_from_kernel(family: int, found: dict[int, int]) -> None:
    assert sys.platform == "linux"
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _DIAG) as kernel:
        kernel.settimeout(1.0)
        request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, _WITH_INFO, _ESTABLISHED)
        kernel.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _DUMP, 0, 0) + request)
        while True:
            data = kernel.recv(1 << 16)
            while data:
                size, kind = struct.unpack_from("=IH", data)
                if kind in _DONE:
                    return
                [inode] = struct.unpack_from("=I", data, _INODE_AT)
                found[inode] = _moved(data[_ATTRIBUTES_AT:size])
                data = data[(size + 3) & ~3 :]


def _moved(attributes: bytes) -> int:
    """The bytes that were acknowledged and received, of the attributes of a connection."""
    while len(attributes) >= 4:
        size, kind = struct.unpack_from("=HH", attributes)
        if kind == _WITH_INFO and size >= 4 + _BYTES_AT + 16:
            return sum(struct.unpack_from("=QQ", attributes, 4 + _BYTES_AT))
        attributes = attributes[max((size + 3) & ~3, 4) :]
    return 0


# Other programs --------------------------------------------------------------------------------------------

_NVIDIA_SMI_SECONDS: Final = 3.0
_PY_SPY_SECONDS: Final = 5.0
_MOST_CHARACTERS: Final = 200


def gpus_of(pids: Collection[int]) -> dict[int, str]:
    """By process: `GPU 3 at 100 %`."""
    if not pids or shutil.which("nvidia-smi") is None:
        return {}
    rows = _nvidia_smi("--query-gpu=uuid,index,utilization.gpu", 3)
    busy = {uuid: f"GPU {index} at {share} %" for uuid, index, share in rows}
    users = _nvidia_smi("--query-compute-apps=pid,gpu_uuid", 2)
    return {
        int(pid): busy[uuid] for pid, uuid in users if pid.isdigit() and int(pid) in pids and uuid in busy
    }


def _nvidia_smi(query: str, width: int) -> Iterator[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    for line in _output_of(command, _NVIDIA_SMI_SECONDS).splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == width:
            yield words


def py_spy_program() -> str | None:
    """Where it is: on the path, or beside this Python."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


def py_spy_stack(pid: int) -> Stack:
    """The stack of the main thread; empty if that cannot be had.

    py-spy reads the memory of a process from outside. So it also sees one that is stopped, or hangs in a
    driver. It must not pause it: that would interrupt system calls, and continue a process that is stopped.
    """
    program = py_spy_program()
    if program is None:
        return ()
    options = ("--nonblocking", "--full-filenames", "--json", "--pid", str(pid))
    text = _output_of([program, "dump", *options], _PY_SPY_SECONDS)
    try:
        main = next(
            each
            for each in json.loads(text)
            if each["thread_name"] == "MainThread" or each["os_thread_id"] == pid
        )
        return tuple(map(_frame, main["frames"][:MOST_FRAMES]))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return ()


def _frame(found: dict[str, Any]) -> Frame:
    """The function is named as in the code, without its class, as everywhere."""
    name, line = str(found["name"]), found["line"]
    short = name.rpartition(".")[2][:_MOST_CHARACTERS]
    return Frame(str(found["filename"]), line if isinstance(line, int) else 0, short)


def _output_of(command: Sequence[str], seconds: float) -> str:
    """What a program prints; nothing if it cannot be started, or takes too long.

    One that hangs in a driver does not even end when it is killed, so its end is not awaited.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return ""
    try:
        return process.communicate(timeout=seconds)[0]
    except (subprocess.SubprocessError, ValueError):
        process.kill()
        return ""
