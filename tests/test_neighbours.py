"""The processes behind a server's sockets: found by a child process, on both loops, in real processes."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processes import BACKENDS, end
from rallypoint.server.loops.backend import Choice, make_loop
from rallypoint.server.loops.loop import Loop
from rallypoint.server.reporting import neighbours_program as system_neighbours
from rallypoint.server.reporting.neighbours import Found, Neighbours, Process, Report, command_for
from rallypoint.server.reporting.neighbours_program import Family, connections, variables_in
from raw import SECONDS, is_gone, until
from threads import serving_in_a_thread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows other processes")

needs_ipv6 = pytest.mark.skipif(
    not Path("/proc/net/if_inet6").exists() or "0" * 31 + "1" not in Path("/proc/net/if_inet6").read_text(),
    reason="there is no ::1 here",
)

# What is in the kernel's tables -----------------------------------------------------------------------------

V4, V6, MAPPED = "0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"
FAR = "0200000A"
P, Q, C = ":7308", ":7309", ":C350"  # our ports, and a client's
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
CLIENT = {"socket:[7]": ("127.0.0.1", 50_000)}


def row(local: str, remote: str, inode: int, state: str = "01") -> str:
    return f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  1000  0 {inode} 1 0 20"


def both(client: str, server: str) -> list[str]:
    return [row(client, server, 7), row(server, client, 8)]


@pytest.mark.skipif(sys.byteorder != "little", reason="addresses as they stand here")
@pytest.mark.parametrize(
    ("tcp", "tcp6", "found"),
    [
        pytest.param([], [], {}, id="nobody"),
        pytest.param(both(V4 + C, V4 + P), [], CLIENT, id="IPv4"),
        pytest.param([], both(V6 + C, V6 + P), {"socket:[7]": ("::1", 50_000)}, id="IPv6"),
        pytest.param(
            [row(V4 + C, V4 + P, 7)],
            [row(MAPPED + P, MAPPED + C, 8)],
            {"socket:[7]": ("::ffff:127.0.0.1", 50_000)},
            id="an IPv4 client of a socket for both",
        ),
        pytest.param(
            [row(V4 + P, V4 + C, 8)],
            [row(MAPPED + C, MAPPED + P, 7)],
            CLIENT,
            id="an IPv6 socket that is a client of IPv4",
        ),
        pytest.param([row(V4 + P, FAR + C, 8)], [], {}, id="a client on another machine"),
        pytest.param([row(V4 + C, FAR + P, 7)], [], {}, id="a client of another machine"),
        pytest.param([*both(V4 + C, V4 + P), row(V4 + C, FAR + P, 9)], [], CLIENT, id="of both, by one port"),
        pytest.param(both(V4 + C, V4 + ":0050"), [], {}, id="another port"),
        pytest.param([row(V4 + C, V4 + P, 0, "06"), row(V4 + P, V4 + C, 8, "08")], [], {}, id="not open"),
        pytest.param(
            both(V4 + P, V4 + Q),
            [],
            {"socket:[7]": ("127.0.0.1", 29_448), "socket:[8]": ("127.0.0.1", 29_449)},
            id="each a client of the other",
        ),
        pytest.param(["", "   0: junk"], [], {}, id="nonsense"),
    ],
)
def test_clients_are_those_at_the_other_end(
    tcp: list[str], tcp6: list[str], found: dict[str, tuple[str, int]]
) -> None:
    assert connections([[HEADER, *tcp], [HEADER, *tcp6]], [29_448, 29_449]) == found


VARIABLES = [
    (b"", (-1, -1, -1)),
    (b"RANK=3\0", (3, -1, -1)),
    (b"LOCAL_RANK=1\0A=b\0RANK=12\0WORLD_SIZE=16\0", (12, 1, 16)),
    (b"RANK=3\0RANK=4\0", (3, -1, -1)),
    (b"LOCAL_RANK=1\0WORLD_SIZE=16\0", (-1, -1, -1)),
    (b"GROUP_RANK=3\0A=RANK=4\0", (-1, -1, -1)),
    (b"RANK=3\0LOCAL_RANK=many\0WORLD_SIZE=-8\0", (3, -1, -1)),
    (b"RANK=\0", (-1, -1, -1)),
    (b"RANK=\xd9\xa3\0", (-1, -1, -1)),
    (b"RANK= 3\0", (-1, -1, -1)),
    (b"RANK=9999999999\0", (-1, -1, -1)),
    (b"RANK=3", (-1, -1, -1)),  # cut off: it may be 30
    (b"python train.py --title\0\0\0\0", (-1, -1, -1)),
]


def test_variables() -> None:
    for environ, variables in VARIABLES:
        assert variables_in(environ) == variables, environ


# Whose rank is believed -------------------------------------------------------------------------------------

Variables = tuple[int, int, int]
NONE = (-1, -1, -1)
RANK_0, RANK_1 = (0, 0, 2), (1, 1, 2)


@dataclass
class Person:
    """A process: its parent, the variables that it has got, whether it is connected, and what it runs."""

    parent: int
    variables: Variables = NONE
    is_client: bool = True
    program: str = "python"


def ranks_of(people: Mapping[int, Person]) -> set[int]:
    clients = {pid for pid, each in people.items() if each.is_client and each.variables != NONE}
    everybody = defaultdict(lambda: Person(0), people)
    family = Family(
        {pid: each.parent for pid, each in people.items()},
        lambda pid: everybody[pid].variables,
        lambda pid: everybody[pid].program,
    )
    return {pid for pid in clients if family.believes(pid, clients)}


SHELL = Person(1, RANK_0, False, "sh")


@pytest.mark.parametrize(
    ("people", "ranks"),
    [
        pytest.param({5: Person(1), 6: Person(5, RANK_0), 7: Person(5, RANK_1)}, {6, 7}, id="a launcher"),
        pytest.param({6: Person(1, RANK_0), 7: Person(1, RANK_0)}, {6, 7}, id="two jobs"),
        pytest.param({6: SHELL, 7: Person(6, RANK_0)}, {7}, id="a shell around a rank"),
        pytest.param(
            {6: SHELL, 7: Person(6, RANK_0), 8: Person(6, RANK_0, False, "tee")}, {7}, id="a rank and a pipe"
        ),
        pytest.param({6: SHELL, 7: Person(6, RANK_0), 8: Person(6, RANK_0)}, set(), id="two in a shell"),
        pytest.param({6: SHELL, 7: Person(6, RANK_0), 8: Person(7, RANK_0)}, {7}, id="a rank and its child"),
        pytest.param({6: Person(1, RANK_0), 7: Person(6, RANK_0), 8: Person(6, RANK_0)}, {6}, id="children"),
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
            {6: Person(1, (1, -1, 2)), 7: Person(6, (1, 1, 16)), 8: Person(6, (0, 0, 16))},
            {7, 8},
            id="a launcher with the rank of its machine",
        ),
        pytest.param(
            {6: Person(1, (1, -1, 2)), 7: Person(6, (1, 0, 2))}, {7}, id="the same, with one rank per machine"
        ),
        pytest.param(
            {6: Person(1, (1, -1, 2)), 7: Person(6, (8, 0, 16), False)}, set(), id="the same, alone here"
        ),
        pytest.param({6: Person(1, RANK_0), 7: Person(6, RANK_1)}, {6, 7}, id="rank 0 starts rank 1"),
        pytest.param({6: Person(7, RANK_0), 7: Person(6, RANK_0)}, set(), id="no family can be like this"),
    ],
)
def test_a_rank_that_is_inherited_is_not_believed(people: dict[int, Person], ranks: set[int]) -> None:
    assert ranks_of(people) == ranks


_PEOPLE = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.sampled_from([NONE, RANK_0, RANK_1, (0, -1, 1)]),
        st.booleans(),
        st.sampled_from(["python", "sh", "other"]),
    ),
    max_size=12,
)


def _origin(pid: int, people: Mapping[int, Person]) -> int:
    """The first of those who have had the variables of a process."""
    parent = people.get(people[pid].parent)
    same = parent is not None and parent.variables == people[pid].variables
    return _origin(people[pid].parent, people) if same else pid


@settings(deadline=None)
@given(_PEOPLE)
def test_variables_that_were_given_once_name_one_rank(drawn: list[tuple[int, Variables, bool, str]]) -> None:
    people = {
        pid: Person(1 + parent % (pid - 1), variables, is_client, program)
        for pid, (parent, variables, is_client, program) in enumerate(drawn, 2)
    }
    ranks = ranks_of(people)
    origins = [_origin(pid, people) for pid in ranks]
    assert len(set(origins)) == len(origins)
    assert all(people[pid].is_client and people[pid].variables != NONE for pid in ranks)


# What the child says ----------------------------------------------------------------------------------------

SAID = b"127.0.0.1 50000 7 3 1 8\n::1 50001 8 -1 -1 -1\nend\n"
MEANT = {("127.0.0.1", 50_000): Process(7, 3, 1, 8), ("::1", 50_001): Process(8)}


def test_a_report_in_pieces() -> None:
    for size in (1, 7, len(SAID)):
        report = Report()
        for start in range(0, len(SAID), size):
            assert not report.is_complete
            report.add(SAID[start : start + size])
        assert report.is_complete
        assert report.found == MEANT


NO_REPORTS = [
    b"hello\n",
    b"127.0.0.1 50000 7 3 1\n",
    b"127.0.0.1 50000 7 3 1 8 9\n",
    b"127.0.0.1 50000 seven 3 1 8\n",
    b"\n",
    b"\xff\xfe\n",
    b"x" * 300,
    SAID + b"127.0.0.1 50000 7 3 1 8\n",
]


def test_a_report_that_is_none() -> None:
    for said in NO_REPORTS:
        with pytest.raises(ValueError):  # noqa: PT011
            Report().add(said)


# Real sockets, real processes -------------------------------------------------------------------------------

# Each process prints a line, `PID PORT...`, when it is connected, and ends with its standard input.
BEGIN = """
import os, socket, struct, subprocess, sys, threading
place = (sys.argv[1], int(sys.argv[2]))
def connect(number=0):
    client = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if number:  # one address alone may not have ports enough
        client.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        client.bind((f"127.0.0.{1 + number}", 0))
    client.connect(place)
    return client
