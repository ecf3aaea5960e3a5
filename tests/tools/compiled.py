"""The tests of the core on the compiled package: `python tests/tools/compiled.py build`, then `... test`.

`build` makes a wheel as pip does, and lays it out in `build/compiled`. `test` runs the tests with that folder
ahead of the sources, in all processes that they start. Where there is no C compiler, both say so; where there
is one and the package cannot be compiled, `build` fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Final

_PROJECT: Final = Path(__file__).parents[2]
_FOLDER: Final = _PROJECT / "build" / "compiled"
_WHEELS: Final = _PROJECT / "build" / "wheels"

_TESTS: Final = (
    *("compiled", "parser", "session_bytes", "sessions", "engine", "core", "counting", "replay"),
    *("fuzz", "loops", "named_stores", "serve", "socket_owner", "torch_clients"),
)
"""What the compiled modules do: in bytes, by property, with sockets, for torch's client."""
_SIMULATIONS: Final = ("simulation", "replicated_simulation")
"""They take as long as all of these, and come behind `--simulations`."""


def build() -> int:
    for folder in (_FOLDER, _WHEELS):
        shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-v", "wheel", "--no-deps"]
    command = [*pip, "--no-build-isolation", f"--wheel-dir={_WHEELS}", str(_PROJECT)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        return done.returncode
    why_pure = "\n".join(re.findall(r"rallypoint: built as pure Python.*", done.stdout))
    print(why_pure or "rallypoint: compiled")
    [wheel] = _WHEELS.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(_FOLDER)
    sys.path.insert(0, str(_PROJECT))
    return 1 if why_pure and not import_module("hatch_build").why_not() else 0


def test(options: list[str]) -> int:
    environ = os.environ | {"PYTHONPATH": str(_FOLDER)}
    program = "from rallypoint import build; print(build.__file__); print(build.in_use())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    file, kind = done.stdout.splitlines()
    assert Path(file).is_relative_to(_FOLDER), file
    if kind != "compiled":
        print("rallypoint: it could not be compiled here, so there is nothing to test but the pure package")
        return 0
    names = (*_TESTS, *_SIMULATIONS) if "--simulations" in options else _TESTS
    modules = [str(path) for name in names for path in _PROJECT.glob(f"tests/*/test_{name}.py")]
    words = [option for option in options if option != "--simulations"]
    # Not those that break a rule to see it caught: compiled callers do not notice a method that is replaced.
    # Nor the fuzzer that is guided by branches: it sees none there.
    chosen = ["-m", "not slow", "-k", "not caught and not guided"]
    pytest = [sys.executable, "-m", "pytest", *chosen, *words, *modules]
    return subprocess.run(pytest, cwd=_PROJECT, env=environ).returncode


if __name__ == "__main__":
    sys.exit(build() if sys.argv[1] == "build" else test(sys.argv[2:]))
