"""Training without a launcher and without a TCPStore: the ranks meet in a file.

For a torch whose TCPStore does not start, or a machine where no port may be opened for one:

    python examples/train_file_init.py              # starts both ranks itself, in a temporary folder

Or start every rank by hand, all with the same file:

    python examples/train_file_init.py --rank 0 --world-size 2 --init file:///tmp/x/meeting &
    python examples/train_file_init.py --rank 1 --world-size 2 --init file:///tmp/x/meeting

Across machines, the file has to be on a disk that all of them share, with file locks that work there (over
NFS, they often do not). The folder has to exist, the file must not: a file left by an earlier run
makes the ranks of the next one look for those of the last. What the ranks send each other while they train
still goes over the network: the file only replaces the store at which they meet.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a process group is there: it would hold the group for good
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 60
BATCH = 64  # examples per rank and step


def train(rank: int) -> list[float]:
    """Train a small network to multiply; the loss of every step, over all ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(1 + rank)  # each rank has its own data
    losses = []
    for _ in range(STEPS):
        points = torch.rand(BATCH, 2, generator=generator) * 2 - 1
        loss = nn.functional.mse_loss(model(points), points.prod(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def run_rank(rank: int, world_size: int, meeting: str) -> None:
    """One rank, from meeting the others to leaving them."""
    # gloo, on the CPU: it is in every build. With a GPU per rank, "nccl" meets in a file just as well.
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    try:
        losses = train(rank)
        if rank == 0:
            print(f"{world_size} ranks met at {meeting}")
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {STEPS} steps", flush=True)
    finally:
        dist.destroy_process_group()


def run_all(world_size: int) -> None:
    """Start every rank on this machine, and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        # Not Path.as_uri(): torch would look for a folder with the %20 of an encoded blank in its name.
        meeting = "file:///" + (Path(folder) / "meeting").as_posix().lstrip("/")
        multiprocessing.spawn(run_rank, args=(world_size, meeting), nprocs=world_size)


def main() -> None:
    """One rank if its number is given, else all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", type=int, help="this process's number, from 0; without it, start all ranks")
    parser.add_argument("--world-size", type=int, default=2, help="how many ranks there are (default: 2)")
    parser.add_argument("--init", help="where the ranks meet: file:// and the path of a new file")
    options = parser.parse_args()
    if (options.rank is None) != (options.init is None):
        parser.error("--rank and --init belong together: give both, or none to start all ranks here")
    if options.rank is None:
        run_all(options.world_size)
    else:
        run_rank(options.rank, options.world_size, options.init)


if __name__ == "__main__":
    main()
