"""The knowledge base: what may stand in it, and that each of its entries is found by its samples alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from explaining import KNOWN, known
from rallypoint.diagnose.explain import explain
from rallypoint.diagnose.explain.knowledge import Comparison, KnowledgeError, causes, fill, in_versions
from rallypoint.diagnose.explain.page import page
from rallypoint.diagnose.explain.reading import open_log

_ROOT = Path(__file__).parents[1]
_SAMPLES = sorted((_ROOT / "tests" / "logs").glob("*.log"))
_HEALTHY = sorted((_ROOT / "tests" / "logs" / "healthy").glob("*.log"))

_ENTRY = KNOWN.split("\n\n")[0]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('id = "port-in-use"', 'id = "Port in use"', "kebab-case"),
        ('title = "The port is taken"', 'title = "The port is taken."', "full stop"),
        ('part = "store"', 'part = "shop"', "part is 'shop', not one of store, rendezvous"),
        ('role = "cause"', 'role = "reason"', "role is 'reason'"),
        ('sure = "certain"', 'sure = "90 %"', "sure is '90 %'"),
        ('sure = "certain"', "sure = 1", "sure is not a text"),
        ('sure = "certain"\n', "", "no sure"),
        ('example = "EADDRINUSE"', 'example = "all is well"', "its example is not found by its own patterns"),
        ('sure = "certain"', 'sure = "certain"\nwho = "x"', "unknown key who"),
        ("'''EADDRINUSE'''", "'''EADDR('''", "no regular expression"),
        ("'''EADDRINUSE'''", "'''[A-Z]+'''", "no fixed text"),
        ("'''EADDRINUSE'''", '""', "patterns is not a list of texts"),
        ('what = "Another process holds port[ {port}]."', 'what = "Port {port}"', "put it in brackets"),
        ("[ {port}]", "[ {host}]", "no pattern tells host"),
        ('sure = "certain"', 'sure = "certain"\nwhere = ["port is 1"]', "not FACT OP FACT"),
        ('sure = "certain"', 'sure = "certain"\nwhere = ["rank > 1"]', "no pattern tells rank"),
        ('sure = "certain"', 'sure = "certain"\nover = ["other"]', "no other entry 'other'"),
        ('sure = "certain"', 'sure = "certain"\nover = ["port-in-use"]', "no other entry 'port-in-use'"),
        ('sure = "certain"', 'sure = "certain"\nplatforms = ["beos"]', "platform 'beos' is unknown"),
        ('sure = "certain"', 'sure = "certain"\nversions = "about 2"', "'about 2' is no bound"),
        ("pytorch/pytorch#73320", "a friend", "'a friend' is no source"),
        ('sources = ["pytorch/pytorch#73320"]', "sources = []", "sources is empty"),
        ("[[cause]]", "[[cause", "causes.toml"),
    ],
)
def test_what_cannot_be_meant_is_told(old: str, new: str, fault: str) -> None:
    assert old in _ENTRY
    with pytest.raises(KnowledgeError, match=re.escape(fault)):
        known(_ENTRY.replace(old, new))


def test_an_id_is_unique() -> None:
    with pytest.raises(KnowledgeError, match="port-in-use: there are two"):
        known(f"{_ENTRY}\n{_ENTRY}")


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
    ("comparison", "facts", "holds"),
    [
        (Comparison("a", "<", "b"), {"a": "9", "b": "10"}, True),
        (Comparison("a", "<", "b"), {"a": "9"}, False),
        (Comparison("a", ">=", "9"), {"a": "9"}, True),
        (Comparison("a", "!=", "-1"), {"a": "-1"}, False),
        (Comparison("a", "==", "1"), {"a": "one"}, False),
    ],
)
def test_comparisons(comparison: Comparison, facts: dict[str, str], holds: bool) -> None:
    assert comparison.holds(facts) == holds


# The knowledge base as it is -------------------------------------------------------------------------------


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
    """`python -m rallypoint.diagnose.explain.page docs/known-errors.md` writes it."""
    assert (_ROOT / "docs" / "known-errors.md").read_text(encoding="utf-8") == page(causes())
