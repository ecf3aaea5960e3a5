"""The locked door: TLS and a secret, against real sockets, with somebody in the middle as well.

A connection of loopback stays within the machine, where no TLS is spoken. `elsewhere` makes both ends take it
for one between two machines.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cable import recording
from jobs import free_port, job
from namespaces import two_machines
from processes import BACKENDS, end
from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import AccessError, ConnectError, ConnectionLostError, RallypointError, UsageError
from rallypoint.store.connect import connecting
from rallypoint.store.connect.connection import guard as guard_socket
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.core.store import Core
from rallypoint.store.machine.socket_owner import NoUser, SocketTable
from rallypoint.store.relay.reaching import find_upstream
from rallypoint.store.relay.relay import Relay
from rallypoint.store.rollcall.identity import Identity, Role
from rallypoint.store.rollcall.question import Question
from rallypoint.store.server.guard import other_users
from rallypoint.store.server.guard import secret as guard
from rallypoint.store.server.guard import tls as certificate
from rallypoint.store.server.guard.secret import Secret, Token, job_secret, make_secret
from rallypoint.store.server.guard.tls import server_tls
from rallypoint.store.server.loops import pump
from rallypoint.store.server.loops.guarded import Door
from rallypoint.store.server.loops.loop import Loop
from rallypoint.store.server.loops.pump import Pump
from rallypoint.store.server.process.hosting import host_server
from rallypoint.store.wire.encoding import VALIDATE, pack_i64, request
from rallypoint.store.wire.opcodes import Op
from raw import RawClient, until
from threads import running_here

pytestmark = pytest.mark.windows

_TEXT, _OTHER = "5e" * 32, "07" * 32


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_held", [])
    for name in (guard.SECRET_VARIABLE, guard.FILE_VARIABLE, guard.LOOK_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients and servers take each other for processes of another machine."""
    monkeypatch.setattr(other_users, "_system_tells", lambda: False)
    monkeypatch.setattr(pump, "is_within_machine", lambda *_: False)
    monkeypatch.setattr(SocketTable, "owner_of", lambda *_: NoUser.ELSEWHERE)


