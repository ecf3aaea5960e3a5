"""`rallypoint run --tasks`: each process that a scheduler starts is one rank. A test plays the scheduler."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from command_line import invoke
from jobs import Job, free_port, job
from namespaces import Wiring, wired
from processes import Server
from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch import command
from rallypoint.launch.command import Ended, SignalProbe, run_command
from rallypoint.launch.config import settle
from rallypoint.launch.job import check_is_alone, task_of
from rallypoint.launch.rendezvous import task_group
from rallypoint.launch.rendezvous.task_group import TaskGroup
from rallypoint.launch.schedulers import find_placement
from rallypoint.pytorch import agent
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.question import Question
from rallypoint.store.server.guard import secret as guard
from rallypoint.store.server.process.hosting import HostedServer
from raw import until
from test_schedulers import HYDRA, LAUNCHER, OPEN_MPI, PBS, SLURM

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no scheduler starts tasks on Windows")


def variables_of(rank: int, world: int = 2) -> dict[str, str]:
    """What Slurm tells a task on the only machine of a step."""
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "gpu1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_TASKS_PER_NODE": str(world),
    }


def start_tasks(running: Job, script: str, environ: Mapping[str, str] | None = None) -> None:
    port = free_port()
    for rank in range(2):
        running.start(
            script,
            ["--tasks", f"--master-port={port}", "--no-explain"],
            {**variables_of(rank), **(environ or {})},
            command=("-m", "rallypoint", "run"),
        )


MEET = """
import os, time
import psutil
from rallypoint import rendezvous
from rallypoint.launch.handover import read_handover

