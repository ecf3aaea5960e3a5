"""`rallypoint torch watch` on a real project of CMake and ninja, whose progress the tests decide about."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_line import Outcome, invoke
from rallypoint.cli import torch as torch_command
from rallypoint.diagnose.builds import watch
from rallypoint.diagnose.builds.packages import UnreadableError
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
target_compile_definitions(torch_cpu PRIVATE TORCH_USE_LIBUV)
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
    ninja = shutil.which("ninja", path=_PATH)
    assert ninja is not None
    with (log or Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen([ninja, "-C", project / "build"], stdout=output, stderr=output)
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


def _watch(project: Path, *options: str) -> Outcome:
    """The command, in this process."""
    return invoke("torch", "watch", str(project / "build"), *options)


def _progress(project: Path, *options: str) -> dict[str, Any]:
    document = json.loads(_watch(project, "--once", "--json", *options).stdout)
    assert isinstance(document, dict)
    return document


def _counts(project: Path) -> tuple[str, int, int | None]:
    seen = watch.read_progress(project / "build")
    return seen.state, seen.done, seen.total


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_build_from_its_begin_to_its_end(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _counts(project) == ("not begun", 0, _STEPS)
    with _building(project) as process:
        contents = _contents(project / "build")
        now = _progress(project)
        assert _contents(project / "build") == contents
        assert (now["state"], now["done"], now["total"]) == ("running", 2, _STEPS)
        assert now["libuv"] == "the libuv server is not compiled yet"
        assert len(now["next_steps"]) == 4

        def end_the_build(_: float) -> None:
            _open_the_gate(project)
            assert process.wait(60) == 0

        monkeypatch.setattr(torch_command, "time", SimpleNamespace(sleep=end_the_build))
        watched = _watch(project)
    assert watched.exit_code == 0
    assert watched.stdout.splitlines() == [
        f"running: 2 of {_STEPS} steps; the libuv server is not compiled yet",
        f"complete: {_STEPS} of {_STEPS} steps; the libuv server is compiled",
    ]
    next((project / "build").rglob("TCPStoreLibUvBackend.cpp.o")).unlink()
    assert _counts(project) == ("stopped", _STEPS - 2, _STEPS)


def test_what_is_left_is_what_ninja_would_do(project: Path) -> None:
    """After a change of the flags alone, which leaves all times as they are."""
    _build(project)
    _configure(project, "-DCMAKE_C_FLAGS=-DTORCH")
    assert _counts(project) == ("stopped", 1, _STEPS)


def test_a_build_without_the_server(project: Path) -> None:
    path = project / "build" / "build.ninja"
    path.write_text(path.read_text().replace("-DTORCH_USE_LIBUV", ""))
    assert _progress(project)["libuv"] == "the libuv server is not in this build"


def test_a_failure_is_only_known_by_what_ninja_prints(project: Path) -> None:
    (project / "TCPStoreLibUvBackend.cpp").write_text("#error boom\n")
    log = project / "log"
    with _building(project, log) as process:
        _open_the_gate(project)
        assert process.wait(60) == 1
    blind = _watch(project)
    assert blind.exit_code == 1
    assert blind.stdout == "stopped: 3 of 6 steps; the libuv server is not compiled yet\n"
    assert "TCPStoreLibUvBackend.cpp.o" in blind.stderr
    assert "--log" in blind.stderr
    told = _watch(project, "--log", str(log))
    assert told.exit_code == 1
    assert told.stdout.startswith("failed: 3 of 6 steps; ")
    assert "  | FAILED: " in told.stderr
    assert "error: #error boom" in told.stderr


def test_a_terminal_obeys_nothing_that_a_build_prints(project: Path) -> None:
    log = project / "log"
    log.write_text("FAILED: a\a\n\tb\b\033[2J\n")
    done = _watch(project, "--log", str(log))
    assert "  | FAILED: a\\x07\n  |         b\\x08\\x1b[2J\n" in done.stderr


def test_what_is_shown_of_the_output(tmp_path: Path) -> None:
    (tmp_path / "build.ninja").write_text("build a: phony\n")
    log = tmp_path / "log"
    for text, shown in (
        ("one\ntwo\n", ["one", "two"]),
        (
            "one\nFAILED: a\nwhy\nFAILED: b\nwhy\nninja: build stopped\n",
            ["FAILED: b", "why", "ninja: build stopped"],
        ),
        ("line\n" * 100, ["line"] * 40),
        ("ninja: error: loading\n" + "line\n" * 100, ["ninja: error: loading"] + ["line"] * 39),
    ):
        log.write_text(text)
        assert list(watch.read_progress(tmp_path, log).last_lines) == shown
    with pytest.raises(UsageError, match="cannot read"):
        watch.read_progress(tmp_path, tmp_path / "none")


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no build\.ninja"):
        watch.read_progress(tmp_path)
    (tmp_path / "build.ninja").write_text("builddir = elsewhere\nbuild a: phony\n")
    assert watch.read_progress(tmp_path).total == 0
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / ".ninja_log").write_text("nothing\n")
    with pytest.raises(UnreadableError, match=r"\.ninja_log"):
        watch.read_progress(tmp_path)


def test_without_an_answer_of_ninja_the_total_is_not_known(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "read_cache", lambda _: {"CMAKE_MAKE_PROGRAM": "/no/such/ninja"})
    assert _counts(project) == ("not begun", 0, None)
