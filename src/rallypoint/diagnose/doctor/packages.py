"""Python, the packages that matter, and the event loop that the server runs on."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Final

import rallypoint
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, failure, ok, warning
from rallypoint.server.loops.backend import LOOP_PACKAGE
from rallypoint.server.machine.packages import ABSENT, installed

_OLDEST: Final = (3, 10)
_OTHERS: Final = ("torch", "accelerate", "deepspeed", "lightning", "numpy")


def versions() -> dict[str, str]:
    """What has to be the same on all machines of a job, more or less."""
    return {
        "python": platform.python_version(),
        "rallypoint": rallypoint.__version__,
        **{name: installed(name) for name in ("torch", "accelerate")},
    }


def check_python(_: Situation) -> Iterator[Finding]:
    where = "in a virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"
    what = f"{platform.python_implementation()} {platform.python_version()}, {platform.platform(terse=True)}"
    if sys.version_info < _OLDEST:
        yield failure("python", what, f"Rallypoint needs Python {'.'.join(map(str, _OLDEST))} or later")
    else:
        yield ok("python", f"{what}, {where}")


def check_packages(_: Situation) -> Iterator[Finding]:
    found = {name: version for name in _OTHERS if (version := installed(name)) != ABSENT}
    texts = [
        f"rallypoint {rallypoint.__version__}",
        *(f"{name} {version}" for name, version in found.items()),
    ]
    if "torch" in found and "numpy" not in found:
        yield warning(
            "packages", f"{', '.join(texts)}; no numpy, which torch warns about", "pip install numpy"
        )
    else:
        yield ok("packages", ", ".join(texts))


def check_event_loop(_: Situation) -> Iterator[Finding]:
    try:
        module = import_module(LOOP_PACKAGE)
    except ImportError as error:
        yield warning(
            "event-loop",
            f"{LOOP_PACKAGE} cannot be imported ({error}): the server runs on the standard library, slower",
            f"pip install {LOOP_PACKAGE}",
        )
    else:
        yield ok(
            "event-loop", f"{LOOP_PACKAGE} {getattr(module, '__version__', '')}: the server runs on libuv"
        )
