"""Keeps other users of this machine away, on both sides of a connection.

Everybody with an account on a machine can connect to its loopback, and can listen there. A store server obeys
its clients, and a job obeys its store. So both check the user at the other end, as the system tells it,
before a request is carried out or sent.

A server checks at each accept. A client checks twice: before it sends anything, when the server may not have
accepted it yet and the user is the one who listens; and when the server has answered.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

from rallypoint.errors import AccessError, ConnectionLostError, UsageError
from rallypoint.store.machine.addresses import Address, has_left, is_local
from rallypoint.store.machine.socket_owner import NoUser, Owner, SocketTable
from rallypoint.store.server.loops.backend import parse_switch
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.requests import Nature, Scanner

USERS_VARIABLE: Final = "RALLYPOINT_ALLOW_USER"
"""Names or numbers of users, separated by commas. Every process of a job gets it."""

INSECURE_VARIABLE: Final = "RALLYPOINT_INSECURE"
"""A switch. Every process of a job gets it."""

ROOT: Final = 0

_GREETINGS: Final = Scanner(Limits(), frozenset((Op.VALIDATE, Op.ENTER, Op.PING)))
_GREETING_BYTES: Final = 2_048
"""More than any greeting has."""
_USER_FILE: Final = "/etc/passwd"


@dataclass(frozen=True)
class Access:
    """The users whom this process lets in and connects to."""

    users: frozenset[int]
    """This process's own user, root, and those that were named."""

    insecure: bool = False
    """Whether users are not checked."""

    def refuses(self, owner: Owner) -> bool:
        """Whether the process at the other end may not be served or asked."""
        if owner in self.users or self.insecure:  # first, as looking up a member of an enum takes longer
            return False
        return owner is not NoUser.UNTOLD and owner is not NoUser.ELSEWHERE


def access_of_environment(environ: Mapping[str, str] = os.environ) -> Access:
    """As RALLYPOINT_ALLOW_USER and RALLYPOINT_INSECURE say; UsageError for a wrong value."""
    switch = environ.get(INSECURE_VARIABLE, "")
    insecure = bool(switch) and parse_switch(switch, f"the variable {INSECURE_VARIABLE}")
    if sys.platform == "win32":  # where users have no numbers, and sockets tell none
        return Access(frozenset(), insecure)
    named = [each.strip() for each in environ.get(USERS_VARIABLE, "").split(",")]
    return Access(frozenset((os.geteuid(), ROOT, *map(_number_of, filter(None, named)))), insecure)


def _number_of(user: str) -> int:
    if user.isdecimal():
        return int(user)
    try:
        import pwd  # late: only names need it, and Windows has none

        return pwd.getpwnam(user).pw_uid
    except (ImportError, KeyError):
        raise UsageError(
            f"{user!r} is to be trusted (--allow-user, {USERS_VARIABLE}), but this machine has no such user",
            hint="write the user's name, or the number that `id -u NAME` prints",
        ) from None


def goes_plain(sock: socket.SocketType) -> bool:
    """Whether a client with a secret connects without TLS: within this machine, if users are checked."""
    return is_local(sock) and checks_users()


def checks_users() -> bool:
    """Whether this process can and does check the user at the other end of a connection."""
    return not access_of_environment().insecure and _system_tells()


@cache
def _system_tells() -> bool:
    with SocketTable() as table:
        return table.can_tell


