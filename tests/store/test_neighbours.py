"""The processes behind a server's sockets: found by a child process while the loop goes on."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from processes import end, has_ipv6
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.rollcall.identity import NOBODY, Identity
from rallypoint.store.server import neighbours, neighbours_program
from rallypoint.store.server.loops.backend import Choice, make_loop
from rallypoint.store.server.neighbours import Found, Process, ProcessNames, Search, command_for
from rallypoint.store.server.neighbours_program import Connection, Family, Variables, clients_of
from raw import SECONDS, is_gone, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scripts and limits of Linux")

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="there is no ::1 here")

# Both ends of a connection ----------------------------------------------------------------------------------

CLIENT, SERVER, FAR = ("127.0.0.1", 50_000), ("127.0.0.1", 29_448), ("10.0.0.2", 29_448)
BOTH_ENDS = [Connection(CLIENT, SERVER, 7), Connection(SERVER, CLIENT, 8)]


@pytest.mark.parametrize(
    ("connections", "found"),
    [
        pytest.param(BOTH_ENDS, {CLIENT: 7}, id="a client"),
        pytest.param([Connection(SERVER, ("10.0.0.2", 50_000), 8)], {}, id="a client on another machine"),
        pytest.param([Connection(CLIENT, FAR, 7)], {}, id="a client of another machine"),
        pytest.param([*BOTH_ENDS, Connection(CLIENT, FAR, 9)], {CLIENT: 7}, id="of both, by one port"),
        pytest.param(
            [Connection(CLIENT, SERVER, None), Connection(SERVER, CLIENT, 8)], {}, id="another user's"
        ),
        pytest.param([Connection(CLIENT, ("127.0.0.1", 80), 7)], {}, id="a client of another port"),
    ],
)
def test_clients_are_those_at_the_other_end(
    connections: list[Connection], found: dict[tuple[str, int], int]
) -> None:
    assert clients_of(connections, [29_448]) == found


# Whose rank is believed -------------------------------------------------------------------------------------


NONE, RANK_0, RANK_1 = Variables(), Variables(0, 0, 2), Variables(1, 1, 2)


@dataclass
class Person:
    """A process: its parent, the variables that it has got, whether it is connected, and what it runs."""

    parent: int
    variables: Variables = NONE
    is_client: bool = True
    program: str = "python"


SHELL = Person(1, RANK_0, False, "sh")
MACHINE_1 = Variables(1, -1, 2)


@pytest.mark.parametrize(
    ("people", "ranks"),
    [
        pytest.param({5: Person(1), 6: Person(5, RANK_0), 7: Person(5, RANK_1)}, {6, 7}, id="a launcher"),
        pytest.param({6: Person(1, RANK_0), 7: Person(1, RANK_0)}, {6, 7}, id="two jobs"),
        pytest.param(
            {6: SHELL, 7: Person(6, RANK_0), 8: Person(6, RANK_0, False, "tee")}, {7}, id="a rank and a pipe"
        ),
        pytest.param({6: SHELL, 7: Person(6, RANK_0), 8: Person(6, RANK_0)}, set(), id="two in a shell"),
        pytest.param({6: SHELL, 7: Person(6, RANK_0), 8: Person(7, RANK_0)}, {7}, id="a rank and its child"),
        pytest.param(
            {6: Person(1, RANK_0), 7: Person(6, RANK_0, False, "sh"), 8: Person(7, RANK_0, True, "other")},
            {6},
            id="a child of another program",
        ),
        pytest.param({6: Person(1, RANK_0, False), 7: Person(6, RANK_0)}, set(), id="the first of mp.spawn"),
        pytest.param(
            {6: Person(1, RANK_0, False), 7: Person(6, RANK_0, False, "sh"), 8: Person(7, RANK_0)},
            set(),
            id="a script in a script",
        ),
        pytest.param(
            {6: Person(1, MACHINE_1), 7: Person(6, Variables(1, 0, 2))},
            {7},
            id="a launcher with the rank of its machine",
        ),
        pytest.param(
            {6: Person(1, MACHINE_1), 7: Person(6, Variables(8, 0, 16), False)},
            set(),
            id="the same, alone here",
        ),
        pytest.param({6: Person(1, RANK_0), 7: Person(6, RANK_1)}, {6, 7}, id="rank 0 starts rank 1"),
        pytest.param({6: Person(7, RANK_0), 7: Person(6, RANK_0)}, set(), id="no family can be like this"),
    ],
)
def test_a_rank_that_is_inherited_is_not_believed(people: Mapping[int, Person], ranks: set[int]) -> None:
    clients = {pid for pid, each in people.items() if each.is_client and each.variables != NONE}
    everybody = defaultdict(lambda: Person(0), people)
    family = Family(
        {pid: each.parent for pid, each in people.items()},
        lambda pid: everybody[pid].variables,
        lambda pid: everybody[pid].program,
    )
    assert {pid for pid in clients if family.believes(pid, clients)} == ranks


# Real sockets, real processes -------------------------------------------------------------------------------

# Each process prints a line, `PID PORT`, when it is connected, and ends with its standard input.
BEGIN = """
import os, socket, subprocess, sys
def connect():
    client = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
    client.connect((sys.argv[1], int(sys.argv[2])))
    return client
