"""From settings to what is started: torchrun's command line, a job's environment, or one task of a scheduler.

A scheduler starts a launcher on each machine, or with --tasks a task for each rank. Nothing is started here:
`rallypoint.launch.rendezvous.task_group` has what the tasks of a job do together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.errors import UsageError
from rallypoint.launch.config import Program
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.environment import inject, without_rank
from rallypoint.launch.handover import Handover, read_handover
from rallypoint.launch.options import (
    BACKEND,
    DEFAULT_MASTER_PORT,
    IN_CONF,
    Level,
    Settings,
    flag_of,
    text_of,
    torchruns_option,
)
from rallypoint.launch.schedulers import Placement
from rallypoint.launch.switches import Patch
from rallypoint.store.server.guard.other_users import access_of_environment
from rallypoint.store.server.guard.secret import job_secret

_MODE: Final = {"script": (), "module": ("--module",)}
_LOGS: Final = frozenset({"log_dir", "redirects", "tee"})
"""torchrun's options about files with what ranks print."""


def to_torchrun(settings: Settings, target: Program, folder: str) -> list[str]:
    """The arguments of a torchrun that meets on Rallypoint and starts a script or a module.

    The number of ranks may be `devices`, which torchrun does not know: `rallypoint.pytorch.agent` puts a
    number in. torchrun reads variables as well: start it with `torchrun_environment`. Its own files go to
    `folder`, unless logs are asked for. KeyError for a command, which is not torchrun's to start.
    """
    return [
        f"--rdzv-backend={BACKEND}",
        # Port 0 is a free one. With no endpoint at all, torchrun would warn of a master_addr.
        f"--rdzv-endpoint={settings.rdzv_endpoint.text or 'localhost:0'}",
        f"--rdzv-conf={text_of(_conf(settings))}",
        f"--nnodes={settings.nnodes.text}",
        f"--nproc-per-node={settings.nproc_per_node.text}",
        *_files(settings, folder),
        *_passed_on(settings),
        *_MODE[target.kind],
        "--",  # torchrun's parser leaves alone what follows, another -- included
        *target.words,
    ]


def _conf(settings: Settings) -> dict[str, str]:
    conf = {"join_timeout": settings.join_timeout.text}
    for name, key in IN_CONF.items():
        if (each := getattr(settings, name)).is_set:
            conf[key] = each.text
    restarts = settings.passed_on.get("max_restarts")  # torch does not tell its rendezvous
    conf["max_restarts"] = restarts.text if restarts is not None else "0"
    return {**settings.rdzv_conf.value, **conf}


def _passed_on(settings: Settings) -> list[str]:
    """torchrun's other options, except those that torchrun finds in its environment by itself."""
    given = {name: each for name, each in settings.passed_on.items() if each.level is not Level.ENVIRONMENT}
    return [
        flag_of(name) if each.value is True else f"{flag_of(name)}={each.text}"
        for name, each in given.items()
        if each.value is not False
    ]


def _files(settings: Settings, folder: str) -> list[str]:
    """Where torchrun puts its files. By itself it leaves a folder among the temporary files at every start.

    With logs in it, that folder is for the user to find, wherever torchrun makes it.
    """
    return [] if _LOGS & settings.passed_on.keys() else [f"--log-dir={folder}"]


