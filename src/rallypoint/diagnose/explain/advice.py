"""Advice about an error that no entry knows: by its kind, its own words, and where it was raised. Pure.

The knowledge base knows errors; this knows kinds of errors (kinds.toml), such as a missing file, or two
dtypes in one operation. A kind is asked for the verdict alone, so it can neither raise an alarm nor hide a
cause, and its words may be as wide as they have to be.

Many messages say what to do, often behind the line by which they are known. Such sentences are repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rallypoint.diagnose.explain.knowledge import Kind, fill, kinds, stops
from rallypoint.diagnose.explain.tracebacks import Raised
from rallypoint.text import excerpt

_MOST_WORDS: Final = 2
_LONGEST: Final = 300
_MOST_SETTINGS: Final = 4
_SENTENCE: Final = re.compile(r"(?<=[.!?;])\s+|\n")
_ADVISES: Final = re.compile(
    r"(?i)^(?:please |then |or |and |instead,? |to \w[^,]{0,60}, )?(?:try|use|set|install|upgrade|downgrade"
    r"|update|increase|decrease|reduce|lower|raise|pass|specify|provide|enable|disable|add|remove|check"
    r"|make sure|ensure|consider|change|call|reinstall|rebuild|restart|free|switch|convert)\b"
    r"|\bplease\b|\byou (?:can|need|should|must|may|might|have to)\b|\binstead\b|\b(?:may|might|can) help\b"
    r"|\bhint\b|\bdid you (?:mean|call|forget)\b"
)
# The error itself may say what has to be so; that is advice only behind its first sentence.
_DEMANDS: Final = re.compile(r"(?i)\b(?:must|should|needs? to) (?:be|have|set|match)\b|\brequires?\b")
# Where to tell of it, and how to see more of it: both are said of every error.
_SAYS_LITTLE: Final = re.compile(
    r"(?i)issue|report|stack ?trace|traceback|HYDRA_FULL_ERROR|debugging|TORCH_USE_|elastic/errors"
    r"|TORCHDYNAMO_VERBOSE|TORCH_LOGS|should never happen|for more|for details|was the direct cause"
)
_SETTING: Final = re.compile(
    r"--[a-z][\w-]{2,60}|`[\w.-]{2,60}`|\b[a-z]\w{0,40}_\w{1,40}\b(?![(/.])|\b[A-Z]{2,20}_[A-Z_]{2,40}\b"
)
_PLACE: Final = "Look at {place}."
_AFTER: Final = "All that came after it may be its consequence."
_WITHIN: Final = (
    "It was raised at {place}, and no code of yours is among its frames. If no setting explains it, look for "
    "the message among the issues of `{library}`, try another version of it, and leave out options that are "
    "not needed."
)
_INTERRUPTED: Final = "KeyboardInterrupt"
_OWN: Final = "It is an ordinary error of Python code, and not one of distributed training."


@dataclass(frozen=True)
class Advice:
    """What such errors mostly mean, and what to do."""

    why: str
    do: tuple[str, ...]


def advise(text: str, raised: Raised | None = None, became: Raised | None = None) -> Advice:
    """Advice about a line that no entry knows, with its exception if it is one."""
    parts = [text] if raised is None else [f"{raised.kind}: {raised.message or raised.code}{_hung(raised)}"]
    parts += [f"{became.kind}: {became.message}"] if became is not None else []
    parts += [raised.within, raised.more, raised.library] if raised is not None else []
    parts = list(filter(None, parts)) or [""]
    kind, facts = _kind_of(parts)
    if raised is not None and raised.library:
        facts["library"] = raised.library
    own, place = _own_words("\n".join(parts), raised), _place(raised)
    steps = list(filter(None, (fill(step, facts) for step in kind.do)))
    return Advice(fill(kind.why, facts), (*own, *place, *steps) if kind.general else (*own, *steps, *place))


def advise_at(tail: Sequence[tuple[int, str]]) -> Advice:
    """Advice about a log that ends with these lines, and no error: by the last one that tells where it is."""
    *told, anything = stops()
    found = (
        kind
        for _, text in reversed(tail)
        for kind in told
        if any(each.search(text) for each in kind.patterns)
    )
    kind = next(found, anything)
    return Advice(kind.why, kind.do)


def _hung(raised: Raised) -> str:
    """Where a process stood that was interrupted."""
    return f" at {raised.stood}" if raised.name == _INTERRUPTED and raised.stood is not None else ""


def _kind_of(parts: Sequence[str]) -> tuple[Kind, dict[str, str]]:
    """The first kind that fits the error, with the facts that the words tell.

    If that one is general: what the error became, the rest of its message and the library may tell more.
    """
    found = [_fitting(said) for said in parts]
    kind, match = next((each for each in found if not each[0].general), found[0])
    return kind, {name: value for name, value in match.groupdict().items() if value}


def _fitting(said: str) -> tuple[Kind, re.Match[str]]:
    found = ((kind, pattern.search(said)) for kind in kinds() for pattern in kind.patterns)
    return next((kind, match) for kind, match in found if match is not None)


def _own_words(said: str, raised: Raised | None) -> Iterator[str]:
    """What the message itself says of a remedy, or which settings it names."""
    sentences = [
        sentence.strip()
        for number, sentence in enumerate(_SENTENCE.split(said))
        if (_ADVISES.search(sentence) or (number and _DEMANDS.search(sentence)))
        and not _SAYS_LITTLE.search(sentence)
    ]
    unique = list(dict.fromkeys(sentences))[:_MOST_WORDS]
    if unique:
        yield f"Its own words: {excerpt(' '.join(unique), _LONGEST)}"
    elif raised is not None and not raised.is_plain:
        settings = list(dict.fromkeys(each.strip("`") for each in _SETTING.findall(raised.message)))
        if settings:
            named = ", ".join(settings[:_MOST_SETTINGS])
            yield f"See what the script or its configuration says of what it names: {named}."


def _place(raised: Raised | None) -> Iterator[str]:
    if raised is None or raised.place is None or raised.is_wrapper:
        return
    if raised.name == _INTERRUPTED:
        yield f"If it was ended because it hung, it hung{_hung(raised)}, called from {raised.place}."
        return
    if raised.library and raised.place.is_of_library:
        yield _WITHIN.format(place=raised.place, library=raised.library)
        return
    yield _PLACE.format(place=raised.place)
    yield f"{_AFTER} {_OWN}" if raised.is_plain else _AFTER
