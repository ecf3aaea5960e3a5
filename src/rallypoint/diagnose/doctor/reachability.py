"""Answering the probes of other doctors, and probing the way to them.

A probe server says in one line of JSON which machine it is, the caller's address as it sees it, and its time.
Then it sends back every byte, so that the caller can measure the round trip.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median
from typing import Any, Final

from rallypoint.diagnose.doctor.machine_card import Card, Way
from rallypoint.diagnose.doctor.network import addresses_of

_SECONDS: Final = 3.0
_PINGS: Final = 10
_MOST_CALLERS: Final = 64
_LONGEST_CALL_S: Final = 10.0
_LONGEST_LINE: Final = 4096
_MARK: Final = "rallypoint doctor"
_STRANGER: Final = "another machine, or another program, answers there"


@contextmanager
def probe_server(number: int) -> Iterator[int]:
    """A port, on every interface, that answers probes while the block runs; `number` is this machine's."""
    listener = _listen()
    threading.Thread(target=_serve, args=(listener, number), daemon=True, name="doctor-probes").start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        listener.close()


def _serve(listener: socket.socket, number: int) -> None:
    places = threading.Semaphore(_MOST_CALLERS)
    while True:
        places.acquire()
        try:
            caller, address = listener.accept()
        except OSError:  # closed
            return
        work = (caller, str(address[0]), number, places)
        threading.Thread(target=_answer, args=work, daemon=True).start()


def _answer(caller: socket.socket, address: str, number: int, places: threading.Semaphore) -> None:
    with suppress(OSError), caller:  # the caller reports it, if it matters
        caller.settimeout(_SECONDS)
        over = time.monotonic() + _LONGEST_CALL_S
        # An IPv4 address plainly, also if a socket for both families has wrapped it.
        you = address.removeprefix("::ffff:")
        hello = {"mark": _MARK, "number": number, "you": you, "time": time.time()}
        caller.sendall(json.dumps(hello).encode() + b"\n")
        while time.monotonic() < over and (data := caller.recv(64)):
            caller.sendall(data)
    places.release()


def _listen() -> socket.socket:
    """One socket on every interface, for both families if the system has both."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:  # IPv6 is known, but switched off
        pass
    return socket.create_server(("", 0))


def reach(start: int, card: Card) -> Way:
    """Try the way to a machine, at each of its addresses until one answers."""
    resolved = addresses_of(card.host)
    ways: list[Way] = []
    over = time.monotonic() + _LONGEST_CALL_S
    for address in card.addresses:
        if ways and time.monotonic() > over:
            break
        way = replace(_try(start, card, address), resolved=resolved)
        if not way.error:
            return way
        ways.append(way)
    errors = "; ".join(f"{way.address}: {way.error}" for way in ways)
    return replace(ways[0], error=errors)


def _try(start: int, card: Card, address: str) -> Way:
    way = Way(start, card.number, address)
    try:
        with socket.create_connection((address, card.port), _SECONDS) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_SECONDS)
            begun = time.time()
            hello = _read_hello(sock)
            now = time.time()
            if hello.get("mark") != _MARK or hello.get("number") != card.number:
                return replace(way, error=_STRANGER)
            seen_as, clock = str(hello["you"]), float(hello["time"]) - (begun + now) / 2
            return replace(way, round_trip=_round_trip(sock), seen_as=seen_as, clock=clock)
    except TimeoutError:
        return replace(way, error=f"no answer within {_SECONDS:g} s")
    except OSError as error:
        return replace(way, error=error.strerror or str(error))
    except (ValueError, KeyError, TypeError, RecursionError):
        return replace(way, error=_STRANGER)


def _read_hello(sock: socket.socket) -> dict[str, Any]:
    line, over = b"", time.monotonic() + _SECONDS
    while not line.endswith(b"\n"):
        if time.monotonic() > over:
            raise TimeoutError
        data = sock.recv(_LONGEST_LINE - len(line))
        if not data:
            raise ConnectionResetError(None, "the connection was ended before a word was said")
        line += data
    content = json.loads(line)
    if not isinstance(content, dict):
        raise TypeError(content)
    return content


def _round_trip(sock: socket.socket) -> float:
    times = []
    for number in range(_PINGS):
        begun = time.perf_counter()
        sock.sendall(bytes([number]))
        if sock.recv(64) != bytes([number]):
            raise ConnectionResetError(None, "the connection was ended")
        times.append(time.perf_counter() - begun)
    return median(times)
