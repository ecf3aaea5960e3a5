"""Reaching a server that may not be up yet: retries with jittered back-off, until a deadline.

When the deadline passes, the error has a line per address that was tried, and a hint what to check.

A machine may have a relay for a store. MASTER_ADDR and MASTER_PORT name the store, alike on all machines,
because scripts use them for more than the store. A launcher that has started a relay here names the relay in
RALLYPOINT_RELAY, and the store that it is for in RALLYPOINT_RELAY_OF, both as HOST:PORT. A client of exactly
that address and port connects to the relay (`relay_for`). Every other address is left alone.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rallypoint.errors import (
    AccessError,
    ConnectError,
    ConnectionLostError,
    ProtocolError,
    RallypointError,
    StoreTimeoutError,
)
from rallypoint.store.connect.connection import (
    RELAY_VARIABLE,
    STORE_VARIABLE,
    Connection,
    Stream,
    guard,
    who_am_i,
)
from rallypoint.store.connect.deadline import Deadline, in_thread, within
from rallypoint.store.machine.addresses import (
    format_address,
    is_numeric,
    is_this_machine,
    look_up,
    reason_of,
    split_address,
)
from rallypoint.store.rollcall.identity import Identity, Role
from rallypoint.store.server.guard.other_users import ServerGuard, check_listener, goes_plain
from rallypoint.store.server.guard.secret import Secret, Token, job_secret, snapshot_credentials

Proof = Secret | Token | None
"""What a client proves to have, if anything."""

_T = TypeVar("_T")

_Handshake = Callable[[Connection, Deadline], None]

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
_CONNECT_SECONDS = 10.0

_NOT_RESOLVED = "name not resolved"
_UNKNOWN_NAME = (
    "the name is not known here: use an IP address, or add it to the hosts file; in Kubernetes, a pod's name "
    "is POD.SERVICE, with a headless service that has publishNotReadyAddresses: true"
)
_NO_ROUTE = "there is no route to that machine: another network, or an address that leads nowhere"
SILENT = -1  # not an error of the system: connected, but no answer
UNRESOLVED = -2  # nor is this: the name leads to no address
_HINTS = {
    SILENT: "something listens there, but gives no answer: a store that is stopped, or that may open no "
    "more files, or whose engine is away (its log says so), or no store at all: check the port",
    errno.ECONNREFUSED: "nothing listens there: is the process that holds the store up, on this port? "
    "(Of a replicated store, only the leader listens.)",
    errno.ECONNRESET: "it closes the connection at once, and its log says why: on this machine, a store "
    "takes no other users than its own and root, unless it is told to (--allow-user)",
    errno.ETIMEDOUT: "no answer at all: a firewall, or an address that leads nowhere",
    errno.EHOSTUNREACH: _NO_ROUTE,
    errno.ENETUNREACH: _NO_ROUTE,
    errno.EMFILE: "this process has too many open files: raise the limit (ulimit -n)",
}


def connect(
    host: str,
    port: int,
    deadline: Deadline,
    who: Identity | None = None,
    *,
    snapshot_only: bool = False,
    store: str = "",
    attempts: Attempts | None = None,
    after_try: Callable[[Sequence[str]], None] = lambda _: None,
) -> Connection:
    """A connection that has shaken hands; ConnectError when the deadline passes before.

    AccessError, at once, if an address of this machine is held by another user.

    It tells the server the identity of this process, `who`: by default, as the launcher's variables say.
    With `snapshot_only`, only snapshots can be requested, for which a token is enough. `store` is the name of
    the store, if the server has several. After each try that has failed, `after_try` is told the
    addresses of the host, none if its name is not known; what it raises ends the tries. Another thread may
    read `attempts` meanwhile: they say why there is no connection yet.
    """
    proof = snapshot_credentials() if snapshot_only else job_secret()
    attempts = attempts or Attempts(host, port)
    pause = _FIRST_PAUSE
    own = who or who_am_i()

    def shake_hands(connection: Connection, patience: Deadline) -> None:
        attempts.code, attempts.reason = SILENT, "it does not answer"
        if snapshot_only:
            connection.begin_as_tool(own, store, patience)
        else:
            connection.shake_hands(own, patience)

    while True:
        connection = _try_all(host, port, shake_hands, proof, deadline, attempts)
        if connection is not None:
            return connection
        after_try(attempts.addresses)
        nap = pause * random.uniform(0.5, 1.0)
        if deadline.remaining <= nap:
            raise attempts.failure(deadline)
        time.sleep(nap)
        pause = min(pause * 2, _LONGEST_PAUSE)


def first_to_answer(places: Sequence[tuple[str, int]], ask: Callable[[str, int], _T]) -> _T:
    """What `ask` returns for the first place that answers: a store that moves is at one of them.

    A place that refuses this process ends the search at once, with its AccessError.
    """
    if len(places) == 1:
        return ask(*places[0])
    from queue import SimpleQueue  # late: most stores are at one place

    answers: SimpleQueue[_T | BaseException] = SimpleQueue()
    for place in places:
        in_thread(partial(ask, *place), answers.put, answers.put)
    errors = []
    for _ in places:
        answer = answers.get()
        if not isinstance(answer, BaseException):
            return answer
        if isinstance(answer, AccessError) or not isinstance(answer, RallypointError):
            raise answer
        errors.append(answer)
    failed = [each.message for each in errors]
    hint = next((each.hint for each in errors if each.hint), "")
    raise ConnectError("\n".join(["the store answers at none of its addresses:", *failed]), hint=hint)


class Attempts:
    """The attempts so far: the last error of each address, and how often."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.place = format_address(host, port)
        self.code, self.reason = UNRESOLVED, "the resolver does not answer"
        """Why the last attempt failed, or what it waits for: errno, SILENT or UNRESOLVED; and in words."""
        self._last: dict[str, str] = {}
        self._codes: Counter[int] = Counter()
        self._was_known = is_numeric(host)
        self.addresses: list[str] = []
        """Those of the host, when it was last asked for."""
        self.rounds = 0

    def begin(self, addresses: Sequence[tuple[int, tuple[str, int]]]) -> None:
        """Another round, at these addresses; none if the name is not known."""
        self.rounds += 1
        self.addresses = [address[0] for _, address in addresses]
        if addresses:
            if not self._was_known or self.rounds == 1:
                self.code, self.reason = errno.ETIMEDOUT, "no answer"
            self._was_known = True
            self._last.pop(self.host, None)  # that it was not known

    def note(self, address: str, error: Exception) -> None:
        code = error.errno if isinstance(error, OSError) else None
        if isinstance(error, socket.gaierror):
            code = UNRESOLVED
        elif isinstance(error, StoreTimeoutError):
            code = SILENT
        elif isinstance(error, TimeoutError):
            code = errno.ETIMEDOUT
        self._last[address] = self.reason = _describe(error)
        self.code = code or 0
        self._codes[self.code] += 1

    def failure(self, deadline: Deadline) -> ConnectError:
        tried = "".join(f"\n  {address}: {reason}" for address, reason in self._last.items())
        times = f"{self.rounds} tries" if self.rounds != 1 else "1 try"
        never = "" if self._was_known else f": the name {self.host} never resolved"
        return ConnectError(
            f"cannot reach the store at {self.place} within {deadline.seconds:g} s ({times}){never}:{tried}",
            hint=self._hint(),
            is_silent=self._codes[SILENT] > 0,
        )

    def _hint(self) -> str:
        if any(reason.startswith(_NOT_RESOLVED) for reason in self._last.values()):
            return _UNKNOWN_NAME
        for code, _ in self._codes.most_common():
            if code == SILENT and (reason := self._out_of_files()):
                return reason
            if code in _HINTS:
                return _HINTS[code]
        return "check the address and the port, and that a store listens there"

    def _out_of_files(self) -> str:
        """That a server of this machine may open no more files; empty if it may, or if it is not known."""
        from rallypoint.store.machine.system import out_of_files  # late: it asks the whole machine

        holder = out_of_files(self.port) if is_this_machine(self.host) else None
        then = "and takes no client before another one leaves: start it with a higher limit (ulimit -n)"
        return f"{holder}, {then}" if holder else ""


