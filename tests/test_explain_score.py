"""What `rallypoint explain` says of the logs of tests/corpus that one may work with must not get worse."""

from __future__ import annotations

from explain_corpus import WORK, samples
from explain_score import ALL_CLEAR, RIGHT, WRONG, alarms, score


def test_the_logs_that_were_worked_with_are_explained() -> None:
    counts = score(samples(WORK))
    assert counts[RIGHT] >= 0.9 * counts["failing logs"]
    assert counts[WRONG] + counts[ALL_CLEAR] <= 0.03 * counts["failing logs"]
    assert counts["helpful advice"] >= 0.9 * counts["failing logs"]


def test_healthy_logs_that_were_worked_with_are_no_alarms() -> None:
    """All but a few, which say too little of their own end."""
    found = alarms(samples(WORK))
    assert len(found) <= 0.08 * sum(not each.is_failing for each in samples(WORK)), found
