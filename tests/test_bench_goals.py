"""The goals of the project: each is met, missed or not measured, by the figures that it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from bench_results import full_results, make_entry, make_record, make_results
from rallypoint.bench.goals import AGAINST_TORCH, COMPARED_RANKS, MOST_RANKS, Verdict, verdicts
from rallypoint.bench.results import Entry, Record, Results, Sample

RATE_GOALS = [(name, wanted) for name, ranks, wanted in AGAINST_TORCH if not ranks]


def find(results: Results, start: str, part: str = "") -> Verdict:
    """The only verdict whose goal starts so, and has that in it."""
    found = [each for each in verdicts(results) if each.goal.startswith(start) and part in each.goal]
    assert len(found) == 1, found
    return found[0]


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    found = verdicts(make_results())
    assert len({each.goal for each in found}) == len(found) == 24
    assert {each.met for each in found} == {None}
    assert {each.word for each in found} == {"not measured"}


def test_a_full_run_measures_all_goals() -> None:
    found = verdicts(full_results())
    assert {each.met for each in found} == {True}
    assert all(each.measured != "-" for each in found)


def test_a_ratio_to_torch_is_met_from_the_wanted_one_on() -> None:
    for name, wanted in RATE_GOALS:
        for factor, met in ((1.0, True), (0.99, False)):
            values = {"rallypoint-libuv": [100 * wanted * factor], "torch-libuv": [100.0]}
            verdict = find(make_results(make_record(name, "rate", values)), f"{name}:", "against")
            assert (verdict.met, verdict.word) == (met, "met" if met else "not met")


@pytest.mark.parametrize("name", ["init", "barrier"])
def test_of_a_time_less_is_better_and_only_that_size_counts(name: str) -> None:
    values = {"rallypoint-libuv": [1.0], "torch-libuv": [2.0]}
    verdict = find(
        make_results(make_record(name, "time", values, COMPARED_RANKS)), f"{name} at", "against torch-libuv"
    )
    assert (verdict.met, verdict.measured) == (True, "2.00x")
    small = make_results(make_record(name, "time", values, 1_024))
    assert find(small, f"{name} at", "against torch-libuv").met is None


def test_a_goal_without_a_size_is_about_the_largest() -> None:
    records = [
        make_record("cancel", "rate", {"rallypoint-libuv": [ours], "torch-libuv": [1.0]}, ranks)
        for ranks, ours in ((2_000, 60.0), (1_000, 40.0))
    ]
    assert find(make_results(*records), "cancel:").met is True


def test_the_median_of_the_rounds_decides_and_the_quartiles_are_told() -> None:
    values = {"rallypoint-libuv": [1.0, 4.0, 4.2, 4.4, 90.0], "torch-libuv": [1.0] * 5}
    verdict = find(make_results(make_record("get-pipelined", "rate", values)), "get-pipelined")
    assert (verdict.met, verdict.measured) == (True, "4.20x (4.00 to 4.40)")


def test_a_server_that_the_load_held_back_is_told() -> None:
    record = make_record("get", "rate", {"torch-libuv": [1.0]})
    record.entries["rallypoint-libuv"] = make_entry(
        "rallypoint-libuv", [0.5], load_share=0.99, server_share=0.5
    )
    assert find(make_results(record), "get:", "against").measured == "0.50x; the load generator held it back"


def test_a_target_that_failed_has_no_verdict() -> None:
    record = make_record("get", "rate", {"rallypoint-libuv": [1.0], "torch-libuv": []})
    record.entries["torch-libuv"].fault = "it ended early"
    assert find(make_results(record), "get:", "against").met is None


# Relays


def _barrier(name: str, figures: Mapping[str, tuple[float, float]]) -> Record:
    """CPU time and messages of targets."""
    record = make_record(name, "time", {}, COMPARED_RANKS)
    for target, (cpu, messages) in figures.items():
        record.entries[target] = Entry(target, [Sample(1.0, cpu=cpu, extras={"messages": messages})])
    return record


@pytest.mark.parametrize("name", ["barrier", "barrier-trickle"])
def test_relays_save_cpu_time_and_messages(name: str) -> None:
    figures = {"rallypoint-libuv": (50e-6, 600.0), "rallypoint-relay": (10e-6, 101.0)}
    results = make_results(_barrier(name, figures))
    assert find(results, f"{name} at", "CPU time").met is True
    verdict = find(results, f"{name} at", "messages")
    assert (verdict.met, verdict.measured) == (False, "5.94x")


def _one(name: str, direct: Iterable[float | None], relayed: Iterable[float | None]) -> Record:
    record = make_record(name, "time", {})
    for target, rounds in (("rallypoint-libuv", direct), ("rallypoint-relay", relayed)):
        record.entries[target] = Entry(target, [Sample(1.0, p50=p50) for p50 in rounds])
    return record


@pytest.mark.parametrize("name", ["one-get", "one-set", "one-add"])
def test_what_a_relay_adds_is_told_round_by_round(name: str) -> None:
    """Added are 100, 140 and 160 us; the difference of the medians is 160 us, which would be too much."""
    good = _one(name, [50e-6, 500e-6, 200e-6], [150e-6, 640e-6, 360e-6])
    verdict = find(make_results(good), name)
    assert (verdict.met, verdict.measured) == (True, "140 us (120 to 150 us)")
    bad = _one(name, [50e-6], [201e-6])
    assert find(make_results(bad), name).met is False
    assert find(make_results(_one(name, [None], [1.0])), name).met is None


# The largest job


def _largest(**seconds: float) -> Results:
    record = make_record("init", "time", {}, MOST_RANKS)
    for backend, whole in seconds.items():
        target = f"rallypoint-{backend}"
        record.entries[target] = Entry(target, [Sample(1.0, extras={"whole_seconds": whole})])
    return make_results(record)


def test_the_largest_job_counts_with_the_start_of_its_processes() -> None:
    """Without relays, if that was measured."""
    for seconds, target, met in (
        ({"relay": 59.0}, "rallypoint-relay", True),
        ({"relay": 61.0}, "rallypoint-relay", False),
        ({"relay": 61.0, "libuv": 59.0}, "rallypoint-libuv", True),
        ({"relay": 59.0, "libuv": 61.0}, "rallypoint-libuv", False),
    ):
        verdict = find(_largest(**seconds), "init at 98,304")
        assert verdict.goal.endswith(target)
        assert verdict.met is met


# Growth


@pytest.mark.parametrize("name", ["init", "barrier"])
@pytest.mark.parametrize("target", ["rallypoint-libuv", "rallypoint-legacy", "rallypoint-relay"])
def test_times_are_to_grow_no_faster_than_the_ranks(target: str, name: str) -> None:
    for exponent, met in ((1.0, True), (1.09, True), (1.11, False)):
        times = {size: 1e-4 * size**exponent for size in (1_024, 4_096, 16_384)}
        records = [make_record(name, "time", {target: [time]}, size) for size, time in times.items()]
        verdict = find(make_results(*records), f"{name}: exponent", target)
        assert verdict.met is met
        assert verdict.measured == f"{exponent:.2f} from 1,024 to 16,384 ranks"
