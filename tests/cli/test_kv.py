"""`rallypoint kv`: every subcommand, against Rallypoint's server and torch's own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pytest

from processes import serving, torch_serving
from rallypoint.cli import kv
from rallypoint.cli.main import main
from rallypoint.client.tcp import TCPStore
from raw import SECONDS, RawClient

pytestmark = pytest.mark.windows


@dataclass
class Outcome:
    code: int
    out: bytes
    err: str


class KV(Protocol):
    def __call__(self, *words: str, stdin: bytes = b"", options: tuple[str, ...] = ()) -> Outcome: ...


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("legacy", "torch legacy")]


@pytest.fixture(scope="module", params=["libuv", "torch", *OTHERS])
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server: ours, and torch's, on each backend."""
    if request.param.startswith("torch"):
        with torch_serving(use_libuv=request.param == "torch") as number:
            yield number
    else:
        path = tmp_path_factory.mktemp("kv") / "log"
        with path.open("w+") as log, serving(request.param, log) as server:
            yield server.port


@pytest.fixture
def store(port: int) -> Iterator[TCPStore]:
    """A client of that server, which is empty at the start of each test."""
    with TCPStore("127.0.0.1", port, timeout=20) as client:
        for key in client.list_keys():
            client.delete_key(key)
        yield client


