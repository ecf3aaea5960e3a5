"""Stores, by using them: one of our own on this machine's addresses, and the one at the endpoint."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Final

from rallypoint.diagnose.doctor.banners import describe_stranger
from rallypoint.diagnose.doctor.interfaces import way_out
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, failure, ok, warning
from rallypoint.errors import ConnectError, ConnectionLostError, ProtocolError, RallypointError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.rollcall.identity import Role
from rallypoint.server.loops.backend import LOOP_PACKAGE
from rallypoint.server.process.binding import is_this_machine
from rallypoint.stores.client.connecting import connect
from rallypoint.stores.client.deadline import Deadline
from rallypoint.stores.client.hello import who_am_i
from rallypoint.stores.tcp import TCPStore
from rallypoint.text import fine_duration
from rallypoint.wire.encoding import request
from rallypoint.wire.opcodes import READY, Op
from rallypoint.wire.sessions import ASK

_SECONDS: Final = 2.0
_PATIENCE_S: Final = 12.0  # torch's server may be held up by a look-up, which resolvers give up after 10 s
_ROUND_TRIPS: Final = 50
_SLOW_S: Final = 0.05
_HELD_UP_S: Final = 2.0
_QUEUE: Final = b"rallypoint/doctor"  # without a slash in front: no client's


@dataclass(frozen=True)
class Met:
    """A store that answers."""

    kind: str
    round_trip: float
    """Seconds; the median of some."""
    keys: int


def check_loopback(_: Situation) -> Iterator[Finding]:
    """A server of our own on loopback: what every job on this machine needs."""
    yield _try_address("loopback", "127.0.0.1")


def open_store(address: str) -> TCPStore:
    """A store of ours, on whatever its server can run on here: USE_LIBUV is another check's business."""
    has_libuv = find_spec(LOOP_PACKAGE) is not None
    return TCPStore(address, 0, is_master=True, timeout=_SECONDS, use_libuv=has_libuv)


def check_interface(_: Situation) -> Iterator[Finding]:
    """The same on the address under which other machines know this one."""
    found = way_out()
    if found is not None:
        yield _try_address("interface", found.addresses[0])


def _try_address(name: str, address: str) -> Finding:
    try:
        with open_store(address) as store:
            met = meet(Endpoint(address, store.port))
    except RallypointError as error:
        return failure(name, f"no store can be used at {address}: {error.message}", error.hint)
    except OSError as error:
        reason = error.strerror or error
        return failure(name, f"sockets cannot be used: {reason}", "file:// needs none for the store")
    return ok(name, f"a store of ours at {address} answers in {fine_duration(met.round_trip)}")


def check_store(situation: Situation) -> Iterator[Finding]:
    """What listens at the endpoint, if anything does."""
    endpoint = situation.endpoint
    if endpoint is None or not endpoint.port:
        return
    problem = _knock(endpoint)
    if problem is not None:
        yield judge_nobody(endpoint, problem, is_this_machine(endpoint.host))
        return
    begun = time.monotonic()
    try:
        met = meet(endpoint, _PATIENCE_S)
    except (ProtocolError, ConnectError):
        yield failure("store", *describe_stranger(endpoint))
    except RallypointError as error:
        yield failure("store", f"{endpoint}: {error.message}", error.hint)
    else:
        yield judge_store(endpoint, met, time.monotonic() - begun)


def _knock(endpoint: Endpoint) -> OSError | None:
    """Why nobody opens, or None if somebody does."""
    try:
        socket.create_connection(endpoint, _SECONDS).close()
    except OSError as error:
        return error
    return None


def judge_nobody(endpoint: Endpoint, error: OSError, is_here: bool) -> Finding:
    """What to think of an endpoint where nobody opens; `is_here` says whether it is this machine's."""
    refused = isinstance(error, ConnectionRefusedError)
    if refused and is_here:
        return ok("store", f"nothing listens at {endpoint} yet")
    if refused:
        return warning(
            "store",
            f"the machine at {endpoint.host} answers, but nothing listens on port {endpoint.port} yet",
            f"right before a job begins; to try the way: rallypoint doctor --listen --endpoint {endpoint}",
        )
    late = isinstance(error, TimeoutError)
    reason = f"no answer within {_SECONDS:g} s" if late else error.strerror or error
    return failure(
        "store",
        f"{endpoint}{' is this machine, but' if is_here else ''} cannot be reached: {reason}",
        "look for a firewall, another network, or an address that leads nowhere",
    )


def judge_store(endpoint: Endpoint, met: Met, seconds: float) -> Finding:
    """What to think of a store that is there, and that it took so long to get to know."""
    keys = f"{met.keys} key{'' if met.keys == 1 else 's'}"
    what = f"{met.kind} at {endpoint}, with {keys}, answers in {fine_duration(met.round_trip)}"
    if seconds > _HELD_UP_S:
        return warning(
            "store",
            f"{what}, but took {fine_duration(seconds)} to accept us: it looks up names, or is held up",
            "see reverse-look-up, on the machine of the store",
        )
    if met.round_trip > _SLOW_S:
        return warning("store", f"{what}: slow", "it is far away, or it is held up: look at its machine")
    return ok("store", what)


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
    kind = (
        "a store of Rallypoint's" if is_ours else f"a store of torch's ({_kind_of_torch(endpoint, deadline)})"
    )
    return Met(kind, median(times), keys)


def _kind_of_torch(endpoint: Endpoint, deadline: Deadline) -> str:
    """By what only the libuv server answers; the other one ends the connection."""
    with closing(connect(endpoint.host, endpoint.port, deadline, who_am_i(Role.TOOL))) as connection:
        try:
            connection.send(request(Op.QUEUE_LEN, _QUEUE), deadline)
            connection.read_i64(deadline)
        except ConnectionLostError:
            return "legacy, or older than 2.7"
    return "libuv"
