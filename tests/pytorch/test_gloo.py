"""init_process_group on our server: four processes, torch's C++ client, gloo."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from processes import BACKENDS, Server

_RANKS = 4
_TIMEOUT = timedelta(seconds=180)


def _train(rank: int, host: str, port: int, results: Any) -> None:
    store = dist.TCPStore(host, port, _RANKS, False, _TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS, timeout=_TIMEOUT)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    pair = dist.new_group([0, 2])
    part = torch.tensor([float(rank)])
    if rank in (0, 2):
        dist.all_reduce(part, group=pair)
    objects: list[Any] = [{"from": "rank 0"}, "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, src=0)
    dist.monitored_barrier(timeout=_TIMEOUT)
    dist.destroy_process_group()
    results.put((rank, total.item(), part.item(), objects))


@pytest.mark.parametrize(
    "any_server_of_module",
    [
        *(pytest.param((backend, 0), id=backend, marks=pytest.mark.slow) for backend in BACKENDS),
        pytest.param(("libuv", 1), id="relay"),
        pytest.param(("legacy", 2), id="relay on a relay", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_gloo_with_four_processes(any_server: Server) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    results = context.Queue()
    ranks = [
        context.Process(target=_train, args=(rank, any_server.host, any_server.port, results))
        for rank in range(_RANKS)
    ]
    try:
        for process in ranks:
            process.start()
        answers = sorted(results.get(timeout=180) for _ in ranks)
        for process in ranks:
            process.join(60)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    parts = {0: 2.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert answers == [(rank, 6.0, parts[rank], [{"from": "rank 0"}, "text"]) for rank in range(_RANKS)]
    assert [process.exitcode for process in ranks] == [0] * _RANKS
