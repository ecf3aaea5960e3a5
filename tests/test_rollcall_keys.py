"""What the names of torch's keys tell: by examples, and by the keys of a real job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from processes import serving
from rallypoint.rollcall.group_keys import barrier_of, is_of_all, owing_rank, owing_whom
from rallypoint.stores.tcp import TCPStore


@pytest.mark.parametrize(
    ("key", "rank"),
    [
        ("default_pg/0//cpu//0/3", 3),
        ("default_pg/0//cpu//0/16383", 16383),
        ("default_pg/0//cpu//1/3", 3),
        ("default_pg/0//cpu//0/rank_3", 3),
        ("default_pg/0//cuda//0/3", 3),
        ("0//cpu//0/3", 3),
        ("/worker/attempt_0/default_pg/0//cpu//0/3", 3),
        ("a\nb/0//cpu//0/3", 3),
        ("default_pg/0//cuda//0", 0),
        ("default_pg/0//cuda//17", 0),
        ("default_pg/0//cuda//2:5", 2),
        ("default_pg/0//1//cpu//0/3", -1),
        ("default_pg/0//0//cpu//0/3", -1),
        ("default_pg/1//cpu//0/3", -1),
        ("10//cpu//0/3", -1),
        ("default_pg/0//cpu//0/3/", -1),
        ("default_pg/0//cpu//0/x", -1),
        ("default_pg/0//cpu//0/٣", -1),
        ("default_pg/0//cpu//0/" + "9" * 30, -1),
        ("default_pg/0//cpu//0", -1),
        ("default_pg/0//xpu//0/3", -1),
        ("epoch/3", -1),
        ("init/", -1),
        ("", -1),
    ],
)
def test_the_rank_that_writes_a_key(key: str, rank: int) -> None:
    assert owing_rank(key) == rank
    assert (owing_whom(key) == f"rank {rank}") == (rank >= 0)


@pytest.mark.parametrize(
    ("key", "who"),
    [
        ("default_pg/0//1//cpu//0/3", "member 3 of the group 1"),
        ("torchelastic/role_info/2", "the agent of machine 2"),
        ("rallypoint/agents/torchelastic/role_info/2", "the agent of machine 2"),
        ("none/torchelastic/assigned_ranks/2", "the agent of machine 0"),
        ("store_based_barrier_key:0:last_worker", ""),
        ("anything", ""),
    ],
)
def test_others_who_write_keys(key: str, who: str) -> None:
    assert owing_whom(key) == who


@pytest.mark.parametrize(
    ("key", "barrier", "of_all"),
    [
        ("default_pg/store_based_barrier_key:0:last_worker", "default_pg/store_based_barrier_key:0", True),
        ("store_based_barrier_key:default_pg:last_worker", "store_based_barrier_key:default_pg", True),
        ("default_pg/store_based_barrier_key:1:last_worker", "default_pg/store_based_barrier_key:1", False),
        ("torchelastic/agent/terminal_state/last_member", "torchelastic/agent/terminal_state", False),
        ("default_pg/0//cpu//0/3", "", False),
    ],
)
def test_keys_that_stand_for_barriers(key: str, barrier: str, of_all: bool) -> None:
    assert barrier_of(key) == barrier
    assert is_of_all(barrier) == of_all


JOB = """
import sys
import torch.distributed as dist

rank, port, own_store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "own"
if own_store:
    store = dist.TCPStore("127.0.0.1", port, 3, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
else:
    import os
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
dist.new_group([1, 2])
dist.barrier()
"""


@pytest.mark.parametrize("kind", ["own", "torch's"])
def test_the_keys_of_a_job_of_three_with_a_group_of_two(kind: str, tmp_path: Path) -> None:
    """The store is given by the script, or made by torch, which puts a prefix before its keys."""
    with (tmp_path / "log").open("w+") as log, serving("libuv", log) as server:
        command = [sys.executable, "-c", JOB]
        workers = [subprocess.Popen([*command, str(rank), str(server.port), kind]) for rank in range(3)]
        try:
            assert [worker.wait(60) for worker in workers] == [0, 0, 0]
        finally:
            for worker in workers:
                worker.kill()
        with TCPStore(server.host, server.port, timeout=10) as store:
            keys = store.list_keys()
    assert sorted(rank for key in keys if (rank := owing_rank(key)) >= 0) == [0, 1, 2]
    members = sorted(who for key in keys if (who := owing_whom(key)).startswith("member"))
    assert members == ["member 0 of the group 1", "member 1 of the group 1"]
