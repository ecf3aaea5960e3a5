"""`rallypoint verify`: its judgement by examples, its processes with small scripts, its command line.

`test_matrix.py` runs the real trainings; here, most trainings are scripts that only write a report.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from command_line import invoke
from rallypoint.diagnose.verify import SIMULATION, routes, trainings
from rallypoint.diagnose.verify.routes import BY_NAME, ONE_GPU, ROUTES, Build, Route, select
from rallypoint.diagnose.verify.trainings import (
    FOLDER,
    Equipment,
    RankReport,
    Result,
    TrainingSettings,
    health_rows,
    hint_for,
    problems_of,
    warnings_of,
)
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.environment import INJECTION

_SECONDS = 180

GOOD = RankReport(
    rank=0,
    world_size=2,
    device="cpu",
    backend="gloo",
    host="here",
    pid=1,
    ready_at=104.0,
    joined_at=105.0,
    joined_seconds=4.5,
    loss_first=0.8,
    loss_last=0.1,
    checksum=141.25,
    steps_per_second=300.0,
    working_seconds=0.001,
    waiting_seconds=0.002,
    peak_memory_bytes=300 * 2**20,
    gpu_use_percent=None,
)
OTHER = replace(GOOD, rank=1, pid=2)
BOTH = (GOOD, OTHER)


# --- Judgement ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "limit", "reports", "problems"),
    [
        ((0,), None, BOTH, []),
        ((0,), None, [GOOD], ["rank 1 did not report"]),
        ((0,), None, [*BOTH, replace(GOOD, rank=2)], ["there is a rank 2 too many"]),
        ((0,), None, [GOOD, replace(OTHER, world_size=1)], ["rank 1 was in a world of 1, not of 2"]),
        ((1, 1), None, BOTH, ["exit code 1"]),  # once
        ((0, -11), None, BOTH, ["a process was ended by signal 11"]),
        ((None,), 120.0, [GOOD], ["it was not done after 120 s", "rank 1 did not report"]),
        ((0,), None, [GOOD, replace(OTHER, loss_first=0.9)], ["the ranks do not agree on the first loss"]),
        ((0,), None, [GOOD, replace(OTHER, loss_last=0.101)], ["the ranks do not agree on the last loss"]),
        ((0,), None, [GOOD, replace(OTHER, checksum=141.3)], ["the ranks do not agree on the parameters"]),
        ((0,), None, [GOOD, replace(OTHER, checksum=141.25001)], []),
    ],
)
def test_what_is_wrong(
    codes: tuple[int | None, ...], limit: float | None, reports: Sequence[RankReport], problems: list[str]
) -> None:
    assert list(problems_of(2, codes, limit, reports)) == problems


@pytest.mark.parametrize(("last", "good"), [(0.4, True), (0.41, False), (0.9, False), (float("nan"), False)])
def test_the_loss_has_to_fall_clearly(last: float, good: bool) -> None:
    found = problems_of(1, (0,), None, [replace(GOOD, world_size=1, loss_last=last)])
    assert list(found) == ([] if good else [f"rank 0 learned nothing: loss 0.8 -> {last:.4g}"])


def test_the_rank_that_works_long_or_comes_late_lags_and_not_the_one_that_waits() -> None:
    slow = replace(OTHER, working_seconds=0.005, waiting_seconds=0.0005, device="cuda:1", ready_at=109.0)
    assert warnings_of(100.0, [replace(GOOD, waiting_seconds=0.005), slow]) == [
        "rank 1 came to meet the others after 9.0 s, 4.0 s is usual",
        "rank 1 on cuda:1 (here) lags: it works 5.0 ms on a step, 1.0 ms is usual",
    ]


@pytest.mark.parametrize(
    "reports",
    [
        BOTH,
        [GOOD, replace(OTHER, working_seconds=0.0025)],  # much by factor, little in time
        [replace(GOOD, working_seconds=0.010), replace(OTHER, working_seconds=0.018)],  # the other way round
        [GOOD, replace(OTHER, ready_at=106.5)],
        [replace(GOOD, working_seconds=10.0)],
    ],
)
def test_no_warning_for_what_a_busy_machine_does(reports: Sequence[RankReport]) -> None:
    assert warnings_of(100.0, reports) == []


@pytest.mark.parametrize(
    ("problems", "log", "hint"),
    [
        (["exit code 1"], "DistStoreError: ... PyTorch was built without libuv support", "RALLYPOINT_PATCH"),
        (["exit code 1"], "The server socket has failed: EADDRINUSE", "run this route again"),
        (["it was not done after 120 s"], "", "--timeout"),
        (["exit code 1"], "ModuleNotFoundError: No module named 'numpy'", "install it"),
        (["exit code 1"], "The rendezvous backend 'rallypoint' is not registered.", "install rallypoint"),
        (["rank 1 did not report"], "", "--json"),
    ],
)
def test_hints(problems: Sequence[str], log: str, hint: str) -> None:
    assert hint in hint_for(problems, log)


def test_health_is_told_by_rank_and_device() -> None:
    on_gpu = replace(GOOD, device="cuda:0", steps_per_second=100, peak_memory_bytes=5, gpu_use_percent=40)
    slower = replace(on_gpu, steps_per_second=90, peak_memory_bytes=7 << 20, gpu_use_percent=30)
    unknown = replace(OTHER, peak_memory_bytes=None)
    assert health_rows([[GOOD, unknown], [on_gpu], [slower], []]) == [
        ["0", "cpu", "gloo", "300 to 300", "300 MiB", ""],
        ["0", "cuda:0", "gloo", "90 to 100", "7 MiB", "40 %"],
        ["1", "cpu", "gloo", "300 to 300", "", ""],
    ]


# --- Routes ------------------------------------------------------------------------------------------------


def test_every_route_starts_the_script_and_none_has_a_port_of_its_own() -> None:
    assert len(BY_NAME) == len(ROUTES) + 1
    for route in BY_NAME.values():
        for arguments, variables in route.commands("SCRIPT", "FOLDER", 7):
            assert arguments[-1] == "SCRIPT"
            assert not re.search(r"\d{4}|[{}]", " ".join([*arguments, *variables.values()]))


def test_two_commands_differ_in_their_rank_alone() -> None:
    commands = {name: list(BY_NAME[name].commands("x", "y", 7)) for name in ("env", "tcp", "accelerate-2")}
    assert [variables["RANK"] for _, variables in commands["env"]] == ["0", "1"]
    urls = [variables["RALLYPOINT_VERIFY_INIT"] for _, variables in commands["tcp"]]
    assert ["rank=1" in url for url in urls] == [False, True]
    ends = [arguments[-3:-1] for arguments, _ in commands["accelerate-2"]]
    assert ends == [["--machine_rank", "0"], ["--machine_rank", "1"]]


def test_selection() -> None:
    assert select([]) == list(ROUTES)
    assert select([], one_gpu=True) == [*ROUTES, ONE_GPU]
    quick = ["env", "torchrun-standalone", "torchrun-rallypoint", "accelerate"]
    assert [route.name for route in select([], quick=True)] == quick
    assert [route.name for route in select(["tcp", "env", "tcp"])] == ["env", "tcp"]
    with pytest.raises(UsageError, match="there is no route 'torchrum'") as caught:
        select(["env", "torchrum"])
    assert all(name in caught.value.hint for name in BY_NAME)
    with pytest.raises(UsageError, match="--quick"):
        select(["env"], quick=True)


# --- The environment ---------------------------------------------------------------------------------------


def test_the_environment_is_free_of_other_launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NNODES", "USE_LIBUV", "RALLYPOINT_JOB")
    for name in (*theirs, "RALLYPOINT_PATCH"):
        monkeypatch.setenv(name, "7")
    environ = trainings.environment_for(BY_NAME["env"], Build.AS_IT_IS, TrainingSettings(), tmp_path)
    assert environ.keys().isdisjoint(theirs)
    assert (environ["RALLYPOINT_PATCH"], environ[FOLDER]) == ("7", str(tmp_path))
    settings = TrainingSettings(use_libuv="0")
    environ = trainings.environment_for(BY_NAME["env"], Build.AS_IT_IS, settings, tmp_path)
    assert environ["USE_LIBUV"] == "0"


def test_routes_that_get_help_and_builds_that_need_it(tmp_path: Path) -> None:
    for name, route in BY_NAME.items():
        for build in Build:
            environ = trainings.environment_for(route, build, TrainingSettings(), tmp_path)
            path = environ.get("PYTHONPATH", "").split(os.pathsep)
            helped, refusing = "rallypoint" not in name and route is not ONE_GPU, build is Build.WITHOUT_LIBUV
            assert (str(INJECTION) in path) is helped, (name, build)
            assert (str(SIMULATION) in path) is refusing, (name, build)
            assert ("RALLYPOINT_SIMULATE" in environ) is refusing, (name, build)


# --- Processes, with small scripts in the place of the training --------------------------------------------

REPORTING = f"""
import json, os, pathlib, subprocess, sys, threading
folder, here = pathlib.Path(os.environ["{FOLDER}"]), pathlib.Path(__file__).parent
def report(rank):
    file = folder / f"rank-{{rank}}.json"
    file.write_text(json.dumps({{**json.loads((here / "report.json").read_text()), "rank": rank}}))
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of a good report; its `script.py` is run in the place of the training."""
    (tmp_path / "report.json").write_text(json.dumps(asdict(GOOD)))
    monkeypatch.setattr(trainings, "SCRIPT", tmp_path / "script.py")
    return tmp_path


def _run(scripts: Path, text: str, commands: int = 1, seconds: float = _SECONDS) -> Result:
    (scripts / "script.py").write_text(REPORTING + text)
    route = Route("fake", "", {"NUMBER": "{rank}"}, commands)
    return trainings.run(route, Build.AS_IT_IS, TrainingSettings(seconds=seconds))


def test_a_run_reads_what_the_ranks_reported(scripts: Path) -> None:
    result = _run(scripts, "report(1)\nreport(0)\nprint(folder, end='', file=sys.stderr)")
    assert result.ok, result
    assert [report.rank for report in result.reports] == [0, 1]
    assert result.came_up_seconds is not None
    assert (result.attempts, result.hint) == (1, "")
    assert Path(result.log).name.startswith("rallypoint-")
    assert not Path(result.log).exists()  # the folder of this run alone


def test_a_deadline_ends_it(scripts: Path) -> None:
    text = "report(0)\nprint(os.getpid(), flush=True)\nthreading.Event().wait()"
    result = _run(scripts, text, seconds=3.0)
    assert result.problems == ("it was not done after 3 s", "rank 1 did not report")
    assert result.came_up_seconds is None
    assert not psutil.pid_exists(int(result.log))


def test_one_that_fails_is_not_waited_for_by_the_others(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainings, "_AFTER_FAILURE_SECONDS", 0.1)
    text = "sys.exit(3) if os.environ['NUMBER'] == '1' else threading.Event().wait()"
    result = _run(scripts, text, commands=2)
    assert result.problems == ("exit code 3", "rank 0 did not report", "rank 1 did not report")
    assert result.seconds < _SECONDS / 2


def test_a_port_that_was_taken_meanwhile_is_tried_again_once(scripts: Path) -> None:
    text = """
