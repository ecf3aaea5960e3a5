"""Whose the other ends of connections are, as the real kernel tells. Also on the compiled package."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import ExitStack

import pytest

from processes import has_ipv6
from rallypoint.store.machine.socket_owner import NoUser, SocketTable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the user of a socket")

IPV6 = pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize(
    ("listens", "connects"),
    [
        ("127.0.0.1", "127.0.0.1"),
        pytest.param("::1", "::1", marks=IPV6),
        pytest.param("::", "127.0.0.1", marks=IPV6, id="IPv4 on IPv6"),
        pytest.param("::", "::1", marks=IPV6, id="any address of IPv6"),
    ],
)
@pytest.mark.parametrize("first", [False, True], ids=["reset later", "reset before they are accepted"])
def test_each_of_many_clients_has_its_own_user(listens: str, connects: str, first: bool) -> None:
    """Some of them are reset, among others and as all that are asked about at a time."""
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    with ExitStack() as stack:
        listener = stack.enter_context(
            socket.create_server((listens, 0), family=family, backlog=128, dualstack_ipv6=listens == "::")
        )
        place = connects, listener.getsockname()[1]
        clients = [stack.enter_context(socket.create_connection(place)) for _ in range(120)]
        gone = {*range(32), *range(32, 96, 3)}
        for number in gone if first else ():
            reset(clients[number])
        arrivals = [listener.accept() for _ in clients]
        for sock, _ in arrivals:
            stack.enter_context(sock)
        for number in () if first else gone:
            reset(clients[number])
        table = stack.enter_context(SocketTable())
        owners = table.clients_of(arrivals)
        assert owners == [table.owner_of(address, sock.getsockname()) for sock, address in arrivals]
    assert owners == [NoUser.GONE if number in gone else os.getuid() for number in range(120)]


def test_the_numbers_of_questions_begin_again() -> None:
    """Or clients would be let in of whom nothing is known, after as many connects as a number has values."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        for _ in range(70):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        arrivals = [listener.accept() for _ in range(70)]
        for sock, _ in arrivals:
            stack.enter_context(sock)
        table = stack.enter_context(SocketTable())
        table._number = 2**32 - 10
        for _ in range(2):
            assert table.clients_of(arrivals) == [os.getuid()] * 70
        table._number = 2**32 - 10
        for sock, address in arrivals:
            assert table.owner_of(address, sock.getsockname()) == os.getuid()
        assert table._number < 2**32
        table._number = 2**32 - 1
        assert table.can_tell


def test_a_server_that_has_not_accepted_yet_is_the_user_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, SocketTable() as table:
        with socket.create_connection(listener.getsockname()) as sock:
            assert table.server_of(sock) == os.getuid()
        assert table.listener_at(listener.getsockname()) == os.getuid()
        address = listener.getsockname()
    with SocketTable() as table:
        assert table.listener_at(address) is NoUser.GONE


def answer(number: int, kind: int, content: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(content), kind, 0, number, 0) + content


def row(state: int, user: int, inode: int) -> bytes:
    return struct.pack("=BB62xII", socket.AF_INET, state, user, inode)


def failure(number: int) -> bytes:
    return struct.pack("=i16x", -number)


@pytest.mark.parametrize(
    ("kind", "content", "user"),
    [
        pytest.param(20, row(1, 1_000, 7), 1_000, id="a user"),
        pytest.param(20, row(1, 0, 7), 0, id="root"),
        pytest.param(20, row(1, 2**32 - 2, 7), 2**32 - 2, id="the last user"),
        pytest.param(20, row(1, 1_000, 7) + bytes(400), 1_000, id="more than is looked at"),
        pytest.param(20, row(4, 1_000, 0), 1_000, id="closed, Linux 6.17"),
        pytest.param(20, row(4, 0, 0), None, id="closed, older: not root"),
        pytest.param(20, row(10, 1_000, 7), -1, id="only one that listens"),
        pytest.param(20, row(1, 1_000, 7)[:-1], None, id="too short"),
        pytest.param(2, failure(2), -1, id="reset, or hidden"),
        pytest.param(2, failure(13), None, id="not permitted"),
        pytest.param(2, b"", None, id="an error without a number"),
        pytest.param(3, bytes(80), None, id="an answer of another kind"),
    ],
)
def test_what_is_plain_in_an_answer(kind: int, content: bytes, user: int | None) -> None:
    native = pytest.importorskip("rallypoint.store.machine.native", reason="it is not compiled")
    kernel, netlink = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with (
        kernel,
        netlink,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        for number in (7, 8, 9, 10):  # the first is of a question that was given up
            kernel.send(answer(number, kind, content))
        users = native.users_at_other_ends(netlink.fileno(), 7, [client.fileno()] * 4)
        questions = kernel.recv(1_000)
    assert users == [user, user, user, None]  # the last has no answer yet
    assert [struct.unpack_from("=I", questions, 72 * index + 8)[0] for index in range(4)] == [8, 9, 10, 11]
