"""From settings to the command line of torchrun, and to the environment of a job. Nothing is started here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rallypoint.launch.config import Program
from rallypoint.launch.environment import inject, without_rank
from rallypoint.launch.handover import Handover, read_handover
from rallypoint.launch.options import BACKEND, IN_CONF, Level, Settings, flag_of, text_of, torchruns_option
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
