"""Logs of failed jobs: the first cause, what followed from it, and what to do.

The way of a log line through the files:

    reading       opens files, folders and standard input as logs: named streams of bytes
    sieve         cuts a log into blocks, and names the lines that may matter
    scanning      takes these lines, one by one, through the next ones
    prefixes      takes off what launchers and loggers put before a line: rank, host, time (stamps), level
    endings       follows torchrun's table and tries, and notes whether a process ended badly
    runs          tells where a further run of the job begins in the same log
    local_ranks   says which rank of the job a rank within a machine is
    tracebacks    follows the frames of a traceback up to its exception; says which ones are wrappers
    layers        knows what NCCL, CUDA and compilers say before torch raises an exception for it
    reasons       knows when a program says in passing why it could not have something
    evidence      matches the text with the known causes (knowledge, from causes.toml), and keeps sightings
    suspects      scores a line that nothing matches
    denials       takes out of a line the words of failure that state none
    signs         says what one line shows of a job: a step, an end, a start, an answer
    life          at a failure and at the end of a log: whether the last lines show a job at work, or done
    first_cause   when all logs are read: the first cause and its consequences, by role, order and
                  torchrun's table; the result is an Explanation (explanation)
    order         which of two sightings came first, by their times and lines
    stopping      where the logs stop, if they show no error
    advice        what to do about a verdict that no entry knows, by the kind of its error (kinds.toml),
                  or about a log that just ends (stops.toml)
    words         writes that as text and as JSON

Beside that way, `flight` compares dumps of torch's Flight Recorder.

Only `reading` and `knowledge` read files. For a new cause, add an entry to causes.toml and a sample to
tests/logs. For a new launcher, add a rule to `prefixes`, and a mark to `endings` if it says that a process
ended badly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rallypoint.diagnose.explain.evidence import Evidence
from rallypoint.diagnose.explain.explanation import Explanation
from rallypoint.diagnose.explain.first_cause import find_first_cause
from rallypoint.diagnose.explain.knowledge import Cause, causes
from rallypoint.diagnose.explain.scanning import Log, scan
from rallypoint.diagnose.explain.sieve import Sieve

__all__ = ["Explanation", "Log", "explain"]


def explain(
    logs: Iterable[Log],
    known: Sequence[Cause] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Explanation:
    """Explain the failure of one job by its logs. `progress` is called with numbers of bytes read."""
    evidence = Evidence(causes() if known is None else known)
    sieve = Sieve(evidence.texts(), evidence.texts_to_try())
    for log in logs:
        scan(log, evidence, sieve, progress)
    return find_first_cause(evidence)