def _try_all(
    host: str, port: int, shake_hands: _Handshake, proof: Proof, deadline: Deadline, attempts: Attempts
) -> Connection | None:
    try:
        addresses = resolve(host, port, deadline)
    except OSError as error:
        attempts.begin([])
        attempts.note(host, error)
        return None
    attempts.begin(addresses)
    stranger: ProtocolError | None = None
    for number, (family, address) in enumerate(addresses, 1):
        try:
            is_last = number == len(addresses)
            return _try_one(host, family, address, shake_hands, proof, deadline, is_last=is_last)
        except (OSError, ConnectionLostError, StoreTimeoutError) as error:
            attempts.note(format_address(address[0], port), error)
        except ProtocolError as error:
            stranger = error
    if stranger is not None:
        raise stranger
    return None


def _try_one(
    host: str,
    family: int,
    address: tuple[str, int],
    shake_hands: _Handshake,
    proof: Proof,
    deadline: Deadline,
    *,
    is_last: bool,
) -> Connection:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(min(deadline.remaining, _CONNECT_SECONDS) or 1e-6)
        sock.connect(address)
        if sock.getsockname() == sock.getpeername():
            # A port of the range for clients, on which nobody listens: the socket has met itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, reason_of(errno.ECONNREFUSED))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = format_address(address[0], address[1])
        # An address that accepts but never answers must not use up the time of the next addresses.
        patience = deadline if is_last else Deadline(min(deadline.remaining, _CONNECT_SECONDS))
        with ServerGuard() as users:
            users.check(sock, server)
            stream: Stream = sock
            if proof is not None and not goes_plain(sock):
                stream = guard(sock, host, server, proof, patience)
            connection = Connection(stream, server)
            shake_hands(connection, patience)
            users.check(sock, server)  # now it has accepted: before, only the user who listens was known
    except BaseException:
        sock.close()
        raise
    return connection


