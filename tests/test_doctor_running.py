"""Running checks side by side, each with a time limit; and what all findings come to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.diagnose.doctor.checks import Check, run_checks
from rallypoint.diagnose.doctor.outlook import NO_GPU, Outlook, Prospect, look_ahead
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, State, failure, note, ok, unknown, warning
from raw import SECONDS

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
        yield ok("late", "too late")

    return examine


# Running ---------------------------------------------------------------------------------------------------


def test_checks_run_at_the_same_time() -> None:
    """The first waits for the second, and that for the third: one after the other, none would end."""
    events = [threading.Event() for _ in range(3)]

    def waiting_for(number: int) -> Examine:
        def examine(_: Situation) -> Iterator[Finding]:
            assert events[number + 1].wait(SECONDS) if number < 2 else True
            yield ok(f"{number}", "done")
            events[number].set()

        return examine

    checks = [Check(str(number), waiting_for(number), SECONDS) for number in range(3)]
    assert run_all(*checks) == {str(number): [(str(number), State.OK, "done")] for number in range(3)}


def test_what_a_check_is_given_and_what_it_finds() -> None:
    seen: list[Situation] = []

    def examine(situation: Situation) -> Iterator[Finding]:
        seen.append(situation)
        yield ok("a", "1")
        yield failure("b", "2", "do")

    [(check, found)] = run_checks([Check("x", examine)], HERE)
    assert seen == [HERE]
    assert seen[0] is HERE
    assert check.name == "x"
    assert [(each.name, each.state, each.found, each.hint) for each in found] == [
        ("a", State.OK, "1", ""),
        ("b", State.FAILURE, "2", "do"),
    ]
    assert all(0 < each.seconds < SECONDS for each in found)


def test_a_check_without_findings_and_no_checks() -> None:
    assert run_all(Check("none", lambda _: iter(()))) == {"none": []}
    assert list(run_checks([], HERE)) == []


def test_a_check_that_does_not_end_is_overdue_and_what_it_found_counts(never: threading.Event) -> None:
    found = run_all(
        Check("hangs", hanging(never, ok("first", "1"), warning("second", "2")), 0.3),
        Check("good", lambda _: iter([ok("good", "fine")]), SECONDS),
    )
    assert found == {
        "hangs": [
            ("first", State.OK, "1"),
            ("second", State.WARNING, "2"),
            ("hangs", State.UNKNOWN, "there was no answer within 0.3 s"),
        ],
        "good": [("good", State.OK, "fine")],
    }


def test_each_check_has_its_own_limit(never: threading.Event) -> None:
    """The short one is over while the long one still may have an answer, and gets it."""
    short_is_over = threading.Event()

    def patient(_: Situation) -> Iterator[Finding]:
        assert short_is_over.wait(SECONDS)
        yield ok("long", "came")

    checks = [Check("long", patient, SECONDS), Check("short", hanging(never), 0.02)]
    order = []
    for check, found in run_checks(checks, HERE):
        order.append((check.name, [each.state for each in found]))
        short_is_over.set()
    assert order == [("short", [State.UNKNOWN]), ("long", [State.OK])]


def test_what_comes_after_the_limit_is_not_told(never: threading.Event) -> None:
    held = threading.Event()

    def examine(_: Situation) -> Iterator[Finding]:
        never.wait(SECONDS)
        yield ok("late", "too late")
        held.set()

    def patient(_: Situation) -> Iterator[Finding]:
        assert held.wait(SECONDS)
        yield ok("patient", "came")

    result = []
    for done in run_checks([Check("late", examine, 0.02), Check("patient", patient, SECONDS)], HERE):
        result.append(told(*done))
        never.set()
    assert result == [
        ("late", [("late", State.UNKNOWN, "there was no answer within 0.02 s")]),
        ("patient", [("patient", State.OK, "came")]),
    ]


def test_a_check_that_breaks_says_so_and_the_others_go_on() -> None:
    for error, text in (
        (ValueError("it\n  is broken"), "it is broken"),
        (RuntimeError(), "RuntimeError"),
        (PermissionError(1, "not permitted"), "[Errno 1] not permitted"),
    ):

        def examine(_: Situation, error: Exception = error) -> Iterator[Finding]:
            yield ok("first", "1")
            raise error

        def break_at_once(_: Situation, error: Exception = error) -> Iterator[Finding]:
            raise error

        good = Check("good", lambda _: iter([ok("good", "fine")]))
        broken = State.UNKNOWN, f"it could not be looked at: {text}"
        assert run_all(Check("breaks", examine), Check("at once", break_at_once), good) == {
            "breaks": [("first", State.OK, "1"), ("breaks", *broken)],
            "at once": [("at once", *broken)],
            "good": [("good", State.OK, "fine")],
        }


# What will work --------------------------------------------------------------------------------------------

ACCELERATE = {"torch": "2", "accelerate": "1"}
GOOD = [
    ok("torch", "2.13"),
    ok("loopback", "fine"),
    ok("libuv", "has it"),
    ok("gloo", "reduces"),
    ok("nccl", "reduces"),
    ok("file-init", "locks hold"),
]
NAMES = ["plain (env://, tcp://)", "torchrun", "accelerate", "file init", "gloo", "NCCL"]
YES = (Prospect.YES, "")


def outlook(*instead: Finding, without: str = "", packages: dict[str, str] = ACCELERATE) -> list[Outlook]:
    names = {each.name for each in instead} | {without}
    return look_ahead([*(each for each in GOOD if each.name not in names), *instead], packages)


def prospects(found: list[Outlook]) -> list[Prospect]:
    assert [each.name for each in found] == NAMES
    return [each.prospect for each in found]


def test_everything_works() -> None:
    assert [(each.prospect, each.why) for each in outlook()] == [YES] * 6
    assert prospects(outlook()) == [Prospect.YES] * 6
    assert outlook()[0].as_json() == {"name": "plain (env://, tcp://)", "prospect": "yes", "why": ""}


def test_without_torch_nothing_does() -> None:
    found = outlook(warning("torch", "not installed", "pip install torch"))
    assert prospects(found) == [Prospect.NO] * 6
    assert {each.why for each in found} == {"torch: not installed"}


def test_a_torch_that_says_nothing() -> None:
    for found in (outlook(without="torch"), outlook(unknown("torch", "no answer"))):
        assert prospects(found) == [Prospect.UNKNOWN] * 6


def test_a_torch_without_libuv_needs_help() -> None:
    for libuv in (warning("libuv", "no libuv"), failure("libuv", "broken")):
        found = outlook(libuv)
        assert prospects(found) == [Prospect.WITH_HELP] * 3 + [Prospect.YES] * 3
        assert "rallypoint run -- python" in found[0].why
        assert found[1].why == "rallypoint run train.py, or -- torchrun"
        assert "rallypoint run -- accelerate launch" in found[2].why


def test_without_sockets_only_files_do() -> None:
    found = outlook(failure("loopback", "sockets cannot be used"), unknown("libuv", "not tried"))
    assert prospects(found)[:4] == [Prospect.NO] * 3 + [Prospect.YES]
    assert found[0].why == "sockets cannot be used"


@pytest.mark.parametrize("name", ["endpoint", "store", "port"])
def test_a_place_that_cannot_be_had_stops_what_meets_there(name: str) -> None:
    """What needs no endpoint is none the worse for it."""
    found = outlook(failure(name, "it is no store"))
    assert prospects(found) == [Prospect.NO] * 3 + [Prospect.YES] * 3
    assert {each.why for each in found[:3]} == {f"{name}: it is no store"}
    assert prospects(outlook(warning(name, "it is in use"))) == [Prospect.YES] * 6


def test_variables_that_are_wrong_stop_who_reads_them() -> None:
    """Launchers set their own."""
    found = outlook(ok("variables", "fine"), failure("variables", "MASTER_PORT is 'x'"))
    assert prospects(found) == [Prospect.NO] + [Prospect.YES] * 5
    assert found[0].why == "variables: MASTER_PORT is 'x'"


def test_a_place_that_cannot_be_had_is_told_before_a_torch_without_libuv() -> None:
    found = outlook(failure("store", "a web server"), warning("libuv", "no libuv"))
    assert {(each.prospect, each.why) for each in found[:3]} == {(Prospect.NO, "store: a web server")}


def test_a_store_that_was_not_tried() -> None:
    assert prospects(outlook(without="libuv"))[:3] == [Prospect.UNKNOWN] * 3
    found = outlook(unknown("libuv", "it crashed"))
    assert [each.why for each in found[:3]] == ["it crashed"] * 3


def test_accelerate_that_is_not_installed() -> None:
    found = outlook(packages={"torch": "2"})
    assert prospects(found)[2] is Prospect.NO
    assert found[2].why == "accelerate is not installed: pip install accelerate"


@pytest.mark.parametrize(("number", "name"), [(3, "file-init"), (4, "gloo"), (5, "nccl")])
def test_what_one_finding_decides(number: int, name: str) -> None:
    for finding, prospect in (
        (failure(name, "it fails"), Prospect.NO),
        (warning(name, "not built"), Prospect.NO),
        (unknown(name, "no answer"), Prospect.UNKNOWN),
        (note(name, "good to know"), Prospect.YES),
        (ok(name, "good"), Prospect.YES),
    ):
        found = outlook(finding)
        assert prospects(found)[number] is prospect
        assert found[number].why == ("" if prospect is Prospect.YES else finding.found)
        assert all(each.prospect is Prospect.YES for each in found if each is not found[number])


def test_nccl_that_is_not_there_or_has_no_gpu() -> None:
    found = outlook(without="nccl")[5]
    assert (found.prospect, found.why) == (Prospect.NO, "this torch was built without it")
    found = outlook(ok("nccl", f"NCCL 2.27 is there; {NO_GPU}"))[5]
    assert (found.prospect, found.why) == (Prospect.NO, NO_GPU)


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
