"""torch's `TCPStore`, patched in place so that it comes up on every build.

The constructor tries torch's own first, with the caller's arguments. Where that refuses, because torch
was built without libuv, a client is made with `use_libuv=False`, which concerns servers alone, and a
master gets our server and a client of that kind. Where torch's client does not work at all, ours takes its
place. A torch that works is left alone, unless RALLYPOINT_PATCH or RALLYPOINT_CLIENT ask for more.

Where the launcher has started a relay on this machine, a client of the job's store connects to the relay,
and goes on naming the store as its host and port. All other stores are where the caller says.

Another user of this machine may hold the port at which a client expects its store. So the user who listens
there is checked first; see `rallypoint.store.server.guard.other_users`.

Every store that comes up sends its identity, as our own client does: one request, which is harmless to
torch's own server.

The patch is in `__new__`, because only that can return an object of another type; and on the class itself,
because other modules have their own references to it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from datetime import timedelta
from enum import Enum, auto
from operator import index
from typing import Any

import torch.distributed as dist

from rallypoint.client.tcp import TCPStore
from rallypoint.errors import PortInUseError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.reports import folder_of, report_joined
from rallypoint.launch.switches import ClientChoice, Patch, client_of, patch_of
from rallypoint.pytorch import cpp_stores, groups
from rallypoint.pytorch.groups import await_name, join
from rallypoint.pytorch.parameters import StoreParameters, in_torchs_words
from rallypoint.pytorch.servers import OwnedServer, open_server, owned_at
from rallypoint.pytorch.store import PythonStore, as_flag, as_key, as_timeout, as_torch_errors
from rallypoint.store.connect.connecting import check_listeners, relay_for, relay_hint
from rallypoint.store.connect.connection import STORE_VARIABLE, who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Role, hello_key

logger = logging.getLogger("rallypoint.torch")

_TorchStore: Any = dist.TCPStore
_new: Any = _TorchStore.__new__
_init: Any = _TorchStore.__init__
_clone: Any = getattr(_TorchStore, "clone", None)
_host: Any = _TorchStore.host
_port: Any = _TorchStore.port

_TRIAL_SECONDS = 10.0


class Fault(Enum):
    """What is wrong with this torch's store."""

    NO_LIBUV = auto()
    BROKEN = auto()


# torch's messages for faults of its own. Older builds say "was build without".
_FAULTS = (
    ("without libuv", Fault.NO_LIBUV),
    ("unmatched '}' in format string", Fault.BROKEN),
    ("Unknown error", Fault.BROKEN),
)


def fault_in(error: Exception) -> Fault | None:
    """What an error of the constructor says about this torch; None if it works."""
    text = str(error)
    return next((fault for words, fault in _FAULTS if words in text), None)


def install() -> None:
    """Patch torch's `TCPStore`, and what has to know of it; a second call does nothing."""
    _TorchStore.__new__ = _patched_new
    _TorchStore.__init__ = _patched_init
    support_made_stores()


def support_made_stores() -> None:
    """Patch what the stores of `make_store` need, but not the constructor; a second call does nothing."""
    _TorchStore.host = property(lambda self: _place_of(self)[0])
    _TorchStore.port = property(lambda self: _place_of(self)[1])
    if _clone is not None:
        _TorchStore.clone = _patched_clone
    cpp_stores.install()
    groups.install()


def make_store(wanted: StoreParameters, client: ClientChoice, patch: Patch, role: Role = Role.UNKNOWN) -> Any:
    """A torch store for `wanted`: torch's own, or ours in its place, as the two switches say.

    `role` is for launchers, which are no rank.
    """
    return _make((), wanted.as_given(), client, patch, role)


def find_fault(host: str, port: int) -> Fault | None:
    """What is wrong with this torch's `TCPStore`; None if it works. There must be a store at the address.

    Found by trying it: a version number does not tell how a torch was built.
    """
    check_listeners(host, port, Deadline(_TRIAL_SECONDS))
    try:
        # A client as torch makes it by default, which is dropped again.
        _init(_new(_TorchStore), host, port, None, False, timedelta(seconds=_TRIAL_SECONDS))
    except RuntimeError as error:
        fault = fault_in(error)
        if fault is None:
            raise
        return fault
    return None


