"""What `--rdzv-conf` may say, with torch's names where it has them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from rallypoint.errors import UsageError
from rallypoint.launch.rendezvous.meeting import MeetingTimes
from rallypoint.server.loops.backend import parse_switch

logger = logging.getLogger("rallypoint.torchrun")


@dataclass(frozen=True)
class Conf:
    """The settings of one agent's rendezvous."""

    times: MeetingTimes = field(default_factory=MeetingTimes)
    rank: int = -1
    """The machine's rank, if it asks for one."""
    is_host: bool | None = None
    """Whether this machine holds the meeting place; None: if the endpoint names it."""
    relay: bool | None = None
    """Whether this machine's workers share a relay; None: if there are other machines."""

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Conf:
        """The pairs of `--rdzv-conf`. UsageError for a value that cannot be; an unknown name is a warning."""
        said: dict[str, Any] = {}
        times: dict[str, Any] = {}
        for name, value in config.items():
            if name in _TIMES:
                key, parse = _TIMES[name]
                times[key] = parse(name, str(value).strip())
            elif name in _OTHERS:
                said[name] = _OTHERS[name](name, str(value).strip())
            elif name not in _THEIRS:
                near = get_close_matches(name, [*_TIMES, *_OTHERS], 1)
                meant = f"; did you mean {near[0]}?" if near else ""
                logger.warning(
                    "--rdzv-conf has %r, which the rallypoint backend does not know%s", name, meant
                )
        return Conf(MeetingTimes(**times), **said)


def _seconds(name: str, text: str) -> float:
    value = _number(float, name, text)
    if not 0 < value < math.inf:
        raise UsageError(f"{name} in --rdzv-conf is {text!r}", hint="write a positive number of seconds")
    return float(value)


def _count(name: str, text: str) -> int:
    return max(_rank(name, text), 1)


def _rank(name: str, text: str) -> int:
    return int(_number(int, name, text))


def _host(name: str, text: str) -> bool:
    return parse_switch(text, f"{name} in --rdzv-conf")


def _relay(name: str, text: str) -> bool | None:
    known = {"auto": None, "on": True, "off": False}
    if text not in known:
        raise UsageError(f"{name} in --rdzv-conf is {text!r}", hint="write one of auto, on, off")
    return known[text]


def _number(kind: Callable[[str], float], name: str, text: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{name} in --rdzv-conf is {text!r}, which is no number") from None


_Parse = Callable[[str, str], Any]

_TIMES: dict[str, tuple[str, _Parse]] = {
    "join_timeout": ("join", _seconds),
    "last_call_timeout": ("last_call", _seconds),
    "close_timeout": ("close", _seconds),
    "keep_alive_interval": ("beat", _seconds),
    "keep_alive_max_attempt": ("beats_missed", _count),
}
_OTHERS: dict[str, _Parse] = {"rank": _rank, "is_host": _host, "relay": _relay}

# torchrun puts a time-out in for its static backend; the others are about torch's own store.
_THEIRS = ("timeout", "heartbeat_timeout", "read_timeout", "store_type")
