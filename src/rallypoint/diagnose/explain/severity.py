"""How serious a line is, by its own account. Pure.

Healthy jobs warn of what fails for a while: a name that is not known yet, a port that is tried before its
server listens. The words are those of a failure; what tells the two apart is the logger's level, or what the
line says has been done about it. NCCL's WARN is not a warning: it is how NCCL says that something failed.
"""

from __future__ import annotations

import re
from typing import Final

MILD: Final = "mild"
SERIOUS: Final = "serious"

_MILD_LEVELS: Final = ("D", "V", "I", "W", "DEBUG", "INFO", "NOTICE", "WARN", "WARNING")
# Python's warnings, pip's and Hugging Face's loggers, NCCL's.
_MILD: Final = re.compile(
    r"(?:\S+:\d+: )?(?:\w*Warning|warning): "
    r"|\[?(?:DEBUG|INFO|NOTICE|WARN|WARNING)\b[\]:| ]"
    r"|(?:\S+ )?NCCL (?:INFO|TRACE)\b"
)
_SERIOUS: Final = re.compile(r"\[?(?:ERROR|CRITICAL|FATAL)\b[\]:| ]")
# Whatever its level, it has been dealt with.
_HANDLED: Final = re.compile(
    r"(?i)\b(?:retrying|will retry|ignor(?:ed|ing)|falling back|fall back to|skipping"
    r"|trying (?:again|another|the next|port \d))\b"
)


def severity_of(level: str, text: str) -> str:
    """mild, serious or, where neither the level nor the text tells, nothing."""
    if _HANDLED.search(text) or _MILD.match(text):
        return MILD
    if _SERIOUS.match(text):
        return SERIOUS
    if not level:
        return ""
    return MILD if level in _MILD_LEVELS else SERIOUS
