"""A plan as a batch file for Windows. Pure. No such file has been run: Rallypoint was never on Windows.

With MSVC torch's CMake files turn TensorPipe off, and with it TORCH_USE_LIBUV: no option compiles the server
in. The script builds a torch with distributed, says so, and ends with the test that counts.
"""

from __future__ import annotations

import re

from rallypoint.diagnose.builds.plan import CLONE, Plan


def write_script(plan: Plan) -> str:
    """The script of a plan."""
    lines = [
        "@echo off",
        f"rem torch {_plain(plan.facts.version) or '(version unknown)'} for Windows, with torch.distributed.",
        *(f"rem {_plain(remark)}." for remark in plan.remarks),
        "rem Not tried by those who wrote it. Run it in a developer prompt of Visual Studio.",
        "rem The libuv server will not be in it: it comes with TensorPipe, which torch turns off for MSVC.",
        "rem Jobs come up all the same, on Rallypoint's server: rallypoint run.",
        "setlocal",
        *_clone(plan),
        f"cd /d {_quoted(plan.wishes.tree)} || exit /b 1",
        *_tools(plan),
        *_sources(plan),
        *_options(plan),
        *_build(plan),
        *_tests(plan),
    ]
    return "\n".join(lines) + "\n"


def _clone(plan: Plan) -> list[str]:
    if not plan.facts.missing:
        return []
    tree = _quoted(plan.wishes.tree)
    return [
        "rem The tree is not there yet. With its submodules, which are built as well: gigabytes.",
        f"if not exist {tree} {CLONE} {tree} || exit /b 1",
    ]


def _tools(plan: Plan) -> list[str]:
    names = ["git", "cmake", "ninja", "cl", *(["nvcc"] if plan.options["USE_CUDA"] == "ON" else [])]
    return [
        "",
        "rem 1. Tools.",
        *(f"where {name} > nul || (echo {name} is not on PATH& exit /b 1)" for name in names),
        "rem gloo needs a libuv, or torch turns distributed off: conda install -c conda-forge libuv, or set",
        "rem libuv_ROOT to a folder with include, lib and bin.",
        "if not defined libuv_ROOT if not defined CONDA_PREFIX (echo set libuv_ROOT& exit /b 1)",
    ]


def _sources(plan: Plan) -> list[str]:
    python = _quoted(plan.wishes.python)
    return [
        "",
        "rem 2. Submodules, and what the build needs of Python.",
        "git submodule sync --recursive || exit /b 1",
        "git submodule update --init --recursive || exit /b 1",
        f"if exist requirements.txt {python} -m pip install -r requirements.txt || exit /b 1",
        f"if not exist requirements.txt {python} -m pip install --group dev || exit /b 1",
    ]


def _options(plan: Plan) -> list[str]:
    variables = {"ON": "1", "OFF": "0"}
    lines = [f'set "{name}={variables.get(value, value)}"' for name, value in plan.options.items()]
    if plan.wishes.jobs is not None:
        lines.append(f'set "MAX_JOBS={plan.wishes.jobs}"')
    return [
        "",
        "rem 3. Options. USE_LIBUV is not among them: gloo turns it on by itself, for its transport.",
        *lines,
        'set "CMAKE_GENERATOR=Ninja"',
    ]


def _build(plan: Plan) -> list[str]:
    lines = ["", "rem 4. Build, and install in place. It replaces the torch that this Python has."]
    if plan.facts.cache:
        flags = " ".join(f'"-D{name}={value}"' for name, value in plan.options.items())
        lines.append(f"cmake -S . -B {_quoted(plan.facts.build)} {flags} || exit /b 1")
    return [*lines, f"{_quoted(plan.wishes.python)} -m pip install --no-build-isolation -v -e . || exit /b 1"]


def _tests(plan: Plan) -> list[str]:
    python = _quoted(plan.wishes.python)
    return [
        "",
        "rem 5. What is in it. That the server is not is expected, so this does not stop the script.",
        "cd /d \\",
        f"{python} -m rallypoint torch check {_quoted(plan.wishes.tree)} --python {python}",
        "",
        "rem 6. The test of the build: real trainings of two ranks, by every usual route.",
        f"{python} -m rallypoint verify || exit /b 1",
    ]


def _quoted(text: str) -> str:
    """An argument. A batch file has no way to write a quote or an end of line in one; paths have neither."""
    return '"' + re.sub(r'["\r\n]', "?", text).replace("%", "%%") + '"'


def _plain(text: str) -> str:
    """Fit for a remark: on one line, and nothing that cmd expands."""
    return re.sub(r"[^\x20-\x7e]|%", "?", text)
