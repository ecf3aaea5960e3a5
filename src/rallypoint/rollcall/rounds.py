"""The rounds of jobs that meet at a store, as their launchers have written them down. Pure.

A roster is read here without `rallypoint.meeting`, which stands above: only what people want to see of it. It
came over the network, from whoever reaches the store, so its parts are checked, and bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rallypoint.rollcall.plan import Plan
from rallypoint.rollcall.roll import Meeting

_MOST_MEETINGS: Final = 64
_MOST_MACHINES: Final = 1 << 14
_MOST_TOLD: Final = 64
_MOST_CHARACTERS: Final = 500


def meetings_of(plan: Plan | None, rosters: Sequence[tuple[str, str]]) -> tuple[Meeting, ...]:
    """The round whose store this is, then those of the jobs that meet here."""
    own = []
    if plan is not None:
        hosts = tuple(each.host for each in plan.machines)
        own = [Meeting("", plan.round, len(hosts), hosts)]
    read = (_read(job, text) for job, text in rosters[:_MOST_MEETINGS])
    return (*own, *(each for each in read if each is not None))


def _read(job: str, text: str) -> Meeting | None:
    """None for what is no roster."""
    try:
        return _meeting(job, json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _meeting(job: str, content: Mapping[str, Any]) -> Meeting:
    complete = content["complete"] is True
    members = _hosts(content["members"])
    least = _number(content.get("least", -1))
    return Meeting(
        job=_text(job),
        round=_number(content["round"]),
        expected=len(members) if complete else least,
        joined=_hosts(content["present"]),
        waiting=_hosts(content["waiting"]),
        lost=_hosts(content["lost"]),
        told=tuple(map(_text, content["told"][:_MOST_TOLD])),
        closed=_text(content["closed"]),
        store=_text(content.get("store", "")),
    )


def _hosts(content: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(_text(each["host"]) for each in content[:_MOST_MACHINES])


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value[:_MOST_CHARACTERS]


def _number(value: object) -> int:
    if type(value) is not int or not -1 <= value < 1 << 31:
        raise TypeError(f"{value!r} is no number that could be meant")
    return value