store, rank, world = rendezvous("env://")
store.set(f"pid/{rank}", str(os.getpid()))
store.wait([f"pid/{each}" for each in range(world)])
"""


def test_tasks_of_a_job_with_a_secret_share_a_machine(tmp_path: Path) -> None:
    script = MEET + "print('secret', os.environ.get('RALLYPOINT_SECRET'))\n"
    with job(tmp_path) as running:
        start_tasks(running, script, {"RALLYPOINT_SECRET": "ab" * 32})
        assert running.wait() == [0, 0], running.logs()
        assert "secret None" in running.log(1)


@pytest.mark.skipif(sys.platform != "linux", reason="two machines are two network namespaces")
@pytest.mark.parametrize("secret", ["", "ab" * 32, "by the settings file"])
def test_tasks_on_two_machines_with_and_without_a_secret(tmp_path: Path, secret: str) -> None:
    script = MEET + (
        "print('has', os.environ.get('RALLYPOINT_RELAY_OF'), os.environ.get('RALLYPOINT_SECRET'))\n"
    )
    wirings = [Wiring(f"node-{number}", (f"10.79.0.{number}/24",), "") for number in (1, 2)]
    with job(tmp_path) as running, wired(*wirings) as machines:
        first, port = machines[0].address, free_port()
        options = ["--tasks", f"--master-addr={first}", f"--master-port={port}", "--no-explain"]
        told = {"RALLYPOINT_SECRET": secret}
        if secret == "by the settings file":
            file, told = tmp_path / "secret", {}
            file.write_text("ab" * 32)
            file.chmod(0o600)
            (tmp_path / "rallypoint.toml").write_text(f'[env]\nRALLYPOINT_SECRET_FILE = "{file}"\n')
        for rank, machine in enumerate(machines):
            several = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
            here = {"SLURM_NODEID": str(rank), "SLURM_LOCALID": "0", **told}
            environ = {**variables_of(rank), **several, **here}
            running.start(script, options, environ, ("-m", "rallypoint", "run"), prefix=machine.prefix)
        assert running.wait() == [0, 0], running.logs()
        assert "has None None" in running.log(0)
        assert (f"has {first}:{port} None" if secret else "has None None") in running.log(1)
        warning = f"whoever reaches {first}:{port} can read and change this job's store"
        assert [warning in running.log(rank) for rank in range(2)] == [not secret, False]
        assert not running.processes()


def test_each_task_is_a_rank_and_the_store_stays_for_the_last(tmp_path: Path) -> None:
    script = MEET + (
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')\n"
        "print('ranks', *(os.environ[name] for name in names), read_handover(os.environ).scheduled)\n"
        "if rank == 1:\n"
        "    first = int(store.get('pid/0'))\n"
        "    psutil.wait_procs([each for each in psutil.process_iter() if each.pid == first])\n"
        "    store.set('late', 'yes')\n"
        "    print('the store says', store.get('late'))\n"
    )
    with job(tmp_path) as running:
        start_tasks(running, script)
        assert running.wait() == [0, 0], running.logs()
        assert "ranks 0 2 0 2 0 1.0" in running.log(0)
        assert "ranks 1 2 1 2 0 1.0" in running.log(1)
        assert "the store says b'yes'" in running.log(1)
        assert not running.processes()


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = MEET + "if rank == 1: raise ValueError('banana')\ntime.sleep(600)\n"
    with job(tmp_path) as running:
        start_tasks(running, script)
        assert running.wait() == [1, 1], running.logs()
        assert "failed first: ValueError: banana" in running.log(1)
        assert re.search(
            r"^rallypoint: rank 1 \(.*\) failed first: ValueError: banana$", running.log(0), re.M
        )
        assert not running.processes()


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    script = MEET + "if rank == 0: os.kill(os.getpid(), 9)\ntime.sleep(600)\n"
    with job(tmp_path) as running:
        start_tasks(running, script)
        assert running.wait() == [-signal.SIGKILL, 1], running.logs()
        assert "rank 0 (process " in running.log(0)
        assert "ended by SIGKILL" in running.log(1)


def test_a_task_that_leaves_before_it_has_reached_the_store_does_not_use_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first task, whose command ends at once, would wait for itself."""
    leaves = threading.Event()
    connect, await_others = TaskGroup._connect, TaskGroup._await_others

    def connect_late(group: TaskGroup, seconds: float) -> TCPStore:
        assert leaves.wait(60)
        return connect(group, seconds)

    def await_nobody(group: TaskGroup, server: HostedServer, _: float) -> None:
        leaves.set()
        group._listener.join(10)
        assert not group._listener.is_alive()
        await_others(group, server, 30)
        users = fetch_snapshot(*server.address, Question(), Deadline(10)).clients
        assert [client for client in users if client.who.role is not Role.TOOL] == []

    monkeypatch.setattr(TaskGroup, "_connect", connect_late)
    monkeypatch.setattr(TaskGroup, "_await_others", await_nobody)
    placement = find_placement(variables_of(0, 1), str)
    with TaskGroup(task_of(settle({"master_port": str(free_port())}, {}, tmp_path, placement))):
        pass


def test_a_task_does_not_join_the_store_of_another_job(tmp_path: Path) -> None:
    port = free_port()
    options = ["--tasks", f"--master-port={port}", "--no-explain"]
    command = ("-m", "rallypoint", "run")
    goes_on = "print('up', flush=True)\nstore.wait(['end']) if rank == 0 else time.sleep(600)\n"
    script = "print('began', flush=True)\n" + MEET + goes_on + "raise ValueError('banana')\n"
    with job(tmp_path) as running:
        for rank in range(2):
            running.start(script, options, variables_of(rank), command)
        for rank in range(2):
            running.await_text("up", rank)
        stranger = running.start(script, options, {**variables_of(1), "SLURM_JOB_ID": "2"}, command)
        namesake = running.start(script, options, variables_of(1), command)
        assert [stranger.wait(60), namesake.wait(60)] == [1, 1], running.logs()
        assert "belongs to another job: the tasks there are of job 1.0, and this one is of job 2.0" in (
            running.log(2)
        )
        assert "belongs to another job, which has the id 1.0 as well: rank 1 is there already" in (
            running.log(3)
        )
        assert "began" not in running.log(2) + running.log(3)
        assert [agent.poll() for agent in running.agents[:2]] == [None, None], running.logs()
        with TCPStore("127.0.0.1", port, timeout=60) as store:
            store.set("end", "")
        assert running.wait()[:2] == [1, 1], running.logs()
        assert "failed first: ValueError: banana" in running.log(1), "it hears what has become of the others"


