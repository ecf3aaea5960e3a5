"""Where machines meet, and where their rounds have their stores: the server processes of one machine.

Both stay for their clients if the agent that started them is killed, so the others can go on.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from rallypoint.errors import (
    BindError,
    ConnectError,
    PortInUseError,
    RallypointError,
    ServerStartError,
    UsageError,
)
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.reports import WITHOUT_STORE, LostServer, lost_server
from rallypoint.relay.head import auto_workers
from rallypoint.relay.hosting import host_relay, host_store
from rallypoint.rollcall.identity import Role
from rallypoint.server.guard.secret import job_secret
from rallypoint.server.loops.backend import choose
from rallypoint.server.process.binding import is_this_machine
from rallypoint.server.process.hosting import HostedServer, Lifespan, host_server
from rallypoint.stores.base import Store
from rallypoint.stores.hash import HashStore
from rallypoint.stores.tcp import TCPStore

logger = logging.getLogger("rallypoint.meeting")

LIFESPAN = Lifespan(stays_for_clients=True)
_ANSWER_SECONDS = 10.0
_PARTING_SECONDS = 3.0  # for a server that has no clients left to end
_MANY_MACHINES = 256  # they have some thousand ranks; how many, nobody says before the store is there
_TENANT_SECONDS = 10.0  # to reach what holds the endpoint's port on this machine

_WITHOUT_MEETING_PLACE = "ranks go on; but if a rank or a machine fails, the job cannot start again, and ends"


class MeetingPlace:
    """The store in which the machines meet, and the store server of the round that this machine keeps."""

    is_replicated = False
    """Whether the stores outlive this job's machines, and this job."""
    pause_seconds = 0.0
    """For how long the stores may be away, and then go on."""
    _names = ("the job's store", "the job's meeting place")

    def __init__(self, endpoint: Endpoint, store: Store, server: HostedServer | None, reachable: str) -> None:
        self._endpoint = endpoint
        self.store = store
        self._server = server
        self._reachable = reachable
        self._round: HostedServer | None = None
        self._relay: HostedServer | None = None
        self._told_lost: set[int] = set()

    @property
    def is_here(self) -> bool:
        """Whether this process holds the meeting place."""
        return self._server is not None or not isinstance(self.store, TCPStore)

    @property
    def holds_a_server(self) -> bool:
        return self._server is not None or self._round is not None

    def named(self, error: RallypointError) -> RallypointError:
        """The error of a call that needs one of the stores, as it is to be told."""
        return error

    def whereabouts(self, store: Endpoint) -> str:
        """Where the round's store is that this machine reaches here."""
        return str(store)

    def start_round(self, name: str, workers: int = 0) -> Endpoint:
        """Start a store server for a new round, and end the last one's; where other machines reach it.

        `name` is that of the round, and of no other one. `workers`: how many the server is to have.
        """
        if self._round is not None:
            self._round.release()
            self._round = None
        self._round = self._host_round(name, workers)
        return Endpoint(self._reachable, self._round.port)

    def _host_round(self, _: str, workers: int, /) -> HostedServer:
        port = 0 if isinstance(self.store, TCPStore) else self._endpoint.port
        try:
            return host_store(self._reachable, port, backend=choose(), lifespan=LIFESPAN, workers=workers)
        except PortInUseError as error:
            # The job is on this machine alone, so any port will do.
            logger.warning("%s: taking a free port instead", error.message)
            return host_store(self._reachable, 0, backend=choose(), lifespan=LIFESPAN, workers=workers)

    def start_relay(self, store: Endpoint, name: str) -> Endpoint | None:
        """Start a relay for the ranks of this machine, and end the last round's; where they reach it.

        The store is that of the round of this name.

        None if the relay does not come up: then the ranks connect to the store itself. Not in a job with a
        secret: there, the error is raised.
        """
        self.end_relay()
        try:
            self._relay = self._host_relay(store, name)
        except (ServerStartError, BindError) as error:
            if job_secret() is not None:
                raise
            logger.warning("no relay: %s; the ranks of this machine connect to %s", error.message, store)
            return None
        logger.info("the ranks of this machine reach %s through a relay on %s", store, self._relay.places)
        return Endpoint(*self._relay.address)

    def _host_relay(self, store: Endpoint, _: str, /) -> HostedServer:
        return host_relay([store], backend=choose(), lifespan=LIFESPAN)

    def end_relay(self) -> None:
        """End the relay of the last round, if there is one: its ranks have ended."""
        if self._relay is not None:
            self._relay.release()
            self._relay = None

    def take_lost(self) -> Iterator[tuple[LostServer, str]]:
        """The servers that have ended although this machine still holds them, and what becomes of the job.

        Each comes once.
        """
        store, meeting_place = self._names
        for what, server, then in (
            (store, self._round, WITHOUT_STORE),
            ("this machine's relay to the job's store", self._relay, WITHOUT_STORE),
            (meeting_place, self._server, _WITHOUT_MEETING_PLACE),
        ):
            if server is not None and server.pid not in self._told_lost and (how := server.how_it_ended()):
                self._told_lost.add(server.pid)
                yield lost_server(what, server.pid, server.places, how), then

    def close(self, *, alone: bool) -> None:
        """Let go. Servers end; unless others still use them: then they stay until those have gone."""
        self.store.close()
        self.end_relay()
        if self._round is not None and alone:
            self._round.release()
        elif self._round is not None:
            self._round.abandon()
        if self._server is not None:
            self._server.abandon(_PARTING_SECONDS)  # another job may meet there as well
        self._round = self._server = None