def _locked(loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
    server = Pump(loop, Core(turn=loop.turn), listeners)
    server.door = Door(Secret(_TEXT, "the test"), loop)
    return server


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return partial(monkeypatch.setenv, guard.SECRET_VARIABLE)


def _store(port: int, seconds: float = 5.0) -> TCPStore:
    return TCPStore("127.0.0.1", port, timeout=seconds)


# Who comes in ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("backend", BACKENDS)
def test_with_the_secret_all_is_as_ever(backend: str, have: Callable[[str], None]) -> None:
    large = os.urandom(3 << 20)
    have(_TEXT)
    with running_here(_locked, backend=backend) as port, _store(port) as store, _store(port) as other:
        store.set("large", large)
        assert other.get("large") == large
        assert store.add("n", 2) + other.add("n", 3) == 7
        waiter = threading.Thread(target=other.wait, args=(["late"],))
        waiter.start()
        store.set("late", "x")
        waiter.join(5)
        assert not waiter.is_alive()


@pytest.mark.usefixtures("elsewhere")
def test_without_the_secret_nobody_comes_in(have: Callable[[str], None]) -> None:
    with running_here(_locked) as port:
        with pytest.raises(AccessError, match="takes nobody from another machine without the job's secret"):
            _store(port)
        with RawClient(port, shake_hands=False) as raw:  # as torch's own client
            raw.send(VALIDATE)
            assert raw.read_rest() == b"\x15TLS"
        have(_OTHER)
        with pytest.raises(AccessError, match=r"127.0.0.1:\d+ is not trusted: it does not prove"):
            _store(port)
        have(_TEXT)
        with _store(port) as store:
            assert store.num_keys() == 0
        seen = fetch_snapshot("127.0.0.1", port, Question(), Deadline(5.0))
    reasons = " ".join(error.reason for error in seen.errors)
    assert "without the job's secret" in reasons
    assert "it has another secret" in reasons


@pytest.mark.usefixtures("elsewhere")
def test_a_store_without_a_secret_gets_nothing_from_a_client_with_one(have: Callable[[str], None]) -> None:
    have(_TEXT)
    with (
        running_here(lambda loop, listeners: Pump(loop, Core(turn=loop.turn), listeners)) as port,
        pytest.raises(AccessError, match="it takes no TLS: it has no secret"),
    ):
        _store(port)

    def babble(caller: socket.socket) -> None:
        caller.recv(1)
        caller.sendall(b"no tls here")
        caller.recv(1 << 16)

    with _answering(babble) as port, pytest.raises(AccessError, match="it speaks no TLS"):
        _store(port)


@contextmanager
def _answering(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server for one client that is no store."""

    def accept() -> None:
        caller, _ = listener.accept()
        with closing(caller):
            serve(caller)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join()


def test_a_client_of_this_machine_needs_none() -> None:
    """A rank speaks plain TCP, and has nothing to show."""
    with running_here(_locked) as port, _store(port) as store:
        assert store.add("n", 1) == 1


@pytest.mark.usefixtures("elsewhere")
def test_a_token_may_look_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    token = Secret(_TEXT, "the test").token
    monkeypatch.setenv(guard.LOOK_VARIABLE, token)
    with running_here(_locked) as port:
        assert fetch_snapshot("127.0.0.1", port, Question(), Deadline(5.0)).kind == "server"
        with pytest.raises(AccessError, match="without the job's secret"):
            _store(port)
        # Somebody who does not keep to that.
        monkeypatch.setattr(connecting, "job_secret", guard.snapshot_credentials)
        store = _store(port)
        asked: list[Callable[[], object]] = [
            lambda: store.set("k", "v"),
            lambda: store.check(["k"]),
            store.num_keys,
            store.list_keys,
            lambda: store.delete_key("k"),
        ]
        for ask in asked:
            with pytest.raises(ConnectionLostError):
                ask()
        store.close()
        monkeypatch.setenv(guard.SECRET_VARIABLE, _TEXT)
        with _store(port) as store:
            assert store.num_keys() == 0
        errors = fetch_snapshot("127.0.0.1", port, Question(), Deadline(5.0)).errors
    assert sum("with a token that may only look" in each.reason for each in errors) == len(asked)


@pytest.mark.usefixtures("elsewhere")
def test_a_token_sees_no_value_and_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(guard.LOOK_VARIABLE, Secret(_TEXT, "the test").token)
    with running_here(_locked) as port:
        with pytest.raises(ConnectionLostError):
            fetch_snapshot("127.0.0.1", port, Question(value="k"), Deadline(5.0))
        who = Identity("elsewhere", 1, rank=3, world_size=4, role=Role.RANK)
        with closing(connecting.connect("127.0.0.1", port, Deadline(5.0), who, snapshot_only=True)):
            snapshot = fetch_snapshot("127.0.0.1", port, Question(), Deadline(5.0))
    assert all(client.who.rank == -1 for client in snapshot.clients)
    assert "a snapshot with a value" in snapshot.errors[0].reason


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_broken_record_ends_its_own_connection_alone(backend: str, have: Callable[[str], None]) -> None:
    """Also if the client is still owed an answer."""
    have(_TEXT)
    with running_here(_locked, backend=backend) as port, _store(port) as bystander:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                stream = guard_socket(sock, "127.0.0.1", "it", Secret(_TEXT, "the test"), Deadline(5.0))
                question = request(Op.SNAPSHOT, Question(keys=100).to_json())
                sock.sendall(stream._channel.seal(VALIDATE + question) + b"\x17\x03\x03\x00\x20" + bytes(32))
                sock.settimeout(5)
                while sock.recv(1 << 16):
                    pass
            assert bystander.add("n", 1)
        reasons = [
            each.reason for each in fetch_snapshot("127.0.0.1", port, Question(), Deadline(5.0)).errors
        ]
    assert sum("TLS failed" in reason for reason in reasons) == 5


@pytest.mark.usefixtures("elsewhere")
def test_a_server_that_drips_uses_up_no_more_than_the_time(have: Callable[[str], None]) -> None:
    have(_TEXT)
    over = threading.Event()

    def drip(caller: socket.socket) -> None:
        caller.recv(1 << 16)
        with suppress(OSError):
            for byte in b"\x16\x03\x03\x10\x00" + bytes(100):
                caller.sendall(bytes([byte]))
                if over.wait(0.1):
                    return

    with _answering(drip) as port:
        began = time.monotonic()
        with pytest.raises(ConnectError):
            _store(port, 0.5)
        assert time.monotonic() - began < 3
        over.set()


@pytest.mark.usefixtures("elsewhere")
def test_a_relay_proves_the_secret_upstream(have: Callable[[str], None]) -> None:
    """Ranks speak plainly to their relay; the relay does not to the store."""
    have(_TEXT)
    with running_here(_locked) as port, recording(port) as (between, asked, answered):
        upstream = find_upstream([("127.0.0.1", between)], 5.0)
        with running_here(lambda loop, listeners: Relay(loop, upstream, listeners)) as here:
            with RawClient(here) as rank:
                rank.send(request(Op.ADD, b"/a-key-of-a-rank", tail=pack_i64(7)))
                assert rank.read_number() == 7
            with _store(port) as store:
                assert store.add("a-key-of-a-rank", 0) == 7
    assert b"a-key-of-a-rank" not in b"".join([*asked, *answered])


# Somebody in the middle ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("elsewhere")
def test_a_listener_in_the_middle_learns_nothing_and_changes_nothing(have: Callable[[str], None]) -> None:
    flip: list[int] = []

    def change(data: bytes) -> bytes:
        if not flip:
            return data
        flip.pop()
        return data[:-1] + bytes([data[-1] ^ 1])

    have(_TEXT)
    with running_here(_locked) as port, recording(port, change) as (between, asked, answered):
        with _store(between) as store:
            store.set("a-very-long-key-name", "a-very-secret-value")
            assert store.get("a-very-long-key-name") == b"a-very-secret-value"
            flip.append(1)
            with pytest.raises(RallypointError):
                store.set("a-very-long-key-name", "changed")
        with _store(port) as store:
            assert store.get("a-very-long-key-name") == b"a-very-secret-value"
        whole = b"".join([*asked, *answered])
        for word in (b"a-very-long-key", b"secret-value", b"rallypoint/hello", bytes.fromhex(_TEXT)):
            assert word not in whole


def _believing() -> ssl.SSLContext:
    """For a client that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@pytest.mark.usefixtures("elsewhere")
def test_a_certificate_in_the_middle_is_not_enough(have: Callable[[str], None]) -> None:
    """Somebody with a certificate of his own, who passes on all that is said, the proofs included."""
    have(_TEXT)
    mine = server_tls().context
    outward = _believing()
    heard: list[bytes] = []

    def in_the_middle(caller: socket.socket) -> None:
        with (
            mine.wrap_socket(caller, server_side=True) as client,
            socket.create_connection(("127.0.0.1", port)) as sock,
            outward.wrap_socket(sock) as server,
        ):
            server.sendall(client.recv(1 << 10))  # hello
            client.sendall(server.recv(1 << 10))  # nonce and proof
            heard.append(client.recv(1 << 10))

    with (
        running_here(_locked) as port,
        _answering(in_the_middle) as between,
        pytest.raises(AccessError, match="somebody is in between"),
    ):
        _store(between)
    assert heard == [b"\x00"]  # no proof, no key


# Certificates ----------------------------------------------------------------------------------------------


def _signed(folder: Path, name: str, *, days: int, host: str = "127.0.0.1") -> Path:
    """A certificate and its key, in one file, which is its own authority."""
    import ipaddress

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(timezone.utc)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=30))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(pem, *form) + made.public_bytes(pem))
    return path


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("days", "host", "told"),
    [
        (30, "127.0.0.1", ""),
        (-1, "127.0.0.1", "certificate has expired"),
        (30, "127.0.0.9", "IP address mismatch"),
    ],
    ids=["good", "expired", "of-another-host"],
)
def test_the_users_own_certificate_is_verified(
    days: int,
    host: str,
    told: str,
    have: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(_TEXT)
    path = _signed(tmp_path, "mine", days=days, host=host)
    monkeypatch.setenv(certificate.CERTIFICATE_VARIABLE, str(path))
    monkeypatch.setenv(certificate.AUTHORITY_VARIABLE, str(path))
    with running_here(_locked) as port:
        if told:
            with pytest.raises(AccessError, match=f"its certificate is refused: .*{told}"):
                _store(port)
        else:
            with _store(port) as store:
                assert store.add("n", 1) == 1
            monkeypatch.setenv(certificate.AUTHORITY_VARIABLE, str(_signed(tmp_path, "other", days=9)))
            with pytest.raises(AccessError, match="its certificate is refused"):
                _store(port)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
def test_a_certificate_is_made_by_the_package_or_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (certificate._make_by_package, certificate._make_by_program):
        monkeypatch.setattr(certificate, "_make", make)
        assert len(server_tls().certificate) == 32
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="no certificate could be made"):
        server_tls()
    monkeypatch.setenv(certificate.CERTIFICATE_VARIABLE, "/no/such/file")
    with pytest.raises(UsageError, match=r"'/no/such/file' .* cannot be used: No such file"):
        server_tls()


