"""A torch as files, read and never loaded: libraries of any platform, an installed folder, a wheel, a tree.

A library of torch has hundreds of megabytes, so it is searched from front to back, in pieces.
"""

from __future__ import annotations

import mmap
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rallypoint.errors import RallypointError, UsageError

LIBRARIES: Final = ("libtorch_cpu.so", "torch_cpu.dll", "libtorch_cpu.dylib")
"""The library that holds the TCPStore, on Linux, Windows and macOS."""
BINDINGS: Final = ("libtorch_python.so", "torch_python.dll", "libtorch_python.dylib")

SERVER: Final = b"LibUVStoreDaemon"
"""The class of the libuv server: in every build that has it, in symbols and in type information."""
MISSING: Final = b"LibUV TCPStore implementation missing"
"""The text that builds without the server have in its place."""
STORE: Final = b"TCPStore"
TEXTS: Final = (SERVER, MISSING, STORE)

HEAD_BYTES: Final = 4096
"""Enough of a file to identify it."""
_PIECE_BYTES: Final = 4 << 20

NO_LIBRARY: Final = "this is no library of Linux (ELF), Windows (PE) or macOS (Mach-O)"


class UnreadableError(RallypointError):
    """A file that is not what it claims to be: cut off, corrupt, or of no known format."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file to read from; what goes wrong in the block is an `UnreadableError` that names the file."""
    try:
        with path.open("rb") as file:
            yield file
    except UnreadableError as error:
        raise UnreadableError(f"cannot read {path}: {error.message}", hint=error.hint) from None
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}") from None


_ELF_MACHINES: Final = {3: "x86", 40: "arm", 62: "x86_64", 183: "aarch64", 21: "ppc64", 22: "s390x"}
_PE_MACHINES: Final = {0x14C: "x86", 0x8664: "x86_64", 0xAA64: "aarch64"}
_MACHO_MACHINES: Final = {0x01000007: "x86_64", 0x0100000C: "arm64"}
_MOST_MACHINES: Final = 16
"""More are no universal library: the class files of Java begin with the same bytes."""


def examine(file: IO[bytes]) -> tuple[str, frozenset[bytes]]:
    """What a library is for, and which of `TEXTS` are in it; `UnreadableError` if it is no library."""
    target = identify(file.read(HEAD_BYTES))
    if target is None:
        raise UnreadableError(NO_LIBRARY)
    file.seek(0)
    return target, find_texts(file)


def identify(head: bytes) -> str | None:
    """What a library is for, by its first bytes, such as `Linux on x86_64`; None if it is no library.

    A universal library of macOS is for several machines.
    """
    pe_at = int.from_bytes(head[0x3C:0x40], "little")
    count = int.from_bytes(head[4:8], "big")
    if head.startswith(b"\x7fELF") and len(head) >= 20:
        machine = int.from_bytes(head[18:20], "big" if head[5] == 2 else "little")
        return f"Linux on {_name(_ELF_MACHINES, machine)}"
    if head.startswith(b"MZ") and head[pe_at : pe_at + 4] == b"PE\0\0":
        return f"Windows on {_name(_PE_MACHINES, int.from_bytes(head[pe_at + 4 : pe_at + 6], 'little'))}"
    if head.startswith(b"\xcf\xfa\xed\xfe"):
        return f"macOS on {_name(_MACHO_MACHINES, int.from_bytes(head[4:8], 'little'))}"
    if head.startswith(b"\xca\xfe\xba\xbe") and 0 < count <= _MOST_MACHINES:
        machines = (int.from_bytes(head[at : at + 4], "big") for at in range(8, 8 + 20 * count, 20))
        return f"macOS on {' and '.join(_name(_MACHO_MACHINES, each) for each in machines)}"
    return None


def _name(machines: Mapping[int, str], number: int) -> str:
    return machines.get(number, f"machine {number:#x}")


def find_texts(file: IO[bytes]) -> frozenset[bytes]:
    """Those of `TEXTS` that are in a file."""
    overlap = max(map(len, TEXTS)) - 1
    found, tail = set[bytes](), b""
    while piece := file.read(_PIECE_BYTES):
        joined = tail + piece
        found.update(text for text in TEXTS if text in joined)
        tail = joined[-overlap:]
    return frozenset(found)


def is_same_build(built: Path, copy: Path) -> bool:
    """Whether a copy is what was built, but for the search paths that an installation by CMake rewrites.

    The search path of a library in a build folder names that folder. It is rewritten in place, so all else
    stays where it was.
    """
    if built.stat().st_size != copy.stat().st_size:
        return False
    folder = os.fsencode(Path(built.parent.parent.name, built.parent.name))
    with _mapped(built) as one, _mapped(copy) as other:
        at = 0
        while (found := one.find(folder, at)) >= 0:
            begin, end = max(at, one.rfind(b"\0", at, found)), one.find(b"\0", found)
            if not _equal(one, other, range(at, begin)):
                return False
            at = end if end >= 0 else len(one)
        return _equal(one, other, range(at, len(one)))


def _equal(one: mmap.mmap, other: mmap.mmap, part: range) -> bool:
    pieces = (slice(at, min(at + _PIECE_BYTES, part.stop)) for at in part[::_PIECE_BYTES])
    return all(one[piece] == other[piece] for piece in pieces)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with opened(path) as file:
        if not path.stat().st_size:
            raise UnreadableError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


# Packages -------------------------------------------------------------------------------------------------

