"""What the scheduler that started this process tells of its job, by the rows of `table`. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, Generic, TypeVar

from rallypoint.launch.handover import read_handover
from rallypoint.launch.schedulers.table import SCHEDULERS, SHELL_STEPS, Scheduler, Surroundings, Telling

T = TypeVar("T")

_FIRST_PORT: Final = 10_000
_PORTS: Final = 18_000  # below those that systems give to connections, and below 29400 and 29500
_STEP: Final = 1_009  # steps of one job are far apart, and so are jobs with the next numbers
_MOST_ABOVE: Final = 100  # processes; those that start each other are few


@dataclass(frozen=True)
class Told(Generic[T]):
    """What a scheduler tells, and by which variable."""

    value: T
    variable: str


@dataclass(frozen=True)
class Placement:
    """This process within its job, as its scheduler tells it; None for what is not told."""

    scheduler: Scheduler
    run_id: Told[str] | None = None
    nnodes: Told[int] | None = None
    node_rank: Told[int] | None = None
    first_host: Told[str] | None = None
    port: Told[int] | None = None
    """The same for all processes of the job, and hardly ever that of another job."""
    nproc_per_node: Told[int] | None = None
    rank: Told[int] | None = None
    world_size: Told[int] | None = None
    local_rank: Told[int] | None = None
    local_world_size: Told[int] | None = None

    @property
    def mark(self) -> str:
        """What the processes of the job are given as `Handover.scheduled`."""
        return self.run_id.value if self.run_id else self.scheduler.name


def find_placement(variables: Mapping[str, str], read_file: Callable[[str], str]) -> Placement | None:
    """What the scheduler tells; None if none has started this process, or if its launcher knows it already.

    `read_file` gives the text of a file, or nothing if it cannot be read.
    """
    around = Surroundings(variables, read_file)
    row = next((each for each in SCHEDULERS if _has_started(each, variables)), None)
    if row is None or any(variables.get(name) in values for name, values in row.shells.items()):
        return None
    placement = _read(row, around)
    return None if read_handover(variables).scheduled == placement.mark else placement


def _has_started(row: Scheduler, variables: Mapping[str, str]) -> bool:
    return all(map(variables.get, row.marks)) and not any(map(variables.get, row.absent))


def _read(row: Scheduler, around: Surroundings) -> Placement:
    facts = {
        name: _first_told(getattr(row, name), around)
        for name in (
            *("nnodes", "node_rank", "first_host", "port", "nproc_per_node"),
            *("rank", "world_size", "local_rank", "local_world_size"),
        )
    }
    run_id = _run_id(row, around)
    if run_id and row.has_own_ports:
        facts["port"] = Told(port_of(run_id.value), run_id.variable)
    return Placement(row, run_id, **facts)


def _first_told(telling: Telling, around: Surroundings) -> Told[Any] | None:
    for variable, read in telling:
        text = around.variables.get(variable, "")
        value = read(text, around) if text else None
        if value is not None:
            return Told(value, variable)
    return None


def _run_id(row: Scheduler, around: Surroundings) -> Told[str] | None:
    if row.job_option is not None:
        program, option = row.job_option
        for words in _commands_above(around.read_file):
            if PurePath(words[0]).name == program and option in words[:-1]:
                return Told(words[words.index(option) + 1], f"{program} {option}")
    for names in row.job:
        texts = [around.variables.get(name, "") for name in names]
        if texts[0]:
            return Told(".".join(filter(None, texts)), names[0])
    return None


def _commands_above(read_file: Callable[[str], str]) -> Iterator[list[str]]:
    """The command lines of the processes above this one, the nearest first. On Linux; elsewhere none."""
    process = "self"
    for _ in range(_MOST_ABOVE):
        parent = re.search(r"^PPid:\s*([1-9][0-9]*)$", read_file(f"/proc/{process}/status"), re.MULTILINE)
        if parent is None:
            return
        process = parent[1]
        yield read_file(f"/proc/{process}/cmdline").split("\0")


def port_of(run_id: str) -> int:
    """A port for a job: another one for each job with a number near to this one, and for each step."""
    numbers = [int(text) for text in re.findall("[0-9]+", run_id)]
    if not numbers:
        return _FIRST_PORT + zlib.crc32(run_id.encode()) % _PORTS
    job, *steps = numbers
    return _FIRST_PORT + (job + _STEP * sum(steps)) % _PORTS


def idle_machines(variables: Mapping[str, str]) -> Told[int] | None:
    """How many machines Slurm has for a job, if several and srun has not started this process on each."""
    count = variables.get("SLURM_JOB_NUM_NODES", "")
    in_shell = variables.get("SLURM_STEP_ID", "") in ("", *SHELL_STEPS)
    return (
        Told(int(count), "SLURM_JOB_NUM_NODES") if in_shell and count.isdecimal() and int(count) > 1 else None
    )
