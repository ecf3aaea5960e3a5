"""Makers of small files that look like builds of torch: libraries of three platforms, wheels, trees."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

from rallypoint.diagnose.builds.packages import MISSING, SERVER, STORE

WITH = STORE + b"\0N4c10d6detail16" + SERVER + b"E\0"
"""What a library with the libuv server has in it."""
WITHOUT = STORE + b"\0" + MISSING + b"\0"
OLD = STORE + b"\0"


def elf(payload: bytes = b"") -> bytes:
    """A library for Linux on x86_64, as far as it is recognised."""
    return b"\x7fELF\x02\x01\x01" + struct.pack("<9xHH", 3, 62) + payload


def pe(payload: bytes = b"") -> bytes:
    """A library for Windows on x86_64, as far as it is recognised."""
    return b"MZ".ljust(60, b"\0") + struct.pack("<I4sH", 64, b"PE\0\0", 0x8664) + payload


def macho(payload: bytes = b"", machine: int = 0x0100000C) -> bytes:
    """A library for macOS on one machine, by default arm64."""
    return struct.pack("<II", 0xFEEDFACF, machine) + payload


def universal(*parts: bytes) -> bytes:
    """A library for macOS on the machines of some others."""
    head = struct.pack(">II", 0xCAFEBABE, len(parts))
    machines = [int.from_bytes(part[4:8], "little") for part in parts]
    return head + b"".join(struct.pack(">IIIII", each, 0, 0, 0, 0) for each in machines) + b"".join(parts)


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
    carried = folder / "third_party" / "tensorpipe" / "third_party" / "libuv" / "include" / "uv.h"
    carried.parent.mkdir(parents=True)
    carried.touch()
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
            "build other.o: CXX_COMPILER__torch_cpu_ other.cpp\n  FLAGS = -DTORCH_USE_LIBUV\n"
        )


ON = {
    "USE_DISTRIBUTED:BOOL": "ON",
    "USE_TENSORPIPE:BOOL": "ON",
    "USE_GLOO:BOOL": "ON",
    "USE_CUDA:BOOL": "OFF",
}
"""A tree that is configured right."""