def stay(*clients):
    told = [os.getpid(), *(each.getsockname()[1] for each in clients)]
    os.write(1, (" ".join(map(str, told)) + "\\n").encode())  # at once: others write to the same pipe
    sys.stdin.read()
"""
PLAIN = BEGIN + "stay(connect())"
LATE = BEGIN + "os.environ['RANK'] = '5'; stay(connect())"
THREADS = (
    BEGIN
    + """
clients = []
threads = [threading.Thread(target=lambda: clients.append(connect())) for _ in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
stay(*clients)
"""
)
FORK = BEGIN + "client = connect(); os.fork(); stay(client)"
STARTER = (
    BEGIN
    + """
child = sys.argv[4]
for values in sys.argv[5:]:
    given = dict(pair.split("=") for pair in values.split())
    subprocess.Popen([sys.executable, "-c", child, *sys.argv[1:3]], env={**os.environ, **given})
stay(*(connect() for _ in range(int(sys.argv[3]))))
"""
)
MANY = BEGIN + "stay(*(connect(1 + number // 5000) for number in range(int(sys.argv[3]))))"


@contextmanager
def running(
    script: str, place: tuple[str, int], *words: str, variables: str = "", processes: int = 1
) -> Iterator[list[list[int]]]:
    """A process, and what it and those that it starts print: by pid, each with its ports."""
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


@pytest.fixture(params=BACKENDS)
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    """Where it is the point how a loop deals with the child; elsewhere, `one_loop` will do."""
    with _looping(request.param) as made:
        yield made


@pytest.fixture
def one_loop() -> Iterator[Loop]:
    with _looping("libuv") as made:
        yield made


@contextmanager
def _looping(backend: str) -> Iterator[Loop]:
    made, _ = make_loop(Choice(backend))
    try:
        yield made
    finally:
        made.close()


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


def run(loop: Loop, *neighbours: Neighbours) -> None:
    """Run the loop until it is stopped, and close what runs on it."""
    late: list[str] = []

    def give_up() -> None:
        late.append(f"no answer within {SECONDS:g} s")
        loop.stop()

    loop.later(SECONDS, give_up)
    try:
        loop.run()
    finally:
        for each in neighbours:
            each.close()
    assert not late


def ask(loop: Loop, neighbours: Neighbours) -> Found:
    """What it finds, once. A loop runs only once."""
    answers: list[Found] = []

    def on_done(found: Found) -> None:
        answers.append(found)
        loop.stop()

    neighbours.ask(on_done)
    assert not answers, "called back at once"
    run(loop, neighbours)
    (found,) = answers
    return found


def find(loop: Loop, listener: socket.socket) -> Found:
    return ask(loop, Neighbours(loop, [listener.getsockname()[1]], limit_seconds=SECONDS))


@pytest.mark.parametrize(
    ("host", "client"),
    [
        pytest.param("127.0.0.1", "127.0.0.1", id="IPv4"),
        pytest.param("::1", "::1", id="IPv6", marks=needs_ipv6),
        pytest.param("::", "127.0.0.1", id="IPv4 on a socket for both", marks=needs_ipv6),
        pytest.param("::", "::1", id="IPv6 on a socket for both", marks=needs_ipv6),
        pytest.param("127.0.0.1", "::ffff:127.0.0.1", id="an IPv6 socket to IPv4", marks=needs_ipv6),
    ],
)
def test_a_client_is_found_as_accept_calls_it(one_loop: Loop, host: str, client: str) -> None:
    with _listening(host) as listener:
        place = (client, listener.getsockname()[1])
        with running(PLAIN, place, variables="RANK=3 LOCAL_RANK=1 WORLD_SIZE=8") as [[pid, _]]:
            accepted, address = listener.accept()
            with accepted:
                assert find(one_loop, listener) == {address[:2]: Process(pid, 3, 1, 8)}


@pytest.mark.parametrize(
    ("script", "variables"), [(PLAIN, ""), (PLAIN, "LOCAL_RANK=1 WORLD_SIZE=8"), (LATE, "WORLD_SIZE=8")]
)
def test_without_a_rank_the_process_is_known(
    one_loop: Loop, listener: socket.socket, script: str, variables: str
) -> None:
    with running(script, listener.getsockname(), variables=variables) as [[pid, port]]:
        assert find(one_loop, listener) == {("127.0.0.1", port): Process(pid)}


def test_all_connections_of_a_process(one_loop: Loop, listener: socket.socket) -> None:
    with running(THREADS, listener.getsockname(), variables="RANK=3") as [[pid, *ports]]:
        assert len(ports) == 20
        assert find(one_loop, listener) == {("127.0.0.1", port): Process(pid, 3) for port in ports}


def test_the_servers_own_process(one_loop: Loop, listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname(), SECONDS) as client:
        found = find(one_loop, listener)
        assert {address: each.pid for address, each in found.items()} == {client.getsockname(): os.getpid()}


def test_nobody_and_others(one_loop: Loop, listener: socket.socket) -> None:
    """Clients of another port are none of ours."""
    with _listening("127.0.0.1") as other, running(PLAIN, other.getsockname()):
        assert find(one_loop, listener) == {}


def test_several_ports(one_loop: Loop, listener: socket.socket) -> None:
    with (
        _listening("127.0.0.1") as other,
        running(PLAIN, other.getsockname()) as [[first, _]],
        running(PLAIN, listener.getsockname()) as [[second, _]],
    ):
        ports = [each.getsockname()[1] for each in (other, listener)]
        found = ask(one_loop, Neighbours(one_loop, ports, limit_seconds=SECONDS))
        assert {each.pid for each in found.values()} == {first, second}


def test_a_fork_that_shares_a_socket(one_loop: Loop, listener: socket.socket) -> None:
    """The lowest pid is told while it lives, and then the other."""
    with running(FORK, listener.getsockname(), variables="RANK=3", processes=2) as told:
        (first, port), (second, _) = told
        with _looping("legacy") as alone:
            assert find(alone, listener) == {("127.0.0.1", port): Process(first, 3)}
        os.kill(first, signal.SIGKILL)
        until(lambda: is_gone(first), "the process has ended")
        assert find(one_loop, listener) == {("127.0.0.1", port): Process(second, 3)}


@pytest.mark.parametrize(
    ("own", "given", "rank", "ranks"),
    [
        pytest.param(1, ["", ""], [3], [-1, -1], id="a rank with children"),
        pytest.param(0, ["", ""], [], [-1, -1], id="children that choose their ranks by themselves"),
        pytest.param(0, ["RANK=4", "RANK=5"], [], [4, 5], id="a launcher of ranks"),
        pytest.param(1, ["RANK=3 WORLD_SIZE=4", "RANK=2 WORLD_SIZE=4"], [-1], [2, 3], id="an agent"),
        pytest.param(1, ["RANK=4"], [3], [4], id="a rank that starts another"),
    ],
)
def test_ranks_of_relatives(
    one_loop: Loop, listener: socket.socket, own: int, given: list[str], rank: list[int], ranks: list[int]
) -> None:
    """A process that is rank 3 of 2, as it was told, starts others; both may be connected."""
    with running(
        *(STARTER, listener.getsockname(), str(own), PLAIN, *given),
        variables="RANK=3 WORLD_SIZE=2",
        processes=1 + len(given),
    ):
        found = find(one_loop, listener).values()
        starters = {each.pid for each in found if psutil.Process(each.pid).ppid() == os.getpid()}
    assert [each.rank for each in found if each.pid in starters] == rank
    assert sorted(each.rank for each in found if each.pid not in starters) == ranks


def test_a_process_that_has_ended(one_loop: Loop, listener: socket.socket) -> None:
    with running(PLAIN, listener.getsockname()):
        pass
    assert find(one_loop, listener) == {}


def test_a_process_that_ends_before_it_is_looked_into(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_connection(listener.getsockname(), SECONDS) as client:
        link = os.readlink(f"/proc/self/fd/{client.fileno()}")
        monkeypatch.setattr(system_neighbours, "_pids", lambda: [1 << 30, os.getpid()])
        assert system_neighbours.owners([link, "socket:[0]"], last=0) == {link: os.getpid()}


def test_processes_that_end_meanwhile(loop: Loop, listener: socket.socket) -> None:
    """Whoever stays is found, however many come and go while the look is under way."""
    neighbours = Neighbours(loop, [listener.getsockname()[1]], limit_seconds=SECONDS, pause_seconds=0)
    passing: list[subprocess.Popen[bytes]] = []
    answers: list[Found] = []

    def churn() -> None:
        if len(answers) < 5:
            passing.append(subprocess.Popen(["true"]))
            loop.later(0.002, churn)

    def on_done(found: Found) -> None:
        answers.append(found)
        if len(answers) == 5:
            loop.stop()
        else:
            loop.later(0.05, lambda: neighbours.ask(on_done))

    with running(PLAIN, listener.getsockname(), variables="RANK=3") as [[pid, port]]:
        churn()
        neighbours.ask(on_done)
        run(loop, neighbours)
        for each in passing:
            end(each)
        assert answers == [{("127.0.0.1", port): Process(pid, 3)}] * 5


TORCH = """
import os, sys
import torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False)
store.set("key", "value")
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow  # quick: that of test_status with a rank held back
def test_a_client_of_torch(one_loop: Loop) -> None:
    with (
        serving_in_a_thread(0) as port,
        running(TORCH, ("127.0.0.1", port), variables="RANK=1 LOCAL_RANK=1 WORLD_SIZE=2") as [[pid]],
    ):
        found = ask(one_loop, Neighbours(one_loop, [port], limit_seconds=SECONDS))
        assert list(found.values()) == [Process(pid, 1, 1, 2)]