def check_listeners(host: str, port: int, deadline: Deadline) -> None:
    """AccessError if another user listens at an address of this machine that the host has.

    For clients that are not ours, before they connect and when they have.
    """
    try:
        addresses = [address for _, address in resolve(host, port, deadline)]
    except OSError:  # the client will say so itself
        return
    for address in addresses:
        if is_this_machine(address[0]):
            check_listener(address, format_address(address[0], port))


def resolve(host: str, port: int, deadline: Deadline) -> list[tuple[int, tuple[str, int]]]:
    """Addresses of a host. The system's resolver knows no deadline, so a thread asks it."""
    if is_numeric(host):
        return look_up(host, port)
    try:
        return within(deadline.remaining, lambda: look_up(host, port))
    except TimeoutError:
        raise socket.gaierror(socket.EAI_AGAIN, "the resolver does not answer") from None


def _describe(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return f"{_NOT_RESOLVED}: {error.strerror}"
    if isinstance(error, RallypointError):
        return error.message
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def relay_for(
    host: str, port: int, role: Role = Role.UNKNOWN, environ: Mapping[str, str] = os.environ
) -> tuple[str, int] | None:
    """The relay through which this process reaches a store; None: it connects to the store itself.

    Launchers and tools always do: they want to see the whole job.
    """
    if environ.get(STORE_VARIABLE) != format_address(host, port) or role in (Role.AGENT, Role.TOOL):
        return None
    relay, relay_port = split_address(environ.get(RELAY_VARIABLE, ""))
    return (relay, int(relay_port)) if relay and relay_port.isdecimal() else None


def connect_to_relay(
    relay: tuple[str, int], store: tuple[str, int], deadline: Deadline, who: Identity
) -> Connection:
    """A connection to a relay; ConnectError, also about the store, if the relay does not answer in time."""
    try:
        return connect(*relay, deadline, who)
    except ConnectError as error:
        hint = relay_hint(relay, store)
        raise ConnectError(error.message, hint=hint, is_silent=error.is_silent) from error


def relay_hint(relay: tuple[str, int], store: tuple[str, int]) -> str:
    """What to do where a relay does not answer."""
    return (
        f"{format_address(*relay)} is this machine's relay for the store {format_address(*store)}: if the "
        "relay has died, the job has to be started again; --relay=off starts it without relays"
    )
