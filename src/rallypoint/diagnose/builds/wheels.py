"""A torch in a wheel: read in the archive, with nothing unpacked to disk."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Final

from rallypoint.diagnose.builds import binaries
from rallypoint.diagnose.builds.packages import LIBRARIES, Package, parse_version
from rallypoint.diagnose.builds.verdicts import TEXTS, is_libuv
from rallypoint.diagnose.builds.window import UnreadableError
from rallypoint.errors import UsageError

_PLACES: Final = tuple(f"torch/lib/{name}" for name in LIBRARIES)


def read_wheel(path: Path) -> Package:
    """What is in a wheel of torch; `UsageError` if it is another one, `UnreadableError` if it is damaged."""
    try:
        with zipfile.ZipFile(path) as wheel:
            return _read(path, wheel)
    except UsageError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        what = getattr(error, "message", error)  # an UnreadableError is a RuntimeError
        hint = "download it again: it is damaged or not complete"
        raise UnreadableError(f"cannot read the wheel {path}: {what}", hint=hint) from None


def _read(path: Path, wheel: zipfile.ZipFile) -> Package:
    names = wheel.namelist()
    library = next((name for name in _PLACES if name in names), None)
    if library is None:
        raise UsageError(f"{path} is no wheel of torch: none of {', '.join(_PLACES)} is in it")
    with wheel.open(library) as file:
        binary = binaries.identify(file.read(binaries.HEAD_BYTES))
    with wheel.open(library) as file:
        scan = binaries.scan(file, TEXTS)
    version = wheel.read("torch/version.py").decode("utf-8", "replace") if "torch/version.py" in names else ""
    shipped = [name.rpartition("/")[2] for name in names if is_libuv(name)]
    return Package(path, library, binary, scan.found, parse_version(version), tuple(shipped))
