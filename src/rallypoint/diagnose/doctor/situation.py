"""The options and variables that the user has given: every check may use them, besides the machine itself."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rallypoint.launch.endpoint import HOST, IPV6, Endpoint
from rallypoint.store.machine.addresses import is_loopback

MASTER_PORT: Final = 29_500
"""The port that most launchers take by default."""

EVERYWHERE: Final = ("0.0.0.0", "::")
"""Addresses that mean all addresses of a machine; as a goal they lead a machine to itself."""

MOST_RANKS: Final = 10_000_000
_NUMBER: Final = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class Situation:
    """The job that is to run here, as far as the user has told."""

    environ: Mapping[str, str]
    endpoint: Endpoint | None
    """Where the job is to meet: by option, or by MASTER_ADDR and MASTER_PORT; None if neither is given."""
    folder: Path
    """The folder for the file of a file init."""
    engine: str = field(default="", repr=False)
    """The URL of the engine that is to keep the store; it may hold a password."""
    acks: int = 0
    """How many replicas of Redis are to have a change before it counts."""

    @property
    def world_size(self) -> int | None:
        """How many ranks there will be; None if WORLD_SIZE gives no sensible number."""
        number = number_in(self.environ, "WORLD_SIZE")
        return number if number is not None and 0 < number <= MOST_RANKS else None

    @property
    def machines(self) -> int:
        """How many machines the variables speak of; at least two if the endpoint is another machine."""
        count = number_in(self.environ, "GROUP_WORLD_SIZE")
        whole, local = number_in(self.environ, "WORLD_SIZE"), number_in(self.environ, "LOCAL_WORLD_SIZE")
        if count is None and whole and local:
            count = whole // local
        host = self.endpoint.host if self.endpoint else "localhost"
        elsewhere = not is_loopback(host) and host not in EVERYWHERE
        return max(count or 1, 2 if elsewhere else 1)


def number_in(environ: Mapping[str, str], name: str) -> int | None:
    """The whole number in a variable; None if it is not set, or holds something else."""
    text = environ.get(name, "").strip()
    return int(text) if _NUMBER.fullmatch(text) else None


def leads_elsewhere(address: str) -> bool:
    """Whether an address can be another machine's: it is neither loopback nor link-local, nor for many."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    return not (found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified)


def endpoint_of(environ: Mapping[str, str]) -> Endpoint | None:
    """The endpoint in MASTER_ADDR and MASTER_PORT; None if they are not set, or make no sense."""
    host = environ.get("MASTER_ADDR", "").strip()
    port = number_in(environ, "MASTER_PORT") if "MASTER_PORT" in environ else MASTER_PORT
    if not re.fullmatch(rf"{HOST}|{IPV6}|\[{IPV6}\]", host) or port is None or not 0 < port < 65_536:
        return None
    return Endpoint(host.strip("[]"), port)
