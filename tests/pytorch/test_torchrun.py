"""torchrun's backend `rallypoint`, with real agents and workers: how they meet, and what breaks."""

from __future__ import annotations

import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from jobs import DONE, TRAIN, Job, free_port, job, kill_tree
from processes import has_ipv6
from rallypoint.errors import UsageError
from rallypoint.pytorch.plugin import create_handler
from raw import SECONDS, until

_TWO = ["--nnodes=2", "--nproc-per-node=1"]
_QUICK = "keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=1"


def _backend(endpoint: str, conf: str = "", run_id: str = "job") -> list[str]:
    options = ["--rdzv-backend=rallypoint", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}"]
    return [*options, f"--rdzv-conf={conf}"] if conf else options


def _done(log: str) -> list[tuple[int, int, float]]:
    """Rank, world size and sum of each rank that came through."""
    found = re.findall(r"^done (\d+) of (\d+) sum (\S+) objects \[\{'from': 0\}\]$", log, flags=re.MULTILINE)
    return sorted((int(rank), int(world), float(total)) for rank, world, total in found)


def _all_done(running: Job, world: int) -> None:
    total = float(sum(range(world)))
    assert _done(running.logs()) == [(rank, world, total) for rank in range(world)], running.logs()
    assert "Error waiting on exit barrier" not in running.logs()


_NO_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
_HOSTS = ["localhost", "127.0.0.1", pytest.param("[::1]", marks=_NO_IPV6), socket.gethostname()]


@pytest.mark.slow
@pytest.mark.parametrize("host", _HOSTS)
def test_two_machines_meet(host: str, tmp_path: Path) -> None:
    endpoint = f"{host}:{free_port()}"
    with job(tmp_path) as running:
        for _ in range(2):
            running.start(TRAIN + DONE, [*_TWO, *_backend(endpoint)])
        assert running.wait() == [0, 0], running.logs()
        _all_done(running, 2)
        assert running.processes() == []


_FAIL_ONCE = TRAIN + "if rank == 1 and tries == 0: raise ValueError('the first try fails')\n" + DONE


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(10))
def test_a_restarted_job_comes_up(attempt: int, tmp_path: Path) -> None:
    """Ten of ten: the second try never reads the keys of the first."""
    with job(tmp_path) as running:
        options = ["--rdzv-backend=rallypoint", "--nproc-per-node=4", "--max-restarts=1"]
        running.start(_FAIL_ONCE, options)
        assert running.wait() == [0], running.logs()
        _all_done(running, 4)


# Each try finds its store empty, and leaves something in it. Without torch, which takes its time.
_LEAVE_BEHIND = """
import os
from rallypoint import TCPStore
with TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=30) as store:
    print("try", os.environ["TORCHELASTIC_RESTART_COUNT"], "finds", store.check(["left"]), flush=True)
    store.set("left", "behind")
raise SystemExit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


def test_each_try_of_a_job_has_a_store_of_its_own(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        running.start(_LEAVE_BEHIND, ["--rdzv-backend=rallypoint", "--nproc-per-node=1", "--max-restarts=1"])
        assert running.wait() == [0], running.logs()
        assert re.findall(r"^try .*$", running.log(), re.MULTILINE) == [
            "try 0 finds False",
            "try 1 finds False",
        ]
        assert running.processes() == []


_UNTIL_ALONE = (
    TRAIN
    + """
say("ready", rank, "of", world)
if world == 2:
    open("met", "w").close()
while world == 2:  # until the other is gone, which ends this in an error, or in a restart
    dist.all_reduce(total)
    time.sleep(0.05)
if not os.path.exists("met"):
    time.sleep(600)  # the other is late; when it comes, both start again
