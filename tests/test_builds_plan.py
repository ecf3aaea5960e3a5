"""`rallypoint torch plan`: what is decided, that bash accepts it, and that `--run` stops where it must."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build_files import ON, WITH, elf, package, tree
from command_line import Outcome, invoke
from rallypoint.cli.main import call
from rallypoint.diagnose.builds.plan import (
    Platform,
    TreeFacts,
    Wishes,
    make_plan,
    parse_architectures,
)
from rallypoint.diagnose.builds.scripts import ONE_RANK, write_script
from rallypoint.errors import UsageError

_WISHES = Wishes("/src/pytorch", Platform.LINUX, "/env/bin/python", ("9.0", "12.0"))
_BUILT = TreeFacts(
    "2.9.0a0",
    "build_sm120",
    {
        "USE_CUDA": "ON",
        "USE_NCCL": "1",
        "USE_TENSORPIPE": "OFF",
        "USE_LIBUV": "ON",
        "TORCH_CUDA_ARCH_LIST": "12.0;9.0",
    },
    built=True,
)


_ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the plan for Linux is run")


def _script(facts: TreeFacts, wishes: Wishes = _WISHES) -> str:
    return write_script(make_plan(wishes, facts))


# Decisions


def test_a_tree_that_was_built_needs_two_libraries() -> None:
    made = make_plan(_WISHES, _BUILT)
    assert (made.whole, made.reason) == (False, "it was built before: torch_cpu and torch_python are enough")


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (replace(_WISHES, architectures=("9.0",)), "the architectures, from 12.0;9.0 to 9.0"),
        (replace(_WISHES, architectures=()), "USE_CUDA, USE_NCCL"),
        (replace(_WISHES, nccl=False), "USE_NCCL"),
    ],
)
def test_what_changes_more_than_the_store_is_built_whole(wishes: Wishes, words: str) -> None:
    made = make_plan(wishes, _BUILT)
    assert made.whole
    assert f"changes {words}" in made.reason
    assert "build_sm120 stays as it is" in made.reason
    assert "build=build\n" in write_script(made)


@pytest.mark.parametrize(("archs", "said"), [(("9.0", "12.0"), True), (("9.0",), False), ((), False)])
def test_what_an_architecture_takes_is_said_where_it_is_asked_for(archs: tuple[str, ...], said: bool) -> None:
    script = _script(TreeFacts(), replace(_WISHES, architectures=archs))
    assert ("12.0 takes CUDA 12.8" in script) == said


@pytest.mark.parametrize(
    ("platform", "archs", "options"),
    [
        (Platform.LINUX, ("12.0",), ["ON", "ON", "ON"]),
        (Platform.MACOS, (), ["ON", "OFF", "OFF"]),
        (Platform.WINDOWS, ("12.0",), ["OFF", "ON", "OFF"]),
    ],
)
def test_options_by_platform(platform: Platform, archs: tuple[str, ...], options: list[str]) -> None:
    chosen = make_plan(replace(_WISHES, platform=platform, architectures=archs), TreeFacts()).options
    assert [chosen[name] for name in ("USE_TENSORPIPE", "USE_CUDA", "USE_NCCL")] == options


def test_architectures() -> None:
    assert parse_architectures("9.0, 12.0;10.0a 8.6+PTX") == ("9.0", "12.0", "10.0a", "8.6+PTX")
    assert parse_architectures("") == ()
    for wrong in ("sm_90", "9", "9.0,x", "$(id)"):
        with pytest.raises(UsageError, match="is no architecture"):
            parse_architectures(wrong)


def test_contradictions() -> None:
    for wrong in (replace(_WISHES, platform=Platform.MACOS), replace(_WISHES, jobs=0)):
        with pytest.raises(UsageError):
            make_plan(wrong, TreeFacts())


# Scripts

_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
_NASTY = replace(_BUILT, version="a\nrm -rf /\n", build="b 'c' $(d)")


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([Platform.LINUX, Platform.MACOS]),
    _TEXTS,
    _TEXTS,
    st.sampled_from([TreeFacts(), TreeFacts(missing=True), _BUILT, _NASTY]),
)
def test_bash_accepts_every_plan(platform: Platform, path: str, python: str, facts: TreeFacts) -> None:
    archs = () if platform is Platform.MACOS else ("9.0", "8.6+PTX")
    script = _script(facts, Wishes(path, platform, python, archs, jobs=4))
    assert "sudo" not in script
    assert "\nrm " not in script
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    # An assignment is read back, so that no quote of a path ends early.
    probe = script.partition("step=\n")[0] + 'printf "%s\\0%s" "$tree" "$python"\n'
    assert subprocess.run([bash, "-n"], input=script.encode(), capture_output=True).stderr == b""
    said = subprocess.run([bash], input=probe.encode(), capture_output=True, check=True).stdout
    assert said == f"{path}\0{python}".encode()


def test_the_plan_for_windows_says_what_it_cannot_do() -> None:
    wishes = replace(_WISHES, platform=Platform.WINDOWS, tree="C:\\src\\100%", python="python", jobs=4)
    script = _script(replace(_BUILT, version="2.9.0\r\ndel *", missing=True), wishes)
    assert "The libuv server will not be in it" in script
    tree = '"C:\\src\\100%%"'
    assert f"pytorch {tree} || exit /b 1\ncd /d {tree} || exit /b 1\n" in script
    assert 'set "TORCH_CUDA_ARCH_LIST=9.0;12.0"\n' in script
    assert '"python" -m rallypoint verify || exit /b 1' in script
    assert not any(line.startswith("del") for line in script.splitlines())


def test_one_rank_comes_up_on_libuv(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of that step, on the torch of these tests, which has the server."""
    exec(ONE_RANK, {})
    assert capsys.readouterr().out == "one rank came up on a libuv store\n"


