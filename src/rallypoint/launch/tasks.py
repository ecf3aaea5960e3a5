"""Processes that a scheduler starts for a job: a launcher on each machine, or a task for each rank.

Pure: what is started, and with which environment, is decided here and done elsewhere.
"""

from __future__ import annotations

from rallypoint.errors import UsageError
from rallypoint.launch.config import Settings


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
