"""Running checks side by side, each with a time limit, and whatever happens in them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, unknown


@dataclass(frozen=True)
class Check:
    """One thing that is looked at. It may have several findings, or none where it does not apply."""

    name: str
    examine: Callable[[Situation], Iterable[Finding]]
    seconds: float = 8.0
    """The time limit; what it has found by then counts."""


Done = tuple[Check, Sequence[Finding]]


def run(checks: Sequence[Check], situation: Situation) -> Iterator[Done]:
    """Run all checks at the same time, and give the findings of each as it ends or its time is over.

    Each has a thread of its own, which nobody waits for when its time is over: the system's resolver, a
    file system or a GPU may never answer.
    """
    begun = time.monotonic()
    results: queue.SimpleQueue[tuple[int, Finding | None]] = queue.SimpleQueue()
    for number, check in enumerate(checks):
        work = threading.Thread(
            target=_work, args=(number, check, situation, results), daemon=True, name=f"check-{check.name}"
        )
        work.start()
    found: dict[int, list[Finding]] = {number: [] for number in range(len(checks))}
    while found:
        late = [number for number in found if time.monotonic() - begun > checks[number].seconds]
        for number in late:
            yield checks[number], [*found.pop(number), _overdue(checks[number])]
        if not found:
            return
        patience = begun + min(checks[number].seconds for number in found) - time.monotonic()
        try:
            number, finding = results.get(timeout=max(patience, 0.001))
        except queue.Empty:
            continue
        if number in found and finding is not None:
            found[number].append(replace(finding, seconds=time.monotonic() - begun))
        elif number in found:
            yield checks[number], found.pop(number)


def _work(
    number: int,
    check: Check,
    situation: Situation,
    results: queue.SimpleQueue[tuple[int, Finding | None]],
) -> None:
    try:
        for finding in check.examine(situation):
            results.put((number, finding))
    except Exception as error:  # a check that breaks says so, and the others go on
        results.put((number, unknown(check.name, f"it could not be looked at: {_describe(error)}")))
    results.put((number, None))


def _describe(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _overdue(check: Check) -> Finding:
    return unknown(check.name, f"there was no answer within {check.seconds:g} s")
