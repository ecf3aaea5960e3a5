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
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from command_line import invoke
from jobs import DONE, TRAIN, Job, free_port, job
from rallypoint.cli.signals import signals_as_interrupts
from rallypoint.diagnose.verify import SIMULATION
from rallypoint.launch.command import _SignalForwarder, comes_from_terminal, end_as
from rallypoint.launch.environment import put_on_path
from rallypoint.launch.options import FLAGS, OPTIONS
from raw import until

_RUN = ("-m", "rallypoint", "run")
_SECONDS = 180
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
def test_a_script_runs_on_as_many_ranks_as_the_file_says(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "rallypoint.toml").write_text("[run]\nnproc-per-node = 2\n")
    (tmp_path / "train.py").write_text(TRAIN + "say('arguments', sys.argv[1:])" + DONE)
    done = _run("train.py", "--lr", "0.1", "--nnodes", folder=tmp_path, environ=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("arguments ['--lr', '0.1', '--nnodes']") == 2
    assert done.stdout.count("done ") == 2
    joined = r"^rallypoint: 2 of 2 ranks have joined after \d+\.\d s; see `rallypoint status \S+:\d+`$"
    assert re.search(joined, done.stderr, re.MULTILINE)


@pytest.mark.slow
def test_a_module_runs_on_one_rank_by_default_whatever_file_and_environment_say_of_ranks(
    tmp_path: Path,
) -> None:
    """Another launcher sets such variables for its ranks. Others in the file are for the job."""
    (tmp_path / "rallypoint.toml").write_text("[env]\nMINE = 'of the file'\nRANK = '5'\n")
    names = ("MINE", "RANK", "WORLD_SIZE")
    show = f"import os, sys\nprint([os.environ[name] for name in {names}], sys.argv[1:])\n"
    (tmp_path / "train.py").write_text(show)
    outer = {
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "elsewhere",
        "MASTER_PORT": "1",
    }
    environ = {**outer, "CUDA_VISIBLE_DEVICES": ""}
    done = _run("-m", "train", "x", folder=tmp_path, environ=environ)
    assert (done.returncode, done.stdout) == (0, "['of the file', '0', '1'] ['x']\n"), done.stderr


def test_a_command_gets_help_and_the_variables_of_the_file_where_it_has_none_of_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "rallypoint.toml").write_text("[env]\nMINE = 'of the file'\nOURS = 7\nRANK = '3'\n")
    show = (
        "import os, sys; print('rallypoint_hooks' in sys.modules, *map(os.getenv, ('MINE', 'OURS', 'RANK')))"
    )
    done = _run("--", sys.executable, "-c", show, folder=tmp_path, environ={"MINE": "of the shell"})
    assert (done.returncode, done.stdout) == (0, "True of the shell 7 3\n"), done.stderr


# Exit codes and signals ------------------------------------------------------------------------------------


def test_an_exit_code_passes() -> None:
    done = _run("--", sys.executable, "-c", "import sys; print('said'); sys.exit(7)")
    assert (done.returncode, done.stdout) == (7, "said\n")


def test_a_script_that_needs_a_launcher_is_named_and_told_how_to_get_one(tmp_path: Path) -> None:
    """As under `accelerate launch`, where that starts a single process."""
    missing = "env:// rendezvous: environment variable RANK expected, but not set"
    (tmp_path / "train.py").write_text(
        f"raise ValueError('Error initializing torch.distributed using {missing}')"
    )
    done = _run("--", sys.executable, "train.py", folder=tmp_path)
    assert done.returncode == 1
    assert re.search(
        r"^rallypoint: train\.py \(process \d+ on \S+\): ValueError: ", done.stderr, re.MULTILINE
    )
    assert "the launcher" not in done.stderr
    assert re.search(
        r"^do first: .*`accelerate launch --multi_gpu --num_processes 2 ", done.stderr, re.MULTILINE
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_a_signal_ends_is_told_as_such(number: signal.Signals) -> None:
    done = _run("--", sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})")
    assert done.returncode == -number


