"""The knowledge base of `rallypoint explain` as a page of the documentation.

    python tests/tools/known_errors_page.py docs/known-errors.md

writes it; tests/explain/test_explain_knowledge.py compares the page with the knowledge base.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rallypoint.explain.events import Entry
from rallypoint.explain.knowledge import OTHER, Knowledge, fill, knowledge

_HEAD: Final = """\
# Known errors

The {count} messages that [`rallypoint explain`](guides/explain.md) knows, each with a line that shows it.
Words in capitals stand for facts from the log. This page is written from the knowledge base
(`src/rallypoint/explain/causes.toml`) by `python tests/tools/known_errors_page.py docs/known-errors.md`.
"""
ROLES: Final = {
    "cause": ("Causes", "Each of them can be the first failure of a job."),
    "ending": ("Endings", "A process was ended, for a reason outside of its log."),
    "consequence": ("Consequences", "Something else failed first, mostly in another process."),
    "wrapper": ("Wrappers", "They say that something failed, but not what."),
    "notice": ("Notices", "Mostly harmless."),
}
_ISSUE: Final = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)#(?P<number>\d+)")


def page(known: Knowledge) -> str:
    """The page, in Markdown."""
    parts = {role: [entry for entry in known.entries if entry.role == role] for role in ROLES}
    contents = [f"- [{ROLES[role][0]}](#{role}s): {len(entries)}" for role, entries in parts.items()]
    blocks = [_HEAD.format(count=len(known.entries)), "\n".join(contents) + "\n"]
    for role, entries in parts.items():
        title, meaning = ROLES[role]
        blocks.append(f"## {title}\n\n{meaning}\n")
        blocks += ["\n".join(_entry(known, entry)) + "\n" for entry in entries]
    return "\n".join(blocks)


def _entry(known: Knowledge, entry: Entry) -> Iterator[str]:
    facts = {name: name.upper() for pattern in entry.patterns for name in pattern.groupindex}
    yield f"### {_escaped(fill(entry.title, facts))}"
    yield ""
    yield from ("```text", entry.example, "```", "")
    yield f"`{entry.id}`. {_escaped(fill(entry.why, facts))}"
    yield ""
    for step in known.steps(entry, facts, OTHER):
        yield f"- {_escaped(step)}"
    yield ""
    link = r"[\g<0>](https://github.com/\g<repository>/issues/\g<number>)"
    yield f"Sources: {', '.join(_ISSUE.sub(link, source) for source in entry.sources)}."


def _escaped(text: str) -> str:
    """The text with `<` and `*` escaped for Markdown, except between backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"[<*]", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(knowledge()), encoding="utf-8")
