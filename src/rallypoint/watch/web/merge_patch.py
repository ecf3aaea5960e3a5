"""How one picture becomes the next: by a JSON merge patch (RFC 7396).

A picture is an object of JSON, with objects, lists and scalars in it, and without null: in a patch, null
stands for what is not there any more. Objects are patched name by name, all else is replaced.

Pure.
"""

from __future__ import annotations

from typing import Any, Final

Json = dict[str, Any]

SINCE: Final = "since"
"""The name of all moments in a picture."""

_SAME_SECONDS: Final = 1.0


def settle(before: Json, after: Json) -> Json:
    """A picture whose moments are those of the one before, where they differ by less than a second.

    A store tells how long something has been so, and answers a little sooner or later each time: without
    this, all moments would change by some milliseconds in every picture.
    """
    settled: Json = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            settled[name] = settle(old, value)
        elif name == SINCE and isinstance(old, float) and abs(value - old) < _SAME_SECONDS:
            settled[name] = old
        else:
            settled[name] = value
    return settled


def difference(before: Json, after: Json) -> Json:
    """The patch that makes one picture of another."""
    patch: Json = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := difference(old, value):
                patch[name] = inner
        elif name not in before or value != old or type(value) is not type(old):
            patch[name] = value
    return patch
