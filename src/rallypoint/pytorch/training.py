"""The training that `rallypoint verify` runs: one rank of a small network in DDP, as a script.

It takes no arguments, so that every launcher starts it alike. Ranks and the meeting place are set as for any
script; the rest comes from the environment:

    RALLYPOINT_VERIFY_FOLDER    where each rank leaves its report, rank-<rank>.json
    RALLYPOINT_VERIFY_DEVICE    cpu or cuda
    RALLYPOINT_VERIFY_INIT      the init_method; env:// if it is not set
    RALLYPOINT_VERIFY_SPAWN     how many ranks this process is to spawn, instead of being one itself
    RALLYPOINT_VERIFY_TIMEOUT   seconds that a rank waits for the others
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

HERE = Path(__file__).resolve()

# Python searches the script's folder first, and there our modules lie without their package.
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != HERE.parent]

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

# DDP would import it later, when there is a process group, which its functions have as a default value: so
# nothing could destroy the group any more.
import torch.distributed.nn  # noqa: E402

STEPS = 40
WARM_UP = 5  # steps that are not measured: the first ones set things up
BATCH = 64  # examples per rank and step
INPUTS, WIDTH = 16, 64
SEED = 7


def choose_hardware(kind: str, rank: int, world_size: int) -> tuple[Any, str]:
    """Where a rank computes, and the backend that can carry its tensors.

    NCCL refuses two ranks on one GPU; gloo does not mind, and copies CUDA tensors through main memory.
    """
    if kind == "cpu":
        return torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()
    # By rank, not by local rank: all ranks are on this machine, even where two launchers play two machines.
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device, "nccl" if gpus >= world_size and dist.is_nccl_available() else "gloo"


def finish(device: Any) -> float:
    """Wait until the device has done all that it was given; the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def note_own_part(network: Any, device: Any) -> list[float]:
    """When this rank is done with its part of each step, before it waits for the others.

    Ranks leave a step together, whichever was slow: DDP averages the gradients in the backward pass. What a
    rank does by itself ends when its last gradient is there.
    """
    times: list[float] = []
    parameters, gradients = list(network.parameters()), itertools.count(1)

    def note(_parameter: Any) -> None:
        if next(gradients) % len(parameters) == 0:
            times.append(finish(device))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(note)
    return times


def make_batch(rank: int, step: int, device: Any) -> tuple[Any, Any]:
    """Points and what is to be learned about them; others for every rank and step."""
    generator = torch.Generator().manual_seed(SEED + 1000 * step + rank)
    points = torch.randn(BATCH, INPUTS, generator=generator)
    return points.to(device), torch.tanh(points[:, :4].sum(dim=1, keepdim=True)).to(device)


def train(rank: int, device: Any) -> dict[str, object]:
    """Train a small network, the same on every rank. The losses are the means over all ranks."""
    torch.manual_seed(SEED)
    nn = torch.nn
    network = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(device)
    own_part_done = note_own_part(network, device)
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, working, waiting = [], [], []
    for step in range(STEPS):
        begun = time.perf_counter()
        points, values = make_batch(rank, step, device)
        loss = nn.functional.mse_loss(model(points), values)
        optimizer.zero_grad()
        loss.backward()
        exchanged = finish(device)
        optimizer.step()
        working.append(own_part_done[-1] - begun + finish(device) - exchanged)
        waiting.append(exchanged - own_part_done[-1])
        losses.append(loss.detach())
    ends = torch.stack([losses[0], losses[-1]])
    dist.all_reduce(ends)
    first, last = (ends / dist.get_world_size()).tolist()
    working, waiting = working[WARM_UP:], waiting[WARM_UP:]
    return {
        "loss_first": first,
        "loss_last": last,
        "checksum": float(sum(each.detach().double().abs().sum() for each in model.parameters())),
        "steps_per_second": len(working) / (sum(working) + sum(waiting)),
        "working_seconds": statistics.median(working),
        "waiting_seconds": statistics.median(waiting),
        "peak_memory_bytes": peak_memory(device),
        "gpu_use_percent": gpu_use(device),
    }


def peak_memory(device: Any) -> int | None:
    """The most bytes held: on the GPU by tensors, else by the process; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def gpu_use(device: Any) -> int | None:
    """Per cent of the last moments in which the GPU was at work; None where the driver does not tell."""
    try:
        return int(torch.cuda.utilization(device)) if device.type == "cuda" else None
    except Exception:  # it takes another package, and a driver that answers
        return None


def run_rank(init_method: str) -> None:
    """Be one rank, by the URL where it says which, else by the launcher: meet the others, train, report."""
    told = {name: values[0] for name, values in parse_qs(urlsplit(init_method).query).items()}
    rank, world_size = (int(told.get(name) or os.environ[name.upper()]) for name in ("rank", "world_size"))
    device, backend = choose_hardware(os.environ["RALLYPOINT_VERIFY_DEVICE"], rank, world_size)
    patience = timedelta(seconds=float(os.environ["RALLYPOINT_VERIFY_TIMEOUT"]))
    ready_at = time.time()
    dist.init_process_group(backend, init_method=init_method, timeout=patience)
    joined_at = time.time()
    report: dict[str, object] = {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "device": str(device),
        "backend": dist.get_backend(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "ready_at": ready_at,
        "joined_at": joined_at,
        "joined_seconds": joined_at - psutil.Process().create_time(),
    }
    try:
        report |= train(dist.get_rank(), device)
        path = Path(os.environ["RALLYPOINT_VERIFY_FOLDER"]) / f"rank-{dist.get_rank()}.json"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(report))
        draft.replace(path)  # whole, or not there
    finally:
        # Without this, the end of one rank may look to another like a crash. DDP holds the group, and cycles
        # hold DDP. A group that is still held when Python ends aborts it now and then: a thread of gloo's,
        # about to let go of a tensor, finds no Python any more.
        gc.collect()
        dist.destroy_process_group()


def run_spawned(rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    run_rank("env://")


def main() -> None:
    """As the environment says."""
    ranks = int(os.environ.get("RALLYPOINT_VERIFY_SPAWN") or 0)
    if ranks:
        torch.multiprocessing.spawn(run_spawned, args=(ranks,), nprocs=ranks)
    else:
        run_rank(os.environ.get("RALLYPOINT_VERIFY_INIT") or "env://")


if __name__ == "__main__":
    main()
