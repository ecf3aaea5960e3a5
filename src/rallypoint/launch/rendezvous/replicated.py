"""A job's meeting and its rounds on a store that outlives its machine: `rallypoint serve --engine`.

No server is started but relays. The agent meets through one on its own machine: a plain client would lose
what is under way when the store moves. The ranks of a machine have another one, as in other jobs. The round's
keeper puts one more where the round's store would listen: MASTER_ADDR and MASTER_PORT name it, alike on all
machines, for scripts that use them for more than the store, and for ranks that know nothing of relays.

One such store is for many jobs. Each meeting has a store with a name of its own there, and so has each round.
"""

from __future__ import annotations

import logging

from rallypoint.client.look import MEETING
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import (
    ConnectError,
    ConnectionLostError,
    JoinTimeoutError,
    RallypointError,
    ServerStartError,
    StoreTimeoutError,
)
from rallypoint.launch.endpoint import Endpoint, Endpoints, RoundStore, StoreView
from rallypoint.launch.rendezvous.servers import (
    LIFESPAN,
    WITHOUT_MEETING_PLACE,
    MeetingPlace,
    RoundsHere,
    own_address,
)
from rallypoint.launch.rendezvous.waiting import Waiting, connecting_state
from rallypoint.store.connect.connecting import Attempts
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import is_this_machine
from rallypoint.store.relay.finding import find_upstream
from rallypoint.store.relay.hosting import host_relay
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.server.loops.backend import choose
from rallypoint.store.server.process.binding import ANY_PORT
from rallypoint.store.server.process.hosting import HostedServer

logger = logging.getLogger("rallypoint.meeting")

_ANSWER_SECONDS = 60.0  # a relay keeps what is under way for as long
_NO_ID = "none"  # what torchrun calls a job that was given no id


class ReplicatedPlace(MeetingPlace):
    """A meeting place that is on no machine of the job, or on any of them."""

    is_replicated = True
    pause_seconds = 10.0  # it takes a second or two, and more if the engine has lost a machine as well

    def __init__(self, places: Endpoints, store: TCPStore, relay: HostedServer, here: RoundsHere) -> None:
        super().__init__(places[0], store, relay, here)
        self._places = self._endpoints = places

    @property
    def is_here(self) -> bool:
        return False

    @property
    def holds_a_server(self) -> bool:
        return self._round is not None

    def named(self, error: RallypointError) -> RallypointError:
        is_about_store = isinstance(error, ConnectError | ConnectionLostError | ServerStartError) or (
            isinstance(error, StoreTimeoutError) and not isinstance(error, JoinTimeoutError)
        )
        if is_about_store:
            error.hint = _where_to_look(self._endpoints)
        return error

    def whereabouts(self, _: RoundStore) -> str:
        return ", ".join(map(str, self._endpoints))

    def own_address(self) -> str:
        return own_address(_elsewhere_first(self._endpoints))

    def view_of(self, store: RoundStore) -> StoreView:
        return StoreView(store.master)  # which of the places leads is known to relays alone

    def _of_server(self, _: bool) -> tuple[str, HostedServer | None, str]:
        return "this machine's relay to the job's meeting place", self._server, WITHOUT_MEETING_PLACE


def open_replicated(
    places: Endpoints,
    run_id: str,
    *,
    local_address: str | None,
    seconds: float,
    ports: range = ANY_PORT,
    has_relays: bool = False,
) -> ReplicatedPlace:
    """The meeting place of a job on the store that is at one of these places; ConnectError if it is at none.

    By `local_address` other machines reach this one; None: by the address with which it reaches the places.
    `ports` may be opened to them. `has_relays`: the ranks have a relay, which logs when the store is away.
    """
    if run_id == _NO_ID:
        logger.warning(
            "rallypoint: this job has no id, and would be one with another at %s that has none: "
            "give each a --rdzv-id",
            places,
        )
    try:
        deadline, attempts = Deadline(seconds), [Attempts(*place) for place in places]
        with Waiting(lambda: connecting_state(attempts, deadline.remaining)):
            # Here: it may take longer than a process to start.
            find_upstream(places, seconds, attempts=attempts)
    except ConnectError as error:
        error.hint = _where_to_look(places)
        raise
    relay = host_relay(places, store=run_id + MEETING, backend=choose(), lifespan=LIFESPAN, quiet=has_relays)
    store = TCPStore(*relay.address, timeout=min(seconds, _ANSWER_SECONDS), role=Role.AGENT)
    reachable = local_address or own_address(_elsewhere_first(places))
    return ReplicatedPlace(places, store, relay, RoundsHere(run_id, reachable, ports))


def _elsewhere_first(places: Endpoints) -> list[Endpoint]:
    """The places, those on other machines first: by an address of its own, a machine reaches only itself."""
    return sorted(places, key=lambda place: is_this_machine(place.host))


def _where_to_look(places: Endpoints) -> str:
    return (
        f"the job meets on the store that is at one of {', '.join(map(str, places))}: does `rallypoint serve "
        "--engine` run there, and does one of them lead (the others refuse connections)? Their logs tell "
        "that, and whether the engine answers. Does this machine reach them?"
    )
