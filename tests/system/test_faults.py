"""Faults on purpose: a server, a launcher or a limit gives way, and the message says which one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from jobs import DONE, TRAIN, Job, free_port, job
from processes import Server
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import ConnectError, ConnectionLostError
from rallypoint.pytorch import servers
from rallypoint.store.machine.system import holder_of
from rallypoint.store.server.loops.backend import Choice
from raw import RawClient, until

_RUN = ("-m", "rallypoint", "run")
_MIB = 1 << 20

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")

_BEGIN = """
import os, signal, sys, time

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def await_file(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""

# A store that is killed ------------------------------------------------------------------------------------

_ASKS_LATER = (
    _BEGIN
    + """
from rallypoint import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False, 60)
say("up", os.environ["RALLYPOINT_RELAY"], os.environ["RALLYPOINT_RELAY_OF"])
await_file("go")
store.get("what nobody writes")
"""
)


def _store_of(running: Job) -> int:
    """The process of the store of a job on one machine."""
    stores = [
        each for each in running.processes() if "rallypoint.store.server.process.child" in each.cmdline()
    ]
    assert len(stores) == 1, stores
    return stores[0].pid


@pytest.mark.slow
def test_a_store_that_is_killed_is_told_at_once_and_again_at_the_end(tmp_path: Path) -> None:
    """The ranks, which know a relay alone, name the store behind it, too."""
    with job(tmp_path) as running:
        running.start(_ASKS_LATER, ["--nproc-per-node=2", "--relay=on"], command=_RUN)
        running.await_text("up 127.0.0.1:", count=2)
        running.await_text("2 of 2 ranks have joined")
        store = _store_of(running)
        os.kill(store, signal.SIGKILL)
        running.await_text(f"rallypoint: the job's store (process {store} on ")
        assert "has ended by signal SIGKILL: ranks that do not need it go on" in running.log()
        assert running.agents[0].poll() is None
        (tmp_path / "go").touch()
        assert running.wait() == [1], running.logs()
        told, _, summary = running.log().rpartition("\nrallypoint: ")
        relay, head = re.findall(r"^up (\S+) (\S+)$", told, re.MULTILINE)[0]
        assert f"the connection to the store at {relay}, a relay of the store at {head}, was lost" in told
        assert f"the store at {head} is lost: nothing has listened there" in told
        assert re.match(rf"the job's store \(process {store} on .*\) has ended by signal SIGKILL\n", summary)
        assert re.search(r"^what followed from that:\n  rank \d", summary, re.MULTILINE), summary


@pytest.mark.slow
def test_a_job_that_does_not_need_its_store_any_more_ends_well_without_it(tmp_path: Path) -> None:
    script = _BEGIN + "say('up')\nawait_file('go')\n"
    with job(tmp_path) as running:
        running.start(script, [], command=_RUN)
        running.await_text("up")
        store = _store_of(running)
        os.kill(store, signal.SIGKILL)
        running.await_text(f"rallypoint: the job's store (process {store} on ")
        (tmp_path / "go").touch()
        assert running.wait() == [0], running.logs()
        assert "Traceback" not in running.log()


@pytest.mark.slow
def test_a_store_that_is_killed_on_another_machine_is_named_there(tmp_path: Path) -> None:
    script = (
        TRAIN
        + "say('up')\n"
        + "dist.new_group([0, 1])\n"
        + ("while not os.path.exists('go'): time.sleep(0.01)\ndist.new_group([0, 1])\ntime.sleep(600)" + DONE)
    )
    port = free_port()
    options = ["--nnodes=2", f"--rdzv-endpoint=localhost:{port}", "--nproc-per-node=1"]
    with job(tmp_path) as running:
        for _ in range(2):
            running.start(script, options, command=_RUN)
        for number in (0, 1):
            running.await_text("up", number)
        holder = int((holder_of(port) or "").split()[1])
        os.kill(holder, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert running.wait() == [1, 1], running.logs()
        named = [f"the job's store (process {holder} on " in running.log(number) for number in (0, 1)]
        assert sorted(named) == [False, True], running.logs()
        other = running.log(named.index(False))
        assert f"\nrallypoint: the job's store at localhost:{port} cannot be reached any more\n" in other


def test_a_server_behind_a_store_of_torch_that_is_killed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As under `rallypoint run -- torchrun`, on a torch without libuv."""
    owned = servers.open_server("127.0.0.1", 0, backend=Choice.AUTO, multi_tenant=False, listen_fd=None)
    try:
        os.kill(owned.server.pid, signal.SIGKILL)
        until(lambda: "has ended by signal SIGKILL: ranks that do not" in caplog.text, "it is told")
        assert f"the job's store (process {owned.server.pid} on " in caplog.text
    finally:
        owned.server.release()
        del servers._servers[owned.server.port]


# A launcher that is killed ----------------------------------------------------------------------------------

# Rank 0 does not listen to SIGTERM; rank 1 leaves a daemon behind, which is nobody's child.
_STUBBORN = (
    _BEGIN
    + """
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        say("daemon", os.getpid(), ".")
        time.sleep(600)
    os._exit(0)
say("up")
time.sleep(600)
"""
)


def test_all_end_when_the_launcher_is_killed_but_not_the_daemons_of_the_script(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with job(tmp_path) as running:
        launcher = running.start(_STUBBORN, ["--nproc-per-node=2"], environ, command=_RUN)
        running.await_text("up", count=2)
        running.await_text(" .")
        daemon = int(re.findall(r"daemon (\d+)", running.log())[0])
        named = [" ".join(each.cmdline()) for each in running.processes()]
        ours = [each for each in named if not each.startswith("rallypoint: ")]  # of a template
        assert len(ours) == 6, "launcher, agent, store, two ranks and a daemon"
        launcher.kill()
        until(lambda: [each.pid for each in running.processes()] == [daemon], "only the daemon is left")
        assert list(tmp_path.glob("rallypoint-*")) != []
        subprocess.run([sys.executable, *_RUN, "--", sys.executable, "-c", ""], env=environ, check=True)
        assert list(tmp_path.glob("rallypoint-*")) == []


def test_ranks_end_when_the_agent_is_killed_and_the_launcher_says_so(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    with job(tmp_path) as running:
        environ = {**os.environ, "TMPDIR": str(files)}
        launcher = running.start(_STUBBORN, ["--nproc-per-node=2"], environ, command=_RUN)
        running.await_text("up", count=2)
        running.await_text(" .")
        daemon = int(re.findall(r"daemon (\d+)", running.log())[0])
        [agent] = [each for each in running.processes() if "rallypoint.pytorch.agent" in each.cmdline()]
        agent.kill()
        until(lambda: [each.pid for each in running.processes()] == [daemon], "only the daemon is left")
        assert launcher.wait() == -signal.SIGKILL
        assert f"torchrun's agent (process {agent.pid} on " in running.log()
        assert "has ended by signal SIGKILL\n\nhint: somebody sent it SIGKILL" in running.log()
        assert list(files.iterdir()) == [], "torchrun's own files are gone, too"


@linux
def test_a_command_ends_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
        launcher = running.start("", ["--", *sleeper], command=_RUN)
        running.await_text("up")
        launcher.kill()
        until(lambda: not running.processes(), "the command has ended")


# A server without open files, and requests over a limit -----------------------------------------------------


@linux
def test_a_server_that_may_open_no_more_files_is_named(any_server: Server) -> None:
    process = psutil.Process(any_server.process.pid)
    limits = process.rlimit(psutil.RLIMIT_NOFILE)
    with RawClient(any_server.port) as first:
        assert first.get(b"/missing") == b""  # so a relay has reached its store
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), limits[1]))
        try:
            with pytest.raises(ConnectError) as caught:
                TCPStore("127.0.0.1", any_server.port, timeout=0.5)
        finally:
            process.rlimit(psutil.RLIMIT_NOFILE, limits)
    named = rf"process {process.pid} \(.*rallypoint (serve|relay).*\) has all of its \d+ files open"
    assert re.match(named, caught.value.hint), caught.value


_TOO_MUCH: list[tuple[Callable[[TCPStore], object], str]] = [
    (
        lambda store: store.set("key", bytes(8 * _MIB + 1)),
        "SET with a value of 8,388,609 bytes; the limit value_bytes is 8,388,608",
    ),
    (
        lambda store: store.get("k" * 8192),
        "WAIT with a key of 8,193 bytes; the limit key_bytes is 8,192",
    ),
    (
        lambda store: store.add("k" * 8192, 1),
        "ADD with a key of 8,193 bytes; the limit key_bytes is 8,192",
    ),
    (
        lambda store: store.multi_set(["a", "b"], [b"", bytes(9 * _MIB)]),
        "MULTI_SET with a value of 9,437,184 bytes; the limit value_bytes is 8,388,608",
    ),
]


def test_the_limit_that_a_request_breaks_is_named(any_server: Server) -> None:
    with TCPStore("127.0.0.1", any_server.port, timeout=30) as store:
        for ask, broken in _TOO_MUCH:
            with pytest.raises(ConnectionLostError) as caught:
                ask(store)
            assert f"was lost behind a request that is over a limit: {broken}" in caught.value.message
        store.set("key", bytes(8 * _MIB))
        assert len(store.get("key")) == 8 * _MIB


def test_a_limit_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_LIMITS", "value_bytes=10")
    with (
        TCPStore("127.0.0.1", 0, is_master=True, timeout=30) as store,
        pytest.raises(ConnectionLostError, match="value of 11 bytes; the limit value_bytes is 10"),
    ):
        store.set("key", bytes(11))
