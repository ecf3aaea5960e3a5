"""Where a server listens: only where its host name says; and what it says when it cannot."""

from __future__ import annotations

import errno
import gc
import ipaddress
import logging
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from processes import end, has_ipv6, is_wine, tells_connections
from rallypoint.errors import BindError, PortInUseError, UsageError
from rallypoint.store.machine.addresses import format_address, is_this_machine
from rallypoint.store.server.process.binding import addresses_for, adopt, describe, listen, reachable_at

pytestmark = pytest.mark.windows

EVERYWHERE = {"0.0.0.0", "::"}
UNUSED = "192.0.2.77"
"""An address for documentation: of no machine."""


@contextmanager
def listening(host: str, port: int = 0) -> Iterator[list[socket.socket]]:
    listeners = listen(host, port)
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def places_of(port: int) -> set[str]:
    """The addresses on which this process listens on a port, as the system says."""
    if is_wine():
        pytest.skip("Wine tells no connections of a process")
    return {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let every name have these addresses, and none at all if there are none."""

    def answer(host: str, port: object, **_: object) -> list[tuple[Any, ...]]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [(family, 1, 6, "", (address, 0)) for family, address in zip(families, addresses, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def own_address() -> str:
    """An IPv4 address of this machine that is not loopback."""
    for cards in psutil.net_if_addrs().values():
        for card in cards:
            if card.family == socket.AF_INET and not ipaddress.ip_address(card.address).is_loopback:
                return card.address
    pytest.skip("this machine has only loopback addresses")


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
LOOPBACK = {"127.0.0.1", "::1"} if has_ipv6() else {"127.0.0.1"}


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        (["localhost", "LOCALHOST", "localhost.", "localhost.localdomain"], LOOPBACK),
        (["127.0.0.1"], {"127.0.0.1"}),
        (["127.0.0.2"], {"127.0.0.2"}),
        pytest.param(["::1", "[::1]"], {"::1"}, marks=needs_ipv6),
    ],
    ids=["localhost", "127.0.0.1", "127.0.0.2", "::1"],
)
def test_loopback_binds_loopback_alone(
    hosts: list[str], places: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    for host in hosts:
        with listening(host) as listeners:
            (port,) = {listener.getsockname()[1] for listener in listeners}
            assert places_of(port) == places
            assert set(describe(listeners).split(", ")) == {format_address(each, port) for each in places}
    assert not warnings_in(caplog)


@pytest.mark.parametrize("is_name", [True, False], ids=["name", "address"])
def test_what_is_of_this_machine_binds_its_address(
    is_name: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = own_address()
    if is_name:
        resolve_to(monkeypatch, address, UNUSED)
    with listening("node-7" if is_name else address) as listeners:
        assert places_of(listeners[0].getsockname()[1]) == {address}
    assert not warnings_in(caplog)


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "[::]"])
def test_every_interface(host: str, caplog: pytest.LogCaptureFixture) -> None:
    with listening(host) as listeners:
        port = listeners[0].getsockname()[1]
        assert places_of(port) <= EVERYWHERE
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
    assert not warnings_in(caplog)


@pytest.mark.parametrize(
    ("host", "resolved", "words"),
    [
        ("store.example.org", [UNUSED], f"store.example.org (which resolves to {UNUSED}) is not an address"),
        (UNUSED, [UNUSED], "not an address of this machine"),
        ("nowhere.invalid", [], "resolves to nothing"),
        # As in a hosts file that has `127.0.1.1 thishost`: the other machines reach it elsewhere.
        ("thishost", ["127.0.1.1"], "thishost is a loopback address here"),
    ],
    ids=["another machine's name", "another machine's address", "nobody's", "the own name at loopback"],
)
def test_what_is_not_of_this_machine_binds_all_and_warns(
    *, host: str, resolved: list[str], words: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    resolve_to(monkeypatch, *resolved)
    with listening(host) as listeners:
        assert places_of(listeners[0].getsockname()[1]) <= EVERYWHERE
    (warning,) = warnings_in(caplog)
    assert words in warning
    assert "every interface" in warning


@pytest.mark.parametrize("port", [-1, 65_536, 1_000_000])
def test_a_port_that_does_not_exist(port: int) -> None:
    with pytest.raises(UsageError, match=f"port {port} does not exist\nhint: ports go from 0 .* to 65535"):
        listen("localhost", port)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", {"127.0.0.1"}), ("127.0.0.2", {"127.0.0.2"}), ("localhost", {"127.0.0.1"})],
)
def test_this_machine_reaches_what_it_binds(host: str, expected: set[str]) -> None:
    with listening(host) as listeners:
        address = reachable_at(listeners[0])
        assert address[0] in expected
        with socket.create_connection(address, timeout=10):
            pass


LISTEN = """import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.readline()
"""


@tells_connections
def test_a_port_in_use_names_who_holds_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, "the-holder"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with pytest.raises(PortInUseError) as caught:
            listen("127.0.0.1", port)
    finally:
        end(process)
    error = caught.value
    assert f"port {port} on 127.0.0.1 is in use by process {process.pid} (" in error.message
    assert "the-holder" in error.message
    assert "port 0" in error.hint
    assert error.holder is not None
    assert error.holder in error.message


def test_this_machine_and_others() -> None:
    own = ["localhost", "LocalHost", "127.0.0.1", "127.0.0.2", "", "*", "0.0.0.0", "::", "[::]"]
    own += [socket.gethostname(), socket.gethostname().upper(), own_address()]
    own += ["::1", "[::1]"] if has_ipv6() else []
    others = [UNUSED, "2001:db8::77", "[2001:db8::77]", "not a name", "a" * 300]
    assert [host for host in own + others if is_this_machine(host)] == own


@pytest.mark.parametrize(
    ("addresses", "is_ours"),
    [(["127.0.1.1"], True), ([UNUSED, "127.0.0.1"], True), ([UNUSED], False), ([], False)],
    ids=["of this one", "of this one, and others", "of another", "of none"],
)
def test_a_name_means_the_machine_that_has_its_address(
    addresses: list[str], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, *addresses)
    assert is_this_machine("node-7.example.org") is is_ours


@needs_ipv6
def test_a_port_in_use_leaves_no_socket_open() -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind(("::1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortInUseError):
            listen("localhost", port)
        assert places_of(port) == {"::1"}


def test_of_two_who_come_at_once_one_gets_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes when the first has bound, but does not listen yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outcomes: list[list[socket.socket] | PortInUseError] = []

    def come() -> None:
        try:
            outcomes.append(listen("127.0.0.1", port))
        except PortInUseError as error:
            outcomes.append(error)

    class Slow(socket.socket):
        def listen(self, backlog: int = 0) -> None:
            if socket.socket is Slow:
                monkeypatch.undo()
                come()
            super().listen(backlog)

    monkeypatch.setattr(socket, "socket", Slow)
    come()
    winners = [outcome for outcome in outcomes if isinstance(outcome, list)]
    for listener in (listener for winner in winners for listener in winner):
        listener.close()
    assert len(outcomes) == 2
    assert len(winners) == 1


def test_a_port_of_which_nobody_knows_the_holder() -> None:
    with socket.socket() as holder:  # bound, but it does not listen: no table names it
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        with pytest.raises(
            PortInUseError, match=re.escape(f"port {port} on 127.0.0.1 is in use\n")
        ) as caught:
            listen("127.0.0.1", port)
    assert caught.value.holder is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        pytest.param(
            errno.EACCES,
            "below 1024 are reserved",
            marks=pytest.mark.skipif(sys.platform == "win32", reason="no port is reserved there"),
        ),
        (errno.ENOBUFS, os.strerror(errno.ENOBUFS)),
    ],
)
def test_a_bind_that_the_system_refuses(code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, address: Any) -> None:
            if address[1]:  # the probe for a free port may pass
                raise OSError(code, os.strerror(code))
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(BindError, match=words) as caught:
        listen("127.0.0.1", 80)
    assert "port 80 of 127.0.0.1" in caught.value.message


def test_with_port_0_another_port_is_tried_when_one_family_has_it_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is free on the first address may be taken on the second."""
    if len(addresses_for("localhost").addresses) < 2:
        pytest.skip("localhost is one address here")
    ports_tried: dict[int, None] = {}

    class Contended(socket.socket):
        def bind(self, address: Any) -> None:
            if self.family == socket.AF_INET6 and address[1]:
                ports_tried[address[1]] = None
                if len(ports_tried) < 3:
                    raise OSError(errno.EADDRINUSE, "Address already in use")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Contended)
    with listening("localhost") as listeners:
        assert listeners[0].getsockname()[1] == list(ports_tried)[-1]
    assert len(ports_tried) == 3


def test_a_descriptor_that_cannot_listen_leaves_no_socket_behind() -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    datagrams = sock.detach()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(BindError, match=f"master_listen_fd {datagrams} .*: .+\nhint:"):
            adopt(datagrams)
        gc.collect()
    assert not caught
    with pytest.raises(BindError, match=f"master_listen_fd {datagrams} cannot be listened on"):
        adopt(datagrams)
