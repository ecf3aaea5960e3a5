"""Makes calls that a signal can end early (signal(7)), each once, for a while. It is run as a rank.

Prints a line of JSON for each: its name, how long it took, what it returned, and errno.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

SECONDS = 0.5
MILLISECONDS = int(SECONDS * 1000)
C = ctypes.CDLL(None, use_errno=True)
C_WITH_GIL = ctypes.PyDLL(None, use_errno=True)
FUTEX, IO_SETUP, IO_GETEVENTS = {"x86_64": (202, 206, 208), "aarch64": (98, 0, 4)}[os.uname().machine]
SHORT = ctypes.byref((ctypes.c_long * 2)(0, int(SECONDS * 1e9)))
"""A timespec."""


def in_a_while() -> ctypes.Array[ctypes.c_long]:
    """A timespec of the clock."""
    nanoseconds = time.time_ns() + int(SECONDS * 1e9)
    return (ctypes.c_long * 2)(nanoseconds // 10**9, nanoseconds % 10**9)


def later(act: Callable[[], object]) -> None:
    threading.Timer(SECONDS, act).start()


def timeout_of(sock: socket.socket, option: int) -> int:
    sock.setsockopt(socket.SOL_SOCKET, option, bytes((ctypes.c_long * 2)(0, int(SECONDS * 1e6))))
    return sock.fileno()


ENDS = socket.socketpair()
SERVER = socket.create_server(("127.0.0.1", 0), backlog=1)
FOLDER = tempfile.mkdtemp()
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
FIFO, LOCK = os.path.join(FOLDER, "fifo"), os.path.join(FOLDER, "lock")
BYTES = ctypes.create_string_buffer(4096)


def connect() -> int:
    """The server accepts nobody, and its queue is full."""
    clients = [socket.socket() for _ in range(4)]
    for each in clients:
        each.setblocking(False)
        each.connect_ex(SERVER.getsockname())
    with socket.socket() as sock:
        host, port = SERVER.getsockname()
        address = socket.AF_INET.to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + socket.inet_aton(host)
        return int(C.connect(timeout_of(sock, socket.SO_SNDTIMEO), address + bytes(8), 16))


def send() -> int:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(bytes(4096))
        near.setblocking(True)
        return int(C.send(timeout_of(near, socket.SO_SNDTIMEO), bytes(4096), 4096, 0))


def message() -> int:
    queue_id = C.msgget(0, 0o600)
    later(lambda: C.msgsnd(queue_id, ctypes.byref((ctypes.c_long * 2)(1, 7)), 8, 0))
    got = C.msgrcv(queue_id, BYTES, 8, 0, 0)
    C.msgctl(queue_id, 0, None)
    return int(got)


def semaphores() -> int:
    found = C.semget(0, 1, 0o600)
    got = C.semtimedop(found, (ctypes.c_short * 3)(0, -1, 0), 1, SHORT)
    C.semctl(found, 0, 0)
    return int(got)


def semaphore() -> int:
    found = ctypes.create_string_buffer(64)
    C.sem_init(found, 0, 0)
    return int(C.sem_timedwait(found, in_a_while()))


def events() -> int:
    context = ctypes.c_ulong(0)
    if C.syscall(IO_SETUP, 8, ctypes.byref(context)) != 0:
        time.sleep(SECONDS)
        return 0
    return int(C.syscall(IO_GETEVENTS, context, 1, 1, BYTES, SHORT))


def notices() -> int:
    file = C.inotify_init1(0)
    C.inotify_add_watch(file, FOLDER.encode(), 0x100)
    later(lambda: open(os.path.join(FOLDER, "new"), "w").close())
    return min(int(C.read(file, BYTES, 4096)), 1)


def lock(library: ctypes.CDLL) -> int:
    holder, waiting = os.open(LOCK, os.O_CREAT | os.O_RDWR), os.open(LOCK, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    later(lambda: os.close(holder))
    got = library.flock(waiting, fcntl.LOCK_EX)
    os.close(waiting)
    return int(got)


def record_lock() -> int:
    """F_OFD_SETLKW."""
    holder, waiting = os.open(LOCK, os.O_CREAT | os.O_RDWR), os.open(LOCK, os.O_RDWR)
    whole = ctypes.create_string_buffer(fcntl.F_WRLCK.to_bytes(2, sys.byteorder) + bytes(30), 32)
    C.fcntl(holder, 38, whole)
    later(lambda: os.close(holder))
    got = C.fcntl(waiting, 38, whole)
    os.close(waiting)
    return int(got)


def fifo(open_it: Callable[[], int]) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkfifo(FIFO)
    later(lambda: open(FIFO, "w").close())
    return min(open_it(), 0)


def child(wait: Callable[[int], int]) -> int:
    return int(wait(subprocess.Popen(["sleep", str(SECONDS)]).pid) > 0)


def pipe(read: Callable[[int], int]) -> int:
    ends = os.pipe()
    later(lambda: os.write(ends[1], b"x"))
    return read(ends[0])


def full_pipe() -> int:
    ends = os.pipe()
    size = fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    os.write(ends[1], bytes(size))
    later(lambda: os.read(ends[0], size))
    return int(C.write(ends[1], b"x", 1))


def pause() -> int:
    """It ends by the signal that is sent to it, and by no other."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR1, True)
    later(lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1))
    return int(C.pause())


def sleep() -> int:
    time.sleep(SECONDS)
    return 0


