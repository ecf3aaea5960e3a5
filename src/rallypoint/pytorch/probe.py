"""What this torch's store can do, found by trying it: a version number does not tell how it was built."""

from __future__ import annotations

from datetime import timedelta

from rallypoint.pytorch.substitution import Fault, fault_in, make_own_client

_SECONDS = 10.0


def examine(host: str, port: int) -> Fault | None:
    """What is wrong with this torch's `TCPStore`; None if it works. There must be a store at the address."""
    try:
        make_own_client(host, port, timedelta(seconds=_SECONDS))
    except RuntimeError as error:
        fault = fault_in(error)
        if fault is None:
            raise
        return fault
    return None
