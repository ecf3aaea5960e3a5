"""From a URL to a store: the schemes, who decides on the backend, and what is wrong with a URL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from processes import end, free_port
from rallypoint.client.rendezvous import rendezvous
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import UsageError

pytestmark = pytest.mark.windows

VARIABLES = ("USE_LIBUV", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


# A rank: it meets the other one, tells what it got, and leaves only when that has come, too.
RANK = """
import sys
from rallypoint.client.rendezvous import rendezvous

url, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store, rank, world_size = rendezvous(url, rank, world_size, timeout=30)
with store:
    store.set(f"hello from {rank}", f"to {1 - rank}")
    print(rank, world_size, store.get(f"hello from {1 - rank}").decode(), flush=True)
    store.set(f"bye from {rank}", "")
    if rank == 0:
        store.wait(["bye from 1"])
"""


@contextmanager
def rank(
    url: str, number: int, world_size: int, environ: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, url, str(number), str(world_size)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        yield process
    finally:
        end(process)


def meet(url: str, by_environment: Mapping[str, str] | None = None) -> list[str]:
    """Let two processes meet at a URL; what they say. Their ranks come as arguments or by variables."""
    numbers, world_size = ([0, 1], 2) if by_environment is None else ([-1, -1], -1)
    environs: list[dict[str, str]] = [{}, {}]
    if by_environment is not None:
        environs = [{**by_environment, "RANK": str(number), "WORLD_SIZE": "2"} for number in range(2)]
    with (
        rank(url, numbers[1], world_size, environs[1]) as second,
        rank(url, numbers[0], world_size, environs[0]) as first,
    ):
        outputs = [process.communicate(timeout=180) for process in (first, second)]
    assert [err for _, err in outputs] == ["", ""]
    return [out.strip() for out, _ in outputs]


MET = ["0 2 to 0", "1 2 to 1"]


def test_two_ranks_meet(tmp_path: Path) -> None:
    port = free_port()
    assert meet(f"tcp://127.0.0.1:{port}") == MET
    assert meet("env://", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}) == MET
    assert meet((tmp_path / "with space").as_uri()) == MET


def test_under_torchrun_the_agent_holds_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as agent:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        store, number, world_size = rendezvous("env://", 0, 1, timeout=10)
        with store:
            assert (number, world_size) == (0, 1)
            store.set("key", "value")
        assert agent.get("key") == b"value"


@pytest.mark.parametrize(
    ("argument", "query", "variable", "libuv"),
    [(None, "", "0", False), (None, "&use_libuv=on", "0", True), (False, "&use_libuv=1", "1", False)],
)
def test_who_decides_on_the_backend(
    argument: bool | None, query: str, variable: str, libuv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USE_LIBUV", variable)
    url = f"tcp://localhost:0?rank=0&world_size=1{query}"
    store = rendezvous(url, use_libuv=argument).store
    with store:
        assert isinstance(store, TCPStore)
        assert store.libuvBackend is libuv


def test_arguments_over_queries_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "1")
    store, number, world_size = rendezvous("env://?rank=5&world_size=1", 0)
    with store:
        assert (number, world_size) == (0, 1)
    with pytest.raises(UsageError, match="rank 5 does not exist in a world of 1"):
        rendezvous("env://?rank=5")


@pytest.mark.parametrize(
    ("url", "number", "world_size", "words"),
    [
        (
            "udp://localhost:1",
            0,
            1,
            "'udp://localhost:1' is no rendezvous URL\nhint: .*tcp://, env://, file://",
        ),
        ("localhost:29500", 0, 1, "is no rendezvous URL"),
        ("", 0, 1, "is no rendezvous URL"),
        ("tcp://localhost", 0, 1, "lacks a host or a port"),
        ("tcp://:29500", 0, 1, "lacks a host or a port"),
        ("tcp://localhost:1", -1, 1, r"the rank is not known\nhint: .*\?rank="),
        ("tcp://localhost:1", 0, -1, r"the world size is not known\nhint: .*\?world_size="),
        ("tcp://localhost:1", 2, 2, "rank 2 does not exist in a world of 2"),
        ("tcp://localhost:1?rank=-3", -1, 2, "rank -3 does not exist in a world of 2"),
        ("tcp://localhost:1?rank=first", -1, 2, "the rank is 'first', which is no number"),
        ("tcp://localhost:1?use_libuv=maybe", 0, 1, "use_libuv in the URL is 'maybe'"),
        ("tcp://localhost:1?use_libuv=", 0, 1, "use_libuv in the URL is ''"),
        ("tcp://localhost:http", 0, 1, "'tcp://localhost:http' has no port that exists"),
        ("tcp://localhost:65536", 0, 1, "'tcp://localhost:65536' has no port that exists"),
        ("tcp://[::1:29500", 0, 1, "tcp://"),
        ("file:///tmp/meet", 2, 2, "rank 2 does not exist in a world of 2"),
        ("file://", 0, 1, "names no file"),
        ("file://host/path", 0, 1, "names no file"),
        ("env://", -1, 1, "the rank is not known\nhint: set the variable RANK"),
        ("env://", 0, -1, "the world size is not known\nhint: set the variable WORLD_SIZE"),
        ("env://", 0, 1, "env:// needs the variable MASTER_ADDR"),
    ],
)
def test_usage_errors(url: str, number: int, world_size: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rendezvous(url, number, world_size)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "the master port is not known\nhint: set the variable MASTER_PORT"),
        ({"MASTER_PORT": "http"}, "the master port is 'http', which is no number"),
        ({"MASTER_PORT": "65536"}, "port 65536.*\nhint: ports go from 1 to 65535"),
        ({"MASTER_PORT": "1", "USE_LIBUV": "maybe"}, "the variable USE_LIBUV is 'maybe'"),
        ({"MASTER_PORT": "1", "RANK": "one"}, "the rank is 'one', which is no number"),
        ({"MASTER_PORT": "1", "RANK": "4"}, "rank 4 does not exist in a world of 4"),
    ],
)
def test_usage_errors_of_the_environment(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "4", **variables}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words):
        rendezvous("env://")
