"""Which incident was the first cause, and which ones only followed from it. Pure.

When a rank fails, the others lose it and fail as well, often with longer messages. Three things tell the
first cause from its consequences. The role: a lost connection is never a cause, however early it stands. The
`order`, where the logs tell one. And torchrun's table, which names the rank that it saw failing first.

An incident in warnings only is a notice, unless the logs show that a process ended badly. Then it may be the
cause, if no error can be: healthy jobs warn of names that are not known yet.

A job that was started again fails more than once. The last try counts, unless it shows consequences only:
ranks of the next try often stumble over the remains of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from rallypoint.diagnose.explain.endings import CANCELLED, IN_A_SCRIPT, LAST_LINES
from rallypoint.diagnose.explain.evidence import Evidence, Incident, Sighting, Source
from rallypoint.diagnose.explain.explanation import TIERS, Explanation, Verdict
from rallypoint.diagnose.explain.knowledge import SURENESS
from rallypoint.diagnose.explain.layers import Layer, is_echo
from rallypoint.diagnose.explain.order import date, limited, precedes
from rallypoint.diagnose.explain.reasons import is_missed
from rallypoint.diagnose.explain.signs import DUE_WORK
from rallypoint.diagnose.explain.stopping import find_midst, find_standstill, find_stop
from rallypoint.diagnose.explain.suspects import Suspect, is_fatal, says_a_command_failed

_MOST_NAMED: Final = 3
_DIVERGED: Final = "loss-not-finite"


def find_first_cause(evidence: Evidence) -> Explanation:
    """The explanation that the evidence of some logs gives."""
    _add_differences(evidence)
    _without_context(evidence)
    _add_layers(evidence)
    _add_reasons(evidence)
    sources = evidence.sources
    last = [source for source in sources if source.later is None]
    begin = _number_runs(sources)
    shown = any(source.ended_badly for source in sources)
    dated = [_outlived(incident, sources) for incident in date(evidence)]
    weighed = _specific([incident if shown else _weighed(incident) for incident in dated])
    everything = _without_strays(_without_earlier(weighed, sources))
    serious = [incident for incident in everything if incident.role != "notice"]
    notices = [incident for incident in everything if incident.role == "notice"]
    serious = serious or _divergence(evidence)
    verdicts = [
        Verdict(*_judge_attempt(part, [each for each in sources if each.has_attempt(number)]), number, shown)
        for number, part in _by_attempt(serious)
    ]
    verdict = _last_cause([each for each in verdicts if each.attempt >= begin] or verdicts)
    suspects = _suspects(evidence) if verdict is None or verdict.incident.role != "cause" else []
    if verdict is None or verdict.incident.role == "wrapper":
        guess = _guess(suspects, verdict, sources)
        if guess is not None:
            suspects = [each for each in suspects if each.text != guess.incident.text]
        verdict = guess or verdict
    consequences, others = _sort_rest(serious, verdict) if verdict is not None else ([], [])
    return Explanation(
        verdict,
        tuple(consequences),
        tuple(others),
        tuple(notices),
        tuple(
            each
            for each in verdicts
            if verdict and each.attempt != verdict.attempt and each.incident.title != verdict.incident.title
        ),
        len(verdicts),
        tuple(suspects),
        tuple(source.name for source in sources),
        sum(source.lines for source in last),
        find_stop(sources, notices) if verdict is None else find_standstill(verdict, sources),
        find_midst(last) if verdict is None else None,
    )


def _number_runs(sources: Sequence[Source]) -> int:
    """Number the tries of logs with several runs from their ends; returns the first one of the last runs."""
    last = [source for source in sources if source.later is None]
    total = max((source.tries_so_far for source in last), default=0)
    if not any(source.earlier_tries for source in last):
        return 0
    for source in sources:
        source.first_try = total - source.last_run.tries_so_far + source.earlier_tries
    return min(source.first_try or 0 for source in last if source.earlier_tries)


def _add_differences(evidence: Evidence) -> None:
    """What the machines of a job were told differently, though they must agree on it.

    One machine that tells two things was started twice.
    """
    for (cause, alike), told in evidence.told.items():
        machines = {(evidence.sources[seen.log].name, seen.host) for seen in told.values()}
        if len(told) > 1 and (len(machines) > 1 or None in {host for _, host in machines}):
            facts = {cause.differs: " and ".join(list(told)[:_MOST_NAMED]), cause.alike: alike}
            sightings = {seen.writer: seen for seen in reversed(told.values())}
            evidence.known.setdefault(
                cause.id, Incident(cause, cause.role, facts, sightings=sightings, count=len(told))
            )


def _add_layers(evidence: Evidence) -> None:
    """Beside an exception about a library, what the library itself said first in that log is its cause."""
    for layer, firsts in evidence.said.items():
        failed = [
            incident
            for incident in (*evidence.known.values(), *evidence.unknown.values())
            if any(layer.failed.search(seen.text) for seen in incident.seen)
        ]
        for first in firsts.values():
            _put_before(first, layer, failed, evidence)


def _put_before(first: Sighting, layer: Layer, failed: Iterable[Incident], evidence: Evidence) -> None:
    """Make a library's own line the cause of the exception nearest to it.

    If an entry about this library knows that one, the entry is kept, and is said of this line. If not, the
    line is an unknown cause.
    """
    covered = {name for each in evidence.known.values() if each.cause for name in each.cause.over}
    near = [
        (not _fits(incident, layer), abs(seen.line - first.line), index, incident)
        for index, incident in enumerate(failed)
        for seen in incident.seen
        if seen.log == first.log and (incident.cause is None or incident.cause.id not in covered)
    ]
    if not near:
        return
    nearest = min(near)[-1]
    if _fits(nearest, layer):
        nearest.role = "cause"
        nearest.sightings = {first.writer: first, **nearest.sightings, first.writer: first}
        return
    evidence.unknown[first.text] = Incident(None, "cause", sightings={first.writer: first}, count=1)
    for *_, incident in near:
        if incident.cause is None:
            incident.role = "wrapper"


def _add_reasons(evidence: Evidence) -> None:
    """Before an exception about something that could not be had stands the line that said why."""
    for incident in list(evidence.unknown.values()):
        message = incident.raised.message if incident.role == "cause" and incident.raised is not None else ""
        for (log, words), reason in evidence.reasons.items():
            seen = [each for each in incident.seen if each.log == log]
            if seen and all(reason.line < each.line for each in seen) and is_missed(words, message):
                cause = Incident(None, "cause", sightings={reason.writer: reason}, count=1)
                evidence.unknown.setdefault(reason.text, cause)
                incident.role = "wrapper"
                break


def _fits(incident: Incident, layer: Layer) -> bool:
    """Whether what is known of an exception is true of what the library said before it, too."""
    return incident.cause is not None and incident.cause.part == layer.part and not is_echo(incident.text)


def _outlived(incident: Incident, sources: Sequence[Source]) -> Incident:
    """What was caught, in a job that went on, ended nothing."""
    if all(
        source.went_on or (not source.ending.shown and _not_needed(incident, seen, source))
        for seen in incident.seen
        for source in (sources[seen.log],)
    ):
        return replace(incident, role="notice")
    return incident


def _not_needed(incident: Incident, seen: Sighting, source: Source) -> bool:
    """Whether a program has gone on to work without a module or a command that was not there.

    A rank that is named has ended: others may go on for a while.
    """
    line = incident.last.get(seen.log, seen.line)
    if incident.cause is not None and incident.cause.passing:
        return source.life.is_calm_after(line, times=2)
    lack = incident.raised is not None and incident.raised.is_lack and incident.raised.place is not None
    named = source.ending.is_fatal or seen.rank is not None or seen.local is not None
    works = source.life.is_calm_after(line) and source.life.steps_after(line)
    return lack and not named and works


def _without_earlier(everything: Sequence[Incident], sources: Sequence[Source]) -> list[Incident]:
    """What the job went on after, before it failed for good, is no cause: if there is one that can be.

    A job that somebody has cancelled needs no other cause.
    """
    earlier = [
        all(
            seen.line <= source.ending.outlived or _not_needed(each, seen, source)
            for seen in each.seen
            for source in (sources[seen.log],)
        )
        for each in everything
    ]
    other = (each for each, was in zip(everything, earlier, strict=True) if not was)
    if not any(each.role == "cause" or CANCELLED.search(each.text) for each in other):
        return list(everything)
    return [
        replace(each, role="notice") if was else each for each, was in zip(everything, earlier, strict=True)
    ]


def _divergence(evidence: Evidence) -> list[Incident]:
    """That the loss is no number any more, where nothing else was found: the job works for nothing."""
    cause = evidence.cause(_DIVERGED)
    for index, source in enumerate(evidence.sources):
        if cause is not None and source.later is None and (lost := source.life.diverged):
            line, text = lost
            seen = Sighting(index, line, None, None, None, exact=False, tries=source.tries.count, text=text)
            return [Incident(cause, cause.role, sightings={seen.writer: seen}, count=1)]
    return []


def _without_strays(everything: Sequence[Incident]) -> list[Incident]:
    """A command that a script did not find ended nothing, if a program failed before, or if it is none."""
    failed = [each for each in everything if each.role == "cause" and each.raised and each.raised.place]
    return [
        replace(each, role="notice") if each.role == "cause" and _is_stray(each, failed) else each
        for each in everything
    ]


def _is_stray(incident: Incident, failed: Sequence[Incident]) -> bool:
    if incident.cause is None or not incident.cause.passing or not IN_A_SCRIPT.match(incident.text):
        return False
    command = incident.facts.get("command", "")
    seen = incident.first
    near = [each.first for each in failed if each.first.log == seen.log]
    no_program = command.isupper() or "=" in command  # such as SBATCH, of a line whose # was lost
    return bool(near) and (no_program or all(each.line < seen.line for each in near))


def _suspects(evidence: Evidence) -> list[Suspect]:
    """Lines that look like a cause, but for those that the job has outlived."""
    return [
        replace(suspect, rank=_rank_of(suspect, source))
        for suspect in evidence.suspects.best()
        for source in (evidence.sources[_index_of(suspect, evidence.sources)],)
        if not (source.later and source.went_on) and (source.ended_badly or not _went_by(suspect, source))
    ]


def _index_of(suspect: Suspect, sources: Sequence[Source]) -> int:
    """Which run of which log a suspect is of."""
    runs = (index for index, source in enumerate(sources) if source.name == suspect.log)
    return max(index for index in runs if sources[index].begin <= suspect.line)


def _went_by(suspect: Suspect, source: Source) -> bool:
    """Whether a line that looks like a cause had no consequence: one that states an error needs more."""
    line, life = suspect.line, source.life
    if source.ending.was_told_before(line):
        return True
    if life.is_over_before(line) and not DUE_WORK.search(suspect.text):
        return True
    if not suspect.loud:
        return life.is_there_after(line)
    return life.steps_after(line) or life.is_first_after(line) or life.is_over_after(line)


def _rank_of(suspect: Suspect, source: Source) -> int | None:
    if suspect.rank is not None or suspect.local_rank is None:
        return suspect.rank
    return source.table.local_ranks.rank_of(suspect.local_rank, None)


def _guess(suspects: Iterable[Suspect], wrapper: Verdict | None, sources: Sequence[Source]) -> Verdict | None:
    """The first line that states an error, if it is a fatal one, or if a process is said to be gone after it.

    Any other line that states an error may be of no consequence: above all one that the job went on after, or
    one before somebody told it to end. A line that only says that a command failed is no guess, and what
    stands behind it followed.
    """
    gone = wrapper.incident.first if wrapper is not None and wrapper.incident.raised is None else None
    first = next((each for each in suspects if each.loud), None)
    if first is None or says_a_command_failed(first.text):
        return None
    log = _index_of(first, sources)
    source = sources[log]
    is_last = source.lines - first.line <= LAST_LINES and not _went_by(first, source)
    is_before = gone is not None and gone.log == log and first.line < gone.line
    is_behind = gone is not None and gone.log == log and first.line > gone.line
    is_why = is_before and not _went_by(first, source) and not source.ending.was_told
    if is_behind or not (is_why or (is_fatal(first.text) and (source.ended_badly or is_last))):
        return None
    seen = Sighting(
        *(log, first.line, first.rank, None, None),
        exact=False,
        tries=source.tries.count,
        text=first.text,
        local=first.local_rank,
    )
    incident = Incident(None, "cause", sightings={seen.writer: seen}, count=1, guessed=True)
    attempt = wrapper.attempt if wrapper is not None else 0
    return Verdict(incident, "none", attempt, any(each.ended_badly for each in sources))


def _without_context(evidence: Evidence) -> None:
    """Drop the causes without their context, and the unknown exceptions that those with it explain."""
    explained = set()
    for name, incident in list(evidence.known.items()):
        wanted = {pattern.pattern for pattern in incident.cause.context} if incident.cause else set()
        if not wanted <= evidence.contexts:
            del evidence.known[name]
        elif wanted:
            explained |= {(seen.log, seen.line) for seen in incident.sightings.values()}
    for name, incident in list(evidence.unknown.items()):
        for writer, seen in list(incident.sightings.items()):
            if (seen.log, seen.line) in explained:
                del incident.sightings[writer]
        if not incident.sightings:
            del evidence.unknown[name]


def _weighed(incident: Incident) -> Incident:
    """For logs in which nothing ended badly: there, a warning was only a warning."""
    return replace(incident, role="notice") if incident.mild else incident


def _specific(everything: Sequence[Incident]) -> list[Incident]:
    """Without sightings that a more specific entry explains: of the same rank, or in the same log."""
    kept = []
    for incident in everything:
        better = [
            each
            for each in everything
            if incident.cause
            and each.cause
            and incident.cause.id in each.cause.over
            and (each.role != "notice" or incident.role == "notice")
        ]
        logs = {seen.log for each in better for seen in each.seen}
        ranks = {seen.rank for each in better for seen in each.seen} - {None}
        left = [seen for seen in incident.seen if seen.log not in logs and seen.rank not in ranks]
        if left:
            kept.append(limited(incident, left))
    return kept


def _by_attempt(everything: Sequence[Incident]) -> list[tuple[int, list[Incident]]]:
    """The tries of a job, with the incidents of each; those that belong to no try count for the last."""
    last = max((seen.attempt or 0 for incident in everything for seen in incident.seen), default=0)
    parts: dict[int, list[Incident]] = {}
    for incident in everything:
        by_number: dict[int, list[Sighting]] = {}
        for seen in incident.seen:
            by_number.setdefault(last if seen.attempt is None else seen.attempt, []).append(seen)
        for number, part in by_number.items():
            parts.setdefault(number, []).append(limited(incident, part))
    return sorted(parts.items(), key=lambda each: each[0])


def _last_cause(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The verdict of the last try that shows a cause; if none does, of the last try."""
    causes = [verdict for verdict in verdicts if verdict.incident.role == "cause"]
    return causes[-1] if causes else verdicts[-1] if verdicts else None


