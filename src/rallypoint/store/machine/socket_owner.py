"""The user at the other end of a connection within this machine, as the Linux kernel tells it.

The question is asked over a netlink socket (NETLINK_SOCK_DIAG): which user has the TCP socket with these
ends, those of our own exchanged? That needs no privilege, and the answer is there when the question has been
sent. A server keeps its netlink socket; where it is compiled, it asks about simultaneous clients in one
message, which takes half of the time. A client opens a netlink socket for each connect, and asks twice.

What the kernel answers, as tried out on Linux 6.18 and read in the sources of older ones:

- a socket that a process holds has an inode, and the user who has made or accepted it;
- a socket without an inode is not accepted yet, or closed. Before Linux 6.17 it has user 0, from there on the
  user of its listener or of its last holder. So user 0 without an inode is not taken for root;
- a reset socket is not in the table any more, though what it has sent can still be read. One that is bound to
  an interface is not found without the interface's name;
- where no established socket fits, the answer is one that listens on the port;
- a user without a number in our user namespace is the overflow user (65534).
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections.abc import Sequence
from enum import Enum
from functools import cache, lru_cache
from socket import htons
from typing import Final

from rallypoint.store.machine.addresses import Address, is_within_machine, plain_host

try:
    from rallypoint.store.machine.native import users_at_other_ends
except ImportError:  # it is not compiled, or not for this system
    users_at_other_ends = None  # type: ignore[assignment]

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_REQUEST: Final = 0x1
_DUMP: Final = 0x300
_ERROR: Final = 2
_DONE: Final = 3
_LISTEN: Final = 10
_ALL_STATES: Final = 0xFFFFFFFF
_NO_COOKIE: Final = 0xFFFFFFFF
_LAST_NUMBER: Final = 0xFFFFFFFF
"""After it, questions are numbered from 0 again."""
_TCP: Final = int(socket.IPPROTO_TCP)

_HEAD: Final = struct.Struct("=4xH2xI4x")
"""The type and the number of an answer; without length, flags and port."""
_QUESTION: Final = struct.Struct("=IHHI4xBBxxIHH16s16sIII")
"""Length, type, flags and number; family, protocol and states; the ports and addresses of both ends, in
network order; interface and cookie."""
_QUESTION_BYTES: Final = _QUESTION.size
_pack_question = _QUESTION.pack
_ANSWER: Final = struct.Struct("=xB62xII")
"""State, user and inode; without the addresses and counts between them."""
_STATUS: Final = struct.Struct("=i")
_READ_BYTES: Final = 448
"""More than we use of an answer, and little enough for the interpreter's own allocator."""
_AT_ONCE: Final = 32
"""The most questions for `users_at_other_ends`: the answers fit into any usual netlink socket."""

_HOSTS_KEPT: Final = 1_024

_TOO_MANY_FILES: Final = (errno.EMFILE, errno.ENFILE)

_Row = tuple[int, int, int]
"""A socket's state, user and inode."""


class NoUser(Enum):
    """Why the system names no user for the other end of a connection."""

    UNTOLD = "the system does not tell"
    """Not on this system, not in this container, or a user without a number in this container."""

    GONE = "the socket at the other end is closed, or hidden"
    """The connection is within this machine, but its other end is not found, or has no owner any more.

    An attacker can cause that: by closing right after its requests, which can still be read, or by binding
    its socket to an interface. So this must not count as UNTOLD.
    """

    ELSEWHERE = "it is another machine"


Owner = int | NoUser
"""The number of the user at the other end of a connection, or why there is none."""


