"""A small GPT, trained by several ranks that share out the work and the memory of the optimizers.

    python examples/train_sharded_optimizers.py --json one.json
    torchrun --nproc-per-node=2 examples/train_sharded_optimizers.py --compare one.json

Plain data-parallel training repeats the optimizer on every rank: the same states, the same update. Here,
a step goes as in nanochat, or in ZeRO's first stage:

1. reduce-scatter: each rank gets the mean of all ranks' gradients, for its part of the parameters only;
2. each rank updates its part. Only this rank has the optimizer's state for it;
3. all-gather: every rank gets the parts of all the others.

Embeddings, norms, biases and the head are AdamW's. It treats each number on its own, so its part may begin
and end anywhere. The matrices inside the blocks are Muon's, which turns the update of a matrix into an
orthogonal one. For that it needs the whole matrix, so a part is a number of whole matrices.

A step's batch is the same for any number of ranks, and split over them. So N ranks have the losses of one
rank, but for rounding: `--compare` checks that, and fails if a gradient or a part of an update goes astray.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

LETTERS = " abcdefghijklmnopqrstuvwxyz"
WORDS = "all ranks meet at the store and wait before a barrier then gather what each of them has found"
CONTEXT, WIDTH, HEADS, BLOCKS = 32, 64, 4, 2
BATCH = 24  # sequences in a step, over all ranks
TOLERANCE = 1e-4  # by which a loss may differ from another run's: see `compare`


# --- The ranks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """This rank's place among the others, and what they do together."""

    rank: int
    world_size: int
    device: torch.device
    backend: str  # "none" in a world of one without a process group: then there is nobody to talk to
    scatters: bool  # whether the backend has a reduce-scatter

    def sum(self, own: Tensor) -> Tensor:
        """The sum of all ranks' tensors, which stay as they are."""
        total = own.detach().clone()
        if self.backend != "none":
            dist.all_reduce(total)
        return total

    def collect(self, number: int) -> list[int]:
        """All ranks' numbers, in the order of the ranks."""
        numbers = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        numbers[self.rank] = number
        return [int(each) for each in self.sum(numbers)]

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """This rank's part of the mean of all ranks' `whole`, which is used up."""
        if self.backend == "none":
            return whole
        parts = list(whole.chunk(self.world_size))
        own = parts[self.rank]
        if self.scatters:
            dist.reduce_scatter(own := torch.empty_like(own), parts)
        else:
            dist.all_reduce(whole)  # the same result, but each rank gets all of it, and uses a part
        return own.div_(self.world_size)  # a sum, divided: not every backend has an average

    def all_gather(self, whole: Tensor) -> None:
        """Fill `whole` with all ranks' parts of it."""
        if self.backend != "none":
            parts = list(whole.chunk(self.world_size))
            dist.all_gather(parts, parts[self.rank].clone())


def has_reduce_scatter(device: torch.device) -> bool:
    """Whether the backend can do it: gloo learnt it late. If not, all ranks are told before they send."""
    part = torch.zeros(1, device=device)
    try:
        dist.reduce_scatter(part, [torch.zeros_like(part) for _ in range(dist.get_world_size())])
    except RuntimeError:
        return False
    return True


@contextmanager
def joined_ranks(device_type: str) -> Iterator[Ranks]:
    """Meet the ranks that the launcher started, and leave them at the end; without a launcher, be alone."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
        # NCCL refuses two ranks on one GPU. gloo does not mind: it copies CUDA tensors through main memory.
        backend = "nccl" if gpus >= ranks_here and dist.is_nccl_available() else "gloo"
    if "RANK" not in os.environ:
        yield Ranks(0, 1, device, "none", scatters=False)
        return
    dist.init_process_group(backend, init_method="env://")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, backend, has_reduce_scatter(device))
    finally:
        dist.destroy_process_group()


# --- The optimizers ---------------------------------------------------------------------------------------


class ShardedParameters:
    """Parameters that lie end to end in one buffer; each rank updates an equal part of it, `own`.

    The parameters and their gradients become views into the buffers. So one collective serves them all, and
    nothing is copied in or out. Zeros at the end fill up the last part. A part is a whole number of `unit`
    elements, for what must not be cut. Parameters and gradients are whole on each rank.
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks, unit: int = 1) -> None:
        count = sum(parameter.numel() for parameter in parameters)
        per_rank = -(-count // (unit * ranks.world_size)) * unit
        self._ranks = ranks
        self._values = torch.zeros(per_rank * ranks.world_size, device=ranks.device)
        self._gradients = torch.zeros_like(self._values)
        self.own = self._values.chunk(ranks.world_size)[ranks.rank]
        begin = 0
        for parameter in parameters:
            place = slice(begin, begin + parameter.numel())
            self._values[place] = parameter.detach().flatten()
            parameter.data = self._values[place].view_as(parameter)
            parameter.grad = self._gradients[place].view_as(parameter)  # `backward` adds to it in place
            begin = place.stop

    def take_gradient(self) -> Tensor:
        """The mean gradient of `own`, over all ranks."""
        return self._ranks.reduce_scatter(self._gradients)

    def publish(self) -> None:
        """Give the others the new `own`, get theirs, and forget the gradients."""
        self._ranks.all_gather(self._values)
        self._gradients.zero_()


class ShardedAdamW:
    """AdamW, with the two running means of this rank's part only."""

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks, rate: float = 0.01) -> None:
        self._rate, self._betas, self._epsilon, self._decay = rate, (0.9, 0.95), 1e-8, 0.01
        self._part = ShardedParameters(list(parameters), ranks)
        self._mean = torch.zeros_like(self._part.own)
        self._square = torch.zeros_like(self._part.own)
        self._steps = 0

    def step(self) -> None:
        """Update all parameters by the gradients that they have; all ranks together."""
        self._steps += 1
        gradient = self._part.take_gradient()
        self._mean.lerp_(gradient, 1 - self._betas[0])
        self._square.lerp_(gradient.square(), 1 - self._betas[1])
        # Both began at zero; the divisions make up for that.
        mean = self._mean / (1 - self._betas[0] ** self._steps)
        deviation = (self._square / (1 - self._betas[1] ** self._steps)).sqrt() + self._epsilon
        self._part.own.mul_(1 - self._rate * self._decay).addcdiv_(mean, deviation, value=-self._rate)
        self._part.publish()

    def state_bytes(self) -> int:
        """What the state takes on this rank."""
        return int(self._mean.nbytes + self._square.nbytes)


