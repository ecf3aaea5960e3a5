"""What a caller of torch's `TCPStore` asks for, and torch's words for what can go wrong then.

Programs look for these words; ours stand behind them.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from math import ceil
from typing import Any

import torch.distributed as dist

from rallypoint.errors import ConnectError, PortInUseError, StoreTimeoutError, UsageError
from rallypoint.pytorch.store import as_torch_errors
from rallypoint.store.server.loops.backend import Choice, choose


@dataclass(frozen=True)
class StoreParameters:
    """The parameters of torch's constructor, with its names and defaults."""

    host_name: str
    port: int
    world_size: int | None = None
    is_master: bool = False
    timeout: timedelta | float = timedelta(seconds=300)
    wait_for_workers: bool = True
    multi_tenant: bool = False
    master_listen_fd: int | None = None
    use_libuv: bool | None = None

    def as_given(self) -> dict[str, Any]:
        """The parameters, without those that torch has defaults of its own for."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def as_client(self) -> StoreParameters:
        """The same store, for one that holds no server."""
        return replace(self, is_master=False, multi_tenant=False, master_listen_fd=None)

    @property
    def place(self) -> tuple[str, int]:
        return self.host_name, self.port

    @property
    def seconds(self) -> float:
        """The time-out."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)

    @property
    def workers(self) -> int:
        """How many workers a master waits for; 0 if for none. torch's own -1 means that, too."""
        return max(self.world_size or 0, 0) if self.wait_for_workers else 0

    @property
    def backend(self) -> Choice:
        """Of our server: as the caller says, else as USE_LIBUV says. torch's own True is only a default."""
        return Choice.LEGACY if self.use_libuv is False else choose()

    @property
    def is_for_job(self) -> bool:
        """Whether it means the store of the job, as the launcher's variables name it."""
        place = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
        return place == (self.host_name, str(self.port))

    @property
    def is_agents(self) -> bool:
        """Whether the port is that of the store which torchrun's agent holds for its workers.

        A worker that wants to be the master there, by hand, becomes a client: torch's own does so, if it
        cannot bind the port.
        """
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in _TRUE
        return has_agent and os.environ.get("MASTER_PORT") == str(self.port)

    @property
    def is_of_rendezvous(self) -> bool:
        """Whether torch's own rendezvous asks, for a process group or for RPC: it alone shares servers."""
        return self.multi_tenant and self.workers > 0


_TRUE = ("1", "true", "t", "yes", "y")  # as torch reads its switches


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
            words = "The server socket has failed to listen on any local network address"
            code = f"code: -{errno.EADDRINUSE}, name: EADDRINUSE, message: address already in use"
            place = f"port: {wanted.port}, useIpv6: false"
            raise dist.DistNetworkError(f"{words}. {place}, {code}. {error}") from error
        except StoreTimeoutError as error:
            if (came := _CAME.search(error.message)) is None:
                raise
            waited = f"Timed out after {ceil(wanted.seconds)} seconds waiting for clients"
            joined = f"{came[1]}/{came[2]} clients joined"
            raise dist.DistStoreError(f"{waited}. {joined}. {error}") from error


def _unreached(wanted: StoreParameters) -> str:
    milliseconds = round(1000 * wanted.seconds)
    place = f"({wanted.host_name}, {wanted.port})"
    return f"The client socket has timed out after {milliseconds}ms while trying to connect to {place}."