# The secret itself -----------------------------------------------------------------------------------------


def _run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-m", "rallypoint", *words], capture_output=True, text=True, env=environ, timeout=60
    )


def test_a_token_is_no_secret() -> None:
    with pytest.raises(UsageError, match="holds a token, which may only look"):
        Secret(Secret(_TEXT, "the test").token, "the variable")
    with pytest.raises(UsageError, match="RALLYPOINT_TOKEN holds no token"):
        Token(_TEXT)


def test_the_command_makes_a_secret_and_its_token(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    made = _run("secret", "--output", str(path))
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    assert sys.platform == "win32" or path.stat().st_mode & 0o777 == 0o600
    assert _run("secret", "--output", str(path)).returncode == 1  # none is written over
    token = _run("secret", "--look", RALLYPOINT_SECRET_FILE=str(path)).stdout.strip()
    assert token == Secret(path.read_text(), "the file").token
    assert re.fullmatch(r"[0-9a-f]{64}", _run("secret").stdout.strip())
    assert _run("secret", "--look").returncode == 2


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell who may read a file")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_read_is_no_secret(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.write_text(_TEXT)
    monkeypatch.setenv(guard.FILE_VARIABLE, str(path))
    path.chmod(0o600)
    found = job_secret()
    assert found is not None
    assert found.text == _TEXT
    path.chmod(mode)
    with pytest.raises(UsageError, match="others than its owner may read or write it"):
        job_secret()


_AS_A_POD = """
import os, sys
from rallypoint.errors import UsageError
from rallypoint.store.server.guard.secret import job_secret
import rallypoint.store.wire.preface  # while modules of root may be read

for owner, mode, group in ((0, 0o440, 7), (0, 0o460, 7), (0, 0o444, 7), (9, 0o440, 7), (0, 0o440, 8)):
    os.chown("secret", owner, 7)
    os.chmod("secret", mode)
    os.setgroups([group])
    os.seteuid(5)
    try:
        print(job_secret() is not None)
    except UsageError:
        print(False)
    os.seteuid(0)
"""


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="it takes root to give files away")
def test_a_file_of_roots_that_a_group_of_this_process_may_read(tmp_path: Path) -> None:
    """As Kubernetes mounts a Secret where a pod is not root: mode 440, with the group of the pod."""
    tmp_path.chmod(0o755)
    (tmp_path / "secret").write_text(_TEXT)
    environ = {**os.environ, guard.FILE_VARIABLE: "secret"}
    told = subprocess.check_output(
        [sys.executable, "-c", _AS_A_POD], cwd=tmp_path, env=environ, text=True, timeout=60
    )
    assert told.split() == ["True", "False", "False", "False", "False"]


