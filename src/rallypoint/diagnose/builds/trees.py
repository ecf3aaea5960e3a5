"""A source tree of torch and its build folder: what is configured, compiled, and installed from it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.diagnose.builds import binaries
from rallypoint.diagnose.builds.cache import Entry, parse_cache
from rallypoint.diagnose.builds.ninja import find_edge
from rallypoint.diagnose.builds.packages import BINDINGS, LIBRARIES, library_in
from rallypoint.diagnose.builds.verdicts import Headers, Pair
from rallypoint.errors import RallypointError

CACHE: Final = "CMakeCache.txt"
_PROJECT: Final = "CMAKE_PROJECT_NAME"
SERVER_SOURCE: Final = "TCPStoreLibUvBackend.cpp"
"""The file that the libuv server is in."""
_LIBUV: Final = Path("third_party", "tensorpipe", "third_party", "libuv", "include")
_NUMBER: Final = re.compile(r"^#define +UV_VERSION_(MAJOR|MINOR|PATCH) +(\d+)", re.MULTILINE)
_INCLUDE: Final = re.compile(
    r"(?:^|(?<=\s))(?P<kind>-isystem |-external:I ?|/external:I ?|-I|/I) *"
    r'(?:"(?P<quoted>[^"]+)"|(?P<plain>\S+))'
)
_SYSTEM: Final = ("/usr/include", "/usr/local/include", "/opt/homebrew/include")


@dataclass(frozen=True)
class Tree:
    """The sources of torch, and the folder that they are built in, if there is one."""

    source: Path
    build: Path | None
    cache: Mapping[str, Entry]
    others: tuple[Path, ...] = ()
    """Further build folders, whose files are older."""

    @property
    def version(self) -> str:
        """What version.txt says."""
        try:
            return (self.source / "version.txt").read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    @property
    def windows(self) -> bool:
        """Whether it is built for Windows, by the compiler."""
        compiler = self.cache.get("CMAKE_CXX_COMPILER", Entry("", "")).value.lower().replace("\\", "/")
        return compiler.rpartition("/")[2] in ("cl.exe", "cl", "clang-cl.exe")


def find_tree(path: Path) -> Tree | None:
    """The tree that this folder is, or whose build folder it is."""
    if (path / CACHE).is_file():
        cache = read_cache(path)
        source = Path(cache.get("CMAKE_HOME_DIRECTORY", Entry("", str(path.parent))).value)
        ours = is_source(source) or cache.get(_PROJECT, Entry("", "")).value == "Torch"
        return Tree(source, path, cache) if ours else None
    if not is_source(path):
        return None
    builds = sorted((each.parent for each in path.glob(f"*/{CACHE}")), key=_last_change, reverse=True)
    if not builds:
        return Tree(path, None, {})
    return Tree(path, builds[0], read_cache(builds[0]), tuple(builds[1:]))


def is_source(path: Path) -> bool:
    """Whether a folder is a source tree of torch."""
    return (path / "CMakeLists.txt").is_file() and (path / "torch" / "csrc").is_dir()


def _last_change(build: Path) -> float:
    library = built_library(build, LIBRARIES)
    return (library or build / CACHE).stat().st_mtime


def read_cache(build: Path) -> dict[str, Entry]:
    """The cache of a build folder."""
    try:
        return parse_cache((build / CACHE).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise RallypointError(f"cannot read {build / CACHE}: {error.strerror}") from None


def built_library(build: Path, names: Sequence[str]) -> Path | None:
    """One of the libraries, where a build puts it: in `lib`, DLLs in `bin`."""
    places = [build / folder / name for folder in ("lib", "bin") for name in names]
    return next((place for place in places if place.is_file()), None)


# What is configured ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compilation:
    """How the file with the server is compiled."""

    defined: bool
    """With TORCH_USE_LIBUV."""
    plain: tuple[str, ...]
    system: tuple[str, ...]
    """Where headers are looked for: first these, then those."""


def read_compilation(build: Path) -> Compilation | None:
    """By build.ninja; None if it has no such step."""
    try:
        with (build / "build.ninja").open(encoding="utf-8", errors="replace") as lines:
            edge = find_edge(lines, SERVER_SOURCE)
    except OSError:
        return None
    if edge is None:
        return None
    text = " ".join(edge.bindings.get(name, "") for name in ("DEFINES", "FLAGS", "INCLUDES"))
    found = [(match["kind"], match["quoted"] or match["plain"]) for match in _INCLUDE.finditer(text)]
    plain = tuple(folder for kind, folder in found if kind in ("-I", "/I"))
    system = tuple(folder for kind, folder in found if kind not in ("-I", "/I"))
    return Compilation(re.search(r"[-/]DTORCH_USE_LIBUV\b", text) is not None, plain, system)


def carried_libuv(source: Path) -> Headers | None:
    """The libuv that TensorPipe carries."""
    return read_headers(source / _LIBUV)


def used_libuv(how: Compilation, build: Path, environment: Mapping[str, str]) -> Headers | None:
    """The one whose headers a compiler finds first. gcc and clang look into CPATH in between."""
    between = [folder for folder in environment.get("CPATH", "").split(os.pathsep) if folder]
    folders = (*how.plain, *between, *how.system)
    return next((found for folder in folders if (found := read_headers(build / folder))), None)


def other_libuvs(environment: Mapping[str, str]) -> list[Headers]:
    """Those that the system has in the usual places, or that variables name."""
    roots = [environment[name] for name in ("libuv_ROOT", "CONDA_PREFIX") if environment.get(name)]
    folders = [str(Path(root, *parts)) for root in roots for parts in (("include",), ("Library", "include"))]
    return [found for folder in (*folders, *_SYSTEM) if (found := read_headers(Path(folder)))]


def read_headers(folder: Path) -> Headers | None:
    """The version that the headers in a folder are of."""
    try:
        text = (folder / "uv" / "version.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    numbers = dict(_NUMBER.findall(text))
    if len(numbers) < 3:
        return None
    return Headers(".".join(numbers[name] for name in ("MAJOR", "MINOR", "PATCH")), str(folder))


# What is installed -----------------------------------------------------------------------------------------


def compare_libraries(build: Path, installed: Path) -> list[Pair]:
    """Both libraries that a rebuild of torch's store changes, as far as both folders have them."""
    pairs = []
    for names in (LIBRARIES, BINDINGS):
        built = built_library(build, names)
        if built is not None and (installed / built.name).is_file():
            pairs.append(compare(built, installed / built.name))
    return pairs


def compare(built: Path, installed: Path) -> Pair:
    """One library. An installation by CMake rewrites search paths in it, or strips it, and nothing else."""
    one, other = built.stat(), installed.stat()
    same = os.path.samestat(one, other) or _are_same(built, installed, one.st_size == other.st_size)
    return Pair(built.name, same, one.st_mtime, other.st_mtime)


def _are_same(built: Path, installed: Path, equally_long: bool) -> bool:
    """By all but the search paths; what was stripped is shorter, and still has the linker's mark."""
    one, other = binaries.read_binary(built), binaries.read_binary(installed)
    if not equally_long:
        return bool(one.build_id) and one.build_id == other.build_id
    scans = (
        binaries.scan_file(path, (), binary.paths_at) for path, binary in ((built, one), (installed, other))
    )
    return len({scan.digest for scan in scans}) == 1


def own_package(source: Path) -> Path | None:
    """The folder of torch in a tree, if libraries were installed into it."""
    return source / "torch" if library_in(source / "torch" / "lib") else None
