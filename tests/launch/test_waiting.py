"""What a launcher reports while it waits for the endpoint or for other machines, and when."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import free_port, job
from pods import Pod, two_pods
from processes import hand_over
from rallypoint.errors import ConnectError
from rallypoint.launch import reports
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.handover import VARIABLE
from rallypoint.launch.rendezvous import waiting
from rallypoint.launch.rendezvous.waiting import Waiting, await_host, connecting_state, next_report
from rallypoint.store.connect.connecting import Attempts, connect
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Role
from raw import SECONDS, until

RUN = ("-m", "rallypoint", "run")


def test_lines_come_after_10_30_and_60_seconds_and_then_every_minute() -> None:
    due = [next_report(0.0)]
    while len(due) < 6:
        due.append(next_report(due[-1]))
    assert due == [10, 30, 60, 120, 180, 240]
    assert next_report(9.9) == 10
    assert next_report(61.5) == 120


def state_of(host: str, port: int) -> str:
    """The state after a vain attempt to connect."""
    attempts = Attempts(host, port)
    with pytest.raises(ConnectError):
        connect(host, port, Deadline(0.3), who_am_i(Role.AGENT), attempts=attempts)
    return connecting_state([attempts], 590.4)


def test_a_port_at_which_nothing_listens() -> None:
    port = free_port()
    assert state_of("127.0.0.1", port) == (
        f"cannot connect to 127.0.0.1:{port}: connection refused. Is a launcher running there, on this port? "
        "(590 s left)"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse when a backlog is full")
def test_a_machine_that_does_not_answer() -> None:
    """A full backlog drops connections, as a firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        place = full.getsockname()
        with socket.create_connection(place):
            assert state_of(*place) == f"no answer from 127.0.0.1:{place[1]}. A firewall? (590 s left)"


def test_a_program_that_accepts_but_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = silent.getsockname()
        text = f"127.0.0.1:{place[1]} accepts connections but does not answer. Is it a Rallypoint launcher?"
        assert state_of(*place) == f"{text} (590 s left)"


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert state_of("node-x", 1) == "cannot resolve node-x. Check the spelling or /etc/hosts (590 s left)"


def test_several_endpoints_are_listed_with_their_reasons() -> None:
    refused, untried = Attempts("node-a", 1), Attempts("node-b", 2)
    refused.note("node-a:1", ConnectionRefusedError(111, "Connection refused"))
    untried.begin([(socket.AF_INET, ("10.0.0.2", 2))])
    assert connecting_state([refused, untried], 9.0) == (
        "no store answers at node-a:1 (Connection refused), node-b:2 (no answer). Does `rallypoint serve "
        "--engine` run there? (9 s left)"
    )


def test_a_line_is_printed_once_and_the_launcher_can_read_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = iter((0.0, 1e9))
    monkeypatch.setattr(waiting, "next_report", lambda _: next(due))
    monkeypatch.setattr(waiting, "_UPDATE_SECONDS", 0.01)
    hand_over(monkeypatch, tmp_path)
    updates: list[int] = []

    def describe() -> str:
        updates.append(1)
        return f"waiting for node-b, {len(updates)} s left"

    with Waiting(describe, at_start=False):
        until(lambda: len(updates) > 5, "the state is updated")
        assert reports.Reports(tmp_path).read(reports.WAITING).startswith("waiting for node-b")
    assert caplog.messages == ["rallypoint: waiting for node-b, 1 s left"]
    assert reports.Reports(tmp_path).read(reports.WAITING) == ""