def stay(client):
    told = f"{os.getpid()} {client.getsockname()[1]}\\n"
    os.write(1, told.encode())  # at once: others write to the same pipe
    sys.stdin.read()
"""
PLAIN = BEGIN + "stay(connect())"
LATE = BEGIN + "os.environ['RANK'] = '5'; stay(connect())"
FORK = BEGIN + "client = connect(); os.fork(); stay(client)"
AGENT = (
    BEGIN
    + """
for rank in ("3", "2"):
    given = {**os.environ, "RANK": rank, "WORLD_SIZE": "4"}
    subprocess.Popen([sys.executable, "-c", sys.argv[3], *sys.argv[1:3]], env=given)
stay(connect())
"""
)


@contextmanager
def running(
    script: str, place: tuple[str, int], *words: str, variables: str = "", processes: int = 1
) -> Iterator[list[list[int]]]:
    """A process, and what it and its children print: by pid, each with its port."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("RANK", "WORLD_SIZE"))}
    process = subprocess.Popen(
        [sys.executable, "-c", script, place[0], str(place[1]), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**kept, **dict(pair.split("=") for pair in variables.split())},
    )
    try:
        assert process.stdout is not None
        yield sorted([int(word) for word in process.stdout.readline().split()] for _ in range(processes))
    finally:
        end(process)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "LIMIT_SECONDS", SECONDS)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with _listening("127.0.0.1") as made:
        yield made


@contextmanager
def _listening(host: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # One socket, unlike those of `binding.listen`: so it is clear which one accepts.
    with socket.create_server((host, 0), family=family, backlog=4096, dualstack_ipv6=host == "::") as made:
        yield made


def find(*listeners: socket.socket) -> Found:
    return search(command_for(each.getsockname()[1] for each in listeners)).found


def search(command: Sequence[str]) -> Search:
    made = Search(command)
    made.join(2 * SECONDS)
    assert not made.is_alive(), "no answer"
    return made


@pytest.mark.parametrize(
    ("host", "client"),
    [
        pytest.param("127.0.0.1", "127.0.0.1", id="IPv4"),
        pytest.param("::1", "::1", id="IPv6", marks=needs_ipv6),
        pytest.param("::", "127.0.0.1", id="IPv4 on a socket for both", marks=needs_ipv6),
        pytest.param("127.0.0.1", "::ffff:127.0.0.1", id="an IPv6 socket to IPv4", marks=needs_ipv6),
    ],
)
def test_a_client_is_found_as_accept_calls_it(host: str, client: str) -> None:
    with _listening(host) as listener:
        place = (client, listener.getsockname()[1])
        with running(PLAIN, place, variables="RANK=3 LOCAL_RANK=1 WORLD_SIZE=8") as [[pid, _]]:
            accepted, address = listener.accept()
            with accepted:
                assert find(listener) == {address[:2]: Process(pid, 3, 1, 8)}


def test_several_ports_and_a_rank_that_a_script_has_set(listener: socket.socket) -> None:
    with (
        _listening("127.0.0.1") as other,
        running(PLAIN, other.getsockname()) as [[first, _]],
        running(LATE, listener.getsockname(), variables="WORLD_SIZE=8") as [[second, _]],
    ):
        assert set(find(other, listener).values()) == {Process(first), Process(second)}


def test_a_fork_that_shares_a_socket(listener: socket.socket) -> None:
    """As the workers of a data loader do. The process that opened it is told while it lives."""
    with running(FORK, listener.getsockname(), variables="RANK=3", processes=2) as told:
        (first, port), (second, _) = told
        for pid in (first, second):
            assert find(listener) == {("127.0.0.1", port): Process(pid, 3)}
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: is_gone(pid), "the process has ended")  # type: ignore[misc]


def test_an_agent_and_its_ranks(listener: socket.socket) -> None:
    """The variables of the agent mean its machine: it has started its ranks with others."""
    with running(
        *(AGENT, listener.getsockname(), PLAIN), variables="RANK=3 WORLD_SIZE=2", processes=3
    ) as told:
        found = find(listener).values()
        agents = {each.pid for each in found if psutil.Process(each.pid).ppid() == os.getpid()}
    assert sorted(each.pid for each in found) == [pid for pid, _ in told]
    assert [each.rank for each in found if each.pid in agents] == [-1]
    assert sorted(each.rank for each in found if each.pid not in agents) == [2, 3]


