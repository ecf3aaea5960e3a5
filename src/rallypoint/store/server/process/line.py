"""The line between a server process and the process that hosts it: orders go one way, answers the other.

Orders come on standard input, which is a Unix socket, so that sockets to serve on come with them; on Windows
it is a pipe, and copies of the sockets stand behind the order. An order is its length, then JSON. A length
that no order has is a word of its own. When the line ends, the host is gone, or has let go of the process.

Answers are lines on what was standard output at the start, each with a mark. Lines without it come from
whatever else an interpreter runs at its start, and are not ours.
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
"""The last word to a process that is not to stay for its clients."""
WORD_BYTES: Final = _HEAD.size

ANSWER_MARK: Final = "rallypoint answers: "
"""Stands before each answer."""

_CHECK_SECONDS: Final = 1.0
_AT_ONCE: Final = 200  # no system takes many more sockets at once

Order = dict[str, Any]
"""What the host asks for."""


def give(process: Popen[bytes], order: Order, sockets: Sequence[socket.socket]) -> None:
    """Give a process its order, and sockets to serve on. OSError if it has ended."""
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
    """Another descriptor of a socket, which blocks, whatever is the default in this process."""
    made = socket.socket(fileno=os.dup(file))
    made.settimeout(None)
    return made


def pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    """An end of the line; all hosted processes have it."""
    assert pipe is not None
    return pipe


def _dup_above_standard_files(file: int) -> int:
    if sys.platform == "win32":
        return os.dup(file)
    import fcntl

    return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)


class Host:
    """The process that hosts this one. Made once, at the start: then nothing else reaches it by accident."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._commands = sys.stdin.buffer
        sys.stdout.flush()
        self._answers = _dup_above_standard_files(sys.stdout.fileno())
        # What is printed from here on is for people, or for nobody.
        elsewhere = sys.stderr.fileno() if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY)
        os.dup2(elsewhere, sys.stdout.fileno())

    def fileno(self) -> int:
        """The file that can be read when there is a word, or the end."""
        return self._commands.fileno()

    def read_word(self) -> bytes:
        """The next word; nothing: the line has ended. Waits for it."""
        return os.read(self.fileno(), WORD_BYTES)

    @property
    def has_ended(self) -> bool:
        """Whether the host is known to have ended: this process has got another parent. Not on Windows.

        The line alone does not tell: if the host forked, its children have it as well, and may outlive it.
        """
        return sys.platform != "win32" and os.getppid() != self._parent

    def await_end(self) -> None:
        """Wait until the host has ended, or has let go of this process.

        On Windows a pipe cannot be polled. This reads below the buffer: its lock would be held when the
        process ends for another reason, and Python would abort.
        """
        if sys.platform == "win32":
            while self.read_word():
                pass
        else:
            while not self.has_ended and not select.select([self], [], [], _CHECK_SECONDS)[0]:
                pass

    def read_order(self) -> tuple[Order, list[socket.socket]] | None:
        """The next order, and the sockets that come with it; None: there is none, or the host has ended."""
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
        """Answer, on a line of its own, whatever else has been printed."""
        try:
            os.write(self._answers, f"\n{ANSWER_MARK}{json.dumps(message)}\n".encode())
        except OSError:  # it has ended
            pass
