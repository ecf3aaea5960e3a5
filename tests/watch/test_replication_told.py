"""What users are told of a store that an engine keeps: how it stands, and why it does not answer."""

from __future__ import annotations

import errno
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
import yaml

from command_line import invoke
from engines import await_that, free_ports, redis_cluster
from processes import end, serving
from rallypoint.cli.serve import serve
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import StoreTimeoutError
from rallypoint.store.connect.connection import RELAY_VARIABLE, STORE_VARIABLE
from rallypoint.store.machine.addresses import reason_of
from rallypoint.store.relay.hosting import host_relay
from rallypoint.store.replica.engines.address import EngineAddress, Tls, parse_address
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.roll import headline
from rallypoint.store.rollcall.snapshot import Replication, Standby, Upstream
from rallypoint.watch.status.views import summary
from rallypoint.watch.web.picture import JobReport, picture
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
    named = snapshot(replication=replace(KEPT, stores=("x/meeting", "x/round/0")))
    assert "          --name x/round/0" in summary(named, judge(named))
    alone = snapshot(replication=replace(KEPT, standbys=()))
    assert "standbys  none: nobody would take over" in summary(alone, judge(alone))
    other = summary(snapshot(), judge(snapshot()))
    assert not [line for line in other if line.startswith(("engine", "standbys", "stores", "upstream"))]


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
    shown = picture(told, judge(told), JobReport())["replication"]
    assert shown["away"] == {"since": told.time - 12.0}
    assert shown["standbys"] == {"node-b:29500": 0, "node-c:29500": 12}
    assert picture(snapshot(), judge(snapshot()), JobReport())["replication"] == {}


# The examples

SURVIVAL = Path(__file__).parents[2] / "examples" / "survival"


def test_the_example_for_kubernetes() -> None:
    parts = {
        (part["kind"], part["metadata"]["name"]): part["spec"]
        for part in yaml.safe_load_all((SURVIVAL / "kubernetes.yml").read_text())
    }
    store, etcd = (parts["StatefulSet", name] for name in ("rallypoint-store", "etcd"))
    for spec in (store, etcd):
        template = spec["template"]
        assert template["metadata"]["labels"] == spec["selector"]["matchLabels"]
        assert parts["Service", spec["serviceName"]]["selector"] == spec["selector"]["matchLabels"]
        (container,) = template["spec"]["containers"]
        volumes = {each["name"] for each in template["spec"].get("volumes", [])}
        volumes |= {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])}
        assert {each["name"] for each in container["volumeMounts"]} == volumes
    (container,) = store["template"]["spec"]["containers"]
    engine = _check_serve([*container["command"], *container["args"]])
    nodes = [host for host, _ in engine.hosts]
    assert nodes == [f"etcd-{number}.etcd" for number in range(etcd["replicas"])]
    (container,) = etcd["template"]["spec"]["containers"]
    assert {"--auto-compaction-mode=periodic", "--auto-compaction-retention=5m"} <= set(container["args"])


def test_the_example_for_systemd() -> None:
    unit = (SURVIVAL / "rallypoint-store.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert _check_serve(line.split()).tls == Tls(ca="/etc/rallypoint/etcd-ca.pem")


def _check_serve(words: list[str]) -> EngineAddress:
    """The engine of a command `rallypoint serve` whose options are all known."""
    program, command, *rest = words
    assert (program.rpartition("/")[2], command) == ("rallypoint", "serve")
    given = dict(re.findall(r"(--\w+)[ =](\S+)", " ".join(rest)))
    assert {"--host", "--port", "--engine"} == set(given) <= set(serve.options)
    return parse_address(given["--engine"], {})


# Real stores


def test_a_client_behind_a_relay_hears_of_all_places_when_nobody_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody = free_ports(1)[0]
    with serving("legacy", sys.stderr) as server:
        relay = host_relay([(HERE, server.port), (HERE, nobody)])
        monkeypatch.setenv(STORE_VARIABLE, f"{HERE}:{server.port}")
        monkeypatch.setenv(RELAY_VARIABLE, f"{HERE}:{relay.port}")
        store = TCPStore(HERE, server.port, timeout=20, rank=0)
    try:
        store.set_timeout(2.0)
        with pytest.raises(StoreTimeoutError) as late:
            store.set("key", "value")
        for port in (server.port, nobody):
            assert f"{HERE}:{port}: {reason_of(errno.ECONNREFUSED)}" in late.value.message
    finally:
        store.close()
        relay.release()


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


def status(port: int, *options: str) -> tuple[int, Any]:
    told = invoke("status", f"{HERE}:{port}", "--json", *options)
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
        shown = invoke("status", f"{HERE}:{ports[0]}").stdout
        assert f"process {first.pid} on" in shown
        assert "received 0 B" not in shown
        told = invoke("status", f"{HERE}:{ports[0]}", "--name", "nope")
        assert told.exit_code == 1
        assert told.stdout.startswith("there is no store named nope here")

        relay = host_relay(places, store="job/round/1")
        stack.callback(relay.release)
        monkeypatch.setenv(STORE_VARIABLE, f"{HERE}:{ports[0]}")
        monkeypatch.setenv(RELAY_VARIABLE, f"{HERE}:{relay.port}")
        behind = stack.enter_context(TCPStore(HERE, ports[0], 2, timeout=20, wait_for_workers=False, rank=1))
        behind.set("key", "value")
        first.kill()
        with pytest.raises(StoreTimeoutError, match="1 of 2 ranks joined; missing: 0"):
            behind.wait(["never"], 8.0)
        assert _replication(ports[1])["term"] == 2
        assert _replication(ports[1])["stores"] == ["job/round/1"]
        assert status(ports[1], "--name", "job/round/1")[1]["roll"]["missing"] == [0]
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
