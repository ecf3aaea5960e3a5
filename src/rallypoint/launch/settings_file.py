"""The file of settings, and whether it may be obeyed.

It is the nearest `rallypoint.toml`, or `pyproject.toml` with a table `[tool.rallypoint]`, in the folder or
one above it. Its table `run` has the options, its table `env` variables for the job. Some settings decide
which code a job runs. So a file counts only if nobody but this user and root can have written it: one that
another user has left in a folder above must not count.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rallypoint.errors import UsageError
from rallypoint.launch.options import BACKEND, BY_NAME, ENV, Level, Setting, check_backend
from rallypoint.store.server.guard.secret import FILE_VARIABLE, SECRET_VARIABLE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "rallypoint.toml": (),
    "pyproject.toml": ("tool", "rallypoint"),
}
"""The files that are read, the first one first, and the table of each that is ours."""

_MOST_BYTES: Final = 1 << 20

RUN: Final = "run"
"""The table with the options of `rallypoint run`."""

_ROOT: Final = 0
_ELSEWHERE: Final = "to use it, copy it into a folder that only you may write"

_REFUSED: Final = ("BASH_ENV", "ENV", "PATH")
_REFUSED_PREFIXES: Final = ("LD_", "DYLD_", "PYTHON")
"""Variables that no file may set, and how others begin: they decide which code programs load."""


@dataclass(frozen=True)
class SettingsFile:
    """The options and the variables in the file that counts; empty if there is no such file."""

    path: Path | None = None
    options: Mapping[str, Setting[object]] = field(default_factory=dict)
    variables: Mapping[str, Setting[str]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """Nearer files that do not count, since others may write them, each with the reason."""


def read_file(folder: Path) -> SettingsFile:
    """The file that counts for jobs that are started in a folder."""
    start = folder.resolve()
    warnings: list[str] = []
    for path, tables in _candidates(start):
        doubt = doubt_about(path, start)
        if doubt:
            if _mentions_us(path, tables):
                warnings.append(f"{path} is not used: {doubt}")
            continue
        content = _our_table(path, tables)
        if content is not None:
            known = _checked_table(content, path, tables)
            for key in known:
                if key not in (RUN, ENV):
                    raise _unknown_table(key, path, tables)
            options = _options_of_table(known.get(RUN, {}), path, (*tables, RUN))
            variables = _variables_of_table(known.get(ENV, {}), path, (*tables, ENV))
            return SettingsFile(path, options, variables, tuple(warnings))
    return SettingsFile(warnings=tuple(warnings))


def _candidates(start: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Files that may be about us, the nearest first, and the names of the table that would be ours."""
    for place in (start, *start.parents):
        for name, tables in FILES.items():
            if os.path.isfile(place / name):
                yield place / name, tables


def _mentions_us(path: Path, tables: tuple[str, ...]) -> bool:
    """Whether a file seems to be about us. It is not read any further, as it may be anybody's."""
    if not tables:
        return True
    try:
        with path.open("rb") as file:
            return tables[-1].encode() in file.read(_MOST_BYTES)
    except OSError:
        return False


def _our_table(path: Path, tables: tuple[str, ...]) -> object:
    """Our table of a file, or None if the file is not about us."""
    text = _text_of_file(path, tables[-1] if tables else "")
    if text is None:
        return None
    try:
        content: object = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}", hint="correct it at that place") from None
    for table in tables:
        content = content.get(table) if isinstance(content, dict) else None
    return content


def _text_of_file(path: Path, mention: str) -> str | None:
    """The text, or None if it lacks the mention: a file that is not about us may be broken in any way."""
    try:
        content = path.read_bytes()
        # Some editors begin a file with a byte order mark.
        return content.decode("utf-8-sig") if mention.encode() in content else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="it must be readable UTF-8") from None


def _checked_table(value: object, path: Path, tables: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict):
        name = ".".join(tables)
        raise UsageError(f"{path}: {name} is {value!r}, but must be a table", hint=f"write [{name}]")
    return value


def _unknown_table(key: str, path: Path, tables: tuple[str, ...]) -> UsageError:
    run, env = (f"[{'.'.join((*tables, name))}]" for name in (RUN, ENV))
    is_option = key.replace("-", "_") in BY_NAME
    return UsageError(
        f"{path}: there is no table {'.'.join((*tables, key))}",
        hint=f"{key} goes below {run}" if is_option else f"there are {run} and {env}",
    )


