"""Other users of this machine: their clients are refused, and their servers are not joined.

As root, a process of another user is a real one. Elsewhere nobody can start one: there, it is one of this
user's, and the side that is under test believes that it is itself another user's.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from command_line import invoke
from processes import Server, end, has_ipv6, pause, serving
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import AccessError, ConnectError, UsageError
from rallypoint.launch.endpoint import Endpoint, Endpoints
from rallypoint.launch.rendezvous.servers import open_place
from rallypoint.store.machine import socket_owner
from rallypoint.store.machine.socket_owner import NoUser, Owner, SocketTable
from rallypoint.store.relay.outgoing import Outgoing
from rallypoint.store.server.guard.other_users import (
    INSECURE_VARIABLE,
    ROOT,
    USERS_VARIABLE,
    Access,
    ClientGuard,
    access_of_environment,
)
from rallypoint.store.server.loops.loop import LegacyLoop
from rallypoint.store.wire.encoding import VALIDATE, counted_request, request
from rallypoint.store.wire.opcodes import READY, Op
from raw import SECONDS, RawClient

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the user of a socket")

STRANGER = 54_321
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
OTHER = STRANGER if IS_ROOT or not hasattr(os, "getuid") else os.getuid()
"""The user whom the side under test finds at the other end."""

needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can be two users at the same time")

_PRELUDE = f"""
import os, socket, struct, sys
def become_other():
    if os.geteuid() == 0:
        os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})
"""


@pytest.fixture(autouse=True)
def trusts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (USERS_VARIABLE, INSECURE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not one of the user `OTHER`."""
    if not IS_ROOT:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


@contextmanager
def running(program: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    try:
        yield process
    finally:
        end(process)


def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def go_on(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")


# Clients of other users


def guarded_server(*options: str) -> AbstractContextManager[Server]:
    """`rallypoint serve`, for which `OTHER` is another user."""
    believe = "" if IS_ROOT else f"import os; os.geteuid = lambda: {STRANGER}"
    return serving("auto", options=options, host="localhost", prelude=believe)


_ASK = """
become_other()
sock = socket.socket()
sock.settimeout(30)
sock.connect(("127.0.0.1", int(sys.argv[1])))
try:
    sock.sendall(bytes.fromhex(sys.argv[2]))
    print(sock.recv(4) or "closed", flush=True)
except ConnectionError:
    print("closed", flush=True)
"""
_PING = bytes([Op.VALIDATE]) + struct.pack("<I", 0x3C85F7CE) + bytes([Op.PING]) + b"ping"


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        pytest.param((), "closed", id="refused"),
        pytest.param(("--allow-user", "root", "--allow-user", str(OTHER)), "b'ping'", id="allowed"),
        pytest.param(("--insecure",), "b'ping'", id="insecure"),
    ],
)
def test_a_client_of_another_user(options: tuple[str, ...], answer: str) -> None:
    with guarded_server(*options) as server:
        with running(_PRELUDE + _ASK, server.port, _PING.hex()) as client:
            assert line_of(client) == answer
        said = server.read_log()
    assert ("another user of this machine" in said) == (not options)
    if not options:
        assert f"uid {OTHER}" in said
        assert "--allow-user" in said


_ATTACKS = """
from rallypoint.store.wire.encoding import VALIDATE, request
from rallypoint.store.wire.opcodes import Op
become_other()
kept = []
def attack(kind, host, before=lambda sock: None):
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.settimeout(30)
    before(sock)
    sock.connect((host, int(sys.argv[1])))
    sock.sendall(VALIDATE + request(Op.SET, f"/{kind} {host}".encode(), b"1"))
    kept.append(sock)
    return sock
for host in sys.argv[2:]:
    attack("stays", host)
    attack("closes", host).close()
    reset = struct.pack("ii", 1, 0)
    attack("resets", host, lambda sock: sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)).close()
    attack("hides", host, lambda sock: sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo"))
attack("has another address", "127.0.0.1", lambda sock: sock.bind(("127.9.9.9", 0)))
print("sent", flush=True)
sys.stdin.readline()
"""
_KINDS = ("stays", "closes", "resets", "hides", "has another address")


