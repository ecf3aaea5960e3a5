"""The figures of a store for Prometheus: the same as those of the page, under names that stay.

The number of series is bounded, whatever a job does: only the first missing ranks are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from rallypoint.store.rollcall.roll import RankState, Roll
from rallypoint.store.rollcall.snapshot import Replication, Snapshot
from rallypoint.text import shown
from rallypoint.watch.web.picture import connections

MOST_NAMED: Final = 16
"""How many missing ranks have a series of their own."""

MOST_JOBS: Final = 16


def encode(found: tuple[Snapshot, Roll] | None, accept: str = "") -> tuple[bytes, str]:
    """The answer to a scrape, in the format that it prefers, and the media type."""
    registry = CollectorRegistry()
    registry.register(_Figures(found))
    encoder, media_type = choose_encoder(accept)
    return encoder(registry), media_type


class _Figures(Collector):
    """One moment of a store; None if the store does not answer."""

    def __init__(self, found: tuple[Snapshot, Roll] | None) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        yield _gauge("up", "Whether the store answers", float(self._found is not None))
        if self._found is None:
            return
        snapshot, roll = self._found
        yield from _of_ranks(roll)
        yield from _of_waits(snapshot, roll)
        yield from _of_store(snapshot)
        yield from _of_operations(snapshot)
        if snapshot.replication is not None:
            yield from _of_replication(snapshot.replication)


def _of_ranks(roll: Roll) -> Iterator[Metric]:
    if roll.expected >= 0:
        yield _gauge("ranks_expected", "Ranks that the job has, where that is known", roll.expected)
    counts = dict.fromkeys(RankState, 0)
    for each in roll.ranks:
        counts[each.state] += 1
    rows = [((state.value,), count) for state, count in counts.items()]
    yield _gauges("ranks", "Ranks by how they stand", ("state",), rows)
    yield _gauge("ranks_joined", "Ranks that are here, waiting or not", roll.joined)
    yield _gauge("ranks_missing", "Ranks that are expected and not here", len(roll.missing))
    missing = [((str(each.rank), shown(each.host)), 1.0) for each in roll.missing[:MOST_NAMED]]
    help_text = f"1 for each missing rank; the first {MOST_NAMED} are named"
    yield _gauges("missing_rank", help_text, ("rank", "host"), missing)
    yield _gauge("clients_unknown", "Clients that may be ranks, but nobody knows which", roll.unknown)
    rounds = [((shown(each.job),), each.round) for each in roll.meetings[:MOST_JOBS]]
    yield _gauges("round", "How often the job was started again", ("job_id",), rounds)


def _of_waits(snapshot: Snapshot, roll: Roll) -> Iterator[Metric]:
    longest = max((each.seconds for each in roll.awaited), default=0.0)
    yield _gauge("awaited_keys", "Keys and barriers that somebody waits for", len(roll.awaited))
    yield _gauge("longest_wait_seconds", "Of all that wait, the longest; 0: nobody waits", max(longest, 0.0))
    stalled = snapshot.stalled_seconds if roll.awaited else 0.0
    yield _gauge("stalled_seconds", "For how long nobody has progressed while somebody waits", stalled)
    yield _gauge("barriers", "Barriers at which somebody waits", len(roll.gatherings))


def _of_store(snapshot: Snapshot) -> Iterator[Metric]:
    about = {name: shown(getattr(snapshot, name)) for name in ("kind", "version", "backend")}
    yield InfoMetricFamily("rallypoint_store", "What answers", about)
    started = snapshot.time - snapshot.seconds
    yield _gauge("start_time_seconds", "When the store was started, by its clock", round(started))
    yield _gauge(
        "connections", "Clients, those behind relays included, tools excluded", connections(snapshot)
    )
    present = sum(each.present for each in snapshot.relays)
    relays = [(("present",), present), (("lost",), len(snapshot.relays) - present)]
    yield _gauges("relays", "Relays of this store", ("state",), relays)
    workers = len(snapshot.own_workers)
    yield _gauge("workers", "Processes of the store that serve its clients, besides its first one", workers)
    yield _gauge("keys", "Keys with a value", snapshot.key_count)
    yield _gauge("queues", "Keys with a queue", snapshot.queue_count)
    yield _gauge("stored_bytes", "Bytes of all values", snapshot.stored_bytes)
    yield _counter("connections_accepted", "Connections since the start", snapshot.accepted)
    yield _counter("bytes_received", "Bytes that clients have sent", snapshot.received)
    yield _counter("bytes_sent", "Bytes that clients were sent", snapshot.sent)
    yield _counter("errors", "Connections that were refused or closed for a reason", snapshot.error_count)


def _of_operations(snapshot: Snapshot) -> Iterator[Metric]:
    counter = CounterMetricFamily("rallypoint_operations", "Requests by kind", labels=("operation",))
    for each in snapshot.operations:
        counter.add_metric((shown(each.name),), each.count)
    yield counter
    turns = (("0.5", snapshot.turn_p50), ("0.99", snapshot.turn_p99))
    timed = [((quantile,), seconds) for quantile, seconds in turns if seconds >= 0]
    help_text = "Seconds that a turn of the store's loop took, of late; no answer takes longer than a turn"
    yield _gauges("turn_seconds", help_text, ("quantile",), timed)


def _of_replication(kept: Replication) -> Iterator[Metric]:
    about = {"engine": shown(kept.engine), "leader": shown(kept.leader)}
    yield InfoMetricFamily("rallypoint_replication", "The engine that keeps the store, and who leads", about)
    yield _gauge("replication_term", "The term of the leader", kept.term)
    yield _counter("replication_failovers", "How often the lead has changed", kept.failovers)
    yield _counter("replication_records", "Records of the log, from its beginning", kept.records)
    lags = [((shown(each.address),), each.lag) for each in kept.standbys[:MOST_NAMED]]
    yield _gauge("replication_standbys", "Processes that would take over", len(kept.standbys))
    yield _gauges("replication_lag_records", "Records that a standby has not read", ("standby",), lags)
    commits = (("0.5", kept.commit_p50), ("0.99", kept.commit_p99))
    timed = [((quantile,), seconds) for quantile, seconds in commits if seconds >= 0]
    help_text = "Seconds until the engine had a record, in this term"
    yield _gauges("replication_commit_seconds", help_text, ("quantile",), timed)
    yield _gauge("replication_log_bytes", "Bytes of the log since the last checkpoint", kept.log_bytes)
    yield _gauge("replication_checkpoint_bytes", "Bytes of the last checkpoint", kept.checkpoint_bytes)
    away = max(kept.away_seconds, 0.0)
    yield _gauge("replication_engine_away_seconds", "For how long the engine has not answered", away)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rallypoint_{name}", text, value)


def _gauges(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"rallypoint_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"rallypoint_{name}", text, value)
