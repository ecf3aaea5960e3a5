"""Files that can be renamed and removed while they are open, and that several processes append to.

So it is everywhere but on Windows, where whoever opens a file has to allow that.
"""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":
    import _winapi
    import msvcrt

    _SHARE_ALL = 7  # others may read it, write to it, and rename or remove it
    _OPEN_ALWAYS = 4
    _APPEND_DATA = 4  # without the right to write elsewhere: then the system itself finds the end

    def open_movable(path: str | os.PathLike[str], flags: int) -> int:
        """As `os.open`, to read and write, or to append; with O_CREAT, the file is made if there is none."""
        writing = _APPEND_DATA if flags & os.O_APPEND else _winapi.GENERIC_WRITE
        disposition = _OPEN_ALWAYS if flags & os.O_CREAT else _winapi.OPEN_EXISTING
        handle = _winapi.CreateFile(
            os.fspath(path),
            _winapi.GENERIC_READ | writing,
            _SHARE_ALL,
            _winapi.NULL,
            disposition,
            0,
            _winapi.NULL,
        )
        return msvcrt.open_osfhandle(handle, flags | os.O_BINARY | os.O_NOINHERIT)

else:

    def open_movable(path: str | os.PathLike[str], flags: int) -> int:
        """As `os.open`, to read and write, or to append; with O_CREAT, the file is made if there is none."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)