def fails_with_timeout(call: Callable[[], object]) -> int:
    try:
        call()
    except (TimeoutError, queue.Empty, subprocess.TimeoutExpired):
        return -1
    return 0


def with_timeout(sock: socket.socket) -> socket.socket:
    sock.settimeout(SECONDS)
    return sock


EPOLL = select.epoll()
LOCKED = threading.Lock()
LOCKED.acquire()
MASK = ctypes.create_string_buffer((1 << signal.SIGUSR2 - 1).to_bytes(128, "little"), 128)

# What it returns, errno if that is -1, and the call.
CALLS: dict[str, tuple[int, int, Callable[[], int]]] = {
    "usleep": (0, 0, lambda: C.usleep(int(SECONDS * 1e6))),
    "nanosleep": (0, 0, lambda: C.nanosleep(SHORT, None)),
    "clock_nanosleep": (0, 0, lambda: C.clock_nanosleep(1, 0, SHORT, None)),
    "poll": (0, 0, lambda: C.poll(None, 0, MILLISECONDS)),
    "ppoll": (0, 0, lambda: C.ppoll(None, 0, SHORT, None)),
    "select": (0, 0, lambda: C.select(0, None, None, None, (ctypes.c_long * 2)(0, int(SECONDS * 1e6)))),
    "pselect": (0, 0, lambda: C.pselect(0, None, None, None, SHORT, None)),
    "epoll_wait": (0, 0, lambda: C.epoll_wait(EPOLL.fileno(), BYTES, 1, MILLISECONDS)),
    "epoll_pwait": (0, 0, lambda: C.epoll_pwait(EPOLL.fileno(), BYTES, 1, MILLISECONDS, None)),
    "recv": (-1, errno.EAGAIN, lambda: C.recv(timeout_of(ENDS[0], socket.SO_RCVTIMEO), BYTES, 1, 0)),
    "accept": (-1, errno.EAGAIN, lambda: C.accept(timeout_of(SERVER, socket.SO_RCVTIMEO), None, None)),
    "connect": (-1, errno.EINPROGRESS, connect),
    "send": (-1, errno.EAGAIN, send),
    "futex": (-1, errno.ETIMEDOUT, lambda: C.syscall(FUTEX, (ctypes.c_int * 1)(0), 0, 0, SHORT, None, 0)),
    "sem_timedwait": (-1, errno.ETIMEDOUT, semaphore),
    "semtimedop": (-1, errno.EAGAIN, semaphores),
    "msgrcv": (8, 0, message),
    "sigtimedwait": (-1, errno.EAGAIN, lambda: C.sigtimedwait(MASK, None, SHORT)),
    "io_getevents": (0, 0, events),
    "inotify": (1, 0, notices),
    "flock": (0, 0, lambda: lock(C)),
    "F_OFD_SETLKW": (0, 0, record_lock),
    "open": (0, 0, lambda: fifo(lambda: int(C.open(FIFO.encode(), os.O_RDONLY)))),
    "waitpid": (1, 0, lambda: child(lambda pid: int(C.waitpid(pid, None, 0)))),
    "read": (1, 0, lambda: pipe(lambda end: int(C.read(end, BYTES, 1)))),
    "write": (1, 0, full_pipe),
    "pause": (-1, errno.EINTR, pause),
    "usleep with the GIL": (0, 0, lambda: C_WITH_GIL.usleep(int(SECONDS * 1e6))),
    "poll with the GIL": (0, 0, lambda: C_WITH_GIL.poll(None, 0, MILLISECONDS)),
    "recv with the GIL": (
        -1,
        errno.EAGAIN,
        lambda: C_WITH_GIL.recv(timeout_of(ENDS[0], socket.SO_RCVTIMEO), BYTES, 1, 0),
    ),
    "time.sleep": (0, 0, sleep),
    "select.select": (0, 0, lambda: len(select.select([], [], [], SECONDS)[0])),
    "select.poll": (0, 0, lambda: len(select.poll().poll(MILLISECONDS))),
    "epoll.poll": (0, 0, lambda: len(EPOLL.poll(SECONDS))),
    "socket.recv": (-1, 0, lambda: fails_with_timeout(lambda: with_timeout(ENDS[1]).recv(1))),
    "Lock.acquire": (0, 0, lambda: LOCKED.acquire(timeout=SECONDS)),
    "Event.wait": (0, 0, lambda: threading.Event().wait(SECONDS)),
    "Queue.get": (-1, 0, lambda: fails_with_timeout(lambda: queue.Queue[int]().get(timeout=SECONDS))),
    "Popen.wait": (0, 0, lambda: subprocess.Popen(["sleep", str(SECONDS)]).wait()),
    "os.read": (1, 0, lambda: pipe(lambda end: len(os.read(end, 1)))),
    "os.open": (0, 0, lambda: fifo(lambda: os.open(FIFO, os.O_RDONLY))),
    "os.waitpid": (1, 0, lambda: child(lambda pid: os.waitpid(pid, 0)[0])),
    "signal.sigtimedwait": (0, 0, lambda: int(bool(signal.sigtimedwait([signal.SIGUSR2], SECONDS)))),
}


def main() -> None:
    part, parts = map(int, sys.argv[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    for name in list(CALLS)[part::parts]:
        ctypes.set_errno(0)
        began = time.monotonic()
        value = CALLS[name][2]()
        seconds = time.monotonic() - began
        number = ctypes.get_errno() if value == -1 else 0
        print(json.dumps([name, seconds, value, number]), flush=True)


if __name__ == "__main__":
    main()
