"""When a start-up began and ended, and who waited meanwhile. Pure.

It is over when all have come, and then nobody has waited for a while. There may be a million waits, so each
step looks at them once, and sorts no more than it must.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from rallypoint.watch.timeline.members import Party, came
from rallypoint.watch.timeline.records import Record, Wait

_QUIET: Final = 10.0
"""Seconds: when all have come, and nobody has waited for so long, the start-up is over."""

_began: Final = attrgetter("began")


@dataclass(frozen=True)
class Course:
    """A start-up; its times are unix times."""

    record: Record
    parties: Sequence[Party]
    waits: Sequence[Sequence[Wait]]
    """Of each party, those of the start-up, by their beginnings."""
    origin: float
    """When the first party came."""
    end: float


def follow(record: Record, parties: Sequence[Party], *, is_whole: bool) -> Course:
    """The start-up of these parties; it lasts until the events end if they are not all."""
    arrivals = [came(record, each.clients[0]) for each in parties]
    waits = _waits_of(record, parties)
    end = _end(max(arrivals, default=record.last), waits) if is_whole else record.last
    within = [theirs[: bisect_right(theirs, end, key=_began)] for theirs in waits]
    return Course(record, parties, within, min(arrivals, default=record.first), end)


def owners_of(parties: Sequence[Party]) -> dict[int, int]:
    """The party, by its number, of each client."""
    return {client.id: at for at, each in enumerate(parties) for client in each.clients}


def union(waits: Sequence[Wait], since: float, until: float) -> float:
    """For how long at least one of the waits lasted, which are in the order of their beginnings."""
    total, covered = 0.0, since
    for wait in waits:
        begin, end = wait.began, wait.ended
        if begin < covered:
            begin = covered
        if end > until:
            end = until
        if end > begin:
            total += end - begin
            covered = end
    return total


def _waits_of(record: Record, parties: Sequence[Party]) -> list[list[Wait]]:
    owners = owners_of(parties)
    found: list[list[Wait]] = [[] for _ in parties]
    for wait in [*record.waits, *record.open_waits]:
        owner = owners.get(wait.client)
        if owner is not None:
            found[owner].append(wait)
    for theirs in found:
        theirs.sort(key=_began)
    return found


def _end(last_came: float, waits: Sequence[Sequence[Wait]]) -> float:
    end = last_came
    for begin, after in sorted(span for theirs in waits for span in _merged(theirs, _QUIET)):
        if begin > end + _QUIET:
            break
        end = max(end, after)
    return end


def _merged(waits: Sequence[Wait], gap: float) -> Iterator[tuple[float, float]]:
    """The waits of one party as spans; those between which there is no more than `gap` are one."""
    if not waits:
        return
    begin, end = waits[0].began, waits[0].ended
    for wait in waits:
        if wait.began > end + gap:
            yield begin, end
            begin = wait.began
            end = wait.ended
        elif wait.ended > end:
            end = wait.ended
    yield begin, end
