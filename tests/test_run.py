"""`rallypoint run`: what it starts comes up, signals and exit codes pass, and a failure is explained."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs import DONE, TRAIN, Job, free_port, job
from rallypoint.launch.running import comes_from_terminal, end_as, signals_to_pass
from rallypoint.pytorch.environment import put_on_path
from rallypoint.verify import SIMULATION
from raw import until

_RUN = ("-m", "rallypoint", "run")
_SECONDS = 60
_NO_LIBUV = {**put_on_path(os.environ, SIMULATION), "RALLYPOINT_SIMULATE": "no-libuv"}


def _run(
    *words: str, folder: Path | None = None, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *_RUN, *words],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
    )


# What comes up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="torch as it is", marks=pytest.mark.slow),
        pytest.param(_NO_LIBUV, id="without libuv"),
    ],
)
def test_a_script_runs_on_two_ranks(environ: dict[str, str], tmp_path: Path) -> None:
    script = "import sys\n" + TRAIN + "say('arguments', sys.argv[1:])" + DONE
    (tmp_path / "train.py").write_text(script)
    done = _run("--nproc-per-node=2", "train.py", "--lr", "0.1", "--nnodes", folder=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("arguments ['--lr', '0.1', '--nnodes']") == 2
    assert done.stdout.count("done ") == 2
    assert re.search(r"^rallypoint: 2 of 2 ranks have joined after \d+\.\d s$", done.stderr, re.MULTILINE)


def test_a_module_runs_on_one_rank_by_default(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv[1:])\n")
    done = _run("-m", "train", "x", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "1 ['x']\n"), done.stderr


def test_the_file_has_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "rallypoint.toml").write_text("[run]\nnproc-per-node = 2\n")
    (tmp_path / "train.py").write_text("import os\nos.write(1, os.environ['WORLD_SIZE'].encode())\n")
    done = _run("train.py", folder=tmp_path)
    assert done.stdout == "22", done.stderr


def test_the_file_has_variables_for_a_command_and_the_environment_wins(tmp_path: Path) -> None:
    (tmp_path / "rallypoint.toml").write_text("[env]\nMINE = 'of the file'\nOURS = 7\nRANK = '3'\n")
    show = "import os; print([os.environ.get(name) for name in ('MINE', 'OURS', 'RANK')])"
    done = _run("--", sys.executable, "-c", show, folder=tmp_path, environ={"MINE": "of the shell"})
    assert (done.returncode, done.stdout) == (0, "['of the shell', '7', '3']\n"), done.stderr


def test_the_file_has_variables_for_a_script_but_does_not_say_which_rank_it_is(tmp_path: Path) -> None:
    (tmp_path / "rallypoint.toml").write_text("[env]\nMINE = 'x'\nRANK = '3'\n")
    (tmp_path / "train.py").write_text("import os\nprint(os.environ['MINE'], os.environ['RANK'])\n")
    done = _run("--nproc-per-node=1", "train.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "x 0\n"), done.stderr


@pytest.mark.slow
def test_two_machines_meet(tmp_path: Path) -> None:
    options = ["--nnodes=2", f"--rdzv-endpoint=localhost:{free_port()}", "--nproc-per-node=1"]
    with job(tmp_path) as running:
        for _ in range(2):
            running.start(TRAIN + DONE, options, command=_RUN)
        assert running.wait() == [0, 0], running.logs()
        assert running.logs().count("done ") == 2
        assert running.logs().count("2 of 2 ranks have joined") >= 1


def test_a_command_runs_as_it_is_with_help_where_torch_needs_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + DONE)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "train.py",
    ]
    done = _run("--", *torchrun, folder=tmp_path, environ=_NO_LIBUV)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done ") == 2


def test_what_another_launcher_says_of_ranks_is_not_ours(tmp_path: Path) -> None:
    """A job controller sets these for every machine."""
    (tmp_path / "train.py").write_text("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    outer = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    done = _run("--nproc-per-node=1", "train.py", folder=tmp_path, environ=outer)
    assert (done.returncode, done.stdout) == (0, "0 1\n"), done.stderr


# Exit codes and signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 7, 130])
def test_exit_codes_pass(code: int) -> None:
    done = _run("--", sys.executable, "-c", f"import sys; print('said'); sys.exit({code})")
    assert (done.returncode, done.stdout) == (code, "said\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_command_that_a_signal_ends_is_told_as_such(number: signal.Signals) -> None:
    done = _run("--", sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})")
    assert done.returncode == -number


_CATCH = """
import signal, sys, time
def caught(number, frame):
    print("caught", signal.Signals(number).name, flush=True)
    sys.exit(5)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), caught)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signals_pass(name: str, tmp_path: Path) -> None:
    with job(tmp_path) as running:
        (tmp_path / "catch.py").write_text(_CATCH)
        agent = running.start("", ["--", sys.executable, str(tmp_path / "catch.py")], command=_RUN)
        running.await_text("ready")
        agent.send_signal(getattr(signal, name))
        assert running.wait() == [5], running.logs()
        assert running.log().count(f"caught {name}") == 1