# Says which signals it was sent, and ends with the one that it is given.
_CATCH = """
import os, signal, sys, time
def caught(number, frame):
    name = signal.Signals(number).name
    os.write(1, f"caught {name}\\n".encode())
    if name == sys.argv[1]:
        sys.exit(5)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
        signal.signal(getattr(signal, name), caught)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


def _catching(folder: Path, last: str) -> list[str]:
    """What `rallypoint run` is told to run it."""
    (folder / "catch.py").write_text(_CATCH)
    return ["--", sys.executable, str(folder / "catch.py"), last]


def test_signals_pass(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        agent = running.start("", _catching(tmp_path, "SIGTERM"), command=_RUN)
        running.await_text("ready")
        names = ("SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM")
        for name in names:
            agent.send_signal(getattr(signal, name))
            running.await_text(f"caught {name}")
        assert running.wait() == [5], running.logs()
        assert [running.log().count(f"caught {name}") for name in names] == [1] * len(names)


def test_what_is_to_be_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup: neither this process nor the command hears of a hang-up."""
    nohup = ("sh", "-c", "trap '' HUP; exec \"$@\"", "sh")
    with job(tmp_path) as running:
        agent = running.start("", _catching(tmp_path, "SIGTERM"), command=_RUN, prefix=nohup)
        running.await_text("ready")
        for process in running.processes():
            process.send_signal(signal.SIGHUP)
        agent.send_signal(signal.SIGUSR1)
        running.await_text("caught SIGUSR1")
        agent.send_signal(signal.SIGTERM)
        assert running.wait() == [5], running.logs()
        assert "SIGHUP" not in running.log()


def test_every_other_command_leaves_ignored_what_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_interrupts():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_comes_while_the_command_starts_passes_once() -> None:
    class Started(_SignalForwarder):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_process" and value is not None:
                self.receive(signal.SIGUSR2, None)  # at the worst of moments

    process = SimpleNamespace(sent=[])
    process.send_signal = process.sent.append
    relay = Started(lambda command, number: command.send_signal(number), lambda: None)
    relay.receive(signal.SIGUSR1, None)
    relay.open(cast("subprocess.Popen[bytes]", process))
    assert process.sent == [signal.SIGUSR1, signal.SIGUSR2]


_IN_INIT = """
import os, time
import torch.distributed as dist

if os.environ["RANK"] == "0":
    dist.init_process_group("gloo")
time.sleep(600)
"""


