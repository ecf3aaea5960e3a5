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
from typing import NamedTuple

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build_files import ON, WITH, elf, package, tree
from command_line import invoke
from rallypoint.cli.main import call
from rallypoint.diagnose.builds import batch, posix
from rallypoint.diagnose.builds.cache import Entry
from rallypoint.diagnose.builds.plan import ONE_RANK, Facts, Platform, Wishes, parse_architectures, plan
from rallypoint.diagnose.builds.script import read_facts
from rallypoint.errors import UsageError

_WISHES = Wishes("/src/pytorch", Platform.LINUX, "/env/bin/python", ("9.0", "12.0"))
_BUILT = Facts(
    "2.9.0a0",
    "build_sm120",
    {
        "USE_CUDA": Entry("BOOL", "ON"),
        "USE_NCCL": Entry("BOOL", "1"),
        "USE_TENSORPIPE": Entry("BOOL", "OFF"),
        "USE_LIBUV": Entry("BOOL", "ON"),
        "TORCH_CUDA_ARCH_LIST": Entry("STRING", "12.0;9.0"),
    },
    built=True,
)


def _titles(wishes: Wishes, facts: Facts) -> list[str]:
    return [step.title for step in posix.steps_of(plan(wishes, facts))]


# Decisions


def test_a_new_tree_is_built_whole() -> None:
    assert _titles(_WISHES, Facts()) == [
        *("tools", "submodules", "what the build needs of Python", "options", "configure", "build"),
        *("check", "one rank", "verify"),
    ]


def test_a_built_tree_needs_two_targets_and_a_copy() -> None:
    script = posix.write_script(plan(_WISHES, _BUILT))
    assert _titles(_WISHES, _BUILT)[4:] == ["configure", "build", "copy", "check", "one rank", "verify"]
    assert "build=build_sm120\n" in script
    assert 'cmake --build "$build" --target torch_cpu torch_python\n' in script
    assert "-DUSE_TENSORPIPE=ON" in script
    assert "# to be changed: USE_TENSORPIPE is OFF." in script
    assert "# USE_LIBUV is set; it is an option of gloo" in script


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (replace(_WISHES, architectures=("9.0",)), "the architectures, from 12.0;9.0 to 9.0"),
        (replace(_WISHES, architectures=()), "USE_CUDA, USE_NCCL"),
        (replace(_WISHES, nccl=False), "USE_NCCL"),
    ],
)
def test_what_changes_more_than_the_store_is_built_whole(wishes: Wishes, words: str) -> None:
    made = plan(wishes, _BUILT)
    assert made.whole
    assert f"changes {words}" in made.remarks[0]
    assert "build_sm120 stays as it is" in made.remarks[0]
    assert "build=build\n" in posix.write_script(made)


def test_a_tree_that_is_not_there_is_cloned() -> None:
    facts = Facts("2.13.0", missing=True)
    assert _titles(_WISHES, facts)[:3] == ["tools", "clone", "submodules"]
    script = posix.write_script(plan(_WISHES, facts))
    clone = "git clone --recursive --branch v2.13.0 https://github.com/pytorch/pytorch"
    assert f'[ -e "$tree" ] || {clone} "$tree"\ncd "$tree"\n' in script
    assert script.count('cd "$tree"') == 1
    windows = batch.write_script(plan(replace(_WISHES, platform=Platform.WINDOWS, tree="C:\\src"), facts))
    assert f'if not exist "C:\\src" {clone} "C:\\src" || exit /b 1\ncd /d "C:\\src"' in windows
    assert "clone" not in posix.write_script(plan(_WISHES, Facts()))


@pytest.mark.parametrize(("archs", "said"), [(("9.0", "12.0"), True), (("9.0",), False), ((), False)])
def test_what_an_architecture_takes_is_said_where_it_is_asked_for(archs: tuple[str, ...], said: bool) -> None:
    script = posix.write_script(plan(replace(_WISHES, architectures=archs), Facts()))
    assert ("12.0 takes CUDA 12.8" in script) == said


