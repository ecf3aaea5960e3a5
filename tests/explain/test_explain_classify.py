"""The table of classes: each row with its own examples, words that deny a failure, and exit codes."""

from __future__ import annotations

import pytest

from rallypoint.explain.classify import class_of, classify, normal_code, without_denials
from rallypoint.explain.events import FAILURES, Kind, Raised
from rallypoint.explain.lines import load

pytestmark = pytest.mark.windows

_ROWS = load("classes.toml")
_DENIALS = _ROWS["denials"]


def _examples(rows: str, examples: str) -> list[tuple[str, str]]:
    return [(row["name"], line) for row in _ROWS[rows] for line in row[examples]]


def _name(text: str) -> str | None:
    found = classify(text)
    return found.name if found is not None else None


def _raised(line: str) -> Raised:
    kind, _, message = line.partition(":")
    return Raised(kind, message.strip(), 1)


# The rows --------------------------------------------------------------------------------------------------


def test_each_row_has_examples() -> None:
    rows = (*_ROWS["class"], *_ROWS["exceptions"], _DENIALS)
    assert [each for each in rows if not (each["matches"] and each["not"] and each["patterns"])] == []


@pytest.mark.parametrize(("name", "line"), _examples("class", "matches"))
def test_a_row_is_the_first_that_its_examples_match(name: str, line: str) -> None:
    assert _name(line) == name


@pytest.mark.parametrize(("name", "line"), _examples("class", "not"))
def test_a_row_leaves_other_lines_alone(name: str, line: str) -> None:
    assert _name(line) != name


@pytest.mark.parametrize(("name", "line"), _examples("exceptions", "matches"))
def test_the_class_of_an_exception(name: str, line: str) -> None:
    assert class_of(_raised(line)) == name


@pytest.mark.parametrize(("name", "line"), _examples("exceptions", "not"))
def test_other_exceptions_have_another_class(name: str, line: str) -> None:
    assert class_of(_raised(line)) != name


# Denials ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", _DENIALS["matches"])
def test_words_that_deny_a_failure_are_removed(line: str) -> None:
    found = classify(line)
    assert without_denials(line) != line
    assert found is None or found.kind not in FAILURES


@pytest.mark.parametrize("line", _DENIALS["not"])
def test_words_that_state_a_failure_remain(line: str) -> None:
    assert without_denials(line) == line


@pytest.mark.parametrize(
    "line",
    [
        "step 3: 0 errors, no timeouts",
        "finished without any exceptions",
        "retrying on non-fatal errors is on",
        "fault-tolerant training, max_failures=3",
        "validation error rate: 0.031",
        "return code: 0",
    ],
)
def test_a_line_that_only_names_a_failure_is_none(line: str) -> None:
    found = classify(line)
    assert found is None or found.kind not in FAILURES


# Codes and kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "kind", "code"),
    [
        ("failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: python", Kind.KILLED, -9),
        ("failed (exitcode: 3) local_rank: 0 (pid: 7) of binary: python", Kind.ENDED, 3),
        ("srun: error: node-a: task 3: Exited with exit code 139", Kind.KILLED, -11),
        ("error: node-a: task 0: Exited with exit code 1", Kind.ENDED, 1),
        ("command terminated with exit code 137", Kind.ENDED, -9),
        ("process 0 terminated with exit code 3221225477", Kind.ENDED, 3221225477),
        ("subprocess.CalledProcessError: Command '['x']' died with <Signals.SIGSEGV: 11>.", Kind.KILLED, -11),
        ("mpirun noticed that process rank 2 with PID 7 on node a exited on signal 6.", Kind.KILLED, -6),
        ("Killed", Kind.KILLED, None),
    ],
)
def test_how_a_process_ended(line: str, kind: Kind, code: int | None) -> None:
    found = classify(line)
    assert found is not None
    assert (found.kind, found.code) == (kind, code)


@pytest.mark.parametrize(
    ("written", "code"),
    [(1, 1), (128, 128), (137, -9), (139, -11), (255, 255), (-9, -9), (-1073741819, 3221225477)],
)
def test_codes_of_shells_and_of_windows(written: int, code: int) -> None:
    assert normal_code(written) == code


def test_a_fatal_line_says_so() -> None:
    fatal, error = classify("FATAL: the device is lost"), classify("ERROR: the device is lost")
    assert fatal is not None
    assert error is not None
    assert (fatal.fatal, error.fatal) == (True, False)


# Long lines ------------------------------------------------------------------------------------------------