def test_a_task_does_not_join_a_store_that_is_of_no_tasks(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_group, "_NAMING_SECONDS", 0.1)
    port = {"master_port": str(server.port)}
    placement = find_placement(variables_of(1), str)
    with (
        TaskGroup(task_of(settle(port, {}, tmp_path, placement))) as group,
        pytest.raises(RallypointError, match=r"belongs to another job: it has no tasks, .* is of job 1\.0"),
    ):
        group.is_ready(60)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_rank_that_waits_for_the_store_is_not_started_when_its_task_is_told_to_end(name: str) -> None:
    """Nor if it is sent what would end a process that does not wait for it."""
    number = getattr(signal, name)

    def await_store(_: float) -> bool:
        os.kill(os.getpid(), number)
        return False

    ended = run_command(["false"], os.environ, lambda: True, is_agent=False, may_start=await_store)
    assert ended == Ended(0, -number, number)


# What is refused --------------------------------------------------------------------------------------------


def test_without_a_scheduler_there_are_no_tasks() -> None:
    error = invoke("run", "--tasks", "train.py").exception
    assert isinstance(error, UsageError)
    assert "no scheduler that is known here has started this process" in error.message


def test_the_scheduler_says_how_many_ranks_there_are() -> None:
    error = invoke("run", "--tasks", "--nproc-per-node=4", "train.py", environ=variables_of(0)).exception
    assert isinstance(error, UsageError)
    assert "--nproc-per-node means nothing with --tasks" in error.message


def test_several_launchers_on_a_machine_are_refused(tmp_path: Path) -> None:
    for variables, remedy in ((SLURM, "srun --ntasks-per-node=1"), (OPEN_MPI, "--map-by ppr:1:node")):
        placement = find_placement(variables, str)
        settings = settle({"master_addr": "node-a"}, {}, tmp_path, placement)
        with pytest.raises(UsageError, match="has started 2 tasks on this machine") as refused:
            check_is_alone(settings)
        assert remedy in refused.value.hint
        check_is_alone(settle({"standalone": True}, {}, tmp_path, placement))
    check_is_alone(settle({}, {}, tmp_path, find_placement(LAUNCHER, str)))


def test_a_task_needs_to_know_its_rank_and_the_first_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_held", [])  # another test may have left this process a secret, or none
    placement = find_placement({**HYDRA, "PMI_SIZE": "2", "PMI_RANK": "1"}, str)
    with pytest.raises(UsageError, match="does not tell which job this is"):
        task_of(settle({}, {}, tmp_path, placement))
    task = task_of(settle({"rdzv_id": "mine"}, {}, tmp_path, placement))
    assert (task.rank, task.world_size, task.store, task.run_id) == (1, 2, ("127.0.0.1", 29500), "mine")
    with pytest.raises(UsageError, match="does not tell which rank"):
        task_of(settle({}, {}, tmp_path, find_placement(PBS, lambda _: "node-a\n")))
    placement = find_placement(SLURM, str)
    never = settle({"patch": "never"}, {}, tmp_path, placement)
    task_of(never)
    monkeypatch.setenv("RALLYPOINT_SECRET", "ab" * 32)
    with pytest.raises(UsageError, match=r"has a secret, .* patch is never by command line \(--patch\)"):
        task_of(never)
    assert task_of(settle({}, {}, tmp_path, placement)).nnodes == 2
    several = {"rdzv_endpoint": "a,b"}
    with pytest.raises(UsageError, match="the store cannot be at several places"):
        task_of(settle(several, {}, tmp_path, find_placement(SLURM, str)))


def test_who_may_be_alone_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("node-a\nnode-b\n")
    environ = {"PBS_JOBID": "1", "PBS_NODEFILE": str(tmp_path / "nodes")}
    said = invoke("run", "--show-config", environ=environ).stderr
    assert "PBS (PBS_NODEFILE) says 2 machines: this command has to be started on each of them" in said
    assert not invoke("run", "--show-config", "--standalone", environ=environ).stderr
    assert not invoke("run", "--show-config", environ=LAUNCHER).stderr