def _patched_new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if cls is not _TorchStore:  # a subclass, which initialises itself
        return _new(cls)
    store = _make(args, kwargs, client_of(), patch_of(), Role.UNKNOWN)
    if folder_of(os.environ) is not None and (wanted := StoreParameters(*args, **kwargs)).is_for_job:
        report_joined(str(Endpoint(*wanted.place)))
    return store


def _patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
    if type(self) is _TorchStore:
        return
    if (wanted := _parsed(args, kwargs)) is None:
        _init(self, *args, **kwargs)  # torch knows best what is wrong
    else:
        _come_up(self, wanted, patch_of(), Role.UNKNOWN)


def _patched_clone(self: Any) -> Any:
    twin = _clone(self)
    _say_hello(twin, Role.UNKNOWN)
    if self in _places:
        _places[twin] = _places[self]
    if cpp_stores.has_our_queues(self):
        cpp_stores.take_over_queues(twin)
    owned = owned_at(self.port)
    if owned is not None and owned.server.address == (_host.fget(self), _port.fget(self)):
        owned.add_owner(twin)  # a clone holds the server as well
    return twin


_places: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()
"""Host and port as the caller wrote them, of a store whose client connects elsewhere: to a relay, say."""
_places_behind: dict[tuple[str, int], tuple[str, int]] = {}
"""The same by host and port of the client: for a store whose Python half is a new one."""


def _place_of(store: Any) -> tuple[str, int]:
    place = (_host.fget(store), _port.fget(store))
    return _places.get(store) or _places_behind.get(place, place)


def _remember_place(store: Any, place: tuple[str, int]) -> None:
    """Let a store name this place as its own, as the caller wrote it."""
    _places[store] = _places_behind[(_host.fget(store), _port.fget(store))] = place


def _make(
    args: tuple[Any, ...], kwargs: dict[str, Any], client: ClientChoice, patch: Patch, role: Role
) -> Any:
    wanted, store = _parsed(args, kwargs), _new(_TorchStore)
    if wanted is None:
        _init(store, *args, **kwargs)  # torch knows best what is wrong
        return store
    if client is not ClientChoice.PYTHON:
        try:
            _come_up(store, wanted, patch, role)
        except RuntimeError as error:
            is_final = client is ClientChoice.TORCH or patch is Patch.NEVER
            if is_final or fault_in(error) is not Fault.BROKEN:
                raise
            logger.warning("torch's TCPStore does not work here (%s): using Rallypoint's client", error)
        else:
            return store
    return _make_python_store(wanted, role)


def _come_up(store: Any, wanted: StoreParameters, patch: Patch, role: Role) -> None:
    """Initialise a C++ store; a client of the job's store goes to the relay of this machine."""
    if patch is Patch.NEVER:
        _initialise(store, wanted, patch, role)
        return
    relay = None
    if STORE_VARIABLE in os.environ and not wanted.is_master:
        relay = relay_for(wanted.host_name, wanted.port, role)
    if relay is None:
        join(wanted, lambda: _initialise(store, wanted, patch, role))
        if not wanted.is_master:
            _places[store] = wanted.place
        return
    there = replace(wanted, host_name=relay[0], port=relay[1])
    try:
        join(there, lambda: _initialise(store, there, patch, role))
    except RuntimeError as error:
        raise type(error)(f"{error}\nhint: {relay_hint(relay, wanted.place)}") from error
    _remember_place(store, wanted.place)


def _parsed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> StoreParameters | None:
    """What a caller wants; None if torch will refuse its arguments."""
    try:
        wanted = StoreParameters(*args, **kwargs)
        size = None if wanted.world_size is None else index(wanted.world_size)
        given = replace(
            wanted,
            host_name=as_key(wanted.host_name),
            port=index(wanted.port),
            world_size=size,
            is_master=as_flag(wanted.is_master),
            timeout=as_timeout(wanted.timeout),
        )
    except TypeError:
        return None
    return given if 0 <= given.port <= 65_535 else None


def _initialise(store: Any, wanted: StoreParameters, patch: Patch, role: Role) -> None:
    """Initialise a C++ store: as torch does, or in our way."""
    with _watching_the_user(wanted):
        if patch is not Patch.ALWAYS:
            try:
                _init(store, **wanted.as_given())
            except RuntimeError as error:
                if patch is Patch.NEVER or fault_in(error) is not Fault.NO_LIBUV:
                    raise
            else:
                _say_hello(store, role)
                return
        if wanted.is_master:
            _become_master(store, wanted, role)
        else:
            _connect(store, wanted, role)


