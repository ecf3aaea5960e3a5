"""Which clients go to the relay of their machine: those of the store that the relay is for, and no others.

Nothing listens at the address of that store, so a client that reaches a store has gone to the relay. What a
relay does is tested elsewhere: here, a server is in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

import rallypoint
from jobs import end_torch_stores, free_port, patch_torch
from rallypoint.client.tcp import TCPStore
from rallypoint.launch.config import settle
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.environment import INJECTION, name_relay, without_rank
from rallypoint.pytorch.plugin import create_handler
from rallypoint.pytorch.schemes import meet_at_server
from rallypoint.store.connect.connection import RELAY_VARIABLE, STORE_VARIABLE
from rallypoint.store.rollcall.identity import Role

_HOST = "127.0.0.1"
_LONG = timedelta(seconds=20)
_SHORT = timedelta(seconds=0.3)


class _Mine(dist.TCPStore):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.fixture(scope="module")
def relay() -> Iterator[TCPStore]:
    with TCPStore(_HOST, 0, is_master=True) as running:
        yield running


@pytest.fixture
def store(relay: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """The store of a job whose rank this process is, with a relay for it on this machine."""
    place = Endpoint(_HOST, free_port())
    patch_torch(monkeypatch)
    for name in list(os.environ.keys() - without_rank(os.environ).keys()):
        monkeypatch.delenv(name)
    for name, value in {
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        "RANK": "0",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RELAY_VARIABLE: f"{_HOST}:{relay.port}",
        STORE_VARIABLE: str(place),
    }.items():
        monkeypatch.setenv(name, value)
    yield place
    end_torch_stores()


_WAYS: dict[str, Callable[[str, int], Any]] = {
    "torch": lambda host, port: dist.TCPStore(host, port, timeout=_LONG),
    "torch, by keywords": lambda host, port: dist.TCPStore(host_name=host, port=port, timeout=_LONG),
    "torch, a subclass": lambda host, port: _Mine(host, port, None, False, _LONG),
    "torch, env://": lambda _host, _port: next(dist.rendezvous("env://", timeout=_LONG))[0],
    "rally://": lambda host, port: next(meet_at_server(f"rally://{host}:{port}?rank=0&world_size=2", _LONG))[
        0
    ],
    "ours": lambda host, port: rallypoint.TCPStore(host, port, timeout=_LONG),
    "ours, env://": lambda _host, _port: rallypoint.rendezvous("env://", timeout=_LONG).store,
}
"""Ways to a client of the job's store."""


@pytest.mark.parametrize("way", _WAYS)
def test_a_client_of_the_jobs_store_goes_to_the_relay(way: str, store: Endpoint, relay: TCPStore) -> None:
    client = _WAYS[way](*store)
    for number, each in enumerate((client, client.clone())):
        each.set(f"{way} {number}", "was here")
        assert relay.get(f"{way} {number}") == b"was here"
        assert (each.host, each.port) == store  # another machine could use these


@pytest.mark.parametrize(
    ("variable", "value"), [("RALLYPOINT_CLIENT", "python"), ("RALLYPOINT_PATCH", "always")]
)
def test_so_does_every_kind_of_client(
    variable: str, value: str, store: Endpoint, relay: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    client = dist.TCPStore(*store, timeout=_LONG)
    client.set(variable, value)
    assert relay.get(variable) == value.encode()
    assert (client.host, client.port) == store


@pytest.mark.parametrize("make", [dist.TCPStore, rallypoint.TCPStore])
def test_every_other_store_is_where_the_caller_says(make: Any, store: Endpoint, relay: TCPStore) -> None:
    """A second one on another port of MASTER_ADDR, a server, or the same store by another name."""
    second = make(store.host, 0, is_master=True, timeout=_LONG)
    second.set("second", "store")
    client = make(store.host, second.port, timeout=_LONG)
    assert client.get("second") == b"store"
    assert (client.host, client.port) == (store.host, second.port)
    master = make(*store, is_master=True, timeout=_LONG)
    master.set("master", "of that address")
    assert make("localhost", store.port, timeout=_LONG).get("master") == b"of that address"
    assert not any(relay.check([key]) for key in ("second", "master"))


def test_launchers_and_tools_ask_the_store_itself(store: Endpoint) -> None:
    for role in (Role.AGENT, Role.TOOL):
        with pytest.raises(rallypoint.ConnectError):
            TCPStore(*store, timeout=_SHORT, role=role)


def test_never_means_never(store: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLYPOINT_PATCH", "never")
    with pytest.raises(dist.DistNetworkError) as caught:
        dist.TCPStore(*store, timeout=_SHORT)
    assert "relay" not in str(caught.value)


@pytest.mark.parametrize("make", [dist.TCPStore, rallypoint.TCPStore])
def test_nobody_goes_past_a_relay_that_has_died(
    make: Any, store: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = f"{_HOST}:{free_port()}"
    monkeypatch.setenv(RELAY_VARIABLE, dead)
    with TCPStore(*store, is_master=True), pytest.raises(RuntimeError) as caught:
        make(*store, timeout=_SHORT)
    assert f"{dead} is this machine's relay for the store {store}" in str(caught.value)
    if make is dist.TCPStore:
        assert isinstance(caught.value, dist.DistNetworkError)


# The launcher's side ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("relay", "patch", "relayed"),
    [
        ("on", "auto", True),
        ("on", "never", False),
        *(pytest.param(word, "auto", False, marks=pytest.mark.slow) for word in ("off", "auto")),
    ],
)
def test_what_a_launcher_tells_the_ranks_of_one_machine(
    relay: str, patch: str, relayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store in torch's variables; and the relay in ours, which the ranks then need a patch to use.

    Where they may be patched, they also get what lets them answer for their stacks.
    """
    place = Endpoint("localhost", free_port())
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("RALLYPOINT_PATCH", patch)
    monkeypatch.setenv(RELAY_VARIABLE, "left behind")
    monkeypatch.setenv(STORE_VARIABLE, "by a round before")
    handler = create_handler(RendezvousParameters("rallypoint", str(place), "job", 1, 1, None, relay=relay))
    try:
        told = handler.next_rendezvous().bootstrap_store_info
        assert (told.master_addr, told.master_port) == place
        assert os.environ.get(STORE_VARIABLE) == (str(place) if relayed else None)
        assert os.environ.get(RELAY_VARIABLE, "").startswith("127.0.0.1:") == relayed
        assert (str(INJECTION) in os.environ["PYTHONPATH"]) == (patch != "never")  # also to be watched
    finally:
        handler.shutdown()


def test_a_launcher_in_a_rank_does_not_take_the_relay_for_a_choice_of_the_user(tmp_path: Path) -> None:
    environ = {RELAY_VARIABLE: "off", "KEPT": "1"}
    assert settle({}, environ, tmp_path).relay.value == "off"
    assert without_rank(environ) == environ
    name_relay(environ, Endpoint("127.0.0.1", 1), Endpoint("node-a", 2))
    assert settle({}, environ, tmp_path).relay.value == "auto"
    assert without_rank(environ) == {"KEPT": "1"}
