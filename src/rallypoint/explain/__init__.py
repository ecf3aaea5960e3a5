"""Explains the logs of a failed job: which failure came first, what it is, and what to do.

A line goes through `reading`, `quick`, `lines`, `classify`, `tracebacks`, `knowledge` and `reported`; `scan`
makes events of all that, `verdict` chooses the first failure among them, and `report` explains it.
docs/concepts/architecture.md says what each module does.

To add a cause, add an entry to causes.toml. To see why a log got its verdict: `rallypoint explain --all`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rallypoint.explain.events import Event
from rallypoint.explain.scan import Source, scan
from rallypoint.explain.verdict import Explanation, judge

__all__ = ["Explanation", "Source", "explain"]


def explain(
    sources: Iterable[Source],
    reported: Iterable[Event] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> Explanation:
    """Explain the failure of one job by its logs, and by what a launcher reported beside them.

    `progress` is called with numbers of bytes read.
    """
    logs, events = scan(sources, progress)
    return judge([*events, *reported], logs)
