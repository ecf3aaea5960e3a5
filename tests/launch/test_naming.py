"""Endpoints whose name is known late, or still leads to another machine: as in Kubernetes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import DONE, TRAIN, job
from pods import Pod, two_pods
from rallypoint.errors import ConnectError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.rendezvous.waiting import await_host
from rallypoint.store.connect.deadline import Deadline
from raw import SECONDS

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


@pytest.mark.slow
def test_pods_that_are_up_before_their_names(tmp_path: Path) -> None:
    options = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint={HOST}"]
    with two_pods(tmp_path) as pods, job(tmp_path) as running:
        for number, pod in enumerate(pods):
            running.start(TRAIN + DONE, options, command=("-m", "rallypoint", "run"), prefix=pod.prefix)
            running.await_text(UNKNOWN, number)
        for pod in reversed(pods):
            pod.learns(HOST, pods[0].address)
        assert running.wait() == [0, 0], running.logs()
        assert "done 0 of 2" in running.log(0)