@needs_root
def test_nothing_that_another_user_asks_is_carried_out() -> None:
    """Not if the client has gone before it is accepted, either, or hides its socket."""
    hosts = ["127.0.0.1", *(["::1"] if has_ipv6() else [])]
    with guarded_server() as server:
        pause(server.process)
        with running(_PRELUDE + _ATTACKS, server.port, *hosts) as attacker:
            assert line_of(attacker) == "sent"
            silent = socket.create_connection(("127.0.0.1", server.port), SECONDS)
            silent.close()
            server.process.send_signal(signal.SIGCONT)
            for host in hosts:
                with RawClient(server.port, host) as client:  # it is accepted behind the others
                    done = [kind for kind in _KINDS if has_key(client, f"/{kind} {host}")]
                assert done == []
        lines = server.read_log().splitlines()
    refused = [line for line in lines if line.startswith("rallypoint: refused ")]
    assert len(refused) == 4 * len(hosts) + 1, lines  # one that came and went without a word is no attack
    left = [line for line in refused if "it has left already" in line]
    assert len(left) >= len(hosts), lines  # those that were reset; new kernels know whose the closed were
    assert not any("hint:" in line for line in left)


def test_a_client_that_left_while_the_server_stood_still() -> None:
    """Whether or not the system still tells whose it was, no user is to turn the check off because of it."""
    with serving("auto") as server:
        pause(server.process)
        for linger in (0, 1):
            with RawClient(server.port) as client:
                client.send(request(Op.SET, b"key", b"value"))
                client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", linger, 0))
        server.process.send_signal(signal.SIGCONT)
        with RawClient(server.port) as client:
            assert client.answers()
        said = server.read_log()
    assert "it has left already, and what it asked was not carried out" in said  # it had reset the connection
    assert "hides" not in said
    assert "--insecure" not in said


def has_key(client: RawClient, key: str) -> bool:
    client.send(counted_request(Op.CHECK, [key.encode()]))
    return client.read(1) == READY


# Servers of other users

_STORE = """
how = sys.argv[1]
if how != "by root":
    become_other()
listener = socket.socket()
if how == "hidden":
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
listener.bind(("127.0.0.1", 0))
listener.listen()
become_other()
print(listener.getsockname()[1], flush=True)
if how == "silent":
    sys.stdin.readline()
client, _ = listener.accept()
client.settimeout(30)
got = b""
try:
    while data := client.recv(4096):
        got += data
        if len(got) >= 10 and got[5] == 13:  # VALIDATE, then PING and its nonce
            client.sendall(got[6:10] + bytes(8))
            got = b"" if how == "by root" else got
        print(got.hex(), flush=True)
except ConnectionError:
    pass
print("got", got.hex(), flush=True)
sys.stdin.readline()
"""
"""Answers the handshake as a store does, and prints what it was sent."""


@contextmanager
def their_store(how: str = "plain") -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with running(_PRELUDE + _STORE, how) as store:
        yield store, int(line_of(store))


def check_is_refused(error: BaseException, port: int) -> None:
    text = str(error)
    assert f"127.0.0.1:{port}" in text
    assert f"uid {OTHER}" in text
    assert USERS_VARIABLE in text


def meet_at(port: int) -> object:
    """What a launcher does."""
    endpoint = Endpoint("127.0.0.1", port)
    return open_place(endpoint, 2, "job", hosts=None, local_address=None, seconds=10 * SECONDS)


def join(port: int) -> object:
    return TCPStore("127.0.0.1", port, timeout=10 * SECONDS)


@pytest.mark.parametrize(("how", "join_or_meet"), [("plain", join), ("silent", join), ("plain", meet_at)])
@pytest.mark.usefixtures("not_theirs")
def test_a_store_of_another_user_is_not_joined_and_told_nothing(
    how: str, join_or_meet: Callable[[int], object]
) -> None:
    with their_store(how) as (store, port):
        begun = time.monotonic()
        with pytest.raises(AccessError) as caught:
            join_or_meet(port)
        assert time.monotonic() - begun < SECONDS  # a final answer, and no reason to try again
        check_is_refused(caught.value, port)
        go_on(store)
        assert line_of(store) == "got"


