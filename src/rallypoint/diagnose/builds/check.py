"""`rallypoint torch check`: finds out what is at a path, collects the facts, and judges them.

Python is asked where it would find torch, which imports nothing. The loader of Linux is asked by `ldd`, which
runs nothing of the libraries.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from rallypoint.diagnose.builds import packages
from rallypoint.diagnose.builds.packages import (
    BINDINGS,
    HEAD_BYTES,
    LIBRARIES,
    NO_LIBRARY,
    Package,
    Tree,
    is_found,
    is_on,
)
from rallypoint.diagnose.findings import Finding, State, failure, named, ok, unknown, warning
from rallypoint.errors import RallypointError, UsageError

_KINDS: Final = "an installed torch, a wheel, a library, a source tree or its build folder"
_ARCHITECTURES: Final = ("TORCH_CUDA_ARCH_LIST", "CMAKE_CUDA_ARCHITECTURES")
_OPTIONS: Final = ("USE_DISTRIBUTED", "USE_TENSORPIPE", "USE_GLOO", "USE_NCCL", "USE_CUDA", "USE_LIBUV")
_NEEDED: Final = ("USE_DISTRIBUTED", "USE_TENSORPIPE")

_WITHOUT: Final = (
    "jobs come up on it with `rallypoint run`; "
    "`rallypoint torch plan pytorch` writes the script of a build with it, in a folder pytorch"
)
_ON_WINDOWS: Final = (
    "jobs come up on it with `rallypoint run`; no option of torch's CMake files compiles the server with MSVC"
)


@dataclass(frozen=True)
class BuildReport:
    """All that was found in one build."""

    kind: str
    path: str
    libuv: bool | None
    """Whether the libuv server is in it; None if no library was there to look into."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether the server is in it and nothing contradicts."""
        return self.libuv is True and all(each.state is not State.FAILURE for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints. A build has no fixes that could be written, and nothing is timed."""
        rows = [
            {"name": each.name, "state": each.state.value, "found": each.found, "hint": each.hint}
            for each in self.findings
        ]
        return {"ok": self.ok, "kind": self.kind, "path": self.path, "libuv": self.libuv, "findings": rows}


def check(path: Path | None, python: str, environment: Mapping[str, str]) -> BuildReport:
    """Examine what is at a path, or the torch that `python` would import.

    Raises `UsageError` if that is no torch, and `UnreadableError` if it is one that cannot be read.
    """
    if path is None:
        return _check_import(find_torch(python, environment), python, environment)
    if not path.exists():
        raise UsageError(f"{path} does not exist", hint=f"name {_KINDS}")
    if path.is_file() and path.suffix == ".whl":
        return _report("wheel", path, packages.read_wheel(path))
    if path.is_file():
        return _check_library(path)
    tree = packages.find_tree(path)
    if tree and (tree.build or not packages.own_package(path)):
        return _check_tree(tree, find_torch(python, environment), environment)
    if folder := packages.find_package(path):
        loader = judge_loader(folder, environment)
        return _report("installed", folder, packages.read_package(folder), loader=loader)
    raise UsageError(f"{path} is no torch: {' or '.join(LIBRARIES)} is not there", hint=f"name {_KINDS}")


def _check_library(path: Path) -> BuildReport:
    with packages.opened(path) as file:
        if packages.identify(file.read(HEAD_BYTES)) is None:
            raise UsageError(f"{path} is no torch: {NO_LIBRARY}", hint=f"name {_KINDS}")
    package = packages.read_library(path)
    if not package.texts and path.name not in LIBRARIES:
        raise UsageError(f"{path} does not hold the TCPStore", hint=f"name {' or '.join(LIBRARIES)}")
    return _report("library", path, package)


def _check_import(found: ImportedTorch, python: str, environment: Mapping[str, str]) -> BuildReport:
    if found.folder is None:
        raise UsageError(f"{python} finds no torch", hint=f"install one, or name {_KINDS}")
    judged = judge_import(found)
    if not found.compiled:
        return BuildReport("installed", str(found.folder), None, tuple(named("import", [judged])))
    loader = judge_loader(found.folder, environment)
    package = packages.read_package(found.folder)
    return _report("installed", found.folder, package, **{"import": judged}, loader=loader)


def _report(kind: str, path: Path, package: Package, **more: Finding | None) -> BuildReport:
    """The report of a package; `more` are findings by their names."""
    findings = {
        "torch": _describe(package),
        "libuv server": _judge_server(package),
        "libuv library": _judge_shipped(package.shipped),
        **more,
    }
    known = (replace(finding, name=name) for name, finding in findings.items() if finding)
    return BuildReport(kind, str(path), package.has_server, tuple(known))


def _describe(package: Package) -> Finding:
    version = package.versions.get("__version__", "of an unknown version")
    cuda = f", CUDA {package.versions['cuda']}" if "cuda" in package.versions else ""
    library = package.library.replace("\\", "/").rpartition("/")[2]
    return ok(f"{version}{cuda}, for {package.target} ({library})")


def _judge_server(package: Package) -> Finding:
    """By the texts in the library that would hold it."""
    found = package.texts
    if package.has_server:
        return ok(f"compiled in ({packages.SERVER.decode()} is in the library)")
    if packages.SERVER in found:
        why = "in a part of the library and missing in another; is it for several machines?"
    elif packages.MISSING in found:
        why = f"not compiled in (the library says {packages.MISSING.decode()!r})"
    elif packages.STORE in found:
        why = "not in it; this torch has a TCPStore that knows nothing of libuv, as before 2.1"
    else:
        why = "not in it, and no TCPStore either: torch was built without distributed"
    return failure(why, _ON_WINDOWS if package.windows else _WITHOUT)


def _judge_shipped(shipped: tuple[str, ...]) -> Finding | None:
    """The libuv that comes with it, if any: some take it for the server."""
    proof = "which proves nothing: gloo uses it too"
    return ok(f"{', '.join(shipped)} comes with it, {proof}") if shipped else None


# A tree ----------------------------------------------------------------------------------------------------


def _check_tree(tree: Tree, found: ImportedTorch, environment: Mapping[str, str]) -> BuildReport:
    library = packages.built_library(tree.build) if tree.build else None
    package = packages.read_library(library) if library else None
    loader = judge_loader(found.folder, environment) if found.folder else None
    findings = [
        *named("tree", [_describe_tree(tree)]),
        *(_judge_options(tree.cache, packages.defines_macro(tree.build), tree.windows) if tree.build else []),
        *named("libuv server", [_judge_built(package)]),
        *named("installed", _judge_installed(tree, tree.build, found) if tree.build and library else []),
        *named("import", [_judge_loaded(tree, found)]),
        *named("loader", [loader] if loader else []),
    ]
    libuv = package.has_server if package else None
    return BuildReport("tree", str(tree.source), libuv, tuple(findings))


def _describe_tree(tree: Tree) -> Finding:
    version = tree.version or "sources"
    if tree.build is None:
        hint = f"`rallypoint torch plan {tree.source}` writes the script of a build"
        return failure(f"{version}, not configured: no folder in it has a CMakeCache.txt", hint)
    others = f"; older ones: {', '.join(map(str, tree.others))}" if tree.others else ""
    return ok(f"{version}, built in {tree.build}{others}")


def _judge_options(cache: Mapping[str, str], defined: bool | None, windows: bool) -> list[Finding]:
    """The options of a build folder, and whether the file with the server gets the macro that counts."""
    off = [name for name in _NEEDED if name in cache and not is_on(cache[name])]
    given = [cache[name] for name in _ARCHITECTURES if is_found(cache.get(name, ""))]
    architectures = next((value for value in given if value != "OFF"), "not set")
    shown = [f"{name}={cache.get(name, 'not set')}" for name in _OPTIONS]
    text = ", ".join([*shown, f"architectures {architectures}"])
    wanted = " and ".join(f"-D{name}=ON" for name in off)
    hint = f"configure again with {wanted}: the server is compiled where both are on"
    findings = named("options", [failure(text, _ON_WINDOWS if windows else hint) if off else ok(text)])
    if is_on(cache.get("USE_LIBUV", "")) and not windows and (off or defined is False):
        no_server = warning(
            "ON, which does not compile the server in: it is an option of gloo, for its transport",
            "the server comes with USE_DISTRIBUTED and USE_TENSORPIPE",
        )
        findings += named("USE_LIBUV", [no_server])
    return [*findings, *named("configured", [_judge_macro(defined, windows)])]


def _judge_macro(defined: bool | None, windows: bool) -> Finding:
    if defined:
        return ok("the store's server is compiled with TORCH_USE_LIBUV")
    if defined is None:
        found = "build.ninja has no step for TCPStoreLibUvBackend.cpp, so this cannot be told"
        return unknown(found, "is it configured, for ninja, with USE_DISTRIBUTED?")
    hint = "configure again with -DUSE_DISTRIBUTED=ON and -DUSE_TENSORPIPE=ON"
    return failure("the store's server is compiled without TORCH_USE_LIBUV", _ON_WINDOWS if windows else hint)


def _judge_built(package: Package | None) -> Finding:
    if package is None:
        found = f"not built yet: there is no {LIBRARIES[0]}, {LIBRARIES[1]} or {LIBRARIES[2]}"
        return failure(found, "cmake --build, with the targets torch_cpu and torch_python")
    judged = _judge_server(package)
    return replace(judged, found=f"{package.library}: {judged.found}")


def _judge_installed(tree: Tree, build: Path, found: ImportedTorch) -> list[Finding]:
    """Against the libraries in the tree itself, and against an installed torch of the same version."""
    folders = [packages.own_package(tree.source)]
    if found.folder and found.compiled:
        version = packages.read_version(found.folder).get("__version__", "unknown")
        if version.partition("+")[0] == tree.version.partition("+")[0]:  # without the mark of a build
            folders.append(found.folder)
    places = {os.path.realpath(folder): folder / "lib" for folder in folders if folder}
    judged = [each for place in places.values() if (each := _judge_copies(build, place))]
    hint = "install it: `pip install --no-build-isolation -e .`, or copy the libraries to torch/lib"
    return judged or [warning("what was built is not installed anywhere", hint)]


def _judge_copies(build: Path, folder: Path) -> Finding | None:
    """Whether what was built is what is installed in a folder: by content, and by time where that differs.

    Both libraries that a rebuild of torch's store changes are compared, as far as both places have them.
    """
    built = [packages.built_library(build, names) for names in (LIBRARIES, BINDINGS)]
    pairs = [(each, folder / each.name) for each in built if each and (folder / each.name).is_file()]
    if not pairs:
        return None
    other = [
        (one, copy) for one, copy in pairs if not (one.samefile(copy) or packages.is_same_build(one, copy))
    ]
    if not other:
        return ok(f"{', '.join(one.name for one, _ in pairs)} in {folder}: the same as built")
    times = [(one.name, one.stat().st_mtime, copy.stat().st_mtime) for one, copy in other]
    stale = [
        f"{name} was built {_moment(built_at)}, the one in {folder} is of {_moment(installed_at)} and differs"
        for name, built_at, installed_at in times
        if built_at >= installed_at
    ]
    if stale:
        return failure(f"rebuilt but not copied: {'; '.join(stale)}", f"copy what was built to {folder}")
    what = f"{', '.join(one.name for one, _ in other)} in {folder} is newer than what was built, and differs"
    return warning(what, "was it installed from another build, or stripped?")


def _moment(seconds: float) -> str:
    moment = datetime(1970, 1, 1) + timedelta(seconds=seconds)  # `fromtimestamp` has limits on Windows
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _judge_loaded(tree: Tree, found: ImportedTorch) -> Finding:
    """Whether it is this tree that Python will import."""
    judged = judge_import(found)
    sources = os.path.realpath(tree.source / "torch")
    own = found.folder is not None and os.path.realpath(found.folder) == sources
    if own and found.compiled:  # that it hides another one is meant
        return ok(judged.found)
    if own or judged.state is State.FAILURE:
        return judged
    hint = f"set PYTHONPATH={tree.source} where jobs are started, or install the tree"
    return warning(f"{judged.found}; it is not this tree", hint)


# Which torch Python imports -------------------------------------------------------------------------------

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
        return self.folder is not None and packages.library_in(self.folder / "lib") is not None


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
    places = [here / entry / "torch" for entry in entries if (here / entry / "torch/__init__.py").is_file()]
    others = {os.path.realpath(each): each for each in places if not _same(each, folder)}
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
    if found.folder is None:
        return failure(f"Python finds no torch: {found.reason}", "install one")
    what = f"Python takes {found.folder}: {found.reason}"
    if not found.compiled:
        others = f"; behind it is {found.shadowed[0]}" if found.shadowed else ""
        hint = "leave the directory of the sources, or take it off PYTHONPATH"
        return failure(f"{what}; it has no libraries{others}", hint)
    if found.shadowed:
        others = ", ".join(map(str, found.shadowed))
        return warning(f"{what}; it hides {others}", "have only one of them on the path")
    return ok(what)


# The loader ------------------------------------------------------------------------------------------------


def judge_loader(folder: Path, environment: Mapping[str, str]) -> Finding | None:
    """Whether the loader takes torch's own library with the TCPStore, or an equal one; None if unknown.

    On macOS only DYLD_LIBRARY_PATH counts here.
    """
    own = packages.library_in(folder / "lib")
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
        return ok(f"{own.name} is torch's own")
    by_variable = any(_same(each, loaded.parent) for each in named)
    reason = (
        f"{variable} names its folder" if by_variable else "a search path in torch's libraries leads there"
    )
    what = f"the loader takes {loaded} and not {own}: {reason}"
    if packages.is_same_build(loaded, own):  # a copy by hand still has the search path of its build folder
        return ok(f"{what}; the two are the same")
    return failure(what, "take that away, or copy the library that is meant there")


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
