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


def to_torch(error: RallypointError) -> Exception:
    """The exception that torch's own store would have raised, with our message in it."""
    # Callers look for these words, to try another port.
    prefix = "EADDRINUSE, address already in use: " if isinstance(error, PortInUseError) else ""
    translated: Exception = _type_for(error)(f"{prefix}{error}")
    return translated


def _type_for(error: RallypointError) -> Any:
    if isinstance(error, _NETWORK):
        return dist.DistNetworkError
    if isinstance(error, QueueEmptyError):
        return getattr(dist, "DistQueueEmptyError", dist.DistStoreError)
    return dist.DistStoreError


@contextmanager
def as_torch_errors() -> Iterator[None]:
    """Errors of ours leave the block as torch's."""
    try:
        yield
    except RallypointError as error:
        raise to_torch(error) from error
