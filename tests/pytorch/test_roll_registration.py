"""Who registers for the roll call: ranks say who they are, and the first agent says who is expected."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from jobs import SECONDS, free_port, job, patch_torch
from processes import Server, hand_over, serving, torch_serving
from rallypoint.client.snapshots import HEAD, fetch_job_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import RallypointError
from rallypoint.launch import reports
from rallypoint.launch.endpoint import Endpoint, StoreView
from rallypoint.launch.handover import VARIABLE
from rallypoint.launch.rendezvous import attendance as rollcall
from rallypoint.launch.rendezvous.attendance import AGENTS, AskingSchedule, RollCall, named, plan_of, planned
from rallypoint.launch.rendezvous.roster import Member
from rallypoint.launch.reports import Reports
from rallypoint.launch.switches import ClientChoice, Patch
from rallypoint.pytorch import substitution
from rallypoint.pytorch.parameters import StoreParameters
from rallypoint.pytorch.substitution import make_store
from rallypoint.store.connect.connecting import connect
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Identity, Role, Source
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.store.rollcall.question import PLAN, Question
from rallypoint.store.rollcall.roll import Roll
from rallypoint.store.rollcall.snapshot import Gone, Snapshot
from raw import until
from rolls import client, plan, rank, ranks, snapshot

HOST = socket.gethostname()


# Pure parts ------------------------------------------------------------------------------------------------

MEMBERS = (Member("a", "node-a", 1), Member("b", "node-b", 2), Member("c", "node-a", 3))


def test_ranks_are_numbered_machine_by_machine() -> None:
    planned = plan_of(2, MEMBERS, [2, 3, 1])
    assert planned == Plan(
        2, (PlannedMachine("node-a", 0, 2), PlannedMachine("node-b", 2, 3), PlannedMachine("node-a", 5, 1))
    )
    assert Plan.from_json(planned.to_json()) == planned


TWO_MACHINES = plan(("node-a", 2), ("node-b", 2))


ONE = tuple(Gone(number, rank(number, "node-a"), 1.0, "") for number in (0,))
TWO = tuple(Gone(number, rank(number, "node-a"), 1.0, "") for number in (0, 2))
NAMED = [
    # Who is there, who has gone, how many have counted themselves in, and what is reported.
    (ranks(range(3), "node-a"), (), 3, reports.JoinProgress(3, 4, "missing: 3 on node-b")),
    (ranks(range(3), "node-a"), (), 0, reports.JoinProgress(3, 4, "missing: 3 on node-b")),
    (ranks([1], "node-a"), TWO, 3, reports.JoinProgress(3, 4, "missing: 3 on node-b")),
    ((), TWO, 2, reports.JoinProgress(2, 4, "missing: 1 on node-a; 3 on node-b")),
    ((), ONE, 2, None),  # one of the three came, and did not say who it was
    ((), (), 0, reports.JoinProgress(0, 4)),
    (ranks(range(4)), (), 0, reports.JoinProgress(4, 4)),
]


def test_who_has_not_come_is_named_as_far_as_it_can_be_known() -> None:
    for clients, gone, counted, expected in NAMED:
        roll = judge(snapshot(clients=clients, gone=gone, plan=TWO_MACHINES))
        assert named(roll, counted) == expected
    strangers = tuple(client(number) for number in range(1, 4))
    told = named(judge(snapshot(clients=strangers, plan=TWO_MACHINES)), 3)
    assert told is not None
    assert (told.joined, told.expected) == (3, 4)
    assert told.absent.startswith("not seen: 0")


def test_names_are_asked_for_when_nobody_comes_for_a_while_and_less_and_less_often() -> None:
    attention = AskingSchedule(0.0)
    assert attention.note(1, 5.0)
    assert not attention.note(1, 5.9)
    assert not attention.is_due(5.9)
    assert attention.is_due(6.0)
    pauses = []
    now = 6.0
    for _ in range(9):
        attention.note_asked(now, now)
        began = now
        while not attention.is_due(now):
            now += 0.25
        pauses.append(now - began)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_when_somebody_comes_names_are_asked_for_again_unless_that_is_dear() -> None:
    attention = AskingSchedule(0.0)
    attention.note(1, 0.0)
    attention.note_asked(1.0, 3.0)
    assert attention.is_satisfied
    assert attention.note(2, 4.0)
    assert not attention.is_satisfied
    assert not attention.is_due(102.0)
    assert attention.is_due(103.0)


# torch's own client ----------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with (tmp_path / "log").open("w+") as log, serving("libuv", log) as running:
        yield running


@pytest.fixture
def rank_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as rank 3, patched as a worker is."""
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    patch_torch(monkeypatch)


def _look(place: tuple[str, int]) -> Snapshot:
    return fetch_job_snapshot(*place, Question(), Deadline(SECONDS))


def _whos(server: Server) -> list[Identity]:
    """All who are connected, but for who looks."""
    told = _look((server.host, server.port))
    return [each.who for each in told.clients if each.who.role is not Role.TOOL]


WHO = Identity(HOST, os.getpid(), 3, 1, 4, Role.RANK, Source.HELLO)


