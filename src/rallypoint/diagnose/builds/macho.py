"""Mach-O, the format of macOS, for one machine or several: needed libraries and search paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rallypoint.diagnose.builds.window import Binary, UnreadableError, Window

_THIN: Final = {
    b"\xcf\xfa\xed\xfe": ("<", 32),
    b"\xce\xfa\xed\xfe": ("<", 28),
    b"\xfe\xed\xfa\xcf": (">", 32),
}
"""Byte order and size of the header, by the first four bytes."""
_FAT: Final = {b"\xca\xfe\xba\xbe": ("IIIII", 20), b"\xca\xfe\xba\xbf": ("IIQQII", 32)}
"""Layout and size of an entry: type, subtype, offset, size, alignment."""
_MOST_MACHINES: Final = 16
"""More are no universal file: the class files of Java begin with the same bytes."""

_MACHINES: Final = {7: "x86", 0x01000007: "x86_64", 12: "arm", 0x0100000C: "arm64"}
_LOADS: Final = {0xC, 0x80000018, 0x8000001F, 0x80000023}
"""Load a library: plainly, weakly, and passed on."""
_RPATH: Final = 0x8000001C
_UUID: Final = 0x1B


def identify(head: bytes) -> Binary | None:
    """The first bytes of a file, if it is Mach-O: some hundred, for those of several machines."""
    magic = head[:4]
    if magic in _THIN and len(head) >= 8:
        order = "little" if _THIN[magic][0] == "<" else "big"
        kinds = [int.from_bytes(head[4:8], "big" if order == "big" else "little")]
    elif magic in _FAT and len(head) >= 8:
        count, size = int.from_bytes(head[4:8], "big"), _FAT[magic][1]
        if not 0 < count <= _MOST_MACHINES or len(head) < 8 + count * size:
            return None
        kinds = [int.from_bytes(head[at : at + 4], "big") for at in range(8, 8 + count * size, size)]
    else:
        return None
    return Binary("Mach-O", "macOS", tuple(_MACHINES.get(kind, f"machine {kind:#x}") for kind in kinds))


def read(window: Window) -> Binary:
    """All that is asked of a Mach-O file. One for several machines has the libraries of the first."""
    known = identify(window.read(0, min(window.size, 1024)))
    if known is None:
        raise UnreadableError("a file that begins as a macOS library does, and is none")
    magic = window.read(0, 4)
    if magic in _FAT:
        layout, _ = _FAT[magic]
        _, _, offset, size, *_ = window.unpack(">" + layout, 8)
        return replace(_read_one(window.part(offset, size)), machines=known.machines)
    return _read_one(window)


def _read_one(window: Window) -> Binary:
    magic = window.read(0, 4)
    known = identify(window.read(0, 8))
    if known is None or magic not in _THIN:
        raise UnreadableError("a universal file whose first part is no macOS library")
    order, at = _THIN[magic]
    count, size = window.unpack(order + "II", 16)
    commands = window.part(at, size)
    needed, rpaths, build_id = [], [], ""
    at = 0
    for _ in range(count):
        kind, length = commands.unpack(order + "II", at)
        if length < 8:
            raise UnreadableError("a load command without a length")
        command = commands.part(at, length)
        if kind in _LOADS:
            needed.append(_text(command, order))
        elif kind == _RPATH:
            rpaths.append(_text(command, order))
        elif kind == _UUID:
            build_id = command.read(8, 16).hex()
        at += length
    return replace(known, needed=tuple(needed), rpaths=tuple(rpaths), build_id=build_id)


def _text(command: Window, order: str) -> str:
    (at,) = command.unpack(order + "I", 8)
    return command.read(at, max(0, command.size - at)).split(b"\0")[0].decode("utf-8", "replace")
