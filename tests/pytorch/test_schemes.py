"""`rally://` and `file://` for init_process_group, and our client as torch's store: DDP, groups, objects."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from jobs import TRAIN, end_torch_stores, free_port, job, own_servers, patch_torch
from rallypoint import TCPStore
from rallypoint.errors import UsageError
from rallypoint.launch.environment import inject
from rallypoint.pytorch.schemes import meet_at_file, meet_at_server
from rallypoint.pytorch.store import PythonStore

_SHORT = timedelta(seconds=5)

_rendezvous: Any = import_module("torch.distributed.rendezvous")


@pytest.fixture(autouse=True)
def _no_server_is_left() -> Iterator[None]:
    yield
    end_torch_stores()


_DDP = (
    TRAIN
    + """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
weights = [None] * world
dist.all_gather_object(weights, [p.tolist() for p in model.parameters()])
assert all(each == weights[0] for each in weights)
pair = dist.new_group([0, world - 1])
if rank in (0, world - 1):
    dist.barrier(group=pair)
dist.monitored_barrier()
say("trained", rank, type(dist.distributed_c10d._get_default_store()).__name__)
dist.destroy_process_group()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["c10d", "rallypoint"])
def test_ddp_on_our_client(backend: str, tmp_path: Path) -> None:
    with job(tmp_path) as running:
        options = [f"--rdzv-backend={backend}", "--rdzv-endpoint=localhost:0", "--nproc-per-node=3"]
        running.start(_DDP, options, {**inject(os.environ), "RALLYPOINT_CLIENT": "python"})
        assert running.wait() == [0], running.logs()
        assert all(f"trained {rank}" in running.log() for rank in range(3))


# Two ranks, forked from one process that has torch, meet at one URL after the other.
_RANKS = """
import multiprocessing, sys, rallypoint.pytorch
rallypoint.pytorch.register()
import torch, torch.distributed as dist

def meet(rank):
    for url in sys.argv[1:]:
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        assert (total.item(), objects) == (3.0, [{"rank": 0}, {"rank": 1}]), (url, total, objects)
        dist.destroy_process_group()

context = multiprocessing.get_context("fork")
ranks = [context.Process(target=meet, args=(rank,)) for rank in range(2)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
sys.exit([rank.exitcode for rank in ranks] != [0, 0])
"""


def _assert_ranks_meet(folder: Path, *urls: str) -> None:
    with job(folder) as running:
        running.start(_RANKS, (), command=(), arguments=urls)
        assert running.wait() == [0], running.logs()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork there")
def test_ranks_meet_by_rally_and_by_file(tmp_path: Path) -> None:
    file = f"file://{tmp_path}/meeting"
    _assert_ranks_meet(tmp_path, f"rally://localhost:{free_port()}", file, file, file)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork there")
def test_ranks_meet_by_rally_however_it_is_set(tmp_path: Path) -> None:
    queries = ("?use_libuv=0", "?client=torch", "?client=python&timeout=60")
    _assert_ranks_meet(tmp_path, *(f"rally://localhost:{free_port()}{query}" for query in queries))


def test_a_stale_file_is_said_to_be_stale(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    _leave_behind(path)
    with pytest.raises(dist.DistStoreError, match="another run"):
        next(iter(meet_at_file(f"file://{path}?rank=0&world_size=1", timeout=_SHORT)))


def test_two_stores_of_a_process_share_a_place_in_a_file(tmp_path: Path) -> None:
    """As a process group and RPC on one file."""
    url = f"file://{tmp_path}/meeting?rank=0&world_size=1"
    (first, *place), (second, *same_place) = (next(iter(meet_at_file(url, timeout=_SHORT))) for _ in range(2))
    assert place == same_place == [0, 1]
    first.set("key", "value")
    assert second.get("key") == b"value"
    first.close()
    assert second.get("key") == b"value"
    second.close()
    assert not (tmp_path / "meeting").exists()


def test_a_group_leaves_its_file_when_it_is_destroyed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patch_torch(monkeypatch)
    monkeypatch.setitem(_rendezvous._rendezvous_handlers, "file", meet_at_file)
    path = tmp_path / "meeting"
    for _ in range(2):
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1, timeout=_SHORT)
        assert path.exists()
        dist.destroy_process_group()
        assert not path.exists()


_START = "^Error initializing torch.distributed using file:// rendezvous: "


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://", f"{_START}path missing"),
        ("file:///path?world_size=1", f"{_START}rank parameter missing"),
        ("file:///path?rank=0", f"{_START}world size parameter missing"),
        ("file:///path?rank=x&world_size=1", "'x'"),
    ],
)
def test_a_file_url_is_refused_as_torch_refuses_it(url: str, words: str) -> None:
    for handler in (_rendezvous._file_rendezvous_handler, meet_at_file):
        with pytest.raises(ValueError, match=words):
            next(iter(handler(url)))


def _leave_behind(path: Path) -> None:
    """A file as a job leaves it that was killed."""
    code = f"""
import os
from rallypoint import FileStore
store = FileStore({str(path)!r}, 1)
store.set("key", "value")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert path.exists()


_BAD = [
    ("rally://localhost?rank=0&world_size=1", "lacks a host or a port"),
    ("rally://localhost:1?rank=2&world_size=2", "rank 2 does not exist"),
    ("rally://localhost:1?rank=0", "the world size is not known"),
    ("rally://localhost:1?rank=x&world_size=2", "is no number"),
    ("rally://localhost:1?rank=0&world_size=1&tiemout=3", "'tiemout', which is not known"),
    ("rally://localhost:1?rank=0&world_size=1&timeout=-3", "timeout in the URL"),
    ("rally://localhost:1?rank=0&world_size=1&client=java", "write one of auto, torch, python"),
    ("rally://localhost:1?rank=0&world_size=1&use_libuv=maybe", "no switch"),
]


def test_bad_urls_are_explained() -> None:
    for url, message in _BAD:
        with pytest.raises(UsageError, match=message):
            next(iter(meet_at_server(url, timeout=_SHORT)))


def test_rank_zero_starts_our_server_also_on_a_torch_with_libuv() -> None:
    before = own_servers()
    url = f"rally://localhost:{free_port()}?rank=0&world_size=1"
    store, rank, world_size = next(iter(meet_at_server(url, timeout=_SHORT)))
    assert (rank, world_size) == (0, 1)
    assert len(own_servers() - before) == 1
    del store


def test_a_group_that_is_made_again_at_an_agents_store_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """That store does not end with the group."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with TCPStore("127.0.0.1", 0, is_master=True) as agents:
        url = f"rally://127.0.0.1:{agents.port}?rank=0&world_size=1&timeout=3600"
        for _ in range(2):
            store, *_ = next(iter(meet_at_server(url)))
            assert store.num_keys() >= 0


# The wrapper ------------------------------------------------------------------------------------------------


def test_the_wrapper_has_every_public_name_of_torchs_store() -> None:
    theirs = {name for name in dir(dist.Store) if not name.startswith("_")}
    assert theirs - vars(PythonStore).keys() == {"timeout", "set_timeout"}  # which C++ keeps
