"""A plan as a script: for bash on Linux and macOS, as a batch file for Windows. Pure.

The script for bash stops at the first step that fails and names it. It asks for no password and installs
nothing outside of the Python that was named: it checks for what the system has to bring.

The batch file has never been run. With MSVC torch's CMake files turn TensorPipe off, and with it
TORCH_USE_LIBUV: no option compiles the server in. So the file builds a torch with distributed, says so, and
ends with the test that counts.
"""

from __future__ import annotations

import re
from shlex import quote
from typing import Final

from rallypoint.diagnose.builds.plan import CLONE, BuildPlan, Platform


def write_script(plan: BuildPlan) -> str:
    """The script of a plan, for its platform."""
    return _write_batch(plan) if plan.wishes.platform is Platform.WINDOWS else _write_bash(plan)


def _variables(plan: BuildPlan) -> dict[str, str]:
    """The options as torch's own build takes them, from the environment."""
    return {name: {"ON": "1", "OFF": "0"}.get(value, value) for name, value in plan.options.items()}


def _version(plan: BuildPlan) -> str:
    return plan.facts.version or "(version unknown)"


# For bash --------------------------------------------------------------------------------------------------
# Each block is a step: why it is there, its title, and its commands. `begin` gets the number in front of it.


def _write_bash(plan: BuildPlan) -> str:
    clone = [_CLONE] if plan.facts.missing else []
    build = [_BUILD_ALL] if plan.whole else [_BUILD_TWO, _copy(plan)]
    blocks = [_tools(plan), *clone, _SUBMODULES, _REQUIREMENTS, _options(plan), _configure(plan)]
    blocks += [*build, _CHECK, _ONE_RANK, _VERIFY]
    numbered = (block.replace("begin '", f"begin '{n}. ", 1) for n, block in enumerate(blocks, 1))
    return _head(plan) + "".join(numbered)


def _head(plan: BuildPlan) -> str:
    lines = [
        "#!/usr/bin/env bash",
        f"# torch {_in_comment(_version(plan))} with the libuv server, for {plan.wishes.platform.value}.",
        f"# {_in_comment(plan.reason)}.",
        "set -euo pipefail",
        f"tree={quote(plan.wishes.tree)}",
        f"build={quote(plan.facts.build)}",
        f"python={quote(plan.wishes.python)}",
        "step=",
        """trap 'echo "stopped in step: $step" >&2' ERR""",
        'begin() { step=$1; echo "== $step" >&2; }',
        'stop() { echo "$1" >&2; return 1; }',
        *([] if plan.facts.missing else ['cd "$tree"']),
    ]
    return "\n".join(lines) + "\n"


def _tools(plan: BuildPlan) -> str:
    cuda = plan.options["USE_CUDA"] == "ON"
    newest = any(each.startswith("12.") for each in plan.wishes.architectures)
    example = ": 12.0 takes CUDA 12.8 or later" if newest else ""
    nvcc = f"# nvcc is CUDA's compiler; it has to know the architectures{example}.\n" if cuda else ""
    system = (
        "Xcode's command line tools; git, cmake and ninja, from Homebrew for example"
        if plan.wishes.platform is Platform.MACOS
        else "on Debian and Ubuntu: build-essential git cmake ninja-build"
    )
    return f"""
# What has to be there ({system}). Rallypoint is for the checks at the end.
{nvcc}begin 'tools'
for program in git cmake ninja c++{" nvcc" if cuda else ""}; do
  command -v "$program" > /dev/null || stop "$program is not installed"
done
"$python" -c "import rallypoint" || stop "install Rallypoint for $python"
"""


_CLONE: Final = f"""
# With its submodules: the libuv that is compiled in is in one of them. It takes gigabytes.
# If the folder is there when the script is run once more, it is taken as it is.
begin 'clone'
[ -e "$tree" ] || {CLONE} "$tree"
cd "$tree"
"""

_SUBMODULES: Final = """
# The libuv that is compiled in is the one that TensorPipe carries, a submodule of a submodule.
begin 'submodules'
git submodule sync --recursive
git submodule update --init --recursive
carried=third_party/tensorpipe/third_party/libuv/include/uv.h
test -f $carried || stop "TensorPipe's libuv is not in the tree"
"""

_REQUIREMENTS: Final = """
# The build runs Python programs that generate sources. Newer trees list what these need in
# pyproject.toml, which pip 25.1 and later can read.
begin 'what the build needs of Python'
if [ -f requirements.txt ]; then
  "$python" -m pip install -r requirements.txt
else
  "$python" -m pip install --group dev
fi
"""


def _options(plan: BuildPlan) -> str:
    lines = [f"export {name}={quote(value)}" for name, value in _variables(plan).items()]
    lines.append("export CMAKE_GENERATOR=Ninja")
    if plan.wishes.jobs is not None:
        lines.append(f"export MAX_JOBS={plan.wishes.jobs} CMAKE_BUILD_PARALLEL_LEVEL={plan.wishes.jobs}")
    return """
# USE_DISTRIBUTED and USE_TENSORPIPE together define TORCH_USE_LIBUV, which compiles the server in.
# USE_LIBUV is not among them: an option of gloo. torch's build takes these from the environment.
begin 'options'
""" + "".join(f"{line}\n" for line in lines)


def _configure(plan: BuildPlan) -> str:
    if plan.facts.cache:
        flags = " ".join(quote(f"-D{name}={value}") for name, value in plan.options.items())
        why = "A folder that is configured already keeps its options until CMake is told others."
        command = f'cmake -S . -B "$build" {flags}'
    else:
        why = "torch's own build, as far as CMake; the whole of it below goes on from there."
        command = '"$python" setup.py build --cmake-only'
    return f"""
# {why}
# Without the macro hours of compiling would be for nothing, so it is looked for first.
begin 'configure'
{command}
grep -q TORCH_USE_LIBUV "$build/build.ninja" || stop "configured, but TORCH_USE_LIBUV is not set"
"""


