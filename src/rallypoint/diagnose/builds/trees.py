"""A source tree of torch and its build folder: its configuration, and the libraries built and installed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.diagnose.builds.packages import BINDINGS, LIBRARIES, is_same_build, library_in
from rallypoint.diagnose.builds.verdicts import InstalledCopy
from rallypoint.errors import RallypointError

_CACHE: Final = "CMakeCache.txt"
_ENTRY: Final = re.compile(r"^(\w+):[A-Z]+=(.*)$", re.MULTILINE)

_SERVER_SOURCE: Final = "TCPStoreLibUvBackend.cpp"
"""The file that the libuv server is in."""


def read_cache(build: Path) -> dict[str, str]:
    """What a build folder is configured with: all variables by their names."""
    try:
        return dict(_ENTRY.findall((build / _CACHE).read_text(encoding="utf-8", errors="replace")))
    except OSError as error:
        raise RallypointError(f"cannot read {build / _CACHE}: {error.strerror}") from None


@dataclass(frozen=True)
class Tree:
    """The sources of torch, and the folder that they are built in, if there is one."""

    source: Path
    build: Path | None
    cache: Mapping[str, str]
    others: tuple[Path, ...] = ()
    """Further build folders, whose files are older."""

    @property
    def version(self) -> str:
        """The version in version.txt."""
        try:
            return (self.source / "version.txt").read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    @property
    def windows(self) -> bool:
        """Whether it is built for Windows, by the compiler."""
        compiler = self.cache.get("CMAKE_CXX_COMPILER", "").lower().replace("\\", "/")
        return compiler.rpartition("/")[2] in ("cl.exe", "cl", "clang-cl.exe")


def find_tree(path: Path) -> Tree | None:
    """The tree that this folder is, or whose build folder it is."""
    if (path / _CACHE).is_file():
        cache = read_cache(path)
        source = Path(cache.get("CMAKE_HOME_DIRECTORY", path.parent))
        is_torch = is_source(source) or cache.get("CMAKE_PROJECT_NAME") == "Torch"
        return Tree(source, path, cache) if is_torch else None
    if not is_source(path):
        return None
    builds = sorted((each.parent for each in path.glob(f"*/{_CACHE}")), key=_last_change, reverse=True)
    if not builds:
        return Tree(path, None, {})
    return Tree(path, builds[0], read_cache(builds[0]), tuple(builds[1:]))


def is_source(path: Path) -> bool:
    """Whether a folder is a source tree of torch."""
    return (path / "CMakeLists.txt").is_file() and (path / "torch" / "csrc").is_dir()


def _last_change(build: Path) -> float:
    return (built_library(build) or build / _CACHE).stat().st_mtime


def built_library(build: Path, names: Sequence[str] = LIBRARIES) -> Path | None:
    """The first library of these names that a build has made: in `lib`, DLLs in `bin`."""
    places = [build / folder / name for folder in ("lib", "bin") for name in names]
    return next((place for place in places if place.is_file()), None)


def own_package(source: Path) -> Path | None:
    """The folder of torch in a tree, if libraries were installed into it."""
    return source / "torch" if library_in(source / "torch" / "lib") else None


# What is compiled and installed ----------------------------------------------------------------------------


def defines_macro(build: Path) -> bool | None:
    """Whether the server is compiled with TORCH_USE_LIBUV; None if build.ninja has no step for it."""
    inside, settings = False, ""
    try:
        with (build / "build.ninja").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("build ") and inside:
                    break
                if line.startswith("build "):
                    inside = _SERVER_SOURCE in line.partition(": ")[0]
                elif inside:
                    settings += line
    except OSError:
        return None
    return re.search(r"[-/]DTORCH_USE_LIBUV\b", settings) is not None if inside else None


def find_copies(build: Path, installed: Path) -> list[InstalledCopy]:
    """Of both libraries that a rebuild of torch's store changes, as far as both folders have them."""
    found = []
    for names in (LIBRARIES, BINDINGS):
        built = built_library(build, names)
        copy = installed / built.name if built else None
        if built and copy and copy.is_file():
            same = built.samefile(copy) or is_same_build(built, copy)
            found.append(InstalledCopy(built.name, same, built.stat().st_mtime, copy.stat().st_mtime))
    return found
