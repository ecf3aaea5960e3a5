"""`rallypoint bench` as a user calls it: what it prints and writes, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from processes import end
from rallypoint.bench import names
from rallypoint.bench.results import read
from rallypoint.cli.bench import _sizes as sizes_of
from rallypoint.cli.bench import app
from rallypoint.errors import UsageError
from raw import SECONDS, is_gone, until

# A loaded machine may take long for anything.
LIMIT_S = 90.0
QUICK = ("--quick", "--repeat", "1")
ONE = ("--targets", "rallypoint-libuv")
TWO = ("--targets", "rallypoint-libuv,rallypoint-legacy")
SMALL = ("--ranks", "16", "--repeat", "1")
HAS_REDIS = subprocess.run(["which", "redis-server"], capture_output=True).returncode == 0


def words_of(arguments: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "rallypoint", "bench", *map(str, arguments)]


def bench(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run(
        words_of(arguments), capture_output=True, text=True, timeout=LIMIT_S, env=plain(), **options
    )


def plain() -> dict[str, str]:
    """The environment of a user without a terminal that is narrow."""
    return {**os.environ, "COLUMNS": "200"}


# What comes of it


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run of `ops`, and its file."""
    file = tmp_path_factory.mktemp("ops") / "ops.json"
    return bench("ops", *QUICK, *ONE, "--json", file), file


Run = tuple[subprocess.CompletedProcess[str], Path]
RECORDS = ["get", "get-pipelined", "set", "add", "one-get", "one-set", "one-add"]


def test_a_run_ends_well_with_a_table_and_its_progress_elsewhere(ops: Run) -> None:
    run, _ = ops
    assert run.returncode == 0, run.stderr
    for name in RECORDS:
        assert f"| {name} " in run.stdout
        assert f"rallypoint: {name}: " in run.stderr
    assert "rallypoint-libuv" in run.stdout
    assert "about" not in run.stdout
    assert run.stderr.count("\n") == len(RECORDS)


def test_a_run_writes_every_round(ops: Run) -> None:
    _, file = ops
    results = read(file)
    assert [record.name for record in results.records] == RECORDS
    assert all(len(record.entries["rallypoint-libuv"].samples) == 1 for record in results.records)
    assert results.command == "rallypoint bench ops --targets rallypoint-libuv --repeat 1 --quick"
    assert not results.interrupted
    assert not results.faults()
    assert 0 < results.seconds < LIMIT_S
    summary = json.loads(file.read_text())["records"][0]["entries"]["rallypoint-libuv"]["summary"]
    assert (summary["against"], summary["ratio"]["median"]) == ("rallypoint-libuv", 1.0)


def test_two_runs_are_compared(ops: Run) -> None:
    files = [str(ops[1])] * 2
    told = CliRunner().invoke(app, ["compare", *files], env=plain())
    assert (told.exit_code, told.stderr) == (0, "")
    assert "1.00x" in told.stdout
    as_json = CliRunner().invoke(app, ["compare", *files, "--json"])
    assert [row["record"] for row in json.loads(as_json.stdout)["rows"]] == RECORDS