def test_options_by_platform() -> None:
    options = {
        platform: plan(replace(_WISHES, platform=platform, architectures=archs), Facts()).options
        for platform, archs in [
            (Platform.LINUX, ("12.0",)),
            (Platform.MACOS, ()),
            (Platform.WINDOWS, ("12.0",)),
        ]
    }
    names = ("USE_TENSORPIPE", "USE_CUDA", "USE_NCCL")
    assert [options[Platform.LINUX][name] for name in names] == ["ON", "ON", "ON"]
    assert [options[Platform.MACOS][name] for name in names] == ["ON", "OFF", "OFF"]
    assert [options[Platform.WINDOWS][name] for name in names] == ["OFF", "ON", "OFF"]


def test_architectures() -> None:
    assert parse_architectures("9.0, 12.0;10.0a 8.6+PTX") == ("9.0", "12.0", "10.0a", "8.6+PTX")
    assert parse_architectures("") == ()
    for wrong in ("sm_90", "9", "9.0,x", "$(id)"):
        with pytest.raises(UsageError, match="is no architecture"):
            parse_architectures(wrong)


def test_contradictions() -> None:
    for wrong in (replace(_WISHES, platform=Platform.MACOS), replace(_WISHES, jobs=0)):
        with pytest.raises(UsageError):
            plan(wrong, Facts())


def test_facts_of_a_tree(tmp_path: Path) -> None:
    assert read_facts(tmp_path / "nothing") == Facts("2.13.0", missing=True)
    (tmp_path / "file").touch()
    for other in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match="is no source tree of torch") as refusal:
            read_facts(other)
        assert "git clone --recursive --branch v2.13.0" in refusal.value.hint
    facts = read_facts(tree(tmp_path / "pytorch", ON, built=elf(WITH)))
    assert (facts.version, facts.build, facts.built) == ("2.9.0a0", "build", True)
    assert facts.cache["USE_TENSORPIPE"].on


# Scripts

_PLATFORMS = st.sampled_from([Platform.LINUX, Platform.MACOS])
_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@settings(max_examples=15, deadline=None)
@given(
    _PLATFORMS,
    _TEXTS,
    _TEXTS,
    st.lists(st.sampled_from(["9.0", "12.0", "8.6+PTX"]), max_size=2),
    st.booleans(),
    st.none() | st.integers(1, 99),
    st.sampled_from(
        [Facts(), Facts(missing=True), _BUILT, replace(_BUILT, version="a\nrm -rf /\n", build="b 'c' $(d)")]
    ),
)
def test_bash_accepts_every_plan(
    platform: Platform, path: str, python: str, archs: list[str], nccl: bool, jobs: int | None, facts: Facts
) -> None:
    archs = [] if platform is Platform.MACOS else archs
    script = posix.write_script(plan(Wishes(path, platform, python, tuple(archs), nccl, jobs), facts))
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
    script = batch.write_script(plan(wishes, replace(_BUILT, version="2.9.0\r\ndel *")))
    assert "The libuv server will not be in it" in script
    assert 'cd /d "C:\\src\\100%%" || exit /b 1\n' in script
    assert 'set "TORCH_CUDA_ARCH_LIST=9.0;12.0"\n' in script
    assert '"python" -m rallypoint verify || exit /b 1' in script
    assert not any(line.startswith("del") for line in script.splitlines())


