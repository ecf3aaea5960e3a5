"""Real schedulers for tests: a Slurm cluster of two machines or more, and mpirun.

    with slurm_cluster(folder) as slurm:
        slurm.run("srun", "--nodes=2", "hostname")

Each machine of the cluster is a set of namespaces with a network, a name and processes of its own; all end
with the block. Programs that are missing are installed where that is possible; elsewhere the test is skipped.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from engines import free_ports
from namespaces import Machine, machines_on_switch
from processes import end
from turns import in_turns

SECONDS = 180.0
"""For a job of four ranks, which import torch on a machine that has other tests to run."""

_START_SECONDS = 60.0
_INSTALL_SECONDS = 300.0


def require(program: str, *packages: str) -> str:
    """The path of a program. If it is missing, its Debian packages are installed, or the test is skipped."""
    if found := shutil.which(program):
        return found
    if os.geteuid() or shutil.which("apt-get") is None:
        pytest.skip(f"{program} is not installed, and only root on Debian can install it")
    with in_turns("install"):
        if shutil.which(program) is None:
            _install(packages)
    return shutil.which(program) or pytest.skip(f"{program} is not installed, and apt-get cannot install it")


def _install(packages: Sequence[str]) -> None:
    # With this run level, no service is started.
    environ = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        try:
            subprocess.run(["apt-get", *words], env=environ, capture_output=True, timeout=_INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            return


def await_that(condition: Callable[[], bool], complaint: Callable[[], str], seconds: float = SECONDS) -> None:
    """Wait until a condition holds; programs that do not tell are asked again and again."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.1)


# Slurm ------------------------------------------------------------------------------------------------------

_CONF = """
ClusterName=tests
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
PartitionName=main Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
"""
_NODE = "NodeName={name} NodeAddr={address} Port=6818 CPUs=8 Gres=gpu:2\n"

_MOUNT_GROUPS = """
mount -t tmpfs none /sys/fs/cgroup
mkdir /sys/fs/cgroup/freezer
mount -t cgroup -o freezer none /sys/fs/cgroup/freezer
"""
_REMOVE_GROUPS = "find /sys/fs/cgroup/freezer -depth -path '*/slurm_gpu0*' -type d -exec rmdir {} +"

# The kernel's own name service is asked for nothing: there is no network to ask.
_BE_A_MACHINE = f"""
hostname "$0"
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
if grep -q proctrack/cgroup "$1/slurm.conf"; then {_MOUNT_GROUPS} fi
exec slurmd -D -N "$0"
"""


