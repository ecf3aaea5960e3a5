"""Which torch a Python will import, and which of its libraries the system's loader will take, and why.

Both are worked out from files and settings. Python is asked where it would find torch, which imports
nothing; the loader's rules are applied to the headers of the libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rallypoint.diagnose.builds.libraries import BINDINGS, LIBRARIES, Elf, is_same_build, read_elf
from rallypoint.diagnose.builds.packages import library_in
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


@dataclass(frozen=True)
class LoadedLibrary:
    """Which file the loader takes for a name, and by which rule."""

    path: Path
    reason: str


def judge_loader(folder: Path, environment: Mapping[str, str]) -> Finding | None:
    """Whether the loader takes torch's own library with the TCPStore, or an equal one; None if unknown.

    The rules are those of Linux, from torch/_C to libtorch_python to libtorch_cpu. On macOS only
    DYLD_LIBRARY_PATH counts here.
    """
    own = library_in(folder / "lib")
    if own is None or own.name == LIBRARIES[1]:
        return None
    if own.name == LIBRARIES[2]:
        variable = "DYLD_LIBRARY_PATH"
        places = [*environment.get(variable, "").split(":"), str(own.parent)]
        loaded = _in_folders(own.name, places, f"{variable} names its folder")
    else:
        loaded = _follow(folder, own, environment)
    if loaded is None:
        return None
    if loaded.path.samefile(own):
        return ok("loader", f"{own.name} is torch's own")
    what = f"the loader takes {loaded.path} and not {own}: {loaded.reason}"
    if is_same_build(loaded.path, own):  # a copy by hand still has the search path of its build folder
        return ok("loader", f"{what}; the two are the same")
    return failure("loader", what, "take that away, or copy the library that is meant there")


def _follow(folder: Path, own: Path, environment: Mapping[str, str]) -> LoadedLibrary | None:
    """The library that holds the TCPStore, by way of the one with the bindings."""
    modules = [path for path in sorted(folder.glob("_C*.so")) if path.is_file()]
    bindings = _resolve(modules[0], BINDINGS[0], environment) if modules else None
    bindings = bindings or LoadedLibrary(own.parent / BINDINGS[0], "")
    return _resolve(bindings.path, own.name, environment) if bindings.path.is_file() else None


def _resolve(path: Path, name: str, environment: Mapping[str, str]) -> LoadedLibrary | None:
    return resolve(read_elf(path), path.resolve().parent, name, environment.get("LD_LIBRARY_PATH", ""))


def resolve(elf: Elf, origin: Path, name: str, library_path: str) -> LoadedLibrary | None:
    """The file that Linux loads if a library in `origin` needs `name`; None if the system decides."""
    needing, rpaths = "the library that needs it has", () if elf.runpaths else elf.rpaths
    variable = [each or "." for each in library_path.split(":")] if library_path else []
    return (
        _in_folders(name, _expand(rpaths, origin), f"{needing} an RPATH that leads there")
        or _in_folders(name, variable, "LD_LIBRARY_PATH names its folder")
        or _in_folders(name, _expand(elf.runpaths, origin), f"{needing} a RUNPATH that leads there")
    )


def _expand(paths: Sequence[str], origin: Path) -> list[str]:
    return [path.replace("${ORIGIN}", str(origin)).replace("$ORIGIN", str(origin)) for path in paths]


def _in_folders(name: str, folders: Sequence[str], reason: str) -> LoadedLibrary | None:
    for folder in folders:
        if folder and (Path(folder) / name).is_file():
            return LoadedLibrary(Path(folder) / name, reason)
    return None