@pytest.mark.parametrize("text", ["abc", _TEXT[:-1], _TEXT + "0", "x" * 64, "token-" + _TEXT])
def test_what_is_no_secret_is_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="does not hold 64 hexadecimal digits") as refused:
        Secret(text, "the variable")
    assert text not in str(refused.value)


def test_a_server_process_gets_it_through_a_pipe(have: Callable[[str], None]) -> None:
    """It is neither in the command line nor in the environment of the process; and it is on no `repr`."""
    have(_TEXT)
    server = host_server("0.0.0.0", 0)
    try:
        if sys.platform == "linux":
            for name in ("cmdline", "environ"):
                assert _TEXT.encode() not in Path(f"/proc/{server.pid}/{name}").read_bytes()
        with socket.create_connection(server.address) as sock, _believing().wrap_socket(sock) as tls:
            assert tls.version() == "TLSv1.3"  # so it has the secret
    finally:
        server.release()
    assert _TEXT not in repr(job_secret())


# A whole job -----------------------------------------------------------------------------------------------

_RANK = """
import os, socket
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
store.set(f"the-key-of-{rank}", f"the-value-of-{rank}")
others = store.get(f"the-key-of-{1 - rank}").decode()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
    plain.sendto(b"seen on the wire", (os.environ["MASTER_ADDR"], 9))
print("got", others, "secret", os.environ.get("RALLYPOINT_SECRET"), flush=True)
dist.barrier()
"""

