"""From settings to the command line and the environment of torchrun. Pure: nothing is started here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rallypoint.launch.config import Settings
from rallypoint.launch.options import BACKEND, BY_NAME, OPTIONS, Target, text_of

_PASSED_ON: Final = (
    *("nnodes", "rdzv_id", "max_restarts", "monitor_interval", "start_method", "role"),
    *("local_addr", "log_dir", "redirects", "tee", "local_ranks_filter"),
)
"""What torchrun takes under the same name. Where it is not set, the built-in value is torchrun's own."""

_MODE: Final[Mapping[str, tuple[str, ...]]] = {"script": (), "module": ("--module",)}

_TORCHRUN_RANKS: Final = "1"
"""The ranks per node that torchrun starts if it is not told."""

_SETTLED_VARIABLES: Final = frozenset(
    {
        *(option.variable for option in OPTIONS if option.variable.startswith("PET_")),
        *("PET_RDZV_BACKEND", "PET_MODULE", "PET_NO_PYTHON", "PET_RUN_PATH"),
    }
)


def to_torchrun(settings: Settings, target: Target, nproc_per_node: int | str) -> list[str]:
    """The arguments of a torchrun that meets on Rallypoint and starts a script or a module.

    `nproc_per_node` is the number of ranks, or a word that torchrun knows: only torch can tell what
    `devices` comes to. What nobody set is left to torchrun, the id of the job included. torchrun reads
    variables as well: start it with `torchrun_environment`. ValueError for a command, which is not
    torchrun's to start.
    """
    if target.kind not in _MODE:
        raise ValueError(f"torchrun starts a script or a module, not a {target.kind}")
    given = [f"{BY_NAME[name].flag}={settings[name].text}" for name in _PASSED_ON if settings[name].is_set]
    if settings.nproc_per_node.is_set or text_of(nproc_per_node) != _TORCHRUN_RANKS:
        given.append(f"--nproc-per-node={nproc_per_node}")
    conf = f"--rdzv-conf={text_of(_conf(settings))}"
    # Port 0 is a free one. With no endpoint at all, torchrun would warn of a master_addr.
    endpoint = f"--rdzv-endpoint={settings.rdzv_endpoint.text or 'localhost:0'}"
    # Behind --, torchrun's parser leaves everything alone, a -- among the script's arguments included.
    return [f"--rdzv-backend={BACKEND}", endpoint, conf, *given, *_MODE[target.kind], "--", *target.words]


def _conf(settings: Settings) -> dict[str, str]:
    conf = {"join_timeout": settings.join_timeout.text}
    if settings.relay.is_set:
        conf["relay"] = settings.relay.text
    if settings.node_rank.value is not None:
        conf["rank"] = settings.node_rank.text
    return {**settings.rdzv_conf.value, **conf}


def torchrun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that the settings already speak for.

    torchrun would read them again: an empty one ends it with an error, and PET_STANDALONE changes its
    rendezvous whatever the command line says. Variables of options that are torchrun's alone are kept.
    """
    return {name: value for name, value in environ.items() if name not in _SETTLED_VARIABLES}
