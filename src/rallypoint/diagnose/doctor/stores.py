"""Stores, by using them: our own on this machine's addresses; and the endpoint, its name, port and store."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Final

from rallypoint.client.tcp import TCPStore
from rallypoint.diagnose.doctor.network import interfaces_out, resolve
from rallypoint.diagnose.doctor.situation import MASTER_PORT, Situation
from rallypoint.diagnose.findings import Finding, Fix, failure, ok, unknown, warning
from rallypoint.errors import (
    BindError,
    ConnectError,
    ConnectionLostError,
    PortInUseError,
    ProtocolError,
    RallypointError,
)
from rallypoint.launch.endpoint import Endpoint
from rallypoint.store.connect.connecting import connect
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import is_loopback, is_this_machine
from rallypoint.store.machine.system import client_ports, holder_has, holder_of
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.server.loops.backend import LOOP_PACKAGE
from rallypoint.store.server.process.binding import try_port
from rallypoint.store.wire.encoding import request
from rallypoint.store.wire.opcodes import READY, Op
from rallypoint.store.wire.sessions import ASK
from rallypoint.text import fine_duration

_SECONDS: Final = 2.0
_PATIENCE_S: Final = 12.0  # torch's server may be held up by a look-up; resolvers give up after 10 s
_HERE_S: Final = 4.0  # for a process of this machine that is without torch
_TORCH_LIBRARY: Final = "libtorch_cpu"
_ROUND_TRIPS: Final = 50
_SLOW_S: Final = 0.05
_HELD_UP_S: Final = 2.0
_QUEUE: Final = b"rallypoint/doctor"  # no client's key: those begin with a slash

_STRANGER_S: Final = 1.5
_QUESTION: Final = b"GET / HTTP/1.0\r\n\r\n"
_GREETINGS: Final = (
    (b"SSH-", "an SSH server"),
    (b"HTTP/", "a web server"),
    (b"-ERR", "a Redis server"),
    (b"\x15\x03", "a server that speaks TLS"),
    (b"220", "a mail or FTP server"),
)
"""How services begin, unasked or as an answer to the question."""
_ENDS: Final = "a program that ends every connection"


# The endpoint's name and port ------------------------------------------------------------------------------


def check_endpoint(situation: Situation) -> Iterator[Finding]:
    """Whether the endpoint's name resolves, and whether it is this machine's."""
    if situation.endpoint is None:
        return
    host = situation.endpoint.host
    try:
        addresses, seconds = resolve(host)
    except OSError as error:  # TimeoutError is one
        remedy = f"use its address, or add {host} to the hosts file; in a cluster its DNS entry may come late"
        if host.endswith(".local"):
            remedy = f"mDNS names need a resolver for them: use the address of {host}"
        yield failure(f"{host} does not resolve here ({error.strerror or error})", remedy)
        return
    is_here = is_this_machine(host)
    whose = "this machine" if is_here else "another machine"
    known = "" if addresses == [host] else f" is {', '.join(addresses)}, found in {seconds * 1000:.0f} ms,"
    yield ok(f"{host}{known} {'and ' if known else 'is '}{whose}")
    if is_here and all(map(is_loopback, addresses)) and host not in ("localhost", *addresses):
        yield warning(
            f"{host} is a loopback address on this machine: torch connects to that, others cannot",
            "for several machines, name the endpoint by an address that all of them reach",
        )


def check_port(situation: Situation) -> Iterator[Finding]:
    """Whether this machine can listen on the endpoint's port, and which process has it if not."""
    endpoint = situation.endpoint
    if endpoint is None or not endpoint.port or not is_this_machine(endpoint.host):
        return
    low, high = client_ports()
    try:
        try_port(endpoint.host, endpoint.port)
    except PortInUseError as error:
        hint = "right if that is the store of this job; else end that process, or take another port: "
        holder = f" by {error.holder}" if error.holder else ""
        yield warning(f"{endpoint.port} is in use{holder}", f"{hint}{_free_port(endpoint)}")
    except BindError as error:
        yield failure(error.message, error.hint or f"take another one: {MASTER_PORT}")
    else:
        if not low <= endpoint.port <= high:
            yield ok(f"{endpoint.port} is free")
            return
        free = _free_port(endpoint)
        yield warning(
            f"{endpoint.port} is free, but of the range {low} to {high} that the system gives to clients: "
            "any program may hold it by chance when the job begins",
            f"take one below {low}: {free}",
            Fix("run", "rdzv-endpoint", str(endpoint._replace(port=free))) if free else None,
        )


def _free_port(endpoint: Endpoint) -> int:
    """A usual port, below the range for clients, that is free now; 0 if there is none."""
    low, _ = client_ports()
    # Also lower ones, for systems that give even the usual ones to clients.
    candidates: list[int] = [*range(MASTER_PORT, MASTER_PORT + 50), *range(20_000, 20_050)]
    for port in candidates:
        if port != endpoint.port and port < low:
            with suppress(PortInUseError, BindError):
                try_port(endpoint.host, port)
                return port
    return 0


# Our own stores --------------------------------------------------------------------------------------------


def open_store(address: str) -> TCPStore:
    """A store on a server of ours. USE_LIBUV is ignored: another check judges it."""
    has_libuv = find_spec(LOOP_PACKAGE) is not None
    return TCPStore(address, 0, is_master=True, timeout=_SECONDS, use_libuv=has_libuv)


def check_loopback(_: Situation) -> Iterator[Finding]:
    """A server of ours on loopback: every job on this machine needs that."""
    yield _try_address("127.0.0.1")


def check_interface(_: Situation) -> Iterator[Finding]:
    """A server of ours on the address under which other machines know this one."""
    for found in interfaces_out()[:1]:
        yield _try_address(found.addresses[0])


