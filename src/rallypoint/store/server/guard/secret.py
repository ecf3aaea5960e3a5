"""The job's secret: where a process gets it, and the token that is derived from it.

The secret is 32 random bytes, written as 64 hexadecimal digits. A process finds it in a private file or in a
variable; one that our own processes start gets it through a pipe, and keeps it with `set_process_secret`. It
is in no command line, no message and no `repr`. The token alone gives the right to look, and nothing else.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from typing import Final

from rallypoint.errors import UsageError

SECRET_VARIABLE: Final = "RALLYPOINT_SECRET"  # noqa: S105 - a name
FILE_VARIABLE: Final = "RALLYPOINT_SECRET_FILE"
LOOK_VARIABLE: Final = "RALLYPOINT_TOKEN"

_TOKEN: Final = "look-"  # noqa: S105 - it stands before a token
_BYTES: Final = 32
_MOST_READ: Final = 4096
_MAKE_ONE: Final = "make one with `rallypoint secret`"


class Token:
    """The proof of a client that may only look."""

    def __init__(self, text: str) -> None:
        """UsageError, which does not repeat the text, if it is no token."""
        from rallypoint.store.wire.preface import Right  # late: most jobs have no secret, and need no hashes

        digits = text.strip()
        hint = "`rallypoint secret --look` prints it"
        if not digits.startswith(_TOKEN):
            raise UsageError(f"the variable {LOOK_VARIABLE} holds no token", hint=hint)
        key = _parse(digits.removeprefix(_TOKEN), f"the variable {LOOK_VARIABLE}", hint)
        self.proof = Right.LOOK, key
        """The right that a client asks for, and the key that proves it."""


class Secret:
    """A job's secret."""

    def __init__(self, text: str, source: str) -> None:
        """UsageError, which does not repeat the text, if it is no secret; it names the `source`."""
        from rallypoint.store.wire.preface import Right, key_for

        if text.strip().startswith(_TOKEN):
            raise UsageError(
                f"{source} holds a token, which may only look, and no secret",
                hint=f"a token belongs into {LOOK_VARIABLE}; `rallypoint status` and `web` use it",
            )
        secret = _parse(text.strip(), source)
        self.text = secret.hex()
        """As it is written, for a file or a pipe."""
        self.keys = {right: key_for(right, secret) for right in Right}
        """For a server: the key of each right."""
        self.proof = Right.ALL, self.keys[Right.ALL]
        """The right that a client asks for, and the key that proves it."""
        self.token = _TOKEN + self.keys[Right.LOOK].hex()
        """For somebody who may only look."""


def make_secret() -> str:
    return os.urandom(_BYTES).hex()


_held: list[Secret | None] = []


def set_process_secret(secret: Secret | None) -> None:
    """Give this process a secret, or none, whatever its variables say."""
    _held[:] = [secret]


def job_secret(environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret of this process; None if it has none. UsageError if the variables are wrong."""
    if _held:
        return _held[0]
    path = environ.get(FILE_VARIABLE)
    text = environ.get(SECRET_VARIABLE)
    if path and text:
        raise UsageError(f"both {FILE_VARIABLE} and {SECRET_VARIABLE} are set", hint="set one of them")
    if path:
        return Secret(_read(path), f"{path}, the file of {FILE_VARIABLE},")
    return Secret(text, f"the variable {SECRET_VARIABLE}") if text else None


def snapshot_credentials() -> Secret | Token | None:
    """What this process proves when it only looks: its secret, or its token."""
    secret = job_secret()
    text = os.environ.get(LOOK_VARIABLE)
    return Token(text) if secret is None and text else secret


def take_secret() -> None:
    """For servers and launchers: keep the secret, and leave the token to child processes instead."""
    secret = job_secret()
    set_process_secret(secret)
    os.environ.pop(SECRET_VARIABLE, None)
    if secret is not None:
        os.environ[LOOK_VARIABLE] = secret.token


def _parse(digits: str, source: str, hint: str = _MAKE_ONE) -> bytes:
    try:
        found = bytes.fromhex(digits)
    except ValueError:
        found = b""
    if len(found) != _BYTES:
        raise UsageError(f"{source} does not hold {2 * _BYTES} hexadecimal digits, as it should", hint=hint)
    return found


def _read(path: str) -> str:
    try:
        # `open` alone would wait for the other end of a named pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
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
    """Why a file may not be secret; empty if it is. Windows does not tell."""
    if sys.platform == "win32":
        return ""
    if not stat.S_ISREG(found.st_mode):
        return "it is not a plain file"
    if found.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user"
    others = stat.S_IRWXG | stat.S_IRWXO
    if found.st_uid == 0 and os.geteuid() and found.st_gid in (os.getegid(), *os.getgroups()):
        others &= ~stat.S_IRGRP  # root lets this process read it by its group: so does Kubernetes, of a pod's
    if found.st_mode & others:
        return "others than its owner may read or write it; chmod 600 helps"
    return ""