def workers_for(machines: int, *, have_relays: bool) -> int:
    """How many workers the store of a round gets: some, if very many ranks connect to it and to no relay."""
    return 0 if have_relays or machines < _MANY_MACHINES else auto_workers()


def open_place(
    endpoint: Endpoint, machines: int, *, hosts: bool | None, local_address: str | None, seconds: float
) -> MeetingPlace:
    """The meeting place at an endpoint: held here, or reached over the network within `seconds`.

    `hosts` says whether this machine holds it; None: if the endpoint means this machine. By
    `local_address` the others reach this machine; None: by the address with which it reaches the endpoint.
    """
    if machines == 1:
        host = endpoint.host if is_this_machine(endpoint.host) else "localhost"
        return MeetingPlace(endpoint, HashStore(seconds), None, host)
    if endpoint.host in ("0.0.0.0", "::"):
        raise UsageError(
            f"{endpoint} is no address by which other machines could reach this one",
            hint="name the machine: its host name, or its address in their network",
        )
    server = None
    if is_this_machine(endpoint.host) if hosts is None else hosts:
        server = _hold(endpoint, seconds)
    place = server.address if server else endpoint
    store = TCPStore(*place, timeout=seconds, role=Role.AGENT)
    store.set_timeout(min(seconds, _ANSWER_SECONDS))  # it is up now, and answers at once
    reachable = endpoint.host if server else local_address or own_address([endpoint])
    return MeetingPlace(endpoint, store, server, reachable)


def _hold(endpoint: Endpoint, seconds: float) -> HostedServer | None:
    """The server at the endpoint; None if another process has it."""
    try:
        return host_server(endpoint.host, endpoint.port, backend=choose(), lifespan=LIFESPAN)
    except PortInUseError as error:
        # Most likely another agent of the same job on this machine.
        logger.info("%s: joining what is there", error.message)
        try:
            TCPStore(*endpoint, timeout=min(seconds, _TENANT_SECONDS), role=Role.AGENT).close()
        except ConnectError:
            raise error from None  # it is no store: say what holds the port
        return None


def own_address(places: Sequence[tuple[str, int]]) -> str:
    """The address of this machine by which it reaches the places, and so, most likely, is reached."""
    for family, kind, protocol, _, address in chain.from_iterable(map(_addresses, places)):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # sends nothing
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _addresses(place: tuple[str, int]) -> list[Any]:
    try:
        return socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return []
