"""Packages for the Windows Python: what `pyproject.toml` asks for there, and what that asks for in turn.

pip would judge markers by the system that it runs on. So it installs without dependencies here, in rounds:
each installs what the packages of the one before ask for on Windows.
"""

from __future__ import annotations

import importlib.metadata
import io
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pip._vendor.distlib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from windows.laying import for_windows

_EXTRAS = ("torch", "tls", "web", "test")
_NOT_THERE = {"rallypoint", "cmake", "ninja", "playwright"}
"""Builds of torch and a browser are tests of Linux alone."""


def wanted(version: str) -> list[str]:
    """The requirements of the project itself, its extras included, as pip reads them."""
    lines = importlib.metadata.requires("rallypoint") or []
    return sorted({_plain(one) for one in _that_hold(lines, version, (*_EXTRAS, ""))})


def install(python: Path, version: str) -> None:
    """Install all that is wanted, as if it were new, with a program in `Scripts` for each command."""
    site = python / "Lib/site-packages"
    shutil.rmtree(site, ignore_errors=True)
    missing = wanted(version)
    words = [
        "--quiet",
        "--no-compile",
        "--no-deps",
        "--upgrade",
        "--root-user-action=ignore",
        "--target",
        str(site),
    ]
    words += ["--target", str(site), *for_windows(version), "--implementation=cp"]
    while missing:
        subprocess.run([sys.executable, "-m", "pip", "install", *words, *missing], check=True, timeout=1800)
        missing = _what_they_miss(site, version)


def _what_they_miss(site: Path, version: str) -> list[str]:
    packages = list(importlib.metadata.distributions(path=[str(site)]))
    there = {canonicalize_name(package.metadata["Name"]) for package in packages}
    asked = [one for package in packages for one in _that_hold(package.requires or [], version, ("",))]
    return sorted({_plain(one) for one in asked if canonicalize_name(one.name) not in there})


def _that_hold(lines: Iterable[str], version: str, extras: Iterable[str]) -> Iterator[Requirement]:
    """Of requirements, those that hold on Windows, with these extras."""
    windows = {
        "os_name": "nt",
        "sys_platform": "win32",
        "platform_system": "Windows",
        "platform_machine": "AMD64",
        "python_version": version,
        "python_full_version": f"{version}.9",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    for requirement in map(Requirement, lines):
        if canonicalize_name(requirement.name) in _NOT_THERE:
            continue
        if any(
            requirement.marker is None or requirement.marker.evaluate({**windows, "extra": e}) for e in extras
        ):
            yield requirement


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def write_programs(python: Path) -> None:
    """Each console command of the packages as a program, as pip makes them on Windows."""
    launcher = (Path(pip._vendor.distlib.__file__).parent / "t64.exe").read_bytes()
    scripts = python / "Scripts"
    scripts.mkdir(exist_ok=True)
    for package in importlib.metadata.distributions(path=[str(python / "Lib/site-packages")]):
        for entry in package.entry_points.select(group="console_scripts"):
            code = f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
            archive = io.BytesIO()
            with zipfile.ZipFile(archive, "w") as writer:
                writer.writestr("__main__.py", code)
            program = launcher + b"#!C:\\python\\python.exe\r\n" + archive.getvalue()
            (scripts / f"{entry.name}.exe").write_bytes(program)