def test_ctrl_c_on_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    (tmp_path / "catch.py").write_text(_CATCH)
    code, output = _on_terminal(
        [sys.executable, *_RUN, "--", sys.executable, str(tmp_path / "catch.py")],
        lambda seen, press: press(b"\x03") if b"ready" in seen else None,
    )
    assert code == 5, output
    assert output.count(b"caught SIGINT") == 1


@pytest.mark.slow
def test_a_job_that_is_terminated_leaves_no_process(tmp_path: Path) -> None:
    script = TRAIN + 'say("up", rank)\ntime.sleep(600)\n'
    with job(tmp_path) as running:
        agent = running.start(script, ["--nproc-per-node=2"], command=_RUN)
        running.await_text("up 0")
        running.await_text("up 1")
        agent.send_signal(signal.SIGTERM)
        assert running.wait() == [-signal.SIGTERM]
        assert "failed" not in running.log()
        _await_nobody(running)


def _await_nobody(running: Job) -> None:
    deadline = time.monotonic() + 30
    while left := running.processes():
        assert time.monotonic() < deadline, left
        psutil.wait_procs(left, timeout=0.2)


def _on_terminal(
    command: Sequence[str], act: Callable[[bytes, Callable[[bytes], Any]], object]
) -> tuple[int, bytes]:
    """Run a command on a terminal; `act` sees what it has printed, and may press keys, once."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], list(command))
    seen, pressed = b"", False

    def press(keys: bytes) -> None:
        nonlocal pressed
        if not pressed:
            os.write(terminal, keys)
            pressed = True

    try:
        while True:
            try:
                data = os.read(terminal, 4096)
            except OSError:  # the terminal is closed
                break
            if not data:
                break
            seen += data
            act(seen, press)
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), seen


# While it starts -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_terminal_shows_one_live_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + DONE)
    command = [sys.executable, *_RUN, "--nproc-per-node=2", str(tmp_path / "train.py")]
    code, output = _on_terminal(command, lambda _seen, _press: None)
    text = output.decode()
    assert code == 0, text
    assert "\rrallypoint: no rank has joined yet, 0 s" in text
    assert "rallypoint: 2 of 2 ranks have joined after" in text


def test_ranks_that_do_not_join_are_named(tmp_path: Path) -> None:
    script = """
import os, sys, time, datetime
import torch.distributed as dist
if os.environ["RANK"] in ("1", "3"):
    time.sleep(600)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
