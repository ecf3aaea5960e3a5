"""Libraries of any platform, read and never loaded: what they are, and which texts they hold.

A library of torch has hundreds of megabytes, so it is read once from front to back, in pieces; a wheel's
library comes out of the archive the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rallypoint.diagnose.builds import elf, macho, pe
from rallypoint.diagnose.builds.window import Binary, UnreadableError, Window

HEAD_BYTES: Final = 4096
_PIECE_BYTES: Final = 4 << 20
_READERS: Final = {"ELF": elf.read, "PE": pe.read, "Mach-O": macho.read}


@dataclass(frozen=True)
class Scan:
    """What reading a library from front to back has shown."""

    found: frozenset[bytes]
    digest: str
    """SHA-256 of all but the search paths."""


def identify(head: bytes) -> Binary:
    """Format, platform and machines by the first bytes; `UnreadableError` if it is none of the three."""
    known = elf.identify(head) or pe.identify(head) or macho.identify(head)
    if known is None:
        raise UnreadableError("this is no library of Linux (ELF), Windows (PE) or macOS (Mach-O)")
    return known


def identify_file(path: Path) -> Binary:
    """`identify` of a file."""
    try:
        with path.open("rb") as file:
            return identify(file.read(HEAD_BYTES))
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}") from None


def read_binary(path: Path) -> Binary:
    """The headers of a library; `UnreadableError` names the file."""
    try:
        with path.open("rb") as file:
            return read_headers(file)
    except UnreadableError as error:
        raise UnreadableError(f"cannot read {path}: {error.message}", hint=error.hint) from None
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}") from None


def read_headers(file: IO[bytes]) -> Binary:
    """The headers of a library in a seekable file."""
    window = Window(file)
    return _READERS[identify(window.read(0, min(window.size, HEAD_BYTES))).format](window)


def scan_file(path: Path, texts: Sequence[bytes], paths_at: Sequence[tuple[int, int]] = ()) -> Scan:
    """`scan` of a file."""
    try:
        with path.open("rb") as file:
            return scan(file, texts, paths_at)
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}") from None


def scan(file: IO[bytes], texts: Sequence[bytes], paths_at: Sequence[tuple[int, int]] = ()) -> Scan:
    """Which of the texts are in a file, and its digest, with zeros for the search paths at `paths_at`."""
    overlap = max(map(len, texts), default=1) - 1
    found, digest, tail = set[bytes](), hashlib.sha256(), b""
    for offset, piece in _pieces(file):
        joined = tail + piece
        found.update(text for text in texts if text not in found and text in joined)
        tail = joined[max(0, len(joined) - overlap) :] if overlap else b""
        digest.update(_blanked(piece, offset, paths_at))
    return Scan(frozenset(found), digest.hexdigest())


def _pieces(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while piece := file.read(_PIECE_BYTES):
        yield offset, piece
        offset += len(piece)


def _blanked(piece: bytes, offset: int, paths_at: Sequence[tuple[int, int]]) -> bytes:
    inside = [
        (max(at, offset), min(at + size, offset + len(piece)))
        for at, size in paths_at
        if at < offset + len(piece) and at + size > offset
    ]
    if not inside:
        return piece
    changed = bytearray(piece)
    for start, end in inside:
        changed[start - offset : end - offset] = bytes(end - start)
    return bytes(changed)
