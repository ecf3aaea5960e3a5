"""Makers of small files that look like builds of torch: libraries of three platforms, wheels, trees."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rallypoint.diagnose.builds.verdicts import MISSING, SERVER, STORE

WITH = STORE + b"\0N4c10d6detail16" + SERVER + b"E\0"
"""What a library with the libuv server has in it."""
WITHOUT = STORE + b"\0" + MISSING + b"\0"
OLD = STORE + b"\0"

_CARRIED = "third_party/tensorpipe/third_party/libuv/include"


def elf(
    payload: bytes = b"",
    needed: Sequence[str] = (),
    runpath: str = "",
    rpath: str = "",
    build_id: bytes = b"",
    room: int = 0,
    order: str = "<",
) -> bytes:
    """A library for Linux on x86_64, with a dynamic section and a note. `room` is kept behind its texts."""
    texts, places = b"\0", []
    for tag, text in [
        *((1, name) for name in needed),
        *([(29, runpath)] if runpath else []),
        *([(15, rpath)] if rpath else []),
    ]:
        places.append((tag, len(texts)))
        texts += text.encode() + b"\0"
    texts += bytes(room)
    note = struct.pack(order + "III4s", 4, len(build_id), 3, b"GNU\0") + build_id if build_id else b""
    note += bytes(-len(note) % 8)
    dynamic_at = 64 + 3 * 56
    dynamic_size = (len(places) + 2) * 16
    note_at = dynamic_at + dynamic_size
    texts_at = note_at + len(note)
    base = 0x10000
    dynamic = b"".join(
        struct.pack(order + "QQ", tag, at) for tag, at in [*places, (5, base + texts_at), (0, 0)]
    )
    size = texts_at + len(texts) + len(payload)
    programs = [
        (1, 0, base, size),
        (2, dynamic_at, base + dynamic_at, dynamic_size),
        (4, note_at, base + note_at, len(note)),
    ]
    header = b"\x7fELF\x02" + (b"\x01" if order == "<" else b"\x02") + b"\x01" + bytes(9)
    header += struct.pack(order + "HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    table = b"".join(
        struct.pack(order + "IIQQQQQQ", kind, 4, at, address, address, length, length, 8)
        for kind, at, address, length in programs
    )
    return header + table + dynamic + note + texts + payload


def pe(payload: bytes = b"", needed: Sequence[str] = ()) -> bytes:
    """A library for Windows on x86_64, with a table of imports."""
    header_at, optional_size, section_at, address = 0x80, 240, 0x200, 0x1000
    names_at = (len(needed) + 1) * 20
    names, descriptors = b"", b""
    for name in needed:
        descriptors += struct.pack("<IIIII", 0, 0, 0, address + names_at + len(names), 0)
        names += name.encode() + b"\0"
    section = descriptors + bytes(20) + names + payload
    optional = bytearray(optional_size)
    struct.pack_into("<H", optional, 0, 0x20B)
    struct.pack_into("<I", optional, 108, 16)
    struct.pack_into("<II", optional, 120, address if needed else 0, names_at)
    coff = struct.pack("<HHIIIHH", 0x8664, 1, 0, 0, 0, optional_size, 0x2000)
    table = struct.pack("<8sIIII", b".rdata", len(section), address, len(section), section_at) + bytes(16)
    head = (b"MZ" + bytes(58) + struct.pack("<I", header_at)).ljust(header_at, b"\0")
    return (head + b"PE\0\0" + coff + bytes(optional) + table).ljust(section_at, b"\0") + section


def macho(
    payload: bytes = b"",
    needed: Sequence[str] = (),
    rpaths: Sequence[str] = (),
    machine: int = 0x0100000C,
    uuid: bytes = bytes(range(16)),
) -> bytes:
    """A library for macOS on one machine."""
    commands = [_command(0xC, name, 24) for name in needed] + [
        _command(0x8000001C, path, 12) for path in rpaths
    ]
    commands.append(struct.pack("<II", 0x1B, 24) + uuid)
    body = b"".join(commands)
    head = struct.pack("<IIIIIIII", 0xFEEDFACF, machine, 0, 6, len(commands), len(body), 0, 0)
    return head + body + payload


def _command(kind: int, text: str, at: int) -> bytes:
    content = text.encode() + b"\0"
    content += bytes(-(at + len(content)) % 8)
    return struct.pack("<III", kind, at + len(content), at) + bytes(at - 12) + content


def universal(*parts: tuple[int, bytes]) -> bytes:
    """A library for macOS on several machines."""
    head, body, at = struct.pack(">II", 0xCAFEBABE, len(parts)), b"", 4096
    for machine, content in parts:
        head += struct.pack(">IIIII", machine, 0, at + len(body), len(content), 0)
        body += content
    return head.ljust(at, b"\0") + body


def wheel(path: Path, library: str, content: bytes, more: Mapping[str, bytes] | None = None) -> Path:
    """A wheel of torch with one library."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(f"torch/lib/{library}", content)
        file.writestr("torch/version.py", "__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\n")
        for name, data in (more or {}).items():
            file.writestr(name, data)
    return path


