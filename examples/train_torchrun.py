"""Plain data-parallel training: the script that `torchrun` and `rallypoint run` start once per rank.

    torchrun --nproc-per-node=2 examples/train_torchrun.py
    rallypoint run --nproc-per-node=2 examples/train_torchrun.py

Nothing in it depends on the launcher: both tell a rank who it is and where to meet the others through the
environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and `env://` reads that. It saves
nothing; rank 0 prints how far the loss fell.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a process group is there: it would hold the group for good
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 60
BATCH = 64  # examples per rank and step


def choose_device() -> tuple[torch.device, str]:
    """This rank's device, and the backend that can carry its tensors."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return torch.device("cpu"), "gloo"
    # NCCL refuses two ranks on one GPU. gloo does not mind: it copies CUDA tensors through main memory.
    own_gpu = gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) and dist.is_nccl_available()
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus), "nccl" if own_gpu else "gloo"


def make_batch(rank: int, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and the product of their coordinates; other points for every rank and step."""
    generator = torch.Generator().manual_seed(step * 10_000 + rank)
    points = torch.rand(BATCH, 2, generator=generator) * 2 - 1
    return points.to(device), points.prod(dim=1, keepdim=True).to(device)


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of all ranks' losses; every rank has to call it."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / int(dist.get_world_size())


def train(device: torch.device) -> list[float]:
    """Train a small network; the loss of every step, over all ranks."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    # DDP gives every rank the parameters of rank 0, and averages the gradients during `backward`.
    model = DistributedDataParallel(network, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        points, products = make_batch(dist.get_rank(), step, device)
        loss = nn.functional.mse_loss(model(points), products)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def main() -> None:
    """Meet the others, train, leave."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"no rank given: start it with `torchrun --nproc-per-node=2 {sys.argv[0]}`")
    device, backend = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method="env://")
    try:
        losses = train(device)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks, {backend}, {device.type}")
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {STEPS} steps", flush=True)
    finally:
        dist.destroy_process_group()  # without it, the end of one rank may look to another like a crash


if __name__ == "__main__":
    main()
