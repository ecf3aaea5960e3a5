"""The compiled build: what is compiled, what a bad machine gets, and how to have all of it interpreted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from rallypoint.build import SourceOnly, in_use
from raw import SECONDS

pytest.importorskip("hatchling", reason="it builds the package")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
hatch_build = import_module("hatch_build")

MODULES = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in hatch_build.sources()]
SUFFIX = EXTENSION_SUFFIXES[0]

only_compiled = pytest.mark.skipif(in_use() != "compiled", reason="it is about the compiled package")


def test_each_module_that_is_to_be_compiled_exists() -> None:
    assert [str(path) for path in hatch_build.sources() if not path.exists()] == []


# Bad machines


def build_wheel(folder: Path, **environ: str) -> tuple[str, str]:
    """Of a project with little in it: the file name of the wheel, and what is said on standard error."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src/rallypoint/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    variables = os.environ | environ
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    [wheel] = folder.glob("dist/*.whl")
    return wheel.name, done.stderr


def lines_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if "rallypoint:" in line]


PURE = "-py3-none-any.whl"


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"PATH": "/nowhere", "CC": "cc"}, "there is no C compiler"),
        ({"RALLYPOINT_PURE": "1"}, "RALLYPOINT_PURE is set"),
    ],
)
def test_without_a_compiler_or_if_asked_for_the_wheel_is_pure(
    environ: dict[str, str], why: str, tmp_path: Path
) -> None:
    name, said = build_wheel(tmp_path, **environ)
    assert name.endswith(PURE)
    asked = "from hatchling.build import get_requires_for_build_wheel as asked; print(asked())"
    command = [sys.executable, "-c", asked]
    assert subprocess.check_output(command, cwd=tmp_path, env=os.environ | environ, text=True) == "[]\n"
    [line] = lines_of(said)
    assert line.startswith(f"rallypoint: built as pure Python, which is slower: {why}")


@pytest.mark.skipif(sys.platform == "win32", reason="CC names no compiler there")
def test_if_the_compiler_fails_the_wheel_is_pure_and_the_line_has_its_words(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'trial.c:1: error: what is this?' >&2\nexit 1\n")
    broken.chmod(0o755)
    name, said = build_wheel(tmp_path, CC=str(broken))
    assert name.endswith(PURE)
    [line] = lines_of(said)
    assert "slower: trial.c:1: error: what is this? (all of it is in " in line
    log = Path(line.rpartition(" in ")[2].rstrip(")"))
    assert "what is this?" in log.read_text()


def test_headers_that_are_missing_or_of_another_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hatch_build.sysconfig, "get_path", lambda _: str(tmp_path))
    assert hatch_build._why_no_headers().startswith(f"Python's headers are not in {tmp_path}")
    (tmp_path / "patchlevel.h").write_text("#define PY_MAJOR_VERSION 2\n#define PY_MINOR_VERSION\t7\n")
    assert "are of Python 2.7, not of" in hatch_build._why_no_headers()


# Which one runs


def test_the_interpreter_is_given_the_source_beside_an_extension_module(tmp_path: Path) -> None:
    for name in (f"both{SUFFIX}", "both.py", f"native{SUFFIX}", "plain.py"):
        (tmp_path / name).touch()
    for name in ("both", "plain"):
        found = SourceOnly.find_spec(f"rallypoint.{name}", [str(tmp_path)])
        assert found is not None
        assert found.origin == str(tmp_path / f"{name}.py")
    with pytest.raises(ImportError, match="RALLYPOINT_PURE is set"):
        SourceOnly.find_spec("rallypoint.native", [str(tmp_path)])
    assert SourceOnly.find_spec("another.native", [str(tmp_path)]) is None


def files_of_modules(**environ: str) -> list[str]:
    program = (
        f"from importlib import import_module as i; print(*(i(n).__file__ for n in {MODULES}), sep='\\n')"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    return done.stdout.splitlines()


@only_compiled
def test_what_is_to_be_compiled_is() -> None:
    assert [file for file in files_of_modules() if not file.endswith(SUFFIX)] == []


@only_compiled
def test_all_of_it_is_interpreted_if_asked_for() -> None:
    assert [file for file in files_of_modules(RALLYPOINT_PURE="1") if not file.endswith(".py")] == []
    command = [sys.executable, "-m", "rallypoint", "--version"]
    done = subprocess.run(
        command, env=os.environ | {"RALLYPOINT_PURE": "1"}, capture_output=True, text=True, check=True
    )
    assert "(pure Python, as RALLYPOINT_PURE is set)" in done.stdout