@contextmanager
def _watching_the_user(wanted: StoreParameters) -> Iterator[None]:
    """Look at the user whose server a client joins: before, and again then, as it may not have been up."""
    _check_user(wanted)
    yield
    _check_user(wanted)


def _check_user(wanted: StoreParameters) -> None:
    if not wanted.is_master:
        with as_torch_errors():
            check_listeners(wanted.host_name, wanted.port, Deadline(_TRIAL_SECONDS))


def _connect(store: Any, wanted: StoreParameters, role: Role) -> None:
    """A C++ client. Where torch refuses libuv, `use_libuv=False` skips the check: it concerns servers.

    But such a client refuses queues, too, so ours does those.
    """
    client = wanted.as_client()
    try:
        _init(store, **client.as_given())
    except RuntimeError as error:
        if fault_in(error) is not Fault.NO_LIBUV:
            raise
        _init(store, **replace(client, use_libuv=False).as_given())
        cpp_stores.take_over_queues(store)
    _say_hello(store, role)


def _say_hello(store: Any, role: Role) -> None:
    """Tell the server which process a C++ client belongs to. If that fails, the job goes on."""
    try:
        store.delete_key(hello_key(who_am_i(role)))
    except RuntimeError as error:
        logger.debug("the store was not told who its client is: %s", error)


def _become_master(store: Any, wanted: StoreParameters, role: Role) -> None:
    """A C++ client that owns a server of ours, and waits for the workers as torch's master does."""
    deadline = Deadline(wanted.seconds)
    known = owned_at(wanted.port)
    with in_torchs_words(wanted):
        await_name(wanted)
        try:
            owned = open_server(
                wanted.host_name,
                wanted.port,
                backend=wanted.backend,
                multi_tenant=wanted.multi_tenant,
                listen_fd=wanted.master_listen_fd,
            )
        except PortInUseError:
            if not wanted.is_agents:
                raise
            _warn_of_agent(wanted.port)
            _come_up(store, wanted.as_client(), Patch.ALWAYS, role)
            return
        try:
            _own(store, owned, wanted, role)
            _await_workers(owned, wanted.workers, deadline)
        except BaseException:
            if owned is not known:
                owned.end()
            raise


def _warn_of_agent(port: int) -> None:
    """A worker wants to hold the store that its agent holds."""
    logger.warning("port %d is that of the agent's store: being a client of that", port)


def _own(store: Any, owned: OwnedServer, wanted: StoreParameters, role: Role) -> None:
    """Connect a C++ client to a server of ours, of which it becomes an owner."""
    host, port = owned.server.address
    is_libuv = wanted.use_libuv is not False  # our server has queues on the standard library as well
    # The server is ready: a short time-out is meant for others.
    patience = timedelta(seconds=max(wanted.seconds, _TRIAL_SECONDS))
    there = replace(wanted, host_name=host, port=port, timeout=patience, use_libuv=is_libuv)
    _connect(store, there, role)
    store.set_timeout(timedelta(seconds=wanted.seconds))
    owned.add_owner(store)
    _remember_place(store, (wanted.host_name, port))


def _await_workers(owned: OwnedServer, workers: int, deadline: Deadline) -> None:
    if not workers:
        return
    # The time may be over already. To connect and to count takes a moment more.
    patience = max(deadline.remaining, _TRIAL_SECONDS)
    with TCPStore(*owned.server.address, timeout=patience, role=Role.TOOL) as watcher:
        watcher.await_workers(workers, deadline)


def _make_python_store(wanted: StoreParameters, role: Role) -> PythonStore:
    """Our own client, and our own server for a master, as a torch store."""
    backend = False if wanted.use_libuv is False else None  # torch's own True is only a default
    with in_torchs_words(wanted):
        await_name(wanted)
        try:
            store = join(wanted, lambda: TCPStore(*astuple(replace(wanted, use_libuv=backend)), role=role))
        except PortInUseError:
            if not (wanted.is_master and wanted.is_agents):
                raise
            _warn_of_agent(wanted.port)
            return _make_python_store(wanted.as_client(), role)
    return PythonStore(store)