@pytest.mark.parametrize(("name", "value"), [(USERS_VARIABLE, str(OTHER)), (INSECURE_VARIABLE, "1")])
@pytest.mark.usefixtures("not_theirs")
def test_it_is_joined_where_that_is_allowed(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with their_store() as (_, port):
        TCPStore("127.0.0.1", port, timeout=SECONDS).close()


@needs_root
def test_a_store_that_hides_its_socket_is_not_joined() -> None:
    with their_store("hidden") as (store, port):
        with pytest.raises(ConnectError, match="hides which user it is"):
            TCPStore("127.0.0.1", port, timeout=0.5)
        assert line_of(store) == "got"


@needs_root
def test_the_user_who_answers_counts_and_not_only_the_one_who_listens() -> None:
    """Then the server has been told who this process is, but no key and no value."""
    with their_store("by root") as (_, port), pytest.raises(AccessError):
        TCPStore("127.0.0.1", port, timeout=SECONDS)


def outcome_of_outgoing(port: int, sent: bytes) -> list[str]:
    """What a relay's connection hears from a store: data, and why it has ended."""
    loop = LegacyLoop()
    heard: list[str] = []

    def ended(why: str) -> None:
        heard.append(why)
        loop.stop()

    outgoing = Outgoing(
        loop,
        "127.0.0.1",
        [(socket.AF_INET, ("127.0.0.1", port))],
        on_open=lambda: None,
        on_data=lambda data: heard.append(f"data: {data!r}"),
        on_closed=ended,
    )
    outgoing.send(sent)
    loop.later(SECONDS, loop.stop)
    loop.run()
    loop.close()
    return heard


@pytest.mark.usefixtures("not_theirs")
def test_a_relay_sends_nothing_to_a_store_of_another_user() -> None:
    """A port that the store had may be another user's when the relay connects again."""
    with their_store() as (store, port):
        [why] = outcome_of_outgoing(port, b"a batch of the job's requests")
        assert f"uid {OTHER}" in why
        assert line_of(store) == "got"


@needs_root
def test_a_relay_looks_again_at_the_user_who_answers() -> None:
    with their_store("by root") as (_, port):
        [why] = outcome_of_outgoing(port, _PING)
        assert f"uid {OTHER}" in why


@pytest.mark.usefixtures("not_theirs")
def test_a_launcher_does_not_meet_at_a_port_that_another_user_holds() -> None:
    with their_store() as (store, port):
        with pytest.raises(AccessError) as caught:
            open_place(Endpoints([Endpoint("127.0.0.1", port)]), 2, "job", seconds=10 * SECONDS)
        check_is_refused(caught.value, port)
        assert line_of(store) == "got"


@pytest.mark.usefixtures("not_theirs")
def test_torchs_own_client_does_not_join_it_either() -> None:
    dist = pytest.importorskip("torch.distributed")
    from rallypoint.launch.switches import ClientChoice, Patch
    from rallypoint.pytorch.parameters import StoreParameters
    from rallypoint.pytorch.substitution import find_fault, make_store

    with their_store() as (store, port):
        with pytest.raises(dist.DistStoreError) as caught:
            make_store(StoreParameters("127.0.0.1", port), ClientChoice.TORCH, Patch.AUTO)
        check_is_refused(caught.value, port)
        with pytest.raises(AccessError):  # what the launcher asks first
            find_fault("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)) as probe:  # else it would wait for a client
            del probe
        assert line_of(store) == "got"


# What is decided, and what the kernel's answers mean


@pytest.mark.parametrize(
    ("owner", "refused"),
    [
        (1_000, False),
        (ROOT, False),
        (1_001, False),
        (1_002, True),
        (NoUser.GONE, True),
        (NoUser.UNTOLD, False),
        (NoUser.ELSEWHERE, False),
    ],
)
def test_who_is_refused(owner: Owner, refused: bool) -> None:
    users = frozenset({1_000, ROOT, 1_001})
    assert Access(users).refuses(owner) == refused
    assert not Access(users, insecure=True).refuses(owner)


class Kernel:
    """A netlink socket that gives one answer, whatever is asked."""

    def __init__(self, kind: int, content: bytes) -> None:
        self._kind = kind
        self._content = content
        self._answers: list[bytes] = []

    def send(self, question: bytes) -> None:
        _, _, flags, number, _ = struct.unpack_from("=IHHII", question)
        self._answers.append(self._answer(flags, number))

    def _answer(self, flags: int, number: int) -> bytes:
        if flags & 0x300:  # a dump, of nothing
            return struct.pack("=IHHIIi", 20, 3, 0, number, 0, 0)
        return struct.pack("=IHHII", 16 + len(self._content), self._kind, 0, number, 0) + self._content

    def recv(self, _: int) -> bytes:
        if not self._answers:
            raise BlockingIOError
        return self._answers.pop(0)


def socket_row(state: int, user: int, inode: int) -> tuple[int, bytes]:
    return 20, struct.pack("=BB62xII", socket.AF_INET, state, user, inode)


NOT_FOUND = (2, struct.pack("=i", -2))


@pytest.mark.parametrize(
    ("answer", "other", "owner"),
    [
        pytest.param(socket_row(1, 1_000, 7), "127.0.0.1", 1_000, id="a user"),
        pytest.param(socket_row(1, 0, 7), "127.0.0.1", ROOT, id="root"),
        pytest.param(socket_row(4, 1_000, 0), "127.0.0.1", 1_000, id="closed, Linux 6.17"),
        pytest.param(socket_row(4, 0, 0), "127.0.0.1", NoUser.GONE, id="closed, older: not root"),
        pytest.param(socket_row(10, 1_000, 7), "127.0.0.1", NoUser.GONE, id="only one that listens"),
        pytest.param(NOT_FOUND, "127.0.0.1", NoUser.GONE, id="reset, or hidden"),
        pytest.param(NOT_FOUND, "::ffff:127.0.0.1", NoUser.GONE, id="IPv4 on IPv6"),
        pytest.param(NOT_FOUND, "10.0.0.5", NoUser.GONE, id="by the machine's own address"),
        pytest.param(NOT_FOUND, "10.0.0.6", NoUser.ELSEWHERE, id="another machine"),
        pytest.param(socket_row(1, 1_000, 7), "10.0.0.6", 1_000, id="another address of this machine"),
        pytest.param(socket_row(1, 65_534, 7), "127.0.0.1", NoUser.UNTOLD, id="another container's user"),
        pytest.param((2, struct.pack("=i", -13)), "127.0.0.1", NoUser.UNTOLD, id="not permitted"),
        pytest.param((20, b"short"), "127.0.0.1", NoUser.UNTOLD, id="an answer of another kind"),
    ],
)
def test_what_the_kernel_says(
    answer: tuple[int, bytes], other: str, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_owner, "_overflow_user", lambda: 65_534)
    monkeypatch.setattr(socket_owner, "_open_netlink", lambda: Kernel(*answer))
    own = "10.0.0.5" if other.startswith("10.") else other
    table = SocketTable()
    assert table.owner_of((other, 40_000), (own, 29_500)) == owner
    assert table.owner_of(("nowhere", 40_000), ("nowhere", 29_500)) is NoUser.UNTOLD


def test_a_kernel_without_the_table_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says the same of the table as of a socket that is not there."""
    monkeypatch.setattr(socket_owner, "_DUMP", 0)  # so that this is answered alike
    monkeypatch.setattr(socket_owner, "_open_netlink", lambda: Kernel(*NOT_FOUND))
    assert SocketTable().owner_of(("127.0.0.1", 40_000), ("127.0.0.1", 29_500)) is NoUser.UNTOLD


_SET = request(Op.SET, b"key", b"value")
_ENTER = request(Op.ENTER, b"round 1")


@pytest.mark.parametrize(
    ("said", "stays", "refused"),
    [
        pytest.param(b"", False, False, id="a look whether the port answers"),
        pytest.param(_PING, False, False, id="a client that has given up"),
        pytest.param(VALIDATE + _ENTER + _PING[-5:], False, False, id="a relay that is served elsewhere"),
        pytest.param(_PING, True, True, id="hidden"),
        pytest.param(b"", True, True, id="hidden and silent"),
        pytest.param(_PING + _SET, False, True, id="what it asks"),
        pytest.param(_PING * 1_000 + _SET, False, True, id="what it asks behind a lot"),
        pytest.param(_SET, False, True, id="what it asks without a greeting"),
        pytest.param(b"\xff", False, True, id="nonsense"),
    ],
)
@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_is_gone_is_refused_only_if_it_has_asked_for_something(
    said: bytes, stays: bool, refused: bool, resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that it has said can be read any more."""
    monkeypatch.setattr(socket_owner, "_open_netlink", lambda: Kernel(*NOT_FOUND))
    guard = ClientGuard(Access(frozenset({ROOT})))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        client.sendall(said)
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if not stays:
            client.close()
        sock, address = listener.accept()
        with sock:
            sock.setblocking(False)
            [owner] = guard.owners([(sock, address)])
            assert owner is NoUser.GONE
            if refused:
                with pytest.raises(AccessError, match="hides" if stays else "has left already") as error:
                    guard.check(sock, owner)
                assert bool(error.value.hint) == stays
            else:
                guard.check(sock, owner)
                with suppress(ConnectionError):
                    assert sock.recv(1) == b""


# Settings


def test_users_are_named_by_name_or_number() -> None:
    own = os.geteuid()
    assert access_of_environment({}) == Access(frozenset({own, ROOT}))
    named = access_of_environment({USERS_VARIABLE: "root, 54321,,7", INSECURE_VARIABLE: "on"})
    assert named == Access(frozenset({own, ROOT, 54_321, 7}), insecure=True)
    with pytest.raises(UsageError, match="no such user"):
        access_of_environment({USERS_VARIABLE: "no-such-user"})
    with pytest.raises(UsageError, match=INSECURE_VARIABLE):
        access_of_environment({INSECURE_VARIABLE: "perhaps"})


def test_a_job_is_told_whom_to_trust(tmp_path: Path) -> None:
    show = f"import os; print(os.environ['{USERS_VARIABLE}'], os.environ['{INSECURE_VARIABLE}'])"
    words = ("--allow-user", "root", "--allow-user=7,8", "--insecure", "--", sys.executable, "-c", show)
    run = subprocess.run(
        [sys.executable, "-m", "rallypoint", "run", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.stdout.split() == ["root,7,8", "1"], run.stderr
    wrong = invoke("run", "--allow-user", "no-such-user", "--", "true")
    assert wrong.exit_code == 2
    assert "no-such-user" in str(wrong.exception)


# The page ---------------------------------------------------------------------------------------------------

_ASK_PAGE = (
    _PRELUDE
    + """
import encodings.idna, urllib.error, urllib.request
become_other()
for path in sys.argv[2:]:
    asked = urllib.request.Request(sys.argv[1] + path, headers={"X-Forwarded-For": "10.0.0.1"})
    try:
        print(path, urllib.request.urlopen(asked, timeout=30).status)
    except urllib.error.HTTPError as error:
        print(path, error.code)
"""
)


@needs_root
@pytest.mark.parametrize(("trusted", "status"), [((), 403), (("--allow-user", str(STRANGER)), 200)])
def test_the_page_is_for_the_users_of_the_store(trusted: tuple[str, ...], status: int) -> None:
    pytest.importorskip("uvicorn")
    paths = ("", "events", "api/keys", "api/ranks/0", "metrics")
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        store.set("key", "hidden")
        words = ["web", "--store", f"127.0.0.1:{store.port}", *trusted]
        page = subprocess.Popen(
            [sys.executable, "-m", "rallypoint", *words], stdout=subprocess.PIPE, text=True
        )
        try:
            assert page.stdout is not None
            url = page.stdout.readline().split()[-1]
            command = [sys.executable, "-c", _ASK_PAGE, url, "healthz", *paths, "api/value?key=%22key%22"]
            asked = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd="/")
            assert asked.stderr == ""
            found = [line.rpartition(" ")[2] for line in asked.stdout.splitlines()]
        finally:
            end(page)
    assert found[0] == "200"
    assert [each for each in found[1:] if each != str(status)] == (["404"] if trusted else [])
    assert len(found) == 7