def torchrun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that the settings speak for, and without empty ones of torchrun's.

    torchrun would read them again: an empty one ends it with an error, and PET_STANDALONE changes its
    rendezvous whatever the command line says.
    """
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("PET_") or (value and torchruns_option(name))
    }


def variables_of_job(settings: Settings) -> dict[str, str]:
    """The variables of all processes of a job; UsageError for a user who does not exist."""
    variables = settings.variables_of_processes()
    access_of_environment(variables)  # what is wrong is told here, and not by every process
    return variables


def environment_of_job(
    settings: Settings, environ: Mapping[str, str], folder: Path, *, is_command: bool
) -> dict[str, str]:
    """The environment of torchrun, of a rank, or of a command, whose processes leave reports in `folder`."""
    environ = {**{name: each.value for name, each in settings.variables.items()}, **environ}
    job_secret(environ)  # what is wrong with it is told here, and not by every process
    given = Handover(folder, scheduled=read_handover(environ).scheduled)
    if not is_command:
        environ = without_rank(torchrun_environment(environ))
        if settings.placement is not None:
            given = given._replace(scheduled=settings.placement.mark)
    return {**inject(environ), **variables_of_job(settings), **given.variables()}


# One process of a scheduler ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A process that a scheduler has started to be one rank, and where the job has its store."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nnodes: int
    store: Endpoint
    run_id: str
    join_seconds: float

    def environment(self) -> dict[str, str]:
        """What torch and its users look for in a rank, as torchrun sets it."""
        values: dict[str, object] = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.nnodes,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_PORT": self.store.port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "ROLE_NAME": "default",
            "MASTER_ADDR": self.store.host,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 starts no server
        }
        return {name: str(value) for name, value in values.items()}


def task_of(settings: Settings) -> Task:
    """The rank that this process is to be; UsageError if nobody tells, or if it could not find the others."""
    placement = settings.placement
    if placement is None:
        raise UsageError(
            "--tasks: no scheduler that is known here has started this process as one of several",
            hint="write srun, mpirun or jsrun in front of rallypoint run, or leave --tasks out",
        )
    told = (placement.rank, placement.world_size, placement.local_rank, placement.local_world_size)
    rank, world_size, local_rank, local_world_size = (each.value if each is not None else -1 for each in told)
    if min(rank, world_size, local_rank, local_world_size) < 0:
        raise UsageError(
            f"--tasks: {placement.scheduler.name} does not tell which rank this process is to be",
            hint="start one rallypoint run per machine, without --tasks; or start tasks with mpirun",
        )
    is_alone = world_size == local_world_size
    _check_secret(settings, is_alone)
    return Task(
        *(rank, world_size, local_rank, local_world_size),
        node_rank=placement.node_rank.value if placement.node_rank else rank // local_world_size,
        nnodes=placement.nnodes.value if placement.nnodes else -(-world_size // local_world_size),
        store=_place_of_store(settings, placement, is_alone),
        run_id=_run_id(settings, placement),
        join_seconds=settings.join_timeout.value,
    )


def _check_secret(settings: Settings, is_alone: bool) -> None:
    if not is_alone and settings.patch.value == Patch.NEVER and job_secret() is not None:
        raise UsageError(
            "--tasks: this job has a secret, so ranks on other machines need a relay to reach the store, and "
            f"patch is never by {settings.patch.source}",
            hint="leave that out: it is for jobs without a secret",
        )


def _run_id(settings: Settings, placement: Placement) -> str:
    """What tells the tasks of this job from those of others, which might come to the same port."""
    run_id = settings.passed_on.get("rdzv_id")
    if run_id is None:
        raise UsageError(
            f"--tasks: {placement.scheduler.name} does not tell which job this is",
            hint="add --rdzv-id with a name of the job, the same for all its tasks; and --master-port, if "
            "several jobs run at the same time",
        )
    return run_id.text


def _place_of_store(settings: Settings, placement: Placement, is_alone: bool) -> Endpoint:
    places = settings.rdzv_endpoint.value
    if places is None and is_alone:
        return Endpoint("127.0.0.1", placement.port.value if placement.port else DEFAULT_MASTER_PORT)
    if places is None or len(places) > 1:
        raise UsageError(
            f"--tasks: {placement.scheduler.name} does not tell which machine is the first"
            if places is None
            else f"--tasks: the store cannot be at several places, {places}",
            hint="add --master-addr with the name of the machine of rank 0",
        )
    return places[0]


def check_is_alone(settings: Settings) -> None:
    """UsageError if the scheduler has started several launchers on this machine."""
    placement = settings.placement
    here = placement.local_world_size if placement is not None else None
    if placement is None or here is None or here.value < 2:
        return
    name = placement.scheduler.name
    raise UsageError(
        f"{name} has started {here.value} tasks on this machine ({here.variable}), and each would start "
        "ranks of its own",
        hint=f"start one task per machine, with {placement.scheduler.one_task_per_machine} ...; or let each "
        "task be one rank, with rallypoint run --tasks ...; or, for jobs that have nothing to do with each "
        "other, say --standalone",
    )