with (here / "count").open("a") as file:
    file.write("x")
if (here / "count").read_text() == "x" or (here / "always").exists():
    sys.exit("The server socket has failed to listen: EADDRINUSE")
report(0), report(1)
"""
    result = _run(scripts, text)
    assert result.ok
    assert result.attempts == 2
    (scripts / "always").touch()
    result = _run(scripts, text)
    assert not result.ok
    assert "run this route again" in result.hint
    assert len((scripts / "count").read_text()) == 4


def test_no_process_outlives_its_run(scripts: Path) -> None:
    """Not even one that has a session of its own, and ends for no signal that can be ignored."""
    text = """
stubborn = '''
import signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("on", flush=True)
threading.Event().wait()
'''
child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
report(0), report(1)
os._exit(0)
"""
    result = _run(scripts, text)
    assert result.ok
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(result.log)).wait(_SECONDS)  # killed, it may take a moment


# --- The command line, without trainings -------------------------------------------------------------------

EQUIPMENT = Equipment(torch="2.13.0", nccl=True, gpus=())
RESULT = Result("env", Build.AS_IT_IS, 5.0, 4.26, BOTH, (), (), "", "all is well")


class FakeTrainings:
    """Stands in for `trainings.run`: all trainings are good, but those of the routes in `failing`."""

    def __init__(self) -> None:
        self.settings: list[TrainingSettings] = []
        self.failing: dict[str, Result] = {}

    def run(self, route: Route, build: Build, setting: TrainingSettings) -> Result:
        self.settings.append(setting)
        return replace(self.failing.get(route.name, RESULT), route=route.name, build=build)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeTrainings:
    stand_in = FakeTrainings()
    monkeypatch.setattr(trainings, "run", stand_in.run)
    monkeypatch.setattr(trainings, "find_equipment", lambda: EQUIPMENT)
    return stand_in


def _lines(text: str) -> list[str]:
    """With how long it took, on a machine that may be busy, left out."""
    return [re.sub(r", in \d+ s$", "", line.rstrip()) for line in text.splitlines()]


def test_table(fakes: FakeTrainings) -> None:
    fakes.failing["env"] = replace(RESULT, warnings=("rank 1 lags",))  # which does not fail
    result = invoke("verify", "--route", "env")
    assert result.exit_code == 0, result.stderr
    assert _lines(result.stdout) == [
        "route                  torch          came up in                loss  result",
        "env                    as it is            4.3 s    0.8000 -> 0.1000  ok",
        "env                    without libuv       4.3 s    0.8000 -> 0.1000  ok",
        "",
        "rank  device  backend  steps per second  peak memory  GPU use",
        "0     cpu     gloo     300 to 300        300 MiB",
        "1     cpu     gloo     300 to 300        300 MiB",
    ]
    assert _lines(result.stderr) == [
        "rallypoint: two ranks by each route, on the CPU; torch 2.13.0",
        "warning: env, as it is: rank 1 lags",
        "warning: env, without libuv: rank 1 lags",
        "",
        "rallypoint: 2 of 2 trainings were ok",
    ]
    assert fakes.settings == [TrainingSettings("cpu", None, 120.0)] * 2


def test_a_failure_is_told_below_the_table(fakes: FakeTrainings) -> None:
    log = "".join(f"line {number}\n" for number in range(100))
    fakes.failing["tcp"] = replace(
        RESULT, came_up_seconds=None, reports=(), problems=("rank 0 did not report",), log=log, hint="do it"
    )
    result = invoke("verify", "--route", "tcp", "--route", "env")
    assert result.exit_code == 1
    rows = _lines(result.stdout)
    assert rows[3] == "tcp                    as it is                                       FAILED"
    told = _lines(result.stderr)
    failure = told.index("tcp, as it is: FAILED: rank 0 did not report")
    assert (told[failure + 1], told[failure + 41]) == ("  | line 60", "hint: do it")
    assert told[-1] == "rallypoint: 2 of 4 trainings were ok"


def test_json(fakes: FakeTrainings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_LIBUV", "0")
    fakes.failing["tcp"] = replace(RESULT, problems=("exit code 1",), log="oh no", hint="do it")
    result = invoke("verify", "--route", "tcp", "--route", "env", "--json", "--timeout", "30")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["ok"], document["device"], document["use_libuv"]) == (False, "cpu", "0")
    good, _, bad, _ = document["results"]
    assert [(each["route"], each["torch"], each["ok"]) for each in (good, bad)] == [
        ("env", "as it is", True),
        ("tcp", "as it is", False),
    ]
    assert [rank["rank"] for rank in good["ranks"]] == [0, 1]
    assert "log" not in good
    assert (bad["log"], bad["hint"], bad["problems"]) == ("oh no", "do it", ["exit code 1"])
    assert fakes.settings[0] == TrainingSettings("cpu", "0", 30.0)


def test_what_is_not_installed_is_skipped(fakes: FakeTrainings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "find_spec", lambda _: None)
    result = invoke("verify", "--quick", "--json")
    assert result.exit_code == 0
    assert "accelerate is skipped: accelerate is not installed" in _lines(result.stderr)
    document = json.loads(result.stdout)
    assert document["skipped"] == [{"route": "accelerate", "reason": "accelerate is not installed"}]
    assert "accelerate" not in {each["route"] for each in document["results"]}
    result = invoke("verify", "--route", "accelerate")
    assert "no route can be taken" in str(result.exception)


@pytest.mark.parametrize(
    ("gpus", "options", "device", "one_gpu"),
    [(1, [], "cuda", True), (1, ["--device", "cpu"], "cpu", False), (2, [], "cuda", False)],
)
def test_device(
    fakes: FakeTrainings,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    options: list[str],
    device: str,
    one_gpu: bool,
) -> None:
    monkeypatch.setattr(trainings, "find_equipment", lambda: replace(EQUIPMENT, gpus=("H200",) * gpus))
    document = json.loads(invoke("verify", "--quick", "--json", *options).stdout)
    assert document["device"] == device
    assert {setting.device for setting in fakes.settings} == {device}
    assert (ONE_GPU.name in {each["route"] for each in document["results"]}) is one_gpu


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda"], "hint: use --device cpu"),
        (["--route", ONE_GPU.name], "it is for a GPU"),
        (["--route", "torchrum"], "no route 'torchrum'"),
        (["--timeout", "0"], "--timeout is 0"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(words: list[str], message: str, fakes: FakeTrainings) -> None:
    result = invoke("verify", *words)
    assert isinstance(result.exception, RallypointError)
    assert message in str(result.exception)
    assert (result.stdout, fakes.settings) == ("", [])


# --- The command line, in a process ------------------------------------------------------------------------


def _command(*options: str) -> list[str]:
    return [sys.executable, "-m", "rallypoint", "verify", "--device", "cpu", *options]


def _verify(*options: str, **additions: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **additions}
    return subprocess.run(
        _command(*options), capture_output=True, text=True, env=environ, timeout=2 * _SECONDS, check=False
    )


def test_torch_that_cannot_be_imported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "_EXAMINATION_SECONDS", 0.01)
    with pytest.raises(RallypointError, match=r"it is not done after 0\.01 s"):
        trainings.find_equipment()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.modules['torch'] = None", "torch is not installed"),
        ("import sys\nif sys.argv[0] == '-c':\n    sys.modules['torch'] = None", "cannot be imported"),
    ],
)
def test_without_torch(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    run = _verify("--quick", PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    assert message in run.stderr
    assert "hint: " in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_real_training_and_one_that_fails() -> None:
    """With torch as it is, the route works; without libuv and with Rallypoint told to stay away, it fails."""
    run = _verify("--route", "env", RALLYPOINT_PATCH="never")
    assert run.returncode == 1, run.stderr
    _, as_it_is, without, *_ = _lines(run.stdout)
    assert as_it_is.endswith("ok")
    assert without.endswith("FAILED")
    assert "env, without libuv: FAILED: exit code 1; rank 0 did not report" in run.stderr
    assert "PyTorch was built without libuv support" in run.stderr
    assert "RALLYPOINT_PATCH must not be `never`" in run.stderr
    assert "1 of 2 trainings were ok" in run.stderr
    assert "\x1b" not in run.stdout + run.stderr


# A process that runs this as one of the ranks is connected to the test for as long as it lives, and does
# nothing else.
CONNECTING = """
import os, socket
if "RANK" in os.environ:
    connection = socket.create_connection(("127.0.0.1", int(os.environ["TEST_PORT"])))
    connection.recv(1)