@pytest.mark.usefixtures("rank_3")
@pytest.mark.parametrize(
    ("kind", "patch"),
    [
        *(("torch", "auto"), ("python", "always")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("torch", "always"), ("python", "auto"))),
    ],
)
def test_a_worker_says_who_it_is(
    kind: str, patch: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLYPOINT_CLIENT", kind)
    monkeypatch.setenv("RALLYPOINT_PATCH", patch)
    store = dist.TCPStore(server.host, server.port, timeout=timedelta(seconds=SECONDS))
    assert _whos(server) == [WHO]
    twin = store.clone()
    twin.set("key", "value")
    assert _whos(server) == [WHO, WHO]
    assert store.num_keys() == 1


@pytest.mark.usefixtures("rank_3")
def test_an_agent_says_that_it_is_no_rank(server: Server) -> None:
    order = StoreParameters(server.host, server.port, timeout=timedelta(seconds=SECONDS))
    stores = [
        make_store(order, kind, Patch.AUTO, Role.AGENT) for kind in (ClientChoice.TORCH, ClientChoice.PYTHON)
    ]
    agent = Identity(HOST, os.getpid(), role=Role.AGENT, source=Source.HELLO)
    assert _whos(server) == [agent, agent]
    assert len(stores) == 2


@pytest.mark.usefixtures("rank_3")
@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_server_of_torch_does_not_mind(use_libuv: bool) -> None:
    with torch_serving(use_libuv) as port:
        store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=SECONDS))
        assert store.num_keys() == 0


