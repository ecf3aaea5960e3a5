"""Which of the findings was the first cause, and which only followed from it. Pure.

When a rank fails, the others lose it and fail as well, often with longer messages. Three things tell the
first cause from its consequences. The role: a lost connection is never a cause, however early it stands. The
order, where the logs tell one. And torchrun's table, which names the rank that it saw failing first.

What has been said in warnings only is a notice, unless the logs show that a process ended badly. Then it may
be the cause, if nothing that was called an error can be: healthy jobs warn of names that are not known yet.

A job that was started again fails more than once. The last try counts, unless it shows consequences only:
ranks of the next try often stumble over what the one before has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rallypoint.diagnose.explain.finding import Findings, Source
from rallypoint.diagnose.explain.knowledge import SURENESS
from rallypoint.diagnose.explain.ordering import Seen, all_seen, first_first, precedes
from rallypoint.diagnose.explain.report import TIERS, Report, Told, Verdict


def judge(findings: Findings) -> Report:
    """Sort out what was found."""
    _without_context(findings)
    shown = any(source.ending.is_bad(source.lines) for source in findings.sources)
    everything = _specific([told if shown else _weighed(told) for told in _told(findings)])
    serious = [told for told in everything if told.role != "notice"]
    notices = [told for told in everything if told.role == "notice"]
    verdicts = [
        Verdict(*_judge_attempt(part, findings.sources), number, shown)
        for number, part in _by_attempt(serious)
    ]
    verdict = _last_cause(verdicts)
    consequences, others = _sort_rest(serious, verdict) if verdict is not None else ([], [])
    weak = verdict is None or verdict.told.role != "cause"
    return Report(
        verdict,
        tuple(consequences),
        tuple(others),
        tuple(notices),
        tuple(each for each in verdicts if verdict and each.told.title != verdict.told.title),
        len(verdicts),
        tuple(findings.suspects.best()) if weak else (),
        tuple(source.name for source in findings.sources),
        sum(source.lines for source in findings.sources),
    )


def _without_context(findings: Findings) -> None:
    """Drop the causes that want to see more than their own line, and do not; and else what they explain."""
    explained = set()
    for name, finding in list(findings.known.items()):
        wanted = {pattern.pattern for pattern in finding.cause.context} if finding.cause else set()
        if not wanted <= findings.contexts:
            del findings.known[name]
        elif wanted:
            explained |= {(seen.log, seen.line) for seen in finding.sightings.values()}
    for name, finding in list(findings.unknown.items()):
        for writer, seen in list(finding.sightings.items()):
            if (seen.log, seen.line) in explained:
                del finding.sightings[writer]
        if not finding.sightings:
            del findings.unknown[name]


def _told(findings: Findings) -> list[Told]:
    seen = all_seen(findings)
    return [
        Told(
            finding.cause,
            finding.role,
            finding.facts,
            finding.raised,
            finding.became,
            first_first(seen[id(finding)]),
            finding.count,
        )
        for finding in (*findings.known.values(), *findings.unknown.values())
    ]


def _weighed(told: Told) -> Told:
    """A finding of logs in which nothing ended badly: a warning was no more than that."""
    return replace(told, role="notice") if told.mild else told


def _specific(everything: Sequence[Told]) -> list[Told]:
    """Without what a more specific entry says better: about the same rank, or in the same log."""
    kept = []
    for told in everything:
        better = [
            each
            for each in everything
            if told.cause
            and each.cause
            and told.cause.id in each.cause.over
            and (each.role != "notice" or told.role == "notice")
        ]
        logs = {seen.log for each in better for seen in each.seen}
        ranks = {seen.rank for each in better for seen in each.seen} - {None}
        left = [seen for seen in told.seen if seen.log not in logs and seen.rank not in ranks]
        if left:
            kept.append(told.only(left))
    return kept


def _by_attempt(everything: Sequence[Told]) -> list[tuple[int, list[Told]]]:
    """The tries of a job, with what was seen in each; what belongs to none belongs to the last."""
    last = max((seen.attempt or 0 for told in everything for seen in told.seen), default=0)
    parts: dict[int, list[Told]] = {}
    for told in everything:
        by_number: dict[int, list[Seen]] = {}
        for seen in told.seen:
            by_number.setdefault(last if seen.attempt is None else seen.attempt, []).append(seen)
        for number, part in by_number.items():
            parts.setdefault(number, []).append(told.only(part))
    return sorted(parts.items(), key=lambda each: each[0])


def _last_cause(verdicts: Sequence[Verdict]) -> Verdict | None:
    """That of the last try that shows a cause; of the last at all, if none does."""
    causes = [verdict for verdict in verdicts if verdict.told.role == "cause"]
    return causes[-1] if causes else verdicts[-1] if verdicts else None


def _distance(told: Told) -> tuple[bool, bool, int]:
    """How far a finding is from being the first cause, by what it is: warnings come behind errors."""
    return (told.role == "wrapper", told.mild, TIERS[told.role])


def _judge_attempt(everything: Sequence[Told], sources: Sequence[Source]) -> tuple[Told, str]:
    """The first cause of one try, and how it is known to be the first."""
    nearest = min(map(_distance, everything))
    candidates = [told for told in everything if _distance(told) == nearest]
    roots = _proven_roots(sources)
    of_roots = [told for told in everything if roots.intersection(told.ranks)]
    if candidates[0].role != "cause" and of_roots:
        # It ended without a word of its own, so whatever the others say followed from that.
        return min(of_roots, key=_distance), "torchrun"
    if len(candidates) == 1:
        return candidates[0], "alone"
    proven = _proven(candidates, sources)
    if len(proven) == 1:
        return proven[0], "torchrun"
    first = [told for told in proven if not any(precedes(each.first, told.first) for each in proven)]
    chosen = min(first or proven, key=lambda told: _preference(told, sources))
    return chosen, _order(chosen, proven)


def _proven(candidates: Sequence[Told], sources: Sequence[Source]) -> list[Told]:
    """Without those of ranks that still ran when torchrun saw another one fail."""
    roots = _proven_roots(sources)
    if not any(roots.intersection(told.ranks) for told in candidates):
        return list(candidates)
    return [told for told in candidates if not told.ranks or roots.intersection(told.ranks)]


def _proven_roots(sources: Sequence[Source]) -> set[int]:
    """Ranks that torchrun saw fail while all others still ran."""
    return {rank for source in sources if not source.table.others_failed for rank in source.table.roots}


def _preference(told: Told, sources: Sequence[Source]) -> tuple[object, ...]:
    """Where no order is known: what is known before what is not, what is sure, and what few ranks say."""
    roots = {rank for source in sources for rank in source.table.roots}
    sure = SURENESS.index(told.cause.sure) if told.cause is not None else 0
    hinted = bool(roots.intersection(told.ranks))
    return (told.cause is None, not hinted, -sure, len(told.seen), told.first.log, told.first.line)


def _order(chosen: Told, candidates: Iterable[Told]) -> str:
    """How it is known that it came before all others: as the weakest of them says."""
    ways = {precedes(chosen.first, each.first) for each in candidates if each is not chosen}
    return next(way or "none" for way in ("", "clocks", "lines", "time") if way in ways)


def _sort_rest(serious: Sequence[Told], verdict: Verdict) -> tuple[list[Told], list[Told]]:
    """The consequences of the first cause; and what may be another cause."""
    consequences: list[Told] = []
    others: list[Told] = []
    for told in serious:
        rest = [seen for seen in told.seen if not _is_before(seen, verdict)]
        if rest and not told.is_same(verdict.told):
            left = told.only(rest)
            (consequences if _follows(left, verdict) else others).append(left)
    return consequences, others


def _is_before(seen: Seen, verdict: Verdict) -> bool:
    """Whether it belongs to an earlier try."""
    return seen.attempt is not None and seen.attempt < verdict.attempt


def _follows(told: Told, verdict: Verdict) -> bool:
    if TIERS[told.role] > TIERS[verdict.told.role] or verdict.order == "torchrun":
        return True
    if told.first.attempt is not None and told.first.attempt > verdict.attempt:
        return True
    # What can be a cause by itself may have come later, and yet from nothing else.
    return told.role != "cause" and bool(precedes(verdict.told.first, told.first))
