"""What `rallypoint explain` says of the logs of tests/corpus that one may work with must not get worse."""

from __future__ import annotations

from collections import Counter

from explain_score import ALL_CLEAR, RIGHT, WRONG, samples


def test_the_logs_that_were_worked_with_are_explained() -> None:
    failing = [each for each in samples("failing") if not each.is_kept_back]
    outcomes = Counter(each.outcome for each in failing)
    assert outcomes[RIGHT] >= 0.92 * len(failing)
    assert outcomes[WRONG] + outcomes[ALL_CLEAR] <= 0.025 * len(failing)
    assert sum(each.is_helpful for each in failing) >= 0.94 * len(failing)


def test_no_healthy_log_that_was_worked_with_is_an_alarm() -> None:
    healthy = [each for each in samples("healthy") if not each.is_kept_back]
    assert [each.name for each in healthy if each.said["found"]] == []
