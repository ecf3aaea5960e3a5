"""`rallypoint erase`: what a job has left on the engine of its store."""

from __future__ import annotations

import json
import time
from contextlib import closing, suppress
from typing import Any, Final

from rallypoint.cli.command import JSON, Argument, command
from rallypoint.diagnose.doctor.engine import watch_leader
from rallypoint.errors import RallypointError, UsageError
from rallypoint.store.replica.core.records import FormatError
from rallypoint.store.replica.engines.opening import open_log
from rallypoint.store.replica.log import Extent, Leadership, Log
from rallypoint.text import counted, size

_PATIENCE: Final = 6.0
"""Seconds until who serves has to have ended. The engine remembers for five that somebody stood by."""


@command(
    Argument(
        "--engine",
        metavar="URL",
        variable="RALLYPOINT_ENGINE",
        default="",
        help="The engine and the job: see rallypoint serve --engine.",
    ),
    JSON,
)
def erase(engine: str, as_json: bool) -> None:
    """Remove what a job has left on an engine: its stores begin anew.

    Exit 1 if a process of the store is alive, or if there is nothing of this job.
    """
    if not engine:
        raise UsageError("which engine is not said", hint="give --engine URL, as to rallypoint serve")
    with closing(open_log(engine)) as log:
        _await_nobody(log)
        told = _erase(log)
    if as_json:
        print(json.dumps(told))
        return
    kept = f" and a checkpoint of {size(told['checkpoint_bytes'])}" if told["checkpoint_bytes"] else ""
    print(f"erased {told['erased']}: {counted(told['records'], 'record')}{kept}")


def _await_nobody(log: Log) -> None:
    """Until nobody serves; RallypointError if somebody goes on with it."""
    deadline = time.monotonic() + _PATIENCE
    while who := _who_serves(log):
        if time.monotonic() > deadline:
            raise RallypointError(f"{log.name}: {who}", hint="end all `rallypoint serve` of this job first")
        time.sleep(0.2)


def _who_serves(log: Log) -> str:
    """Who leads or stands by, in words; empty: nobody. Unreadable records mean that nobody can lead."""
    with suppress(FormatError):
        leadership, is_alive = watch_leader(log)
        if is_alive:
            return f"{leadership.address} leads"
    with suppress(FormatError):
        if followers := log.followers():
            return f"there is who stands by: {', '.join(each.name for each in followers)}"
    return ""


def _erase(log: Log) -> dict[str, Any]:
    """Erase it; what there was, as JSON."""
    leadership, extent = Leadership(), Extent()
    try:
        leadership, extent = log.read_leadership(), log.measure()
    except FormatError:
        pass  # whatever it is, it can be removed
    else:
        if (leadership, extent) == (Leadership(), Extent()):
            raise RallypointError(f"{log.name}: there is nothing of this job", hint="is its name right?")
    log.erase()
    return {
        "erased": log.name,
        "records": extent.records,
        "checkpoint_bytes": extent.checkpoint_bytes,
        "term": leadership.term,
    }
