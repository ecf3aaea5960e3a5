"""The files of the page: read once, and served by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "page"
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Asset:
    """One file."""

    content: bytes
    media_type: str


def read_assets() -> dict[str, Asset]:
    """All of them, by their names."""
    files = (path for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES)
    return {path.name: Asset(path.read_bytes(), _MEDIA_TYPES[path.suffix]) for path in files}
