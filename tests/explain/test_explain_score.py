"""What `rallypoint explain` says of the logs of tests/explain/corpus must not get worse."""

from __future__ import annotations

import pytest

from explain_corpus import HELD_OUT, WORK, samples
from explain_score import ALL_CLEAR, RIGHT, WRONG, score

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("part", [WORK, HELD_OUT])]


def test_failing_logs_are_explained(part: str) -> None:
    counts = score(samples(part))
    right, wrong, all_clear = (0.93, 0.005, 0.012) if part == WORK else (0.89, 0.025, 0.022)
    assert counts[RIGHT] >= right * counts["failing logs"]
    assert counts[WRONG] <= wrong * counts["failing logs"]
    assert counts[ALL_CLEAR] <= all_clear * counts["failing logs"]


def test_healthy_logs_are_no_alarms(part: str) -> None:
    """All but a few, which say too little of their own end."""
    counts = score(samples(part))
    assert counts["false alarms"] <= (0.1 if part == WORK else 0.11) * counts["healthy logs"]
