"""The known causes of `rallypoint explain` as a page of the documentation.

    python tests/known_errors_page.py docs/known-errors.md

writes it; tests/test_explain_knowledge.py compares the page with the knowledge base.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rallypoint.diagnose.explain.explanation import MEANINGS
from rallypoint.diagnose.explain.knowledge import Cause, causes, fill

_HEAD: Final = """\
# Known errors

What [`rallypoint explain`](guides/explain.md) knows: {count} causes, by the part in which they show, each
with a line by which it is known. Words in capitals stand for what a log tells. This page is written from
the knowledge base (`src/rallypoint/diagnose/explain/causes.toml`) by
`python tests/known_errors_page.py docs/known-errors.md`.
"""
PARTS: Final = {
    "store": "The store",
    "rendezvous": "The rendezvous",
    "launcher": "The launcher",
    "names": "Names and addresses",
    "network": "The network",
    "gloo": "Gloo",
    "nccl": "NCCL",
    "memory": "Memory",
    "process": "Processes",
    "build": "The build of torch",
    "file": "Files",
    "script": "The script",
}
_ROLES: Final = {
    "symptom": "A consequence: something else happened first.",
    "wrapper": "A wrapper: it says that something failed, and not what.",
    "notice": "Mostly harmless.",
}
_ISSUE: Final = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)#(?P<number>\d+)")


def page(entries: Sequence[Cause]) -> str:
    """The page, in Markdown."""
    of_parts = {part: [cause for cause in entries if cause.part == part] for part in PARTS}
    contents = [
        f"- [{title}](#{title.lower().replace(' ', '-')}): {len(of_parts[part])}"
        for part, title in PARTS.items()
    ]
    blocks = [_HEAD.format(count=len(entries)), "\n".join(contents) + "\n"]
    for part, title in PARTS.items():
        blocks.append(f"## {title}\n")
        blocks += ["\n".join(_entry(cause)) + "\n" for cause in of_parts[part]]
    return "\n".join(blocks)


def _entry(cause: Cause) -> Iterator[str]:
    yield f"### {_escaped(cause.title)}"
    yield ""
    yield from ("```text", cause.example, "```", "")
    yield f"`{cause.id}`. {_text(cause.what, cause)} {_text(cause.why, cause)}"
    yield ""
    for text in cause.do:
        yield f"- {_text(text, cause)}"
    yield ""
    remarks = [
        _ROLES.get(cause.role, ""),
        f"{MEANINGS[cause.sure].capitalize()}.",
        _applies(cause),
        _sources(cause),
    ]
    yield " ".join(remark for remark in remarks if remark)


def _applies(cause: Cause) -> str:
    where = [
        *([f"torch {cause.versions.replace(',', ', ')}"] if cause.versions else []),
        *([" and ".join(cause.platforms)] if cause.platforms else []),
    ]
    return _escaped(f"Applies to {', '.join(where)}.") if where else ""


def _sources(cause: Cause) -> str:
    link = r"[\g<0>](https://github.com/\g<repository>/issues/\g<number>)"
    return f"Sources: {', '.join(_ISSUE.sub(link, source) for source in cause.sources)}."


def _text(text: str, cause: Cause) -> str:
    names = {name for pattern in cause.patterns for name in pattern.groupindex}
    return _escaped(fill(text, {name: name.upper() for name in names}))


def _escaped(text: str) -> str:
    """The text with `<` and `*` escaped for Markdown, except between backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"[<*]", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(causes()), encoding="utf-8")
