"""Jobs under a real mpirun, of Open MPI and of MPICH: both styles, a rank that fails, an end by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from clusters import SECONDS, await_that, require
from jobs import free_port
from namespaces import Machine, machines_on_switch
from processes import end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN = (sys.executable, "-m", "rallypoint", "run")

JOIN = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
os.write(1, f"rank {rank} of {world}, {os.environ['LOCAL_RANK']} here, sum {total.item()}\\n".encode())
"""

FLAVOURS = {
    "Open MPI": ("mpirun.openmpi", "openmpi-bin", ("--allow-run-as-root", "--oversubscribe")),
    "MPICH": ("mpirun.mpich", "mpich", ()),
}


@pytest.fixture(params=FLAVOURS)
def mpirun(request: pytest.FixtureRequest) -> list[str]:
    program, package, options = FLAVOURS[request.param]
    return [require(program, package), *options]


class Mpi:
    """Jobs in a folder, and what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"

    def start(self, words: list[str], script: str) -> subprocess.Popen[bytes]:
        path = self.folder / "script.py"
        path.write_text(script)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_FOLDER": str(self.folder)}
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [*words, str(path)],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )

    def run(self, words: list[str], script: str) -> tuple[int, str]:
        process = self.start(words, script)
        try:
            return process.wait(SECONDS), self.log.read_text()
        finally:
            end(process)

    def processes(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if _folder_of(each) == str(self.folder)]

    def await_no_processes(self) -> None:
        await_that(lambda: not self.processes(), lambda: f"left behind: {self.processes()}")


def _folder_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("TEST_FOLDER", "") if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""


@pytest.fixture
def mpi(tmp_path: Path) -> Iterator[Mpi]:
    jobs = Mpi(tmp_path)
    yield jobs
    for process in jobs.processes():
        process.kill()


def test_each_task_is_a_rank(mpirun: list[str], mpi: Mpi) -> None:
    options = ["--tasks", f"--master-port={free_port()}"]
    code, log = mpi.run([*mpirun, "-np", "2", *RUN, *options], JOIN)
    assert code == 0, log
    assert sorted(line for line in log.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2, 0 here, sum 1.0",
        "rank 1 of 2, 1 here, sum 1.0",
    ]
    mpi.await_no_processes()


def test_one_task_is_a_launcher(mpirun: list[str], mpi: Mpi) -> None:
    code, log = mpi.run([*mpirun, "-np", "1", *RUN, "--nproc-per-node=2"], JOIN)
    assert code == 0, log
    assert log.count("sum 1.0") == 2, log


def test_several_launchers_are_refused(mpirun: list[str], mpi: Mpi) -> None:
    code, log = mpi.run([*mpirun, "-np", "2", *RUN], JOIN)
    assert code == 2, log
    assert "has started 2 tasks on this machine" in log


def test_a_rank_that_fails_is_named(mpirun: list[str], mpi: Mpi) -> None:
    options = ["--tasks", f"--master-port={free_port()}"]
    fails = JOIN + "if rank == 1: raise ValueError('banana')\ntime.sleep(600)\n"
    code, log = mpi.run([*mpirun, "-np", "2", *RUN, *options], fails)
    assert code == 1, log
    assert "failed first: ValueError: banana" in log
    mpi.await_no_processes()


@pytest.mark.parametrize("is_task", [True, False])
def test_a_job_that_is_told_to_end_leaves_nothing(mpirun: list[str], mpi: Mpi, is_task: bool) -> None:
    options = ["--tasks", f"--master-port={free_port()}"] if is_task else ["--nproc-per-node=2"]
    waits = JOIN + "time.sleep(600)\n"
    process = mpi.start([*mpirun, "-np", "2" if is_task else "1", *RUN, *options], waits)
    try:
        await_that(lambda: mpi.log.read_text().count("sum 1.0") == 2, mpi.log.read_text)
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)  # with which exit code, is up to mpirun
        mpi.await_no_processes()
    finally:
        end(process)


def _inside(machine: Machine) -> str:
    """What stands before a command there. The machines share a name, so gloo is told where it is."""
    return f"{' '.join(machine.prefix)} env GLOO_SOCKET_IFNAME={machine.interface}"


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[list[str], str, Path]]:
    """Two machines for Open MPI: options, the address of the first, and a file in PBS's manner."""
    with machines_on_switch(2) as (_, machines):
        hosts = folder / "nodes"
        hosts.write_text("".join(f"{each.address}\n" for each in machines))
        enter = folder / "enter"  # in place of ssh: enter HOST COMMAND...
        cases = "".join(f'{each.address}) exec {_inside(each)} sh -c "$*";;\n' for each in machines)
        enter.write_text(f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}esac\n")
        enter.chmod(0o755)
        listed = ",".join(f"{each.address}:2" for each in machines)
        options = ["--mca", "plm_rsh_agent", str(enter), "--host", listed]
        yield options, machines[0].address, hosts


def test_two_machines_by_open_mpi(mpi: Mpi, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = [require("mpirun.openmpi", "openmpi-bin"), "--allow-run-as-root"]
    with two_hosts(mpi.folder) as (options, _, nodes):
        monkeypatch.setenv("PBS_JOBID", "7.tests")
        monkeypatch.setenv("PBS_NODEFILE", str(nodes))
        passed = [word for name in ("PYTHONPATH", "PBS_JOBID", "PBS_NODEFILE") for word in ("-x", name)]
        there = [*options, *passed, "--mca", "ras", "^tm", "--mca", "plm", "rsh"]
        code, log = mpi.run([*mpirun, *there, "-np", "4", *RUN, "--tasks"], JOIN)
        assert code == 0, log
        assert log.count("sum 6.0") == 4, log
        words = [*mpirun, *there, "-np", "2", "--map-by", "ppr:1:node", *RUN, "--nproc-per-node=2"]
        code, log = mpi.run(words, JOIN)
        assert code == 0, log
        assert log.count("sum 6.0") == 4, log
