"""What `--rdzv-conf` may say, with torch's names where it has them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
        conf = Conf()
        for name, value in config.items():
            apply = _SETTERS.get(name)
            if apply is not None:
                conf = apply(conf, name, str(value).strip())
            elif name not in _THEIRS:
                near = get_close_matches(name, _SETTERS, 1)
                meant = f"; did you mean {near[0]}?" if near else ""
                logger.warning(
                    "--rdzv-conf has %r, which the rallypoint backend does not know%s", name, meant
                )
        return conf


_Setter = Callable[[Conf, str, str], Conf]

# torchrun puts a time-out in for its static backend; the others are about torch's own store.
_THEIRS = ("timeout", "heartbeat_timeout", "read_timeout", "store_type")


def _seconds(field: str) -> _Setter:
    def apply(conf: Conf, name: str, text: str) -> Conf:
        value = _number(float, name, text)
        if not 0 < value < math.inf:
            raise UsageError(f"{name} in --rdzv-conf is {text!r}", hint="write a positive number of seconds")
        return replace(conf, times=replace(conf.times, **{field: value}))

    return apply


def _count(conf: Conf, name: str, text: str) -> Conf:
    return replace(conf, times=replace(conf.times, beats_missed=max(_number(int, name, text), 1)))


def _rank(conf: Conf, name: str, text: str) -> Conf:
    return replace(conf, rank=_number(int, name, text))


def _host(conf: Conf, name: str, text: str) -> Conf:
    return replace(conf, is_host=parse_switch(text, f"{name} in --rdzv-conf"))


def _relay(conf: Conf, name: str, text: str) -> Conf:
    if text not in _RELAY:
        raise UsageError(f"{name} in --rdzv-conf is {text!r}", hint="write one of auto, on, off")
    return replace(conf, relay=_RELAY[text])


def _number(kind: Callable[[str], Any], name: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{name} in --rdzv-conf is {text!r}, which is no number") from None


_RELAY = {"auto": None, "on": True, "off": False}

_SETTERS: dict[str, _Setter] = {
    "join_timeout": _seconds("join"),
    "last_call_timeout": _seconds("last_call"),
    "close_timeout": _seconds("close"),
    "keep_alive_interval": _seconds("beat"),
    "keep_alive_max_attempt": _count,
    "rank": _rank,
    "is_host": _host,
    "relay": _relay,
}
