"""ELF, the format of Linux: which libraries a file needs, where they are looked for, and its build id."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from rallypoint.diagnose.builds.window import Binary, UnreadableError, Window

MAGIC: Final = b"\x7fELF"

_MACHINES: Final = {
    3: "x86",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    21: "ppc64",
    22: "s390x",
    243: "riscv64",
}
_LOAD, _DYNAMIC, _NOTE = 1, 2, 4
_END, _NEEDED, _STRINGS, _RPATH, _RUNPATH = 0, 1, 5, 15, 29
_BUILD_ID: Final = 3


@dataclass(frozen=True)
class _Layout:
    """Where things are, in 32 and in 64 bits."""

    header: str
    """From byte 16 on: type, machine, version, entry, program headers at, section headers at, flags, header
    size, size and number of program headers."""
    program: str
    fields: tuple[int, int, int, int]
    """Of a program header: type, offset, virtual address, size in the file."""
    dynamic: str


_LAYOUTS: Final = {
    1: _Layout("HHIIIIIHHH", "8I", (0, 1, 2, 4), "II"),
    2: _Layout("HHIQQQIHHH", "IIQQQQQQ", (0, 2, 3, 5), "QQ"),
}
_ORDERS: Final = {1: "<", 2: ">"}


@dataclass(frozen=True)
class _Segment:
    type: int
    offset: int
    address: int
    size: int


@dataclass
class _Dynamic:
    """The dynamic section: addresses in the table of strings, by tag."""

    strings: int = -1
    tags: dict[int, list[int]] = field(default_factory=dict)


def identify(head: bytes) -> Binary | None:
    """The first 20 bytes of a file, if it is ELF."""
    if not head.startswith(MAGIC) or len(head) < 20:
        return None
    order = "big" if head[5] == 2 else "little"
    machine = int.from_bytes(head[18:20], "big" if order == "big" else "little")
    return Binary("ELF", "Linux", (_MACHINES.get(machine, f"machine {machine}"),))


def read(window: Window) -> Binary:
    """All that is asked of an ELF file."""
    head = window.read(0, 20)
    known = identify(head)
    layout, order = _LAYOUTS.get(head[4]), _ORDERS.get(head[5])
    if known is None or layout is None or order is None:
        raise UnreadableError("an ELF file of no known word size and byte order")
    segments = _segments(window, layout, order)
    dynamic = _dynamic(window, layout, order, segments)
    paths = {
        tag: [_place(dynamic, at, segments) for at in dynamic.tags.get(tag, [])] for tag in (_RPATH, _RUNPATH)
    }
    texts = {tag: [window.string(at) for at in places] for tag, places in paths.items()}
    return Binary(
        known.format,
        known.platform,
        known.machines,
        needed=tuple(window.string(_place(dynamic, at, segments)) for at in dynamic.tags.get(_NEEDED, [])),
        rpaths=_split(texts[_RPATH]),
        runpaths=_split(texts[_RUNPATH]),
        build_id=_build_id(window, order, segments),
        paths_at=tuple(
            (at, len(text.encode())) for tag in paths for at, text in zip(paths[tag], texts[tag], strict=True)
        ),
    )


def _segments(window: Window, layout: _Layout, order: str) -> list[_Segment]:
    header = window.unpack(order + layout.header, 16)
    at, size, count = header[4], header[8], header[9]
    found = []
    for index in range(count):
        values = window.unpack(order + layout.program, at + index * size)
        found.append(_Segment(*(values[place] for place in layout.fields)))
    return found


def _dynamic(window: Window, layout: _Layout, order: str, segments: list[_Segment]) -> _Dynamic:
    found = _Dynamic()
    entry = 8 if layout.dynamic == "II" else 16
    for segment in segments:
        if segment.type != _DYNAMIC:
            continue
        for at in range(segment.offset, segment.offset + segment.size - entry + 1, entry):
            tag, value = window.unpack(order + layout.dynamic, at)
            if tag == _END:
                break
            if tag == _STRINGS:
                found.strings = value
            elif tag in (_NEEDED, _RPATH, _RUNPATH):
                found.tags.setdefault(tag, []).append(value)
    return found


def _place(dynamic: _Dynamic, offset: int, segments: list[_Segment]) -> int:
    """Where in the file a string of the dynamic section is."""
    address = dynamic.strings + offset
    for segment in segments:
        if segment.type == _LOAD and segment.address <= address < segment.address + segment.size:
            return address - segment.address + segment.offset
    raise UnreadableError("the dynamic section points at a text that is in no segment")


def _split(paths: list[str]) -> tuple[str, ...]:
    return tuple(part for path in paths for part in path.split(":") if part)


def _build_id(window: Window, order: str, segments: list[_Segment]) -> str:
    for segment in segments:
        at, end = segment.offset, segment.offset + segment.size
        while segment.type == _NOTE and at + 12 <= end:
            name, size, kind = window.unpack(order + "III", at)
            content = at + 12 + _padded(name)
            if kind == _BUILD_ID and window.read(at + 12, name) == b"GNU\0":
                return window.read(content, size).hex()
            at = content + _padded(size)
    return ""


def _padded(size: int) -> int:
    return (size + 3) // 4 * 4