class ClientGuard:
    """Checks the clients of one server; in one thread."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._table = SocketTable()

    def owners(self, arrivals: Sequence[tuple[socket.SocketType, Address]]) -> list[Owner]:
        """The users of clients that have just been accepted, each with its address: `check` them."""
        if self._access.insecure or not self._table.is_open:
            return [NoUser.UNTOLD] * len(arrivals)
        return self._table.clients_of(arrivals)

    def check(self, sock: socket.SocketType, owner: Owner) -> None:
        """AccessError if a client of this user may not connect: close it then.

        NoUser.UNTOLD passes: the caller needs other means to know these clients.
        """
        if not self._access.refuses(owner) or (owner is NoUser.GONE and _has_left_without_asking(sock)):
            return
        if isinstance(owner, NoUser):
            if has_left(sock):
                raise AccessError("it has left already, and what it asked was not carried out")
            raise AccessError(
                "the system does not tell which user it is: it hides its end of the connection",
                hint=f"to carry out what it asks nevertheless: --insecure, or {INSECURE_VARIABLE}=1",
            )
        raise AccessError(
            f"it belongs to another user of this machine, {_describe(owner)}", hint=_how_to_trust(owner)
        )

    def close(self) -> None:
        self._table.close()


def is_trusted_client(client: Address, server: Address) -> bool:
    """Whether a connection with these ends is from a trusted user. False if the system does not tell."""
    access = access_of_environment()
    if access.insecure:
        return True
    with SocketTable() as table:
        return table.owner_of(client, server) in access.users


class ServerGuard:
    """Checks the server of one client, before anything is sent and when it has answered; in one thread."""

    def __init__(self) -> None:
        self._access = access_of_environment()
        self._table = None if self._access.insecure else SocketTable()

    def __enter__(self) -> ServerGuard:
        return self

    def __exit__(self, *_: object) -> None:
        if self._table is not None:
            self._table.close()

    def check(self, sock: socket.SocketType, server: str) -> None:
        """AccessError if the server at the other end is another user's; ConnectionLostError if it is gone.

        `server` is its name in messages.
        """
        if self._table is not None:
            _judge_server(self._access, self._table.server_of(sock), server)


def check_listener(address: Address, server: str) -> None:
    """AccessError if another user listens at an address of this machine.

    For clients whose socket is out of reach. Less sure than `ServerGuard`: when they connect, another process
    may listen.
    """
    access = access_of_environment()
    if access.insecure:
        return
    with SocketTable() as table:
        owner = table.listener_at(address)
    if owner is not NoUser.GONE:
        _judge_server(access, owner, server)


def _judge_server(access: Access, owner: Owner, server: str) -> None:
    if not access.refuses(owner):
        return
    if isinstance(owner, NoUser):
        raise ConnectionLostError(f"{server} has closed the connection, or hides which user it is")
    raise AccessError(
        f"what listens at {server} belongs to another user of this machine, {_describe(owner)}: nothing was "
        "asked of it, since it could control this job",
        hint=f"take another port; or, if it is meant, {_how_to_trust(owner)}",
    )


def _has_left_without_asking(sock: socket.SocketType) -> bool:
    """Whether a client has closed its end, and has sent nothing but maybe a greeting.

    That is no attack: it has probed the port, or is a relay that another process has answered first. What it
    has sent is read here, so that nobody carries it out.
    """
    said = b""
    try:
        said = sock.recv(_GREETING_BYTES)
        if said and sock.recv(1):
            return False
    except BlockingIOError:  # it is still there
        return False
    except OSError:  # it has reset the connection
        pass
    return _GREETINGS.classify(said).nature is not Nature.OTHER


def _describe(user: int) -> str:
    name = _local_name_of(user)
    return f"{name} (uid {user})" if name else f"uid {user}"


def _how_to_trust(user: int) -> str:
    name = _local_name_of(user) or user
    return f"trust that user with --allow-user {name} or {USERS_VARIABLE}={name}"


@lru_cache(maxsize=1024)
def _local_name_of(user: int) -> str:
    """The name of a user in /etc/passwd; empty for other users.

    A name service is not asked: that may take seconds, in which a server would serve nobody.
    """
    try:
        with open(_USER_FILE, encoding="utf-8", errors="replace") as file:
            rows = (line.split(":", 3) for line in file)
            return next((row[0] for row in rows if len(row) > 3 and row[2] == str(user)), "")
    except OSError:
        return ""
