"""Words of failure that state none: a count of zero, an empty field, the name of a test. Pure.

`0 errors`, `"error": null`, `failed=0`, `2 xfailed`, `test_timeout_error PASSED` and `abort_on_error` have
the words of a failure, and deny one or only name one. They are taken out of a line before it is judged.
"""

from __future__ import annotations

import re
from typing import Final

_FAILURE: Final = r"(?:errors?|exceptions?|fail(?:ed|ures?|s)?|fatals?|aborted|killed|timeouts?)"
_END_OF_FIELD: Final = r"(?=[\s,;|)}\]]*$|[,;|)}]|\s+[-|]\s|\s{2}|\s\w+[:=])"
_DENIALS: Final = re.compile(
    rf"(?i)\b(?:no|0|zero|without(?: any)?) (?:\w{{1,20}} )?{_FAILURE}\b"
    rf"|[\"']?\b(?:\w{{0,40}}[_ ])?{_FAILURE}[\"']? {{0,2}}[:=] {{0,2}}"
    r"(?:0(?![.\dx])|null|none|nil|false|\"\"|''|\[\]|\{\})"
    rf"|\b{_FAILURE} 0(?=,|$)"
    rf"|\b{_FAILURE} (?!rank|gpu|node|worker|device|host|process)\w{{1,20}}s {{0,2}}[:=] {{0,9}}0(?=\s*$)"
    # a share of many, a value: `failed to download: 0.132`, `class_error: 99.64`
    rf"|\b[a-z]\w{{0,60}}_{_FAILURE}[\"']? ?[:=] ?-?\d{{1,9}}\.\d{{1,9}}{_END_OF_FIELD}"
    rf"|\b{_FAILURE}(?: \w{{1,20}}){{0,3}}: (?:0?\.\d{{1,9}}|(?!100%)\d{{1,3}}(?:\.\d{{1,9}})?%)"
    rf"{_END_OF_FIELD}"
    rf"|\b\d{{1,9}} xfailed|\bxfail(?:ed)?\b|\bexpected {_FAILURE}\b(?:=\d{{1,9}})?"
    # names, of which the words are a part: settings, metrics, tests, loggers
    rf"|\b[a-z]\w{{0,40}}\.{_FAILURE}\b(?!: )"
    rf"|\b[a-z0-9]{{1,40}}_(?:\w{{0,60}}_)?{_FAILURE}(?:_\w{{1,60}})?\b(?!: )"
    rf"|\b{_FAILURE}_\w{{1,60}}(?!\w|: )"
    # a shell, of what a script starts beside its job
    r"|\b(?:killed|terminated) {2,40}(?:\S{0,200}/)?(?:tensorboard|nvidia-smi|dcgmi|watch|tail|sleep)\b"
)


def without_denials(text: str) -> str:
    """A line without the words that deny a failure, or that are names only; a sign stands in their place."""
    return _DENIALS.sub("_", text)
