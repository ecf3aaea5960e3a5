"""Runs first in every Python process of a job that `rallypoint run` starts: this folder is on PYTHONPATH.

It hides no other sitecustomize: the next one on the path runs as it would have. It imports no torch, and
nothing of Rallypoint before torch is. What goes wrong in it is reported in one line and harms nobody.
"""

from __future__ import annotations

import os
import sys


def _prepare() -> None:
    """Nothing is imported before it is needed."""
    import rallypoint_hooks  # type: ignore[import-not-found]  # it stands beside this file

    if os.environ.get("RALLYPOINT_PATCH") != "never":
        rallypoint_hooks.after_import("torch.distributed", lambda: _try(_substitute))
    job = os.environ.get("RALLYPOINT_JOB")
    if job:
        rallypoint_hooks.on_failure(_report)
        folder, signals = rallypoint_hooks.read_job(job)
        rank = os.environ.get("RANK", "")
        if rank.isdecimal() and signals:
            rallypoint_hooks.answer_for_stacks(folder, int(rank), signals)


def _substitute() -> None:
    from rallypoint.pytorch.autoload import substitute

    substitute()


def _report(*exception: object) -> bool:
    from rallypoint.launch.reports import report_failure

    return report_failure(*exception)  # type: ignore[arg-type]


def _run_next() -> None:
    import rallypoint_hooks

    rallypoint_hooks.run_next_sitecustomize(__file__)


def _try(act) -> None:  # type: ignore[no-untyped-def]
    try:
        act()
    except Exception as error:
        print(f"rallypoint: this process runs without Rallypoint: {error!r}", file=sys.stderr)  # noqa: T201


_try(_prepare)
_run_next()
