"""What the names of torch's keys tell: by examples, and by the keys of a real job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jobs import job
from rallypoint.client.tcp import TCPStore
from rallypoint.store.rollcall.question import barrier_of, is_of_all, owing_rank, owing_whom
from threads import serving_in_a_thread

RANKS = {
    "default_pg/0//cpu//0/3": 3,
    "default_pg/0//cpu//0/16383": 16383,
    "default_pg/0//cpu//1/3": 3,
    "default_pg/0//cpu//0/rank_3": 3,
    "default_pg/0//cuda//0/3": 3,
    "0//cpu//0/3": 3,
    "/worker/attempt_0/default_pg/0//cpu//0/3": 3,
    "a\nb/0//cpu//0/3": 3,
    "default_pg/0//cuda//0": 0,
    "default_pg/0//cuda//17": 0,
    "default_pg/0//cuda//2:5": 2,
    "default_pg/0//1//cpu//0/3": -1,
    "default_pg/0//0//cpu//0/3": -1,
    "default_pg/1//cpu//0/3": -1,
    "10//cpu//0/3": -1,
    "default_pg/0//cpu//0/3/": -1,
    "default_pg/0//cpu//0/x": -1,
    "default_pg/0//cpu//0/٣": -1,
    "default_pg/0//cpu//0/" + "9" * 30: -1,
    "default_pg/0//cpu//0": -1,
    "default_pg/0//xpu//0/3": -1,
    "epoch/3": -1,
    "init/": -1,
    "": -1,
}


def test_the_rank_that_writes_a_key() -> None:
    assert {key: owing_rank(key) for key in RANKS} == RANKS
    for key, rank in RANKS.items():
        assert (owing_whom(key) == f"rank {rank}") == (rank >= 0), key


OTHERS = {
    "default_pg/0//1//cpu//0/3": "member 3 of the group 1",
    "torchelastic/role_info/2": "the agent of machine 2",
    "rallypoint/agents/torchelastic/role_info/2": "the agent of machine 2",
    "none/torchelastic/assigned_ranks/2": "the agent of machine 0",
    "store_based_barrier_key:0:last_worker": "",
    "anything": "",
}


def test_others_who_write_keys() -> None:
    assert {key: owing_whom(key) for key in OTHERS} == OTHERS


BARRIERS = {
    "default_pg/store_based_barrier_key:0:last_worker": ("default_pg/store_based_barrier_key:0", True),
    "store_based_barrier_key:default_pg:last_worker": ("store_based_barrier_key:default_pg", True),
    "default_pg/store_based_barrier_key:1:last_worker": ("default_pg/store_based_barrier_key:1", False),
    "torchelastic/agent/terminal_state/last_member": ("torchelastic/agent/terminal_state", False),
    "default_pg/0//cpu//0/3": ("", False),
}


def test_keys_that_stand_for_barriers() -> None:
    assert {key: (barrier_of(key), is_of_all(barrier_of(key))) for key in BARRIERS} == BARRIERS


# Three ranks, forked from one process that has torch. At the first server the script makes the store; at the
# second, behind a relay, torch does.
JOB = """
import multiprocessing, os, sys
import torch, torch.distributed as dist

def total(rank, group=None):
    number = torch.tensor([float(rank)])
    dist.all_reduce(number, group=group)
    return number.item()

def work(rank):
    own, theirs = map(int, sys.argv[1:])
    store = dist.TCPStore("127.0.0.1", own, 3, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for how in ({"store": store}, {"init_method": f"tcp://127.0.0.1:{theirs}"}):
        dist.init_process_group("gloo", **how, rank=rank, world_size=3)
        pair = dist.new_group([1, 2])
        assert total(rank) == 3.0 and (rank == 0 or total(10.0, pair) == 20.0)
        objects = [{"from": "rank 0"}, "text"] if rank == 0 else [None, None]
        dist.broadcast_object_list(objects, src=0)
        assert objects == [{"from": "rank 0"}, "text"]
        dist.barrier()
        dist.monitored_barrier()
        dist.destroy_process_group()

context = multiprocessing.get_context("fork")
ranks = [context.Process(target=work, args=(rank,)) for rank in range(3)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
sys.exit([rank.exitcode for rank in ranks] != [0, 0, 0])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork there")
def test_the_keys_of_a_job_of_three_with_a_group_of_two(tmp_path: Path) -> None:
    with serving_in_a_thread(0) as own, serving_in_a_thread(1) as theirs, job(tmp_path) as running:
        running.start(JOB, (), command=(), arguments=(str(own), str(theirs)))
        assert running.wait() == [0], running.logs()
        for port in (own, theirs):
            with TCPStore("127.0.0.1", port, timeout=10) as store:
                keys = store.list_keys()
            assert sorted(rank for key in keys if (rank := owing_rank(key)) >= 0) == [0, 1, 2]
            members = sorted(who for key in keys if (who := owing_whom(key)).startswith("member"))
            assert members == ["member 0 of the group 1", "member 1 of the group 1"]
