"""torch's `TCPStore`, patched in place so that it comes up on every build.

The constructor tries torch's own first, with the caller's own arguments. Where that refuses, because torch
was built without libuv, a client is made with `use_libuv=False`, which concerns servers alone, and a
master gets our server and a client of that kind. Where torch's client does not work at all, ours takes its
place. A torch that works is left alone, unless RALLYPOINT_PATCH or RALLYPOINT_CLIENT ask for more.

Where the launcher has started a relay on this machine, a client of the job's store connects to the relay,
and goes on naming the store as its host and port. All other stores are where the caller says.

Another user of this machine may hold the port at which a client looks for its store. So the user who listens
there is looked at first; see `rallypoint.server.guard.other_users`.

Every store that comes up sends its identity, as our own client does: one request, which is harmless to
torch's own server.

The patch is in `__new__`, because only that can return an object of another type; and on the class itself,
because other modules have their own references to it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from datetime import timedelta
from enum import Enum, auto
from typing import Any

import torch.distributed as dist

from rallypoint.errors import StoreTimeoutError
from rallypoint.launch.reports import folder_of, report_joined
from rallypoint.launch.switches import ClientChoice, Patch, client_of, patch_of
from rallypoint.pytorch.servers import OwnedServer, open_server, owned_at
from rallypoint.pytorch.store import PythonStore, as_torch_errors
from rallypoint.rollcall.identity import Role, hello_key
from rallypoint.server.loops.backend import Choice, choose
from rallypoint.stores.client.connecting import check_listeners
from rallypoint.stores.client.connection import STORE_VARIABLE
from rallypoint.stores.client.deadline import Deadline
from rallypoint.stores.client.hello import who_am_i
from rallypoint.stores.client.relayed import relay_for, relay_hint
from rallypoint.stores.tcp import TCPStore

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

    @property
    def seconds(self) -> float:
        """The time-out."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)

    @property
    def backend(self) -> Choice:
        """Of our server: as the caller says, else as USE_LIBUV says. torch's own True is only a default."""
        return Choice.LEGACY if self.use_libuv is False else choose()

    @property
    def is_for_job(self) -> bool:
        """Whether it means the store of the job, as the launcher's variables name it."""
        place = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
        return place == (self.host_name, str(self.port))


def install() -> None:
    """Patch torch's `TCPStore`; a second call does nothing. Nothing in torch is touched otherwise."""
    if _TorchStore.__init__ is not _patched_init:
        _TorchStore.__new__ = _patched_new
        _TorchStore.__init__ = _patched_init
        _TorchStore.host = property(lambda self: _place_of(self)[0])
        _TorchStore.port = property(lambda self: _place_of(self)[1])
        if _clone is not None:
            _TorchStore.clone = _patched_clone


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
    if folder_of(os.environ) is not None and StoreParameters(*args, **kwargs).is_for_job:
        report_joined()
    return store


def _patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
    if type(self) is not _TorchStore:
        _come_up(self, args, kwargs, patch_of(), Role.UNKNOWN)


def _patched_clone(self: Any) -> Any:
    twin = _clone(self)
    _say_hello(twin, Role.UNKNOWN)
    owned = owned_at(self.port)
    if owned is not None:
        twin.delete_key(owned.owner_key)  # a clone holds the server as well; other servers lack this key
    return twin


def _place_of(store: Any) -> tuple[str, int]:
    place = (_host.fget(store), _port.fget(store))
    return _stores_of_relays.get(place, place)


def _make(
    args: tuple[Any, ...], kwargs: dict[str, Any], client: ClientChoice, patch: Patch, role: Role
) -> Any:
    if client is not ClientChoice.PYTHON:
        store = _new(_TorchStore)
        try:
            _come_up(store, args, kwargs, patch, role)
        except RuntimeError as error:
            if client is ClientChoice.TORCH or patch is Patch.NEVER or fault_in(error) is not Fault.BROKEN:
                raise
            logger.warning("torch's TCPStore does not work here (%s): using Rallypoint's client", error)
        else:
            return store
    return _make_python_store(StoreParameters(*args, **kwargs), role)


_stores_of_relays: dict[tuple[str, int], tuple[str, int]] = {}
"""The store behind each relay that this process has gone to."""


def _come_up(store: Any, args: tuple[Any, ...], kwargs: dict[str, Any], patch: Patch, role: Role) -> None:
    """Initialise a C++ store; a client of the job's store goes to the relay of this machine."""
    wanted = StoreParameters(*args, **kwargs) if STORE_VARIABLE in os.environ else None
    if wanted is None or wanted.is_master or patch is Patch.NEVER:
        relay = None
    else:
        relay = relay_for(wanted.host_name, wanted.port, role)
    if wanted is None or relay is None:
        _initialise(store, args, kwargs, patch, role)
        return
    place = _stores_of_relays[relay] = (wanted.host_name, wanted.port)
    there = replace(wanted, host_name=relay[0], port=relay[1])
    try:
        _initialise(store, (), there.as_given(), patch, role)
    except RuntimeError as error:
        raise type(error)(f"{error}\nhint: {relay_hint(relay, place)}") from error


