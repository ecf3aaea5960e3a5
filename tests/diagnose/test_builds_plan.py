"""`rallypoint torch plan`: bash accepts its commands, and they stop where they must."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build_files import ON, WITH, elf, tree
from command_line import invoke
from rallypoint.diagnose.builds.plan import parse_architectures, write_plan
from rallypoint.errors import RallypointError, UsageError

_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
_CLONE = "git clone --recursive --branch v2.13.0 https://github.com/pytorch/pytorch"


@pytest.mark.parametrize(
    ("architectures", "nccl", "values"),
    [(("9.0", "12.0"), True, "111"), (("12.0",), False, "110"), ((), True, "100")],
)
def test_options(architectures: tuple[str, ...], nccl: bool, values: str) -> None:
    script = write_plan("pytorch", "python", architectures, nccl, None)
    for name, value in zip(("USE_TENSORPIPE", "USE_CUDA", "USE_NCCL"), values, strict=True):
        assert f"export {name}={value}\n" in script
        assert f"-D{name}={value}" in script
    assert ("c++ nvcc; do" in script) == bool(architectures)
    assert ("export TORCH_CUDA_ARCH_LIST='9.0;12.0'\n" in script) == (len(architectures) == 2)


def test_architectures() -> None:
    assert parse_architectures("9.0, 12.0;10.0a 8.6+PTX") == ("9.0", "12.0", "10.0a", "8.6+PTX")
    assert parse_architectures("") == ()
    for wrong in ("sm_90", "9", "9.0,x", "$(id)"):
        with pytest.raises(UsageError, match="is no architecture"):
            parse_architectures(wrong)


@settings(max_examples=15, deadline=None)
@given(_TEXTS, _TEXTS, st.sampled_from([(), ("9.0", "8.6+PTX")]))
def test_bash_accepts_every_plan(path: str, python: str, architectures: tuple[str, ...]) -> None:
    script = write_plan(path, python, architectures, nccl=True, jobs=4)
    assert "sudo" not in script
    assert "\nrm " not in script
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    # An assignment is read back, so that no quote of a path ends early.
    head = script.partition("# Tools")[0].replace("set -euxo", "set -euo")
    probe = head + 'printf "%s\\0%s" "$tree" "$python"\n'
    assert subprocess.run([bash, "-n"], input=script.encode(), capture_output=True).stderr == b""
    said = subprocess.run([bash], input=probe.encode(), capture_output=True, check=True).stdout
    assert said == f"{path}\0{python}".encode()


def test_nothing_is_run(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch")
    before = sorted(tmp_path.rglob("*"))
    result = invoke("torch", "plan", str(folder), "--cuda-arch", "9.0,12.0", "--jobs", "3")
    assert result.exit_code == 0
    assert "export TORCH_CUDA_ARCH_LIST='9.0;12.0'\n" in result.stdout
    assert "export MAX_JOBS=3\n" in result.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("torch", "plan")
    assert isinstance(result.exception, UsageError)
    assert result.exception.message == f"{tmp_path} is no source tree of torch"
    assert _CLONE in result.exception.hint
    assert isinstance(invoke("torch", "plan", "new", "--jobs", "0").exception, UsageError)
    monkeypatch.setattr(sys, "platform", "win32")
    result = invoke("torch", "plan", "new")
    assert isinstance(result.exception, RallypointError)
    assert "rallypoint run" in result.exception.hint
    assert result.stdout == ""


# The script, with stand-ins for the programs that a build takes


def _run(folder: Path, does: Mapping[str, str] | None = None) -> tuple[int, list[str]]:
    """The exit code of the script, and the calls of git, cmake and so on.

    `does` has more for them to do, for calls with a word in them.
    """
    programs = folder / "programs"
    programs.mkdir()
    for name in ("git", "cmake", "ninja", "c++", "python"):
        lines = ["#!/bin/bash", f'echo "{name} $*" >> {folder}/notes']
        lines += [f'case "{name} $*" in *"{call}"*) {act};; esac' for call, act in (does or {}).items()]
        (programs / name).write_text("\n".join(lines) + "\n")
        (programs / name).chmod(0o755)
    script = invoke("torch", "plan", str(folder / "pytorch"), "--python", "python").stdout
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=script.encode(), env=environment, capture_output=True)
    notes = (folder / "notes").read_text().splitlines()
    return done.returncode, [line.partition(" -D")[0] for line in notes]


_BUILD = "python -m pip install --no-build-isolation -v -e ."
_ON_POSIX = pytest.mark.skipif(sys.platform == "win32", reason="the script is for bash")


@_ON_POSIX
@pytest.mark.parametrize("fails", ["", "no-build-isolation", "torch check"])
def test_all_commands_in_order_up_to_the_first_failure(fails: str, tmp_path: Path) -> None:
    tree(tmp_path / "pytorch", ON, built=elf(WITH))
    code, notes = _run(tmp_path, {fails: "exit 3"} if fails else {})
    expected = [
        "python -c import rallypoint",
        "git submodule sync --recursive",
        "git submodule update --init --recursive",
        "python -m pip install -r requirements.txt",
        "cmake -S . -B build",
        _BUILD,
        f"python -m rallypoint torch check {tmp_path / 'pytorch'} --python python",
        "python -m rallypoint verify",
    ]
    last = next(n for n, call in enumerate(expected, 1) if (fails or "verify") in call)
    assert (code, notes) == (3 if fails else 0, expected[:last])


@_ON_POSIX
@pytest.mark.parametrize("macro", [True, False])
def test_where_there_is_no_tree_yet(macro: bool, tmp_path: Path) -> None:
    """The tree is cloned; torch's own build is asked to configure, and without the macro nothing is built."""
    template = tree(tmp_path / "template")
    configured = "-DTORCH_USE_LIBUV" if macro else ""
    acts = {
        "git clone": f'cp -r {template} "${{@: -1}}"',
        "--cmake-only": f"mkdir build; echo {configured} > build/build.ninja",
    }
    code, notes = _run(tmp_path, acts)
    assert f"{_CLONE} {tmp_path}/pytorch" in notes
    assert (code == 0) == macro
    assert (_BUILD in notes) == macro
