"""Whether the libraries are there that the page needs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from rallypoint.errors import UsageError

_MODULES: Final = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
}


def need_extra() -> None:
    """UsageError, with the command that installs them, if one is missing."""
    missing = [package for module, package in _MODULES.items() if find_spec(module) is None]
    if missing:
        raise UsageError(
            f"the web page needs {', '.join(missing)}: not installed", hint="pip install 'rallypoint[web]'"
        )
