"""A file of unknown content, read with bounds, and what a reader of executable formats finds in it.

Every offset in such a file is a claim of the file. `Window.read` checks it, so that a reader of a format can
follow offsets without checks of its own: what is cut off or corrupt ends in an `UnreadableError`.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from typing import IO, Final

from rallypoint.errors import RallypointError

_LONGEST_STRING: Final = 4096


class UnreadableError(RallypointError):
    """A file that is not what it claims to be: cut off, corrupt, or of no known format."""


@dataclass(frozen=True)
class Binary:
    """What the headers of an executable or a shared library say."""

    format: str
    platform: str
    machines: tuple[str, ...]
    needed: tuple[str, ...] = ()
    """The libraries that it is linked with, by the names that it has for them."""
    rpaths: tuple[str, ...] = ()
    """Where the loader looks before LD_LIBRARY_PATH (ELF), or where @rpath leads (Mach-O)."""
    runpaths: tuple[str, ...] = ()
    """Where the loader looks after LD_LIBRARY_PATH. If there are any, `rpaths` do not count."""
    build_id: str = ""
    """What the linker wrote to tell this link from all others; empty if it did not."""
    paths_at: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """Offsets and lengths of the search paths above, which an installation rewrites."""


class Window:
    """A part of a seekable file, whose offsets begin at 0."""

    def __init__(self, file: IO[bytes], start: int = 0, size: int | None = None) -> None:
        self._file = file
        self.start = start
        self.size = file.seek(0, os.SEEK_END) - start if size is None else size

    def part(self, start: int, size: int) -> Window:
        """A window of this one."""
        self._check(start, size)
        return Window(self._file, self.start + start, size)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes; `UnreadableError` if the file does not have them."""
        self._check(offset, size)
        self._file.seek(self.start + offset)
        data = self._file.read(size)
        if len(data) < size:
            raise UnreadableError(f"the file ends at byte {self.start + offset + len(data):,}, too early")
        return data

    def unpack(self, layout: str, offset: int) -> tuple[int, ...]:
        """The integers of a `struct` layout."""
        return struct.unpack(layout, self.read(offset, struct.calcsize(layout)))

    def string(self, offset: int) -> str:
        """The text up to the next zero byte."""
        self._check(offset, 1)
        data = self.read(offset, min(_LONGEST_STRING, self.size - offset))
        end = data.find(b"\0")
        if end < 0:
            raise UnreadableError(f"the text at byte {self.start + offset:,} has no end")
        return data[:end].decode("utf-8", "replace")

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise UnreadableError(
                f"the headers point at byte {self.start + offset + size:,}, "
                f"outside of the {self.start + self.size:,} that are there"
            )