"""


@contextmanager
def _ranks_of(
    options: Sequence[str], folder: Path
) -> Iterator[tuple[subprocess.Popen[str], list[socket.socket]]]:
    """A `rallypoint verify`, and connections to the two ranks of its first training."""
    (folder / "sitecustomize.py").write_text(CONNECTING)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_SECONDS)
        additions = {"PYTHONPATH": str(folder), "TEST_PORT": str(listener.getsockname()[1])}
        with subprocess.Popen(
            _command(*options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **additions},
        ) as process:
            try:
                ranks = [listener.accept()[0] for _ in range(2)]
                yield process, ranks
            finally:
                process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="processes are interrupted otherwise there")
@pytest.mark.parametrize(
    ("route", "number"),
    [
        pytest.param("torchrun-standalone", signal.SIGINT, marks=pytest.mark.slow),
        ("env", signal.SIGTERM),
    ],
)
def test_an_interrupt_ends_every_process(route: str, number: signal.Signals, tmp_path: Path) -> None:
    with _ranks_of(["--route", route], tmp_path) as (process, ranks):
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=_SECONDS)
        for rank in ranks:
            rank.settimeout(_SECONDS)
            assert rank.recv(1) == b""  # its end
            rank.close()
    assert process.returncode == 128 + number, stderr
    assert "interrupted" in stderr
    assert len(stdout.splitlines()) == 1  # the head of the table
    assert "Traceback" not in stderr
