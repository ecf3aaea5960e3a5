"""What the doctor finds at an endpoint: a store, a stranger or nobody; and whether ports and locks hold."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from processes import torch_serving
from rallypoint.diagnose.doctor import machine, network, stores
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.doctor.stores import check_store, meet
from rallypoint.diagnose.findings import Fix, State, ok
from rallypoint.errors import BindError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.store.machine.interfaces import Interface
from rallypoint.store.server.process import binding
from raw import SECONDS, RawClient
from threads import serving_in_a_thread

F, W, OK = State.FAILURE, State.WARNING, State.OK
HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks do not wait long for a stranger that says nothing."""
    monkeypatch.setattr(stores, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(stores, "_HERE_S", 0.2)
    monkeypatch.setattr(stores, "_STRANGER_S", 0.3)


def situation(port: int, host: str = HERE, **environ: str) -> Situation:
    return Situation(environ, Endpoint(host, port), Path())


Speak = Callable[[socket.socket], None]


@contextmanager
def stranger(speak: Speak) -> Iterator[int]:
    """Something that accepts connections on a port, and is no store."""
    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(SECONDS)
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                caller, _ = listener.accept()
                with caller:
                    caller.settimeout(SECONDS)
                    if not done.is_set():
                        speak(caller)

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield port
        finally:
            done.set()
            socket.create_connection((HERE, port)).close()
            thread.join(SECONDS)
            assert not thread.is_alive()


def says(words: bytes, *, unasked: bool = False) -> Speak:
    """A service that says the same whatever it is told: at once, or when it is told something."""

    def speak(caller: socket.socket) -> None:
        try:
            if unasked or caller.recv(100):
                caller.sendall(words)
                while caller.recv(100):
                    pass
        except OSError:  # the caller has heard enough
            pass

    return speak


greets = partial(says, unasked=True)


# Stores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relays", [0, 1])
def test_our_own_store_is_met_and_not_changed(relays: int) -> None:
    with serving_in_a_thread(relays) as port, RawClient(port) as client:
        client.set(b"a", b"1")
        found = meet(Endpoint(HERE, port))
        assert found.kind == "a store of Rallypoint's"
        assert 0 < found.round_trip < SECONDS
        assert found.keys == 1
        [finding] = check_store(situation(port))
        assert finding.state is OK
        assert finding.found.startswith(f"a store of Rallypoint's at {HERE}:{port}, with 1 key, answers in ")
        assert client.get(b"a") == b"1"


@pytest.mark.parametrize(
    ("use_libuv", "kind"),
    [(True, "a store of torch's (libuv)"), (False, "a store of torch's (legacy, or older than 2.7)")],
)
def test_a_store_of_torchs_is_told_apart(use_libuv: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_PATIENCE_S", SECONDS)
    with torch_serving(use_libuv) as port:
        found = meet(Endpoint(HERE, port), SECONDS)
        assert found.kind == kind
        before = found.keys
        [finding] = check_store(situation(port))
        assert finding.found.startswith(f"{kind} at {HERE}:{port}, with {before} key")
        assert finding.state is not F


def test_our_own_stores_on_the_addresses_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_LIBUV", "perhaps")  # which is another check's business
    [found] = stores.check_loopback(situation(1))
    assert found.state is OK
    assert found.found.startswith("a store of ours at 127.0.0.1 answers in ")
    monkeypatch.setattr(network, "interfaces", lambda: [Interface("eth7", True, ("127.0.0.2",))])
    monkeypatch.setattr(Interface, "leads_out", True)
    [found] = stores.check_interface(situation(1))
    assert found.state is OK
    assert found.found.startswith("a store of ours at 127.0.0.2 answers in ")
    monkeypatch.setattr(network, "interfaces", list)
    assert list(stores.check_interface(situation(1))) == []


# Strangers -------------------------------------------------------------------------------------------------

WEB = b"HTTP/1.0 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("speak", "what"),
    [
        pytest.param(says(WEB), "a web server", id="web"),
        pytest.param(greets(b"SSH-2.0-OpenSSH_9.6\r\n"), "an SSH server", id="ssh"),
        pytest.param(says(b"-ERR unknown command\r\n"), "a Redis server", id="redis"),
        pytest.param(says(b"\x15\x03\x01\x00\x02\x02\x46"), "a server that speaks TLS", id="tls"),
        pytest.param(greets(b"220 mail.example.org ESMTP\r\n"), "a mail or FTP server", id="mail"),
        pytest.param(greets(b"welcome"), "a program that says b'welcome'", id="other"),
        pytest.param(socket.socket.close, "a program that ends every connection", id="hangs up"),
        pytest.param(greets(b""), "a program that accepts connections and does not answer", id="silent"),
    ],
)
def test_a_stranger_is_recognised_and_its_process_named(speak: Speak, what: str) -> None:
    with stranger(speak) as port:
        [found] = check_store(situation(port))
    assert found.state is F
    assert found.found.startswith(f"at {HERE}:{port} is {what}: no store, held by process {os.getpid()} (")
    assert found.hint == "take another port, the same on all machines"


def test_a_stranger_elsewhere_has_no_process_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "is_this_machine", lambda _: False)
    with stranger(says(WEB)) as port:
        text = stores.describe_stranger(Endpoint(HERE, port))
    assert text == f"at {HERE}:{port} is a web server: no store"