@pytest.mark.usefixtures("rank_3")
def test_a_job_does_not_fail_because_nobody_hears(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise dist.DistNetworkError("failed to send")

    monkeypatch.setattr(substitution, "hello_key", fail)
    store = dist.TCPStore(server.host, server.port, timeout=timedelta(seconds=SECONDS))
    store.set("key", "value")
    assert store.get("key") == b"value"


# The first machine's agent ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hand_over(monkeypatch, tmp_path)
    return tmp_path


Start = Callable[[], RollCall]


@pytest.fixture
def start(server: Server) -> Iterator[Start]:
    """Starts a roll call for two machines with two ranks each."""
    with ExitStack() as stack:

        def start() -> RollCall:
            place = Endpoint(server.host, server.port)
            view = StoreView(place)
            call = RollCall(place, view, planned(view, 1, MEMBERS[:2]), VARIABLE in os.environ)
            stack.callback(call.stop)
            return call

        yield start


def _tell_sizes(store: TCPStore) -> None:
    for number in range(2):
        told = json.dumps({"role": "default", "rank": number, "local_world_size": 2})
        store.set(f"{AGENTS}/torchelastic/role_info/{number}", told)


def test_who_is_expected_is_written_down_once_all_agents_have_told(
    server: Server, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no launcher wants to know more."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with TCPStore(server.host, server.port, timeout=SECONDS, role=Role.AGENT) as store:
        start()
        assert not store.check([PLAN])
        _tell_sizes(store)
        planned = Plan(1, (PlannedMachine("node-a", 0, 2), PlannedMachine("node-b", 2, 2)))
        assert Plan.from_json(store.get(PLAN).decode()) == planned
        assert json.loads(store.get(HEAD)) == [server.host, server.port, ""]
        roll = judge(_look((server.host, server.port)))
        assert (roll.expected, roll.unknown, roll.meetings[0].round) == (4, 0, 1)


def _join(server: Server, number: int, stack: ExitStack) -> None:
    who = Identity("node-a", 100 + number, number, world_size=4, role=Role.RANK)
    stack.enter_context(closing(connect(server.host, server.port, Deadline(SECONDS), who)))


def test_who_is_missing_is_reported_until_all_have_joined(server: Server, start: Start, folder: Path) -> None:
    found = Reports(folder)
    with TCPStore(server.host, server.port, role=Role.AGENT) as store, ExitStack() as stack:
        _tell_sizes(store)
        start()
        for number in (0, 2):
            _join(server, number, stack)
            store._add(b"init/", 1)
        place = f"{server.host}:{server.port}"
        missing = reports.JoinProgress(2, 4, "missing: 1 on node-a; 3 on node-b", store=place)
        until(lambda: found.roll() == missing, "they are named")
        for _ in range(2):
            store._add(b"init/", 1)
        until(lambda: found.roll() == reports.JoinProgress(4, 4, store=place), "all have joined")


def test_the_last_word_is_said_when_the_round_is_over(server: Server, start: Start, folder: Path) -> None:
    with TCPStore(server.host, server.port, role=Role.AGENT) as store:
        call = start()
        with ExitStack() as stack:
            for number in (0, 2):
                _join(server, number, stack)
                store._add(b"init/", 1)
        until(lambda: len(_whos(server)) <= 2, "the ranks have gone")  # but for the agent, here and there
        _tell_sizes(store)
        store.get(PLAN)
        call.stop()
        place = f"{server.host}:{server.port}"
        expected = reports.JoinProgress(2, 4, "missing: 1 on node-a; 3 on node-b", store=place)
        assert Reports(folder).roll() == expected


def test_without_a_launcher_of_ours_the_log_says_who_is_missing(
    server: Server, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("rallypoint.launch.rendezvous.attendance._FIRST_REMARK", 0.1)
    with TCPStore(server.host, server.port, role=Role.AGENT) as store, ExitStack() as stack:
        _tell_sizes(store)
        start()
        _join(server, 0, stack)
        store._add(b"init/", 1)
        until(lambda: "missing: 1 on node-a" in caplog.text, "it is logged")
    assert f"see `rallypoint status {server.host}:{server.port}`" in caplog.text


@pytest.mark.usefixtures("folder")
def test_a_store_that_has_gone_ends_the_roll_call(
    server: Server, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollcall, "_ANSWER_SECONDS", 0.5)
    call = start()
    with TCPStore(server.host, server.port, role=Role.AGENT) as store:
        _tell_sizes(store)
        store.get(PLAN)
    server.process.kill()
    server.process.wait()
    call.stop()


# Real jobs -------------------------------------------------------------------------------------------------

HELD_BACK = """
import os, sys, time
if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    while not os.path.exists("go"):
        time.sleep(0.05)
from datetime import timedelta
import torch.distributed as dist
seconds = float(os.environ.get("PATIENCE", "60"))
dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
dist.barrier()
dist.destroy_process_group()
"""
"""The last rank comes when a file is there."""

_BACKEND = ["--rdzv-backend=rallypoint", "--rdzv-id=job"]


def _await_joined(place: tuple[str, int], count: int) -> Roll:
    """The roll, once so many ranks are here and wait."""
    rolls: list[Roll] = []

    def is_so_far() -> bool:
        try:
            rolls.append(judge(_look(place)))
        except RallypointError:  # between two rounds
            return False
        return rolls[-1].joined == count and bool(rolls[-1].awaited)

    until(is_so_far, f"{count} ranks wait", SECONDS)
    return rolls[-1]


@pytest.mark.slow
def test_torchrun_tells_who_is_expected_and_unmodified_ranks_are_found(tmp_path: Path) -> None:
    port = free_port()
    with job(tmp_path) as running:
        options = [*_BACKEND, f"--rdzv-endpoint=localhost:{port}", "--nproc-per-node=2"]
        running.start(HELD_BACK, options, {"RALLYPOINT_PATCH": "never"})  # nor say who they are
        running.await_listening(f"localhost:{port}")
        place = ("localhost", port)
        until(lambda: _await_joined(place, 1).ranks[0].source is Source.PROCESS, "its process is found")
        roll = _await_joined(place, 1)
        assert [(each.rank, each.host) for each in roll.missing] == [(1, HOST)]
        assert (roll.expected, roll.unknown, roll.unseen) == (2, 0, ())
        assert [each.host for each in roll.machines] == [HOST]


@pytest.mark.slow
def test_two_machines_with_relays_know_who_is_missing(tmp_path: Path) -> None:
    endpoint = Endpoint("localhost", free_port())
    options = ["--nnodes=2", "--nproc-per-node=2", f"--rdzv-endpoint={endpoint}", *_BACKEND]
    with job(tmp_path) as running:
        for number in range(2):
            running.start(HELD_BACK, [*options, f"--rdzv-conf=rank={number}", "--local-addr=127.0.0.1"])
        running.await_listening(str(endpoint))
        roll = _await_joined(endpoint, 3)
        assert [(each.rank, each.host) for each in roll.missing] == [(3, HOST)]
        assert (roll.expected, roll.unknown) == (4, 0)
        assert [each.host for each in roll.machines] == [HOST], "a machine goes by one name"
        assert len(_look(endpoint).relays) == 2
        own, meeting = judge(_look(endpoint)).meetings
        assert [(each.expected, each.joined) for each in (own, meeting)] == [(2, (HOST, HOST))] * 2
        (tmp_path / "go").touch()
        assert running.wait() == [0, 0], running.logs()


@pytest.mark.slow
def test_ranks_behind_relays_name_who_is_missing_and_so_does_the_launcher(tmp_path: Path) -> None:
    """In torch's own error, where the client is ours."""
    options = ["--nnodes=2", "--nproc-per-node=2", f"--rdzv-endpoint=localhost:{free_port()}"]
    with job(tmp_path) as running:
        for number in range(2):
            running.start(
                HELD_BACK,
                [*options, f"--node-rank={number}", "--client=python"],
                {"PATIENCE": "8"},
                ("-m", "rallypoint", "run"),
            )
        assert running.wait() == [1, 1], running.logs()
        for number in range(2):
            missing = f"default_pg/0//cpu//0/3; 3 of 4 ranks joined; missing: 3 on {re.escape(HOST)}"
            error = f"DistStoreError: wait timeout after 8000ms, .*\nwaited 8 s at .*{missing}"
            assert re.search(error, running.log(number)), running.logs()
        whole = f"rallypoint: 3 of 4 ranks have joined; missing: 3 on {HOST}\n"
        assert whole in running.log(0), running.logs()
        own = f"rallypoint: 1 of 2 ranks of this machine have joined; missing: 3 on {HOST}\n"
        assert own in running.log(1), running.logs()
