"""Results of `rallypoint bench`: through JSON and back, what is no result, ratios, spreads, and growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench_results import full_results, make_entry, make_record, make_results
from benchmarks.results import costs_per_rank, exponent, from_json, read
from rallypoint.bench.results import Entry, Sample, spread, to_json
from rallypoint.errors import UsageError

# Through JSON and back


def test_a_full_run_comes_back_from_json_as_it_was() -> None:
    results = full_results()
    results.interrupted = True
    results.records[0].entries["torch-legacy"].fault = "it ended early"
    document = to_json(results)
    assert from_json(document, "a file") == results
    assert to_json(from_json(document, "a file")) == document


def test_the_document_has_what_follows_from_the_rounds() -> None:
    record = make_record("get", "rate", {"torch-libuv": [10.0, 10.0, 10.0], "redis": [20.0, 30.0, 40.0]})
    document = json.loads(to_json(make_results(record)))
    summary = document["records"][0]["entries"]["redis"]["summary"]
    assert summary["value"] == {"lower": 25.0, "median": 30.0, "upper": 35.0}
    assert summary["against"] == "torch-libuv"
    assert summary["ratio"] == {"lower": 2.5, "median": 3.0, "upper": 3.5}


# What is no result


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 2),
        (("records",), None),
        (("records", 0, "unit"), "speed"),
        (("records", 0, "entries", "redis", "samples", 0, "value"), None),
    ],
)
def test_what_is_no_result_is_told_by_the_name_of_its_file(path: tuple[Any, ...], value: object) -> None:
    document = json.loads(to_json(make_results(make_record("get", "rate", {"redis": [1.0]}))))
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    for text in ("", "[]", json.dumps(document)):
        with pytest.raises(UsageError, match=r"result\.json is no result") as caught:
            from_json(text, "result.json")
        assert "--json FILE" in caught.value.hint


def test_a_file_is_read_and_one_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with pytest.raises(UsageError, match="cannot read"):
        read(path)
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read"):
        read(path)
    path.write_text(to_json(full_results()))
    assert read(path) == full_results()


# Spreads


def test_a_figure_that_was_not_measured_is_none_and_extras_are_figures() -> None:
    entry = Entry("redis", [Sample(1.0, extras={"messages": 3.0}), Sample(2.0, p50=0.5)])
    assert entry.figure("cpu") is None
    assert entry.figure("messages") == 3.0
    assert entry.figure("p50") == 0.5
    assert Entry("redis").spread() is None


def test_a_load_that_takes_a_core_holds_a_server_back_that_does_not() -> None:
    for load, server, held in ((0.95, 0.7, True), (0.95, 0.95, False), (0.5, 0.3, False)):
        record = make_record("get", "rate", {})
        record.entries["redis"] = make_entry("redis", [1.0], load_share=load, server_share=server)
        assert bool(make_results(record).held_back()) is held
    assert not make_results(make_record("get", "rate", {"redis": [1.0]})).held_back()


# Ratios


def test_more_of_a_rate_and_less_of_a_time_is_better() -> None:
    values = {"redis": [20.0, 40.0], "torch-libuv": [10.0, 10.0]}
    rates, times = make_record("get", "rate", values), make_record("init", "time", values)
    assert rates.ratio(rates.entries["redis"]) == spread([2.0, 4.0])
    assert times.ratio(times.entries["redis"]) == spread([0.5, 0.25])


def test_a_ratio_is_that_of_the_same_round() -> None:
    """The first target was fast when the other one was slow: medians alone would say something else."""
    record = make_record("get", "rate", {"a": [1.0, 10.0, 2.0], "torch-libuv": [1.0, 2.0, 10.0]})
    assert record.ratio(record.entries["a"]) == spread([1.0, 5.0, 0.2])


def test_rounds_that_were_not_finished_have_no_ratio() -> None:
    record = make_record("get", "rate", {"torch-libuv": [1.0, 2.0]})
    assert record.ratio(make_entry("a", [0.0, 6.0, 4.0])) == spread([3.0])
    assert record.ratio(Entry("c")) is None


def test_the_baseline_is_torch_if_that_was_measured() -> None:
    for targets, baseline in (
        (["redis", "rallypoint-libuv", "torch-legacy", "torch-libuv"], "torch-libuv"),
        (["redis", "rallypoint-libuv", "torch-legacy"], "torch-legacy"),
        (["redis", "rallypoint-libuv"], "rallypoint-libuv"),
        (["redis", "rallypoint-relay"], "redis"),
    ):
        record = make_record("get", "rate", {target: [1.0] for target in targets})
        assert record.baseline is record.entries[baseline]
    record = make_record("get", "rate", {"torch-libuv": [], "redis": [1.0]})
    assert record.baseline is record.entries["redis"]  # which alone has samples
    assert make_record("get", "rate", {"redis": []}).baseline is None


# Growth


@pytest.mark.parametrize("power", [1.0, 2.0, 0.0])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    sizes = (1_024, 4_096, 16_384, 98_304)
    records = [make_record("init", "time", {"redis": [3e-4 * size**power]}, size) for size in sizes]
    costs = costs_per_rank(make_results(*records), "init", "redis")
    assert costs == pytest.approx({size: 3e-4 * size ** (power - 1) for size in sizes})
    assert exponent(costs) == pytest.approx(power, abs=1e-9)


def test_costs_per_operation_are_costs_per_rank_and_those_not_measured_are_left_out() -> None:
    records = [make_record("init", "time", {"torch-libuv": []}, size) for size in (10, 100)]
    for record in records:
        samples = [Sample(1.0, cpu=2.0, memory=memory) for memory in (700.0, 5.0)]
        record.entries["redis"] = Entry("redis", samples)
    results = make_results(*records)
    assert costs_per_rank(results, "init", "redis", "cpu") == {10: 2.0, 100: 2.0}
    assert costs_per_rank(results, "init", "redis", "memory") == {10: 700.0, 100: 700.0}
    for target, figure in (("torch-libuv", "value"), ("unheard-of", "value"), ("redis", "p50")):
        assert costs_per_rank(results, "init", target, figure) == {}
