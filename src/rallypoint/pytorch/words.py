"""torch's words for what can go wrong when a store comes up. Programs look for them; ours stand behind."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import torch.distributed as dist

from rallypoint.errors import ConnectError, PortInUseError, StoreTimeoutError, UsageError
from rallypoint.pytorch.parameters import StoreParameters
from rallypoint.pytorch.store import as_torch_errors

_CAME = re.compile(r"(\d+) of (\d+) workers have come")


@contextmanager
def in_torchs_words(wanted: StoreParameters) -> Iterator[None]:
    """Errors of ours leave the block with the types and words of torch's constructor, ours behind them."""
    with as_torch_errors():
        try:
            yield
        except ConnectError as error:
            raise dist.DistNetworkError(f"{_unreached(wanted)} {error}") from error
        except UsageError as error:
            if wanted.is_master or wanted.port or wanted.world_size == 0:  # torch looks at the last one first
                raise
            raise dist.DistNetworkError(f"{_unreached(wanted)} {error}") from error
        except PortInUseError as error:
            raise dist.DistNetworkError(f"{_port_in_use(wanted)} {error}") from error
        except StoreTimeoutError as error:
            if (came := _CAME.search(error.message)) is None:
                raise
            raise dist.DistStoreError(f"{_missing(wanted, *came.groups())} {error}") from error


def _unreached(wanted: StoreParameters) -> str:
    milliseconds = round(1000 * wanted.seconds)
    place = f"({wanted.host_name}, {wanted.port})"
    return f"The client socket has timed out after {milliseconds}ms while trying to connect to {place}."


def _port_in_use(wanted: StoreParameters) -> str:
    return (
        f"The server socket has failed to listen on any local network address. port: {wanted.port}, useIpv6: "
        f"false, code: -{errno.EADDRINUSE}, name: EADDRINUSE, message: address already in use."
    )


def _missing(wanted: StoreParameters, came: str, expected: str) -> str:
    seconds = ceil(wanted.seconds)
    return f"Timed out after {seconds} seconds waiting for clients. {came}/{expected} clients joined."
