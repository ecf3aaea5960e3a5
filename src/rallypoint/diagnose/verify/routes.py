"""The usual routes to a distributed job, as data: the commands and their variables.

Every route starts the same script, which trains two ranks on this machine. Words in braces are filled in
for each run: {folder} (a fresh one), {port} (a free one) and {rank} (of the process: 0 or 1). No port is
fixed, and no launcher takes its usual one: a check must not get in the way of a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from typing import Final

from rallypoint.errors import UsageError


class Build(str, Enum):
    """Which torch a training meets: the one that is installed, or that one made to refuse libuv."""

    AS_IT_IS = "as it is"
    WITHOUT_LIBUV = "without libuv"


@dataclass(frozen=True)
class Route:
    """One way to start the training."""

    name: str
    options: str = ""
    """What Python is given before the script."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What is added to the environment."""
    processes: int = 1
    quick: bool = False
    """Whether it is one of the few that stand for all."""
    ranks: int = 2

    @property
    def injected(self) -> bool:
        """Whether it takes `rallypoint run` on a torch without libuv: the others name Rallypoint."""
        return "rallypoint" not in self.options

    @property
    def missing(self) -> str:
        """The package that it needs and that is not installed, if there is one."""
        return "accelerate" if "accelerate" in self.options and find_spec("accelerate") is None else ""

    def commands(self, script: str, folder: str, port: int) -> Iterator[tuple[list[str], dict[str, str]]]:
        """Of each process: the arguments of Python, and what is added to its environment."""
        for rank in range(self.processes):
            words = {"script": script, "folder": folder, "port": port, "rank": rank}
            arguments = [each.format_map(words) for each in (*self.options.split(), "{script}")]
            yield arguments, {name: text.format_map(words) for name, text in self.variables.items()}


_INIT: Final = "RALLYPOINT_VERIFY_INIT"
_TORCHRUN: Final = "-m torch.distributed.run"
_MEET: Final = "--rdzv-id=verify --rdzv-endpoint=localhost:{port}"
_C10D: Final = f"{_TORCHRUN} --rdzv-backend=c10d {_MEET}"
_RALLYPOINT: Final = f"{_TORCHRUN} --rdzv-backend=rallypoint {_MEET}"
_TWO_RANKS: Final = "--nproc-per-node=2"
_TWO_NODES: Final = "--nnodes=2 --nproc-per-node=1"
_STATIC: Final = f"{_TORCHRUN} --master-port={{port}}"
# With `--cpu`, or MULTI_CPU in a config file, accelerate starts one process or mpirun. With --multi_gpu it
# starts torchrun on any device; the script decides by itself where it computes. HF_HOME is where accelerate
# looks for the user's config, which would change the route.
_ACCELERATE: Final = (
    "-m accelerate.commands.launch --multi_gpu --num_processes 2 --mixed_precision no --dynamo_backend no"
)
_ALONE: Final = f"{_ACCELERATE} --num_machines 1 --main_process_port"
_SECOND: Final = (
    "--num_machines 2 --main_process_ip 127.0.0.1 --main_process_port {port} --machine_rank {rank}"
)
_HOME: Final = {"HF_HOME": "{folder}"}
_RANK: Final = {"RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
_SPAWN: Final = {"RALLYPOINT_VERIFY_SPAWN": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"}

ROUTES: Final[tuple[Route, ...]] = (
    Route("env", "", _RANK, 2, quick=True),
    Route("tcp", "", {_INIT: "tcp://localhost:{port}?rank={rank}&world_size=2"}, 2),
    Route("file", "", {_INIT: "file://{folder}/meeting?rank={rank}&world_size=2"}, 2),
    Route("spawn", "", _SPAWN),
    Route("torchrun-standalone", f"{_TORCHRUN} --standalone {_TWO_RANKS}", quick=True),
    Route("torchrun-static", f"{_STATIC} {_TWO_RANKS}"),
    Route(
        "torchrun-static-2",
        f"{_STATIC} {_TWO_NODES} --master-addr=127.0.0.1 --node-rank {{rank}}",
        processes=2,
    ),
    Route("torchrun-c10d", f"{_C10D} {_TWO_RANKS}"),
    Route("torchrun-c10d-2", f"{_C10D} {_TWO_NODES}", processes=2),
    Route("torchrun-rallypoint", f"{_RALLYPOINT} {_TWO_RANKS}", quick=True),
    Route("torchrun-rallypoint-2", f"{_RALLYPOINT} {_TWO_NODES}", processes=2),
    Route("accelerate", f"{_ALONE} 0", _HOME, quick=True),
    Route("accelerate-port", f"{_ALONE} {{port}}", _HOME),
    Route("accelerate-2", f"{_ACCELERATE} {_SECOND}", _HOME, 2),
    Route("accelerate-rallypoint", f"{_ALONE} 0 --rdzv_backend rallypoint", _HOME),
    Route("rallypoint-run", f"-m rallypoint run {_TWO_RANKS}"),
)

ONE_GPU: Final = Route("torchrun-nccl", f"{_RALLYPOINT} --nproc-per-node=1", ranks=1)
"""One rank with NCCL, for machines with one GPU: NCCL refuses two ranks on one."""

BY_NAME: Final[Mapping[str, Route]] = {route.name: route for route in (*ROUTES, ONE_GPU)}


def select(names: Sequence[str], *, quick: bool = False, one_gpu: bool = False) -> list[Route]:
    """The routes of these names, in the table's order; without names the quick ones, or all.

    `one_gpu` adds the route for machines with a single GPU. UsageError for an unknown name.
    """
    for name in names:
        if name not in BY_NAME:
            raise UsageError(f"there is no route {name!r}", hint=f"the routes are {', '.join(BY_NAME)}")
    if names and quick:
        raise UsageError("--quick chooses the routes, and so does --route", hint="use one of them")
    if names:
        return [route for route in BY_NAME.values() if route.name in names]
    return [*(route for route in ROUTES if route.quick or not quick), *((ONE_GPU,) if one_gpu else ())]