class SocketTable:
    """The kernel's table of TCP sockets. For one thread, and not for use in a fork."""

    def __init__(self) -> None:
        """OSError if too many files are open. Any other failure shows as `NoUser.UNTOLD`."""
        self._netlink = _open_netlink()
        self._number = 0
        self._answers = False  # whether it has answered once

    def __enter__(self) -> SocketTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    @property
    def is_open(self) -> bool:
        """Whether the system can be asked."""
        return self._netlink is not None

    def owner_of(self, local: Address, remote: Address) -> Owner:
        """The user of the socket with these ends; what is local to that socket is remote to ours."""
        return _owner_at(self._find(local, remote), local, remote)

    def clients_of(self, arrivals: Sequence[tuple[socket.SocketType, Address]]) -> list[Owner]:
        """The users of clients that have just been accepted, each with its address."""
        # On Linux, a socket that was reset keeps its own address.
        if users_at_other_ends is None or self._netlink is None:
            return [self.owner_of(address, sock.getsockname()) for sock, address in arrivals]
        owners: list[Owner] = []
        no_user = _overflow_user()
        for start in range(0, len(arrivals), _AT_ONCE):
            some = arrivals[start : start + _AT_ONCE]
            files = [sock.fileno() for sock, _ in some]
            users = users_at_other_ends(self._netlink.fileno(), self._number, files)
            self._number = self._number + len(some) & _LAST_NUMBER
            for user, (sock, address) in zip(users, some, strict=True):
                if user is None or (user < 0 and not self._answers):
                    owners.append(self.owner_of(address, sock.getsockname()))
                elif user < 0:
                    owners.append(_owner_at(NoUser.GONE, address, sock.getsockname()))
                else:
                    self._answers = True
                    owners.append(NoUser.UNTOLD if user == no_user else user)
        return owners

    def server_of(self, sock: socket.SocketType) -> Owner:
        """The user at the other end of a connected socket; of the listener, if it has not been accepted yet.

        So ask again when an answer has come. OSError if the connection is reset.
        """
        server = sock.getpeername()
        owner = self.owner_of(server, sock.getsockname())
        return self.listener_at(server) if owner is NoUser.GONE else owner

    def listener_at(self, address: Address) -> Owner:
        """The user who listens at an address of this machine; GONE if nobody does."""
        nowhere = ("::" if ":" in plain_host(address) else "0.0.0.0", 0)
        row = self._find(address, nowhere)
        if isinstance(row, NoUser):
            return row
        return _owner(row) if row[0] == _LISTEN else NoUser.GONE

    def _find(self, local: Address, remote: Address) -> _Row | NoUser:
        """What the kernel says of a socket."""
        if self._netlink is None:
            return NoUser.UNTOLD
        try:
            answer = self._ask(_question(self._number + 1 & _LAST_NUMBER, local, remote))
            kind, _ = _HEAD.unpack_from(answer)
            if kind == _SOCK_DIAG_BY_FAMILY:
                row: _Row = _ANSWER.unpack_from(answer, _HEAD.size)
                self._answers = True
                return row
            if kind == _ERROR and _status(answer) == -errno.ENOENT and self._is_there():
                return NoUser.GONE
        except (OSError, struct.error):
            pass
        return NoUser.UNTOLD

    @property
    def can_tell(self) -> bool:
        """Whether the system tells users at all."""
        try:
            return self.is_open and self._is_there()
        except (OSError, struct.error):
            return False

    def _is_there(self) -> bool:
        """Whether this kernel has the table. Without it, it answers ENOENT as well."""
        if not self._answers:
            head = _QUESTION_BYTES, _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, self._number + 1 & _LAST_NUMBER
            nothing = _pack_question(*head, socket.AF_INET, _TCP, 0, 0, 0, b"", b"", 0, 0, 0)
            answer = self._ask(nothing)
            self._answers = _HEAD.unpack_from(answer)[0] == _DONE and _status(answer) >= 0
        return self._answers

    def _ask(self, question: bytes) -> bytes:
        """Send a question, which has the next number; return its answer. BlockingIOError if there is none."""
        assert self._netlink is not None
        self._number = self._number + 1 & _LAST_NUMBER
        self._netlink.send(question)
        while True:
            answer = self._netlink.recv(_READ_BYTES)
            if _HEAD.unpack_from(answer)[1] == self._number:  # else it answers one that was given up
                return answer


def _open_netlink() -> socket.socket | None:
    if sys.platform != "linux":
        return None
    try:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        return socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG)
    except OSError as error:
        if error.errno in _TOO_MANY_FILES:
            raise
        return None


def _question(number: int, local: Address, remote: Address) -> bytes:
    family, here = _packed(local[0])
    _, there = _packed(remote[0])
    interface = local[3] if len(local) > 3 else 0  # of a link-local address
    head = _QUESTION_BYTES, _SOCK_DIAG_BY_FAMILY, _REQUEST, number, family, _TCP, _ALL_STATES
    ends = htons(local[1]), htons(remote[1]), here, there
    return _pack_question(*head, *ends, interface, _NO_COOKIE, _NO_COOKIE)


@lru_cache(_HOSTS_KEPT)
def _packed(host: str) -> tuple[int, bytes]:
    """The family of an address, and its bytes; OSError if it is none."""
    plain = plain_host((host,))
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    return int(family), socket.inet_pton(family, plain)


def _status(answer: bytes) -> int:
    status: int = _STATUS.unpack_from(answer, _HEAD.size)[0]
    return status


def _owner_at(row: _Row | NoUser, local: Address, remote: Address) -> Owner:
    if isinstance(row, tuple) and row[0] != _LISTEN:
        return _owner(row)
    if row is NoUser.UNTOLD:
        return NoUser.UNTOLD
    return NoUser.GONE if is_within_machine(local, remote) else NoUser.ELSEWHERE


def _owner(row: _Row) -> Owner:
    _, user, inode = row
    if user == _overflow_user():
        return NoUser.UNTOLD
    return user if inode or user else NoUser.GONE


@cache
def _overflow_user() -> int | None:
    """The number of all users without one; None if every user has one here."""
    try:
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            if file.read().split() == ["0", "0", "4294967295"]:
                return None
        with open("/proc/sys/kernel/overflowuid", encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65_534
