"""A source tree of torch and its build folder: what is configured, compiled, and installed from it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.diagnose.builds.libraries import BINDINGS, LIBRARIES, is_same_build
from rallypoint.diagnose.builds.packages import library_in
from rallypoint.diagnose.builds.plan import CLONE, RELEASE, TreeFacts
from rallypoint.diagnose.builds.verdicts import CacheEntry, InstalledCopy, LibuvHeaders
from rallypoint.errors import RallypointError, UsageError

_CACHE: Final = "CMakeCache.txt"
_ENTRY: Final = re.compile(r"^(?P<name>\w+):[A-Z]+=(?P<value>.*)$", re.MULTILINE)

SERVER_SOURCE: Final = "TCPStoreLibUvBackend.cpp"
"""The file that the libuv server is in."""
_LIBUV: Final = Path("third_party", "tensorpipe", "third_party", "libuv", "include")
_NUMBER: Final = re.compile(r"^#define +UV_VERSION_(MAJOR|MINOR|PATCH) +(\d+)", re.MULTILINE)
_INCLUDE: Final = re.compile(r'(?:^|(?<=\s))(?P<kind>-isystem |-I) *(?:"(?P<quoted>[^"]+)"|(?P<plain>\S+))')
"""Options of gcc and clang: with MSVC no libuv is looked for."""
_SYSTEM: Final = ("/usr/include", "/usr/local/include", "/opt/homebrew/include")


# CMakeCache.txt --------------------------------------------------------------------------------------------


def parse_cache(text: str) -> dict[str, CacheEntry]:
    """All variables by their names."""
    return {match["name"]: CacheEntry(match["value"]) for match in _ENTRY.finditer(text)}


def read_cache(build: Path) -> dict[str, CacheEntry]:
    """The cache of a build folder."""
    try:
        return parse_cache((build / _CACHE).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise RallypointError(f"cannot read {build / _CACHE}: {error.strerror}") from None


# The tree --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """The sources of torch, and the folder that they are built in, if there is one."""

    source: Path
    build: Path | None
    cache: Mapping[str, CacheEntry]
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
        compiler = self.cache.get("CMAKE_CXX_COMPILER", CacheEntry("")).value.lower().replace("\\", "/")
        return compiler.rpartition("/")[2] in ("cl.exe", "cl", "clang-cl.exe")


def find_tree(path: Path) -> Tree | None:
    """The tree that this folder is, or whose build folder it is."""
    if (path / _CACHE).is_file():
        cache = read_cache(path)
        source = Path(cache.get("CMAKE_HOME_DIRECTORY", CacheEntry(str(path.parent))).value)
        is_torch = is_source(source) or cache.get("CMAKE_PROJECT_NAME", CacheEntry("")).value == "Torch"
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


def read_facts(path: Path) -> TreeFacts:
    """The facts of a source tree, which need not be there yet; `UsageError` for any other folder or file."""
    if not path.exists():
        return TreeFacts(RELEASE, missing=True)
    tree = find_tree(path) if is_source(path) else None
    if tree is None:
        raise UsageError(
            f"{path.absolute()} is no source tree of torch",
            hint=f"name one, or a folder that is not there yet; to get one: {CLONE}",
        )
    if tree.build is None:
        return TreeFacts(tree.version)
    build = tree.build.relative_to(path) if tree.build.is_relative_to(path) else tree.build.absolute()
    return TreeFacts(tree.version, str(build), tree.cache, built_library(tree.build) is not None)


# How the server is compiled --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compilation:
    """How the file with the server is compiled."""

    defined: bool
    """With TORCH_USE_LIBUV."""
    plain: tuple[str, ...]
    """The folders that are first searched for headers."""
    system: tuple[str, ...]
    """The folders that are searched after those."""


def read_compilation(build: Path) -> Compilation | None:
    """By build.ninja; None if no step of it compiles that file."""
    try:
        with (build / "build.ninja").open(encoding="utf-8", errors="replace") as lines:
            settings = find_settings(lines, SERVER_SOURCE)
    except OSError:
        return None
    if settings is None:
        return None
    text = " ".join(settings.get(name, "") for name in ("DEFINES", "FLAGS", "INCLUDES"))
    found = [(match["kind"], match["quoted"] or match["plain"]) for match in _INCLUDE.finditer(text)]
    plain = tuple(folder for kind, folder in found if kind == "-I")
    system = tuple(folder for kind, folder in found if kind != "-I")
    return Compilation(re.search(r"[-/]DTORCH_USE_LIBUV\b", text) is not None, plain, system)


def find_settings(lines: Iterable[str], part: str) -> dict[str, str] | None:
    """What build.ninja sets for the first step with `part` in an output; None if there is no such step."""
    settings: dict[str, str] | None = None
    for line in lines:
        if settings is None:
            if line.startswith("build ") and part in line.partition(": ")[0]:
                settings = {}
        elif not line.startswith("  "):
            break
        else:
            name, _, value = line.partition("=")
            settings[name.strip()] = value.strip()
    return settings


def carried_libuv(source: Path) -> LibuvHeaders | None:
    """The libuv that TensorPipe carries."""
    return _read_headers(source / _LIBUV)


def used_libuv(how: Compilation, build: Path, environment: Mapping[str, str]) -> LibuvHeaders | None:
    """The one whose headers a compiler finds first. gcc and clang look into CPATH in between."""
    between = [folder for folder in environment.get("CPATH", "").split(os.pathsep) if folder]
    folders = (*how.plain, *between, *how.system)
    return next((found for folder in folders if (found := _read_headers(build / folder))), None)


def other_libuvs(environment: Mapping[str, str]) -> list[LibuvHeaders]:
    """Those that the system has in the usual places, or that variables name."""
    roots = [environment[name] for name in ("libuv_ROOT", "CONDA_PREFIX") if environment.get(name)]
    folders = [str(Path(root, *parts)) for root in roots for parts in (("include",), ("Library", "include"))]
    return [found for folder in (*folders, *_SYSTEM) if (found := _read_headers(Path(folder)))]


def _read_headers(folder: Path) -> LibuvHeaders | None:
    try:
        text = (folder / "uv" / "version.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    numbers = dict(_NUMBER.findall(text))
    if len(numbers) < 3:
        return None
    return LibuvHeaders(".".join(numbers[name] for name in ("MAJOR", "MINOR", "PATCH")), str(folder))


# What is installed -----------------------------------------------------------------------------------------


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
