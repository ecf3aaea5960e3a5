"""Processes of Windows: how `rallypoint run` finds, starts and ends a command. None imports torch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryFile

import psutil
import pytest

import rallypoint
from processes import is_wine
from raw import until

pytestmark = pytest.mark.windows

_RUN = (sys.executable, "-m", "rallypoint", "run")
_SECONDS = 120

_WITH_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with open("draft", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.replace("draft", "processes")
time.sleep(300)
"""


def run_to_files(
    command: list[str],
    seconds: float,
    variables: Mapping[str, str],
    folder: Path | None = None,
    flags: int = 0,
) -> CompletedProcess[str]:
    """What a command starts and leaves behind would keep a pipe open: so the output goes to files."""
    with TemporaryFile() as output, TemporaryFile() as errors:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONIOENCODING": "utf-8", **variables},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            timeout=seconds,
            creationflags=flags,
        )
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace").replace("\r\n", "\n").strip())
        return CompletedProcess(done.args, done.returncode, *texts)


def _run(*words: str | Path, folder: Path | None = None, **variables: str) -> CompletedProcess[str]:
    return run_to_files([*_RUN, *map(str, words)], _SECONDS, variables, folder)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = _start_with_a_child(tmp_path)
    processes = _await_processes(tmp_path)
    launcher.kill()
    launcher.wait(20)
    gone, left = psutil.wait_procs(processes, 20)
    assert (len(gone), left) == (2, [])


def _start_with_a_child(folder: Path, flags: int = 0) -> subprocess.Popen[bytes]:
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [*_RUN, "--", sys.executable, "-c", _WITH_A_CHILD],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            creationflags=flags,
        )


def _await_processes(folder: Path) -> list[psutil.Process]:
    until((folder / "processes").exists, "the command has started its child", _SECONDS)
    return [psutil.Process(int(word)) for word in (folder / "processes").read_text().split()]


def test_what_a_command_leaves_behind_runs_on_after_its_orderly_end(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text(_WITH_A_CHILD.rpartition("time.sleep")[0])
    ended = _run("--", sys.executable, tmp_path / "leave.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    child = psutil.Process(int((tmp_path / "processes").read_text().split()[1]))
    assert child.is_running()
    child.kill()


@pytest.mark.parametrize("code", [3, 0xC0000005, 0xC000013A, 0xFFFFFFFF])
def test_an_exit_code_is_passed_on_whole(code: int) -> None:
    signed = code - (1 << 32) if code >> 31 else code
    assert _run("--", sys.executable, "-c", f"import os; os._exit({signed})").returncode == code


@pytest.mark.skipif(is_wine(), reason="Wine has no console here that sends Ctrl-Break")
def test_ctrl_break_ends_launcher_and_command(tmp_path: Path) -> None:
    if sys.platform != "win32":  # for the type checker, which knows its own system alone
        return
    launcher = _start_with_a_child(tmp_path, subprocess.CREATE_NEW_PROCESS_GROUP)
    processes = _await_processes(tmp_path)
    try:
        launcher.send_signal(signal.CTRL_BREAK_EVENT)
        assert launcher.wait(20) == 0xC000013A
        assert psutil.wait_procs(processes, 20)[1] == []
    finally:
        launcher.kill()
        launcher.wait(20)


def test_a_command_is_found_as_the_shell_finds_it(tmp_path: Path) -> None:
    """By PATH, which is of the activated environment, and with the endings of PATHEXT."""
    folder = tmp_path / "Über uns"
    folder.mkdir()
    (folder / "training.bat").write_text("@echo off\r\necho trained %1\r\nexit /b 7\r\n")
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    done = _run("--", "training", "well", PATH=path)
    assert (done.returncode, done.stdout) == (7, "trained well"), done.stderr


# Layouts of Python ------------------------------------------------------------------------------------------


def portable(folder: Path, *more: str) -> Path:
    """An embeddable Python: a `._pth` file beside python.exe lists its whole path, and PYTHONPATH is ignored.

    The listing names the standard library and the packages of this Python, and what is given.
    """
    _copy_python(folder)
    home = Path(sys.base_prefix)
    name = f"python{sys.version_info.major}{sys.version_info.minor}._pth"
    listing = [".", str(home / "DLLs"), str(home / "Lib"), *more]
    (folder / name).write_text("\n".join(listing) + "\n", encoding="utf-8")
    return folder / "python.exe"


def _virtual_environment(folder: Path) -> Path:
    """A virtual environment with the packages of this Python."""
    _copy_python(folder / "Scripts")
    settings = f"home = {sys.base_prefix}\ninclude-system-site-packages = true\n"
    (folder / "pyvenv.cfg").write_text(settings, encoding="utf-8")
    return folder / "Scripts" / "python.exe"


def _copy_python(folder: Path) -> None:
    folder.mkdir(parents=True)
    home = Path(sys.base_prefix)
    for file in (*home.glob("*.dll"), home / "python.exe"):
        shutil.copy2(file, folder)


SOURCE = str(Path(rallypoint.__file__).parents[1])
PACKAGES = str(Path(psutil.__file__).parents[1])


def test_a_python_that_rallypoint_cannot_get_into_is_told_with_the_way_out(tmp_path: Path) -> None:
    python = portable(tmp_path / "Meine Anwendung ä" / "python_embeded")
    told = _run("--", python, "-c", "import sys; print('rallypoint_hooks' in sys.modules)")
    assert (told.returncode, told.stdout) == (0, "False"), told.stderr
    assert "lets its Python find only what is listed there" in told.stderr
    assert f'"{python}" -m rallypoint enable' in told.stderr


@pytest.mark.parametrize("is_virtual", [False, True], ids=["portable", "virtual environment"])
def test_every_layout_can_be_enabled(is_virtual: bool, tmp_path: Path) -> None:
    prefix = tmp_path / "Meine Anwendung ä" / "python"
    python = _virtual_environment(prefix) if is_virtual else portable(prefix, SOURCE, PACKAGES)
    switch = prefix / "etc" / "rallypoint" / "enabled"
    for command, there in (("enable", True), ("disable", False)):
        said = subprocess.run(
            [python, "-m", "rallypoint", command], capture_output=True, text=True, timeout=_SECONDS
        )
        assert (said.returncode, switch.exists()) == (0, there), said.stderr
    told = _run("--", python, "-c", "print('hello')")
    assert (told.returncode, told.stdout, told.stderr) == (0, "hello", "")
