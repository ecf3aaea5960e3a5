"""What the scheduler or launcher that started this process tells of its job: machines, ranks, a port.

A new scheduler is a row of `SCHEDULERS`. For each fact it names variables; the first that tells it counts.
The launcher that started this process comes before the scheduler that the launcher itself runs under: mpirun
within a Slurm job passes Slurm's variables on, but they are not about the processes that mpirun starts.
Pure: variables come in as a mapping, and files by a function that reads them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final, Generic, NamedTuple, TypeVar

from rallypoint.launch.handover import read_handover

T = TypeVar("T")

_FIRST_PORT: Final = 10_000
_PORTS: Final = 18_000  # below those that systems give to connections, and below 29400 and 29500
_STEP: Final = 1_009  # steps of one job are far apart, and so are jobs with the next numbers
_MOST_ABOVE: Final = 100  # processes; those that start each other are few


class Surroundings(NamedTuple):
    """The variables of a process, and a function that reads a file that they name (empty: not readable)."""

    variables: Mapping[str, str]
    read_file: Callable[[str], str]

    def number(self, variable: str) -> int | None:
        return _number(self.variables.get(variable, ""), self)


Reader = Callable[[str, Surroundings], int | str | None]
"""From the text of a variable to what it tells; None if it tells nothing."""

Telling = tuple[tuple[str, Reader], ...]
"""Variables that tell a fact, with how each is read."""


@dataclass(frozen=True)
class Scheduler:
    """A row of the table."""

    name: str
    marks: tuple[str, ...]
    """The variables that are all set in a process that it has started."""
    absent: tuple[str, ...] = ()
    """Variables that mean another launcher: the row does not count where one of them is set."""
    job: tuple[tuple[str, ...], ...] = ()
    """Variables that together are the name of the job, and of no other one: the first group that begins with
    one that is set."""
    job_option: tuple[str, str] | None = None
    """Where no variable is: the program above this process, and its option that differs between jobs."""
    nnodes: Telling = ()
    node_rank: Telling = ()
    first_host: Telling = ()
    port: Telling = ()
    """For a row without `has_own_ports`; with it, the port follows from the name of the job."""
    nproc_per_node: Telling = ()
    """How many ranks a launcher that is alone on its machine starts there."""
    rank: Telling = ()
    """This process, among all that the scheduler has started for the job."""
    world_size: Telling = ()
    local_rank: Telling = ()
    local_world_size: Telling = ()
    has_own_ports: bool = True
    """Whether jobs share machines, so that each job needs a port of its own."""
    may_signal_everybody: bool = False
    """Whether a signal to the job may reach every process in it, and not just those that it has started."""
    one_task_per_machine: str = ""
    """How to start one process per machine, for messages."""
    shells: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of variables in processes that belong to the job but are not started for all of it."""


_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""By these, a scheduler or a user chooses among the GPUs of a machine."""


# Lists as schedulers write them: names of machines, and counts for each of them ----------------------------

_PART: Final = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_LIST: Final = re.compile(rf"{_PART.pattern}(?:,{_PART.pattern})*")
_GROUP: Final = re.compile(r"\[([^\]]*)\]")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT: Final = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def first_host(text: str) -> str | None:
    """The first machine of a list such as `gpu[01-04,07],login3`; None if it is no such list."""
    return next(iter_hosts(text), None)


def iter_hosts(text: str) -> Iterator[str]:
    """All machines of a list such as `rack[1-2]-gpu[01-04,07]-ib,login3`, in its order."""
    if _LIST.fullmatch(text.strip()):
        for part in _PART.findall(text.strip()):
            yield from _expand(part)


def _expand(part: str) -> Iterator[str]:
    group = _GROUP.search(part)
    if group is None:
        yield part
        return
    for number in _numbers(group[1]):
        for rest in _expand(part[group.end() :]):
            yield f"{part[: group.start()]}{number}{rest}"


def _numbers(text: str) -> Iterator[str]:
    """`01-03,7` is 01, 02, 03 and 7; nothing for what is no such text."""
    for item in text.split(","):
        found = _RANGE.fullmatch(item.strip())
        if found is None:
            return
        width = len(found[1])
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield f"{number:0{width}}"


def count_at(text: str, place: int) -> int | None:
    """The count at a place of a list such as `2(x3),1`, which is 2, 2, 2, 1; None if there is none."""
    for item in text.split(","):
        found = _COUNT.fullmatch(item.strip())
        if found is None:
            return None
        times = int(found[2] or 1)
        if place < times:
            return int(found[1])
        place -= times
    return None


def distinct(hosts: Sequence[str]) -> list[str]:
    """Each machine once, in the order in which they come."""
    return list(dict.fromkeys(host for host in hosts if host))


# From a text to what it tells -------------------------------------------------------------------------------


def _number(text: str, _: Surroundings) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def _gpus(text: str, around: Surroundings) -> int | None:
    """How many GPUs there are, unless there are none, or a part of them was chosen: torch counts those."""
    count = _number(text, around) or None
    chosen = (around.variables.get(name, "") for name in _VISIBLE)
    return count if all(not each or len(each.split(",")) == count for each in chosen) else None


def _text(text: str, _: Surroundings) -> str | None:
    return text.strip() or None


def _first_of_list(text: str, _: Surroundings) -> str | None:
    return first_host(text)


def _count_of_list(text: str, _: Surroundings) -> int | None:
    return sum(1 for _ in iter_hosts(text)) or None


def _hosts_in_file(path: str, around: Surroundings) -> list[str]:
    """The machines in a file with one line for each process; some write more behind the name."""
    return distinct([line.split()[0] for line in around.read_file(path).splitlines() if line.split()])


def _first_in_file(path: str, around: Surroundings) -> str | None:
    return next(iter(_hosts_in_file(path, around)), None)


def _count_in_file(path: str, around: Surroundings) -> int | None:
    return len(_hosts_in_file(path, around)) or None


def _first_behind_launch_node(path: str, around: Surroundings) -> str | None:
    """The first line is the machine that the job's script runs on, where no rank is."""
    return next(iter(_hosts_in_file(path, around)[1:]), None)


