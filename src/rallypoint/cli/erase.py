"""`rallypoint erase`: what a job has left on the engine of its store."""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import Final

from rallypoint.cli.command import JSON, Argument, command
from rallypoint.errors import RallypointError, UsageError
from rallypoint.text import counted, size

_PATIENCE: Final = 6.0
"""Seconds. The engine remembers for five that somebody stands by who has ended meanwhile."""


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
    from rallypoint.diagnose.doctor.engine import LogFacts, ask_log  # late, as all that speaks to engines
    from rallypoint.replica.core.records import FormatError
    from rallypoint.replica.engines.opening import open_log
    from rallypoint.replica.log import Extent, Leadership

    with closing(open_log(engine)) as log:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                facts = ask_log(log)
            except FormatError:  # whatever it is, it can be removed
                facts = LogFacts(Leadership(term=1), False, (), Extent())
            if facts.is_alive:
                raise _is_in_use(log.name, f"{facts.leadership.address} leads")
            if not facts.followers:
                break
            if time.monotonic() > deadline:
                names = ", ".join(each.name for each in facts.followers)
                raise _is_in_use(log.name, f"there is who stands by: {names}")
            time.sleep(0.2)
        extent = facts.extent
        if facts.leadership == Leadership() and extent == Extent():
            raise RallypointError(f"{log.name}: there is nothing of this job", hint="is its name right?")
        log.erase()
        if as_json:
            told = {"records": extent.records, "checkpoint_bytes": extent.checkpoint_bytes}
            print(json.dumps({"erased": log.name, **told, "term": facts.leadership.term}))
            return
        kept = f" and a checkpoint of {size(extent.checkpoint_bytes)}" if extent.checkpoint else ""
        print(f"erased {log.name}: {counted(extent.records, 'record')}{kept}")


def _is_in_use(name: str, who: str) -> RallypointError:
    return RallypointError(f"{name}: {who}", hint="end all `rallypoint serve` of this job first")
