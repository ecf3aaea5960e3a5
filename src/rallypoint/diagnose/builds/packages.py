"""A torch as files, read and never loaded: its libraries, of any platform; an installed folder; a wheel.

A library of torch has hundreds of megabytes, so it is searched from front to back, in pieces.
"""

from __future__ import annotations

import mmap
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rallypoint.diagnose.builds.verdicts import TEXTS, is_libuv
from rallypoint.errors import RallypointError, UsageError

LIBRARIES: Final = ("libtorch_cpu.so", "torch_cpu.dll", "libtorch_cpu.dylib")
"""The library that holds the TCPStore, on Linux, Windows and macOS."""
BINDINGS: Final = ("libtorch_python.so", "torch_python.dll", "libtorch_python.dylib")

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


@dataclass(frozen=True)
class LibraryTarget:
    """The platform that a library is for, and its machines: several in a universal library of macOS."""

    platform: str
    machines: tuple[str, ...]


def examine(file: IO[bytes]) -> tuple[LibraryTarget, frozenset[bytes]]:
    """What a library is for, and which of `TEXTS` are in it; `UnreadableError` if it is no library."""
    target = identify(file.read(HEAD_BYTES))
    if target is None:
        raise UnreadableError(NO_LIBRARY)
    file.seek(0)
    return target, find_texts(file)


def identify(head: bytes) -> LibraryTarget | None:
    """The target by the first bytes of a library; None if it is of none of the three formats."""
    pe_at = int.from_bytes(head[0x3C:0x40], "little")
    count = int.from_bytes(head[4:8], "big")
    if head.startswith(b"\x7fELF") and len(head) >= 20:
        machine = int.from_bytes(head[18:20], "big" if head[5] == 2 else "little")
        return LibraryTarget("Linux", (_name(_ELF_MACHINES, machine),))
    if head.startswith(b"MZ") and head[pe_at : pe_at + 4] == b"PE\0\0":
        machine = int.from_bytes(head[pe_at + 4 : pe_at + 6], "little")
        return LibraryTarget("Windows", (_name(_PE_MACHINES, machine),))
    if head.startswith(b"\xcf\xfa\xed\xfe"):
        return LibraryTarget("macOS", (_name(_MACHO_MACHINES, int.from_bytes(head[4:8], "little")),))
    if head.startswith(b"\xca\xfe\xba\xbe") and 0 < count <= _MOST_MACHINES:
        entries = (head[at : at + 4] for at in range(8, 8 + 20 * count, 20))
        return LibraryTarget(
            "macOS", tuple(_name(_MACHO_MACHINES, int.from_bytes(each, "big")) for each in entries)
        )
    return None


def _name(machines: dict[int, str], number: int) -> str:
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
    target: LibraryTarget
    texts: frozenset[bytes]
    """Which of the texts that tell builds apart are in the library."""
    versions: Mapping[str, str]
    """`__version__` and `cuda`, where torch/version.py says them."""
    shipped: tuple[str, ...]
    """Files of libuv that come with it."""

    @property
    def windows(self) -> bool:
        """Whether it is for Windows."""
        return self.target.platform == "Windows"


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
    shipped = sorted(path.name for path in library.parent.iterdir() if is_libuv(path.name))
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


# Wheels ----------------------------------------------------------------------------------------------------


def read_wheel(path: Path) -> Package:
    """The torch in a wheel; `UsageError` if it holds no torch, `UnreadableError` if it is damaged."""
    try:
        with zipfile.ZipFile(path) as wheel:
            return _read_archive(path, wheel)
    except UsageError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        what = getattr(error, "message", error)  # an UnreadableError is a RuntimeError
        hint = "download it again: it is damaged or not complete"
        raise UnreadableError(f"cannot read the wheel {path}: {what}", hint=hint) from None


def _read_archive(path: Path, wheel: zipfile.ZipFile) -> Package:
    names = wheel.namelist()
    places = [f"torch/lib/{name}" for name in LIBRARIES]
    library = next((name for name in places if name in names), None)
    if library is None:
        raise UsageError(f"{path} is no wheel of torch: none of {', '.join(places)} is in it")
    with _open(wheel, library) as file:
        target, texts = examine(file)
    versions: dict[str, str] = {}
    if "torch/version.py" in names:
        with _open(wheel, "torch/version.py") as file:
            versions = _parse_version(file)
    shipped = [name.rpartition("/")[2] for name in names if is_libuv(name)]
    return Package(library, target, texts, versions, tuple(shipped))


def _open(wheel: zipfile.ZipFile, name: str) -> IO[bytes]:
    if wheel.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnreadableError(f"{name} is packed in a way that wheels do not use")
    return wheel.open(name)