# --run, with stand-ins for the programs that a build takes


def _stand_ins(folder: Path, does: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment whose git, cmake and so on note that they were called.

    `does` has more for them to do, for calls with a word in them.
    """
    programs = folder / "programs"
    programs.mkdir()
    acts = {"find_spec": f"echo {folder}/site/torch/__init__.py", **(does or {})}
    for name in ("git", "cmake", "ninja", "c++", "nvcc", "python"):
        lines = ["#!/bin/bash", f'echo "{name} $*" >> {folder}/notes']
        lines += [f'case "{name} $*" in *"{call}"*) {act};; esac' for call, act in acts.items()]
        (programs / name).write_text("\n".join(lines) + "\n")
        (programs / name).chmod(0o755)
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


Run = Callable[[Path, dict[str, str]], Outcome]


@pytest.fixture
def run_plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: its exit code, and what it and the script print."""

    def run(folder: Path, environment: dict[str, str]) -> Outcome:
        monkeypatch.setenv("PATH", environment["PATH"])
        code = call(_words(folder))
        return Outcome(code, *capfd.readouterr(), None)

    return run


def _words(folder: Path) -> list[str]:
    return ["torch", "plan", str(folder / "pytorch"), "--run", "--python", "python"]


def _built_tree(folder: Path) -> tuple[Path, Path]:
    """A tree that was built, and an older library that is installed elsewhere."""
    sources = tree(folder / "pytorch", ON, built=elf(WITH))
    (sources / "build" / "lib" / "libtorch_python.so").write_bytes(elf(b"new"))
    installed = package(folder / "site" / "torch", elf(b"old"))
    (installed / "lib" / "libtorch_python.so").write_bytes(elf(b"old"))
    return sources / "build" / "lib", installed / "lib"


@_ON_LINUX
def test_run_does_all_steps_in_order(run_plan: Run, tmp_path: Path) -> None:
    built, installed = _built_tree(tmp_path)
    done = run_plan(tmp_path, _stand_ins(tmp_path))
    assert done.exit_code == 0, done.stderr
    notes = [line.partition(" -D")[0] for line in (tmp_path / "notes").read_text().splitlines()]
    assert notes == [
        "python -c import rallypoint",
        "git submodule sync --recursive",
        "git submodule update --init --recursive",
        "python -m pip install -r requirements.txt",
        "cmake -S . -B build",
        "cmake --build build --target torch_cpu torch_python",
        'python -c import importlib.util; print(importlib.util.find_spec("torch").origin)',
        f"python -m rallypoint torch check {tmp_path / 'pytorch'} --python python",
        "python -",
        "python -m rallypoint verify",
    ]
    for name in ("libtorch_cpu.so", "libtorch_python.so"):
        assert (installed / name).read_bytes() == (built / name).read_bytes()
        assert (installed / f"{name}.before").read_bytes() == elf(b"old")
    assert "#!/usr/bin/env bash" in done.stdout


@_ON_LINUX
@pytest.mark.parametrize(("fails", "step"), [("cmake --build", "6. build"), ("torch check", "8. check")])
def test_run_stops_at_the_first_failure(fails: str, step: str, run_plan: Run, tmp_path: Path) -> None:
    _built_tree(tmp_path)
    done = run_plan(tmp_path, _stand_ins(tmp_path, {fails: "exit 3"}))
    assert done.exit_code == 1
    assert f"stopped in step: {step}" in done.stderr
    assert fails in (tmp_path / "notes").read_text().splitlines()[-1]


@_ON_LINUX
def test_an_interruption_ends_all_of_it(tmp_path: Path) -> None:
    _built_tree(tmp_path)
    os.mkfifo(tmp_path / "began")
    environment = _stand_ins(tmp_path, {"cmake --build": f"echo $$ > {tmp_path}/began; exec sleep 600"})
    command = [sys.executable, "-m", "rallypoint", *_words(tmp_path)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        sleeper = psutil.Process(int((tmp_path / "began").read_text()))
        process.send_signal(signal.SIGTERM)
        _, messages = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    assert b"every process of the build has been ended" in messages
    assert sleeper.wait(10) is None or not sleeper.is_running()


def test_nothing_is_run_without_being_asked(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch")
    before = sorted(tmp_path.rglob("*"))
    result = invoke("torch", "plan", str(folder), "--cuda-arch", "9.0,12.0", "--platform", "linux")
    assert result.exit_code == 0
    assert "export TORCH_CUDA_ARCH_LIST='9.0;12.0'" in result.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_no_tree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ([], [str(tmp_path), "--run"]):
        result = invoke("torch", "plan", *arguments)
        assert isinstance(result.exception, UsageError)
        assert result.exception.message == f"{tmp_path} is no source tree of torch"
        assert "git clone --recursive --branch v2.13.0" in result.exception.hint
        assert result.stdout == ""


def test_a_script_is_run_on_its_own_system_only(tmp_path: Path) -> None:
    other = "macos" if sys.platform.startswith("linux") else "linux"
    result = invoke("torch", "plan", str(tmp_path / "new"), "--run", "--platform", other)
    assert isinstance(result.exception, UsageError)
    assert "cannot be run here" in result.exception.message


@_ON_LINUX
@pytest.mark.parametrize("macro", [True, False])
def test_run_where_there_is_no_tree_yet(macro: bool, run_plan: Run, tmp_path: Path) -> None:
    """The tree is cloned; torch's own build is asked to configure, and without the macro nothing is built."""
    template = tree(tmp_path / "template")
    configured = "-DTORCH_USE_LIBUV" if macro else ""
    acts = {
        "git clone": f'cp -r {template} "${{@: -1}}"',
        "--cmake-only": f"mkdir build; echo {configured} > build/build.ninja",
    }
    done = run_plan(tmp_path, _stand_ins(tmp_path, acts))
    notes = (tmp_path / "notes").read_text()
    clone = "git clone --recursive --branch v2.13.0 https://github.com/pytorch/pytorch"
    assert f"{clone} {tmp_path}/pytorch" in notes
    assert (done.exit_code == 0) == macro, done.stderr
    assert ("pip install --no-build-isolation -v -e ." in notes) == macro
    assert ("stopped in step: 6. configure" in done.stderr) != macro
