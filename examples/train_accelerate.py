"""Data-parallel training with Hugging Face accelerate, started once per rank by `accelerate launch`.

    accelerate launch --multi_gpu --num_processes 2 examples/train_accelerate.py

The option says GPU, but this also starts two ranks on a machine without one; they use gloo on the CPU. It is
`accelerate launch --cpu --num_processes 2` that starts one rank only (as of accelerate 1.15). The launcher is
torchrun underneath, so the ranks meet as they do in train_torchrun.py; `python` alone starts a world of one.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed.nn  # before a process group is there: it would hold the group for good
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 60
BATCH = 64  # examples per rank and step


def make_accelerator() -> Any:
    """An `accelerate.Accelerator`, which is what knows the other ranks."""
    try:
        accelerate = importlib.import_module("accelerate")
    except ModuleNotFoundError as error:
        if error.name != "accelerate":
            raise  # accelerate is there, but something that it needs is not: that is another message
        sys.exit("this example needs accelerate, which is not installed: pip install accelerate")
    # Left to itself, accelerate takes GPU number LOCAL_RANK, whether there is one or not.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return accelerate.Accelerator(cpu=torch.cuda.device_count() < ranks_here)


def make_data(ranks: int) -> DataLoader:
    """All ranks' points and the products of their coordinates: accelerate gives every rank its share."""
    generator = torch.Generator().manual_seed(1)
    points = torch.rand(STEPS * BATCH * ranks, 2, generator=generator) * 2 - 1
    return DataLoader(TensorDataset(points, points.prod(dim=1, keepdim=True)), batch_size=BATCH)


def train(accelerator: Any) -> list[float]:
    """Train a small network; the loss of every step, over all ranks."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    model, optimizer, data = accelerator.prepare(
        network, torch.optim.AdamW(network.parameters(), lr=0.02), make_data(accelerator.num_processes)
    )
    losses = []
    for points, products in data:
        loss = nn.functional.mse_loss(model(points), products)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
    return losses


def main() -> None:
    """Meet the others, train, leave."""
    accelerator = make_accelerator()
    try:
        losses = train(accelerator)
        accelerator.print(f"{accelerator.num_processes} ranks, {accelerator.device.type}")
        accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {STEPS} steps", flush=True)
    finally:
        accelerator.end_training()  # leaves the process group, too


if __name__ == "__main__":
    main()
