"""A server process and the process that hosts it: they start together, and end together."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import psutil
import pytest

from processes import BACKENDS, end
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import BindError, RallypointError, ServerStartError, UsageError
from rallypoint.store.server.process import hosting, line
from rallypoint.store.server.process.binding import listen
from rallypoint.store.server.process.hosting import STORE_SERVER, ServerProcess, host_on
from raw import SECONDS, RawClient, is_gone, until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks and sends signals")


def servers_of(pid: int) -> list[int]:
    """The processes of the hosted servers of a process."""
    found = []
    for child in psutil.Process(pid).children():
        try:
            if "rallypoint.store.server.process.child" in " ".join(child.cmdline()):
                found.append(child.pid)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def server_of(pid: int) -> int:
    (server,) = servers_of(pid)
    return server


def master(port: int = 0, *, backend: str = "libuv", multi_tenant: bool = False) -> TCPStore:
    return TCPStore(
        "localhost", port, is_master=True, multi_tenant=multi_tenant, use_libuv=backend == "libuv"
    )


# A parent in a process of its own: it says its port, waits for a line, and then ends as the test wants.
PARENT = """
import os, signal, sys, threading
from rallypoint.client.tcp import TCPStore

def fork_one_that_stays():
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            signal.pause()
    return pid

store = TCPStore("localhost", 0, is_master=True)
"""


@contextmanager
def parent(*script: str, own_group: bool = False) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT + "\n".join(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=own_group,
    )
    try:
        yield process
    finally:
        end(process)


def line_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


ENDINGS = {
    "normal exit": "pass",
    "exception": "raise RuntimeError('as planned')",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL); signal.pause()",
    "exec": "os.execv(sys.executable, [sys.executable, '-c', ''])",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_the_server_ends_with_its_parent(ending: str) -> None:
    with parent("print('up', flush=True)", "sys.stdin.readline()", ending) as process:
        assert line_from(process) == "up"
        server = server_of(process.pid)
        _, err = process.communicate("go\n", timeout=SECONDS)
        until(lambda: is_gone(server), "the server has ended with its parent")
    assert err == "" or "as planned" in err, "it ends in silence"


@pytest.mark.parametrize(
    ("ending", "use_libuv"), [("pass", "0"), ("os.kill(os.getpid(), signal.SIGKILL)", "1")]
)
def test_the_server_ends_with_its_parent_even_if_a_fork_of_that_lives_on(
    ending: str, use_libuv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork has the parent's end of the pipe, so the server sees no end of file."""
    monkeypatch.setenv("USE_LIBUV", use_libuv)
    with parent("print(fork_one_that_stays(), flush=True)", "sys.stdin.readline()", ending) as process:
        fork = int(line_from(process))
        try:
            server = server_of(process.pid)
            tell(process)
            process.wait(SECONDS)
            until(lambda: is_gone(server), "the server has ended with its parent")
            assert not is_gone(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


def test_the_end_of_a_fork_does_not_end_the_server() -> None:
    script = """
import gc
store.set("key", "value")

def drop():
    global store
    del store
    gc.collect()

for end in (sys.exit, lambda: os._exit(0), lambda: sys.exit(1), lambda: store.close(), drop):
    pid = os.fork()
    if pid == 0:
        end()
        sys.exit()
    os.waitpid(pid, 0)
    store.set("key", store.get("key") + b" and on")
print(store.get("key").decode(), flush=True)
sys.stdin.readline()
"""
    with parent(script) as process:
        assert line_from(process) == "value" + " and on" * 5
        assert len(servers_of(process.pid)) == 1


def test_a_signal_to_the_group_leaves_the_server_to_the_parent() -> None:
    """As of a terminal at Ctrl-C, or of a launcher; the server is needed until the parent ends."""
    script = """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
print(store.port, flush=True)
for _ in range(3):
    print(int(signal.sigwait([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])), flush=True)
sys.stdin.readline()
"""
    with parent(script, own_group=True) as process:
        port = int(line_from(process))
        server = server_of(process.pid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.killpg(process.pid, number)
            assert line_from(process) == str(int(number))
            assert_serves(port)
        tell(process)
        process.wait(SECONDS)
        until(lambda: is_gone(server), "the server has ended with its parent")


def test_ctrl_c_and_the_signals_of_schedulers_to_the_server_itself_are_ignored() -> None:
    with master() as store:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(server_of(os.getpid()), number)
        assert_serves(store.port)


def test_a_server_that_is_told_to_end_stays_for_its_clients() -> None:
    """Schedulers send SIGTERM to all processes of a job, and ranks may need the store until they end."""
    with master() as store:
        server = server_of(os.getpid())
        client = TCPStore("127.0.0.1", store.port)
        os.kill(server, signal.SIGTERM)
        assert_serves(store.port)
        client.set("late", "yes")
        client.close()
        store._pool.close()
        until(lambda: is_gone(server), "the server has ended with its last client")


def assert_serves(port: int) -> None:
    """Some turns of the server's loop, in which it would heed what it was told to."""
    for _ in range(20):
        with RawClient(port) as client:
            assert client.answers()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_start_is_logged_and_close_ends_the_server(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="rallypoint.server"):
        store = master(backend=backend)
    server = server_of(os.getpid())
    (line,) = (record.getMessage() for record in caplog.records if "store server on" in record.getMessage())
    assert f":{store.port} ({backend}), process {server}," in line
    with RawClient(store.port) as client:
        assert client.answers()
        store.close()
        assert client.read_rest() == b"", "close() waits for the end of the server"
        with pytest.raises(ConnectionRefusedError):
            RawClient(store.port)
    store.close()  # once more does no harm
    assert is_gone(server)
    with pytest.raises(RallypointError, match="this store is closed"):
        store.set("key", "value")


def test_clones_keep_the_server_until_the_last_is_closed() -> None:
    store = master()
    server = server_of(os.getpid())
    clones = [store.clone(), store.clone()]
    store.set("key", "value")
    store.close()
    clones[0].close()
    clones[0].close()  # counts once
    assert clones[1].get("key") == b"value"
    assert (clones[1].port, clones[1].libuvBackend) == (store.port, store.libuvBackend)
    assert not is_gone(server)
    clones.clear()
    gc.collect()  # counts as closed
    assert is_gone(server)


def test_the_port_is_free_again_after_close() -> None:
    """With connections in TIME_WAIT, too."""
    store = master()
    assert store.port > 0
    with TCPStore("localhost", store.port) as client:
        client.set("key", "value")
        assert store.get("key") == b"value"
        store.close()
    with master(store.port) as again:
        assert not again.check(["key"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_socket_that_is_bound_already(backend: str) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        store = TCPStore(
            "localhost",
            port if backend == "libuv" else 0,  # which means the port of the socket
            is_master=True,
            master_listen_fd=bound.detach(),
            use_libuv=backend == "libuv",
        )
    with store, TCPStore("127.0.0.1", port) as client:
        assert store.port == port
        assert store.libuvBackend is (backend == "libuv")
        client.set("key", "value")
        assert store.get("key") == b"value"
    with socket.socket() as again:  # no copy of it is left open in this process
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
        again.listen()


def test_a_bound_socket_with_another_port() -> None:
    with socket.socket() as bound, socket.socket() as other:
        bound.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, wrong = bound.getsockname()[1], other.getsockname()[1]
        words = f"master_listen_fd is bound to port {port}, not to {wrong}"
        with pytest.raises(UsageError, match=words) as caught:
            TCPStore("localhost", wrong, is_master=True, master_listen_fd=bound.detach())
    assert servers_of(os.getpid()) == [], f"{caught.value}: and the server has ended with that"


def test_a_socket_that_is_not_bound() -> None:
    with socket.socket() as unbound, pytest.raises(BindError, match="bound"):
        TCPStore("localhost", 0, is_master=True, master_listen_fd=unbound.detach())


def test_tenants_of_one_port_share_a_server() -> None:
    first = master(multi_tenant=True)
    second = master(first.port, multi_tenant=True)
    try:
        server = server_of(os.getpid())
        first.set("key", "value")
        assert second.get("key") == b"value"
        first.close()
        assert not is_gone(server)
        assert second.get("key") == b"value"
    finally:
        second.close()
    assert is_gone(server)
    with master(first.port, multi_tenant=True) as third:
        assert not third.check(["key"]), "a new server"


def test_tenants_that_come_at_the_same_time_share_a_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = threading.Barrier(4)

    def come(_: int) -> TCPStore:
        start.wait()
        return master(port, multi_tenant=True)

    with ExitStack() as stack:
        with ThreadPoolExecutor(4) as pool:
            for store in pool.map(come, range(4)):
                stack.enter_context(store)
        assert len(servers_of(os.getpid())) == 1
    assert servers_of(os.getpid()) == []


def test_a_limit_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_LIMITS", "keybytes=10")
    with pytest.raises(UsageError, match=r"no limit called 'keybytes'\nhint: did you mean key_bytes\?"):
        master()


# Starting a process

SMALL_PORTIONS = """
import json, sys
sys.path[:] = json.loads(sys.argv[-1])
from rallypoint.store.server.process import line
line._AT_ONCE = 2
sys.path.insert(0, "")
"""


def test_many_sockets_are_handed_over_and_the_default_timeout_is_no_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line, "_AT_ONCE", 2)
    monkeypatch.setattr(hosting, "_BOOTSTRAP", SMALL_PORTIONS + hosting._BOOTSTRAP)
    socket.setdefaulttimeout(5.0)
    try:
        listeners = listen("127.0.0.1", 0, 5)
        count = len(listeners)
        ready = ServerProcess(STORE_SERVER)
        process = psutil.Process(ready.popen.pid)
        until(lambda: process.status() == psutil.STATUS_SLEEPING, "it waits for its order")
        hosted = host_on(listeners, STORE_SERVER, {"workers": 0}, prepared=ready)
    finally:
        socket.setdefaulttimeout(None)
    assert len(process.net_connections()) == count >= 5
    hosted.release()


BROKEN_CHILDREN = {
    "silence": ("import time; time.sleep(60)", r"was not ready after 0\.1 s"),
    "exit code": (
        "print('welcome to this machine'); raise SystemExit(7)",
        "ended before it was ready, with exit code 7\n.*welcome to this machine",
    ),
    "signal": ("import os; os.kill(os.getpid(), 9)", "ended before it was ready, by signal SIGKILL"),
    "its own words": (
        "import json, sys\n"
        "sys.path[:] = json.loads(sys.argv.pop())\n"
        "from rallypoint.store.server.process import child\n"
        "def make_loop(*_): raise OSError('the epoll is empty')\n"
        "child.make_loop = make_loop\n"
        "child.main()\n",
        "failed at its start:\n(.*\n)*OSError: the epoll is empty",
    ),
}


@pytest.mark.parametrize(("child", "words"), BROKEN_CHILDREN.values(), ids=BROKEN_CHILDREN.keys())
def test_a_child_that_dies_at_its_start(
    child: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children()
    monkeypatch.setattr(hosting, "_BOOTSTRAP", child)
    if "sleep" in child:
        monkeypatch.setattr(hosting, "START_SECONDS", 0.1)
    with pytest.raises(ServerStartError, match=words):
        master()
    assert psutil.Process().children() == before


def test_an_interpreter_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ServerStartError, match=r"cannot start '/nowhere/python'.*\nhint: .*rallypoint serve"):
        master()


def test_a_module_in_the_current_folder_does_not_disturb_the_server(
    tmp_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("json.py", "selectors.py", "rallypoint.py"):
        with open(name, "w") as file:
            file.write("raise RuntimeError('the wrong module')\n")
    with master() as store:
        store.set("key", "value")


def test_a_server_that_was_killed_is_an_error_and_then_close_still_works() -> None:
    with master() as store:
        store.set("key", "value")
        store.set_timeout(0.2)
        server = server_of(os.getpid())
        os.kill(server, signal.SIGKILL)
        until(lambda: is_gone(server), "the server has ended")
        with pytest.raises(ConnectionError):
            store.set("key", "value")
