"""What Prometheus is told, and the files for it in examples/monitoring."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.snapshot import Relay, Replication, Snapshot, Standby
from rallypoint.watch.web.metrics import MOST_JOBS, MOST_NAMED, encode
from web_stores import job

pytestmark = pytest.mark.windows

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
GUIDE = ROOT / "docs" / "guides" / "monitoring.md"
EIGHT = {"node-a": 4, "node-b": 4}
STALLED = job(EIGHT, late=[7], gone={3: "reset"}, waits={0: ("key", 41.5)}, barrier=("step", [4]))

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(snapshot: Snapshot) -> Samples:
    content, media_type = encode((snapshot, judge(snapshot)))
    assert media_type.startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(content.decode())
        for sample in family.samples
    }


def labels(**values: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(values.items()))


def test_ranks_and_waits() -> None:
    told = samples_of(STALLED)
    assert told["rallypoint_up", ()] == 1
    assert told["rallypoint_ranks_expected", ()] == 8
    assert told["rallypoint_ranks_joined", ()] == 6
    assert told["rallypoint_ranks_missing", ()] == 2
    states = {"joined": 4, "waiting": 2, "late": 1, "gone": 1, "unseen": 0}
    for state, count in states.items():
        assert told["rallypoint_ranks", labels(state=state)] == count
    assert told["rallypoint_missing_rank", labels(rank="7", host="node-b")] == 1
    assert told["rallypoint_missing_rank", labels(rank="3", host="node-a")] == 1
    assert told["rallypoint_longest_wait_seconds", ()] == 41.5
    assert told["rallypoint_stalled_seconds", ()] == 41
    assert told["rallypoint_awaited_keys", ()] == 2
    assert told["rallypoint_barriers", ()] == 1
    told = samples_of(replace(job(EIGHT), stalled_seconds=3600.0))
    assert told["rallypoint_stalled_seconds", ()] == 0
    assert told["rallypoint_longest_wait_seconds", ()] == 0


def test_the_store() -> None:
    lost = Relay(9, "10.0.0.2:1", 5.0, False, None)
    told = samples_of(replace(STALLED, relays=(lost,), queue_count=3, accepted=11))
    assert told["rallypoint_connections", ()] == 6
    assert told["rallypoint_connections_accepted_total", ()] == 11
    assert told["rallypoint_bytes_received_total", ()] == 6_000
    assert told["rallypoint_bytes_sent_total", ()] == 12_000
    assert told["rallypoint_keys", ()] == 6
    assert told["rallypoint_queues", ()] == 3
    assert told["rallypoint_stored_bytes", ()] == 288
    assert told["rallypoint_errors_total", ()] == 1
    assert told["rallypoint_relays", labels(state="lost")] == 1
    assert told["rallypoint_operations_total", labels(operation="SET")] == 18
    assert told["rallypoint_turn_seconds", labels(quantile="0.5")] == 2.1e-5
    assert told["rallypoint_turn_seconds", labels(quantile="0.99")] == 8.4e-5
    assert told["rallypoint_store_info", labels(kind="server", version="0.1.0", backend="libuv")] == 1


def test_what_is_not_known_is_left_out() -> None:
    unplanned = replace(STALLED, plan="", clients=(), gone=(), turn_p50=-1.0, turn_p99=-1.0)
    names = {name for name, _ in samples_of(unplanned)}
    assert "rallypoint_ranks_expected" not in names
    assert "rallypoint_turn_seconds" not in names
    assert "rallypoint_ranks_missing" in names


def test_openmetrics_for_who_prefers_it() -> None:
    content, media_type = encode((STALLED, judge(STALLED)), "application/openmetrics-text; version=1.0.0")
    assert media_type.startswith("application/openmetrics-text")
    families = read_openmetrics(content.decode())  # type: ignore[no-untyped-call]
    names = {family.name for family in families}
    assert {"rallypoint_up", "rallypoint_ranks", "rallypoint_operations", "rallypoint_store"} <= names


def test_no_job_makes_more_series_than_another() -> None:
    """Ranks, keys and jobs can be many: only the first are named."""
    rosters = tuple((f"job-{number}", roster()) for number in range(60))
    waits = {each: (f"key/{each}", 1.0) for each in range(400)}
    large = job({"node-a": 3000}, late=range(500, 900), waits=waits)
    told = samples_of(replace(large, rosters=rosters))
    assert len([name for name, _ in told if name == "rallypoint_missing_rank"]) == MOST_NAMED
    assert len([name for name, _ in told if name == "rallypoint_round"]) == MOST_JOBS
    assert len(told) < 100


def roster() -> str:
    nobody: list[Any] = []
    told = {"round": 2, "complete": False, "least": 2, "closed": ""}
    return json.dumps({**told, **dict.fromkeys(("members", "present", "waiting", "lost", "told"), nobody)})


# examples/monitoring

METRIC = re.compile(r"\brallypoint_[a-z0-9_]+")


def alerts() -> list[dict[str, Any]]:
    content = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return content


def expressions(content: object) -> Iterator[str]:
    """All queries in a dashboard."""
    if isinstance(content, dict):
        for name, value in content.items():
            if name in ("expr", "query", "definition") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(content, list):
        for each in content:
            yield from expressions(each)


KEPT = Replication(
    "etcd at a", 3, "a:1", (Standby("b:1", 7),), commit_p50=0.001, commit_p99=0.01, away_seconds=12.0
)


def test_a_replicated_store() -> None:
    told = samples_of(replace(STALLED, replication=KEPT))
    assert told["rallypoint_replication_info", labels(engine="etcd at a", leader="a:1")] == 1
    assert told["rallypoint_replication_term", ()] == 3
    assert told["rallypoint_replication_failovers_total", ()] == 2
    assert told["rallypoint_replication_lag_records", labels(standby="b:1")] == 7
    assert told["rallypoint_replication_commit_seconds", labels(quantile="0.99")] == 0.01
    assert told["rallypoint_replication_engine_away_seconds", ()] == 12
    assert not [name for name, _ in samples_of(STALLED) if "replication" in name]


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The names and labels that a store tells which has a bit of everything."""
    relays = (Relay(9, "10.0.0.2:1", 5.0, False, None),)
    rosters = (("j", roster()),)
    return {
        name for name, _ in samples_of(replace(STALLED, relays=relays, rosters=rosters, replication=KEPT))
    }


def test_every_metric_and_label_in_the_queries_exists(known: set[str]) -> None:
    queries = [*expressions(dashboard()), *(rule["expr"] for rule in alerts())]
    used = {name for query in queries for name in METRIC.findall(query)}
    assert used <= known
    assert len(used) > 15
    told = {name for _, found in samples_of(STALLED) for name, _ in found} | {"job", "instance"}
    selected = {name for query in queries for name in re.findall(r"[{,]\s*(\w+)=", query)}
    by = [names for query in queries for names in re.findall(r"by \(([^)]*)\)", query)]
    grouped = {name for names in by for name in names.split(", ")}
    assert selected | grouped <= told


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_alerts_say_what_happened_and_what_to_do(known: set[str]) -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) >= 5
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(METRIC.findall(json.dumps(rule))) <= known, "also in its texts"
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_the_guide_names_every_metric_and_every_alert(known: set[str]) -> None:
    text = GUIDE.read_text()
    assert set(METRIC.findall(text)) == known
    assert set(re.findall(r"`(Rallypoint\w+)`", text)) == {rule["alert"] for rule in alerts()}
    content = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert content["rule_files"] == ["alerts.yml"]
    assert content["scrape_configs"][0]["job_name"] == "rallypoint"
