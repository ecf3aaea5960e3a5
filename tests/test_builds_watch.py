"""`rallypoint torch watch` on a real project of CMake and ninja, whose progress the tests decide about."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from command_line import Outcome, invoke
from rallypoint.diagnose.builds.commands import running_command
from rallypoint.diagnose.builds.ninja import ask_what_is_left, find_program
from rallypoint.diagnose.builds.packages import UnreadableError
from rallypoint.diagnose.builds.watch import BuildWatch
from rallypoint.errors import UsageError

_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
_ENVIRONMENT = {**os.environ, "PATH": _PATH}

pytestmark = pytest.mark.skipif(
    not all(shutil.which(name, path=_PATH) for name in ("cmake", "ninja", "cc")) or not hasattr(os, "mkfifo"),
    reason="there is no cmake, ninja or C compiler here",
)

# Six steps: an object and the library of libuv, a gate, the server, a library, and one that makes no file.
# The gate says through one pipe that it has begun, and waits for a word through another.
_PROJECT = """cmake_minimum_required(VERSION 3.18)
project(small C)
add_library(uv_a STATIC third_party/libuv/src/a.c)
add_custom_command(OUTPUT gate.h
  COMMAND sh -c "echo > ${CMAKE_SOURCE_DIR}/began && read word < ${CMAKE_SOURCE_DIR}/go && echo > gate.h"
  DEPENDS uv_a VERBATIM)
set_source_files_properties(TCPStoreLibUvBackend.cpp PROPERTIES
  LANGUAGE C OBJECT_DEPENDS ${CMAKE_BINARY_DIR}/gate.h)
add_custom_target(gate DEPENDS gate.h)
add_library(torch_cpu SHARED TCPStoreLibUvBackend.cpp)
add_dependencies(torch_cpu gate)
add_custom_target(always ALL COMMAND ${CMAKE_COMMAND} -E echo always)
add_dependencies(always torch_cpu)
"""
_STEPS = 6


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", _PATH)


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configured project, as `template`; made as `project`, for cmake notes the place."""
    folder = tmp_path_factory.mktemp("watched")
    project = folder / "project"
    (project / "third_party" / "libuv" / "src").mkdir(parents=True)
    (project / "third_party" / "libuv" / "src" / "a.c").write_text("int a(void) { return 1; }\n")
    (project / "TCPStoreLibUvBackend.cpp").write_text("int b(void) { return 2; }\n")
    (project / "CMakeLists.txt").write_text(_PROJECT)
    _configure(project)
    project.rename(folder / "template")
    return folder


@pytest.fixture
def project(configured: Path) -> Iterator[Path]:
    """A configured project; its build folder is `build`."""
    project = configured / "project"
    shutil.copytree(configured / "template", project, symlinks=True)
    os.mkfifo(project / "began")
    os.mkfifo(project / "go")
    yield project
    shutil.rmtree(project)


def _configure(project: Path, *options: str) -> None:
    command = ["cmake", "-G", "Ninja", "-S", str(project), "-B", str(project / "build"), *options]
    subprocess.run(command, env=_ENVIRONMENT, check=True, capture_output=True, timeout=60)