# Signals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heard", "to_agent", "to_ranks"),
    [
        (False, ["SIGINT", "SIGTERM", "SIGHUP"], ["SIGUSR1", "SIGUSR2"]),
        (True, ["SIGTERM"], []),
    ],
)
def test_who_is_sent_a_signal(
    monkeypatch: pytest.MonkeyPatch, heard: bool, to_agent: list[str], to_ranks: list[str]
) -> None:
    ranks: list[str] = []
    monkeypatch.setattr(command, "signal_ranks", lambda _, number: ranks.append(signal.Signals(number).name))
    agent = SimpleNamespace(sent=[])
    agent.send_signal = lambda number: agent.sent.append(signal.Signals(number).name)
    process = cast("subprocess.Popen[bytes]", agent)
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    for name in names:
        command.to_agent("", lambda _: heard)(process, getattr(signal, name))
    assert (agent.sent, ranks) == (to_agent, to_ranks)
    agent.sent.clear()
    deliver = command.to_rank(lambda _: heard)
    for name in (*names, "SIGTERM"):
        deliver(process, getattr(signal, name))
    assert agent.sent == (["SIGTERM"] if heard else list(names))


def _name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().rstrip()


@pytest.mark.skipif(sys.platform != "linux", reason="it takes signals as Linux tells them")
def test_a_probe_outlives_signals_and_shows_each_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with SignalProbe() as probe:
        until(lambda: _name_of(probe.pid) == "rallypoint", "Slurm's linuxproc overlooks names with a space")
        for burst in ([signal.SIGCONT, signal.SIGUSR1], [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]):
            for number in burst:
                os.kill(probe.pid, number)
            for number in burst:
                assert probe.has_heard(number)
                assert probe.has_heard(number), "Slurm signals a job twice before its time limit"
        monkeypatch.setattr(command, "_SAME_SIGNAL_SECONDS", 0.0)
        assert not probe.has_heard(signal.SIGUSR1), "that was long ago"
    assert not psutil.pid_exists(probe.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="it takes signals as Linux tells them")
def test_a_probe_ends_with_its_launcher() -> None:
    program = "from rallypoint.launch.command import SignalProbe; print(SignalProbe().pid)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    until(lambda: not psutil.pid_exists(int(ended.stdout)), "it ends")


HEAR = """
import os, signal
heard = []
def hear(number, _):
    heard.append(number)
    os.write(1, f"heard {signal.Signals(number).name}\\n".encode())
signal.signal(signal.SIGUSR1, hear)
signal.signal(signal.SIGUSR2, hear)
print("listens", flush=True)
while signal.SIGUSR2 not in heard:
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a scheduler signals all processes on Linux")
@pytest.mark.parametrize(
    "options", [["--tasks"], pytest.param(["--nproc-per-node=1"], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("to_everybody", [False, True])
def test_a_rank_hears_each_signal_once_whomever_the_scheduler_signals(
    tmp_path: Path, options: list[str], to_everybody: bool
) -> None:
    with job(tmp_path) as running:
        options = [*options, f"--master-port={free_port()}", "--no-explain"]
        launcher = running.start(HEAR, options, variables_of(0, 1), command=("-m", "rallypoint", "run"))
        running.await_text("listens")
        process = psutil.Process(launcher.pid)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            whom = [process, *(process.children(recursive=True) if to_everybody else ())]
            for each_number in (signal.SIGCONT, number):  # so does Slurm
                for each in whom:
                    each.send_signal(each_number)
            running.await_text(f"heard {number.name}")
        assert running.wait() == [0], running.logs()
        assert [running.log().count(f"heard {name}") for name in ("SIGUSR1", "SIGUSR2")] == [1, 1]
        assert not running.processes()


def test_the_agent_is_told_to_end_once_and_another_ctrl_c_kills_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    killed: list[float] = []
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(agent, "_kill_ranks", lambda: killed.append(clock[0]))
    for first in (signal.SIGTERM, signal.SIGINT):
        handler = agent._once(lambda number, _: told.append(number))
        for clock[0] in (0.0, 0.1, 9.0):
            handler(first, None)
    handler(signal.SIGTERM, None)
    assert (told, killed) == ([signal.SIGTERM, signal.SIGINT], [9.0])
