"""Whether a file of settings may be obeyed: only if nobody but this user and root can have written it.

Settings are looked for in every folder up to the root, and some of them decide which code a job runs. So a
file that another user has left in a folder above must not count.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path
from typing import Final

_ROOT: Final = 0
_ELSEWHERE: Final = "to use it, copy it into a folder that only you may write"


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
