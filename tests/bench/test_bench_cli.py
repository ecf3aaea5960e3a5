"""`rallypoint bench` and `python -m benchmarks` as users call them: what they print, and leave behind."""

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

from benchmarks.__main__ import BENCHMARKS
from benchmarks.results import read
from command_line import invoke
from processes import end
from rallypoint.bench.contest import Contest
from rallypoint.bench.results import Sample
from rallypoint.errors import RallypointError, UsageError
from raw import SECONDS, is_gone, until

ROOT = Path(__file__).parents[2]
# A loaded machine may take long for anything.
LIMIT_S = 90.0
QUICK = ("--quick", "--repeat", "1")
ONE = ("--targets", "rallypoint-libuv")
TWO = ("--targets", "rallypoint-libuv,rallypoint-legacy")
SMALL = ("--ranks", "16", "--repeat", "1")
HAS_REDIS = subprocess.run(["which", "redis-server"], capture_output=True).returncode == 0


def words_of(arguments: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "rallypoint", "bench", *map(str, arguments)]


def full(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks", *map(str, arguments)]


def bench(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run(
        words_of(arguments), capture_output=True, text=True, timeout=LIMIT_S, env=plain(), **options
    )


def plain() -> dict[str, str]:
    """The environment of a user without a terminal that is narrow."""
    return {**os.environ, "COLUMNS": "200"}


# What comes of it


Run = tuple[subprocess.CompletedProcess[str], Path]
RECORDS = ["barrier", "barrier-trickle"]


@pytest.fixture(scope="module")
def barriers(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two records, and its file."""
    file = tmp_path_factory.mktemp("barrier") / "barrier.json"
    return bench("barrier", *SMALL, *ONE, "--quick", "--json", file), file


def test_a_run_ends_well_with_a_table_and_its_progress_elsewhere(barriers: Run) -> None:
    run, _ = barriers
    assert run.returncode == 0, run.stderr
    for name in RECORDS:
        assert f"\n{name} " in run.stdout
        assert f"rallypoint: {name}, 16 ranks: " in run.stderr
    assert "rallypoint-libuv" in run.stdout
    assert "(2 of 2)" in run.stderr
    assert run.stderr.count("\n") == len(RECORDS)


def test_a_run_writes_every_round(barriers: Run) -> None:
    _, file = barriers
    results = read(file)
    assert [(record.name, record.ranks) for record in results.records] == [(name, 16) for name in RECORDS]
    assert all(len(record.entries["rallypoint-libuv"].samples) == 1 for record in results.records)
    assert results.command == " ".join(["rallypoint bench barrier", *SMALL, *ONE, f"--quick --json {file}"])
    assert not results.interrupted
    assert not results.faults()
    assert 0 < results.seconds < LIMIT_S
    summary = json.loads(file.read_text())["records"][0]["entries"]["rallypoint-libuv"]["summary"]
    assert (summary["against"], summary["ratio"]["median"]) == ("rallypoint-libuv", 1.0)


def test_two_runs_are_compared(barriers: Run, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(barriers[1])] * 2
    assert BENCHMARKS("benchmarks", ["compare", *files]) == 0
    assert "1.00x" in capsys.readouterr().out
    assert BENCHMARKS("benchmarks", ["compare", *files, "--json"]) == 0
    assert [row["record"] for row in json.loads(capsys.readouterr().out)["rows"]] == RECORDS


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has measured something already: for tests of what comes after that."""

    def run(contest: Contest) -> None:
        contest.record.entries["rallypoint-libuv"].samples.append(Sample(1.0))

    monkeypatch.setattr(Contest, "run", run)
    monkeypatch.setattr("rallypoint.cli.bench.raise_open_file_limit", lambda: None)


def test_json_for_standard_output_is_all_that_is_there(measured: None) -> None:
    run = invoke("bench", "init", *SMALL, *ONE, "--json", "-")
    assert run.exit_code == 0
    (record,) = json.loads(run.stdout)["records"]
    assert (record["name"], record["ranks"], list(record["entries"])) == ("init", 16, ["rallypoint-libuv"])


@pytest.mark.slow
@pytest.mark.timeout(600)  # all targets, torch's legacy server among them
@pytest.mark.parametrize("command", ["init", "barrier", "restart", "ops", "wakeup", "bulk", "accept"])
def test_every_load_with_every_target(command: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    run = subprocess.run(
        full(command, "--ranks", 32, *QUICK, "--json", file, "--plot", tmp_path / "a.png"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=590,
    )
    results = read(file)
    faults = results.faults()
    assert run.returncode == bool(faults), run.stderr
    # 15,000 clients at once may be too many for torch's legacy server: that is a result, not our fault.
    assert [each for each in faults if not each.startswith("connect-storm, torch-legacy: ")] == []
    assert {name for record in results.records for name in record.entries} >= {"torch-libuv", "torch-legacy"}


# Wrong usage


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--targets", "nobody"], "'nobody' is no target", "there are rallypoint-libuv"),
        (["--ranks", "8,x"], "--ranks has 'x'", "from 2 to 1,000,000"),
        (["--ranks", "1"], "--ranks has '1'", "from 2 to 1,000,000"),
        (["--ranks", "8,"], "--ranks has ''", "from 2 to 1,000,000"),
        (["--ranks", "900000"], "nothing to measure", "connections here"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_starts(
    arguments: list[str], message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Contest, "run", lambda _: pytest.fail("it has begun"))
    monkeypatch.setattr("rallypoint.cli.bench.raise_open_file_limit", lambda: None)
    run = invoke("bench", "init", *SMALL, *ONE, *arguments)
    assert isinstance(run.exception, UsageError)
    assert message in run.exception.message
    assert hint in run.exception.hint
    assert (run.stdout, run.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["no/such/file.json", "/proc/file.json"])
def test_a_file_that_cannot_be_written_is_told_before_anything_starts(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contest, "run", lambda _: pytest.fail("it has begun"))
    run = invoke("bench", "init", *SMALL, *ONE, "--json", path)
    assert isinstance(run.exception, RallypointError)
    assert f"cannot write {path}" in run.exception.message


@pytest.mark.parametrize("arguments", [["ops", "--repeat", "-1"], ["nothing"], ["restart"]])
def test_a_wrong_command_line_is_wrong_usage(arguments: list[str]) -> None:
    assert isinstance(invoke("bench", *arguments).exception, UsageError)


def test_a_file_that_cannot_be_written_at_the_end_loses_nothing(measured: None) -> None:
    run = invoke("bench", "init", *SMALL, *ONE, "--json", "/dev/full", environ=plain())
    assert isinstance(run.exception, RallypointError)
    assert "/dev/full" in run.exception.message
    assert "\ninit " in run.stdout


# Interruptions


class Command:
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
def benching(folder: Path, words: list[str]) -> Iterator[Command]:
    log = folder / "stderr.txt"
    with log.open("w") as errors, (folder / "stdout.txt").open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=errors, text=True, env=plain(), cwd=ROOT)
    command = Command(process, log)
    try:
        yield command
    finally:
        end(process)
        until(lambda: all(map(is_gone, command._seen)), "nothing is left behind", SECONDS)


SERVER = "a server process of rallypoint"
WORKER = "multiprocessing.spawn"
MANY_ROUNDS = ("--ranks", "16", "--repeat", "100000")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_an_interruption_ends_all_and_what_was_measured_is_told(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    with benching(tmp_path, words_of(["ops", *QUICK, *ONE, "--json", file])) as command:
        command.await_log("rallypoint: set: ")
        command.await_family(SERVER)
        assert command.end(number) == code
        assert "every process of the measurement has been ended" in command.log()
    results = read(file)
    assert results.interrupted
    assert [record.name for record in results.records] == ["get", "set"]
    assert [len(entry.samples) for entry in results.records[0].entries.values()] == [1]
    assert "\nget " in (tmp_path / "stdout.txt").read_text()


@pytest.mark.parametrize(
    ("module", "signals", "codes"),
    [
        (SERVER, [signal.SIGHUP], [129]),
        (WORKER, [signal.SIGINT, signal.SIGTERM], [130, 143]),
    ],
)
def test_an_interruption_at_the_start_leaves_nothing(
    module: str, signals: list[signal.Signals], codes: list[int], tmp_path: Path
) -> None:
    """As soon as the server or the ranks are there; also a second one."""
    with benching(tmp_path, words_of(["barrier", *MANY_ROUNDS, *ONE])) as command:
        command.await_family(module)
        assert command.end(*signals) in codes


def test_the_death_of_the_command_ends_all(tmp_path: Path) -> None:
    others = "rallypoint-libuv,rallypoint-relay" + (",redis" if HAS_REDIS else "")
    with benching(tmp_path, full("init", *MANY_ROUNDS, "--targets", others)) as command:
        command.await_family(WORKER, 2)  # ranks, and relays
        assert command.end(signal.SIGKILL) == -signal.SIGKILL
