"""Users of this machine: their names and numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_USER_FILE: Final = "/etc/passwd"


def user_number(user: str) -> int | None:
    """The number of a user, by name or by the number itself; None if there is no user of that name."""
    if user.isdecimal():
        return int(user)
    try:
        import pwd  # late: only names need it, and Windows has none

        return pwd.getpwnam(user).pw_uid
    except (ImportError, KeyError):
        return None


@lru_cache(maxsize=1024)
def local_user_name(number: int) -> str:
    """The name of a user who is in the machine's own file of users; empty if the user is not.

    A name service is not asked: that may take seconds, in which a server would serve nobody.
    """
    try:
        with open(_USER_FILE, encoding="utf-8", errors="replace") as file:
            rows = (line.split(":", 3) for line in file)
            return next((row[0] for row in rows if len(row) > 3 and row[2] == str(number)), "")
    except OSError:
        return ""
