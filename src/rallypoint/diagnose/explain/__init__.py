"""Logs of failed jobs: the first cause, what followed from it, and what to do.

    knowledge   the known causes (causes.toml), checked
    reading     files, folders, standard input -> logs: named streams of bytes
    scanning    a log -> findings, by way of sieve, prefixes, tracebacks and torchrun's own words; severity
                tells warnings from errors, ending whether a process ended badly
    judging     findings -> the first cause and its consequences, as a report
    words       that, as text and as JSON; page writes the knowledge base as a page of the documentation

Only `reading` does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rallypoint.diagnose.explain.finding import Findings
from rallypoint.diagnose.explain.first_cause import judge
from rallypoint.diagnose.explain.knowledge import Cause, causes
from rallypoint.diagnose.explain.report import Report
from rallypoint.diagnose.explain.scanning import Log, scan
from rallypoint.diagnose.explain.sieve import Sieve

__all__ = ["Log", "Report", "explain"]


def explain(
    logs: Iterable[Log],
    known: Sequence[Cause] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """What the logs of one job tell of its failure. `progress` hears of the bytes that were read."""
    findings = Findings(causes() if known is None else known)
    sieve = Sieve(findings.texts())
    for log in logs:
        scan(log, findings, sieve, progress)
    return judge(findings)
