"""A torch that is installed or in a wheel, read without importing or unpacking it."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rallypoint.diagnose.builds.libraries import LIBRARIES, LibraryTarget, UnreadableError, examine, opened
from rallypoint.diagnose.builds.verdicts import is_libuv
from rallypoint.errors import UsageError

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
