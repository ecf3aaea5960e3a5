"""Adding settings to a `rallypoint.toml`: lines are put in, and all else stays as it is.

What is there already stays: who set it had a reason. The outcome is read back before it is written, so a file
that is laid out in another way than these lines allow for is refused and not broken.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rallypoint.errors import UsageError
from rallypoint.launch.config import find_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME: Final = "rallypoint.toml"
BACKUP: Final = ".before-doctor"
"""What the name of the file as it was ends with."""

_REMARK: Final = "  # by rallypoint doctor --fix"

Tables = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Amendment:
    """A file that is to be written, and what it says now."""

    path: Path
    before: str | None
    """None if there is no file."""
    after: str
    added: tuple[tuple[str, str, str], ...]
    """Table, key and value of what is not there yet."""

    @property
    def backup(self) -> Path:
        return self.path.with_name(self.path.name + BACKUP)

    @property
    def undo(self) -> str:
        """What takes it back."""
        if self.before is None:
            return f"delete {self.path}"
        return f"put {self.backup} back in the place of {self.path.resolve()}"

    def write(self) -> None:
        """Write the file, whole or not at all; what was there is kept beside it."""
        path = self.path.resolve()  # not a link to it
        draft = path.with_name(path.name + ".draft")
        draft.write_bytes(self.after.encode())
        if self.before is not None:
            if not self.backup.exists():  # what was there before the first time
                self.backup.write_bytes(self.before.encode())
            shutil.copymode(path, draft)
        draft.replace(path)


def plan_amendment(folder: Path, additions: Tables) -> Amendment:
    """How the file that counts in a folder would get some settings; a new one there if there is none.

    UsageError if that is a pyproject.toml, which is not ours to change, or if its layout does not allow it.
    """
    path = find_file(folder) or folder.resolve() / NAME
    if path.name != NAME:
        lines = "; ".join(
            f"{key} = {json.dumps(value)} in [tool.rallypoint.{table}]"
            for table, key, value in _all(additions)
        )
        raise UsageError(f"the settings are in {path}, which is not changed here", hint=f"put in: {lines}")
    # As bytes: the ends of its lines stay what they are.
    before = path.read_bytes().decode() if path.is_file() else None
    after = before or ""
    known = _parse(after)
    added = [each for each in _all(additions) if not _is_set(known.get(each[0], {}), each[1])]
    for table, key, value in added:
        after = _add(after, table, key, value)
    _check(path, before or "", after, additions)
    return Amendment(path, before, after, tuple(added))


def _is_set(table: object, key: str) -> bool:
    """Whether a table has a key; in options, - and _ are the same."""
    return isinstance(table, dict) and key.replace("_", "-") in {each.replace("_", "-") for each in table}


def _parse(text: str) -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads(text.removeprefix("\ufeff"))  # a mark of some editors
    return content


def _all(additions: Tables) -> list[tuple[str, str, str]]:
    return [(table, key, value) for table, pairs in additions.items() for key, value in pairs.items()]


def _add(text: str, table: str, key: str, value: str) -> str:
    """The text with one line more, right below the heading of its table."""
    end = "\r\n" if "\r\n" in text else "\n"
    line = f"{key} = {json.dumps(value, ensure_ascii=False)}{_REMARK}{end}"
    heading = re.search(rf"^\ufeff?\[\s*{re.escape(table)}\s*\][^\n]*\n?", text, flags=re.MULTILINE)
    if heading is None:
        gap = "" if not text else end if text.endswith("\n") else 2 * end
        return f"{text}{gap}[{table}]{end}{line}"
    start = text[: heading.end()]
    return f"{start}{'' if start.endswith(chr(10)) else end}{line}{text[heading.end() :]}"


def _check(path: Path, before: str, after: str, additions: Tables) -> None:
    """Whether the outcome says what it said, and the additions."""
    try:
        wanted, found = _parse(before), _parse(after)
        for table, key, value in _all(additions):
            there = wanted.setdefault(table, {})
            if not _is_set(there, key):
                there[key] = value
        good = wanted == found
    except (tomllib.TOMLDecodeError, AttributeError):
        good = False
    if not good:
        lines = "; ".join(f"{table}.{key} = {json.dumps(value)}" for table, key, value in _all(additions))
        raise UsageError(
            f"{path} is laid out in a way that cannot be added to", hint=f"put in yourself: {lines}"
        )