@pytest.mark.parametrize("presses", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_while_ranks_join_ends_the_job_at_once_and_names_the_missing(
    presses: int, tmp_path: Path
) -> None:
    """C++ waits there, and Python hears of Ctrl-C only afterwards: torchrun kills the rank after 30 s."""
    (tmp_path / "train.py").write_text(_IN_INIT)
    pressed: list[float] = []

    def press_ctrl_c(seen: bytes, press: Callable[[bytes], Any]) -> None:
        if b"1 of 2 ranks have joined" in seen and not pressed:
            pressed.append(time.monotonic())
            press(b"\x03" * presses)

    command = [sys.executable, *_RUN, "--nproc-per-node=2", str(tmp_path / "train.py")]
    code, output = _on_terminal(command, press_ctrl_c)
    took, text = time.monotonic() - pressed[0], output.decode()
    assert code == -signal.SIGINT, text
    assert took < 25, text  # a second or two on an idle machine
    assert "\rrallypoint: no rank has joined yet, 0 s" in text
    after = text.partition("^C")[2]
    assert "in init_process_group" not in after
    assert "Logging error" not in after
    interrupted = r"[\r\n]rallypoint: interrupted: 1 of 2 ranks have joined; missing: 1 on \S+\r\n$"
    assert re.search(interrupted, after), text
    assert not re.search(r"\d s[^\r\n]*W\d{4} ", after), "the live line is cleared before torchrun prints"


def test_ctrl_c_on_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    code, output = _on_terminal(
        [sys.executable, *_RUN, *_catching(tmp_path, "SIGINT")],
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


def test_ranks_that_do_not_join_are_named(tmp_path: Path) -> None:
    script = """
import os, time
from rallypoint import TCPStore
if os.environ["RANK"] == "1":
    time.sleep(600)
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False, 2)
store.get("what rank 1 would write")
"""
    with job(tmp_path) as running:
        running.start(script, ["--nproc-per-node=2"], command=_RUN)
        assert running.wait() == [1], running.logs()
        missing = r"^rallypoint: 1 of 2 ranks have joined; missing: 1 on \S+$"
        assert re.search(missing, running.log(), re.MULTILINE), running.log()


# When it fails ---------------------------------------------------------------------------------------------


# Rank 0 loses its connection before rank 1, which is why, has said a word. Neither ends before both have said
# what happened: torchrun ends all others when one has ended.
_BANANA = """
import atexit, os, time

def await_file(name):
    for _ in range(6000):
        if os.path.exists(name):
            return
        time.sleep(0.01)

if os.environ["RANK"] == "0":
    atexit.register(await_file, "cause")
    atexit.register(lambda: open("consequence", "w").close())
    raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:9952")
await_file("consequence")
atexit.register(lambda: open("cause", "w").close())
raise ValueError("the learning rate is a banana")
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(_BANANA, id="in the wrong order"),
        pytest.param(
            TRAIN + "if rank == 1: raise ValueError('the learning rate is a banana')\n" + DONE,
            id="of torch",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_first_failure_is_told_from_what_followed(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    done = _run("--nproc-per-node=2", "train.py", folder=tmp_path)
    assert done.returncode == 1
    report = done.stderr.rpartition("rank 1 (process ")[2]
    assert re.match(r"\d+ on \S+\) failed first: ValueError: the learning rate is a banana$", report, re.M)
    assert "in <module>" in report
    assert "ChildFailedError" not in done.stderr
    first, _, rest = report.partition("do first: ")[0].partition("what followed from that:")
    assert "banana" in first
    assert "banana" not in rest
    if script is _BANANA:
        assert re.search(r"^  rank 0 \(process \d+ on \S+\): RuntimeError$", rest, re.MULTILINE), done.stderr


_LAST_OF_TWO = """
import os, time
from rallypoint import TCPStore

place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*place, world_size=2, wait_for_workers=False, timeout=60)
if os.environ["RANK"] == "1" and not os.path.exists("dead"):
    open("dead", "w").close()
    {death}
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and {is_last}:
    while not os.path.exists("dead"):
        time.sleep(0.01)
    raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:9952")
while not os.path.exists("go"):
    time.sleep(0.05)
"""
"""Rank 1 ends in some way, and rank 0, on the other machine, fails for that."""

_ENDS = [
    pytest.param("os.kill(os.getpid(), 9)", r"rank 1 \(process \d+ on \S+\) ended by SIGKILL", id="killed"),
    pytest.param(
        "raise ValueError('only here')",
        r"rank 1 \(process \d+ on \S+\) failed first: ValueError: only here",
        id="exception",
        marks=pytest.mark.slow,
    ),
]


def _two_machines(running: Job, script: str, *options: str) -> None:
    endpoint = f"localhost:{free_port()}"
    given = ["--nnodes=2", f"--rdzv-endpoint={endpoint}", "--nproc-per-node=1", "--health=off", *options]
    for rank in range(2):
        running.start(script, [*given, f"--node-rank={rank}"], command=_RUN)


@pytest.mark.parametrize(("death", "told"), _ENDS)
def test_all_machines_name_the_same_first_failure(death: str, told: str, tmp_path: Path) -> None:
    with job(tmp_path) as running:
        _two_machines(running, _LAST_OF_TWO.format(death=death, is_last=True))
        assert running.wait() == [1, 1], running.logs()
        for number in range(2):
            report = running.log(number).partition("\nrallypoint: rank ")[2]
            assert re.match(told, f"rank {report}"), running.logs()
            assert report.count("only here") == ("only here" in told) + ("    raise" in report), report
            assert "rallypoint run" not in report
        assert "what followed from that:\n  rank 0 " in running.log(0)


def test_an_attempt_that_ends_says_why_and_what_follows(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        script = _LAST_OF_TWO.format(death="os.kill(os.getpid(), 9)", is_last=False)
        _two_machines(running, script, "--max-restarts=2")
        joined = r"^rallypoint: attempt 2: 2 of 2 ranks have joined after (\S+) s$"
        until(lambda: re.search(joined, running.log(), re.M), "all ranks have joined again", 60)
        (tmp_path / "go").touch()
        assert running.wait() == [0, 0], running.logs()
        ended = (
            r"^rallypoint: attempt 1 has ended: rank 1 \(process \d+ on \S+\) ended by SIGKILL; "
            r"all 2 machines go on; attempt 2 of at most \d follows$"
        )
        for number in range(2):
            assert len(re.findall(ended, running.log(number), re.M)) == 1, running.logs()
        assert len(re.findall(joined, running.log(), re.M)) == 1, running.logs()


# What it is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no script to start"),
        (("--nnodes=2", "x.py"), "endpoint"),
        (("--", "no-such-program"), "cannot start 'no-such-program'"),
        (("--patch=sometimes", "x.py"), "auto"),
        (("--tee=3", "--", "true"), "--tee means nothing to a command"),
    ],
)
def test_wrong_usage_exits_with_2(words: Sequence[str], message: str) -> None:
    said = invoke("run", *words)
    assert (said.exit_code, said.stdout) == (2, "")
    assert message in str(said.exception)


@pytest.mark.slow
def test_an_option_that_torchrun_does_not_know_is_refused_by_torchrun(tmp_path: Path) -> None:
    done = _run("--no-such-option", "1", "train.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "torchrun: error: unrecognized arguments: --no-such-option=1" in done.stderr


def test_show_config_says_where_each_value_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our options come first, then those of torchrun's that are set, then variables of the file."""
    (tmp_path / "rallypoint.toml").write_text("[run]\nmax-restarts = 3\n[env]\nEMPTY = ''\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PET_TEE", "3")
    given = ["--nnodes=1:2", "--rdzv-endpoint=[::1]", "--rdzv-conf=a=1,b=2", "--no-python"]
    lines = invoke("run", "--show-config", *given).stdout.splitlines()
    rows = {name: (text, source) for name, text, source in (line.split(maxsplit=2) for line in lines)}
    others = ["max_restarts", "tee", "no_python", "env.EMPTY"]
    assert list(rows) == [*(option.name for option in OPTIONS), *others]
    assert rows["nnodes"] == ("1:2", "command line (--nnodes)")
    assert rows["tee"] == ("3", "environment (PET_TEE)")
    assert "rallypoint.toml" in rows["max_restarts"][1]
    assert rows["join_timeout"] == ("600", "built-in")
    texts = {"rdzv_endpoint": "[::1]:29400", "rdzv_conf": "a=1,b=2", "standalone": "false"}
    texts |= {"master_addr": "(none)", "no_python": "true", "env.EMPTY": "-"}
    assert {name: rows[name][0] for name in texts} == texts
    document = json.loads(invoke("run", "--show-config", *given, "--json").stdout)
    assert list(document) == list(rows)
    assert document["tee"] == {"value": "3", "source": "environment (PET_TEE)"}
    values: dict[str, object] = {
        "nnodes": "1:2",
        "rdzv_endpoint": "[::1]:29400",
        "rdzv_conf": {"a": "1", "b": "2"},
    }
    values |= {"node_rank": None, "standalone": False, "join_timeout": 600.0, "max_restarts": 3}
    assert {name: document[name]["value"] for name in values} == values


def test_help_names_every_option() -> None:
    said = invoke("run", "--help")
    assert said.exit_code == 0
    assert said.stdout.startswith("usage: rallypoint run [OPTIONS] SCRIPT [ARGS]...\n")
    flags = [*(each.flag for each in OPTIONS), *(each.flag for each in FLAGS)]
    assert [flag for flag in flags if flag not in said.stdout] == []


# Pure parts ------------------------------------------------------------------------------------------------


def test_on_windows_the_console_tells_the_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert comes_from_terminal(signal.SIGINT, had_terminal=True)
    assert not comes_from_terminal(signal.SIGTERM, had_terminal=True)
    monkeypatch.setattr(signal, "SIGBREAK", 21, raising=False)
    assert comes_from_terminal(21, had_terminal=False)


def test_a_hang_up_is_passed_on_unless_the_terminal_sent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.launch.command.has_terminal", lambda: False)
    assert comes_from_terminal(signal.SIGHUP, had_terminal=True)
    assert not comes_from_terminal(signal.SIGHUP, had_terminal=False)


@pytest.mark.parametrize(
    ("code", "ends_with"),
    [(0, 0), (7, 7), (0xC0000005, 0xC0000005 - (1 << 32)), (-2, 0xC000013A - (1 << 32))],
)
def test_on_windows_there_is_no_signal_to_end_by(
    code: int, ends_with: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        end_as(code)
    assert ended.value.code == ends_with