@dataclass
class Slurm:
    """A cluster of the machines gpu01, gpu02, ..., with 8 processors and 2 GPUs each, which do nothing."""

    folder: Path
    environ: dict[str, str]
    proctrack: str
    """How it finds the processes of a job: by `linuxproc` it signals all of them, by `cgroup` the tasks."""
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, *words: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm to its end; what it prints is together in stdout."""
        return subprocess.run(
            words,
            env={**self.environ, **(environ or {})},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )

    def submit(self, script: str, *options: str) -> SlurmJob:
        """sbatch: a job with this script."""
        path = self.folder / f"job-{len(list(self.folder.glob('job-*')))}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        return self.submit_file(path, *options)

    def submit_file(self, script: Path, *options: str, path: str = "") -> SlurmJob:
        """sbatch: a job with the script in a file; `path` is its PATH."""
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        log.touch()
        words = ("sbatch", "--parsable", "--open-mode=append", f"--output={log}", *options, str(script))
        done = self.run(*words, environ={"PATH": path} if path else None)
        assert done.returncode == 0, done.stdout
        return SlurmJob(self, done.stdout.strip().splitlines()[-1], log)

    def processes(self) -> list[psutil.Process]:
        """All processes of jobs, on both machines."""
        return [each for each in psutil.process_iter() if self._is_of_job(each)]

    def _is_of_job(self, process: psutil.Process) -> bool:
        try:
            environ = process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
        except psutil.Error:
            return False
        return environ.get("SLURM_CONF") == self.environ["SLURM_CONF"] and "SLURM_JOB_ID" in environ

    def await_no_processes(self) -> None:
        await_that(lambda: not self.processes(), lambda: f"left behind: {self.processes()}")


@dataclass
class SlurmJob:
    """A job that was submitted."""

    slurm: Slurm
    id: str
    path: Path

    @property
    def log(self) -> str:
        return self.path.read_text()

    @property
    def state(self) -> str:
        shown = self.slurm.run("scontrol", "show", "job", self.id).stdout
        return shown.partition("JobState=")[2].partition(" ")[0]

    def limit_time(self, minutes: int) -> None:
        """It ends when it has run for so long."""
        done = self.slurm.run("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}")
        assert done.returncode == 0, done.stdout

    def await_text(self, text: str, count: int = 1) -> None:
        await_that(lambda: self.log.count(text) >= count, lambda: f"no {text!r}; {self.state}:\n{self.log}")

    def await_state(self, *states: str) -> str:
        await_that(lambda: self.state in states, lambda: f"it is {self.state}:\n{self.log}")
        return self.state


@contextmanager
def slurm_cluster(folder: Path, proctrack: str, size: int = 2) -> Iterator[Slurm]:
    """A cluster whose machines are ready when the block begins."""
    for program in ("slurmctld", "slurmd", "srun"):
        require(program, "slurmctld", "slurmd", "slurm-client")
    require("unshare", "util-linux")
    with machines_on_switch(size) as (address, machines), ExitStack() as stack:
        if proctrack == "cgroup":
            stack.enter_context(_groups())
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "SLURM_CONF": str(folder / "slurm.conf")}
        slurm = Slurm(folder, environ, proctrack)
        names = _configure(folder, address, machines, proctrack)
        commands = [["slurmctld", "-D", "-i"]]
        commands += [_node_command(*each, folder) for each in zip(names, machines, strict=True)]
        for number, command in enumerate(commands):
            log = stack.enter_context((folder / f"daemon-{number}.log").open("wb"))
            daemon = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
            stack.callback(end, daemon)
            slurm.daemons.append(daemon)
        await_that(
            lambda: slurm.run("sinfo", "--noheader", "--format=%D %T").stdout.split() == [str(size), "idle"],
            lambda: "\n".join(path.read_text()[-2000:] for path in folder.glob("daemon-*.log")),
            _START_SECONDS,
        )
        yield slurm


@contextmanager
def _groups() -> Iterator[None]:
    """Groups of processes that Slurm can make. Their names are fixed, but one cluster runs at a time."""

    def run(then: str) -> int:
        words = ["unshare", "--mount", "sh", "-ec", _MOUNT_GROUPS + then]
        return subprocess.run(words, capture_output=True).returncode

    if run("true"):
        pytest.skip("the kernel has no cgroups of version 1, or does not let us have them")
    try:
        yield
    finally:
        # Processes that were killed may be there for a moment.
        await_that(lambda: not run(_REMOVE_GROUPS), lambda: "there are groups left")


def _configure(folder: Path, address: str, machines: Sequence[Machine], proctrack: str) -> list[str]:
    """Write the files of a cluster; the names of its machines."""
    names = [f"gpu{number:02}" for number in range(1, len(machines) + 1)]
    [port] = free_ports(1)
    nodes = "".join(
        _NODE.format(name=name, address=each.address) for name, each in zip(names, machines, strict=True)
    )
    conf = _CONF.format(
        host=socket.gethostname(), address=address, port=port, folder=folder, proctrack=proctrack
    )
    hosts = [f"{each.address} {name}" for name, each in zip(names, machines, strict=True)]
    (folder / "slurm.conf").write_text(nodes + conf)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "gres.conf").write_text("Name=gpu File=/dev/tty[1-2]\n")
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{address} controller", *hosts, ""]))
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    for name in ("state", *names):
        (folder / name).mkdir()
    return names


def _node_command(name: str, machine: Machine, folder: Path) -> list[str]:
    unshare = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    return [*machine.prefix, *unshare, "sh", "-ec", _BE_A_MACHINE, name, str(folder)]
