"""What users are told of a store that an engine keeps: how it stands, and why it does not answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_line import invoke
from engines import await_that, free_ports, redis_cluster
from processes import end
from rallypoint.errors import StoreTimeoutError
from rallypoint.relay.hosting import host_relay
from rallypoint.rollcall.judgement import judge
from rallypoint.rollcall.snapshot import Replication, Standby, Upstream
from rallypoint.rollcall.words import headline
from rallypoint.stores.client.connection import RELAY_VARIABLE, STORE_VARIABLE
from rallypoint.stores.tcp import TCPStore
from rallypoint.watch.status.summary import summary
from rallypoint.watch.web.picture import picture
from rolls import part, snapshot

HERE = "127.0.0.1"
KEPT = Replication(
    engine="etcd at a:2379, b:2379, job x",
    term=3,
    leader="node-a:29500",
    standbys=(Standby("node-b:29500", 0), Standby("node-c:29500", 12)),
    records=4000,
    commit_p50=0.002,
    commit_p99=0.011,
    log_bytes=3 << 20,
    checkpoint_bytes=5 << 10,
)
AWAY = replace(KEPT, away_seconds=12.0, error=f"{KEPT.engine}: no answer: timeout", hint="look there")


def test_status_says_how_a_replicated_store_stands() -> None:
    told = snapshot(replication=KEPT)
    lines = summary(told, judge(told))
    assert (
        "engine    etcd at a:2379, b:2379, job x; leader node-a:29500, term 3 (2 failovers); "
        "commits p50 2.00 ms, p99 11.0 ms; 3.00 MiB of log since a checkpoint of 5.00 KiB"
    ) in lines
    assert "standbys  node-b:29500 (lag 0), node-c:29500 (lag 12)" in lines
    alone = snapshot(replication=replace(KEPT, standbys=()))
    assert "standbys  none: nobody would take over" in summary(alone, judge(alone))
    other = summary(snapshot(), judge(snapshot()))
    assert not [line for line in other if line.startswith(("engine", "standbys", "upstream"))]


def test_an_engine_that_does_not_answer_comes_first() -> None:
    roll = judge(snapshot(replication=AWAY))
    away = f"the engine of the store, {KEPT.engine}, has not answered for 12 s: no answer: timeout"
    assert (roll.trouble, roll.advice) == (away, "look there")
    assert headline(roll).startswith(away)
    assert "doctor --engine" in judge(snapshot(replication=replace(AWAY, hint=""))).advice
    assert not judge(snapshot(replication=replace(AWAY, away_seconds=0.5))).trouble


def test_a_relay_names_the_places_of_its_store() -> None:
    places = ("a:1", "b:1")
    told = part("node-b", upstream=Upstream(places, "b:1"))
    assert "upstream  b:1, of a:1, b:1" in summary(told, judge(told))
    lost = part("node-b", upstream=Upstream(places, "", 20.0, "a:1: refused; b:1: refused"))
    trouble = "the relay has had no connection to the store for 20 s: a:1: refused; b:1: refused"
    assert judge(lost).trouble == trouble
    assert "upstream  no connection for 20 s: a:1: refused; b:1: refused" in summary(lost, judge(lost))
    assert Upstream(("[::1]:5", "a:6")).addresses == (("::1", 5), ("a", 6))


def test_the_page_has_a_moment_since_when_the_engine_is_away() -> None:
    told = snapshot(replication=AWAY)
    shown = picture(told, judge(told))["replication"]
    assert shown["away"] == {"since": told.time - 12.0}
    assert shown["standbys"] == {"node-b:29500": 0, "node-c:29500": 12}
    assert picture(snapshot(), judge(snapshot()))["replication"] == {}


@contextmanager
def node(url: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """One process of a replicated store."""
    command = [sys.executable, "-m", "rallypoint", "serve", "--host", HERE, "--port", str(port)]
    process = subprocess.Popen([*command, "--engine", url], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "standing by" in process.stdout.readline()
        yield process
    finally:
        end(process)


def status(port: int) -> tuple[int, Any]:
    told = invoke("status", f"{HERE}:{port}", "--json")
    return told.exit_code, json.loads(told.stdout) if told.stdout else {}


@pytest.mark.slow
def test_a_replicated_store_from_its_start_to_an_engine_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = free_ports(2)
    places = [(HERE, port) for port in ports]
    with ExitStack() as stack:
        engine = stack.enter_context(redis_cluster(tmp_path))
        first = stack.enter_context(node(engine.url("told"), ports[0]))
        with TCPStore(HERE, ports[0], timeout=20, rank=0) as store:
            store.set("key", "value")
        stack.enter_context(node(engine.url("told"), ports[1]))
        await_that(lambda: "standbys" in _replication(ports[0]), lambda: "nobody stands by")
        told = _replication(ports[0])
        assert told["engine"] == f"redis at {engine.nodes[0].address}, job told"
        assert (told["term"], told["leader"]) == (1, f"{HERE}:{ports[0]}")
        assert told["standbys"] == [{"address": f"{HERE}:{ports[1]}", "lag": 0}]
        assert 0 < told["commit_p50"] <= told["commit_p99"]
        assert told["records"] >= 2
        assert told["log_bytes"] > 0
        assert "away_seconds" not in told

        relay = host_relay(places)
        stack.callback(relay.release)
        monkeypatch.setenv(STORE_VARIABLE, f"{HERE}:{ports[0]}")
        monkeypatch.setenv(RELAY_VARIABLE, f"{HERE}:{relay.port}")
        behind = stack.enter_context(TCPStore(HERE, ports[0], timeout=20, rank=1))
        behind.set("key", "value")
        first.kill()
        behind.set("other", "value")
        assert _replication(ports[1])["term"] == 2
        assert status(relay.port)[1]["snapshot"]["upstream"]["place"] == f"{HERE}:{ports[1]}"
        engine.nodes[0].pause()
        _check_away(behind, ports[1], engine.nodes[0].address)


def _replication(port: int) -> Any:
    return status(port)[1]["snapshot"]["replication"]


def _check_away(store: TCPStore, port: int, address: str) -> None:
    """The engine is paused: whoever asks hears of it."""
    away = rf"the engine of the store, redis at {address}, job told, has not answered for [\d.]+ s: no answer"
    await_that(lambda: bool(status(port)[1]["roll"]["trouble"]), lambda: "the engine is not missed")
    code, told = status(port)
    assert code == 1
    assert re.match(away, told["roll"]["headline"])
    assert told["snapshot"]["replication"]["away_seconds"] > 0
    store.set_timeout(4.0)
    with pytest.raises(StoreTimeoutError, match=rf"gave no answer within 4 s: {away}") as late:
        store.set("key", "value")
    assert "rallypoint doctor --engine" in late.value.hint
    with pytest.raises(StoreTimeoutError, match=away):
        store.wait(["never"], 4.0)
