"""Which Python packages are installed, without importing them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

ABSENT: Final = "not installed"


def installed(package: str) -> str:
    """The version of a package, or `ABSENT`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT
