"""A torch as it is installed: its folder, read without importing it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.diagnose.builds import binaries
from rallypoint.diagnose.builds.verdicts import TEXTS, is_libuv
from rallypoint.diagnose.builds.window import Binary

LIBRARIES: Final = ("libtorch_cpu.so", "torch_cpu.dll", "libtorch_cpu.dylib")
"""The library that holds the TCPStore, on Linux, Windows and macOS."""
BINDINGS: Final = ("libtorch_python.so", "torch_python.dll", "libtorch_python.dylib")

_VERSION: Final = re.compile(r"^(?P<name>__version__|cuda)\b[^=\n]*= *(?P<value>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Package:
    """A torch, installed or in a wheel."""

    path: Path
    library: str
    binary: Binary
    texts: frozenset[bytes]
    """Which of the texts that tell builds apart are in the library."""
    versions: Mapping[str, str]
    """`__version__` and `cuda`, where torch/version.py says them."""
    shipped: tuple[str, ...]
    """Files of libuv that come with it."""

    @property
    def windows(self) -> bool:
        """Whether it is for Windows."""
        return self.binary.platform == "Windows"


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
    return read_library(library, folder)


def read_library(library: Path, folder: Path | None = None) -> Package:
    """A library that holds the TCPStore, with the folder of torch around it if there is one."""
    binary = binaries.read_binary(library)
    scan = binaries.scan_file(library, TEXTS)
    shipped = sorted(path.name for path in library.parent.iterdir() if is_libuv(path.name))
    return Package(
        folder or library,
        str(library),
        binary,
        scan.found,
        read_version(folder) if folder else {},
        tuple(shipped),
    )


def read_version(folder: Path) -> dict[str, str]:
    """What torch/version.py of a folder says."""
    try:
        return parse_version((folder / "version.py").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def parse_version(text: str) -> dict[str, str]:
    """`__version__` and `cuda` of a version.py; what is None is left out."""
    values = {match["name"]: match["value"].strip().strip("'\"") for match in _VERSION.finditer(text)}
    return {name: value for name, value in values.items() if value != "None"}