def _first_of_pairs(text: str, _: Surroundings) -> str | None:
    return next(iter(text.split()), None)


def _count_of_pairs(text: str, _: Surroundings) -> int | None:
    """`node-a 8 node-b 8` is two machines."""
    return len(distinct(text.split()[::2])) or None


def _tasks_at_node(text: str, around: Surroundings) -> int | None:
    place = around.number("SLURM_NODEID")
    return count_at(text, place) if place is not None else None


def _machines_of(world: str) -> Reader:
    """How many machines there are, by how many processes this one has; right if all have as many."""

    def read(text: str, around: Surroundings) -> int | None:
        here, everywhere = _number(text, around), around.number(world)
        return -(-everywhere // here) if here and everywhere else None

    return read


def _machine_of(local: str) -> Reader:
    """Which machine has a process, if processes fill one machine after the other."""

    def read(text: str, around: Surroundings) -> int | None:
        rank, here = _number(text, around), around.number(local)
        return rank // here if rank is not None and here else None

    return read


# The table --------------------------------------------------------------------------------------------------

_FIRST_OF_ALLOCATION: Final[Telling] = (
    ("SLURM_JOB_NODELIST", _first_of_list),
    ("LSB_DJOB_HOSTFILE", _first_in_file),
    ("LSB_MCPU_HOSTS", _first_of_pairs),
    ("PBS_NODEFILE", _first_in_file),
)
"""mpirun does not tell a process where the others are; the scheduler that it runs under does."""

_ALLOCATION: Final = (("SLURM_JOB_ID",), ("LSB_JOBID", "LSB_JOBINDEX"), ("PBS_JOBID",))
"""The job that mpirun is a part of."""

SHELL_STEPS: Final = ("4294967290", "4294967291")
"""Slurm's numbers for the shell of salloc and the script of sbatch, which run on the first machine alone."""

SCHEDULERS: Final[tuple[Scheduler, ...]] = (
    Scheduler(
        "jsrun",
        marks=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
        job=(("LSB_JOBID", "JSM_NAMESPACE_ID"),),
        nnodes=(("JSM_NAMESPACE_LOCAL_SIZE", _machines_of("JSM_NAMESPACE_SIZE")),),
        node_rank=(("JSM_NAMESPACE_RANK", _machine_of("JSM_NAMESPACE_LOCAL_SIZE")),),
        first_host=(("LSB_DJOB_RANKFILE", _first_behind_launch_node),),
        rank=(("JSM_NAMESPACE_RANK", _number),),
        world_size=(("JSM_NAMESPACE_SIZE", _number),),
        local_rank=(("JSM_NAMESPACE_LOCAL_RANK", _number),),
        local_world_size=(("JSM_NAMESPACE_LOCAL_SIZE", _number),),
        one_task_per_machine="jsrun --rs_per_host=1 --tasks_per_rs=1 rallypoint run",
    ),
    Scheduler(
        "Open MPI",
        marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=(("PMIX_NAMESPACE",), *_ALLOCATION),
        nnodes=(
            ("OMPI_MCA_orte_num_nodes", _number),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", _machines_of("OMPI_COMM_WORLD_SIZE")),
        ),
        node_rank=(("OMPI_COMM_WORLD_RANK", _machine_of("OMPI_COMM_WORLD_LOCAL_SIZE")),),
        first_host=_FIRST_OF_ALLOCATION,
        rank=(("OMPI_COMM_WORLD_RANK", _number),),
        world_size=(("OMPI_COMM_WORLD_SIZE", _number),),
        local_rank=(("OMPI_COMM_WORLD_LOCAL_RANK", _number),),
        local_world_size=(("OMPI_COMM_WORLD_LOCAL_SIZE", _number),),
        one_task_per_machine="mpirun --map-by ppr:1:node rallypoint run",
    ),
    Scheduler(
        "MPI's Hydra",  # of MPICH, Intel MPI and others
        marks=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        job=_ALLOCATION,
        job_option=("hydra_pmi_proxy", "--control-port"),  # of mpiexec, for the proxies on all its machines
        nnodes=(("MPI_LOCALNRANKS", _machines_of("PMI_SIZE")),),
        node_rank=(("PMI_RANK", _machine_of("MPI_LOCALNRANKS")),),
        first_host=_FIRST_OF_ALLOCATION,
        rank=(("PMI_RANK", _number),),
        world_size=(("PMI_SIZE", _number),),
        local_rank=(("MPI_LOCALRANKID", _number),),
        local_world_size=(("MPI_LOCALNRANKS", _number),),
        one_task_per_machine="mpiexec -ppn 1 rallypoint run",
    ),
    Scheduler(
        "Slurm",
        marks=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
        job=(("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),),
        nnodes=(
            ("SLURM_STEP_NUM_NODES", _number),
            ("SLURM_JOB_NUM_NODES", _number),
            ("SLURM_JOB_NODELIST", _count_of_list),
        ),
        node_rank=(("SLURM_NODEID", _number),),
        first_host=(("SLURM_STEP_NODELIST", _first_of_list), ("SLURM_JOB_NODELIST", _first_of_list)),
        nproc_per_node=(("SLURM_GPUS_ON_NODE", _gpus),),
        rank=(("SLURM_PROCID", _number),),
        world_size=(("SLURM_STEP_NUM_TASKS", _number), ("SLURM_NTASKS", _number)),
        local_rank=(("SLURM_LOCALID", _number),),
        local_world_size=(
            ("SLURM_STEP_TASKS_PER_NODE", _tasks_at_node),
            ("SLURM_TASKS_PER_NODE", _tasks_at_node),
        ),
        may_signal_everybody=True,
        one_task_per_machine="srun --ntasks-per-node=1 rallypoint run",
        shells={"SLURM_STEP_ID": SHELL_STEPS},
    ),
    Scheduler(
        "LSF",
        marks=("LSB_JOBID", "LSB_MCPU_HOSTS"),
        job=(("LSB_JOBID", "LSB_JOBINDEX"),),
        nnodes=(("LSB_DJOB_HOSTFILE", _count_in_file), ("LSB_MCPU_HOSTS", _count_of_pairs)),
        first_host=(("LSB_DJOB_HOSTFILE", _first_in_file), ("LSB_MCPU_HOSTS", _first_of_pairs)),
    ),
    Scheduler(
        "PBS",
        marks=("PBS_JOBID", "PBS_NODEFILE"),
        job=(("PBS_JOBID",),),
        nnodes=(("PBS_NODEFILE", _count_in_file),),
        first_host=(("PBS_NODEFILE", _first_in_file),),
    ),
    Scheduler(
        "LeaderWorkerSet",
        marks=("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE"),
        job=(("LWS_LEADER_ADDRESS",),),
        nnodes=(("LWS_GROUP_SIZE", _number),),
        node_rank=(("LWS_WORKER_INDEX", _number),),
        first_host=(("LWS_LEADER_ADDRESS", _text),),
        has_own_ports=False,
    ),
    # Pods whose manifest has torch's four variables and no others. They count pods here, as with Kubeflow and
    # Volcano: a pod starts one launcher. Processes that another launcher has started have LOCAL_RANK as well.
    Scheduler(
        "env://",
        marks=("MASTER_ADDR", "WORLD_SIZE", "RANK"),
        absent=("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "PET_NNODES"),
        nnodes=(("WORLD_SIZE", _number),),
        node_rank=(("RANK", _number),),
        first_host=(("MASTER_ADDR", _text),),
        port=(("MASTER_PORT", _number),),
        has_own_ports=False,
    ),
    Scheduler(
        "Kubernetes",  # an indexed Job; how many pods it has, its manifest tells with PET_NNODES
        marks=("JOB_COMPLETION_INDEX",),
        node_rank=(("JOB_COMPLETION_INDEX", _number),),
        has_own_ports=False,
    ),
)
"""The first row whose marks are all set counts."""


# Reading it -------------------------------------------------------------------------------------------------


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
