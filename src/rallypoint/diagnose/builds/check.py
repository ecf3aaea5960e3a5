"""`rallypoint torch check`: finds out what is at a path, collects the facts, and has them judged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rallypoint.diagnose.builds import packages, trees, verdicts
from rallypoint.diagnose.builds.loader import ImportedTorch, find_torch, judge_import, judge_loader
from rallypoint.diagnose.builds.packages import HEAD_BYTES, LIBRARIES, NO_LIBRARY, Package, identify, opened
from rallypoint.diagnose.builds.trees import Tree
from rallypoint.diagnose.builds.verdicts import BuildReport
from rallypoint.diagnose.findings import Finding, State, failure, ok, warning
from rallypoint.errors import UsageError

_KINDS = "an installed torch, a wheel, a library, a source tree or its build folder"


def check(path: Path | None, python: str, environment: Mapping[str, str]) -> BuildReport:
    """Look into what is at a path, or into the torch that `python` would import.

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
    tree = trees.find_tree(path)
    if tree and (tree.build or not trees.own_package(path)):
        return _check_tree(tree, find_torch(python, environment), environment)
    if folder := packages.find_package(path):
        return _report("installed", folder, packages.read_package(folder), judge_loader(folder, environment))
    raise UsageError(f"{path} is no torch: {' or '.join(LIBRARIES)} is not there", hint=f"name {_KINDS}")


def _check_library(path: Path) -> BuildReport:
    with opened(path) as file:
        if identify(file.read(HEAD_BYTES)) is None:
            raise UsageError(f"{path} is no torch: {NO_LIBRARY}", hint=f"name {_KINDS}")
    package = packages.read_library(path)
    if not package.texts and path.name not in LIBRARIES:
        raise UsageError(f"{path} does not hold the TCPStore", hint=f"name {' or '.join(LIBRARIES)}")
    return _report("library", path, package)


def _check_import(found: ImportedTorch, python: str, environment: Mapping[str, str]) -> BuildReport:
    if found.folder is None:
        raise UsageError(f"{python} finds no torch", hint=f"install one, or name {_KINDS}")
    if not found.compiled:
        return BuildReport("installed", str(found.folder), None, (judge_import(found),))
    package = packages.read_package(found.folder)
    loader = judge_loader(found.folder, environment)
    return _report("installed", found.folder, package, judge_import(found), loader)


def _report(kind: str, path: Path, package: Package, *more: Finding | None) -> BuildReport:
    findings = [
        _describe(package),
        verdicts.judge_server(package.texts, package.windows),
        verdicts.judge_shipped(package.shipped),
        *more,
    ]
    known = tuple(finding for finding in findings if finding)
    return BuildReport(kind, str(path), verdicts.has_server(package.texts), known)


def _describe(package: Package) -> Finding:
    version = package.versions.get("__version__", "of an unknown version")
    cuda = f", CUDA {package.versions['cuda']}" if "cuda" in package.versions else ""
    machines = " and ".join(package.target.machines)
    library = package.library.replace("\\", "/").rpartition("/")[2]
    return ok("torch", f"{version}{cuda}, for {package.target.platform} on {machines} ({library})")


# A tree ----------------------------------------------------------------------------------------------------


def _check_tree(tree: Tree, found: ImportedTorch, environment: Mapping[str, str]) -> BuildReport:
    defined = trees.defines_macro(tree.build) if tree.build else None
    library = trees.built_library(tree.build) if tree.build else None
    package = packages.read_library(library) if library else None
    findings = [
        _describe_tree(tree),
        *(verdicts.judge_options(tree.cache, defined, tree.windows) if tree.build else []),
        _judge_built(package, library),
        *_judge_installed(tree, found),
        _judge_loaded(tree, found),
        *([judge_loader(found.folder, environment)] if found.folder else []),
    ]
    libuv = verdicts.has_server(package.texts) if package else None
    return BuildReport("tree", str(tree.source), libuv, tuple(finding for finding in findings if finding))


def _describe_tree(tree: Tree) -> Finding:
    if tree.build is None:
        return failure(
            "tree",
            f"{tree.version or 'sources'}, not configured: no folder in it has a CMakeCache.txt",
            f"`rallypoint torch plan {tree.source}` writes the script of a build",
        )
    others = f"; older ones: {', '.join(map(str, tree.others))}" if tree.others else ""
    return ok("tree", f"{tree.version or 'sources'}, built in {tree.build}{others}")


def _judge_built(package: Package | None, library: Path | None) -> Finding:
    if package is None:
        return failure(
            "libuv server",
            f"not built yet: there is no {LIBRARIES[0]}, {LIBRARIES[1]} or {LIBRARIES[2]}",
            "cmake --build, with the targets torch_cpu and torch_python",
        )
    judged = verdicts.judge_server(package.texts, package.windows)
    return replace(judged, found=f"{library}: {judged.found}")


def _judge_installed(tree: Tree, found: ImportedTorch) -> list[Finding]:
    """Against the libraries in the tree itself, and against an installed torch of the same version."""
    if tree.build is None or trees.built_library(tree.build) is None:
        return []
    folders = [trees.own_package(tree.source)]
    if found.folder and found.compiled:
        version = packages.read_version(found.folder).get("__version__", "unknown")
        if version.partition("+")[0] == tree.version.partition("+")[0]:  # without the mark of a build
            folders.append(found.folder)
    places = {os.path.realpath(folder): folder / "lib" for folder in folders if folder}
    copies = {str(place): trees.find_copies(tree.build, place) for place in places.values()}
    if not any(copies.values()):
        hint = "install it: `pip install --no-build-isolation -e .`, or copy the libraries to torch/lib"
        return [warning("installed", "what was built is not installed anywhere", hint)]
    return [verdicts.judge_copies(place, each) for place, each in copies.items() if each]


def _judge_loaded(tree: Tree, found: ImportedTorch) -> Finding:
    """Whether it is this tree that Python will import."""
    judged = judge_import(found)
    sources = os.path.realpath(tree.source / "torch")
    own = found.folder is not None and os.path.realpath(found.folder) == sources
    if own and found.compiled:  # that it hides another one is meant
        return ok(judged.name, judged.found)
    if own or judged.state is State.FAILURE:
        return judged
    hint = f"set PYTHONPATH={tree.source} where jobs are started, or install the tree"
    return warning(judged.name, f"{judged.found}; it is not this tree", hint)
