"""Prepares a Python process of a job, at its start or after a fork. It stands beside `sitecustomize`.

It imports no torch, and nothing of Rallypoint before torch is.
"""

from __future__ import annotations

import os
import sys

import rallypoint_hooks  # type: ignore[import-not-found]  # it stands beside this file


def prepare() -> None:
    """Prepare a process of a job. Nothing is imported before it is needed."""
    if os.environ.get("RALLYPOINT_PATCH") != "never":
        rallypoint_hooks.after_import("torch.distributed", _try_to_substitute)
    job = os.environ.get("RALLYPOINT_JOB")
    if job:
        rallypoint_hooks.on_failure(_report)
        folder, signals = rallypoint_hooks.read_job(job)
        rank = os.environ.get("RANK", "")
        if rank.isdecimal() and signals:
            rallypoint_hooks.answer_for_stacks(folder, int(rank), signals)


def _try_to_substitute() -> None:
    try:
        from rallypoint.pytorch.autoload import substitute

        substitute()
    except Exception as error:
        print(f"rallypoint: this process runs without Rallypoint: {error!r}", file=sys.stderr)  # noqa: T201


def _report(*exception: object) -> bool:
    from rallypoint.launch.reports import report_failure

    return report_failure(*exception)  # type: ignore[arg-type]