def _try_address(address: str) -> Finding:
    try:
        with open_store(address) as store:
            met = meet(Endpoint(address, store.port))
    except RallypointError as error:
        return failure(f"no store can be used at {address}: {error.message}", error.hint)
    except OSError as error:
        return failure(
            f"sockets cannot be used: {error.strerror or error}", "file:// needs none for the store"
        )
    return ok(f"a store of ours at {address} answers in {fine_duration(met.round_trip)}")


# The endpoint's store --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Met:
    """A store that answers."""

    kind: str
    round_trip: float
    """Seconds; the median of several."""
    keys: int


def check_store(situation: Situation) -> Iterator[Finding]:
    """Whether the program that listens at the endpoint, if there is one, is a store."""
    endpoint = situation.endpoint
    if endpoint is None or not endpoint.port:
        return
    try:
        socket.create_connection(endpoint, _SECONDS).close()
    except OSError as error:
        yield judge_nobody(endpoint, error, is_this_machine(endpoint.host))
        return
    patience, begun = _patience(endpoint), time.monotonic()
    try:
        met = meet(endpoint, patience)
    except (ProtocolError, ConnectError):
        yield failure(describe_stranger(endpoint), "take another port, the same on all machines")
    except RallypointError as error:
        yield failure(f"{endpoint}: {error.message}", error.hint)
    else:
        yield judge_store(endpoint, met, time.monotonic() - begun)


def _patience(endpoint: Endpoint) -> float:
    """How long a store may take to answer: torch's looks up the name of each client, which may hold it up.

    A process of this machine that has not loaded torch cannot be that.
    """
    may_be_torch = not is_this_machine(endpoint.host) or holder_has(endpoint.port, _TORCH_LIBRARY)
    return _PATIENCE_S if may_be_torch else _HERE_S


def judge_nobody(endpoint: Endpoint, error: OSError, is_here: bool) -> Finding:
    """An endpoint that accepts no connection; `is_here` says whether it is this machine's."""
    if isinstance(error, ConnectionRefusedError) and is_here:
        return ok(f"nothing listens at {endpoint} yet")
    if isinstance(error, ConnectionRefusedError):
        return warning(
            f"the machine at {endpoint.host} answers, but nothing listens on port {endpoint.port} yet",
            f"right before a job begins; to try the way: rallypoint doctor --listen --endpoint {endpoint}",
        )
    if isinstance(error, socket.gaierror):
        return unknown(f"it was not looked for, since {endpoint.host} does not resolve")
    is_late = isinstance(error, TimeoutError)
    reason = f"no answer within {_SECONDS:g} s" if is_late else error.strerror or error
    return failure(
        f"{endpoint}{' is this machine, but' if is_here else ''} cannot be reached: {reason}",
        "look for a firewall, another network, or an address that leads nowhere",
    )


def judge_store(endpoint: Endpoint, met: Met, seconds: float) -> Finding:
    """A store that answers; `seconds` is how long it took to accept us and to answer."""
    keys = f"{met.keys} key{'' if met.keys == 1 else 's'}"
    what = f"{met.kind} at {endpoint}, with {keys}, answers in {fine_duration(met.round_trip)}"
    if seconds > _HELD_UP_S:
        what += f", but took {fine_duration(seconds)} to accept us: it looks up names, or is held up"
        return warning(what, "see reverse-look-up, on the machine of the store")
    if met.round_trip > _SLOW_S:
        return warning(f"{what}: slow", "it is far away, or it is held up: look at its machine")
    return ok(what)


def meet(endpoint: Endpoint, seconds: float = _SECONDS) -> Met:
    """Use a store a little, without changing anything in it. The errors are `connect`'s."""
    deadline = Deadline(seconds)
    with closing(connect(endpoint.host, endpoint.port, deadline, who_am_i(Role.TOOL))) as connection:
        connection.send(ASK, deadline)
        is_ours = connection.read(1, deadline) == READY
        connection.send(request(Op.GETNUMKEYS), deadline)
        keys = connection.read_i64(deadline)
        times = []
        for _ in range(_ROUND_TRIPS):
            nonce, begun = os.urandom(4), time.perf_counter()
            connection.send(request(Op.PING, tail=nonce), deadline)
            connection.read(4, deadline)
            times.append(time.perf_counter() - begun)
    kind = "Rallypoint's" if is_ours else f"torch's ({_kind_of_torch(endpoint, deadline)})"
    return Met(f"a store of {kind}", median(times), keys)


def _kind_of_torch(endpoint: Endpoint, deadline: Deadline) -> str:
    """Only the libuv server knows this request; the legacy one ends the connection."""
    with closing(connect(endpoint.host, endpoint.port, deadline, who_am_i(Role.TOOL))) as connection:
        try:
            connection.send(request(Op.QUEUE_LEN, _QUEUE), deadline)
            connection.read_i64(deadline)
        except ConnectionLostError:
            return "legacy, or older than 2.7"
    return "libuv"


def describe_stranger(endpoint: Endpoint) -> str:
    """A program that listens at a port and is no store: its kind, and its process if that is known."""
    holder = holder_of(endpoint.port) if is_this_machine(endpoint.host) else None
    try:
        with socket.create_connection(endpoint, _STRANGER_S) as sock:
            sock.settimeout(_STRANGER_S)
            sock.sendall(_QUESTION)
            words = sock.recv(200)
        known = (what for beginning, what in _GREETINGS if words.startswith(beginning))
        what = next(known, f"a program that says {words[:40]!r}" if words else _ENDS)
    except TimeoutError:
        what = "a program that accepts connections and does not answer"
    except OSError:
        what = _ENDS
    return f"at {endpoint} is {what}: no store{f', held by {holder}' if holder else ''}"