@pytest.fixture
def run(port: int, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> KV:
    """The command line in this process: a new interpreter for each call would take minutes."""

    def call(*words: str, stdin: bytes = b"", options: tuple[str, ...] = ()) -> Outcome:
        command, *rest = words
        arguments = ["rallypoint", "kv", command, "--store", f"127.0.0.1:{port}", *options, *rest]
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code: int | str | None = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
        captured = capfdbinary.readouterr()
        assert isinstance(code, int)
        return Outcome(code, captured.out, captured.err.decode())

    return call


def test_set_append_and_get(run: KV, store: TCPStore) -> None:
    assert run("set", "key", "value") == Outcome(0, b"", "")
    assert store.get("key") == b"value"
    assert run("get", "key") == Outcome(0, b"value\n", "")
    assert run("set", "key", "").code == 0
    assert run("get", "key") == Outcome(0, b"\n", ""), "an empty value is a value"
    assert run("append", "key", "one").code == 0
    assert run("append", "key", "-2").code == 0
    assert store.get("key") == b"one-2"


def test_a_value_from_standard_input_is_taken_as_it_is(run: KV, store: TCPStore) -> None:
    value = bytes(range(256))
    assert run("set", "key", "-", stdin=value).code == 0
    assert store.get("key") == value
    assert run("get", "key").out == value + b"\n"
    assert run("append", "key", "-", stdin=b"more\n").code == 0
    assert run("get", "key").out == value + b"more\n"


def test_get_waits_if_told_to(run: KV, store: TCPStore) -> None:
    store.set("key", "value")
    assert run("get", "key", options=("--timeout", "5")).out == b"value\n"
    outcome = run("get", "nothing", options=("--timeout", "0.1"))
    assert outcome.code == 1
    assert "1 of 1 keys are missing: nothing" in outcome.err


def test_add(run: KV, store: TCPStore) -> None:
    assert run("add", "count", "5") == Outcome(0, b"5\n", "")
    assert run("add", "count", "-7") == Outcome(0, b"-2\n", "")
    assert run("add", "count", "0").out == b"-2\n"


def test_wait(run: KV, store: TCPStore) -> None:
    store.set("a", "")
    store.set("b", "")
    assert run("wait", "a", "b") == Outcome(0, b"", "")
    assert run("wait", "a", options=("--timeout", "0")) == Outcome(0, b"", "")
    for seconds in ("0.1", "0"):
        outcome = run("wait", "a", "nothing", options=("--timeout", seconds))
        assert (outcome.code, outcome.out) == (1, b"")
        assert "1 of 2 keys are missing: nothing" in outcome.err


def test_check(run: KV, store: TCPStore) -> None:
    store.set("a", "")
    assert run("check", "a") == Outcome(0, b"there    a\n", "")
    assert run("check", "a", "nothing") == Outcome(1, b"there    a\nmissing  nothing\n", "")
    outcome = run("check", "a", "nothing", options=("--json",))
    assert outcome.code == 1
    assert json.loads(outcome.out) == {"a": True, "nothing": False}


def test_delete(run: KV, store: TCPStore) -> None:
    store.set("key", "value")
    assert run("delete", "key") == Outcome(0, b"", "")
    assert not store.check(["key"])
    outcome = run("delete", "key")
    assert outcome.code == 1
    assert "there is no key 'key'" in outcome.err


def test_list(run: KV, store: TCPStore) -> None:
    assert run("list") == Outcome(0, b"", "")
    assert json.loads(run("list", options=("--json",)).out) == []
    store.multi_set(["b", "a", "group/1", "größe"], ["", "", "", ""])
    assert run("list").out.decode() == "a\nb\ngroup/1\ngröße\n"
    assert run("list", "gr").out.decode() == "group/1\ngröße\n"
    assert json.loads(run("list", "gr", options=("--json",)).out) == ["group/1", "größe"]


def test_push_and_pop(run: KV, store: TCPStore, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["port"] == "torch legacy":
        pytest.skip("torch's legacy server has no queues")
    assert run("push", "queue", "one").code == 0
    assert run("push", "queue", "-", stdin=b"two").code == 0
    assert store.queue_len("queue") == 2
    assert run("pop", "queue") == Outcome(0, b"one\n", "")
    assert run("pop", "queue", options=("--timeout", "5")).out == b"two\n"
    outcome = run("pop", "queue")
    assert outcome.code == 1
    assert "the queue 'queue' is empty" in outcome.err
    assert run("pop", "queue", options=("--timeout", "0.1")).code == 1


def test_nobody_counts_it_as_a_worker(run: KV, store: TCPStore) -> None:
    workers = store._add(b"init/", 1)
    keys = store.num_keys()
    for line in ("list", "check a", "get a", "delete a", "add a 0", "delete a"):
        run(*line.split())
    assert store.num_keys() == keys
    assert store._add(b"init/", 0) == workers


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["get", "key", "--store", "localhost:0"], "RALLYPOINT_STORE) is 'localhost:0'"),
        (["get", "key", "--store", "localhost:http"], "RALLYPOINT_STORE) is 'localhost:http'"),
        (["get", "key", "--store", ":29500"], "RALLYPOINT_STORE) is ':29500'"),
        (["get", "--store", "localhost:1"], "kv get"),
        (["get", "key"], "--store"),
        (["add", "key", "much", "--store", "localhost:1"], "kv add"),
        (["fetch", "key"], "fetch"),
        (["get", "key", "--store", "tcp://localhost:1"], "is 'tcp://localhost:1'"),
        (["wait", "key", "--store", "localhost:1", "--timeout", "-1"], "--timeout is -1"),
        (["wait", "key", "--store", "localhost:1", "--timeout", "nan"], "--timeout is nan"),
    ],
)
def test_usage_errors_are_exit_code_2(
    words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RALLYPOINT_STORE", raising=False)
    monkeypatch.setattr(sys, "argv", ["rallypoint", "kv", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert reason in err


def test_a_store_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(sys, "argv", ["rallypoint", "kv", "get", "key", "--store", "127.0.0.1:1"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("rallypoint: cannot reach the store at 127.0.0.1:1")
    assert "\n\nhint: " in err


def in_a_process(port: int, *words: str, stdin: bytes = b"") -> Outcome:
    """The command itself, with the store in the variable."""
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "kv", *words],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "RALLYPOINT_STORE": f"localhost:{port}"},
    )
    return Outcome(done.returncode, done.stdout, done.stderr.decode().replace(os.linesep, "\n"))


@pytest.fixture(scope="module")
def own_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with (tmp_path_factory.mktemp("kv") / "log").open("w+") as log, serving("auto", log) as server:
        yield server.port


def test_as_a_command(own_port: int) -> None:
    assert in_a_process(own_port, "set", "key", "-", stdin=b"\0value\xff") == Outcome(0, b"", "")
    with RawClient(own_port) as client:
        assert client.get(b"/key") == b"\0value\xff"
    outcome = in_a_process(own_port, "get", "nothing")
    assert outcome == Outcome(1, b"", "rallypoint: there is no key 'nothing'\n")


def test_a_key_that_is_no_text_is_listed(own_port: int) -> None:
    with RawClient(own_port) as client:
        client.set(b"/caf\xe9", b"latin")
    outcome = in_a_process(own_port, "list", "caf")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(b"caf")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_output_that_cannot_be_written(own_port: int) -> None:
    command = [sys.executable, "-m", "rallypoint", "kv", "add", "n", "1", "--store", f"127.0.0.1:{own_port}"]
    for unbuffered in ("", "1"):
        with open("/dev/full", "w") as full:
            run = subprocess.run(
                command,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=SECONDS,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            )
        assert run.returncode == 1
        assert run.stderr == "rallypoint: cannot write to standard output: No space left on device\n"
