"""Runs the tests, or any command, in a Python for Windows: real CPython and torch's own wheel, under Wine.

    python tests/on_windows.py test [-- OPTIONS AND MODULES FOR PYTEST...]
    python tests/on_windows.py run [--seconds 600] [--set NAME=VALUE] python -m rallypoint doctor
    python tests/on_windows.py older [2.6.0 ...]

The environment is laid into build/windows when it is first needed (`windows/laying.py`), and kept while the
requirements of the project stay the same. It needs root, apt-get with sources of Debian, and pip. On x86_64,
Wine runs by itself; on aarch64 under box64, where all takes several times as long. `--python` names an
interpreter of this machine: the version (3.10 to 3.13) is its, and the environment is one of its own.

Before each command, the source tree is copied to C:\\rallypoint, where it is installed as `pip install -e`
would do it. A command that is still there after its time is ended, with all that it has started. What it
prints is also in build/windows/3.11/output.log. One command runs at a time.

`older` runs torch's own client, and a job of one rank, with older releases of torch: those for Windows need
no CUDA, which those for Linux do, gigabytes. Each is unpacked to C:\\torch, and comes first on the path.

What Wine is not: it passes Ctrl-Break to no handler of Python. gloo's collectives between two ranks time
out, with torch's own store as well. `psutil.net_connections()` finds nothing. Whoever asks for a right has
it. And the standard library may be a few patch releases newer than its DLL.

Exit code of `test`: 0 if all passed, 1 if not, 2 if it cannot be run here (0 with `--may-skip`).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

from windows import laying, packages, wine

_PROJECT = Path(__file__).resolve().parents[1]
_COPIED = "src tests docs examples pyproject.toml README.md CHANGELOG.md CONTRIBUTING.md Makefile"
_TEST_SECONDS = 3000
_OLDER_TORCHES = ("2.4.1", "2.6.0", "2.8.0", "2.11.0")
_OF_OLDER = ("tests/client/test_torch_clients.py", "tests/windows/test_older_torch.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="an interpreter of the version to take")
    commands = parser.add_subparsers(dest="command", required=True)
    test = commands.add_parser("test", help="the tests that are marked for Windows")
    test.add_argument("--may-skip", action="store_true", help="exit code 0 where nothing can be run")
    test.add_argument("words", nargs="*")
    run = commands.add_parser("run", help="any command")
    run.add_argument("--seconds", type=float, default=600)
    run.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    run.add_argument("words", nargs=argparse.REMAINDER)
    older = commands.add_parser("older", help="torch's own client, of older releases")
    older.add_argument("words", nargs="*", default=list(_OLDER_TORCHES))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and nothing of Wine is left
    missing = wine.what_is_missing()
    if missing:
        print(f"tests on Windows skipped: {missing}")
        return 0 if options.command == "test" and options.may_skip else 2
    folder = _PROJECT / "build/windows" / laying.version_of(options.python)
    with _alone(folder):
        _prepare(folder, options.python)
        if options.command == "test":
            return _test(folder, options.words)
        if options.command == "older":
            codes = [_test_older(folder, release, options.python) for release in options.words]
            return 1 if any(codes) else 0
        return _run(folder, options.words, options.seconds, dict(word.split("=", 1) for word in options.set))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare(folder: Path, interpreter: str) -> None:
    """Lay what is missing or out of date, and copy the source tree."""
    version = laying.version_of(interpreter)
    root = folder / "root"
    python = root / wine.DRIVE / "python"
    laid, installed = folder / "laid", folder / "packages"
    if not laid.exists():
        print(f"laying Wine and Python {version} into {folder}", flush=True)
        for old in (root, folder / "parts"):
            shutil.rmtree(old, ignore_errors=True)
        laying.lay(folder, interpreter)
        installed.unlink(missing_ok=True)
        laid.touch()
    wanted = "\n".join(packages.wanted(version))
    if not installed.exists() or installed.read_text(encoding="utf-8") != wanted:
        print(f"installing packages for Python {version} on Windows", flush=True)
        installed.unlink(missing_ok=True)
        packages.install(python, version)
        _install_project(python / "Lib/site-packages")
        packages.write_programs(python)
        installed.write_text(wanted, encoding="utf-8")
    _copy_project(root / wine.DRIVE / "rallypoint")


def _install_project(site: Path) -> None:
    """The project as an editable install: what is to be found is the copy of the source tree."""
    (site / "rallypoint.pth").write_text("C:\\rallypoint\\src\n", encoding="utf-8")
    own = distribution("rallypoint")
    place = site / f"rallypoint-{own.version}.dist-info"
    place.mkdir(exist_ok=True)
    for name in ("METADATA", "entry_points.txt"):
        (place / name).write_text(own.read_text(name) or "", encoding="utf-8")


def _copy_project(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name in _COPIED.split():
        if (_PROJECT / name).is_dir():
            shutil.copytree(_PROJECT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(_PROJECT / name, place / name)


def _test(folder: Path, words: Sequence[str]) -> int:
    began = time.monotonic()
    pytest = ["python", "-m", "pytest", "-q", "-m", "windows and not slow", "-n", "3", "--dist", "worksteal"]
    is_named = any((_PROJECT / word.partition("::")[0]).exists() for word in words)
    code = _run(folder, [*pytest, *words, *([] if is_named else _modules())], _TEST_SECONDS, {})
    print(f"on Windows: exit code {code} after {time.monotonic() - began:.0f} s")
    return 1 if code else 0


def _test_older(folder: Path, release: str, interpreter: str) -> int:
    print(f"torch {release}", flush=True)
    place = folder / "root" / wine.DRIVE / "torch" / release
    if not place.exists():
        laying.download_wheels(place.parent / "wheels", laying.version_of(interpreter), [f"torch=={release}"])
        [wheel] = place.parent.glob(f"wheels/torch-{release}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place)
        wheel.unlink()
    words = ["python", "-m", "pytest", "-q", "-m", "not slow", *_OF_OLDER]
    return _run(folder, words, 900, {"PYTHONPATH": f"C:\\torch\\{release}"})


def _modules() -> list[str]:
    """The modules with a test for Windows: others need not be importable there."""
    found = (_PROJECT / "tests").rglob("test_*.py")
    marked = (path for path in found if "pytest.mark.windows" in path.read_text(encoding="utf-8"))
    return sorted(path.relative_to(_PROJECT).as_posix() for path in marked)


def _run(folder: Path, words: Sequence[str], seconds: float, variables: Mapping[str, str]) -> int:
    """Run a command of Windows; what it prints is shown, and kept in `output.log`."""
    variables = {"PYTHONPYCACHEPREFIX": r"C:\pycache", **variables}
    with (folder / "output.log").open("wb") as output, _showing(folder / "output.log"):
        return wine.run(
            folder / "root",
            ["/usr/bin/wine", *words],
            seconds=seconds,
            output=output,
            variables=variables,
            folder="rallypoint",
        )


@contextmanager
def _showing(path: Path) -> Iterator[None]:
    """Show what is written to a file, while it is."""
    over = threading.Event()

    def show() -> None:
        with path.open("rb") as reader:
            while True:
                last = over.wait(0.2)
                os.write(1, reader.read())
                if last:
                    return

    thread = threading.Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
