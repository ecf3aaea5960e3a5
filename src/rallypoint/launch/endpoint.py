"""Where a job meets: `HOST:PORT`, in all the forms in which people write it; or several of these."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from rallypoint.errors import UsageError
from rallypoint.store.machine.addresses import format_address

DEFAULT_PORT: Final = 29400
"""The port of an endpoint that names none; torchrun's."""

STORE_PORT: Final = 29500
"""The port of `rallypoint serve`, if it is told none."""

HOST: Final = r"[\w.-]+"
IPV6: Final = r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?"

_ENDPOINT: Final = re.compile(rf"(?:\[({IPV6})\]|({HOST}))(?::([0-9]{{1,5}}))?")

_HAS_PORT: Final = re.compile(r"(?:^[^:]*|\]):[^:]*$")


class Endpoint(NamedTuple):
    """A host, without brackets, and a port; port 0 means a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_address(self.host, self.port)


class RoundStore(NamedTuple):
    """The store of a round, as the roster names it: `HOST:PORT`, or `HOST:PORT/NAME`."""

    master: Endpoint
    """What MASTER_ADDR and MASTER_PORT say: the store itself, or a relay of it."""
    name: str = ""
    """If the store is at the endpoint, beside others: its name there."""

    def __str__(self) -> str:
        return f"{self.master}/{self.name}" if self.name else str(self.master)


class StoreView(NamedTuple):
    """Where to look at the store of a job."""

    place: Endpoint
    name: str = ""
    """Which of several stores is meant that are there."""
    shown: str = ""
    """What people look at, if it is not that place: with `rallypoint status`."""

    @property
    def address(self) -> str:
        return self.shown or str(self.place)


def parse_round_store(text: str) -> RoundStore:
    """What `str` has made of it."""
    master, _, name = text.partition("/")
    return RoundStore(parse_endpoint(master), name)


def parse_endpoint(text: str) -> Endpoint:
    """A name or an address, with or without a port: `node-a`, `10.0.0.1:29500`, `[::1]:29500`, `::1`.

    Nothing at all means a free port of this machine. UsageError for what is no endpoint.
    """
    text = text.strip()
    if not text:
        return Endpoint("localhost", 0)
    if re.fullmatch(IPV6, text) and _is_ipv6(text):
        return Endpoint(text, DEFAULT_PORT)
    match = _ENDPOINT.fullmatch(text)
    if match is None or int(match[3] or 0) > 65_535 or (match[1] and not _is_ipv6(match[1])):
        raise UsageError(
            f"{text!r} is no endpoint",
            hint="write HOST:PORT, such as node-a:29500 or [fd00::1]:29500; ports go up to 65535",
        )
    return Endpoint(match[1] or match[2], int(match[3] or DEFAULT_PORT))


class Endpoints(tuple[Endpoint, ...]):
    """Where a job meets: one endpoint, or all places at which a store may be that moves between them."""

    def __str__(self) -> str:
        return ",".join(map(str, self))


def parse_endpoints(text: str) -> Endpoints:
    """An endpoint; or several places with commas between them, as in `parse_places`.

    If none of several names a port, it is that of `rallypoint serve`. UsageError for what is neither.
    """
    if "," not in text:
        return Endpoints([parse_endpoint(text)])
    last = text.rpartition(",")[2]
    port = "" if _HAS_PORT.search(last) else f":{STORE_PORT}"
    return Endpoints(parse_places(text.rstrip() + port, "the endpoint"))


def parse_place(text: str, name: str) -> Endpoint:
    """A host and the port that it names; `name` is what the text was given for."""
    try:
        endpoint = parse_endpoint(text)
    except UsageError:
        endpoint = Endpoint("", 0)
    if not endpoint.port or not text.strip().endswith(f":{endpoint.port}"):
        raise UsageError(f"{name} is {text!r}", hint="write HOST:PORT, for example localhost:29500")
    return endpoint


def parse_store(text: str, name: str) -> Endpoints:
    """The places of a store, as `parse_endpoints` reads them; `name` is what the text was given for."""
    try:
        endpoints = parse_endpoints(text)
    except UsageError:
        endpoints = Endpoints()
    if not endpoints or not all(each.port for each in endpoints):
        raise UsageError(f"{name} is {text!r}", hint="write HOST:PORT, for example localhost:29500")
    return endpoints


def parse_places(text: str, name: str) -> list[Endpoint]:
    """Places with commas between them. One that names no port has that of the next one that does."""
    places: list[Endpoint] = []
    for each in reversed(text.split(",")):
        each = each.strip()
        if places and not _HAS_PORT.search(each):
            each = f"{each}:{places[-1].port}"
        places.append(parse_place(each, name))
    return list(dict.fromkeys(reversed(places)))


def _is_ipv6(text: str) -> bool:
    import ipaddress  # late: every command that takes an endpoint would wait for it

    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
