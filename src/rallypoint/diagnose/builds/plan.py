"""`rallypoint torch plan`: the commands that build torch with the libuv server, as a script for bash. Pure.

They ask for no password, and install nothing outside of the Python that was named. There is no plan for
Windows: with MSVC torch's CMake files turn TensorPipe off, and the server with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote
from typing import Final

from rallypoint.errors import UsageError

CLONE: Final = "git clone --recursive --branch v2.13.0 https://github.com/pytorch/pytorch"
"""With submodules: the libuv that is compiled in is in one of them."""

_ARCHITECTURE: Final = re.compile(r"\d{1,2}\.\d[a-z]?(\+PTX)?")


def parse_architectures(text: str) -> tuple[str, ...]:
    """The architectures in a text such as `9.0,12.0`; `UsageError` for any other text."""
    parts = tuple(part for part in re.split(r"[,; ]+", text) if part)
    for part in parts:
        if not _ARCHITECTURE.fullmatch(part):
            hint = "write compute capabilities with commas between them, such as 9.0,12.0"
            raise UsageError(f"--cuda-arch {text}: {part!r} is no architecture", hint=hint)
    return parts


def write_plan(tree: str, python: str, architectures: Sequence[str], nccl: bool, jobs: int | None) -> str:
    """The script for a source tree, which need not be there yet."""
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs is {jobs}", hint="write a positive number")
    cuda = bool(architectures)
    switches = {"USE_DISTRIBUTED": True, "USE_TENSORPIPE": True, "USE_GLOO": True}
    switches |= {"USE_CUDA": cuda, "USE_CUDNN": cuda, "USE_NCCL": cuda and nccl}
    options = {name: str(int(on)) for name, on in switches.items()}
    if cuda:
        options["TORCH_CUDA_ARCH_LIST"] = ";".join(architectures)
    variables = {**options, "CMAKE_GENERATOR": "Ninja"} | ({"MAX_JOBS": str(jobs)} if jobs else {})
    return _SCRIPT.format(
        tree=quote(tree),
        python=quote(python),
        clone=CLONE,
        nvcc=" nvcc" if cuda else "",
        exports="\n".join(f"export {name}={quote(value)}" for name, value in variables.items()),
        flags=" ".join(quote(f"-D{name}={value}") for name, value in options.items()),
    )


_SCRIPT: Final = """\
#!/usr/bin/env bash
# Builds torch with the libuv server. Stops at the first command that fails; each is printed before it is run.
set -euxo pipefail
tree={tree}
python={python}

# Tools: on Debian and Ubuntu build-essential git cmake ninja-build; on macOS Xcode's command line tools, and
# git, cmake and ninja from Homebrew. nvcc is CUDA's compiler: architecture 12.0 takes CUDA 12.8 or later.
for program in git cmake ninja c++{nvcc}; do command -v "$program"; done
"$python" -c "import rallypoint"  # for the checks at the end

# The sources, with submodules: the libuv that is compiled in is the one that TensorPipe carries.
[ -e "$tree" ] || {clone} "$tree"
cd "$tree"
git submodule sync --recursive
git submodule update --init --recursive
test -f third_party/tensorpipe/third_party/libuv/include/uv.h

# The Python programs that generate sources. Newer trees list what these need in pyproject.toml (pip 25.1).
"$python" -m pip install $([ -f requirements.txt ] && echo -r requirements.txt || echo --group dev)

# USE_DISTRIBUTED and USE_TENSORPIPE together define TORCH_USE_LIBUV, which compiles the server in. USE_LIBUV
# does not: it is an option of gloo. A folder that is configured keeps its options until CMake is told others.
{exports}
if [ -f build/CMakeCache.txt ]; then
  cmake -S . -B build {flags}
else
  "$python" setup.py build --cmake-only
fi
grep -q TORCH_USE_LIBUV build/build.ninja  # without it, hours of compiling would be for nothing

# All that is not built yet, installed in place: it replaces the torch that this Python has. It takes hours
# where no compiler cache helps. How far it is: rallypoint torch watch, with the build folder.
"$python" -m pip install --no-build-isolation -v -e .

# Is it in, does Python load it, and do real trainings come up with it?
cd /
"$python" -m rallypoint torch check "$tree" --python "$python"
"$python" -m rallypoint verify
"""
