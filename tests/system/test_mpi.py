"""Jobs under a real mpirun, of Open MPI and of MPICH: both styles, a rank that fails, an end by a signal."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusters import SECONDS, await_that, require
from jobs import TRAIN, Job, job
from namespaces import Machine, machines_on_switch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOIN = f"""{TRAIN}
say("rank", rank, "of", f"{{world}},", os.environ["LOCAL_RANK"], "here, sum", total.item())
"""
DONE = JOIN + "dist.destroy_process_group()\n"

FLAVOURS = {
    "Open MPI": ("mpirun.openmpi", "openmpi-bin", ("--allow-run-as-root", "--oversubscribe")),
    "MPICH": ("mpirun.mpich", "mpich", ()),
}


@pytest.fixture(params=FLAVOURS)
def mpirun(request: pytest.FixtureRequest) -> list[str]:
    program, package, options = FLAVOURS[request.param]
    return [require(program, package), *options]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as jobs:
        yield jobs


def _start(running: Job, mpirun: Sequence[str], script: str, *options: str) -> subprocess.Popen[str]:
    """Start `rallypoint run` under mpirun, whose options stand behind it."""
    return running.start(script, options, command=("-m", "rallypoint", "run"), prefix=mpirun)


def _run(running: Job, mpirun: Sequence[str], script: str, *options: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    code = _start(running, mpirun, script, *options).wait(SECONDS)
    return code, running.log(len(running.agents) - 1)


def _await_nobody(running: Job) -> None:
    await_that(lambda: not running.processes(), lambda: f"left behind: {running.processes()}")


def test_each_task_is_a_rank_also_beside_another_job(mpirun: list[str], running: Job, tmp_path: Path) -> None:
    waits = JOIN + "while not os.path.exists('go'): time.sleep(0.1)\ndist.destroy_process_group()\n"
    two = [*mpirun, "-np", "2"]
    first = _start(running, two, waits, "--tasks")
    running.await_text("sum 1.0", count=2)
    code, log = _run(running, two, DONE, "--tasks")
    (tmp_path / "go").touch()
    assert (first.wait(SECONDS), code) == (0, 0), running.logs()
    for text in (running.log(), log):
        assert sorted(line for line in text.splitlines() if line.startswith("rank")) == [
            "rank 0 of 2, 0 here, sum 1.0",
            "rank 1 of 2, 1 here, sum 1.0",
        ]
    _await_nobody(running)


def test_one_task_is_a_launcher(mpirun: list[str], running: Job) -> None:
    code, log = _run(running, [*mpirun, "-np", "1"], DONE, "--nproc-per-node=2")
    assert code == 0, log
    assert log.count("sum 1.0") == 2, log


def test_several_launchers_are_refused(mpirun: list[str], running: Job) -> None:
    code, log = _run(running, [*mpirun, "-np", "2"], DONE)
    assert code == 2, log
    assert "has started 2 tasks on this machine" in log


def test_a_rank_that_fails_is_named(mpirun: list[str], running: Job) -> None:
    fails = JOIN + "if rank == 1: raise ValueError('banana')\ntime.sleep(600)\n"
    code, log = _run(running, [*mpirun, "-np", "2"], fails, "--tasks")
    assert code == 1, log
    assert "failed first: ValueError: banana" in log
    _await_nobody(running)


@pytest.mark.parametrize(("count", "option"), [("2", "--tasks"), ("1", "--nproc-per-node=2")])
def test_a_job_that_is_told_to_end_leaves_nothing(
    mpirun: list[str], running: Job, count: str, option: str
) -> None:
    process = _start(running, [*mpirun, "-np", count], JOIN + "time.sleep(600)\n", option)
    running.await_text("sum 1.0", count=2)
    process.send_signal(signal.SIGTERM)
    process.wait(SECONDS)  # with which exit code, is up to mpirun
    _await_nobody(running)


def _inside(machine: Machine) -> str:
    """What stands before a command there. The machines share a name, so gloo is told where it is."""
    return f"{' '.join(machine.prefix)} env GLOO_SOCKET_IFNAME={machine.interface}"


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[str, list[Machine], Path]]:
    """Two machines: the address of this one, the machines, and a program in place of ssh that enters them."""
    with machines_on_switch(2) as (address, machines):
        enter = folder / "enter"  # enter [OPTIONS] HOST COMMAND...
        cases = "".join(f'{each.address}) exec {_inside(each)} sh -c "$*";;\n' for each in machines)
        skip = "while [ ${1#-} != $1 ]; do shift; done\n"
        enter.write_text(f"#!/bin/sh\n{skip}host=$1; shift\ncase $host in\n{cases}esac\n")
        enter.chmod(0o755)
        yield address, machines, enter


def test_two_machines_by_open_mpi(running: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = [require("mpirun.openmpi", "openmpi-bin"), "--allow-run-as-root"]
    with two_hosts(tmp_path) as (_, machines, enter):
        hosts = [each.address for each in machines]
        nodes = tmp_path / "nodes"  # as PBS writes it
        nodes.write_text("".join(f"{each}\n" for each in hosts))
        monkeypatch.setenv("PBS_JOBID", "7.tests")
        monkeypatch.setenv("PBS_NODEFILE", str(nodes))
        passed = [word for name in ("PYTHONPATH", "PBS_JOBID", "PBS_NODEFILE") for word in ("-x", name)]
        there = ["--mca", "plm_rsh_agent", str(enter), "--host", ",".join(f"{each}:2" for each in hosts)]
        there = [*mpirun, *there, *passed, "--mca", "ras", "^tm", "--mca", "plm", "rsh"]
        for words, option in (
            (["-np", "4"], "--tasks"),
            (["-np", "2", "--map-by", "ppr:1:node"], "--nproc-per-node=2"),
        ):
            code, log = _run(running, [*there, *words], DONE, option)
            assert code == 0, log
            assert log.count("sum 6.0") == 4, log


def test_two_machines_by_mpich(running: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tasks find the same name of their job, and no other job has it."""
    monkeypatch.setenv("RALLYPOINT_SECRET", "ab" * 32)
    mpirun = require("mpirun.mpich", "mpich")
    with two_hosts(tmp_path) as (address, machines, enter):
        hosts = ",".join(each.address for each in machines)
        there = [mpirun, "-localhost", address, "-launcher", "ssh", "-launcher-exec", str(enter)]
        first = f"--master-addr={machines[0].address}"
        for tasks, option in (("2", "--tasks"), ("1", "--nproc-per-node=2")):
            words = [*there, "-hosts", hosts, "-ppn", tasks, "-np", str(2 * int(tasks))]
            code, log = _run(running, words, DONE, option, first)
            assert code == 0, log
            assert log.count("sum 6.0") == 4, log
