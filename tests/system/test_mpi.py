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
from jobs import TRAIN
from namespaces import Machine, machines_on_switch
from processes import end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN = (sys.executable, "-m", "rallypoint", "run")

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


def test_each_task_is_a_rank_also_beside_another_job(mpirun: list[str], mpi: Mpi) -> None:
    waits = JOIN + "while not os.path.exists('go'): time.sleep(0.1)\ndist.destroy_process_group()\n"
    words = [*mpirun, "-np", "2", *RUN, "--tasks"]
    first = mpi.start(words, waits)
    try:
        await_that(lambda: mpi.log.read_text().count("sum 1.0") == 2, mpi.log.read_text)
        before = mpi.log.read_text()
        code, log = mpi.run(words, DONE)
        (mpi.folder / "go").touch()
        assert (first.wait(SECONDS), code) == (0, 0), before + log
    finally:
        end(first)
    for text in (before, log):
        assert sorted(line for line in text.splitlines() if line.startswith("rank")) == [
            "rank 0 of 2, 0 here, sum 1.0",
            "rank 1 of 2, 1 here, sum 1.0",
        ]
    mpi.await_no_processes()


def test_one_task_is_a_launcher(mpirun: list[str], mpi: Mpi) -> None:
    code, log = mpi.run([*mpirun, "-np", "1", *RUN, "--nproc-per-node=2"], DONE)
    assert code == 0, log
    assert log.count("sum 1.0") == 2, log


def test_several_launchers_are_refused(mpirun: list[str], mpi: Mpi) -> None:
    code, log = mpi.run([*mpirun, "-np", "2", *RUN], DONE)
    assert code == 2, log
    assert "has started 2 tasks on this machine" in log


def test_a_rank_that_fails_is_named(mpirun: list[str], mpi: Mpi) -> None:
    fails = JOIN + "if rank == 1: raise ValueError('banana')\ntime.sleep(600)\n"
    code, log = mpi.run([*mpirun, "-np", "2", *RUN, "--tasks"], fails)
    assert code == 1, log
    assert "failed first: ValueError: banana" in log
    mpi.await_no_processes()


@pytest.mark.parametrize("is_task", [True, False])
def test_a_job_that_is_told_to_end_leaves_nothing(mpirun: list[str], mpi: Mpi, is_task: bool) -> None:
    options = ["--tasks"] if is_task else ["--nproc-per-node=2"]
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
def two_hosts(folder: Path) -> Iterator[tuple[str, list[Machine], Path]]:
    """Two machines: the address of this one, the machines, and a program in place of ssh that enters them."""
    with machines_on_switch(2) as (address, machines):
        enter = folder / "enter"  # enter [OPTIONS] HOST COMMAND...
        cases = "".join(f'{each.address}) exec {_inside(each)} sh -c "$*";;\n' for each in machines)
        skip = "while [ ${1#-} != $1 ]; do shift; done\n"
        enter.write_text(f"#!/bin/sh\n{skip}host=$1; shift\ncase $host in\n{cases}esac\n")
        enter.chmod(0o755)
        yield address, machines, enter


def test_two_machines_by_open_mpi(mpi: Mpi, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = [require("mpirun.openmpi", "openmpi-bin"), "--allow-run-as-root"]
    with two_hosts(mpi.folder) as (_, machines, enter):
        hosts = [each.address for each in machines]
        nodes = mpi.folder / "nodes"  # as PBS writes it
        nodes.write_text("".join(f"{each}\n" for each in hosts))
        monkeypatch.setenv("PBS_JOBID", "7.tests")
        monkeypatch.setenv("PBS_NODEFILE", str(nodes))
        passed = [word for name in ("PYTHONPATH", "PBS_JOBID", "PBS_NODEFILE") for word in ("-x", name)]
        there = ["--mca", "plm_rsh_agent", str(enter), "--host", ",".join(f"{each}:2" for each in hosts)]
        there += [*passed, "--mca", "ras", "^tm", "--mca", "plm", "rsh"]
        code, log = mpi.run([*mpirun, *there, "-np", "4", *RUN, "--tasks"], DONE)
        assert code == 0, log
        assert log.count("sum 6.0") == 4, log
        words = [*mpirun, *there, "-np", "2", "--map-by", "ppr:1:node", *RUN, "--nproc-per-node=2"]
        code, log = mpi.run(words, DONE)
        assert code == 0, log
        assert log.count("sum 6.0") == 4, log


def test_two_machines_by_mpich(mpi: Mpi, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tasks find the same name of their job, and no other job has it."""
    monkeypatch.setenv("RALLYPOINT_SECRET", "ab" * 32)
    mpirun = require("mpirun.mpich", "mpich")
    with two_hosts(mpi.folder) as (address, machines, enter):
        hosts = ",".join(each.address for each in machines)
        there = [
            mpirun,
            "-localhost",
            address,
            "-launcher",
            "ssh",
            "-launcher-exec",
            str(enter),
            "-hosts",
            hosts,
        ]
        first = f"--master-addr={machines[0].address}"
        code, log = mpi.run([*there, "-ppn", "2", "-np", "4", *RUN, "--tasks", first], DONE)
        assert code == 0, log
        assert log.count("sum 6.0") == 4, log
        code, log = mpi.run([*there, "-ppn", "1", "-np", "2", *RUN, "--nproc-per-node=2", first], DONE)
        assert code == 0, log
        assert log.count("sum 6.0") == 4, log