def _distance(incident: Incident) -> tuple[bool, bool, int, bool]:
    """How far an incident is from being the first cause, by its kind: warnings come behind errors.

    Of those that only tell of a failure, one that names a part says more than one about a process. And of
    ends, one by SIGKILL says most: nobody but the system ends a process so first. Of those that follow from
    one, a known one says more than a connection that broke.
    """
    role, cause = incident.role, incident.cause
    vague = incident.ending != "SIGKILL" if cause is None else cause.part in ("launcher", "process")
    unknown = role == "symptom" and cause is None
    return (role == "wrapper", incident.mild, TIERS[role], unknown or (role == "wrapper" and vague))


def _judge_attempt(everything: Sequence[Incident], sources: Sequence[Source]) -> tuple[Incident, str]:
    """The first cause of one try, and how it is known to be the first."""
    nearest = min(map(_distance, everything))
    candidates = [incident for incident in everything if _distance(incident) == nearest]
    candidates = _ends_before(candidates, everything) or candidates
    roots = _proven_roots(sources)
    of_roots = [incident for incident in everything if roots.intersection(incident.ranks)]
    if candidates[0].role != "cause" and of_roots:
        # That rank ended without a word of its own, so everything the others write followed from that.
        return min(of_roots, key=_distance), "torchrun"
    if len(candidates) == 1:
        return candidates[0], "alone"
    proven = _proven(candidates, sources)
    if len(proven) == 1:
        return proven[0], "torchrun"
    first = [
        incident for incident in proven if not any(precedes(each.first, incident.first) for each in proven)
    ]
    chosen = min(first or proven, key=lambda incident: _preference(incident, sources))
    return chosen, _order(chosen, proven)


