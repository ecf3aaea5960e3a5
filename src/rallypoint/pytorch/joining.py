"""Joining a store at an address where another one may be about to end.

A process group can be destroyed and made again on the same port, and each rank does so at its own pace. A
quick one finds the store of the old group, with its keys, which rank 0 will end in a moment. So a rank that
has been in a group of that address waits until the store there ends; or until rank 0 joins it anew, as it
does if something else holds that store. The stores are told apart by how many workers they count, so this
goes for a group of the same size alone. A connection that ends while a store comes up is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from rallypoint.client.tcp import TCPStore
from rallypoint.errors import ConnectError, ConnectionLostError, RallypointError
from rallypoint.pytorch.parameters import StoreParameters
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.server.process.binding import resolves

T = TypeVar("T")

_LOOK_SECONDS = 0.02
_PAUSE_SECONDS = 0.05
_NAME_SECONDS = 0.2

# torch's words for a connection that the other side has ended.
_CUT = ("got 0 bytes", "reset by peer", "Broken pipe", "forcibly closed", "was aborted")

_joined: dict[tuple[tuple[str, int], int], int] = {}
"""By address and size of a group: how many workers the store counts, once the groups joined are complete."""


def join(wanted: StoreParameters, attempt: Callable[[], T]) -> T:
    """What `attempt` makes: a store that is connected, and counted in as a worker."""
    deadline = Deadline(wanted.seconds)
    is_worker = wanted.is_of_rendezvous and not wanted.is_master
    while True:
        if is_worker:
            _await_successor(wanted, deadline)
        try:
            made = attempt()
        except (dist.DistNetworkError, ConnectionLostError) as error:
            if not _is_cut(error) or deadline.passed:
                raise
            time.sleep(min(_PAUSE_SECONDS, deadline.remaining))
        else:
            if is_worker:
                group = (wanted.place, wanted.workers)
                _joined[group] = _joined.get(group, 0) + wanted.workers
            return made


def await_name(wanted: StoreParameters) -> None:
    """A master, too, waits until its host name is known, as torch's does; ConnectError if it never is."""
    deadline = Deadline(wanted.seconds)
    while wanted.is_master and not resolves(wanted.host_name):
        if deadline.passed:
            raise ConnectError(
                f"the host name {wanted.host_name!r} is not known here",
                hint="use an IP address, or add it to the hosts file",
            )
        time.sleep(min(_NAME_SECONDS, deadline.remaining))


def _is_cut(error: RuntimeError) -> bool:
    is_ours = isinstance(error, ConnectionLostError) or isinstance(error.__cause__, ConnectionLostError)
    return is_ours or any(words in str(error) for words in _CUT)


def _await_successor(wanted: StoreParameters, deadline: Deadline) -> None:
    """If this process has left a group at that address, wait for the end of its store."""
    group = (wanted.place, wanted.workers)
    joined = _joined.get(group)
    if joined is None or dist.is_initialized():
        return
    while not deadline.passed:
        try:
            with TCPStore(*wanted.place, timeout=deadline.remaining, role=Role.TOOL) as store:
                while (count := store.count_workers()) == joined and not deadline.passed:
                    time.sleep(_LOOK_SECONDS)
        except ConnectionLostError:
            continue
        except RallypointError:
            return  # who connects next says it in torch's words
        if count < joined:
            del _joined[group]  # it is another store
        return
