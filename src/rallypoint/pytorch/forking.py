"""torchrun's agent forks its ranks from a template, where that is safe; else it starts them as torchrun does.

Only the start of a process is replaced: the agent's options, logs, signals and error files stay torch's.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from rallypoint.launch.switches import PRELOAD_VARIABLE, can_fork
from rallypoint.launch.template.fresh_process import parse_command
from rallypoint.launch.template.preloading import note_modules, take_report
from rallypoint.launch.template.template import ForkedProcess, Refused, Template, start_template

logger = logging.getLogger("rallypoint.run")

_template: Template | None = None
"""The agent's."""


def number_of_ranks(arguments: Sequence[str]) -> int:
    """How many ranks torchrun's arguments name; 1 if they use a word for it."""
    numbers = [re.fullmatch("--nproc-per-node=([0-9]+)", each) for each in arguments]
    return next((int(each[1]) for each in numbers if each), 1)


def prepare_template() -> None:
    """Fork the template from this process, which has imported torch and has no other thread yet.

    It forks the ranks at once, which wait until they are started. If a fork is not safe, log why: the
    ranks are spawned then.
    """
    global _template
    if _template is not None or not can_fork():
        return
    if reason := _fault_of_torch():
        _log_spawn(reason)
        return
    found = start_template(_prepare_rank)
    if isinstance(found, Refused):
        _log_spawn(found.reason)
        return
    _template = found
    _replace_start(found)
    if wanted := [each.strip() for each in os.environ.get(PRELOAD_VARIABLE, "").split(",") if each.strip()]:
        for fault in found.preload_now(wanted):
            logger.warning("rallypoint: %s is not preloaded: %s", fault.package, fault.reason)
    found.prepare(number_of_ranks(sys.argv[1:]))


def prepare_next_attempt() -> None:
    """In the agent, while its ranks run: fork those of the next attempt, with the imports of these."""
    if _template is not None:
        _template.prepare_again()
        _template.preload(take_report())


def _fault_of_torch() -> str:
    """Why this torch's ranks cannot be forked, in words; empty if they can."""
    try:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        parameters = list(inspect.signature(SubprocessHandler._popen).parameters)
    except (ImportError, AttributeError):
        parameters = []
    return "" if parameters == ["self", "args", "env"] else "this torch starts its ranks in another way"


def _replace_start(template: Template) -> None:
    from torch.distributed.elastic.agent.server import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    spawn = SubprocessHandler._popen

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if parse_command(args) is None:  # --no-python, or a program that binds it to a NUMA node
            return spawn(handler, args, env)
        found = template.start(args, env, handler._stdout, handler._stderr)
        if isinstance(found, ForkedProcess):
            return found
        _log_spawn(found.reason)
        return spawn(handler, args, env)

    SubprocessHandler._popen = start
    api.time = _Clock(template)


class _Clock:
    """The module `time` for torchrun's agent, in which its pauses end when a rank does."""

    def __init__(self, template: Template) -> None:
        self.sleep = template.await_end

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def _prepare_rank() -> None:
    """Do in a forked rank what `sitecustomize` does in one that is started."""
    global _template
    _template = None
    note_modules()
    if "rallypoint_hooks" in sys.modules:  # the launcher has put its folder on the path
        import rallypoint_prepare  # type: ignore[import-not-found]

        rallypoint_prepare.prepare()


def _log_spawn(reason: str) -> None:
    logger.warning("rallypoint: ranks are spawned, not forked: %s", reason)