"""
    + DONE
)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["the machine with the store", "the other"])
def test_the_survivor_of_two_goes_on(victim: int, tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", *_backend(endpoint, _QUICK)]
    with job(tmp_path) as running:
        for _ in range(2):
            running.start(_UNTIL_ALONE, options)
        running.await_text("of 2")
        kill_tree(running.agents[victim])
        codes = running.wait()
        assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, 0), running.logs()
        assert _done(running.log(1 - victim)) == [(0, 1, 0.0)], running.logs()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_machine_that_is_told_to_go_leaves_its_store_to_the_others(number: int, tmp_path: Path) -> None:
    """As a scheduler does that takes a machine back: torchrun ends without a word to its rendezvous."""
    endpoint = f"localhost:{free_port()}"
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", *_backend(endpoint, _QUICK)]
    with job(tmp_path) as running:
        running.start(_UNTIL_ALONE, options)
        running.await_listening(endpoint)
        running.start(_UNTIL_ALONE, options)
        running.await_text("of 2")
        running.agents[0].send_signal(number)
        assert running.wait()[1] == 0, running.logs()
        assert _done(running.log(1)) == [(0, 1, 0.0)], running.logs()


@pytest.mark.slow
def test_a_machine_that_comes_later_takes_part(tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    script = TRAIN + 'say("ready", rank, "of", world)\nif world == 1: time.sleep(600)\n' + DONE
    options = ["--nnodes=1:2", "--nproc-per-node=1", *_backend(endpoint, _QUICK)]
    with job(tmp_path) as running:
        running.start(script, options)
        running.await_text("ready 0 of 1")
        running.start(script, options)
        assert running.wait() == [0, 0], running.logs()
        _all_done(running, 2)


def _handler(endpoint: str, **conf: str) -> Any:
    """What torchrun asks for a rendezvous of two machines."""
    return create_handler(RendezvousParameters("rallypoint", endpoint, "job", 2, 2, None, **conf))


def test_a_machine_that_never_comes_is_missed_by_name() -> None:
    handler = _handler(f"localhost:{free_port()}", rank="0", join_timeout="0.5")
    try:
        with pytest.raises(RendezvousTimeoutError) as caught:
            handler.next_rendezvous()
    finally:
        handler.shutdown()
    assert "1 of 2 machines connected within 0.5 s" in str(caught.value)
    assert "missing: machine rank 1" in str(caught.value)
    assert socket.gethostname() in str(caught.value)


def test_a_machine_that_cannot_start_its_ranks_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"localhost:{free_port()}"
    first, second = (_handler(endpoint, join_timeout="20") for _ in range(2))

    def refuse(_: object) -> None:
        raise UsageError("its ranks need a relay", hint="leave out --relay=off")

    monkeypatch.setattr(first, "_enter", lambda _: None)
    monkeypatch.setattr(second, "_enter", refuse)
    try:
        with ThreadPoolExecutor() as threads:
            coming = threads.submit(first.next_rendezvous)
            with pytest.raises(ValueError, match="need a relay"):
                second.next_rendezvous()
            coming.result(SECONDS)
        second.shutdown()
        until(first.num_nodes_waiting, "the other is to start again")
    finally:
        first.shutdown()


def test_what_is_wrong_with_an_endpoint_is_said() -> None:
    with pytest.raises(ValueError, match="is no endpoint"):
        _handler("localhost:70000")


def test_a_port_that_another_program_holds_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(RendezvousError, match="is in use by"),
    ):
        _handler(f"127.0.0.1:{other.getsockname()[1]}", join_timeout="0.5")


@pytest.mark.slow
def test_four_machines_leave_in_peace(tmp_path: Path) -> None:
    """Workers that end at different times: nobody meets an exit barrier without a store."""
    endpoint = f"localhost:{free_port()}"
    script = "import os, time\ntime.sleep(0.3 * int(os.environ['RANK']))\n"
    with job(tmp_path) as running:
        for _ in range(4):
            running.start(script, ["--nnodes=4", "--nproc-per-node=1", *_backend(endpoint)])
        assert running.wait() == [0] * 4, running.logs()
        assert "Error waiting on exit barrier" not in running.logs()
        assert running.processes() == []
