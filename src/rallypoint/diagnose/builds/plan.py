"""`rallypoint torch plan`: what has to be built to get the libuv server; `scripts` writes the script.

A tree that was built before, with the same CUDA and for the same architectures, needs two targets and a copy
of two libraries. Everything else is a whole build.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from rallypoint.diagnose.builds.verdicts import architectures, is_on
from rallypoint.errors import UsageError

_ARCHITECTURE: Final = re.compile(r"\d{1,2}\.\d[a-z]?(\+PTX)?")

WHOLE_BUILD: Final = "build"
"""The folder that torch's own build uses, when pip runs it."""

RELEASE: Final = "2.13.0"
CLONE: Final = f"git clone --recursive --branch v{RELEASE} https://github.com/pytorch/pytorch"
"""With submodules: the libuv that is compiled in is in one of them."""


class Platform(str, Enum):
    """The system that a build is for."""

    LINUX = "linux"
    MACOS = "macos"
    WINDOWS = "windows"


@dataclass(frozen=True)
class Wishes:
    """The build that the user asks for."""

    tree: str
    platform: Platform
    python: str
    architectures: tuple[str, ...] = ()
    """GPU architectures, as TORCH_CUDA_ARCH_LIST names them; none is a build for the CPU alone."""
    nccl: bool = True
    jobs: int | None = None


@dataclass(frozen=True)
class TreeFacts:
    """The source tree as it was found."""

    version: str = ""
    build: str = "build"
    """The build folder, as it is called in the tree."""
    cache: Mapping[str, str] = field(default_factory=dict)
    """The variables of its CMake cache; empty if it is not configured."""
    built: bool = False
    """Whether it holds libraries already."""
    missing: bool = False
    """Whether the tree itself is not there yet, and is to be cloned."""


@dataclass(frozen=True)
class BuildPlan:
    """The build as the scripts need it."""

    wishes: Wishes
    facts: TreeFacts
    options: Mapping[str, str]
    """CMake options, ON or OFF or a list."""
    whole: bool
    """Whether all of torch is built, and not only the two libraries that have to do with the store."""
    reason: str
    """Why all of torch is built, or why not."""


def parse_architectures(text: str) -> tuple[str, ...]:
    """The architectures in a text such as `9.0,12.0`; `UsageError` for any other text."""
    parts = tuple(part for part in re.split(r"[,; ]+", text) if part)
    for part in parts:
        if not _ARCHITECTURE.fullmatch(part):
            raise UsageError(
                f"--cuda-arch {text}: {part!r} is no architecture",
                hint="write compute capabilities with commas between them, such as 9.0,12.0",
            )
    return parts


def make_plan(wishes: Wishes, facts: TreeFacts) -> BuildPlan:
    """The plan; `UsageError` for wishes that contradict each other."""
    if wishes.architectures and wishes.platform is Platform.MACOS:
        raise UsageError("there is no CUDA for macOS", hint="leave --cuda-arch out")
    if wishes.jobs is not None and wishes.jobs < 1:
        raise UsageError(f"--jobs is {wishes.jobs}", hint="write a positive number")
    options = choose_options(wishes)
    whole, reason = _extent(options, facts)
    if whole and facts.build != WHOLE_BUILD:
        reason = f"{reason}, in the folder {WHOLE_BUILD}; {facts.build} stays as it is"
        facts = replace(facts, build=WHOLE_BUILD, cache={}, built=False)
    return BuildPlan(wishes, facts, options, whole, reason)


def choose_options(wishes: Wishes) -> dict[str, str]:
    """The options of CMake that decide about the store, the backends and the GPUs."""
    cuda = bool(wishes.architectures)
    windows = wishes.platform is Platform.WINDOWS
    chosen = {
        "USE_DISTRIBUTED": True,
        "USE_TENSORPIPE": not windows,
        "USE_GLOO": True,
        "USE_CUDA": cuda,
        "USE_CUDNN": cuda,
        "USE_NCCL": cuda and wishes.nccl and wishes.platform is Platform.LINUX,
    }
    options = {name: "ON" if on else "OFF" for name, on in chosen.items()}
    if cuda:
        options["TORCH_CUDA_ARCH_LIST"] = ";".join(wishes.architectures)
    return options


def _extent(options: Mapping[str, str], facts: TreeFacts) -> tuple[bool, str]:
    """Whether it has to be a whole build, and why."""
    if facts.missing:
        return True, "the tree is not there yet: it is cloned, and the whole of torch is built"
    if not facts.built:
        return True, "nothing is built in it yet: the whole of torch has to be built"
    changed = [
        name
        for name in ("USE_CUDA", "USE_CUDNN", "USE_NCCL")
        if name in facts.cache and is_on(facts.cache[name]) != (options[name] == "ON")
    ]
    before, after = architectures(facts.cache), options.get("TORCH_CUDA_ARCH_LIST", "")
    if _list(before) != _list(after) and options["USE_CUDA"] == "ON":
        changed.append(f"the architectures, from {before or 'unknown'} to {after}")
    if changed:
        return (
            True,
            f"it was built before, but this changes {', '.join(changed)}: all of torch is built again",
        )
    return False, "it was built before: torch_cpu and torch_python are enough"


def _list(text: str) -> list[str]:
    return sorted(part for part in re.split(r"[;, ]+", text) if part)
