"""The job's secret: where a process has it from, and what is derived from it.

It is 32 random bytes, written as 64 hexadecimal digits. Processes find it in a file, which nobody else may
read, or in a variable; those that our own processes start get it through a pipe (`hold`). It is in no command
line, no message and no `repr`.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from rallypoint.errors import UsageError

if TYPE_CHECKING:
    from rallypoint.wire.preface import Right

SECRET_VARIABLE: Final = "RALLYPOINT_SECRET"  # noqa: S105 - a name
FILE_VARIABLE: Final = "RALLYPOINT_SECRET_FILE"

_TOKEN: Final = "look-"  # noqa: S105 - a mark
"""Stands before a token that may only look."""
_BYTES: Final = 32
_MOST_READ: Final = 4096
_MAKE_ONE: Final = "make one with `rallypoint secret`"


class Secret:
    """A job's secret, or a token that was derived from one and may only look."""

    def __init__(self, text: str, source: str) -> None:
        """UsageError, which does not repeat the text, if it is none; `source` says where it comes from."""
        text = text.strip()
        self.may_only_look = text.startswith(_TOKEN)
        try:
            self._bytes = bytes.fromhex(text.removeprefix(_TOKEN))
        except ValueError:
            self._bytes = b""
        if len(self._bytes) != _BYTES:
            raise UsageError(
                f"{source} holds no secret: that is {2 * _BYTES} hexadecimal digits, perhaps with {_TOKEN!r} "
                "before them",
                hint=_MAKE_ONE,
            )

    @property
    def text(self) -> str:
        """As it is written, for a file or a pipe."""
        return (_TOKEN if self.may_only_look else "") + self._bytes.hex()

    @property
    def look_token(self) -> str:
        """What to give somebody who may only look. UsageError if this is no more than that."""
        from rallypoint.wire.preface import Right  # late: most jobs have no secret, and need no hashes

        return _TOKEN + self.keys[Right.LOOK].hex()

    @property
    def proof(self) -> tuple[Right, bytes]:
        """For a client: the right that it asks for, and the key that it proves to have."""
        from rallypoint.wire.preface import Right, key_for

        if self.may_only_look:
            return Right.LOOK, self._bytes
        return Right.ALL, key_for(Right.ALL, self._bytes)

    @property
    def keys(self) -> dict[Right, bytes]:
        """For a server: the key of each right. UsageError if this may only look."""
        from rallypoint.wire.preface import Right, key_for

        self.check_whole()
        return {right: key_for(right, self._bytes) for right in Right}

    def check_whole(self) -> None:
        """UsageError if this may only look."""
        if self.may_only_look:
            raise UsageError(
                "this is a token that may only look, and no secret",
                hint="a server, a relay and a launcher need the secret that it was derived from",
            )


def make_secret() -> str:
    """A new one."""
    return os.urandom(_BYTES).hex()


_held: list[Secret | None] = []


def hold(secret: Secret | None) -> None:
    """From now on this process has this secret, or none, whatever its variables say."""
    _held[:] = [secret]


def job_secret(environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret of this process; None if it has none. UsageError if the variables cannot be obeyed."""
    if _held:
        return _held[0]
    path = environ.get(FILE_VARIABLE)
    text = environ.get(SECRET_VARIABLE)
    if path and text:
        raise UsageError(f"both {FILE_VARIABLE} and {SECRET_VARIABLE} are set", hint="set one of them")
    if path:
        return Secret(_read(path), f"{path}, the file of {FILE_VARIABLE},")
    return Secret(text, f"the variable {SECRET_VARIABLE}") if text else None


def take_secret() -> None:
    """For servers, relays and launchers: hold the secret, and leave no copy for processes that they start.

    UsageError if it is only a token.
    """
    secret = job_secret()
    if secret is not None:
        secret.check_whole()
    hold(secret)
    os.environ.pop(SECRET_VARIABLE, None)


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            doubt = _doubt_about(os.fstat(file.fileno()))
            if doubt:
                raise UsageError(f"{path}, the file of {FILE_VARIABLE}, is no secret: {doubt}")
            return file.read(_MOST_READ).decode("ascii", "replace")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"the file of {FILE_VARIABLE} cannot be read: {path}: {reason}", hint=_MAKE_ONE
        ) from error


def _doubt_about(found: os.stat_result) -> str:
    """Why a file cannot be trusted to be secret; empty if it can. Windows does not tell."""
    if sys.platform == "win32":
        return ""
    if not stat.S_ISREG(found.st_mode):
        return "it is not a plain file"
    if found.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user"
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return "others than its owner may read or write it; chmod 600 helps"
    return ""
