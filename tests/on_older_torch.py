"""Runs torch's own client, and a job of one rank, with older releases of torch for Windows, under Wine.

    python tests/on_older_torch.py [2.6.0 ...]

Their wheels for Windows need no CUDA, which those for Linux do: gigabytes. Each is downloaded and unpacked,
not installed, to C:\\torch of the environment that `tests/on_windows.py` makes, and comes first on the path
of `tests/client/test_torch_clients.py` and `tests/windows/test_older_torch.py`.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from windows.laying import version_of
from windows.wine import DRIVE

_PROJECT = Path(__file__).resolve().parents[1]
_RELEASES = ("2.4.1", "2.6.0", "2.8.0", "2.11.0")
_MODULES = ("tests/client/test_torch_clients.py", "tests/windows/test_older_torch.py")
_ON_WINDOWS = [sys.executable, str(_PROJECT / "tests/on_windows.py"), "run", "--seconds", "900"]


def main() -> int:
    if subprocess.run([*_ON_WINDOWS, "python", "-c", "pass"]).returncode:
        return 2  # it has said why
    codes = [_test(release) for release in sys.argv[1:] or _RELEASES]
    return 1 if any(codes) else 0


def _test(release: str) -> int:
    print(f"torch {release}", flush=True)
    _unpack(release)
    words = ["python", "-m", "pytest", "-q", "-m", "not slow", *_MODULES]
    return subprocess.run([*_ON_WINDOWS, "--set", f"PYTHONPATH=C:\\torch\\{release}", *words]).returncode


def _unpack(release: str) -> None:
    version = version_of(sys.executable)
    place = _PROJECT / "build/windows" / version / "root" / DRIVE / "torch" / release
    if place.exists():
        return
    wheels = place.parent / "wheels"
    words = ["--quiet", "--no-deps", "--only-binary=:all:", "--platform=win_amd64"]
    words += [f"--python-version={version}", f"--dest={wheels}", f"torch=={release}"]
    subprocess.run([sys.executable, "-m", "pip", "download", *words], check=True)
    [wheel] = wheels.glob(f"torch-{release}*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    wheel.unlink()


if __name__ == "__main__":
    sys.exit(main())