_VERSION: Final = re.compile(r"^(?P<name>__version__|cuda)\b[^=\n]*= *(?P<value>.+)$", re.MULTILINE)
_VERSION_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Package:
    """A torch, as its files describe it."""

    library: str
    """The path of the library that holds the TCPStore."""
    target: str
    """The platform and the machines that it is for."""
    texts: frozenset[bytes]
    """Which of the texts that tell builds apart are in the library."""
    versions: Mapping[str, str]
    """`__version__` and `cuda`, where torch/version.py says them."""
    shipped: tuple[str, ...]
    """Files of libuv that come with it."""

    @property
    def windows(self) -> bool:
        """Whether it is for Windows."""
        return self.target.startswith("Windows")

    @property
    def has_server(self) -> bool:
        """Whether the texts in the library are those of a build with the libuv server."""
        return SERVER in self.texts and MISSING not in self.texts


def library_in(folder: Path) -> Path | None:
    """The library that holds the TCPStore, in a folder of libraries."""
    return next((folder / name for name in LIBRARIES if (folder / name).is_file()), None)


def find_package(path: Path) -> Path | None:
    """The folder of torch: this one, or one in these site-packages or in this environment."""
    places = [path, path / "torch", *sorted(path.glob("lib/python*/site-packages/torch"))]
    places.append(path / "Lib" / "site-packages" / "torch")
    return next((place for place in places if library_in(place / "lib")), None)


def read_package(folder: Path) -> Package:
    """The torch in a folder that `find_package` has found."""
    library = library_in(folder / "lib")
    assert library is not None
    return read_library(library, read_version(folder))


def read_library(library: Path, versions: Mapping[str, str] | None = None) -> Package:
    """The torch that a library belongs to; `UnreadableError` if it is no library or a damaged one."""
    with opened(library) as file:
        target, texts = examine(file)
    shipped = sorted(path.name for path in library.parent.iterdir() if _is_libuv(path.name))
    return Package(str(library), target, texts, versions or {}, tuple(shipped))


def read_version(folder: Path) -> dict[str, str]:
    """`__version__` and `cuda` by torch/version.py of a folder; empty without that file."""
    try:
        with (folder / "version.py").open("rb") as file:
            return _parse_version(file)
    except OSError:
        return {}


def _parse_version(file: IO[bytes]) -> dict[str, str]:
    """`__version__` and `cuda` of a version.py; one that is None is left out."""
    text = file.read(_VERSION_BYTES).decode("utf-8", "replace")
    values = {match["name"]: match["value"].strip().strip("'\"") for match in _VERSION.finditer(text)}
    return {name: value for name, value in values.items() if value != "None"}


def _is_libuv(name: str) -> bool:
    """Whether a file name is one of libuv's shared libraries."""
    base = name.replace("\\", "/").rpartition("/")[2].lower()
    starts = ("libuv.so", "libuv.dll", "libuv-", "libuv.1.dylib", "libuv.dylib")
    return base == "uv.dll" or base.startswith(starts)


# Wheels ----------------------------------------------------------------------------------------------------


def read_wheel(path: Path) -> Package:
    """The torch in a wheel; `UsageError` if it holds no torch, `UnreadableError` if it is damaged."""
    places = [f"torch/lib/{name}" for name in LIBRARIES]
    versions: dict[str, str] = {}
    try:
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            library = next((name for name in places if name in names), None)
            if library is None:
                raise UsageError(f"{path} is no wheel of torch: none of {', '.join(places)} is in it")
            with _open(wheel, library) as file:
                target, texts = examine(file)
            if "torch/version.py" in names:
                with _open(wheel, "torch/version.py") as file:
                    versions = _parse_version(file)
    except UsageError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        what = getattr(error, "message", error)  # an UnreadableError is a RuntimeError
        hint = "download it again: it is damaged or not complete"
        raise UnreadableError(f"cannot read the wheel {path}: {what}", hint=hint) from None
    shipped = tuple(name.rpartition("/")[2] for name in names if _is_libuv(name))
    return Package(library, target, texts, versions, shipped)


def _open(wheel: zipfile.ZipFile, name: str) -> IO[bytes]:
    if wheel.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnreadableError(f"{name} is packed in a way that wheels do not use")
    return wheel.open(name)


# Source trees, and their build folders --------------------------------------------------------------------

_CACHE: Final = "CMakeCache.txt"
_TRUE: Final = {"1", "on", "yes", "true", "y"}
_ENTRY: Final = re.compile(r"^(\w+):[A-Z]+=(.*)$", re.MULTILINE)

_SERVER_SOURCE: Final = "TCPStoreLibUvBackend.cpp"
"""The file that the libuv server is in."""


def read_cache(build: Path) -> dict[str, str]:
    """What a build folder is configured with: all variables by their names."""
    try:
        return dict(_ENTRY.findall((build / _CACHE).read_text(encoding="utf-8", errors="replace")))
    except OSError as error:
        raise RallypointError(f"cannot read {build / _CACHE}: {error.strerror}") from None


def is_on(value: str) -> bool:
    """Whether `if(VARIABLE)` is true in CMake for a variable of its cache."""
    number = re.fullmatch(r"-?[0-9]+", value) is not None and int(value) != 0
    return value.lower() in _TRUE or number


def is_found(value: str) -> bool:
    """Whether a search of CMake has found something: an empty value or one that ends in NOTFOUND has not."""
    return bool(value) and not value.endswith("NOTFOUND")


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
