"""A training job of two machines with four ranks each, through relays, while their connections are cut.

The machines are network namespaces with a cable between them, where the rights allow that; else they are
two launchers on loopback.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from jobs import SECONDS, Job, free_port, job
from namespaces import Machine, two_machines
from raw import until

STEPS = 40

SCRIPT = f"""
import os, sys, time
import torch, torch.distributed as dist
import torch.distributed.nn  # before the process group, or DDP may abort at exit

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
say("master", rank, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
store = dist.distributed_c10d._get_default_store()
torch.manual_seed(0)
weights = torch.zeros(16)
target = torch.linspace(-1, 1, 16)
for step in range({STEPS}):
    grad = (weights - target) * (rank + 1) / sum(range(world + 1))
    dist.all_reduce(grad)
    weights -= grad * 0.5
    store.add("steps", 1)
    if step % 8 == 0:
        group = dist.new_group(list(range(0, world, 2)))  # many keys, many waits
        say("step", step, "rank", rank)
        while not os.path.exists(f"go-{{step}}"):  # the connections are cut meanwhile
            time.sleep(0.01)
    dist.barrier()
count = store.add("steps", 0)
dist.barrier()
assert torch.allclose(weights, target, atol=1e-3), weights
say("done", rank, "of", world, "steps", int(store.get("steps")))
dist.barrier()
dist.destroy_process_group()
"""


def relays_of(job: Job) -> set[int]:
    """The relay processes of a job."""
    return {process.pid for process in job.processes() if "rallypoint.relay.child" in process.cmdline()}


def upstream_ports(machine: Machine, relays: set[int]) -> list[str]:
    """The local ports of the connections that the relays of a machine have made."""
    listing = subprocess.run([*machine.prefix, "ss", "-Htnp"], capture_output=True, text=True, check=True)
    ports = []
    for line in listing.stdout.splitlines():
        match = re.search(r"(\S+):(\d+)\s+(\S+):(\d+)\s+users:.*pid=(\d+)", line)
        if match and int(match[5]) in relays and int(match[2]) not in listening(machine, int(match[5])):
            ports.append(match[2])
    return ports


def listening(machine: Machine, pid: int) -> set[int]:
    listing = subprocess.run([*machine.prefix, "ss", "-Htlnp"], capture_output=True, text=True, check=True)
    lines = [line for line in listing.stdout.splitlines() if f"pid={pid}," in line]
    return {int(line.split()[3].rpartition(":")[2]) for line in lines}


def cut(machine: Machine, ports: Sequence[str]) -> None:
    """Abort connections, by their local ports, as a broken network does."""
    for port in ports:
        subprocess.run([*machine.prefix, "ss", "-K", "sport", "=", f":{port}"], capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ss") is None, reason="connections are cut with ss, of iproute2")
def test_a_job_trains_through_relays_whose_connections_are_cut(tmp_path: Path) -> None:
    with two_machines() as machines, job(tmp_path) as running:
        endpoint = f"{machines[0].address}:{free_port()}"
        for number, machine in enumerate(machines):
            running.start(
                SCRIPT,
                [
                    *("--nnodes", "2", "--nproc-per-node", "4", "--rdzv-endpoint", endpoint),
                    *("--node-rank", str(number), "--local-addr", machine.address),
                ],
                {"GLOO_SOCKET_IFNAME": machine.interface, "RALLYPOINT_JOIN_TIMEOUT": "60"},
                ("-m", "rallypoint", "run"),
                prefix=machine.prefix,
            )
        for number in (0, 1):
            running.await_text("step 0 ", number, 4)
        relays = relays_of(running)
        assert len(relays) == 2, running.logs()
        for step in range(0, STEPS, 8):
            running.await_text(f"step {step} ", 0, 4)
            for machine in dict.fromkeys(machines):
                ports = upstream_ports(machine, relays)
                assert ports
                cut(machine, ports)
            (tmp_path / f"go-{step}").touch()
        assert running.wait() == [0, 0], running.logs()
        logs = running.logs()
        assert logs.count(f"of 8 steps {8 * STEPS}\n") == 8, logs
        masters = set(re.findall(r"master \d (\S+) (\d+)", logs))
        assert {host for host, _ in masters} == {"127.0.0.1"}, "every rank was given its relay"
        if machines[0] != machines[1]:
            assert logs.count("nothing is lost") >= 2, logs
        until(lambda: not any(psutil.pid_exists(pid) for pid in relays), "the relays have ended", SECONDS)


@pytest.mark.parametrize(
    ("relay", "relayed"),
    [("on", True), *(pytest.param(word, False, marks=pytest.mark.slow) for word in ("off", "auto"))],
)
def test_whether_the_ranks_of_one_machine_have_a_relay(relay: str, relayed: bool, tmp_path: Path) -> None:
    port = free_port()
    with job(tmp_path) as running:
        running.start(
            "import os; print('master', os.environ['MASTER_PORT'])",
            ["--relay", relay, "--rdzv-endpoint", f"localhost:{port}"],
            command=("-m", "rallypoint", "run"),
        )
        assert running.wait() == [0]
        assert (f"master {port}\n" not in running.logs()) == relayed, running.logs()
        assert running.processes() == []
