"""A plan as a script for bash, on Linux and macOS. Pure.

It stops at the first step that fails and names it. It asks for no password and installs nothing outside of
the Python that was named: what the system has to bring is checked for, and said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Final

from rallypoint.diagnose.builds.plan import CARRIED, CLONE, ONE_RANK, Plan, Platform, library_names

_NEEDS: Final[Mapping[Platform, str]] = {
    Platform.LINUX: "on Debian and Ubuntu: build-essential git cmake ninja-build",
    Platform.MACOS: "Xcode's command line tools; git, cmake and ninja, from Homebrew for example",
}
_FIND_MACRO: Final = (
    'grep -q TORCH_USE_LIBUV "$build/build.ninja" || stop "configured, but TORCH_USE_LIBUV is not set"'
)


@dataclass(frozen=True)
class Step:
    """A part of a script: what it does, why, and the lines that do it."""

    title: str
    why: tuple[str, ...]
    lines: tuple[str, ...]


def write_script(plan: Plan) -> str:
    """The script of a plan."""
    lines = [
        "#!/usr/bin/env bash",
        f"# torch {_plain(plan.facts.version) or '(version unknown)'} with the libuv server, "
        f"for {plan.wishes.platform.value}.",
        *(f"# {_plain(remark)}." for remark in plan.remarks),
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
    for number, step in enumerate(steps_of(plan), 1):
        lines += [
            "",
            *(f"# {line}" for line in step.why),
            f"begin {quote(f'{number}. {step.title}')}",
            *step.lines,
        ]
    return "\n".join(lines) + "\n"


def steps_of(plan: Plan) -> list[Step]:
    """The steps, in their order."""
    sources = [_clone(), _submodules()] if plan.facts.missing else [_submodules()]
    configure = _configure_again(plan) if plan.facts.cache else _configure()
    build = [_build_all()] if plan.whole else [_build_two(), _copy(plan)]
    first = [_tools(plan), *sources, _requirements(), _options(plan), configure]
    return [*first, *build, _check(), _one_rank(), _verify()]


def _tools(plan: Plan) -> Step:
    cuda = plan.options["USE_CUDA"] == "ON"
    programs = "git cmake ninja c++ nvcc" if cuda else "git cmake ninja c++"
    why = [f"What has to be there ({_NEEDS[plan.wishes.platform]}). Rallypoint is for the checks at the end."]
    if cuda:
        newest = any(each.startswith("12.") for each in plan.wishes.architectures)
        example = ": 12.0 takes CUDA 12.8 or later" if newest else ""
        why.append(f"nvcc is CUDA's compiler; it has to know the architectures{example}.")
    return Step(
        "tools",
        tuple(why),
        (
            f"for program in {programs}; do",
            '  command -v "$program" > /dev/null || stop "$program is not installed"',
            "done",
            '"$python" -c "import rallypoint" || stop "install Rallypoint for $python"',
        ),
    )


def _clone() -> Step:
    return Step(
        "clone",
        (
            "With its submodules: the libuv that is compiled in is in one of them. It takes gigabytes.",
            "If the folder is there when the script is run once more, it is taken as it is.",
        ),
        (f'[ -e "$tree" ] || {CLONE} "$tree"', 'cd "$tree"'),
    )


def _submodules() -> Step:
    return Step(
        "submodules",
        ("The libuv that is compiled in is the one that TensorPipe carries, a submodule of a submodule.",),
        (
            "git submodule sync --recursive",
            "git submodule update --init --recursive",
            f'test -f {CARRIED} || stop "TensorPipe\'s libuv is not in the tree"',
        ),
    )


def _requirements() -> Step:
    return Step(
        "what the build needs of Python",
        (
            "The build runs Python programs that generate sources. Newer trees list what these need in",
            "pyproject.toml, which pip 25.1 and later can read.",
        ),
        (
            "if [ -f requirements.txt ]; then",
            '  "$python" -m pip install -r requirements.txt',
            "else",
            '  "$python" -m pip install --group dev',
            "fi",
        ),
    )


def _options(plan: Plan) -> Step:
    why = (
        "USE_DISTRIBUTED and USE_TENSORPIPE together define TORCH_USE_LIBUV, which compiles the server in.",
        "USE_LIBUV is not among them: an option of gloo. torch's build takes these from the environment.",
    )
    lines = [f"export {name}={quote(_as_variable(value))}" for name, value in plan.options.items()]
    lines.append("export CMAKE_GENERATOR=Ninja")
    if plan.wishes.jobs is not None:
        lines.append(f"export MAX_JOBS={plan.wishes.jobs} CMAKE_BUILD_PARALLEL_LEVEL={plan.wishes.jobs}")
    return Step("options", why, tuple(lines))


def _configure() -> Step:
    return Step(
        "configure",
        (
            "torch's own build, as far as CMake; the whole of it below goes on from there. Without the macro",
            "hours of compiling would be for nothing, so it is looked for first.",
        ),
        ('"$python" setup.py build --cmake-only', _FIND_MACRO),
    )


def _configure_again(plan: Plan) -> Step:
    flags = " ".join(quote(f"-D{name}={value}") for name, value in plan.options.items())
    return Step(
        "configure",
        (
            "A folder that is configured already keeps its options until CMake is told others.",
            "Without the macro hours of compiling would be for nothing, so it is looked for first.",
        ),
        (f'cmake -S . -B "$build" {flags}', _FIND_MACRO),
    )


def _build_all() -> Step:
    return Step(
        "build",
        (
            "All of torch, installed in place: Python then takes it from this tree. It replaces the torch",
            "that this Python has. It takes hours where no compiler cache helps. In another terminal:",
            "rallypoint torch watch, with the build folder.",
        ),
        ('"$python" -m pip install --no-build-isolation -v -e .',),
    )


def _build_two() -> Step:
    return Step(
        "build",
        (
            "The store is in torch_cpu, its Python side in torch_python. If the macro is new, most of",
            "torch_cpu is compiled again. In another terminal: rallypoint torch watch, with that folder.",
        ),
        ('cmake --build "$build" --target torch_cpu torch_python',),
    )


def _copy(plan: Plan) -> Step:
    names = " ".join(library_names(plan.wishes.platform))
    return Step(
        "copy",
        (
            "Building these targets does not install them: Python would go on loading the old ones, which",
            "are kept as .before. Asked from /, since here Python would take the sources' folder.",
        ),
        (
            "question='import importlib.util; print(importlib.util.find_spec(\"torch\").origin)'",
            'installed=$(dirname "$(cd / && "$python" -c "$question")")/lib',
            f"for name in {names}; do",
            '  [ "$build/lib/$name" -ef "$installed/$name" ] && continue',
            '  [ -e "$installed/$name.before" ] || cp -p "$installed/$name" "$installed/$name.before"',
            '  cp -p "$build/lib/$name" "$installed/$name.new"',
            '  cmp "$build/lib/$name" "$installed/$name.new"',
            '  mv -f "$installed/$name.new" "$installed/$name"',
            "done",
        ),
    )


def _check() -> Step:
    return Step(
        "check",
        ("Configured, compiled in, installed, and the one that Python loads? Read from the files.",),
        ('(cd / && "$python" -m rallypoint torch check "$tree" --python "$python")',),
    )


def _one_rank() -> Step:
    return Step(
        "one rank",
        ("A job of one rank whose store has to be libuv's.",),
        ("""(cd / && "$python" - <<'END'""", *ONE_RANK, "END", ")"),
    )


def _verify() -> Step:
    return Step(
        "verify",
        ("The test of the build: real trainings of two ranks, by every usual route.",),
        ('(cd / && "$python" -m rallypoint verify)',),
    )


def _as_variable(value: str) -> str:
    return {"ON": "1", "OFF": "0"}.get(value, value)


def _plain(text: str) -> str:
    """Fit for a comment: on one line."""
    return re.sub(r"[^\x20-\x7e]", "?", text)