@contextmanager
def _building(project: Path, log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A build that has come to the gate."""
    program = find_program(project / "build")
    assert program is not None
    with (log or Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen([program, "-C", project / "build"], stdout=output, stderr=output)
    try:
        (project / "began").read_text()
        yield process
    finally:
        process.terminate()  # so that it ends its steps, which are in process groups of their own
        process.wait()


def _open_the_gate(project: Path) -> None:
    (project / "go").write_text("\n")


def _build(project: Path) -> None:
    with _building(project) as process:
        _open_the_gate(project)
        assert process.wait(60) == 0


def _command(project: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "rallypoint", "torch", "watch", str(project / "build"), *options]


def _watch(project: Path, *options: str) -> Outcome:
    """The command, in this process."""
    return invoke("torch", "watch", str(project / "build"), *options)


@contextmanager
def _opening_the_gate(project: Path) -> Iterator[None]:
    """The build in the block finds the gate open when it comes to it."""

    def open_when_reached() -> None:
        (project / "began").read_text()
        _open_the_gate(project)

    keeper = threading.Thread(target=open_when_reached, daemon=True)
    keeper.start()
    yield
    keeper.join(60)


def _snapshot(project: Path, *options: str) -> dict[str, Any]:
    document = json.loads(_watch(project, "--once", "--json", *options).stdout)
    assert isinstance(document, dict)
    return document


def _look(project: Path) -> tuple[str, int, int | None]:
    seen = BuildWatch(project / "build").look()
    return seen.state, seen.done, seen.total


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_build_from_its_begin_to_its_end(project: Path) -> None:
    before = _snapshot(project)
    assert (before["state"], before["done"], before["total"]) == ("not begun", 0, _STEPS)
    with _building(project) as process:
        contents = _contents(project / "build")
        now = _snapshot(project)
        assert _contents(project / "build") == contents
        assert (now["state"], now["done"], now["total"]) == ("running", 2, _STEPS)
        assert now["libuv"] == {"done": 2, "total": 2, "server": False}
        assert now["steps_per_minute"] > 0
        assert now["seconds_left"] > 0
        assert now["load"]["steps"] == 1
        assert now["load"]["memory_bytes"] > 0
        watcher = subprocess.Popen(_command(project), stdout=subprocess.PIPE, text=True)
        assert watcher.stdout is not None
        assert watcher.stdout.readline().startswith(f"running: 2 of {_STEPS} steps; ")
        _open_the_gate(project)
        rest, _ = watcher.communicate(timeout=60)
        assert process.wait(60) == 0
    assert rest == f"complete: {_STEPS} of {_STEPS} steps; libuv is built, its server too\n"
    assert watcher.returncode == 0
    assert _look(project) == ("complete", _STEPS, _STEPS)


def test_one_watch_of_two_builds(project: Path) -> None:
    """However quickly the second one follows: what was logged before it is not its own."""
    watch = BuildWatch(project / "build")
    _build(project)
    assert watch.look().state == "complete"
    (project / "build" / "gate.h").unlink()
    with _building(project) as process:
        assert (watch.look().done, watch.look().total) == (0, 4)
        _open_the_gate(project)
        assert process.wait(60) == 0
        last = watch.look()
        assert (last.state, last.done, last.total) == ("complete", 4, 4)


def test_a_count_does_not_fall_when_what_is_printed_comes_late(project: Path, tmp_path: Path) -> None:
    late = tmp_path / "late"
    late.touch()
    with _building(project):
        watch = BuildWatch(project / "build", late)
        assert watch.look().done == 2
        late.write_text(f"[1/{_STEPS}] Building\n")
        assert (watch.look().done, watch.look().total) == (2, _STEPS)


def test_what_is_left_is_what_ninja_does(project: Path) -> None:
    """After a change of the flags alone, which leaves all times as they are."""
    _build(project)
    program = find_program(project / "build")
    assert program is not None
    _configure(project, "-DCMAKE_C_FLAGS=-DTORCH_USE_LIBUV")
    log = (project / "build" / ".ninja_log").read_bytes()
    left = ask_what_is_left(program, project / "build", log, ["torch_cpu"])
    assert left is not None
    command = [program, "-C", str(project / "build"), "torch_cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        (project / "began").read_text()
        _open_the_gate(project)
        printed, _ = process.communicate(timeout=60)
    totals = [int(total) for total in re.findall(r"^\[\d+/(\d+)\]", printed, re.MULTILINE)]
    assert left.total == totals[-1] == 5


def test_a_failure_is_only_known_by_what_ninja_prints(project: Path) -> None:
    (project / "TCPStoreLibUvBackend.cpp").write_text("#error boom\n")
    log = project / "log"
    with _building(project, log) as process:
        _open_the_gate(project)
        assert process.wait(60) == 1
    blind = _watch(project)
    assert blind.exit_code == 1
    assert blind.stdout == "stopped: 3 of 6 steps; libuv is built, its server is not\n"
    assert "TCPStoreLibUvBackend.cpp.o" in blind.stderr
    assert "--log" in blind.stderr
    told = _watch(project, "--log", str(log))
    assert told.exit_code == 1
    assert told.stdout.startswith("failed: 3 of 6 steps; ")
    assert re.search(r"FAILED: .*TCPStoreLibUvBackend.cpp.o", told.stderr)
    assert "error: #error boom" in told.stderr


def test_a_command_that_fails(project: Path) -> None:
    done = _watch(project, "--", "sh", "-c", "echo no build today; exit 7")
    assert done.exit_code == 1
    assert "failed: 0 of 6 steps; the command ended with 7" in done.stdout
    assert "no build today" in done.stderr


def test_a_command_that_cannot_be_run(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="cannot run /no/such/program: No such file"),
        running_command(["/no/such/program"], None),
    ):
        pass
    with (
        pytest.raises(UsageError, match=f"cannot write to {tmp_path}: Is a directory"),
        running_command(["true"], tmp_path),
    ):
        pass


def test_a_command_that_fails_without_a_word(project: Path) -> None:
    new = _watch(project, "--", "false")
    assert "the command ended with 1, and has printed nothing" in new.stderr
    assert "the first steps that are left to do" in new.stderr
    _build(project)
    done = _watch(project, "--", "false")
    assert done.exit_code == 1
    assert done.stdout.startswith("failed: 6 of 6 steps; the command ended with 1")
    assert "has printed nothing\nnothing was left to build\n" in done.stderr


def test_a_terminal_obeys_nothing_that_a_build_prints(project: Path) -> None:
    done = _watch(project, "--", "sh", "-c", r"printf 'FAILED: a\a\n\tb\b\033[2J\n'; exit 1")
    assert "FAILED: a\\x07" in done.stderr
    assert "  |         b\\x08\\x1b[2J" in done.stderr
    assert all(each.isprintable() or each == "\n" for each in done.stderr)


def test_an_interruption_ends_the_command(project: Path) -> None:
    command = _command(project, "--", "cmake", "--build", str(project / "build"))
    watcher = subprocess.Popen(command, env=_ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        (project / "began").read_text()
        started = psutil.Process(watcher.pid).children(recursive=True)
        watcher.send_signal(signal.SIGTERM)
        watcher.communicate(timeout=30)
    finally:
        watcher.kill()
        watcher.wait()
    assert watcher.returncode == 128 + signal.SIGTERM
    assert started
    _, left = psutil.wait_procs(started, 20)
    assert left == []


def test_a_log_of_another_ninja_is_not_believed(project: Path) -> None:
    program = find_program(project / "build")
    assert program is not None
    assert ask_what_is_left(program, project / "build", b"# ninja log v3\n", []) is None
    assert ask_what_is_left(program, project / "build", b"", ["no such target"]) is None
    assert ask_what_is_left("/no/such/ninja", project / "build", b"", []) is None


def test_a_command_that_configures_first(project: Path) -> None:
    shutil.rmtree(project / "build")
    script = f"cmake -G Ninja -S {project} -B {project}/build && cmake --build {project}/build"
    with _opening_the_gate(project):
        done = _watch(project, "--log", str(project / "log"), "--", "sh", "-c", script)
    assert done.exit_code == 0
    assert f"[{_STEPS}/{_STEPS}]" in (project / "log").read_text()
    last = f"complete: {_STEPS} of {_STEPS} steps; libuv is built, its server too"
    assert done.stdout.splitlines()[-1] == last


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no build\.ninja"):
        BuildWatch(tmp_path).look()
    (tmp_path / "build.ninja").write_text("builddir = elsewhere\nbuild a: phony\n")
    assert BuildWatch(tmp_path).look().total == 0
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / ".ninja_log").write_text("nothing\n")
    with pytest.raises(UnreadableError, match=r"\.ninja_log"):
        BuildWatch(tmp_path).look()