def package(folder: Path, content: bytes, version: str = "2.9.0", library: str = "libtorch_cpu.so") -> Path:
    """A folder of torch, as it is installed."""
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = None\n")
    (folder / "lib" / library).write_bytes(content)
    return folder


def tree(
    folder: Path,
    options: Mapping[str, str] | None = None,
    flags: str | None = "-DTORCH_USE_LIBUV",
    built: bytes | None = None,
) -> Path:
    """A source tree of torch: configured if there are options, built if a library is given."""
    (folder / "torch" / "csrc").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "CMakeLists.txt").write_text("project(Torch CXX C)\n")
    (folder / "version.txt").write_text("2.9.0a0\n")
    (folder / "requirements.txt").touch()
    libuv(folder / _CARRIED, "1.41.0")
    if options is not None:
        configure(folder, options, flags)
    if built is not None:
        (folder / "build" / "lib").mkdir()
        (folder / "build" / "lib" / "libtorch_cpu.so").write_bytes(built)
    return folder


def configure(folder: Path, options: Mapping[str, str], flags: str | None) -> None:
    """Write the build folder's cache and, if there are flags, its build.ninja."""
    build = folder / "build"
    build.mkdir()
    lines = [
        f"CMAKE_HOME_DIRECTORY:INTERNAL={folder}",
        *(f"{name}={value}" for name, value in options.items()),
    ]
    (build / "CMakeCache.txt").write_text("\n".join(["# This is the CMakeCache file.", "", *lines]) + "\n")
    if flags is not None:
        name = "caffe2/CMakeFiles/torch_cpu.dir/__/torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp.o"
        (build / "build.ninja").write_text(
            f"build {name}: CXX_COMPILER__torch_cpu_ {folder}/torch/TCPStoreLibUvBackend.cpp || order\n"
            f"  DEFINES = -DUSE_C10D_GLOO\n  FLAGS = -O2 {flags}\n"
            f"  INCLUDES = -I{build}/aten -isystem {folder / _CARRIED} -isystem /usr/include\n"
            "build other: phony\n"
        )


ON = {
    "USE_DISTRIBUTED:BOOL": "ON",
    "USE_TENSORPIPE:BOOL": "ON",
    "USE_GLOO:BOOL": "ON",
    "USE_CUDA:BOOL": "OFF",
}
"""A tree that is configured right."""


def libuv(folder: Path, version: str) -> Path:
    """Headers of libuv."""
    (folder / "uv").mkdir(parents=True)
    (folder / "uv.h").touch()
    names = ("MAJOR", "MINOR", "PATCH")
    numbers = version.split(".")
    lines = [f"#define UV_VERSION_{name} {number}" for name, number in zip(names, numbers, strict=True)]
    (folder / "uv" / "version.h").write_text("\n".join(lines) + "\n")
    return folder
