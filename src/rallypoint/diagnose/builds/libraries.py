"""Torch's libraries as files of any platform, read and never loaded.

A library of torch has hundreds of megabytes, so it is searched from front to back, in pieces. Headers are
read of ELF alone, the format of Linux: the rules of its loader need them. Every offset in a file is a claim
of the file, so it is checked before it is followed, and tables are read up to a limit.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, NamedTuple

from rallypoint.diagnose.builds.verdicts import TEXTS
from rallypoint.errors import RallypointError

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


# Any format ------------------------------------------------------------------------------------------------

_ELF: Final = b"\x7fELF"
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
    if head.startswith(_ELF) and len(head) >= 20:
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


def is_same_build(one: Path, other: Path) -> bool:
    """Whether two libraries are the same, but for what an installation by CMake changes.

    It rewrites the search paths of ELF, which leaves the length. Or it strips the library, which leaves the
    build id. Libraries of other formats have to be equal.
    """
    first, second = read_elf(one), read_elf(other)
    if one.stat().st_size != other.stat().st_size:
        return bool(first.build_id) and first.build_id == second.build_id
    return _digest(one, first.paths_at) == _digest(other, second.paths_at)


def _digest(path: Path, blanks: Sequence[tuple[int, int]]) -> bytes:
    """Of all but the bytes at `blanks`: offsets and lengths."""
    digest, offset = hashlib.sha256(), 0
    with opened(path) as file:
        while piece := bytearray(file.read(_PIECE_BYTES)):
            for at, size in blanks:
                start, end = max(0, at - offset), min(len(piece), at + size - offset)
                if start < end:
                    piece[start:end] = bytes(end - start)
            digest.update(piece)
            offset += len(piece)
    return digest.digest()


# ELF -------------------------------------------------------------------------------------------------------

_LOAD, _DYNAMIC = 1, 2
_END, _NEEDED, _STRINGS, _RPATH, _RUNPATH = 0, 1, 5, 15, 29
_BUILD_ID: Final = re.compile(rb"\x04\0\0\0(?P<size>.)\0\0\0\x03\0\0\0GNU\0", re.DOTALL)
"""The note with the build id, which linkers write right behind the headers."""
_MOST_SEGMENTS: Final = 256
_TABLE_BYTES: Final = 1 << 16
_STRING_BYTES: Final = 4096


@dataclass(frozen=True)
class Elf:
    """What the headers of a library of Linux say; nothing, if it is not ELF of 64 bits and little-endian."""

    needed: tuple[str, ...] = ()
    """The libraries that it is linked with."""
    rpaths: tuple[str, ...] = ()
    """Where the loader looks before LD_LIBRARY_PATH."""
    runpaths: tuple[str, ...] = ()
    """Where the loader looks after LD_LIBRARY_PATH. If there are any, `rpaths` do not count."""
    build_id: str = ""
    """The linker's mark of this link; empty if it wrote none."""
    paths_at: tuple[tuple[int, int], ...] = ()
    """Offsets and lengths of the search paths above, which an installation rewrites."""


class _Segment(NamedTuple):
    type: int
    offset: int
    address: int
    size: int


def read_elf(path: Path) -> Elf:
    """The headers of a library; `UnreadableError` if they are damaged."""
    with opened(path) as file:
        return _ElfReader(file).read() if file.read(6) == _ELF + b"\2\1" else Elf()


class _ElfReader:
    """A library of 64 bits, on a machine that is little-endian."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size = file.seek(0, os.SEEK_END)
        (at,) = self._unpack("Q", 32)
        size, count = self._unpack("HH", 54)
        if count > _MOST_SEGMENTS:
            raise UnreadableError(f"the headers name {count:,} segments")
        self._segments = [_Segment(*self._unpack("I4xQQ8xQ", at + index * size)) for index in range(count)]

    def read(self) -> Elf:
        tags = self._dynamic_section()
        (strings,) = tags.get(_STRINGS, [0])[:1]
        places = {
            tag: [self._place(strings + offset) for offset in tags.get(tag, [])]
            for tag in (_NEEDED, _RPATH, _RUNPATH)
        }
        texts = {tag: [self._string(at) for at in found] for tag, found in places.items()}
        head = self._read(0, min(HEAD_BYTES, self._size))
        note = _BUILD_ID.search(head)
        paths = [*zip(places[_RPATH], texts[_RPATH], strict=True)]
        paths += zip(places[_RUNPATH], texts[_RUNPATH], strict=True)
        return Elf(
            needed=tuple(text.decode("utf-8", "replace") for text in texts[_NEEDED]),
            rpaths=_split(texts[_RPATH]),
            runpaths=_split(texts[_RUNPATH]),
            build_id=head[note.end() :][: note["size"][0]].hex() if note else "",
            paths_at=tuple((at, len(text)) for at, text in paths),
        )

    def _dynamic_section(self) -> dict[int, list[int]]:
        """Its values by their tags."""
        found: dict[int, list[int]] = {}
        segment = next((each for each in self._segments if each.type == _DYNAMIC), None)
        table = self._read(segment.offset, min(segment.size, _TABLE_BYTES)) if segment else b""
        for tag, value in struct.iter_unpack("<QQ", table[: len(table) // 16 * 16]):
            if tag == _END:
                break
            found.setdefault(tag, []).append(value)
        return found

    def _place(self, address: int) -> int:
        """Where in the file the byte is that is loaded at an address."""
        for segment in self._segments:
            if segment.type == _LOAD and segment.address <= address < segment.address + segment.size:
                return address - segment.address + segment.offset
        raise UnreadableError("the dynamic section points at a text that is in no segment")

    def _unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        return struct.unpack(f"<{layout}", self._read(offset, struct.calcsize(f"<{layout}")))

    def _string(self, offset: int) -> bytes:
        """The text up to the next zero byte."""
        text, end, _ = self._read(offset, min(_STRING_BYTES, max(0, self._size - offset))).partition(b"\0")
        if not end:
            raise UnreadableError(f"the text at byte {offset:,} has no end")
        return text

    def _read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes."""
        if offset + size > self._size:
            raise UnreadableError(
                f"the headers point at byte {offset + size:,}, outside of the {self._size:,} that are there"
            )
        self._file.seek(offset)
        return self._file.read(size)


def _split(paths: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(part for path in paths for part in path.decode("utf-8", "replace").split(":") if part)