"""
    with job(tmp_path) as running:
        running.start(script, ["--nproc-per-node=4"], command=_RUN)
        assert running.wait() == [1], running.logs()
        assert re.search(r"2 of 4 ranks have joined; missing: 1 and 3 on \S+", running.log()), running.log()


@pytest.mark.slow
def test_a_job_that_is_ended_while_ranks_are_missing_names_them(tmp_path: Path) -> None:
    script = TRAIN.replace("dist.init", "time.sleep(600 * int(os.environ['RANK']))\ndist.init")
    with job(tmp_path) as running:
        agent = running.start(script, ["--nproc-per-node=2"], {"TMPDIR": str(tmp_path)}, command=_RUN)
        until(lambda: "missing: 1 on" in _roll(tmp_path), "rank 1 is missed", _SECONDS)
        agent.send_signal(signal.SIGTERM)
        assert running.wait() == [-signal.SIGTERM]
        assert re.search(r"^rallypoint: 1 of 2 ranks have joined; missing: 1 on \S+$", running.log(), re.M)


def _roll(folder: Path) -> str:
    """What the agent of a job has reported of its ranks."""
    return "".join(path.read_text() for path in folder.glob("rallypoint-*/roll.json"))


# When it fails ---------------------------------------------------------------------------------------------


def test_the_first_failure_is_told_from_what_followed(tmp_path: Path) -> None:
    script = TRAIN + "if rank == 2: raise ValueError('the learning rate is a banana')\n" + DONE
    (tmp_path / "train.py").write_text(script)
    done = _run("--nproc-per-node=3", "train.py", folder=tmp_path)
    assert done.returncode == 1
    report = done.stderr.rpartition("\nrallypoint: ")[2]
    assert re.match(r"rank 2 \(process \d+ on \S+\) failed first: ValueError: the learning rate", report)
    assert "in <module>" in report
    assert "ChildFailedError" not in done.stderr
    first, _, rest = report.partition("what followed from that:")
    assert "banana" in first
    assert "banana" not in rest


def test_a_rank_that_is_killed_is_told(tmp_path: Path) -> None:
    script = TRAIN + "if rank == 1: os.kill(os.getpid(), 9)\n" + DONE
    (tmp_path / "train.py").write_text(script)
    done = _run("--nproc-per-node=2", "train.py", folder=tmp_path)
    assert done.returncode == 1
    assert re.search(r"rallypoint: rank 1 \(process \d+\) ended by SIGKILL", done.stderr), done.stderr
    assert "memory ran out" in done.stderr


@pytest.mark.slow
def test_a_failure_on_another_machine_is_told(tmp_path: Path) -> None:
    script = TRAIN + "if os.environ['NAME'] == 'b': raise ValueError('only here')\n" + DONE
    options = ["--nnodes=2", f"--rdzv-endpoint=localhost:{free_port()}", "--nproc-per-node=1"]
    with job(tmp_path) as running:
        for name in ("a", "b"):
            running.start(script, options, {"NAME": name}, command=_RUN)
        assert running.wait() == [1, 1], running.logs()
        assert re.search(
            r"on another machine: rank \d \(process .*\) failed: ValueError: only here", running.log(0)
        )
        assert re.search(
            r"rallypoint: rank \d \(process .*\) failed first: ValueError: only here", running.log(1)
        )


@pytest.mark.slow
def test_a_machine_that_never_comes_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    options = ("--nnodes=2", "--node-rank=0", f"--rdzv-endpoint=localhost:{free_port()}", "--join-timeout=2")
    done = _run(*options, "train.py", folder=tmp_path)
    assert done.returncode == 1
    assert "1 of 2 machines came within 2 s" in done.stderr
    assert "missing: machine rank 1" in done.stderr
    assert "Traceback" not in done.stderr


# What it is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no script to start"),
        (("--nproc-per-nod=2", "x.py"), "did you mean --nproc-per-node"),
        (("--nnodes=2", "x.py"), "endpoint"),
        (("--", "no-such-program"), "cannot start 'no-such-program'"),
        (("--patch=sometimes", "x.py"), "auto"),
        (("--nproc-per-node=2", "--", "true"), "--nproc-per-node means nothing to a command"),
    ],
)
def test_wrong_usage_exits_with_2(words: Sequence[str], message: str) -> None:
    done = _run(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_show_config_says_where_each_value_comes_from(tmp_path: Path) -> None:
    (tmp_path / "rallypoint.toml").write_text("[run]\nmax-restarts = 3\n")
    words = ("--show-config", "--nnodes=1")
    environ = {"PET_TEE": "3"}
    lines = _run(*words, folder=tmp_path, environ=environ).stdout.splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert "command line (--nnodes)" in rows["nnodes"]
    assert "environment (PET_TEE)" in rows["tee"]
    assert "rallypoint.toml" in rows["max_restarts"]
    assert "built-in" in rows["join_timeout"]
    document = json.loads(_run(*words, "--json", folder=tmp_path, environ=environ).stdout)
    assert document["max_restarts"]["value"] == 3


def test_help_names_every_option() -> None:
    done = _run("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("--nproc-per-node", "--rdzv-endpoint", "--show-config", "-m"))


# Pure parts ------------------------------------------------------------------------------------------------


def test_the_signals_of_each_platform() -> None:
    assert signal.SIGTERM in signals_to_pass(["SIGTERM", "SIGHUP"])
    assert signals_to_pass(["SIGINT"]) == [signal.SIGINT]  # as on Windows, but for SIGBREAK


def test_on_windows_the_console_tells_the_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert comes_from_terminal(signal.SIGINT, had_terminal=True)
    assert not comes_from_terminal(signal.SIGTERM, had_terminal=True)
    monkeypatch.setattr(signal, "SIGBREAK", 21, raising=False)
    assert comes_from_terminal(21, had_terminal=False)


def test_a_hang_up_is_passed_on_unless_the_terminal_sent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.launch.running.has_terminal", lambda: False)
    assert comes_from_terminal(signal.SIGHUP, had_terminal=True)
    assert not comes_from_terminal(signal.SIGHUP, had_terminal=False)


@pytest.mark.parametrize(("code", "ends_with"), [(0, 0), (7, 7), (-15, 1)])
def test_on_windows_there_is_no_signal_to_end_by(
    code: int, ends_with: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        end_as(code)
    assert ended.value.code == ends_with
