"""Addresses as the command line takes them."""

from __future__ import annotations

from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import Endpoint, parse_endpoint


def parse_place(text: str, name: str) -> Endpoint:
    """A host and the port that it names; `name` is what the text was given for."""
    try:
        endpoint = parse_endpoint(text)
    except UsageError:
        endpoint = Endpoint("", 0)
    if not endpoint.port or not text.strip().endswith(f":{endpoint.port}"):
        raise UsageError(f"{name} is {text!r}", hint="write HOST:PORT, for example localhost:29500")
    return endpoint
