"""How the ranks of tests/tools/reproducing.py come to a process group. Imports torch."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=20)


def variables(rank: int, world_size: int, port: int | str, host: str) -> dict[str, str]:
    """What a launcher tells a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def init(rank: int, world_size: int, port: int | str, host: str = LOOPBACK) -> None:
    """By env://, with little patience."""
    os.environ.update(variables(rank, world_size, port, host))
    dist.init_process_group("gloo", timeout=SHORT)


def init_by_file(folder: Path, rank: int, world_size: int, timeout: timedelta, backend: str = "gloo") -> None:
    """By file://, which needs no port."""
    url = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=world_size, timeout=timeout)
