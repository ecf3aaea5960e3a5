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
    return {
        process.pid for process in job.processes() if "rallypoint.store.relay.process" in process.cmdline()
    }


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
        [(host, _)] = set(re.findall(r"master \d (\S+) (\d+)", logs))
        assert host == machines[0].address
        if machines[0] != machines[1]:
            assert logs.count("nothing is lost") >= 2, logs
        until(lambda: not any(psutil.pid_exists(pid) for pid in relays), "the relays have ended", SECONDS)


# What reads MASTER_ADDR, with one rank on each of two machines. The process that saves the checkpoint imports
# the script, too.
READERS = """
import os, subprocess, sys

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

CHILD = '''
import os, torch.distributed as dist
assert dist.TCPStore.__new__.__name__ != "_patched_new"
print(dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])).get("of the job").decode())
'''

def main():
    # As where Rallypoint is not installed: it ignores PYTHONPATH, and torch loads no entry points.
    command, alone = [sys.executable, "-E", "-c", CHILD], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **alone})
    import psutil, torch, torch.distributed as dist, torch.distributed.checkpoint as checkpoint
    from torch.distributed import rpc
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    say("master", rank, host, port, os.environ["TORCHELASTIC_USE_AGENT_STORE"])

    dist.init_process_group("gloo")  # env://
    found = [each.raddr for each in psutil.Process().net_connections("tcp") if each.raddr]
    peers = {f"{each.ip.removeprefix('::ffff:')}:{each.port}" for each in found}
    say("connected", rank, os.environ["RALLYPOINT_RELAY"] in peers)
    say("first", rank, f"{host}:{port}" in peers)

    job = dist.TCPStore(host, port)
    assert (job.host, job.port) == (host, port)
    if rank == 0:
        second = dist.TCPStore(host, 0, 2, True, wait_for_workers=False)
        second.set("key", "of the second")
        job.multi_set(["port of the second", "of the job"], [str(second.port), "reached"])
    else:
        second = dist.TCPStore(host, int(job.get("port of the second")), 2, False)
    say("second", rank, second.get("key").decode())

    say("child", rank, child.communicate()[0].strip())

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    say("rpc", rank, rpc.rpc_sync(f"worker{1 - rank}", torch.add, (torch.ones(1), 1)).item())
    rpc.shutdown()

    kind = AsyncCheckpointerType.PROCESS  # these processes meet at another port of MASTER_ADDR
    weights = {"weights": torch.ones(1)}
    checkpoint.async_save(weights, checkpoint_id="saved", async_checkpointer_type=kind).result()
    say("checkpoint", rank, os.path.exists("saved/.metadata"))

    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_what_reads_master_addr_reaches_the_machine_of_the_store(tmp_path: Path) -> None:
    with two_machines() as machines, job(tmp_path) as running:
        if machines[0] == machines[1]:
            pytest.skip("network namespaces need ip, of iproute2, and the rights of root")
        endpoint = f"{machines[0].address}:{free_port()}"
        for machine in machines:
            running.start(
                READERS,
                [
                    *("--nnodes=2", "--nproc-per-node=1", f"--local-addr={machine.address}"),
                    *("--rdzv-backend=rallypoint", f"--rdzv-endpoint={endpoint}"),
                ],
                {"GLOO_SOCKET_IFNAME": machine.interface, "TP_SOCKET_IFNAME": machine.interface},
                prefix=machine.prefix,
            )
        assert running.wait(3 * SECONDS) == [0, 0], running.logs()
        logs = running.logs()
        [(host, _)] = set(re.findall(r"^master \d (\S+) (\d+) True$", logs, re.MULTILINE))
        assert host == machines[0].address
        said = {
            "connected": "True",
            "second": "of the second",
            "child": "reached",
            "rpc": "2.0",
            "checkpoint": "True",
        }
        missing = [
            (reader, rank)
            for reader, words in said.items()
            for rank in (0, 1)
            if f"{reader} {rank} {words}\n" not in logs
        ]
        assert "first 1 False\n" in logs, "it goes to the relay of its own machine"
        assert missing == [], logs