def _ends_before(candidates: Sequence[Incident], everything: Sequence[Incident]) -> list[Incident]:
    """If all candidates are exceptions that mostly follow from an end: the ends told before them."""
    if not all(each.cause is None and each.raised and each.raised.is_follower for each in candidates):
        return []
    return [
        each
        for each in everything
        if each.cause is None
        and each.raised is None
        and all(precedes(each.first, candidate.first) for candidate in candidates)
    ]


def _proven(candidates: Sequence[Incident], sources: Sequence[Source]) -> list[Incident]:
    """Without incidents of ranks that still ran when torchrun saw another one fail."""
    roots = _proven_roots(sources)
    if not any(roots.intersection(incident.ranks) for incident in candidates):
        return list(candidates)
    return [incident for incident in candidates if not incident.ranks or roots.intersection(incident.ranks)]


def _proven_roots(sources: Sequence[Source]) -> set[int]:
    """Ranks that torchrun saw fail while all others still ran."""
    return {rank for source in sources if not source.table.others_failed for rank in source.table.roots}


def _preference(incident: Incident, sources: Sequence[Source]) -> tuple[object, ...]:
    """If no order is known: known causes first, then sure ones, then those of few ranks."""
    roots = {rank for source in sources for rank in source.table.roots}
    sure = SURENESS.index(incident.cause.sure) if incident.cause is not None else 0
    hinted = bool(roots.intersection(incident.ranks))
    return (
        incident.cause is None,
        not hinted,
        -sure,
        len(incident.seen),
        incident.first.log,
        incident.first.line,
    )


