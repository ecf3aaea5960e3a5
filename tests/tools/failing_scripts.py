"""Cases for reproducing.py: scripts, settings and machines that are wrong, whatever the store does."""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Linear, Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from joining import LONG, LOOPBACK, SHORT, init_by_file, variables
from rallypoint.diagnose.verify import SIMULATION
from staging import ImpossibleError, Stage, listen

_SCRIPT = "import torch.distributed as dist; dist.init_process_group('gloo')"


def variable_missing(folder: Path) -> Stage:
    return Stage([lambda: dist.init_process_group("gloo")], {"name": "RANK"})


def rank_not_given(folder: Path) -> Stage:
    url = "tcp://127.0.0.1:29500"
    return Stage(
        [lambda: dist.init_process_group("gloo", init_method=url)], {"scheme": "tcp", "what": "rank"}
    )


def group_made_twice(folder: Path) -> Stage:
    def init_twice() -> None:
        for _ in range(2):
            init_by_file(folder, 0, 1, LONG)

    return Stage([init_twice])


def no_process_group(folder: Path) -> Stage:
    return Stage([dist.get_rank])


def no_rendezvous_handler(folder: Path) -> Stage:
    return Stage([lambda: dist.init_process_group("gloo", init_method="moon://")], {"scheme": "moon"})


def unknown_backend(folder: Path) -> Stage:
    return Stage([lambda: init_by_file(folder, 0, 1, LONG, "semaphore")], {"backend": "semaphore"})


def nccl_not_built_in(folder: Path) -> Stage:
    if dist.is_nccl_available():
        raise ImpossibleError("this torch has NCCL")
    return Stage([lambda: init_by_file(folder, 0, 1, LONG, "nccl")])


def gloo_interface_missing(folder: Path) -> Stage:
    def choose_interface() -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "moon0"
        init_by_file(folder, 0, 1, LONG)

    return Stage([choose_interface], {"interface": "moon0"})


def too_many_open_files(folder: Path) -> Stage:
    """All files that the rank may open are in use: then torch can open none, however many it would take."""
    held = listen()

    def connect_without_files() -> None:
        free = os.dup(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 8, free + 8))
        with suppress(OSError):
            while True:
                os.dup(1)
        dist.TCPStore(LOOPBACK, held.getsockname()[1], None, False, timeout=SHORT)

    return Stage([connect_without_files], held=[held])


def tensor_too_large(folder: Path) -> Stage:
    return Stage([lambda: torch.empty(1 << 50, dtype=torch.uint8)], {"bytes": str(1 << 50)})


def dataloader_worker_killed(folder: Path) -> Stage:
    class Deadly(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    return Stage([lambda: list(DataLoader(Deadly(), num_workers=1))])


def ddp_models_differ(folder: Path) -> Stage:
    def wrap(rank: int) -> None:
        init_by_file(folder, rank, 2, LONG)
        DistributedDataParallel(Linear(2 + rank, 3))

    return Stage([lambda: wrap(0), lambda: wrap(1)], {"index": "0", "sizes": "[3, 3]"})


def ddp_unused_parameters(folder: Path) -> Stage:
    class Wasteful(Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = Linear(2, 2), Linear(2, 2)

        def forward(self, batch: Any) -> Any:
            return self.used(batch)

    def train() -> None:
        init_by_file(folder, 0, 1, LONG)
        model = DistributedDataParallel(Wasteful())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    return Stage([train])


def no_libuv(folder: Path) -> Stage:
    """A whole process: it is the import of torch that is changed."""
    simulation = {"PYTHONPATH": str(SIMULATION), "RALLYPOINT_SIMULATE": "no-libuv"}
    environ = {**os.environ, **simulation, **variables(0, 1, 0, LOOPBACK)}
    return Stage([lambda: os.execve(sys.executable, [sys.executable, "-c", _SCRIPT], environ)])