_BUILD_ALL: Final = """
# All of torch, installed in place: Python then takes it from this tree. It replaces the torch
# that this Python has. It takes hours where no compiler cache helps. In another terminal:
# rallypoint torch watch, with the build folder.
begin 'build'
"$python" -m pip install --no-build-isolation -v -e .
"""

_BUILD_TWO: Final = """
# The store is in torch_cpu, its Python side in torch_python. If the macro is new, most of
# torch_cpu is compiled again. In another terminal: rallypoint torch watch, with that folder.
begin 'build'
cmake --build "$build" --target torch_cpu torch_python
"""


def _copy(plan: BuildPlan) -> str:
    ending = "dylib" if plan.wishes.platform is Platform.MACOS else "so"
    return f"""
# Building these targets does not install them: Python would go on loading the old ones, which
# are kept as .before. Asked from /, since here Python would take the sources' folder.
begin 'copy'
question='import importlib.util; print(importlib.util.find_spec("torch").origin)'
installed=$(dirname "$(cd / && "$python" -c "$question")")/lib
for name in libtorch_cpu.{ending} libtorch_python.{ending}; do
  [ "$build/lib/$name" -ef "$installed/$name" ] && continue
  [ -e "$installed/$name.before" ] || cp -p "$installed/$name" "$installed/$name.before"
  cp -p "$build/lib/$name" "$installed/$name.new"
  cmp "$build/lib/$name" "$installed/$name.new"
  mv -f "$installed/$name.new" "$installed/$name"
done
"""


_CHECK: Final = """
# Configured, compiled in, installed, and the one that Python loads? Read from the files.
begin 'check'
(cd / && "$python" -m rallypoint torch check "$tree" --python "$python")
"""

ONE_RANK: Final = """\
import torch.distributed as dist
store = dist.TCPStore("localhost", 0, 1, True, use_libuv=True)
assert store.libuvBackend, "the store does not use libuv"
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.destroy_process_group()
print("one rank came up on a libuv store")
"""

_ONE_RANK: Final = f"""
# A job of one rank whose store has to be libuv's.
begin 'one rank'
(cd / && "$python" - <<'END'
{ONE_RANK}END
)
"""

_VERIFY: Final = """
# The test of the build: real trainings of two ranks, by every usual route.
begin 'verify'
(cd / && "$python" -m rallypoint verify)
"""


def _in_comment(text: str) -> str:
    """Fit for a comment of both: on one line, and with nothing that cmd expands."""
    return re.sub(r"[^\x20-\x7e]|%", "?", text)


# For Windows -----------------------------------------------------------------------------------------------


def _write_batch(plan: BuildPlan) -> str:
    tree, python = _quoted(plan.wishes.tree), _quoted(plan.wishes.python)
    programs = ["git", "cmake", "ninja", "cl", *(["nvcc"] if plan.options["USE_CUDA"] == "ON" else [])]
    tools = "".join(f"where {name} > nul || (echo {name} is not on PATH& exit /b 1)\n" for name in programs)
    options = "".join(f'set "{name}={value}"\n' for name, value in _variables(plan).items())
    jobs = "" if plan.wishes.jobs is None else f'set "MAX_JOBS={plan.wishes.jobs}"\n'
    clone = configure = ""
    if plan.facts.missing:
        clone = f"""\
rem The tree is not there yet. With its submodules, which are built as well: gigabytes.
if not exist {tree} {CLONE} {tree} || exit /b 1
"""
    if plan.facts.cache:
        flags = " ".join(f'"-D{name}={value}"' for name, value in plan.options.items())
        configure = f"cmake -S . -B {_quoted(plan.facts.build)} {flags} || exit /b 1\n"
    return f"""\
@echo off
rem torch {_in_comment(_version(plan))} for Windows, with torch.distributed.
rem {_in_comment(plan.reason)}.
rem This file has never been tried. Run it in a developer prompt of Visual Studio.
rem The libuv server will not be in it: it comes with TensorPipe, which torch turns off for MSVC.
rem Jobs come up all the same, on Rallypoint's server: rallypoint run.
setlocal
{clone}cd /d {tree} || exit /b 1

rem 1. Tools.
{tools}rem gloo needs a libuv, or torch turns distributed off: conda install -c conda-forge libuv, or set
rem libuv_ROOT to a folder with include, lib and bin.
if not defined libuv_ROOT if not defined CONDA_PREFIX (echo set libuv_ROOT& exit /b 1)

rem 2. Submodules, and what the build needs of Python.
git submodule sync --recursive || exit /b 1
git submodule update --init --recursive || exit /b 1
if exist requirements.txt {python} -m pip install -r requirements.txt || exit /b 1
if not exist requirements.txt {python} -m pip install --group dev || exit /b 1

rem 3. Options. USE_LIBUV is not among them: gloo turns it on by itself, for its transport.
{options}{jobs}set "CMAKE_GENERATOR=Ninja"

rem 4. Build, and install in place. It replaces the torch that this Python has.
{configure}{python} -m pip install --no-build-isolation -v -e . || exit /b 1

rem 5. What is in it. That the server is not is expected, so this does not stop the script.
cd /d \\
{python} -m rallypoint torch check {tree} --python {python}

rem 6. The test of the build: real trainings of two ranks, by every usual route.
{python} -m rallypoint verify || exit /b 1
"""


def _quoted(text: str) -> str:
    """An argument. A batch file has no way to write a quote or an end of line in one; paths have neither."""
    return '"' + re.sub(r'["\r\n]', "?", text).replace("%", "%%") + '"'
