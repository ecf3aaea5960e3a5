"""Where the logs of a job stop, if they show no error: at no end, or in the midst of its work. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rallypoint.diagnose.explain.advice import advise, advise_at
from rallypoint.diagnose.explain.evidence import Incident, Source
from rallypoint.diagnose.explain.explanation import Stop, Verdict


def find_stop(sources: Sequence[Source], notices: Iterable[Incident]) -> Stop | None:
    """Where the logs stop, if none shows a job at work or at its end; or what one says of an end after steps.

    Not if the last line is a notice: that is told, and what to do if the job hangs there. But a script may
    end at a command that is missing.
    """
    lasting = (each for each in notices if each.cause is None or not each.cause.passing)
    noticed = {(seen.log, seen.line) for each in lasting for seen in each.seen}
    for index, source in enumerate(sources):
        if source.later is not None:
            continue
        words = source.life.last_words
        told = words and any(log == index and line >= words[0] for log, line in noticed)
        if words and not told and source.life.is_cut_short:
            return Stop(words[1], source.name, words[0], advise(words[1], None, None))
    written = [index for index, source in enumerate(sources) if source.life.text and source.later is None]
    if not written or any(sources[index].life.shown for index in written):
        return None
    last = sources[written[-1]]
    if (written[-1], last.life.last) in noticed:
        return None
    return Stop(last.life.text, last.name, last.life.last, advise_at(last.life.tail))


def find_standstill(verdict: Verdict, sources: Sequence[Source]) -> Stop | None:
    """Where a program stood when somebody told it to end, if no more than that is known: it may have hung."""
    first, source = verdict.incident.first, sources[verdict.incident.first.log]
    if verdict.incident.role != "wrapper" or verdict.incident.raised or not source.ending.was_told:
        return None
    before = [(number, text) for number, text in source.life.tail if number < first.line and text.strip()]
    if not before or source.life.steps_before(first.line):
        return None
    return Stop(before[-1][1].strip(), source.name, before[-1][0], advise_at(before))


def find_midst(sources: Sequence[Source]) -> Stop | None:
    """Where the last of the logs stops, if all that were written to end in the midst of steps."""
    written = [source for source in sources if source.life.text]
    if not written or not all(source.life.in_the_midst for source in written):
        return None
    return Stop(written[-1].life.text, written[-1].name, written[-1].life.last)
