"""Our errors as torch's: code written for torch's stores catches its types and may read its words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from rallypoint.errors import (
    BindError,
    ConnectError,
    ConnectionLostError,
    PortInUseError,
    QueueEmptyError,
    RallypointError,
)

_NETWORK = (BindError, ConnectError, ConnectionLostError, PortInUseError)


def _type_for(error: RallypointError) -> Any:
    if isinstance(error, _NETWORK):
        return dist.DistNetworkError
    if isinstance(error, QueueEmptyError):
        return getattr(dist, "DistQueueEmptyError", dist.DistStoreError)
    return dist.DistStoreError


@contextmanager
def as_torch_errors() -> Iterator[None]:
    """Errors of ours leave the block as those that torch's own store would have raised, with our message."""
    try:
        yield
    except RallypointError as error:
        # Callers look for these words, to try another port.
        prefix = "EADDRINUSE, address already in use: " if isinstance(error, PortInUseError) else ""
        raise _type_for(error)(f"{prefix}{error}") from error
