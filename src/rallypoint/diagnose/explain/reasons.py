"""What a program could not have, and why: said in passing, and felt later, when it is needed. Pure.

`Could not import X: no module Y`, says a warning, and an exception some lines below that X is required. The
exception names what is missing, the warning why.
"""

from __future__ import annotations

import re
from typing import Final

MARKS: Final = (
    *("ould not import", "ould not load", "ailed to import", "ailed to load", "nable to import"),
    *("nable to load", "annot import", "annot load", "failed, because", "failed because"),
)
"""Every line that matters here has one of these."""
_REASON: Final = re.compile(
    r"(?i)(?:could not|failed to|unable to|cannot) (?:import|load) (?P<what>[^:]{3,80}): \S"
    r"|(?P<tried>\w[\w -]{2,40}) failed,? because \S"
)
_DOES_WITHOUT: Final = re.compile(
    r"(?i)\b(?:us(?:e|es|ing)|skip\w*|fall\w*|default\w*|download\w*|scratch|instead|ignor\w*|without|continu\w*"
    r"|retry\w*|again|disabl\w*)\b"
)
"""What a program says that goes on with something else: then it is not missed."""
_NEEDS: Final = re.compile(
    r"(?i)\b(?:requir\w*|need\w*|unavailable|missing|no \w+ (?:is|are))\b"
    r"|\bnot (?:available|installed|enabled|found|import\w*)\b"
)
_WORD: Final = re.compile(r"[a-z]{4,}")


def missed(text: str) -> frozenset[str]:
    """The words for what could not be had, if a line says so, and why."""
    found = _REASON.search(text)
    if found is None or _DOES_WITHOUT.search(text):
        return frozenset()
    return _words_of(found["what"] or found["tried"])


def is_missed(words: frozenset[str], message: str) -> bool:
    """Whether a message says that what these words name is needed, or not there."""
    return bool(words) and words <= _words_of(message) and _NEEDS.search(message) is not None


def _words_of(text: str) -> frozenset[str]:
    return frozenset(word.removesuffix("s") for word in _WORD.findall(text.lower()))
