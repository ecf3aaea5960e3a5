"""Adding settings to a `rallypoint.toml`: a new file, or new tables at the end of the one that is there.

A table that is there already is not edited: the user is told which lines to put into it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from rallypoint.errors import UsageError
from rallypoint.launch.config import FILES, find_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME: Final = "rallypoint.toml"
REMARK: Final = "# by rallypoint doctor --fix"


@dataclass(frozen=True)
class Amendment:
    """Lines to be added to a file, which may not exist yet."""

    path: Path
    before: str | None
    """What the file says now; None if there is no file."""
    lines: str
    added: tuple[tuple[str, str, str], ...]
    """Table, key and value of each setting that the lines make."""

    @property
    def after(self) -> str:
        """What the file will say."""
        return (self.before or "") + self.lines

    @property
    def undo(self) -> str:
        """What takes it back."""
        if self.before is None:
            return f"delete {self.path}"
        return f"delete the lines with {REMARK!r} in {self.path}"

    def write(self) -> None:
        """Add the lines; OSError if the file cannot be written."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self.lines)


def plan_amendment(folder: Path, additions: Mapping[str, Mapping[str, str]]) -> Amendment:
    """How the file that counts in a folder would get some settings; a new one there if there is none.

    Settings that the file has stay as they are. UsageError, which says what to put in, if a table is there
    already, or if the file is a pyproject.toml, which is not changed here.
    """
    path = find_file(folder) or folder.resolve() / NAME
    before = path.read_text(encoding="utf-8-sig") if path.is_file() else None
    known = tomllib.loads(before or "")
    added = [
        (table, key, value)
        for table, pairs in additions.items()
        for key, value in pairs.items()
        if not _is_set(known.get(table), key)
    ]
    if path.name != NAME or any(table in known for table, _, _ in added):
        raise _refusal(path, added)
    tables = [f"[{table}]\n{_lines(rows)}" for table, rows in groupby(added, lambda each: each[0])]
    gap = "" if not before else "\n" if before.endswith("\n") else "\n\n"
    return Amendment(path, before, gap + "\n".join(tables) if tables else "", tuple(added))


def _is_set(table: object, key: str) -> bool:
    """Whether a table has a key; in options, - and _ are the same."""
    return isinstance(table, dict) and key.replace("_", "-") in {each.replace("_", "-") for each in table}


def _lines(rows: Iterable[tuple[str, str, str]]) -> str:
    return "".join(f"{_pair(key, value)}  {REMARK}\n" for _, key, value in rows)


def _pair(key: str, value: str) -> str:
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"


def _refusal(path: Path, added: Sequence[tuple[str, str, str]]) -> UsageError:
    lines = [
        f"{_pair(key, value)} below [{'.'.join((*FILES[path.name], table))}]" for table, key, value in added
    ]
    return UsageError(f"{path} has settings already, and is not edited", hint=f"put in: {'; '.join(lines)}")
