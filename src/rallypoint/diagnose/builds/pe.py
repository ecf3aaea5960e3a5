"""PE, the format of Windows: which libraries a file needs."""

from __future__ import annotations

from typing import Final

from rallypoint.diagnose.builds.window import Binary, UnreadableError, Window

MAGIC: Final = b"MZ"

_MACHINES: Final = {0x14C: "x86", 0x8664: "x86_64", 0xAA64: "aarch64", 0x1C4: "arm"}
_DIRECTORIES_AT: Final = {0x10B: 96, 0x20B: 112}
"""Where the table of directories begins, by the magic number of the optional header (32 and 64 bits)."""
_DESCRIPTOR_BYTES: Final = 20
_MOST_IMPORTS: Final = 4096

_Section = tuple[int, int, int]
"""Virtual address, size and offset in the file."""


def identify(head: bytes) -> Binary | None:
    """The first bytes of a file, if it is PE: as many as the headers have, some hundred."""
    at = int.from_bytes(head[0x3C:0x40], "little")
    if not head.startswith(MAGIC) or head[at : at + 4] != b"PE\0\0":
        return None
    machine = int.from_bytes(head[at + 4 : at + 6], "little")
    return Binary("PE", "Windows", (_MACHINES.get(machine, f"machine {machine:#x}"),))


def read(window: Window) -> Binary:
    """All that is asked of a PE file."""
    (at,) = window.unpack("<I", 0x3C)
    known = identify(window.read(0, at + 6)) if at < window.size else None
    if known is None:
        raise UnreadableError("a file that begins as a Windows program does, and is none")
    sections_count, optional_size = window.unpack("<2xH12xH", at + 4)
    sections = [_section(window, at + 24 + optional_size + 40 * index) for index in range(sections_count)]
    return Binary(known.format, known.platform, known.machines, needed=_imports(window, at + 24, sections))


def _section(window: Window, at: int) -> _Section:
    address, size, offset = window.unpack("<III", at + 12)
    return address, size, offset


def _imports(window: Window, optional: int, sections: list[_Section]) -> tuple[str, ...]:
    (magic,) = window.unpack("<H", optional)
    directories = _DIRECTORIES_AT.get(magic)
    if directories is None:
        raise UnreadableError(f"a Windows program of an unknown kind ({magic:#x})")
    (count,) = window.unpack("<I", optional + directories - 4)
    address = window.unpack("<I", optional + directories + 8)[0] if count > 1 else 0
    return tuple(_names(window, _offset(address, sections), sections)) if address else ()


def _names(window: Window, at: int, sections: list[_Section]) -> list[str]:
    found: list[str] = []
    for index in range(_MOST_IMPORTS):
        (name,) = window.unpack("<12xI4x", at + index * _DESCRIPTOR_BYTES)
        if name == 0:
            return found
        found.append(window.string(_offset(name, sections)))
    raise UnreadableError("a table of imports without an end")


def _offset(address: int, sections: list[_Section]) -> int:
    for start, size, offset in sections:
        if start <= address < start + size:
            return address - start + offset
    raise UnreadableError("the table of imports points at no section")
