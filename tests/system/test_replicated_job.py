"""Jobs that meet on a store that outlives its machine, while the process that leads is killed.

Two launchers with two ranks each, real torch; the store is on a real Redis.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines import Node, ask, await_that, free_ports, redis_cluster
from jobs import DONE, SECONDS, TRAIN, Job, job
from namespaces import Machine, machines_on_switch, plug
from rallypoint.client.tcp import TCPStore
from rallypoint.codec import from_text
from rallypoint.launch.endpoint import parse_endpoints
from rallypoint.launch.rendezvous.digest import Digest
from rallypoint.store.relay.hosting import host_relay
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.log import Log
from rallypoint.store.server.guard import secret as guard
from rallypoint.store.server.guard.secret import SECRET_VARIABLE, make_secret
from raw import until

# On a machine that is busy, two launchers with torch take a minute to start.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUN = ("-m", "rallypoint", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=rallypoint")

STEPS = 30

TRAIN_ON = f"""{TRAIN}
store = dist.distributed_c10d._get_default_store()
say("master", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
for step in range({STEPS}):
    dist.all_reduce(total)
    dist.new_group([0, 3])  # keys and waits
    if step % 10 == 0:
        say("step", step, "rank", rank)
        while not os.path.exists(f"go-{{step}}"):
            time.sleep(0.01)
    store.add("steps", 1)
    dist.barrier()
    assert store.add("steps", 0) == (step + 1) * world
    dist.barrier()
say("trained", rank, "tries", tries, "steps", store.add("steps", 0))
dist.barrier()
dist.destroy_process_group()
"""


LOOPBACK = Machine((), "127.0.0.1", "lo")


@dataclass
class Stores:
    """The processes of a replicated store: one leads, the others stand by."""

    nodes: Mapping[str, Node]
    """By their addresses."""
    engine: Node
    log: Log

    @property
    def endpoint(self) -> str:
        return ",".join(self.nodes)

    @property
    def leader(self) -> str:
        """The address of the one that leads."""
        return self.log.read_leadership().address

    @contextmanager
    def client(self, name: str) -> Iterator[TCPStore]:
        """A client of the store of this name."""
        relay = host_relay(parse_endpoints(self.endpoint), store=name)
        try:
            with TCPStore(*relay.address, timeout=SECONDS) as client:
                yield client
        finally:
            relay.release()

    def await_joined(self, running: Job) -> None:
        """Until a machine has joined the meeting of the job."""
        key = "rallypoint/meeting/job/roster"
        with self.client("job/meeting") as client:
            await_that(
                lambda: client.check([key]) and from_text(Digest, client.get(key)).present > 0,
                lambda: f"nobody came:\n{running.logs()}",
                SECONDS,
            )


@contextmanager
def stores(folder: Path, machines: Sequence[Machine], engine: str = "127.0.0.1") -> Iterator[Stores]:
    """`rallypoint serve --engine` on each of the machines, on a Redis that is at the address `engine`."""
    with ExitStack() as stack:
        options = ["--bind", "0.0.0.0", "--protected-mode", "no"] if engine != "127.0.0.1" else []
        redis = stack.enter_context(redis_cluster(folder, options=options))
        url = redis.url("test").replace("127.0.0.1", engine)
        log = stack.enter_context(closing(open_log(url)))
        nodes = {}
        for machine, port in zip(machines, free_ports(len(machines)), strict=True):
            command = [
                *(*machine.prefix, sys.executable, "-m", "rallypoint", "serve"),
                *("--host", machine.address, "--port", str(port), "--engine", url),
            ]
            node = Node(
                command, port, folder / f"serve-{port}", lambda _: bool(log.read_leadership().address)
            )
            stack.callback(node.kill)
            node.start()
            nodes[f"{machine.address}:{port}"] = node
        for node in nodes.values():
            node.await_ready()
        yield Stores(nodes, redis.leader(), log)


@pytest.fixture
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """For jobs on several machines, which should have one. An earlier test may have left another one."""
    monkeypatch.setattr(guard, "_held", [])
    monkeypatch.setenv(SECRET_VARIABLE, make_secret())


def start(
    running: Job,
    script: str,
    store: Stores,
    *options: str,
    command: Sequence[str] = RUN,
    job_id: str = "job",
    machine: Machine = LOOPBACK,
) -> None:
    """Start one of the two launchers of a job with two ranks each, unless the options say otherwise."""
    shape = ["--nnodes=2", "--nproc-per-node=2", f"--rdzv-endpoint={store.endpoint}", f"--rdzv-id={job_id}"]
    environ = {"GLOO_SOCKET_IFNAME": machine.interface}
    running.start(script, [*shape, *options], environ, command, prefix=machine.prefix)


def let_go(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"go-{step}").touch()


@pytest.mark.parametrize(("command", "patch"), [(RUN, "auto"), (TORCHRUN, "auto"), (TORCHRUN, "never")])
def test_the_leader_is_killed_in_the_middle_of_training(
    command: Sequence[str], patch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `never`, all ranks are torch's own clients of the keeper's relay."""
    monkeypatch.setenv("RALLYPOINT_PATCH", patch)
    with stores(tmp_path, [LOOPBACK] * 2) as store, job(tmp_path) as running:
        for _ in range(2):
            start(running, TRAIN_ON, store, command=command)
        let_go(tmp_path, 0)
        for number in range(2):
            running.await_text("step 10 ", number, 2)
        store.nodes[store.leader].kill()
        let_go(tmp_path, 10, 20)
        assert running.wait() == [0, 0], running.logs()
        logs = running.logs()
        assert len(re.findall(rf"trained \d tries 0 steps {4 * STEPS}\n", logs)) == 4, logs
        assert all("nothing is lost" in running.log(number) for number in range(2)), logs
        assert len(set(re.findall(r"master (\S+ \d+)", logs))) == 1, logs
        await_that(lambda: not running.processes(), lambda: f"{running.processes()} are left")


def test_the_leader_is_killed_in_the_middle_of_the_meeting(tmp_path: Path) -> None:
    with stores(tmp_path, [LOOPBACK] * 2) as store, job(tmp_path) as running:
        start(running, TRAIN + DONE, store)
        store.await_joined(running)
        store.nodes[store.leader].kill()
        start(running, TRAIN + DONE, store)
        assert running.wait() == [0, 0], running.logs()
        assert running.logs().count("of 4 sum 6.0") == 4, running.logs()


@pytest.mark.usefixtures("_secret")
def test_the_machine_of_the_store_is_cut_off(tmp_path: Path) -> None:
    """First in the middle of the meeting; when it is back, the other one, in the middle of training."""
    with machines_on_switch(4) as (here, machines):
        *of_store, first, second = machines
        with stores(tmp_path, of_store, here) as store, job(tmp_path) as running:
            start(running, TRAIN_ON, store, machine=first)
            store.await_joined(running)
            cut_off = leading_machine(store, of_store)
            plug(cut_off, in_=False)
            start(running, TRAIN_ON, store, machine=second)
            let_go(tmp_path, 0)
            for number in range(2):
                running.await_text("step 10 ", number, 2)
            plug(cut_off, in_=True)
            assert leading_machine(store, of_store) is not cut_off
            plug(leading_machine(store, of_store), in_=False)
            let_go(tmp_path, 10, 20)
            assert running.wait() == [0, 0], running.logs()
            logs = running.logs()
            assert len(re.findall(rf"trained \d tries 0 steps {4 * STEPS}\n", logs)) == 4, logs
            [host] = set(re.findall(r"master (\S+) \d+", logs))
            assert host in (first.address, second.address)


UNTIL_TOLD = f"""{TRAIN}
say("begun", rank, "of", world)
while not os.path.exists("go-0"):
    dist.all_reduce(total)
    time.sleep(0.01)
{DONE}"""


@pytest.mark.usefixtures("_secret")
def test_the_machine_of_the_store_and_of_the_first_rank_is_cut_off(tmp_path: Path) -> None:
    """The other one starts again without it."""
    with (
        machines_on_switch(2) as (here, machines),
        stores(tmp_path, machines, here) as store,
        job(tmp_path) as running,
    ):
        leading = leading_machine(store, machines)
        conf = "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1"
        for rank, machine in enumerate(sorted(machines, key=lambda each: each is not leading)):
            options = ("--nnodes=1:2", "--nproc-per-node=1", f"--node-rank={rank}", conf)
            start(running, UNTIL_TOLD, store, *options, machine=machine)
        running.await_text("begun 1 of 2", 1)
        plug(leading, in_=False)
        let_go(tmp_path, 0)
        assert running.agents[1].wait(SECONDS) == 0, running.logs()
        assert "done 0 of 1" in running.log(1), running.logs()


WAITS = """
import os
from rallypoint import TCPStore
with TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=300) as store:
    print("begun", flush=True)
    store.wait(["never"])
"""


def test_an_engine_that_has_lost_the_store_is_named(tmp_path: Path) -> None:
    with stores(tmp_path, [LOOPBACK] * 2) as store, job(tmp_path) as running:
        for _ in range(2):
            start(running, WAITS, store, "--nproc-per-node=1")
        for number in range(2):
            running.await_text("begun", number)
        for node in store.nodes.values():
            node.kill()
        assert ask(store.engine, "FLUSHALL")
        for node in store.nodes.values():
            node.start()
        assert running.wait() == [1, 1], running.logs()
        for number in range(2):
            assert "the store has given our session up, has lost its log" in running.log(number)
        told = f"the job's store at {store.endpoint.replace(',', ', ')} has lost what was in it"
        assert told in running.logs(), running.logs()


def leading_machine(store: Stores, machines: Sequence[Machine]) -> Machine:
    return next(each for each in machines if store.leader.startswith(f"{each.address}:"))


FAILS_ONCE = f"""{TRAIN}
say("begun", rank)
if rank == 3 and not os.path.exists("failed"):
    while not os.path.exists("go-0"):
        time.sleep(0.01)
    open("failed", "w").close()
    sys.exit(3)
{DONE}"""


def test_a_rank_fails_while_the_leader_is_killed(tmp_path: Path) -> None:
    """The job starts again, once, with a fresh store."""
    with stores(tmp_path, [LOOPBACK] * 2) as store, job(tmp_path) as running:
        for _ in range(2):
            start(running, FAILS_ONCE, store, "--max-restarts=2")
        for number in range(2):
            running.await_text("begun", number, 2)
        store.nodes[store.leader].kill()
        let_go(tmp_path, 0)
        assert running.wait() == [0, 0], running.logs()
        logs = running.logs()
        assert logs.count("of 4 sum 6.0") == 4, logs
        assert logs.count("begun") == 8, logs


LONE = """
import os
from rallypoint import TCPStore
with TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60) as store:
    assert not store.check(["mine"])
    store.set("mine", "")
    print("alone")
"""


def test_jobs_on_one_store_do_not_meet_and_an_id_may_be_used_again(tmp_path: Path) -> None:
    with stores(tmp_path, [LOOPBACK] * 3) as store, job(tmp_path) as running:
        for number, job_id in enumerate(["a", "b", "a"]):
            start(running, LONE, store, "--nnodes=1", "--nproc-per-node=1", job_id=job_id)
            if number == 1:
                assert running.wait() == [0, 0], running.logs()
        assert running.wait() == [0, 0, 0], running.logs()
        assert running.logs().count("alone") == 3, running.logs()


FAILS_AND_IS_KILLED = """
import os, sys, time
print("begun", flush=True)
if os.path.exists("again"):
    sys.exit(0)
if os.environ["RANK"] == "0":
    sys.exit(3)
time.sleep(600)
"""


def test_a_job_that_was_killed_at_its_end_can_be_started_again(tmp_path: Path) -> None:
    """A rank fails, its launcher closes the meeting, and a scheduler kills all the others."""
    options = ("--nproc-per-node=1", "--max-restarts=0", "--rdzv-conf=keep_alive_interval=1")
    with stores(tmp_path, [LOOPBACK] * 2) as store, job(tmp_path) as running:
        for _ in range(2):
            start(running, FAILS_AND_IS_KILLED, store, *options, command=TORCHRUN)
        until(lambda: any(each.poll() == 1 for each in running.agents), "one has failed", SECONDS)
        for process in running.processes():
            process.kill()
        running.wait()
        (tmp_path / "again").touch()
        for _ in range(2):
            start(running, FAILS_AND_IS_KILLED, store, *options, command=TORCHRUN)
        assert running.wait()[2:] == [0, 0], running.logs()
        assert "the last job with this id is over: waiting for" in running.log(2), running.logs()
