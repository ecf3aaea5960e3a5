"""Running checks side by side, each with a time limit; and what all findings come to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.diagnose.doctor.checks import Check, run_checks
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import NO_GPU, Finding, Outlook, Prospect, State, look_ahead, ok
from raw import SECONDS

OK, W, F, U = State.OK, State.WARNING, State.FAILURE, State.UNKNOWN
HERE = Situation({}, None, Path())
Examine = Callable[[Situation], Iterator[Finding]]


def told(check: Check, findings: object) -> tuple[str, list[tuple[str, State, str]]]:
    assert isinstance(findings, list)
    return check.name, [(each.name, each.state, each.found) for each in findings]


def run_all(*checks: Check) -> dict[str, list[tuple[str, State, str]]]:
    return dict(told(*done) for done in run_checks(checks, HERE))


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What a check waits for that has no answer; after the test it gets one, so that its thread ends."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("check-"):
            thread.join(SECONDS)


def hanging(event: threading.Event, *first: Finding) -> Examine:
    def examine(_: Situation) -> Iterator[Finding]:
        yield from first
        event.wait(SECONDS)
        yield Finding("late", OK, "too late")

    return examine


# Running ---------------------------------------------------------------------------------------------------


def test_checks_run_at_the_same_time() -> None:
    """The first waits for the second, and that for the third: one after the other, none would end."""
    events = [threading.Event() for _ in range(3)]

    def waiting_for(number: int) -> Examine:
        def examine(_: Situation) -> Iterator[Finding]:
            assert events[number + 1].wait(SECONDS) if number < 2 else True
            yield Finding(f"{number}", OK, "done")
            events[number].set()

        return examine

    checks = [Check(str(number), waiting_for(number), SECONDS) for number in range(3)]
    assert run_all(*checks) == {str(number): [(str(number), OK, "done")] for number in range(3)}


def test_what_a_check_is_given_and_what_it_finds() -> None:
    """A finding without a name is about what the check is called after."""
    seen: list[Situation] = []

    def examine(situation: Situation) -> Iterator[Finding]:
        seen.append(situation)
        yield ok("1")
        yield Finding("b", F, "2", "do")

    [(check, found)] = run_checks([Check("x", examine)], HERE)
    assert (seen, check.name) == ([HERE], "x")
    assert [replace(each, seconds=0.0) for each in found] == [
        Finding("x", OK, "1"),
        Finding("b", F, "2", "do"),
    ]
    assert all(0 <= each.seconds == round(each.seconds, 3) < SECONDS for each in found)


def test_a_check_that_does_not_end_is_overdue_and_what_it_found_counts(never: threading.Event) -> None:
    found = run_all(
        Check(
            "hangs",
            hanging(never, Finding("first", OK, "1"), Finding("second", W, "2")),
            0.3,
        ),
        Check("good", lambda _: iter([Finding("good", OK, "fine")]), SECONDS),
        Check("none", lambda _: iter(())),
    )
    assert found == {
        "none": [],
        "hangs": [
            ("first", OK, "1"),
            ("second", W, "2"),
            ("hangs", U, "there was no answer within 0.3 s"),
        ],
        "good": [("good", OK, "fine")],
    }


def test_what_comes_after_the_limit_is_not_told(never: threading.Event) -> None:
    held = threading.Event()

    def examine(_: Situation) -> Iterator[Finding]:
        never.wait(SECONDS)
        yield Finding("late", OK, "too late")
        held.set()

    def patient(_: Situation) -> Iterator[Finding]:
        assert held.wait(SECONDS)
        yield Finding("patient", OK, "came")

    result = []
    for done in run_checks([Check("late", examine, 0.02), Check("patient", patient, SECONDS)], HERE):
        result.append(told(*done))
        never.set()
    assert result == [
        ("late", [("late", U, "there was no answer within 0.02 s")]),
        ("patient", [("patient", OK, "came")]),
    ]


def test_a_check_that_breaks_says_so_and_the_others_go_on() -> None:
    for error, text in (
        (ValueError("it\n  is broken"), "it is broken"),
        (RuntimeError(), "RuntimeError"),
        (PermissionError(1, "not permitted"), "[Errno 1] not permitted"),
    ):

        def examine(_: Situation, error: Exception = error) -> Iterator[Finding]:
            yield Finding("first", OK, "1")
            raise error

        def break_at_once(_: Situation, error: Exception = error) -> Iterator[Finding]:
            raise error

        good = Check("good", lambda _: iter([Finding("good", OK, "fine")]))
        broken = U, f"it could not be looked at: {text}"
        assert run_all(Check("breaks", examine), Check("at once", break_at_once), good) == {
            "breaks": [("first", OK, "1"), ("breaks", *broken)],
            "at once": [("at once", *broken)],
            "good": [("good", OK, "fine")],
        }


# What will work --------------------------------------------------------------------------------------------

ACCELERATE = {"torch": "2", "accelerate": "1"}
GOOD = [
    Finding("torch", OK, "2.13"),
    Finding("loopback", OK, "fine"),
    Finding("libuv", OK, "has it"),
    Finding("gloo", OK, "reduces"),
    Finding("nccl", OK, "reduces"),
    Finding("file-init", OK, "locks hold"),
]
NAMES = ["plain (env://, tcp://)", "torchrun", "accelerate", "file init", "gloo", "NCCL"]


def outlook(*instead: Finding, without: str = "", packages: dict[str, str] = ACCELERATE) -> list[Outlook]:
    names = {each.name for each in instead} | {without}
    return look_ahead([*(each for each in GOOD if each.name not in names), *instead], packages)


YES, NO, HELP, UNKNOWN = Prospect.YES, Prospect.NO, Prospect.WITH_HELP, Prospect.UNKNOWN


def test_everything_works() -> None:
    assert [(each.name, each.prospect, each.why) for each in outlook()] == [(name, YES, "") for name in NAMES]


@pytest.mark.parametrize(
    ("instead", "expected", "why"),
    [
        # Without torch nothing works, which is said once.
        ([Finding("torch", F, "not installed")], [NO], "torch: not installed"),
        ([Finding("torch", U, "no answer")], [UNKNOWN], "torch gave no answer"),
        # A torch without libuv needs help.
        (
            [Finding("libuv", W, "no libuv")],
            [HELP] * 3 + [YES] * 3,
            "rallypoint run -- python train.py",
        ),
        (
            [Finding("libuv", F, "broken")],
            [HELP] * 3 + [YES] * 3,
            "rallypoint run -- python train.py",
        ),
        ([Finding("libuv", U, "it crashed")], [UNKNOWN] * 3 + [YES] * 3, "it crashed"),
        # Without sockets only files work.
        (
            [
                Finding("loopback", F, "no sockets"),
                Finding("libuv", U, "not tried"),
                Finding("gloo", F, "no sockets"),
            ],
            [NO] * 3 + [YES, NO, YES],
            "no sockets",
        ),
        # Without its endpoint a job cannot meet, with or without libuv. The rest needs no endpoint.
        *(
            (
                [Finding(name, F, "no store"), Finding("libuv", W, "none")],
                [NO] * 3 + [YES] * 3,
                f"{name}: no store",
            )
            for name in ("endpoint", "store", "port")
        ),
        *(([Finding(name, W, "it is in use")], [YES] * 6, "") for name in ("endpoint", "store", "port")),
        # Launchers set their own variables.
        (
            [
                Finding("variables", OK, "fine"),
                Finding("variables", F, "MASTER_PORT is 'x'"),
            ],
            [NO] + [YES] * 5,
            "variables: MASTER_PORT is 'x'",
        ),
    ],
)
def test_what_findings_mean_for_a_job(instead: list[Finding], expected: list[Prospect], why: str) -> None:
    found = outlook(*instead)
    assert [each.prospect for each in found] == expected
    assert found[0].why.startswith(why)
    if HELP in expected:  # each way to start a job has its own command
        assert found[1].why == "rallypoint run train.py, or -- torchrun"
        assert "rallypoint run -- accelerate launch" in found[2].why


def test_what_was_not_tried_and_what_is_not_installed() -> None:
    assert [each.prospect for each in outlook(without="torch")] == [UNKNOWN]
    assert [each.prospect for each in outlook(without="libuv")] == [UNKNOWN] * 3 + [YES] * 3
    found = outlook(packages={"torch": "2"})[2]
    assert (found.prospect, found.why) == (NO, "accelerate is not installed: pip install accelerate")
    found = outlook(without="nccl")[5]
    assert (found.prospect, found.why) == (NO, "this torch was built without it")
    found = outlook(Finding("nccl", OK, f"NCCL 2.27 is there; {NO_GPU}"))[5]
    assert (found.prospect, found.why) == (NO, NO_GPU)


@pytest.mark.parametrize(("number", "name"), [(3, "file-init"), (4, "gloo"), (5, "nccl")])
def test_what_one_finding_decides(number: int, name: str) -> None:
    for state, prospect in zip(State, (YES, YES, NO, NO, UNKNOWN), strict=True):
        found = outlook(Finding(name, state, "text"))
        assert [each.prospect for each in found] == [YES] * number + [prospect] + [YES] * (5 - number)
        assert found[number].why == ("" if prospect is YES else "text")


@given(
    st.lists(
        st.builds(
            Finding,
            st.sampled_from([*(each.name for each in GOOD), "variables", "endpoint", "store", "port"]),
            st.sampled_from(State),
            st.sampled_from(["x", NO_GPU]),
        )
    )
)
def test_what_does_not_simply_work_has_a_reason(findings: list[Finding]) -> None:
    for each in look_ahead(findings, {}):
        assert bool(each.why) == (each.prospect is not Prospect.YES)