def test_a_run_becomes_a_page(ops: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    run = bench("page", ops[1], "--output", page)
    assert (run.returncode, run.stderr) == (0, "")
    assert "rallypoint-libuv" in page.read_text()


def test_json_for_standard_output_is_all_that_is_there() -> None:
    others = ["rallypoint-libuv", names.RELAY, *(["redis"] if HAS_REDIS else [])]
    run = bench("init", "--ranks", 64, "--targets", ",".join(others), "--repeat", 1, "--json", "-")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    (record,) = document["records"]
    assert (record["name"], record["ranks"], list(record["entries"])) == ("init", 64, others)
    assert all(len(entry["samples"]) == 1 for entry in record["entries"].values())
    assert record["entries"][names.RELAY]["samples"][0]["extras"]["relays"] == 8


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("restart", "restart"),
        ("wakeup", "wakeup"),
        pytest.param("barrier", "barrier-trickle", marks=pytest.mark.slow),
    ],
)
def test_other_loads(command: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    others = ("rallypoint-libuv", *(["redis"] if HAS_REDIS else []))
    run = bench(command, *SMALL, "--targets", ",".join(others), "--json", file)
    assert run.returncode == 0, run.stderr
    (record,) = [each for each in read(file).records if each.name == name]
    assert [len(entry.samples) for entry in record.entries.values()] == [1] * len(others)
    assert record.ranks == 16


@pytest.mark.slow
@pytest.mark.parametrize("command", ["init", "barrier", "restart", "ops", "wakeup", "bulk", "accept"])
def test_every_load_with_every_target(command: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    run = subprocess.run(
        words_of([command, "--ranks", 32, *QUICK, "--json", file, "--plot", tmp_path / "a.png"]),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    results = read(file)
    assert not results.faults()
    assert {name for record in results.records for name in record.entries} >= {"torch-libuv", "torch-legacy"}


# Wrong usage


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--targets", "nobody"], "'nobody' is no target", "there are rallypoint-libuv"),
        (["--ranks", "8,x"], "--ranks has 'x'", "from 2 to 1,000,000"),
        (["--plot", "figure.gif"], "neither a PNG nor an SVG", ".png or .svg"),
        (["--json", "no/such/file.json"], "cannot write no/such/file.json", "name a file"),
        (["--json", "/proc/file.json"], "cannot write /proc/file.json", ""),
        (["--targets", "redis", "--ranks", "900000"], "nothing to measure", "connections here"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_starts(
    arguments: list[str], message: str, hint: str, tmp_path: Path
) -> None:
    run = bench("restart", *SMALL, *ONE, *arguments, cwd=tmp_path)
    assert run.returncode == 2
    assert message in run.stderr
    assert hint in run.stderr.partition("\nhint: ")[2]
    assert run.stdout == ""
    assert "ranks leave" not in run.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["1", "0", "-8", "8.0", "8,", ",", "1000001", "8 ,9", "many"])
def test_sizes_are_numbers_of_ranks(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks has"):
        sizes_of(text)
    assert (sizes_of(""), sizes_of("2"), sizes_of("8,1000000")) == ((), (2,), (8, 1_000_000))


@pytest.mark.parametrize("arguments", [["ops", "--repeat", "-1"], ["nothing"], ["compare", "only-one.json"]])
def test_a_wrong_command_line_is_wrong_usage(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize("command", [*names.COMMANDS, "all"])
def test_every_command_takes_the_same_options(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"], env=plain()).output
    assert all(
        option in said for option in ("--ranks", "--targets", "--repeat", "--json", "--plot", "--quick")
    )


def test_a_file_that_cannot_be_written_at_the_end_loses_nothing() -> None:
    run = bench("restart", *SMALL, *ONE, "--json", "/dev/full")
    assert run.returncode == 1
    assert "| restart " in run.stdout
    assert "/dev/full" in run.stderr


# Interruptions


class Running:
    """The command in progress."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log
        self._seen: dict[int, psutil.Process] = {}

    def log(self) -> str:
        return self._log.read_text()

    def await_log(self, words: str) -> None:
        until(lambda: words in self.log() or self.process.poll() is not None, words, LIMIT_S)
        assert words in self.log(), self.log()

    def family(self) -> dict[int, psutil.Process]:
        """All processes of it that were ever seen."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self._seen.setdefault(child.pid, child)
        return self._seen

    def await_family(self, module: str, count: int = 1) -> list[psutil.Process]:
        """So many processes with that word in their command line."""

        def found() -> list[psutil.Process]:
            return [each for each in self.family().values() if module in command_of(each)]

        until(lambda: len(found()) >= count, f"{count} of {module}", LIMIT_S)
        return found()

    def end(self, *signals: signal.Signals) -> int:
        """Send signals; the exit code, when all of it is gone."""
        self.family()
        for number in signals:
            self.process.send_signal(number)
        code = self.process.wait(LIMIT_S)
        until(lambda: all(map(is_gone, self._seen)), "nothing is left behind", SECONDS)
        return code


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def benching(folder: Path, *arguments: object) -> Iterator[Running]:
    log = folder / "stderr.txt"
    with log.open("w") as errors, (folder / "stdout.txt").open("w") as output:
        process = subprocess.Popen(words_of(arguments), stdout=output, stderr=errors, text=True, env=plain())
    running = Running(process, log)
    try:
        yield running
    finally:
        end(process)
        until(lambda: all(map(is_gone, running._seen)), "nothing is left behind", SECONDS)


SERVER = "a server process of rallypoint"
MANY_ROUNDS = ("--ranks", "16", "--repeat", "100000")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_all_and_what_was_measured_is_told(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    with benching(tmp_path, "ops", *QUICK, *ONE, "--json", file) as running:
        running.await_log("rallypoint: get-pipelined: ")
        running.await_family(SERVER)
        assert running.end(number) == code
        assert "interrupted; every process of the measurement has been ended" in running.log()
    results = read(file)
    assert results.interrupted
    assert [record.name for record in results.records] == ["get", "get-pipelined"]
    assert [len(entry.samples) for entry in results.records[0].entries.values()] == [1]
    assert "| get " in (tmp_path / "stdout.txt").read_text()


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        ("rallypoint.bench.host_ours", signal.SIGHUP, 129),
        (SERVER, signal.SIGTERM, 143),
        ("rallypoint.bench.swarm", signal.SIGINT, 130),
    ],
)
def test_an_interruption_at_the_start_leaves_nothing(
    module: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """As soon as the host process, the server or the ranks are there."""
    with benching(tmp_path, "barrier", *MANY_ROUNDS, *ONE) as running:
        running.await_family(module)
        assert running.end(number) == code


def test_a_second_interruption_leaves_nothing_either(tmp_path: Path) -> None:
    with benching(tmp_path, "barrier", *MANY_ROUNDS, *TWO) as running:
        running.await_family("rallypoint.bench.swarm", 2)
        assert running.end(signal.SIGINT, signal.SIGTERM) in (130, 143)


def test_the_death_of_the_command_ends_all(tmp_path: Path) -> None:
    others = f"rallypoint-libuv,{names.RELAY}" + (",redis" if HAS_REDIS else "")
    with benching(tmp_path, "init", *MANY_ROUNDS, "--targets", others) as running:
        running.await_family("rallypoint.bench.swarm", 1)
        running.await_family("rallypoint.bench.host_relays", 1)
        assert running.end(signal.SIGKILL) == -signal.SIGKILL


# Faults


def kill_first(running: Running, module: str) -> None:
    running.await_family(module, 1)[0].kill()


@pytest.mark.parametrize(
    ("kill", "words"),
    [
        pytest.param(SERVER, "rallypoint-libuv died", id="the server"),
        pytest.param("rallypoint.bench.swarm", "ended early", id="the ranks", marks=pytest.mark.slow),
    ],
)
def test_a_target_that_fails_in_the_middle_is_told_and_the_other_goes_on(
    kill: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    rounds = 5
    arguments = ("barrier", "--ranks", 16, "--repeat", rounds, *TWO, "--json", file)
    with benching(tmp_path, *arguments) as running:
        running.await_family("rallypoint.bench.swarm", 2)
        kill_first(running, kill)
        assert running.process.wait(LIMIT_S) == 1
        assert "rallypoint-libuv failed" in running.log()
    results = read(file)
    first = results.records[0].entries
    assert first["rallypoint-libuv"].fault
    assert len(first["rallypoint-libuv"].samples) < rounds
    assert (first["rallypoint-legacy"].fault, len(first["rallypoint-legacy"].samples)) == ("", rounds)
    assert len(results.records[1].entries["rallypoint-libuv"].samples) == rounds  # it was started again
    assert words in first["rallypoint-libuv"].fault
