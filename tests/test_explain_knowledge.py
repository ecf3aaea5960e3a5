"""The knowledge base: what may stand in it, and that each of its entries is found by its samples alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from known_errors_page import PARTS, page
from rallypoint.diagnose.explain import explain
from rallypoint.diagnose.explain.explanation import TIERS
from rallypoint.diagnose.explain.knowledge import (
    FACT,
    OPERATORS,
    SEGMENT,
    SURENESS,
    Cause,
    Kind,
    causes,
    fill,
    holds,
    in_versions,
    kinds,
    needed_facts,
    stops,
)
from rallypoint.diagnose.explain.reading import open_log
from rallypoint.diagnose.explain.sieve import required_literals

pytestmark = pytest.mark.windows

_ROOT = Path(__file__).parents[1]
_SAMPLES = sorted((_ROOT / "tests" / "logs").glob("*.log"))
_HEALTHY = sorted((_ROOT / "tests" / "logs" / "healthy").glob("*.log"))

_IDS = [cause.id for cause in causes()]
_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+|reproduced with torch \d+\.\d+\.\d+")
_BOUNDS = re.compile(r"(?:[<>]=?|[=!]=)\d+(?:\.\d+)*(?:,(?:[<>]=?|[=!]=)\d+(?:\.\d+)*)*")


@pytest.mark.parametrize(
    ("text", "facts", "filled"),
    [
        ("port[ {port}] on[ {host}, {port}].", {"port": "1"}, "port 1 on."),
        ("port[ {port}] on[ {host}, {port}].", {"port": "1", "host": "a"}, "port 1 on a, 1."),
        ("[::]:{port}, [x] and []", {"port": "1"}, "[::]:1, [x] and []"),
        ("{port}", {"port": "{host}[{x}]"}, "{host}[{x}]"),
        ("on[ {host}:{port|PORT}], {port|PORT}", {}, "on, PORT"),
        ("on[ {host}:{port|PORT}], {port|PORT}", {"host": "a"}, "on a:PORT, PORT"),
    ],
)
def test_facts_fill_texts(text: str, facts: dict[str, str], filled: str) -> None:
    assert fill(text, facts) == filled


@pytest.mark.parametrize(
    ("version", "bounds", "held"),
    [
        ("2.1.0+cpu", ">=1.13,<2.2", True),
        ("2.10.0", ">=1.13,<2.2", False),
        ("1.13.0", ">=1.13", True),
        ("2.2.0a0+git", "==2.2", True),
        ("2.2.1", "!=2.2", True),
        ("2.13.0", "", True),
    ],
)
def test_versions(version: str, bounds: str, held: bool) -> None:
    assert in_versions(version, bounds) == held


@pytest.mark.parametrize(
    ("comparison", "facts", "true"),
    [
        ("a < b", {"a": "9", "b": "10"}, True),
        ("a < b", {"a": "9"}, False),
        ("a >= 9", {"a": "9"}, True),
        ("a != -1", {"a": "-1"}, False),
        ("a == 1", {"a": "one"}, False),
    ],
)
def test_comparisons(comparison: str, facts: dict[str, str], true: bool) -> None:
    assert holds(comparison, facts) == true


# The knowledge base as it is -------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", causes(), ids=_IDS)
def test_an_entry_says_what_can_be_meant(cause: Cause) -> None:
    """An entry with a wrong key or a broken regular expression cannot even be loaded."""
    assert _ID.fullmatch(cause.id)
    assert _IDS.count(cause.id) == 1
    assert not cause.title.endswith(".")
    assert (cause.part in PARTS, cause.role in TIERS, cause.sure in SURENESS) == (True, True, True)
    assert set(cause.platforms) <= {"linux", "windows", "macos"}
    assert not cause.versions or _BOUNDS.fullmatch(cause.versions)
    assert all(map(_SOURCE.fullmatch, cause.sources))
    assert set(cause.over) <= set(_IDS) - {cause.id}
    assert all((cause.title, cause.what, cause.why, cause.do, cause.sources))
    assert all(map(required_literals, (*cause.patterns, *cause.context))), "a pattern needs a fixed text"
    assert cause.match(cause.example) is not None


@pytest.mark.parametrize("cause", causes(), ids=_IDS)
def test_the_facts_in_an_entry_are_told_by_its_patterns(cause: Cause) -> None:
    """What not all patterns tell is in square brackets, or has a default."""
    told = [set(pattern.groupindex) for pattern in cause.patterns]
    texts = (cause.what, cause.why, *cause.do)
    asked = {found["name"] for text in texts for found in FACT.finditer(text)}
    for comparison in cause.where:
        fact, op, other = comparison.split()
        assert op in OPERATORS
        asked |= {fact, *([] if other.lstrip("-").isdigit() else [other])}
    asked |= {cause.differs, cause.alike} - {""}
    assert asked <= set().union(*told)
    assert needed_facts(SEGMENT.sub("", "".join(texts))) <= set.intersection(*told)


@pytest.mark.parametrize("kind", [*kinds(), *stops()], ids=lambda kind: str(kind.id))
def test_a_kind_is_the_first_that_fits_its_example(kind: Kind) -> None:
    alike = kinds() if kind in kinds() else stops()
    found = (each for each in alike if any(pattern.search(kind.example) for pattern in each.patterns))
    assert next(found) is kind
    texts = (kind.why, *kind.do)
    told = {name for pattern in kind.patterns for name in pattern.groupindex} | {"library"}
    assert {found["name"] for text in texts for found in FACT.finditer(text)} <= told
    assert not needed_facts(SEGMENT.sub("", "".join(texts)))


def test_every_entry_has_a_sample_and_every_sample_an_entry() -> None:
    assert {path.name.partition(".")[0] for path in _SAMPLES} == {cause.id for cause in causes()}


def test_there_are_logs_of_jobs_that_ended_well() -> None:
    assert len(_HEALTHY) >= 10


@pytest.mark.parametrize("path", _SAMPLES, ids=lambda path: str(path.stem))
def test_a_sample_is_explained_by_its_entry(path: Path) -> None:
    report = explain([open_log(path)])
    (cause,) = [each for each in causes() if each.id == path.name.partition(".")[0]]
    if cause.role == "notice":
        assert (report.verdict, [told.cause for told in report.notices]) == (None, [cause])
        return
    assert report.verdict is not None
    assert report.verdict.incident.cause is cause, report.verdict.incident.headline
    assert report.verdict.shown
    rest = (*report.consequences, *report.others, *(each.incident for each in report.other_tries))
    assert [told.title for told in rest if told.role == "cause" and told.cause is not None] == []


@pytest.mark.parametrize("path", _HEALTHY, ids=lambda path: str(path.stem))
def test_a_job_that_ended_well_has_nothing_but_notices(path: Path) -> None:
    report = explain([open_log(path)])
    assert (report.verdict, report.suspects, report.consequences, report.others) == (None, (), (), ())
    assert not report.found


def test_the_page_is_that_of_the_knowledge_base() -> None:
    """`python tests/known_errors_page.py docs/known-errors.md` writes it."""
    assert (_ROOT / "docs" / "known-errors.md").read_text(encoding="utf-8") == page(causes())
