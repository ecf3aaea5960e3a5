"""`rallypoint status`: against servers and relays, torch's own server, and a job with a rank held back."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from command_line import Outcome, invoke
from processes import Server, end, relaying, serving, torch_serving
from rallypoint.client.snapshots import fetch_snapshot, fetch_snapshot_over
from rallypoint.client.tcp import TCPStore
from rallypoint.frames import Frame
from rallypoint.launch.stacks.activity import MachineActivity, RankActivity, pack
from rallypoint.launch.stacks.progress import put_together
from rallypoint.launch.stacks.words import summary_lines
from rallypoint.store.connect.connecting import connect
from rallypoint.store.connect.connection import Connection
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import NOBODY, Identity, Role
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.question import STALL, Question
from rallypoint.store.rollcall.roll import Roll
from rallypoint.store.wire.encoding import counted_request
from rallypoint.store.wire.opcodes import Op
from rolls import GLOO
from threads import serving_in_a_thread

pytestmark = pytest.mark.windows

SECONDS = 60.0
HOSTS = ("node-a", "node-b")


@dataclass
class Place:
    """Where a server or a relay is."""

    port: int
    host: str = "127.0.0.1"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def status(*words: str) -> Outcome:
    return invoke("status", *words)


class Job:
    """Ranks that are only connections, at a server or a relay."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.ranks: dict[int, Connection] = {}

    def join(
        self, server: Server | Place, rank: int, *, world_size: int = 4, says_who: bool = True
    ) -> Connection:
        who = Identity(HOSTS[rank // 2], 100 + rank, rank, rank % 2, world_size, Role.RANK)
        connection = connect(server.host, server.port, Deadline(SECONDS), who if says_who else NOBODY)
        self.ranks[rank] = self._stack.enter_context(closing(connection))
        return connection

    def wait(self, rank: int, key: str) -> None:
        self.ranks[rank].send(counted_request(Op.WAIT, [b"/" + key.encode()]), Deadline(SECONDS))


@pytest.fixture
def server() -> Iterator[Place]:
    """A server without a past, in this process: each test tells the whole of what it has seen."""
    with serving_in_a_thread(0) as port:
        yield Place(port)


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack)


def until(server: Server | Place, holds: Callable[[Roll], bool]) -> Roll:
    """The roll, as soon as it is as it should be."""
    deadline = Deadline(SECONDS)
    while not deadline.passed:
        roll = judge(fetch_snapshot(server.host, server.port, Question(), deadline))
        if holds(roll):
            return roll
        time.sleep(0.02)  # whoever is awaited needs the processor
    raise AssertionError(roll)


def all_wait(count: int) -> Callable[[Roll], bool]:
    return lambda roll: sum(len(each.ranks) + each.others for each in roll.awaited) == count


# One look


def test_the_missing_come_first_and_make_it_fail(server: Place, job: Job) -> None:
    for rank in (0, 1, 2):
        job.join(server, rank)
        job.wait(rank, GLOO.format(3))
    until(server, all_wait(3))
    found = status(server.address)
    assert found.exit_code == 1
    assert found.lines[0].startswith(
        "3 of 4 ranks joined; missing: 3 (machine not known); ranks 0 to 2 wait for"
    )
    assert found.lines[2].startswith("waits     ")
    assert "machines  machine not known: rank 3: 1 late" in found.lines
    assert "          node-a: ranks 0 and 1: 2 waiting" in found.lines
    assert any(line.startswith("store     0 keys, 0 B; 3 clients") for line in found.lines)
    assert found.said == ""


def test_waits_keys_and_a_rank(server: Place, job: Job) -> None:
    job.join(server, 0)
    job.wait(0, GLOO.format(3))
    with TCPStore(server.host, server.port, timeout=SECONDS, role=Role.TOOL) as store:
        store.set("alpha", b"12345")
        store.set("beta", b"")
    until(server, all_wait(1))
    (line,) = status(server.address, "--waits").lines
    assert line.endswith(f": rank 0 for `{GLOO.format(3)}`; rank 3 should write it: it has not come")
    keys = status(server.address, "--keys").lines
    assert [each.split()[-1] for each in keys] == ["key", "alpha", "beta"]
    assert keys[1].split()[:2] == ["5", "B"]
    assert [each.split()[-1] for each in status(server.address, "--keys", "--search", "alp").lines] == [
        "key",
        "alpha",
    ]
    here = status(server.address, "--rank", "0")
    assert (here.exit_code, here.lines[1]) == (0, "machine   node-a, process 100, local rank 0")
    assert status(server.address, "--rank", "3").exit_code == 1


def test_what_ranks_do_is_told_by_their_launcher(server: Place) -> None:
    stack = (Frame("/home/me/data.py", 88, "load"),)
    with TCPStore(server.host, server.port, timeout=SECONDS, role=Role.AGENT) as launcher:
        launcher.report(pack(MachineActivity("node-a", (RankActivity(2, 102, stack, 252.0),))))
        found = status(server.address, "--stacks")
        assert found.exit_code == 0
        assert found.lines[-4:] == [
            "rank 2 on node-a is in load (data.py:88), for 4 min 12 s; no rank is elsewhere",
            "",
            "rank 2 on node-a is in load (data.py:88), for 4 min 12 s",
            "  load  /home/me/data.py:88",
        ]
        told = json.loads(invoke("stacks", server.address, "--json").stdout)
        assert [each["ranks"] for each in told["groups"]] == [[2]]
        assert invoke("stacks", server.address).lines == found.lines[-4:]
        assert invoke("stacks", server.address, "--ranks", "0-1").exit_code == 1
        assert invoke("stacks", server.address, "--ranks", "1-").exit_code == 2
        found = status(server.address, "--rank", "2")
        assert (found.exit_code, found.lines[0]) == (1, "rank 2: the store knows nothing of it")
        assert "does      load (data.py:88)" in found.lines
        told = json.loads(status(server.address, "--stacks", "--json").stdout)
        assert told["work"]["groups"][0]["ranks"] == [2]


def test_the_summary_of_a_stall_is_printed_once(server: Place) -> None:
    stack = (Frame("/home/me/data.py", 88, "load"),)
    with TCPStore(server.host, server.port, timeout=SECONDS, role=Role.AGENT) as launcher:
        machine = MachineActivity("node-a", (RankActivity(2, 102, stack, 252.0),))
        launcher.report(pack(machine))
        launcher.set(STALL, "\n".join(summary_lines(put_together([machine]))))
        for found in (invoke("stacks", server.address), status(server.address, "--stacks")):
            assert sum("no rank is elsewhere" in line for line in found.lines) == 1
        launcher.delete_key(STALL)


def test_stacks_at_a_relay_are_those_of_the_whole_job(tmp_path: Path) -> None:
    ranks = tuple(RankActivity(rank, 102, (Frame("/home/me/data.py", 88, "load"),)) for rank in range(2))
    with (tmp_path / "log").open("w+") as log, ExitStack() as ends:
        server = ends.enter_context(serving("libuv", log))
        with relaying(server.address, log) as relay:
            launcher = TCPStore(server.host, server.port, timeout=SECONDS, role=Role.AGENT)
            ends.enter_context(launcher).report(pack(MachineActivity("node-a", ranks)))
            found = invoke("stacks", relay.address)
            assert found.exit_code == 0, found
            assert found.lines[0] == "all 2 ranks are in load (data.py:88); no rank is elsewhere"
            ends.close()
            found = invoke("stacks", relay.address)
            assert found.exit_code == 1
            assert "is a relay, and the job's store behind it cannot be reached" in found.said


def test_looking_changes_nothing(server: Place) -> None:
    for words in ((), ("--waits",), ("--keys",), ("--rank", "0"), ("--json",)):
        status(server.address, *words)
    told = fetch_snapshot(server.host, server.port, Question(keys=9), Deadline(SECONDS))
    assert (told.keys, told.key_count, told.workers) == ((), 0, 0)


# Relays


def test_a_relay_tells_its_part_and_the_server_the_whole(tmp_path: Path, job: Job) -> None:
    with (tmp_path / "log").open("w+") as log, serving("libuv", log) as server:
        with relaying(server.address, log) as relay:
            job.join(server, 0)
            job.join(relay, 2)
            job.wait(0, "k")
            job.wait(2, "k")
            until(server, all_wait(2))
            whole = status(server.address)
            assert whole.lines[0].startswith(
                "2 of 4 ranks joined; missing: 1 and 3 (machine not known); ranks 0 and 2"
            )
            assert any("1 client, 1 relay" in line for line in whole.lines)
            mine = status(relay.address)
            assert mine.exit_code == 0
            assert mine.lines[0].startswith(
                "1 rank joined; how many are expected is not known; rank 2 waits for `k`"
            )
            assert any(line.startswith("remarks   this is a relay") for line in mine.lines)
            with TCPStore(server.host, server.port, timeout=SECONDS, role=Role.TOOL) as store:
                for value, row in (
                    (f'["node-a", {server.port}]', f"relay     of the server node-a:{server.port}; up "),
                    ('["node-a"]', "relay     up "),
                    ("junk", "relay     up "),
                ):
                    store.set("rallypoint/head", value)
                    assert any(line.startswith(row) for line in status(relay.address).lines)
            assert status(server.address, "--rank", "2").exit_code == 0
        until(server, lambda roll: bool(roll.unseen))
        lost = status(server.address)
        assert lost.lines[0].startswith("2 of 4 ranks joined; not seen: 1 and 3")
        assert any("has lost its connection" in line for line in lost.lines)


# Torch's own server


@pytest.mark.parametrize("use_libuv", [True, False], ids=["libuv", "legacy"])
def test_torchs_own_server_is_told_by_its_keys(use_libuv: bool) -> None:
    with torch_serving(use_libuv) as port, ExitStack() as stack:
        for words in ((), ("--keys",), ("--json",)):
            assert status(f"127.0.0.1:{port}", *words).exit_code == 0
        with TCPStore("127.0.0.1", port, timeout=SECONDS) as store:
            assert store.num_keys() == 0, "who looks changes nothing"
        store = stack.enter_context(TCPStore("127.0.0.1", port, 3, timeout=SECONDS))
        for rank in (0, 2):
            store.set(GLOO.format(rank), struct.pack("<Q", 6) + b"node-a" + b"rest")
        found = status(f"127.0.0.1:{port}")
        assert found.exit_code == 0
        assert (
            found.lines[0]
            == f"127.0.0.1:{port} is a server of torch's own, which does not tell who its clients are"
        )
        assert found.lines[2:5] == [
            "keys      3",
            "workers   1 counted in; of how many is not known",
            "ranks     0 and 2 on node-a came; who is still here is not known",
        ]
        assert status(f"127.0.0.1:{port}", "--keys").lines == [GLOO.format(0), GLOO.format(2)]
        content = json.loads(status(f"127.0.0.1:{port}", "--json").stdout)
        assert content["torch"]["writers"] == {"0": "node-a", "2": "node-a"}


def test_what_torchs_own_server_cannot_tell_is_an_error() -> None:
    with torch_serving(True) as port:
        for words in (("--waits",), ("--stacks",), ("--rank", "0"), ("--waits", "--watch")):
            found = status(f"127.0.0.1:{port}", *words)
            assert found.exit_code == 1
            assert "is not Rallypoint's" in found.said
            assert "hint: " in found.said


def test_a_server_that_lists_no_keys_is_asked_for_those_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_keys(store: TCPStore) -> list[str]:
        """Ask for what torch's server does not know: it ends the connection, as older ones do for a list."""
        with store._exchange(b"\xc8") as (connection, deadline):
            connection.read_i64(deadline)
        raise AssertionError("it has answered")

    monkeypatch.setattr(TCPStore, "list_keys", list_keys)
    with torch_serving(True) as port, TCPStore("127.0.0.1", port, timeout=SECONDS) as store:
        store.set(GLOO.format(1), b"")
        found = status(f"127.0.0.1:{port}")
        keys = status(f"127.0.0.1:{port}", "--keys")
    assert found.lines[2:4] == ["keys      1", "ranks     1 came; who is still here is not known"]
    assert keys.lines == ["1 key; this version of torch's server does not list them"]


# Usage


WRONG = {
    ("localhost:0",): "the store is 'localhost:0'",
    ("a/b:1",): "the store is 'a/b:1'",
    ("localhost:1", "--waits", "--keys"): "--waits, --keys, --stacks and --rank are for different things",
    (
        "localhost:1",
        "--waits",
        "--rank",
        "0",
    ): "--waits, --keys, --stacks and --rank are for different things",
    ("localhost:1", "--stacks", "--keys"): "are for different things",
    ("localhost:1", "--search", "x"): "--search is for keys",
    ("localhost:1", "--watch", "--json"): "--watch shows no JSON",
}


def test_what_cannot_be_meant() -> None:
    for words, message in WRONG.items():
        found = status(*words)
        assert (found.exit_code, found.stdout) == (2, ""), words
        assert message in found.said
        assert "hint: " in found.said


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = status(f"127.0.0.1:{port}")
    assert (found.exit_code, found.stdout) == (1, "")
    assert f"127.0.0.1:{port}" in found.said


# Watching


class Screen:
    """What a process has written to a pipe or a terminal so far."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._read = 0
        self.all = ""

    def await_text(self, text: str) -> None:
        """Read on until this has been written behind what was awaited before."""
        deadline = Deadline(SECONDS)
        while (found := self.all.find(text, self._read)) < 0:
            assert select.select([self._descriptor], [], [], deadline.remaining)[0], self.all
            data = os.read(self._descriptor, 65536)
            assert data, self.all
            self.all += data.decode(errors="replace")
        self._read = found + len(text)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(SECONDS)


@contextmanager
def watching(*words: str, terminal: bool) -> Iterator[Screen]:
    ours, theirs = os.openpty() if terminal else os.pipe()
    command = [sys.executable, "-m", "rallypoint", "status", *words, "--watch"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Screen(process, ours)
    finally:
        end(process)
        os.close(ours)


@pytest.mark.skipif(sys.platform == "win32", reason="no such terminal")
@pytest.mark.slow
def test_watching_a_server_that_goes_and_comes_back(tmp_path: Path, job: Job) -> None:
    """On a terminal, and without one, at the same time."""
    with (tmp_path / "log").open("w+") as log, ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        server = Place(first.enter_context(serving_in_a_thread(0)))
        screens = [stack.enter_context(watching(server.address, terminal=each)) for each in (True, False)]
        await_text(screens, "0 ranks joined")
        job.join(server, 0)
        await_text(screens, "1 of 4 ranks joined")
        first.close()
        await_text(screens, "no answer")
        again = stack.enter_context(serving("libuv", log, ["--port", str(server.port)]))
        job.join(again, 1)
        await_text(screens, "1 of 4 ranks joined; missing: 0")
        assert [screen.interrupt() for screen in screens] == [0, 0]


def await_text(screens: Sequence[Screen], text: str) -> None:
    for screen in screens:
        screen.await_text(text)


@pytest.mark.skipif(sys.platform == "win32", reason="select() takes no pipes there")
def test_without_a_terminal_only_news_is_printed(server: Place, job: Job) -> None:
    with (
        watching(server.address, terminal=False) as screen,
        closing(connect(server.host, server.port, Deadline(SECONDS), Identity(role=Role.TOOL))) as eyes,
    ):
        screen.await_text("0 ranks joined")
        await_looks(eyes, 3)
        job.join(server, 0)
        screen.await_text("1 of 4 ranks joined")
        assert screen.all.count("ranks joined") == 2


def await_looks(eyes: Connection, count: int) -> None:
    """Until others have connected so often."""
    deadline = Deadline(SECONDS)
    before = fetch_snapshot_over(eyes, "it", Question(), deadline).accepted
    while fetch_snapshot_over(eyes, "it", Question(), deadline).accepted < before + count:
        assert not deadline.passed