# A child that fails -----------------------------------------------------------------------------------------


def children() -> set[int]:
    """Processes of this one that have not been reaped."""
    return {each.pid for each in psutil.Process().children()}


def when_reaped(loop: Loop, before: set[int], act: Callable[[], None]) -> None:
    """Go on as soon as this process has only the children that it had before."""
    if children() - before:
        loop.later(0.01, lambda: when_reaped(loop, before, act))
    else:
        act()


@pytest.mark.parametrize(
    ("script", "trouble"),
    [
        pytest.param("print('hello world')", "cannot be read", id="garbage"),
        pytest.param("import sys; sys.exit(3)", "ended too early", id="silence"),
        pytest.param("print('127.0.0.1 1 2 3 4 5')", "ended too early", id="half"),
        pytest.param("print('x' * 1000000)", "does not end", id="a line without an end"),
        pytest.param("while True: pass", "longer than 0.2 s", id="no end"),
        pytest.param(
            "while True: print('127.0.0.1 1 2 3 4 5')", "longer than 0.2 s", id="output without an end"
        ),
        pytest.param(
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print('end', flush=True); time.sleep(3600)",
            "",
            id="an end that is none",
        ),
    ],
)
def test_a_child_that_fails(loop: Loop, script: str, trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    before = children()
    command = [sys.executable, "-S", "-c", script]
    limit = 0.2 if "longer" in trouble else SECONDS
    neighbours = Neighbours(loop, [1], command=command, limit_seconds=limit, pause_seconds=0)
    answers: list[Found] = []

    def on_done(found: Found) -> None:
        answers.append(found)
        when_reaped(loop, before, go_on)

    def go_on() -> None:
        if len(answers) < 2:
            neighbours.ask(on_done)
        else:
            loop.stop()

    with caplog.at_level(logging.DEBUG, "rallypoint.server"):
        neighbours.ask(on_done)
        run(loop, neighbours)
    assert answers == [{}] * 2
    logged = [each for each in caplog.records if each.name == "rallypoint.server"]
    assert [each.levelno for each in logged] == ([logging.DEBUG] if trouble else []), "logged once"
    assert trouble in "".join(each.getMessage() for each in logged)


def test_a_program_that_is_not_there(loop: Loop, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = set(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.DEBUG, "rallypoint.server"):
        assert ask(loop, Neighbours(loop, [1], command=[str(tmp_path / "nothing")])) == {}
    assert "No such file" in caplog.text
    assert set(os.listdir("/proc/self/fd")) == files


def test_elsewhere_nobody_is_known(one_loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert ask(one_loop, Neighbours(one_loop, [1], command=counting(tmp_path / "runs"))) == {}
    assert not (tmp_path / "runs").exists()


def test_where_the_system_reaps_children(loop: Loop, listener: socket.socket) -> None:
    """A server that was started with SIGCHLD ignored has no child to wait for."""
    with running(PLAIN, listener.getsockname()) as [[pid, port]]:
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            assert find(loop, listener) == {("127.0.0.1", port): Process(pid)}
        finally:
            signal.signal(signal.SIGCHLD, before)


def test_closing_ends_the_child(loop: Loop) -> None:
    before = children()
    files = set(os.listdir("/proc/self/fd"))
    neighbours = Neighbours(loop, [1], command=[sys.executable, "-S", "-c", "while True: pass"])
    answers: list[Found] = []
    neighbours.ask(answers.append)
    (child,) = children() - before
    neighbours.close()
    assert is_gone(child)
    assert not children() - before
    assert set(os.listdir("/proc/self/fd")) == files
    neighbours = Neighbours(loop, [1], command=["nothing"])
    neighbours.ask(answers.append)
    neighbours.close()
    loop.later(0.01, loop.stop)
    run(loop, neighbours)
    assert not answers, "called back after the end"


# When it looks ----------------------------------------------------------------------------------------------


def counting(file: Path) -> list[str]:
    """A command that notes each run in a file, and finds a process whose pid is the number of the run."""
    script = (
        "import os, sys; file = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR | os.O_APPEND)\n"
        "os.write(file, b'.'); print('::1 1', os.fstat(file).st_size, '-1 -1 -1\\nend')"
    )
    return [sys.executable, "-S", "-c", script, str(file)]


def test_one_look_answers_all_who_ask(loop: Loop, tmp_path: Path) -> None:
    before = children()
    neighbours = Neighbours(loop, [1], command=counting(tmp_path / "runs"), pause_seconds=SECONDS)
    answers: list[Found] = []
    began: set[float] = set()

    def on_done(found: Found) -> None:
        answers.append(found)
        began.add(neighbours.began)
        if len(answers) == 3:  # within the pause, the next are told the same: at once, and when it has ended
            neighbours.ask(on_done)
            when_reaped(loop, before, lambda: neighbours.ask(on_done))
        if len(answers) == 5:
            loop.stop()

    asked = time.monotonic()
    for _ in range(3):
        neighbours.ask(on_done)
    started = time.monotonic()
    run(loop, neighbours)
    assert answers == [{("::1", 1): Process(1)}] * 5
    assert len(began) == 1
    assert asked <= began.pop() <= started
    assert (tmp_path / "runs").stat().st_size == 1


def test_after_the_pause_it_looks_again(loop: Loop, tmp_path: Path) -> None:
    neighbours = Neighbours(loop, [1], command=counting(tmp_path / "runs"), pause_seconds=0.05)
    pids: list[int] = []
    began: list[float] = []

    def on_done(found: Found) -> None:
        pids.extend(each.pid for each in found.values())
        began.append(neighbours.began)
        if pids[-1] == 3:
            loop.stop()
        else:
            neighbours.ask(on_done)

    neighbours.ask(on_done)
    run(loop, neighbours)
    assert sorted(set(pids)) == [1, 2, 3]
    assert pids == sorted(pids)
    assert began == sorted(began)
    assert len(set(began)) == 3


# The program ------------------------------------------------------------------------------------------------


def test_the_program_is_light(listener: socket.socket) -> None:
    python, *options = command_for([listener.getsockname()[1]])
    with running(PLAIN, listener.getsockname()) as [[pid, port]]:
        done = subprocess.run(
            [python, "-X", "importtime", *options], capture_output=True, text=True, check=True
        )
    assert done.stdout == f"127.0.0.1 {port} {pid} -1 -1 -1\nend\n"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "codecs" in imported
    assert imported.isdisjoint({"rallypoint", "site", "typing", "re", "socket", "collections"})


def test_the_program_keeps_no_file_of_the_server() -> None:
    ours, theirs = os.pipe()
    script = (
        "import os, sys; from rallypoint.server.reporting.neighbours_program import main\n"
        f"main(); os.write(2, b'open' if os.path.exists('/proc/self/fd/{theirs}') else b'closed')"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, "1"], pass_fds=[theirs], capture_output=True, check=True
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.stdout, done.stderr) == (b"end\n", b"closed")


# Very many --------------------------------------------------------------------------------------------------

CONNECTIONS = 15_000
SPARE_FILES = 200
LONGEST_TURN = 0.1
"""Generous: it is a few milliseconds. But a busy machine may take the processor away for longer than that."""
MOST_LOOKS = 8
"""So the quickest of some looks counts."""


@pytest.fixture
def like_a_server() -> Iterator[None]:
    """Many files may be opened, and no garbage of this process, which has torch in it, is searched for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS + SPARE_FILES:
        pytest.skip(f"a process may open only {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000)
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Turns:
    """How long the turns of a loop take."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._last = time.perf_counter()
        self.longest = 0.0
        self.count = 0
        self._turn()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self.count += 1
        self._loop.later(0, self._turn)


def accept_all(listener: socket.socket, accepted: list[socket.socket]) -> None:
    while len(accepted) < CONNECTIONS:
        accepted.append(listener.accept()[0])


@contextmanager
def many_clients(listener: socket.socket) -> Iterator[tuple[list[socket.socket], int]]:
    """A process with very many connections: our ends of them, and its pid."""
    listener.settimeout(SECONDS)
    accepted: list[socket.socket] = []
    thread = threading.Thread(target=accept_all, args=(listener, accepted))
    thread.start()
    try:
        with running(MANY, listener.getsockname(), str(CONNECTIONS), variables="RANK=3") as [[pid, *_]]:
            thread.join(SECONDS)
            yield accepted, pid
    finally:
        thread.join(SECONDS)
        for each in accepted:
            each.close()


@pytest.mark.slow
def test_the_loop_goes_on_beside_15_000_sockets(
    loop: Loop, listener: socket.socket, like_a_server: None, capsys: pytest.CaptureFixture[str]
) -> None:
    port = listener.getsockname()[1]
    neighbours = Neighbours(loop, [port], limit_seconds=SECONDS, pause_seconds=0)
    answers: list[Found] = []
    longest: list[float] = []
    with many_clients(listener) as (accepted, pid):
        names = [each.getpeername() for each in accepted]
        before = children()
        for each in accepted:
            loop.watch_readable(each, loop.stop)
        turns = Turns(loop)

        def look() -> None:
            turns.longest = 0.0
            neighbours.ask(on_done)

        def on_done(found: Found) -> None:
            answers.append(found)
            when_reaped(loop, before, go_on)

        def go_on() -> None:
            longest.append(turns.longest)
            if turns.longest < LONGEST_TURN or len(longest) == MOST_LOOKS:
                loop.stop()
            else:
                look()

        loop.later(0.01, look)
        began = time.perf_counter()
        run(loop, neighbours)
        seconds = (time.perf_counter() - began) / len(answers)
        for each in accepted:
            loop.watch_readable(each, None)
    assert answers == [dict.fromkeys(names, Process(pid, 3))] * len(longest)
    with capsys.disabled():
        print(f"\n{loop.name}: {CONNECTIONS:,} found in {seconds:.2f} s,", end=" ")
        print(f"the longest of {turns.count:,} turns took {min(longest) * 1000:.1f} ms", end=" ")
    assert min(longest) < LONGEST_TURN
