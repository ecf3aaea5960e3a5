"""Runs first in every Python process of a job that `rallypoint run` starts: this folder is on PYTHONPATH.

It hides no other sitecustomize: the next one on the path runs as it would have. It imports no torch, and
nothing of Rallypoint before torch is. What goes wrong in it is reported in one line and harms nobody.
"""

from __future__ import annotations

import sys


def _prepare() -> None:
    import rallypoint_prepare  # type: ignore[import-not-found]  # it stands beside this file

    rallypoint_prepare.prepare()


def _run_next() -> None:
    import rallypoint_hooks  # type: ignore[import-not-found]

    rallypoint_hooks.run_next_sitecustomize(__file__)


def _try(act) -> None:  # type: ignore[no-untyped-def]
    try:
        act()
    except Exception as error:
        print(f"rallypoint: this process runs without Rallypoint: {error!r}", file=sys.stderr)  # noqa: T201


_try(_prepare)
_run_next()
