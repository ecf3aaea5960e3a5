"""What the processes of a job have reported of their failures, as logs: for `rallypoint run`. Pure."""

from __future__ import annotations

from rallypoint.diagnose.explain.scanning import Log
from rallypoint.diagnose.explain.stamps import complete_stamp
from rallypoint.diagnose.explain.tracebacks import BEGIN
from rallypoint.launch.reports import Failure


def log_of(failure: Failure) -> Log:
    """A failure, with all that is known of it: who, when and in which try of the job."""
    rank = failure.who.rank if failure.who.rank >= 0 else None
    # A long traceback was cut at its beginning; what it ends with is what counts.
    text = failure.traceback if BEGIN in failure.traceback else f"{BEGIN}:\n{failure.traceback}"
    return Log(
        failure.name,
        [text.encode(errors="replace")],
        rank,
        failure.who.host,
        failure.who.tries,
        failure.time,
        complete_stamp(failure.time),
    )
