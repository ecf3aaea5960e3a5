"""What `rallypoint explain` says of the logs of tests/corpus that one may work with must not get worse."""

from __future__ import annotations

from collections import Counter

from explain_score import ALL_CLEAR, RIGHT, WRONG, samples


def test_the_logs_that_were_worked_with_are_explained() -> None:
    failing = [each for each in samples("failing") if not each.is_kept_back]
    outcomes = Counter(each.outcome for each in failing)
    assert outcomes[RIGHT] >= 0.9 * len(failing)
    assert outcomes[WRONG] + outcomes[ALL_CLEAR] <= 0.03 * len(failing)
    assert sum(each.is_helpful for each in failing) >= 0.9 * len(failing)


def test_healthy_logs_that_were_worked_with_are_no_alarms() -> None:
    """All but a few, which say too little of their own end."""
    healthy = [each for each in samples("healthy") if not each.is_kept_back]
    alarms = [each.name for each in healthy if each.said["found"]]
    assert len(alarms) <= 0.08 * len(healthy), alarms
