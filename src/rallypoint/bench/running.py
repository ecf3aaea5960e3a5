"""A whole run: what was planned, one measurement after the other, and what came of it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import datetime, timezone

from rallypoint.bench import machine
from rallypoint.bench.contest import Contest, Watcher
from rallypoint.bench.planning import Plan
from rallypoint.bench.results import Results
from rallypoint.bench.targets import Hosts, redis_version


def new_results(command: str, plan: Plan) -> Results:
    """Results with nothing measured yet, but all that is known of the machine."""
    return Results(
        command,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine.facts(),
        versions={**machine.versions(), "redis": redis_version()},
        limits=machine.limits(),
        notes=list(plan.notes),
    )


def measure(plan: Plan, results: Results, watcher: Watcher) -> None:
    """Measure all that is planned; an interruption goes on when every process has been ended."""
    begun = time.monotonic()
    try:
        with ExitStack() as resources:
            hosts = Hosts(resources)
            for measurement in plan.measurements:
                with Contest(measurement, hosts, watcher) as contest:
                    results.records.append(contest.record)
                    contest.run()
    except KeyboardInterrupt:
        results.interrupted = True
        raise
    finally:
        results.seconds = time.monotonic() - begun
