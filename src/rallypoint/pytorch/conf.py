"""What torchrun's `--rdzv-conf` may say to the backend `rallypoint`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from rallypoint.errors import UsageError
from rallypoint.launch.options import BY_NAME, parse_ports, parse_seconds
from rallypoint.launch.rendezvous.meeting import MeetingTimes
from rallypoint.launch.rendezvous.roster import Settings, Size
from rallypoint.store.relay.store_with_workers import parse_workers
from rallypoint.store.server.loops.backend import parse_switch
from rallypoint.store.server.process.binding import ANY_PORT

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
    workers: int | None = None
    """How many processes the job's store has besides its first one; None: as many as it needs."""
    ports: range = ANY_PORT
    """Which ports it may open to other machines, besides the endpoint's."""
    spares: int = 0
    """How many machines more than a round takes are to wait for the place of one that is lost."""
    health: str = "auto"
    max_restarts: str = ""
    """For comparison with other machines: torch counts the restarts. Empty: not known."""

    def shared(self, size: Size, *, has_relays: bool) -> Settings:
        """The settings that all machines of the job must have alike."""
        restarts = (("--max-restarts", self.max_restarts),) if self.max_restarts else ()
        relay = "on" if has_relays else "off"
        return (("--nnodes", str(size)), ("--spares", str(self.spares)), ("--relay", relay), *restarts)

    @property
    def examination(self) -> str:
        """What a machine examines of itself before it takes part."""
        return self.health if self.health != "auto" else "quick" if self.spares else "off"

    @staticmethod
    def parse(config: Mapping[str, Any]) -> Conf:
        """The pairs of `--rdzv-conf`. UsageError for a value that cannot be; an unknown name is a warning."""
        found: dict[str, Any] = {}
        for name, value in config.items():
            if name in _SETTINGS:
                key, parse, hint = _SETTINGS[name]
                text = str(value).strip()
                try:
                    found[key] = parse(text)
                except (ValueError, KeyError):
                    raise UsageError(f"{name} in --rdzv-conf is {text!r}", hint=hint) from None
            elif name not in _THEIRS:
                near = get_close_matches(name, _SETTINGS, 1)
                meant = f"; did you mean {near[0]}?" if near else ""
                logger.warning(
                    "--rdzv-conf has %r, which the rallypoint backend does not know%s", name, meant
                )
        times = {each.name: found.pop(each.name) for each in fields(MeetingTimes) if each.name in found}
        return Conf(MeetingTimes(**times), **found)


# torchrun puts a time-out in for its static backend; the others are about torch's own store.
_THEIRS = ("timeout", "heartbeat_timeout", "read_timeout", "store_type")

_SECONDS = (parse_seconds, "write a positive number of seconds")
_NUMBER = "write a number"

_SETTINGS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "join_timeout": ("join", *_SECONDS),
    "last_call_timeout": ("last_call", *_SECONDS),
    "close_timeout": ("close", *_SECONDS),
    "keep_alive_interval": ("beat", *_SECONDS),
    "keep_alive_max_attempt": ("beats_missed", lambda text: max(int(text), 1), _NUMBER),
    "rank": ("rank", int, _NUMBER),
    "is_host": ("is_host", lambda text: parse_switch(text, "it"), "write one of 0, 1, true, false, on, off"),
    "workers": (
        "workers",
        lambda text: parse_workers(text, "it"),
        "write a number to 64, or auto; 0 on Windows",
    ),
    "port_range": ("ports", parse_ports, "write FIRST-LAST, such as 29600-29699"),
    "spares": ("spares", lambda text: max(int(text), 0), _NUMBER),
    "health": ("health", BY_NAME["health"].parse, f"write {BY_NAME['health'].metavar}"),
    "max_restarts": ("max_restarts", lambda text: str(int(text)), _NUMBER),
    "relay": ("relay", {"auto": None, "on": True, "off": False}.__getitem__, "write one of auto, on, off"),
}
"""The field of `Conf` or of its times, what reads it, and what to write."""
