"""Which torch a Python will import, and which of its libraries the system's loader will take, and why.

Python is asked where it would find torch, which imports nothing. The loader of Linux is asked by `ldd`, which
runs nothing of the libraries.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.diagnose.builds.packages import BINDINGS, LIBRARIES, is_same_build, library_in
from rallypoint.diagnose.findings import Finding, failure, ok, warning
from rallypoint.errors import RallypointError, UsageError

_SECONDS: Final = 30
_QUESTION: Final = """
import importlib.util, json, sys
try:
    spec = importlib.util.find_spec("torch")
except (ImportError, ValueError):
    spec = None
print(json.dumps([spec and spec.origin, sys.path]))
"""


@dataclass(frozen=True)
class ImportedTorch:
    """Where a Python finds torch."""

    folder: Path | None
    """The folder that it imports, None if there is no torch."""
    reason: str
    """Which setting leads there."""
    shadowed: tuple[Path, ...] = ()
    """Other folders of torch that it would take if this one were not there, in that order."""

    @property
    def compiled(self) -> bool:
        """Whether the folder has torch's libraries; that of a source tree that was not built has none."""
        return self.folder is not None and library_in(self.folder / "lib") is not None


def find_torch(python: str, environment: Mapping[str, str]) -> ImportedTorch:
    """Where `python -c "import torch"` would find it, here and with these variables."""
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION], env=dict(environment), capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot run the Python {python}: {error}", hint="name it with --python") from None
    try:
        origin, entries = json.loads(done.stdout.strip().rpartition("\n")[2])
    except (ValueError, TypeError):
        raise RallypointError(f"{python} does not say where torch is: {done.stderr.strip()[-500:]}") from None
    return explain_import(origin, entries, environment.get("PYTHONPATH", ""), Path.cwd())


def explain_import(origin: str | None, entries: Sequence[str], python_path: str, here: Path) -> ImportedTorch:
    """The meaning of a Python's answer: the file of its torch, and the entries of its path.

    It could import the torch below any entry, and takes the first.
    """
    if origin is None:
        return ImportedTorch(None, "no entry of its path has one", ())
    folder = Path(origin).parent
    candidates = [
        here / entry / "torch" for entry in entries if (here / entry / "torch/__init__.py").is_file()
    ]
    others = {os.path.realpath(each): each for each in candidates if not _same(each, folder)}
    return ImportedTorch(folder, _reason(folder, entries, python_path, here), tuple(others.values()))


def _reason(folder: Path, entries: Sequence[str], python_path: str, here: Path) -> str:
    entry = next((each for each in entries if _same(here / each, folder.parent)), None)
    if entry is None:
        return "an editable install leads there"
    if entry == "":
        return "it is in the current directory, which comes first for `python -c` and `python -m`"
    if any(each and _same(here / each, folder.parent) for each in python_path.split(os.pathsep)):
        return "PYTHONPATH names its place"
    if folder.parent.name in ("site-packages", "dist-packages"):
        return "it is installed there"
    return "a .pth file or a setting of this Python names its place"


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def judge_import(found: ImportedTorch) -> Finding:
    """Whether the torch that is imported is a whole one, and the only one."""
    name = "import"
    if found.folder is None:
        return failure(name, f"Python finds no torch: {found.reason}", "install one")
    what = f"Python takes {found.folder}: {found.reason}"
    if not found.compiled:
        others = f"; behind it is {found.shadowed[0]}" if found.shadowed else ""
        hint = "leave the directory of the sources, or take it off PYTHONPATH"
        return failure(name, f"{what}; it has no libraries{others}", hint)
    if found.shadowed:
        others = ", ".join(map(str, found.shadowed))
        return warning(name, f"{what}; it hides {others}", "have only one of them on the path")
    return ok(name, what)


# The loader ------------------------------------------------------------------------------------------------


def judge_loader(folder: Path, environment: Mapping[str, str]) -> Finding | None:
    """Whether the loader takes torch's own library with the TCPStore, or an equal one; None if unknown.

    On macOS only DYLD_LIBRARY_PATH counts here.
    """
    own = library_in(folder / "lib")
    if own is None or own.name == LIBRARIES[1]:
        return None
    variable = "LD_LIBRARY_PATH" if own.name == LIBRARIES[0] else "DYLD_LIBRARY_PATH"
    named = [Path(each) for each in environment.get(variable, "").split(":") if each]
    if own.name == LIBRARIES[0]:
        loaded = _ask_loader(folder, own, environment)
    else:
        loaded = next((each / own.name for each in named if (each / own.name).is_file()), own)
    if loaded is None or not loaded.is_file():
        return None
    if loaded.samefile(own):
        return ok("loader", f"{own.name} is torch's own")
    by_variable = any(_same(each, loaded.parent) for each in named)
    reason = (
        f"{variable} names its folder" if by_variable else "a search path in torch's libraries leads there"
    )
    what = f"the loader takes {loaded} and not {own}: {reason}"
    if is_same_build(loaded, own):  # a copy by hand still has the search path of its build folder
        return ok("loader", f"{what}; the two are the same")
    return failure("loader", what, "take that away, or copy the library that is meant there")


def _ask_loader(folder: Path, own: Path, environment: Mapping[str, str]) -> Path | None:
    """The file that Linux loads for the library that holds the TCPStore, when torch's module is imported."""
    modules = [path for path in sorted(folder.glob("_C*.so")) if path.is_file()]
    command = ["ldd", str(modules[0] if modules else own.with_name(BINDINGS[0]))]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):  # another system, or one without ldd
        return None
    found = re.search(rf"{re.escape(own.name)} => (?P<path>/.+) \(0x", done.stdout)
    return Path(found["path"]) if found else None
