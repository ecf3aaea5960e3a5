"""CMakeCache.txt: what a build tree was configured with. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_ENTRY: Final = re.compile(
    r'^(?:"(?P<quoted>[^"\n]+)"|(?P<name>[^:=#/"\s][^:=\n]*)):(?P<type>[A-Z]+)=(?P<value>.*)$', re.MULTILINE
)
_TRUE: Final = {"1", "on", "yes", "true", "y"}


@dataclass(frozen=True)
class Entry:
    """A variable of the cache."""

    type: str
    value: str

    @property
    def on(self) -> bool:
        """What `if(VARIABLE)` makes of it."""
        number = re.fullmatch(r"-?[0-9]+", self.value) is not None and int(self.value) != 0
        return self.value.lower() in _TRUE or number

    @property
    def found(self) -> bool:
        """Whether a search has found something: an empty value or one that ends in NOTFOUND has not."""
        return bool(self.value) and not self.value.endswith("NOTFOUND")


def parse_cache(text: str) -> dict[str, Entry]:
    """All variables; lines that are none are passed over."""
    matches = _ENTRY.finditer(text)
    return {match["quoted"] or match["name"]: Entry(match["type"], match["value"]) for match in matches}