def _initialise(store: Any, args: tuple[Any, ...], kwargs: dict[str, Any], patch: Patch, role: Role) -> None:
    """Initialise a C++ store: as torch does, or in our way."""
    with _watching_the_user(args, kwargs):
        if patch is not Patch.ALWAYS:
            try:
                _init(store, *args, **kwargs)
            except RuntimeError as error:
                if patch is Patch.NEVER or fault_in(error) is not Fault.NO_LIBUV:
                    raise
            else:
                _say_hello(store, role)
                return
        wanted = StoreParameters(*args, **kwargs)
        if wanted.is_master:
            _become_master(store, wanted, role)
        else:
            _connect(store, wanted, role)


@contextmanager
def _watching_the_user(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Look at the user whose server a client joins: before, and again then, as it may not have been up."""
    try:
        wanted = StoreParameters(*args, **kwargs)
    except TypeError:  # torch says better what is wrong
        yield
        return
    _check_user(wanted)
    yield
    _check_user(wanted)


def _check_user(wanted: StoreParameters) -> None:
    is_place = isinstance(wanted.host_name, str) and isinstance(wanted.port, int)  # else torch will say so
    if is_place and not wanted.is_master:
        with as_torch_errors():
            check_listeners(wanted.host_name, wanted.port, Deadline(_TRIAL_SECONDS))


def _connect(store: Any, wanted: StoreParameters, role: Role) -> None:
    """A C++ client. `use_libuv=False` concerns servers alone, and skips the check that would refuse."""
    client = replace(wanted, is_master=False, multi_tenant=False, master_listen_fd=None, use_libuv=False)
    _init(store, **client.as_given())
    _say_hello(store, role)


def _say_hello(store: Any, role: Role) -> None:
    """Tell the server which process a C++ client belongs to. If that fails, the job goes on."""
    try:
        store.delete_key(hello_key(who_am_i(role)))
    except RuntimeError as error:
        logger.debug("the store was not told who its client is: %s", error)


def _become_master(store: Any, wanted: StoreParameters, role: Role) -> None:
    """A C++ client that owns a server of ours, and waits for the workers as torch's master does."""
    began = time.monotonic()
    with as_torch_errors():
        owned = open_server(
            wanted.host_name,
            wanted.port,
            backend=wanted.backend,
            multi_tenant=wanted.multi_tenant,
            listen_fd=wanted.master_listen_fd,
        )
        host, port = owned.server.address
        _connect(store, replace(wanted, host_name=host, port=port), role)
        owned.take(store)
        if wanted.world_size is not None and wanted.world_size > 0 and wanted.wait_for_workers:
            _await_workers(owned, wanted, began)


def _await_workers(owned: OwnedServer, wanted: StoreParameters, began: float) -> None:
    seconds = max(wanted.seconds - (time.monotonic() - began), 0.001)
    try:
        # The time may be over already. To connect and to count takes a moment more.
        with TCPStore(*owned.server.address, timeout=max(seconds, _TRIAL_SECONDS), role=Role.TOOL) as watcher:
            watcher.await_workers(wanted.world_size or 1, Deadline(seconds))
    except StoreTimeoutError as error:
        # torch's words, which log readers know, then ours.
        raise StoreTimeoutError(
            f"Timed out after {wanted.seconds:g} seconds waiting for clients. {error.message}",
            hint=error.hint,
            missing=error.missing,
        ) from error


_python_masters: dict[int, PythonStore] = {}


def _make_python_store(wanted: StoreParameters, role: Role) -> PythonStore:
    """Our own client, and our own server for a master, as a torch store."""
    if wanted.is_master:
        _forget_destroyed(wanted)
    backend = False if wanted.use_libuv is False else None  # torch's own True is only a default
    with as_torch_errors():
        store = TCPStore(*astuple(replace(wanted, use_libuv=backend)), role=role)
    wrapped = PythonStore(store)
    if wanted.is_master:
        _python_masters[store.port] = wrapped
    return wrapped


def _forget_destroyed(wanted: StoreParameters) -> None:
    """End the server of a process group that has been destroyed; torch's own would have ended with it."""
    master = _python_masters.get(wanted.port)
    if master is not None and master.served_a_group and wanted.multi_tenant and not dist.is_initialized():
        _python_masters.pop(wanted.port).close()