def test_one_rank_comes_up_on_libuv(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of that step, on the torch of these tests, which has the server."""
    exec("\n".join(ONE_RANK), {})
    assert capsys.readouterr().out == "one rank came up on a libuv store\n"


# --run, with stand-ins for the programs that a build takes


def _stand_ins(
    folder: Path, fails: str = "", waits: str = "", does: Mapping[str, str] | None = None
) -> dict[str, str]:
    """An environment whose git, cmake and so on note that they were called, and do little else."""
    programs = folder / "programs"
    programs.mkdir()
    notes = folder / "notes"
    for name in ("git", "cmake", "ninja", "c++", "nvcc", "python"):
        lines = ["#!/bin/bash", f'echo "{name} $*" >> {notes}']
        if name == "python":
            lines.append(f'case "$*" in *find_spec*) echo {folder}/site/torch/__init__.py;; esac')
        lines += [f'case "{name} $*" in *"{call}"*) {act};; esac' for call, act in (does or {}).items()]
        lines.append(f'case "{name} $*" in *"{fails or "nothing"}"*) echo broken >&2; exit 3;; esac')
        lines.append(
            f'case "{name} $*" in *"{waits or "nothing"}"*) echo $$ > {folder}/began; exec sleep 600;; esac'
        )
        (programs / name).write_text("\n".join(lines) + "\n")
        (programs / name).chmod(0o755)
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


class Said(NamedTuple):
    code: int
    stdout: str
    stderr: str


Run = Callable[[Path, dict[str, str]], Said]


@pytest.fixture
def run_plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: its exit code, and what it and the script print."""

    def run(folder: Path, environment: dict[str, str]) -> Said:
        monkeypatch.setenv("PATH", environment["PATH"])
        code = call(_words(folder))
        return Said(code, *capfd.readouterr())

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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the plan for Linux is run")
def test_run_does_all_steps_in_order(run_plan: Run, tmp_path: Path) -> None:
    built, installed = _built_tree(tmp_path)
    done = run_plan(tmp_path, _stand_ins(tmp_path))
    assert done.code == 0, done.stderr
    steps = [line for line in done.stderr.splitlines() if line.startswith("== ")]
    assert [step.partition(". ")[2] for step in steps] == [
        *("tools", "submodules", "what the build needs of Python", "options", "configure", "build", "copy"),
        *("check", "one rank", "verify"),
    ]
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the plan for Linux is run")
@pytest.mark.parametrize(
    ("fails", "step"),
    [("git submodule update", "2. submodules"), ("cmake --build", "6. build"), ("torch check", "8. check")],
)
def test_run_stops_at_the_first_failure(fails: str, step: str, run_plan: Run, tmp_path: Path) -> None:
    _built_tree(tmp_path)
    done = run_plan(tmp_path, _stand_ins(tmp_path, fails))
    assert done.code == 1
    assert f"stopped in step: {step}" in done.stderr
    assert fails in (tmp_path / "notes").read_text().splitlines()[-1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the plan for Linux is run")
def test_run_stops_before_the_build_without_the_macro(run_plan: Run, tmp_path: Path) -> None:
    _built_tree(tmp_path)
    build_file = tmp_path / "pytorch" / "build" / "build.ninja"
    build_file.write_text(build_file.read_text().replace("-DTORCH_USE_LIBUV", ""))
    done = run_plan(tmp_path, _stand_ins(tmp_path))
    assert done.code == 1
    assert "configured, but TORCH_USE_LIBUV is not set" in done.stderr
    assert "cmake --build" not in (tmp_path / "notes").read_text()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the plan for Linux is run")
def test_an_interruption_ends_all_of_it(tmp_path: Path) -> None:
    _built_tree(tmp_path)
    os.mkfifo(tmp_path / "began")
    environment = _stand_ins(tmp_path, waits="cmake --build")
    process = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", *_words(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
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
    for arguments in ([], [str(tmp_path)], [str(tmp_path), "--run"]):
        result = invoke("torch", "plan", *arguments)
        assert isinstance(result.exception, UsageError)
        assert (str(tmp_path) in result.exception.message, result.stdout) == (True, "")


def test_a_script_is_run_on_its_own_system_only(tmp_path: Path) -> None:
    other = "macos" if sys.platform.startswith("linux") else "linux"
    result = invoke("torch", "plan", str(tmp_path / "new"), "--run", "--platform", other)
    assert isinstance(result.exception, UsageError)
    assert "cannot be run here" in result.exception.message


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the plan for Linux is run")
@pytest.mark.parametrize("macro", [True, False])
def test_run_where_there_is_no_tree_yet(macro: bool, run_plan: Run, tmp_path: Path) -> None:
    """The tree is cloned; torch's own build is asked to configure, and without the macro nothing is built."""
    template = tree(tmp_path / "template")
    configured = "-DTORCH_USE_LIBUV" if macro else ""
    environment = _stand_ins(
        tmp_path,
        does={
            "git clone": f'cp -r {template} "${{@: -1}}"',
            "--cmake-only": f"mkdir build; echo {configured} > build/build.ninja",
        },
    )
    done = run_plan(tmp_path, environment)
    notes = (tmp_path / "notes").read_text()
    assert (
        f"git clone --recursive --branch v2.13.0 https://github.com/pytorch/pytorch {tmp_path}/pytorch"
        in notes
    )
    assert (done.code == 0) == macro, done.stderr
    assert ("pip install --no-build-isolation -v -e ." in notes) == macro
    assert ("stopped in step: 6. configure" in done.stderr) != macro