def test_a_process_that_has_ended_is_no_reason_to_fail() -> None:
    nobody = 1 << 30
    assert neighbours_program._variables_of(nobody) == NONE
    assert neighbours_program._ends_of(nobody) == set()
    assert neighbours_program._program_of(nobody) != neighbours_program._program_of(nobody + 1)


# A child that fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "trouble"),
    [
        pytest.param([sys.executable, "-S", "-c", "print('hello')"], "Expecting value", id="garbage"),
        pytest.param([sys.executable, "-S", "-c", "print([1])"], "not enough values", id="another answer"),
        pytest.param([sys.executable, "-S", "-c", "raise SystemExit(3)"], "exit status 3", id="an error"),
        pytest.param([sys.executable, "-S", "-c", "while True: pass"], "timed out", id="no end"),
        pytest.param(["/nowhere"], "No such file", id="no program"),
    ],
)
def test_a_child_that_fails(command: list[str], trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if trouble == "timed out":
        monkeypatch.setattr(neighbours, "LIMIT_SECONDS", 0.2)
    before = set(psutil.Process().children())
    failed = search(command)
    assert failed.found == {}
    assert trouble in str(failed.error)
    assert set(psutil.Process().children()) <= before, "nothing is left behind"


def test_closing_ends_the_child(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = "import os, sys; open(sys.argv[1], 'w').write(f'{os.getpid()}.')\nwhile True: pass"
    with naming([sys.executable, "-S", "-c", script, str(file)]) as (names, core):
        names.find()
        until(lambda: file.exists() and file.read_text().endswith("."), "the child runs")
        names.close()
        assert is_gone(int(file.read_text()[:-1]))
        core.loop.later(0.05, core.loop.stop)
        core.loop.run()
        assert not core.pids, "named after the end"


# Naming clients ---------------------------------------------------------------------------------------------


class NamingCore:
    """What `ProcessNames` asks of a core: a client without a name at each search, which connected before."""

    def __init__(self) -> None:
        self.loop = make_loop(Choice.LEGACY)[0]
        self.clients = self
        self.about = self
        self.host = "here"
        self.client = SimpleNamespace(peer="1:1", since=0.0, is_nameless=True, tries=0, who=NOBODY)
        self.pids: list[int] = []
        self.searches = 0
        self.on_found: Callable[[], object] = self.loop.stop

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return iter([self.client])

    def name(self, _: SimpleNamespace, who: Identity) -> None:
        self.pids.append(who.pid)

    def processes_found(self) -> None:
        self.searches += 1
        self.on_found()


@contextmanager
def naming(command: list[str]) -> Iterator[tuple[ProcessNames, NamingCore]]:
    core = NamingCore()
    with closing(core.loop):
        names = ProcessNames(core.loop, cast("ServerCore[Any]", core), (), command)
        with closing(names):
            yield names, core


def counting(file: Path) -> list[str]:
    """A command that notes each run in a file, and finds a process whose pid is the number of the run."""
    script = (
        "import os, sys; file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR | os.O_APPEND)\n"
        "import json; os.write(file, b'.')\n"
        "print(json.dumps([os.fstat(file).st_size, -1, -1, -1, [['1', 1]]]))"
    )
    return [sys.executable, "-S", "-c", script, str(file)]


@pytest.mark.parametrize(("pause", "pids"), [(SECONDS, [1, 1, 1]), (0.0, [1, 2, 3])])
def test_within_a_pause_the_last_search_is_used_again(
    pause: float, pids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "PAUSE_SECONDS", pause)
    with naming(counting(tmp_path / "runs")) as (names, core):
        core.on_found = lambda: core.loop.stop() if core.searches == 3 else names.find()
        names.find()
        assert not core.searches, "called back at once"
        core.loop.run()
    assert core.pids == pids
    assert core.client.tries == 3


def test_a_search_that_times_out_is_no_try_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(neighbours, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(neighbours, "PAUSE_SECONDS", 0.0)
    turns: list[float] = []

    def turn() -> None:
        turns.append(time.monotonic())
        core.loop.later(0.01, turn)

    with (
        caplog.at_level(logging.DEBUG, "rallypoint.server"),
        naming([sys.executable, "-S", "-c", "while True: pass"]) as (names, core),
    ):
        core.on_found = lambda: core.loop.stop() if core.searches == 2 else names.find()
        names.find()
        turn()
        core.loop.run()
    assert core.pids == []
    assert core.client.tries == 0
    assert len(turns) > 4, "the loop goes on meanwhile"
    (logged,) = (each for each in caplog.records if each.name == "rallypoint.server")  # once
    assert logged.levelno == logging.DEBUG
    assert "timed out" in logged.getMessage()