# Prints all that passes an interface, until it is ended.
_CAPTURE = """
import os, socket, sys
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as wire:
    wire.bind((sys.argv[1], 0))
    os.write(1, b"ready")
    while True:
        os.write(1, wire.recv(1 << 17))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_a_job_with_a_secret_tells_the_wire_nothing(tmp_path: Path) -> None:
    """Two machines, unmodified ranks; a capture of the cable; and a stranger at the meeting place."""
    secret = make_secret()
    with two_machines() as machines, job(tmp_path) as running, (tmp_path / "wire").open("w+b") as wire:
        if machines[0] == machines[1]:
            pytest.skip("network namespaces need root")
        capture = subprocess.Popen(
            [*machines[1].prefix, sys.executable, "-c", _CAPTURE, machines[1].interface], stdout=wire
        )
        try:
            until(lambda: os.fstat(wire.fileno()).st_size, "the capture")
            endpoint = f"{machines[0].address}:{free_port()}"
            options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint)
            for machine in machines:
                environ = {"RALLYPOINT_SECRET": secret, "GLOO_SOCKET_IFNAME": machine.interface}
                running.start(_RANK, options, environ, ("-m", "rallypoint", "run"), machine.prefix)
            stranger = [*machines[1].prefix, sys.executable, "-m", "rallypoint", "kv", "list"]
            until(lambda: "got" in running.logs(), "a rank", 90.0)
            refused = subprocess.run(
                [*stranger, "--store", endpoint], capture_output=True, text=True, timeout=60
            )
            assert running.wait() == [0, 0], running.logs()
            for number in (0, 1):
                assert f"got the-value-of-{1 - number} secret None" in running.log(number)
            assert secret not in running.logs()
        finally:
            end(capture)
        wire.seek(0)
        seen = wire.read()
    assert refused.returncode == 1
    assert "takes nobody from another machine without the job's secret" in refused.stderr
    assert b"seen on the wire" in seen  # so the capture works
    for word in (
        b"the-key-of",
        b"the-value-of",
        b"rallypoint/meeting",
        secret.encode(),
        bytes.fromhex(secret),
    ):
        assert word not in seen
