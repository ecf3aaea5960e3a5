"""Runs the part of the tests that needs no torch with each Python from 3.10 to 3.14 that can be had.

    python tests/tools/pythons.py [3.10 3.14 ...]

An interpreter is looked for on PATH, then among those of pyenv. One that is missing is unpacked, not
installed, from the packages of a Debian that has it, where apt-get has sources of Debian. Each gets a virtual
environment in build/pythons with what the package asks for, uvloop included. A version that cannot be had is
named.

The modules are those of the pure parts, which use most of the language, then the stores, the client, and the
server on both loops. Left out is what takes long and would find the same: the simulation, hostile streams,
launches, the page. Exit code: 0 if all passed with all that could be had.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2]
_FOLDER = _PROJECT / "build/pythons"
_VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
_SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "sid"}
"""Where Debian has a version. The others were never in one that is still kept."""

_TESTS = """
parser codec preface session_bytes engine core counting traffic eventlog
combining relay_core relay_children
rollcall_events rollcall_judging rollcall_meetings rollcall_overhearing rollcall_words
roster meeting blame trust command_line absence
doctor_judging doctor_variables foreign_text
explain_classify explain_knowledge explain_lines explain_quick explain_reading
explain_tracebacks explain_verdict
timeline_judging timeline_reading timeline_words looking looking_names looking_keys
file_store stores rendezvous connecting endpoint binding backend serve kv
"""
_PACKAGES = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100")
_SECONDS = 1800


class NotToBeHadError(Exception):
    """Why there is no interpreter of a version here."""


def main() -> int:
    rows = [_row(version) for version in sys.argv[1:] or _VERSIONS]
    print("\n| Python | from | outcome |\n|---|---|---|")
    for cells, _ in rows:
        print("|", " | ".join(cells), "|")
    return 0 if all(good for _, good in rows) else 1


def _row(version: str) -> tuple[tuple[str, str, str], bool]:
    """A line of the table, and whether nothing failed."""
    try:
        interpreter, origin = _interpreter(version)
    except NotToBeHadError as why:
        return (version, "", f"not run: {why}"), True
    python = _environment(version, interpreter)
    words = [str(path) for name in _TESTS.split() for path in _PROJECT.glob(f"tests/*/test_{name}.py")]
    words += ["-q", "-n", "3", "--dist", "worksteal", "-m", "not slow", "-k", "not torch", "--tb=short"]
    began = time.monotonic()
    print(f"Python {version}, from {origin}", flush=True)
    ran = _do([str(python), "-m", "pytest", "-p", "no:cacheprovider", *words], may_fail=True)
    summary = re.sub(r" in [\d.]+s.*", "", ran.stdout.rstrip().rpartition("\n")[2].strip("= "))
    print(ran.stdout if ran.returncode else summary, flush=True)
    exact = _do([str(python), "-c", "import platform; print(platform.python_version())"]).stdout.strip()
    return (exact, origin, f"{summary}, in {time.monotonic() - began:.0f} s"), ran.returncode == 0


def _interpreter(version: str) -> tuple[Path, str]:
    """An interpreter of a version, and where it comes from."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for place, origin in (
        *((Path(folder) / f"python{version}", "PATH") for folder in os.get_exec_path()),
        *((each / "bin/python3", "pyenv") for each in sorted(pyenv.glob(f"{version}.*"))),
    ):
        # pyenv has a program on PATH for every version, which fails if the version is not chosen.
        if place.exists() and _do([str(place), "-c", "import venv"], may_fail=True).returncode == 0:
            return place, origin
    return _from_debian(version), f"Debian ({_SUITES[version]})"


def _environment(version: str, interpreter: Path) -> Path:
    """A virtual environment with what the tests need, made by the pip of this interpreter."""
    folder = _FOLDER / version
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _do([str(interpreter), "-m", "venv", "--without-pip", str(folder)])
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        _do([*pip, "--disable-pip-version-check", "-e", f"{_PROJECT}[tls,web]", *_PACKAGES])
        (folder / "installed").touch()
    return python


def _from_debian(version: str) -> Path:
    """Unpack an interpreter, with all libraries that it needs, and a script that starts it with those."""
    if version not in _SUITES:
        raise NotToBeHadError("on this machine there is none, and no Debian has it")
    folder = _FOLDER / f"debian-{_SUITES[version]}"
    python = folder / f"root/usr/bin/python{version}"
    if python.exists():
        return python
    if shutil.which("apt-get") is None or not _sources(_SUITES[version]):
        raise NotToBeHadError("apt-get with sources of Debian is not here")
    _download(folder, version)
    for package in sorted(folder.glob("cache/archives/*.deb")):
        _do(["dpkg-deb", "-x", str(package), str(folder / "root")])
    libraries = folder / f"root/usr/lib/{platform.machine()}-linux-gnu"
    loader = next(libraries.glob("ld-linux*"))
    program = python.rename(python.with_suffix(f"{python.suffix}.program"))
    python.write_text(
        f'#!/bin/sh\nexec "{loader}" --library-path "{libraries}" --argv0 "$0" "{program}" "$@"\n'
    )
    python.chmod(0o755)
    return python


def _download(folder: Path, version: str) -> None:
    """The packages that apt-get would install on a machine that has none, with a state of their own."""
    for name in ("state/lists/partial", "cache/archives/partial", "sources"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    (folder / "sources/debian.sources").write_text(_sources(_SUITES[version]))
    places = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": folder / "sources",
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", "-y", *(f"-o{name}={value}" for name, value in places.items())]
    _do([*apt, "update"])
    _do([*apt, "--download-only", "install", f"python{version}"])


def _sources(suite: str) -> str:
    """Where this machine has Debian from, for another suite of it; empty if it does not say so."""
    texts = [path.read_text() for path in sorted(Path("/etc/apt").glob("sources.list.d/*.sources"))]
    found = re.search(r"^URIs: *(\S+/debian/?)$", "\n".join(texts), re.M)
    keys = "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    return f"Types: deb\nURIs: {found[1]}\nSuites: {suite}\nComponents: main\n{keys}" if found else ""


def _do(command: Sequence[str], *, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. What it says is kept, and shown if it fails and must not."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    ran = subprocess.run(
        command,
        cwd=_PROJECT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
    )
    if ran.returncode and not may_fail:
        raise SystemExit(f"{' '.join(command)}\n{ran.stdout}")
    return ran


if __name__ == "__main__":
    sys.exit(main())