class ShardedMuon:
    """Muon: momentum, made orthogonal; with the momentum of this rank's matrices only.

    Matrices of one shape are one group, shared out whole, and orthogonalised as one stack.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], ranks: Ranks, rate: float = 0.02) -> None:
        self._rate, self._beta = rate, 0.95
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape[0], matrix.shape[1]].append(matrix)
        self._groups: list[tuple[ShardedParameters, Tensor]] = []
        for (rows, columns), alike in by_shape.items():
            part = ShardedParameters(alike, ranks, unit=rows * columns)
            self._groups.append((part, torch.zeros_like(part.own).view(-1, rows, columns)))

    def step(self) -> None:
        """Update all matrices by the gradients that they have; all ranks together."""
        for part, momentum in self._groups:
            gradient = part.take_gradient().view_as(momentum)
            momentum.lerp_(gradient, 1 - self._beta)
            update = orthogonalize(gradient.lerp(momentum, self._beta))  # looks one step ahead: Nesterov
            rows, columns = update.shape[1:]
            # A tall matrix has a longer way to go: its columns of length 1 are spread over more rows.
            part.own.view_as(momentum).sub_(update, alpha=self._rate * max(1.0, rows / columns) ** 0.5)
            part.publish()

    def state_bytes(self) -> int:
        """What the state takes on this rank."""
        return sum(int(momentum.nbytes) for _, momentum in self._groups)


def orthogonalize(stack: Tensor, steps: int = 5) -> Tensor:
    """Each matrix of the stack with its singular vectors as they are, its singular values all near 1.

    Newton-Schulz: a polynomial in X X^T, times X, applies to each singular value by itself. That of Muon's
    author (Keller Jordan) drives small values up fast, and leaves all between about 0.7 and 1.2. That is
    near enough for an update. A matrix of zeros, as padding is, stays zero.
    """
    wide = stack.mT if stack.shape[-2] > stack.shape[-1] else stack  # X X^T is the smaller one then
    # The values must begin below 1. The largest is at most the root of the sum of all squares.
    wide = wide / (wide.square().sum(dim=(-2, -1), keepdim=True).sqrt() + 1e-7)
    for _ in range(steps):
        square = wide @ wide.mT
        wide = 3.4445 * wide + (2.0315 * square @ square - 4.7750 * square) @ wide
    return wide.mT if stack.shape[-2] > stack.shape[-1] else wide


# --- The model and its data -------------------------------------------------------------------------------


class Block(nn.Module):  # type: ignore[misc]  # the types of torch are not read here
    """Attention to what came before, then a small network for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, stream: Tensor) -> Tensor:
        mixed = self.attend(self.attention_norm(stream)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = mixed.permute(2, 0, 3, 1, 4)  # each: sequence, head, position, channel
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.project(found.transpose(1, 2).flatten(2))
        return stream + self.contract(F.gelu(self.expand(self.network_norm(stream))))


class GPT(nn.Module):  # type: ignore[misc]
    """Letters in; for each, how likely every letter is to come next."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        places = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.norm(self.blocks(self.letters(letters) + self.positions(places))))


def make_text() -> Tensor:
    """Words at random: there is no telling the next word, but its letters can be learnt."""
    words = WORDS.split()
    picks = torch.randint(len(words), (5_000,), generator=torch.Generator().manual_seed(1))
    return torch.tensor([LETTERS.index(letter) for letter in " ".join(words[pick] for pick in picks)])


def make_batch(text: Tensor, step: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """This rank's share of the step's batch: letters, and the letters that follow them."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    own = starts.chunk(ranks.world_size)[ranks.rank]
    rows = text[own + torch.arange(CONTEXT + 1)].to(ranks.device)
    return rows[:, :-1], rows[:, 1:]


# --- Training and reporting -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What `--json` writes. Where there is one number per rank, they are in the order of the ranks."""

    world_size: int
    losses: list[float]
    device: str
    backend: str
    steps_per_second: float
    peak_memory_bytes: list[int] | None
    optimizer_state_bytes: list[int]


def make_optimizers(model: GPT, ranks: Ranks) -> tuple[ShardedMuon, ShardedAdamW]:
    """Muon for the matrices inside the blocks, AdamW for all other parameters."""
    hidden: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (hidden if name.startswith("blocks.") and parameter.ndim == 2 else others).append(parameter)
    return ShardedMuon(hidden, ranks), ShardedAdamW(others, ranks)


def train(ranks: Ranks, steps: int) -> Report:
    """Train, and print the losses on rank 0; the report is the same on all ranks."""
    torch.manual_seed(0)  # so that all ranks begin with the same parameters
    model, text = GPT().to(ranks.device), make_text()
    optimizers = make_optimizers(model, ranks)
    losses: list[float] = []
    moments = [time.perf_counter()]
    for step in range(steps):
        letters, following = make_batch(text, step, ranks)
        loss = F.cross_entropy(model(letters).flatten(0, 1), following.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(ranks.sum(loss)) / ranks.world_size)
        moments.append(time.perf_counter())
        if ranks.rank == 0 and (step % 5 == 0 or step == steps - 1):
            print(f"step {step:4d}  loss {losses[-1]:.4f}", flush=True)

    first = min(1, steps - 1)  # the first step also sets things up: where there are others, they are timed
    speed = round((steps - first) / (moments[-1] - moments[first]), 2)
    memory = ranks.collect(torch.cuda.max_memory_allocated()) if ranks.device.type == "cuda" else None
    state = ranks.collect(sum(optimizer.state_bytes() for optimizer in optimizers))
    return Report(ranks.world_size, losses, ranks.device.type, ranks.backend, speed, memory, state)


def print_report(report: Report) -> None:
    """All figures, and from where to where the loss went."""
    for name, value in asdict(report).items():
        if name != "losses":
            print(f"{name.replace('_', ' ')}: {value}")
    print(f"loss {report.losses[0]:.4f} -> {report.losses[-1]:.4f} in {len(report.losses)} steps", flush=True)


def compare(losses: list[float], expected: list[float], name: str) -> bool:
    """Whether two runs have the same losses, but for rounding; says so.

    Ranks add up in another order than one rank does, and training enlarges the difference from step to step:
    to less than 1e-6 in 30 steps, on the CPU and on a GPU. A wrong update makes it 1e-2 or more.
    """
    if len(losses) != len(expected):
        print(f"losses differ from {name}: {len(losses)} steps here, {len(expected)} there")
        return False
    differences = [abs(loss - other) for loss, other in zip(losses, expected, strict=True)]
    alike = all(difference <= TOLERANCE for difference in differences)  # False if one of them is not a number
    verdict = "match" if alike else "differ from"
    print(f"losses {verdict} {name}: largest difference {max(differences):.1e}, tolerance {TOLERANCE:.0e}")
    return alike


def parse_options() -> argparse.Namespace:
    """The options; ends the program with exit code 2 if they cannot be met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="how long to train (default: 30)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses and figures to a file")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="fail unless FILE has the same losses")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = os.environ.get("WORLD_SIZE", "1")
    for wrong, message in (
        (options.device == "cuda" and not torch.cuda.is_available(), "--device cuda: torch sees no GPU here"),
        (options.steps < 1, f"--steps {options.steps}: at least 1 is needed"),
        (options.compare and not options.compare.is_file(), f"--compare {options.compare}: no such file"),
        (BATCH % int(ranks), f"a batch of {BATCH} does not split evenly over {ranks} ranks"),
    ):
        if wrong:
            parser.error(message)
    return options


def main() -> int:
    """Meet the others, train, leave, and report; the exit code."""
    options = parse_options()
    expected = json.loads(options.compare.read_text())["losses"] if options.compare else None
    with joined_ranks(options.device) as ranks:
        report = train(ranks, options.steps)
    if ranks.rank != 0:
        return 0
    print_report(report)
    if options.json:
        options.json.write_text(json.dumps(asdict(report)) + "\n")
    return 0 if expected is None or compare(report.losses, expected, options.compare.name) else 1


if __name__ == "__main__":
    sys.exit(main())
