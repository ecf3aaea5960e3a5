"""The line between a server process and its host, the process that started it: orders down, answers up.

Orders come on standard input. This is a Unix socket, which carries the sockets to serve on as well; on
Windows it is a pipe, and copies of the sockets follow the order. An order is its length, then JSON; length 0
means: end now. When the line closes, the host is gone, or has let go of the process.

Answers are marked lines on what was standard output at the start. Lines without the mark come from whatever
else an interpreter runs at its start.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from collections.abc import Sequence
from struct import Struct
from subprocess import Popen
from typing import IO, Any, Final

_HEAD: Final = Struct("<Q")

END_NOW: Final = _HEAD.pack(0)
"""Ends a process even if it stays for its clients otherwise."""
WORD_BYTES: Final = _HEAD.size

ANSWER_MARK: Final = "rallypoint answers: "
"""Begins each answer."""

_CHECK_SECONDS: Final = 1.0
_AT_ONCE: Final = 200  # sockets in one message: no system takes many more

Order = dict[str, Any]
"""What the host wants served, and how."""


def give(process: Popen[bytes], order: Order, sockets: Sequence[socket.socket]) -> None:
    """Send a process its order, and the sockets to serve on. OSError if it has ended."""
    line = pipe(process.stdin)
    shares: list[bytes] = []
    if sys.platform == "win32":
        shares = [each.share(process.pid) for each in sockets]
    text = json.dumps({**order, "sockets": [len(each) for each in shares] or len(sockets)}).encode()
    data = b"".join([_HEAD.pack(len(text)), text, *shares])
    if sys.platform == "win32":
        line.write(data)
        line.flush()
    else:
        with _socket_of(line.fileno()) as commands:
            commands.sendall(data)
            files = [each.fileno() for each in sockets]
            for start in range(0, len(files), _AT_ONCE):
                socket.send_fds(commands, [b"\n"], files[start : start + _AT_ONCE])


def _socket_of(file: int) -> socket.socket:
    """Another descriptor of a socket, blocking whatever the default of this process is."""
    made = socket.socket(fileno=os.dup(file))
    made.settimeout(None)
    return made


def pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    """An end of the line, which every hosted process has."""
    assert pipe is not None
    return pipe


def _dup_above_standard_files(file: int) -> int:
    if sys.platform == "win32":
        return os.dup(file)
    import fcntl

    return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)


class Host:
    """The host of this process. Made once, at the start: from then on nothing else prints to the host."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._commands = sys.stdin.buffer
        sys.stdout.flush()
        self._answers = _dup_above_standard_files(sys.stdout.fileno())
        # From here on, `print` goes to standard error.
        elsewhere = sys.stderr.fileno() if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY)
        os.dup2(elsewhere, sys.stdout.fileno())

    def fileno(self) -> int:
        """The file that is readable when a word has come, or the end."""
        return self._commands.fileno()

    def read_word(self) -> bytes:
        """Wait for the next word; empty if the line has ended."""
        return os.read(self.fileno(), WORD_BYTES)

    @property
    def has_ended(self) -> bool:
        """Whether this process has another parent by now. Never on Windows.

        The line alone does not tell: forks of the host have it as well, and may outlive the host.
        """
        return sys.platform != "win32" and os.getppid() != self._parent

    def await_end(self) -> None:
        """Wait until the host has ended, or has let go of this process.

        On Windows a pipe cannot be polled. So this reads, and below the buffer: a process that ends while a
        thread holds the buffer's lock is aborted by Python.
        """
        if sys.platform == "win32":
            while self.read_word():
                pass
        else:
            while not self.has_ended and not select.select([self], [], [], _CHECK_SECONDS)[0]:
                pass

    def read_order(self) -> tuple[Order, list[socket.socket]] | None:
        """Wait for the next order and its sockets; None: to end now, or the host has ended."""
        if sys.platform == "win32":
            head = self._commands.read(WORD_BYTES)
            if head in (b"", END_NOW):
                return None
            order: Order = json.loads(self._commands.read(*_HEAD.unpack(head)))
            return order, [socket.fromshare(self._commands.read(size)) for size in order.pop("sockets")]
        with _socket_of(self.fileno()) as line:
            head = line.recv(WORD_BYTES, socket.MSG_WAITALL)
            if head in (b"", END_NOW):
                return None
            (size,) = _HEAD.unpack(head)
            text = line.recv(size, socket.MSG_WAITALL)
            if len(text) < size:
                return None
            order = json.loads(text)
            sockets: list[socket.socket] = []
            for _ in range(0, order["sockets"], _AT_ONCE):
                _, files, *_ = socket.recv_fds(line, 1, _AT_ONCE)
                sockets += [socket.socket(fileno=each) for each in files]
        for each in sockets:
            each.set_inheritable(False)
        return order, sockets

    def answer(self, message: dict[str, str]) -> None:
        """Send an answer, on a line of its own whatever else has been printed."""
        try:
            os.write(self._answers, f"\n{ANSWER_MARK}{json.dumps(message)}\n".encode())
        except OSError:  # it has ended
            pass
