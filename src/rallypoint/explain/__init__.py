"""Explains the logs of a failed job: which failure came first, what it is, and what to do.

The way of a line:

    reading       opens files, folders and standard input as named streams of bytes
    quick         names the lines of a stream that may matter
    lines         removes the prefixes of launchers and loggers, and keeps what they tell (prefixes.toml)
    classify      says what a line is, from a table of patterns with examples (classes.toml)
    tracebacks    reads exceptions and native backtraces, which take several lines
    knowledge     knows messages that mean more than they say, with advice (causes.toml)
    reported      reads structured reports: our own, torchrun's table, Flight Recorder dumps
    scan          makes the list of events out of all that
    events        is that list, with the questions that can be asked of it
    verdict       decides which failure came first: ordered tables of rules
    report        writes the explanation as text and as JSON

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