def _order(chosen: Incident, candidates: Iterable[Incident]) -> str:
    """How it is known that the chosen one came before all others: the weakest of the reasons."""
    ways = {precedes(chosen.first, each.first) for each in candidates if each is not chosen}
    return next(way or "none" for way in ("", "clocks", "lines", "time") if way in ways)


def _sort_rest(serious: Sequence[Incident], verdict: Verdict) -> tuple[list[Incident], list[Incident]]:
    """The consequences of the first cause, and the incidents that may be other causes."""
    consequences: list[Incident] = []
    others: list[Incident] = []
    for incident in serious:
        rest = [seen for seen in incident.seen if not _is_before(seen, verdict)]
        if rest and not incident.is_same(verdict.incident):
            left = limited(incident, rest)
            (consequences if _follows(left, verdict) else others).append(left)
    return consequences, others


def _is_before(seen: Sighting, verdict: Verdict) -> bool:
    """Whether it belongs to an earlier try."""
    return seen.attempt is not None and seen.attempt < verdict.attempt


def _follows(incident: Incident, verdict: Verdict) -> bool:
    if TIERS[incident.role] > TIERS[verdict.incident.role] or verdict.order == "torchrun":
        return True
    if incident.first.attempt is not None and incident.first.attempt > verdict.attempt:
        return True
    # A later cause need not be a consequence.
    return incident.role != "cause" and bool(precedes(verdict.incident.first, incident.first))
