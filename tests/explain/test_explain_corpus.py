"""The logs of tests/explain/corpus have the fields that explain_score needs, and the lines that decide."""

from __future__ import annotations

import re
from collections import Counter

from explain_corpus import FIELDS, HELD_OUT, REPRODUCED, WORK, Sample, samples

_ALL = [each for part in (WORK, HELD_OUT, REPRODUCED) for each in samples(part)]


def test_each_log_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(each.name for each in _ALL).items() if count > 1] == []


def test_no_log_is_lost() -> None:
    counts = Counter((each.part, each["job"]) for each in _ALL if each.part != REPRODUCED)
    assert counts == {
        (WORK, "failing"): 433,
        (WORK, "healthy"): 129,
        (HELD_OUT, "failing"): 323,
        (HELD_OUT, "healthy"): 360,
    }


def test_each_log_has_the_fields_and_the_lines_that_decide() -> None:
    assert [each.name for each in _ALL if not _is_complete(each)] == []


def _is_complete(sample: Sample) -> bool:
    re.compile(sample["words"])
    return (
        set(sample.fields) == (FIELDS if sample.is_failing else FIELDS - {"decisive"})
        and sample["job"] in ("failing", "healthy")
        and all(each in sample.text for each in sample.decisive)
        and (sample.part == REPRODUCED or sample["address"].startswith("https://"))
    )