def test_ctrl_c_without_a_launcher_prints_the_state(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(waiting, "_UPDATE_SECONDS", 0.01)
    updates: list[int] = []

    def describe() -> str:
        updates.append(1)
        return "waiting for node-b"

    def wait() -> None:
        with Waiting(describe, at_start=False):
            until(lambda: len(updates) > 1, "the state is known")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert caplog.messages == ["rallypoint: waiting for node-b"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_is_told_to_end_says_what_it_waited_for(
    tmp_path: Path, number: signal.Signals
) -> None:
    endpoint = f"localhost:{free_port()}"
    with job(tmp_path) as running:
        agent = running.start("", ["--nnodes=2", f"--rdzv-endpoint={endpoint}"], command=RUN)
        running.await_text(f"rallypoint: waiting for 1 of 2 machines at {endpoint} (connected: ")
        agent.send_signal(number)
        assert running.wait() == [-number]
        assert len(re.findall(r"waiting for 1 of 2 machines at .* s left", running.log())) == 2


@pytest.mark.slow
def test_a_job_with_another_id_is_named(tmp_path: Path) -> None:
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    with job(tmp_path) as running:
        for name in "ab":
            running.start("", ["--nnodes=2", "--join-timeout=15", f"--rdzv-id={name}", endpoint], command=RUN)
        assert running.wait() == [1, 1]
        for number, (own, other) in enumerate([("a", "b"), ("b", "a")]):
            rival = (
                f"another job is using this endpoint: ID {other} (1 of 2 machines); this job's ID is {own}"
            )
            assert rival in running.log(number), running.logs()
        assert "RendezvousTimeoutError: 1 of 2" in running.log(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--nnodes", "23"),
        ("--nnodes", "21"),
        ("--max-restarts", "01"),
        ("--spares", "01"),
        ("--relay", ("auto", "off")),
    ],
)
def test_launchers_with_different_settings_both_fail(
    tmp_path: Path, option: str, values: tuple[str, str] | str
) -> None:
    endpoint = f"localhost:{free_port()}"
    with job(tmp_path) as running:
        for number, value in enumerate(values):
            running.start("", ["--nnodes=2", f"--rdzv-endpoint={endpoint}", f"{option}={value}"], command=RUN)
            if number == 0:
                running.await_text("waiting for 1 of 2 machines")  # one that is to be alone waits for nobody
        assert running.wait() == [1, 1]
        for number in (0, 1):
            for value in values:
                assert f"has {option}={value.replace('auto', 'on')}" in running.log(number)
            assert f"hint: start every machine with the same {option}" in running.log(number)


# Endpoints whose name is known late, or still leads to another machine: as in Kubernetes --------------------

HOST = "job-0.training"
UNKNOWN = f"rallypoint: cannot resolve {HOST}. Check the spelling or /etc/hosts"

AWAIT = f"""
from rallypoint.launch.rendezvous import waiting
waiting.next_report = lambda elapsed: elapsed + 0.1
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.rendezvous.waiting import await_host
from rallypoint.store.connect.deadline import Deadline
print(await_host(Endpoint("{HOST}", 29400), Deadline({SECONDS})))
"""


def test_a_name_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _unknown_until(lambda: False))
    began = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        await_host(Endpoint(HOST, 29400), Deadline(0.3))
    assert time.monotonic() - began < SECONDS
    assert f"the name {HOST} never resolved" in caught.value.message
    assert "publishNotReadyAddresses" in caught.value.hint


def test_the_first_machine_waits_for_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setattr(socket, "getaddrinfo", _unknown_until(lambda: time.monotonic() > began + 0.2))
    assert await_host(Endpoint(HOST, 29400), Deadline(SECONDS))


def _unknown_until(is_known: Callable[[], bool]) -> Callable[..., Any]:
    ask = socket.getaddrinfo

    def answer(host: str, *words: Any, **more: Any) -> Any:
        if host == HOST and not is_known():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask("127.0.0.1" if host == HOST else host, *words, **more)

    return answer


def test_a_name_that_still_leads_to_another_pod(tmp_path: Path) -> None:
    """As that of a pod that was replaced: it is asked again, as long as nothing answers there."""
    with two_pods(tmp_path) as pods, _python(pods[0], AWAIT) as first:
        assert first.stderr is not None
        assert UNKNOWN in first.stderr.readline()
        pods[0].learns(HOST, pods[1].address)
        while UNKNOWN in (line := first.stderr.readline()):
            pass
        assert f"cannot connect to {HOST}:29400: connection refused" in line
        pods[0].learns(HOST, pods[0].address)
        assert first.communicate(timeout=SECONDS)[0] == "True\n"


def _python(pod: Pod, program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*pod.prefix, sys.executable, "-c", program],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