# Nobody ----------------------------------------------------------------------------------------------------


def refused_port() -> int:
    with socket.create_server((HERE, 0)) as listener:
        return int(listener.getsockname()[1])


def test_only_with_what_may_be_torchs_server_is_there_much_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HERE, 0)) as listener:
        here = Endpoint(HERE, listener.getsockname()[1])
        for library, patience in (("libc.so", 0.3), ("no-such-library", 0.2)):
            monkeypatch.setattr(stores, "_TORCH_LIBRARY", library)
            assert stores._patience(here) == patience
        assert stores._patience(here._replace(host="192.0.2.1")) == 0.3, "of another machine nothing is known"


def test_without_an_endpoint_there_is_nothing_to_knock_at() -> None:
    nowhere = Situation({}, None, Path())
    assert list(check_store(nowhere)) == list(stores.check_port(nowhere)) == []
    assert list(check_store(situation(0))) == list(stores.check_port(situation(0))) == []
    assert list(stores.check_port(situation(29_500, "192.0.2.1"))) == [], "another machine's"


# The port --------------------------------------------------------------------------------------------------


@pytest.fixture
def few_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system whose clients get ports that nothing here uses."""
    monkeypatch.setattr(stores, "client_ports", lambda: (65_534, 65_535))


def test_a_port_that_is_in_use_and_by_whom(few_for_clients: None) -> None:
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
        [found] = stores.check_port(situation(port))
    assert (found.state, found.fix) == (W, None)
    assert found.found.startswith(f"{port} is in use by process {os.getpid()} (")
    assert "take another port: 2" in found.hint


def test_a_port_of_the_range_for_clients_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    port = refused_port()
    monkeypatch.setattr(stores, "client_ports", lambda: (port, port))
    [found] = stores.check_port(situation(port))
    assert found.state is W
    assert found.found.startswith(f"{port} is free, but of the range {port} to {port} that the system gives")
    assert found.fix is not None
    assert found.fix == Fix("run", "rdzv-endpoint", f"{HERE}:{found.hint.rpartition(' ')[2]}")
    free = int(found.fix.value.rpartition(":")[2])
    assert free in (*range(29_500, 29_550), *range(20_000, 20_050))


def test_a_free_port_is_none_of_those_in_use_or_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def try_port(_: str, port: int) -> None:
        asked.append(port)
        if port < 20_003:
            raise BindError("no rights")

    monkeypatch.setattr(stores, "try_port", try_port)
    monkeypatch.setattr(stores, "client_ports", lambda: (29_500, 60_999))
    assert stores._free_port(Endpoint(HERE, 20_000)) == 20_003
    assert asked == [20_001, 20_002, 20_003]
    monkeypatch.setattr(stores, "client_ports", lambda: (1024, 65_535))
    assert stores._free_port(Endpoint(HERE, 20_000)) == 0
    [found] = stores.check_port(situation(30_000))
    assert (found.state, found.fix) == (W, None)


def test_a_port_that_may_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str, port: int) -> None:
        raise BindError(f"port {port} is not for you")

    monkeypatch.setattr(stores, "try_port", refuse)
    [found] = stores.check_port(situation(80))
    assert (found.state, found.found) == (F, "port 80 is not for you")
    assert found.hint == "take another one: 29500"


def test_trying_a_port_neither_listens_nor_logs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, few_for_clients: None
) -> None:
    """Checks run at the same time: what one of them binds for a moment, another must not meet."""
    port = refused_port()
    listened: list[object] = []
    monkeypatch.setattr(socket.socket, "listen", lambda *words: listened.append(words))
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    monkeypatch.setattr(binding, "addresses_of", lambda _: [HERE])
    assert list(stores.check_port(situation(port, "me"))) == [ok(f"{port} is free")]
    assert (listened, caplog.messages) == ([], [])


# File init -------------------------------------------------------------------------------------------------


def test_locks_hold_in_a_local_folder(tmp_path: Path) -> None:
    [found] = machine.check_file_init(Situation({}, None, tmp_path))
    assert found.state is OK
    assert found.found.startswith(f"locks hold in {tmp_path.resolve()} (")
    assert list(tmp_path.iterdir()) == []


def test_locks_that_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks lets everybody in."""

    @contextmanager
    def open_unlocked(*_: object, **__: object) -> Iterator[int]:
        yield 0

    monkeypatch.setattr(machine, "open_locked", open_unlocked)
    [found] = machine.check_file_init(Situation({}, None, tmp_path))
    assert found.state is F
    assert "keys would get lost" in found.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("intruder", "why"),
    [
        ("import sys; sys.exit('OSError: [Errno 95] not supported')", "OSError: [Errno 95] not supported"),
        ("import sys; sys.exit(7)", "the lock failed"),
        # Network file systems do that.
        ("import threading; threading.Event().wait()", "asking for a lock takes longer than 0.5 s"),
    ],
)
def test_locks_that_cannot_be_tried(
    intruder: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_INTRUDER", intruder)
    if "0.5 s" in why:
        monkeypatch.setattr(machine, "_LOCK_SECONDS", 0.5)
    [found] = machine.check_file_init(Situation({}, None, tmp_path))
    assert (found.state, found.found.endswith(f": {why}")) == (F, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    not Path("/proc/self").is_dir(), reason="there is no file system here that takes no files"
)
def test_a_folder_that_takes_no_files() -> None:
    """Modes do not stop root; /proc stops everybody."""
    [found] = machine.check_file_init(Situation({}, None, Path("/proc")))
    assert found.state is F
    assert found.found.startswith("no file can be made and locked in /proc (proc): ")
    assert "--folder" in found.hint


def test_the_file_system_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mount(place: str, kind: str) -> object:
        return SimpleNamespace(mountpoint=place, fstype=kind)

    above = tmp_path.resolve()
    mounts = [mount("/", "ext4"), mount(str(above), "nfs4"), mount(f"{above}/data", "xfs")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert machine.file_system_of(above / "data/below") == "xfs"
    assert machine.file_system_of(above / "data-2") == "nfs4"
    assert machine.file_system_of(above.parent) == "ext4"

    def refuse(all: bool) -> object:
        raise PermissionError(13, "no")

    monkeypatch.setattr(psutil, "disk_partitions", refuse)
    assert machine.file_system_of(above) == ""