def _variables_of_table(content: object, path: Path, tables: tuple[str, ...]) -> dict[str, Setting[str]]:
    found: dict[str, Setting[str]] = {}
    for name, value in _checked_table(content, path, tables).items():
        source = f"{path} ({'.'.join((*tables, name))})"
        if type(value) not in (str, int) or not name or "=" in name or "\0" in f"{name}{value}":
            raise UsageError(f"{source} is {value!r}", hint='write NAME = "text" or a whole number')
        if name.upper() in _REFUSED or name.upper().startswith(_REFUSED_PREFIXES):
            raise UsageError(
                f"{source}: no file may set {name}, which decides which code programs load",
                hint=f"take it out, and set it where the job is started: export {name}=...",
            )
        if name.upper() == SECRET_VARIABLE:
            raise _no_place_for_secrets(source)
        found[name] = Setting(str(value), source, Level.FILE)
    return found


def _no_place_for_secrets(source: str) -> UsageError:
    return UsageError(
        f"{source}: a file of settings is no place for a secret: others may read it, and it is shown",
        hint=f"put the secret into a file of its own, and name that in the table [{ENV}]: {FILE_VARIABLE}",
    )


def _options_of_table(content: object, path: Path, tables: tuple[str, ...]) -> dict[str, Setting[object]]:
    found: dict[str, Setting[object]] = {}
    for key, value in _checked_table(content, path, tables).items():
        source = f"{path} ({'.'.join((*tables, key))})"
        name = key.replace("-", "_")
        if name in found:
            raise UsageError(f"{source}: {name} is there twice, with - and with _", hint="keep one")
        if name in ("secret", "secret_file"):
            raise _no_place_for_secrets(source)
        if not _is_plain(value) and not (name == "rdzv_conf" and _is_plain_table(value)):
            shown = "a table" if name == ENV else repr(value)  # there may be a secret in it
            raise UsageError(
                f"{source}: {name} cannot be {shown}",
                hint="write a text, a number, true or false; rdzv_conf also a table of these, without commas",
            )
        if name == "log_dir":
            value = str(path.parent / str(value))  # relative to the file, wherever the job is started
        found[name] = Setting(value, source, Level.FILE)
    check_backend(found.pop("rdzv_backend", Setting(BACKEND)).value)
    return found


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _is_plain_table(value: object) -> bool:
    return isinstance(value, dict) and all(
        _is_plain(each) and "," not in f"{key}{each}" and "=" not in key for key, each in value.items()
    )


# Who may have written it -----------------------------------------------------------------------------------


def doubt_about(path: Path, start: Path) -> str:
    """Why a file is not obeyed, and what would help; empty if it is.

    The file has to belong to this user or to root, and so do its folder and, behind a symbolic link, the
    folder of the file that is meant; and nobody else may write any of them. `start` is the folder in which
    the command was called. It matters on Windows alone, where a file tells neither its owner nor who may
    write it: there, only a file in this folder or in the user's home folder is obeyed.
    """
    if sys.platform == "win32":
        inside = path.parent == start or Path.home().resolve() in path.parents
        return "" if inside else f"it is neither in {start} nor in your home folder; {_ELSEWHERE}"
    try:
        meant = path.resolve(strict=True)
        doubts = (_doubt_about_owner_and_mode(each) for each in (meant, meant.parent, path.parent))
        return next(filter(None, doubts), "")
    except OSError as error:
        return f"who may write it cannot be told ({error.strerror or error})"


def _doubt_about_owner_and_mode(path: Path) -> str:
    found = path.stat()
    if found.st_uid not in (os.geteuid(), _ROOT):
        return f"{path} belongs to {_user_name(found.st_uid)}; {_ELSEWHERE}"
    if found.st_mode & stat.S_IWOTH:
        writers = "everybody"
    elif found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
        writers = f"the group {_group_name(found.st_gid)}"
    else:
        return ""
    # A sticky folder, such as /tmp, is meant to be shared: to close it would break other programs.
    can_be_closed = found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX
    remedy = f"to use it: chmod go-w {shlex.quote(str(path))}" if can_be_closed else _ELSEWHERE
    return f"{writers} may write {path}; {remedy}"


def _is_private(group: int) -> bool:
    """Whether a group is this user's alone, as many systems make one for each user: it is called the same."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    mine = user.pw_uid != _ROOT and group == user.pw_gid and found.gr_name == user.pw_name
    return mine and set(found.gr_mem) <= {user.pw_name}


def _user_name(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group_name(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
