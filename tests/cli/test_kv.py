"""`rallypoint kv`: every subcommand, against Rallypoint's server and torch's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from command_line import Outcome, invoke
from processes import serving, torch_serving
from rallypoint.cli import kv
from rallypoint.cli.main import main
from rallypoint.client.tcp import TCPStore
from raw import SECONDS, RawClient

pytestmark = pytest.mark.windows


Run = Callable[..., Outcome]


def said(text: str = "") -> Outcome:
    """The outcome of a command that prints this, and nothing on standard error."""
    return Outcome(0, text, "", None)


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
def run(port: int) -> Run:
    """Calls a command of `rallypoint kv` on that server."""
    return lambda command, *words, text="": invoke(
        "kv", command, "--store", f"127.0.0.1:{port}", *words, text=text
    )


def test_set_append_and_get(run: Run, store: TCPStore) -> None:
    assert run("set", "key", "value") == said()
    assert store.get("key") == b"value"
    assert run("get", "key") == said("value\n")
    assert run("set", "key", "").exit_code == 0
    assert run("get", "key") == said("\n"), "an empty value is a value"
    assert run("append", "key", "one").exit_code == 0
    assert run("append", "key", "-2").exit_code == 0
    assert store.get("key") == b"one-2"


def test_a_value_from_standard_input_is_taken_as_it_is(run: Run, store: TCPStore) -> None:
    value = bytes(range(256))
    assert run("set", "key", "-", text=value).exit_code == 0
    assert store.get("key") == value
    assert run("get", "key").stdout.encode(errors="surrogateescape") == value + b"\n"
    assert run("append", "key", "-", text="more\n").exit_code == 0
    assert run("get", "key").stdout.encode(errors="surrogateescape") == value + b"more\n"


def test_get_waits_if_told_to(run: Run, store: TCPStore) -> None:
    store.set("key", "value")
    assert run("get", "key", "--timeout", "5").stdout == "value\n"
    outcome = run("get", "nothing", "--timeout", "0.1")
    assert outcome.exit_code == 1
    assert "1 of 1 keys are missing: nothing" in str(outcome.exception)


def test_add(run: Run, store: TCPStore) -> None:
    assert run("add", "count", "5") == said("5\n")
    assert run("add", "count", "-7") == said("-2\n")
    assert run("add", "count", "0").stdout == "-2\n"


def test_wait(run: Run, store: TCPStore) -> None:
    store.set("a", "")
    store.set("b", "")
    assert run("wait", "a", "b") == said()
    assert run("wait", "a", "--timeout", "0") == said()
    for seconds in ("0.1", "0"):
        outcome = run("wait", "a", "nothing", "--timeout", seconds)
        assert (outcome.exit_code, outcome.stdout) == (1, "")
        assert "1 of 2 keys are missing: nothing" in str(outcome.exception)


def test_check(run: Run, store: TCPStore) -> None:
    store.set("a", "")
    assert run("check", "a") == said("there    a\n")
    assert run("check", "a", "nothing") == Outcome(1, "there    a\nmissing  nothing\n", "", None)
    outcome = run("check", "a", "nothing", "--json")
    assert outcome.exit_code == 1
    assert json.loads(outcome.stdout) == {"a": True, "nothing": False}


def test_delete(run: Run, store: TCPStore) -> None:
    store.set("key", "value")
    assert run("delete", "key") == said()
    assert not store.check(["key"])
    outcome = run("delete", "key")
    assert outcome.exit_code == 1
    assert "there is no key 'key'" in str(outcome.exception)


def test_list(run: Run, store: TCPStore) -> None:
    assert run("list") == said()
    assert json.loads(run("list", "--json").stdout) == []
    store.multi_set(["b", "a", "group/1", "größe"], ["", "", "", ""])
    assert run("list").stdout == "a\nb\ngroup/1\ngröße\n"
    assert run("list", "gr").stdout == "group/1\ngröße\n"
    assert json.loads(run("list", "gr", "--json").stdout) == ["group/1", "größe"]


def test_push_and_pop(run: Run, store: TCPStore, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["port"] == "torch legacy":
        pytest.skip("torch's legacy server has no queues")
    assert run("push", "queue", "one").exit_code == 0
    assert run("push", "queue", "-", text="two").exit_code == 0
    assert store.queue_len("queue") == 2
    assert run("pop", "queue") == said("one\n")
    assert run("pop", "queue", "--timeout", "5").stdout == "two\n"
    outcome = run("pop", "queue")
    assert outcome.exit_code == 1
    assert "the queue 'queue' is empty" in str(outcome.exception)
    assert run("pop", "queue", "--timeout", "0.1").exit_code == 1


def test_nobody_counts_it_as_a_worker(run: Run, store: TCPStore) -> None:
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
def test_usage_errors_are_exit_code_2(words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RALLYPOINT_STORE", raising=False)
    outcome = invoke("kv", *words)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert reason in str(outcome.exception)


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


def in_a_process(port: int, *words: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    """Exit code and output of the command itself, with the store in the variable."""
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "kv", *words],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "RALLYPOINT_STORE": f"localhost:{port}"},
    )
    return done.returncode, done.stdout, done.stderr.decode().replace(os.linesep, "\n")


@pytest.fixture(scope="module")
def own_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with (tmp_path_factory.mktemp("kv") / "log").open("w+") as log, serving("auto", log) as server:
        yield server.port


def test_as_a_command(own_port: int) -> None:
    assert in_a_process(own_port, "set", "key", "-", stdin=b"\0value\xff") == (0, b"", "")
    with RawClient(own_port) as client:
        assert client.get(b"/key") == b"\0value\xff"
    outcome = in_a_process(own_port, "get", "nothing")
    assert outcome == (1, b"", "rallypoint: there is no key 'nothing'\n")


def test_a_key_that_is_no_text_is_listed(own_port: int) -> None:
    with RawClient(own_port) as client:
        client.set(b"/caf\xe9", b"latin")
    code, out, err = in_a_process(own_port, "list", "caf")
    assert (code, err) == (0, "")
    assert out.startswith(b"caf")


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
