"""Where machines meet, and where their rounds have their stores: the server processes of one machine.

Both stay for their clients if the agent that started them is killed, so the others can go on.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from rallypoint.client.base import Store
from rallypoint.client.local import HashStore
from rallypoint.client.snapshots import MEETING, fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import (
    BindError,
    ConnectError,
    ConnectionLostError,
    JoinTimeoutError,
    PortInUseError,
    RallypointError,
    ServerStartError,
    StoreTimeoutError,
    UsageError,
)
from rallypoint.launch.blame import LostServer
from rallypoint.launch.endpoint import Endpoint, Endpoints, RoundStore, StoreView
from rallypoint.launch.rendezvous.orphaned_port import OrphanedPort
from rallypoint.launch.rendezvous.waiting import Waiting, await_host, connecting_state
from rallypoint.launch.reports import WITHOUT_STORE, lost_server
from rallypoint.store.connect.connecting import Attempts, connect
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import is_this_machine, look_up, plain_host
from rallypoint.store.relay.hosting import RELAY, host_relay, host_store
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.plan import JobRound, Plan, meetings_of
from rallypoint.store.rollcall.question import Question
from rallypoint.store.server.guard.other_users import access_of_environment
from rallypoint.store.server.guard.secret import job_secret
from rallypoint.store.server.loops.backend import choose
from rallypoint.store.server.process.binding import ANY_PORT
from rallypoint.store.server.process.hosting import (
    STORE_SERVER,
    HostedServer,
    Lifespan,
    ServerKind,
    ServerProcess,
    host_server,
)

logger = logging.getLogger("rallypoint.meeting")

LIFESPAN = Lifespan(stays_for_clients=True)
_ANSWER_SECONDS = 10.0
_PARTING_SECONDS = 3.0  # for a server that has no clients left to end
_FOR_RANKS: tuple[str, range] = ("127.0.0.1", ANY_PORT)  # where the relay of this machine's ranks listens
_MANY_MACHINES = 256  # they have some thousand ranks; how many, nobody says before the store is there
_GLANCE_SECONDS = 2.0  # for whoever may be at the endpoint of a job of one machine to answer
_TENANT_SECONDS = 10.0  # to reach what holds the endpoint's port on this machine

WITHOUT_MEETING_PLACE = "ranks go on; but if a rank or a machine fails, the job cannot start again, and ends"
_WITHOUT_BOTH = (
    "ranks that do not need it go on; one that does fails, and then the job ends: its machines meet there as "
    "well"
)
_STORE = "the job's store"
_RELAY = f"this machine's relay to {_STORE}"


class RendezvousPlace:
    """The store in which the machines meet, and what this machine has of the round's store.

    With several machines, that one is at the endpoint as well, under a name, beside the store in which they
    meet: so a firewall has one port to let through. Each machine has a relay of it. That of the round's
    keeper is for whoever knows nothing of names and relays: MASTER_ADDR and MASTER_PORT name it.
    """

    is_replicated = False
    """Whether the stores outlive this job's machines, and this job."""
    pause_seconds = 0.0
    """For how long the stores may be away, and then go on."""

    def __init__(
        self, endpoint: Endpoint, store: Store, server: HostedServer | None, here: RoundsHere
    ) -> None:
        self._endpoint = endpoint
        self.store = store
        self._server = server
        self._here = here
        self._places: Sequence[tuple[str, int]] = [server.address if server is not None else endpoint]
        self._kept: RoundStore | None = None  # the round whose keeper this machine is, or was
        self._round: HostedServer | None = None  # what it has as its keeper
        self._relay: HostedServer | None = None
        self._prepared: list[ServerProcess] = []  # for the next round
        self._told_lost: set[int] = set()
        self._orphaned: list[OrphanedPort] = []

    @property
    def is_here(self) -> bool:
        """Whether this process holds the meeting place."""
        return self._server is not None

    @property
    def holds_a_server(self) -> bool:
        return self._server is not None or self._round is not None

    def named(self, error: RallypointError) -> RallypointError:
        """The error of a call that needs one of the stores, as it is to be told."""
        return error

    def whereabouts(self, store: RoundStore) -> str:
        """Where the round's store itself is, for people."""
        return str(self._endpoint if store.name else store.master)

    def view_of(self, store: RoundStore) -> StoreView:
        """Where this machine looks at the round's store."""
        if not store.name:
            return StoreView(store.master)
        return StoreView(Endpoint(*self._places[0]), store.name, str(self._endpoint))

    def own_address(self) -> str:
        """The address by which this machine reaches the others; empty if that is not known."""
        if self._server is None:
            return own_address([self._endpoint])
        try:
            clients = fetch_snapshot(*self._server.address, Question(), Deadline(_ANSWER_SECONDS)).clients
        except RallypointError:
            return ""
        peers = (plain_host(each.peer.rpartition(":")) for each in clients)
        others = [(peer, self._endpoint.port) for peer in peers if not is_this_machine(peer)]
        return own_address(others[:1]) if others else ""

    def find_jobs(self) -> tuple[JobRound, ...]:
        """The jobs that meet or have a store at this endpoint; none at a replicated one: each meets apart."""
        return () if self.is_replicated else _jobs_at(self._places[0], _ANSWER_SECONDS)

    _prepared_kind = RELAY
    """What a round needs at once."""

    def prepare_next(self) -> None:
        """Start the process of the relay or store that this machine needs next: then it is up at once."""
        if not self._prepared:
            with suppress(RallypointError, OSError):  # if that is still so when it is needed, it is reported
                self._prepared.append(ServerProcess(self._prepared_kind))

    def take_over(self, prepared: list[ServerProcess]) -> None:
        """Use processes that were prepared before this place was known."""
        self._prepared += prepared
        prepared.clear()

    def _take_prepared(self, kind: ServerKind) -> ServerProcess | None:
        """The process that is prepared, if it is of this kind and has not died."""
        if not self._prepared or kind is not self._prepared_kind:
            return None
        process = self._prepared.pop()
        if process.is_there:
            return process
        process.end()
        return None

    def start_round(self, name: str, workers: int = 0, *, has_relays: bool = True) -> RoundStore:
        """Begin the store of a new round, and end what the last one had; where other machines find it.

        `name` is that of the round, and of no other one. `workers`: how many processes more the store is to
        have. With some, and for ranks that have no relays, it is a server of its own, with a port of its own;
        not on a replicated store, for which this machine's relay has to do.
        """
        self._end_round()
        if self.is_replicated or (self._here.has_names and has_relays and not workers):
            kept = f"{self._here.run_id}/round/{name}"
            self._round = self._relay_to(self._places, kept, self._here.host, self._here.ports)
        else:
            kept = ""
            self._round = self._host_round(workers)
        self._kept = RoundStore(Endpoint(self._here.host, self._round.port), kept)
        return self._kept

    def _host_round(self, workers: int) -> HostedServer:
        return self._host(self._here.host, self._here.ports, workers)

    def _host(self, host: str, ports: range, workers: int) -> HostedServer:
        prepared = self._take_prepared(STORE_SERVER) if not workers else None
        try:
            return host_store(
                host, ports, backend=choose(), lifespan=LIFESPAN, workers=workers, prepared=prepared
            )
        except (BindError, PortInUseError):
            self._prepared += [prepared] if prepared is not None else []
            raise

    def _relay_to(
        self, places: Sequence[tuple[str, int]], name: str, host: str, ports: range
    ) -> HostedServer:
        return host_relay(
            places,
            store=name,
            host=host,
            ports=ports,
            backend=choose(),
            lifespan=LIFESPAN,
            prepared=self._take_prepared(RELAY),
        )

    def start_relay(self, store: RoundStore) -> Endpoint | None:
        """The relay for the ranks of this machine, to the store of a round; where they reach it.

        None if the relay does not come up: then the ranks connect to the store itself. Not in a job with a
        secret: there, the error is raised.
        """
        self.end_relay()
        if store != self._kept:
            self._end_round()
        elif store.name and self._round is not None:
            return Endpoint(*self._round.address)
        try:
            places = self._places if store.name else [store.master]
            self._relay = self._relay_to(places, store.name, *_FOR_RANKS)
        except (ServerStartError, BindError) as error:
            if job_secret() is not None:
                raise
            logger.warning(
                "no relay: %s; the ranks of this machine connect to %s", error.message, store.master
            )
            return None
        logger.info("the ranks of this machine reach %s through a relay on %s", store, self._relay.places)
        return Endpoint(*self._relay.address)

    def end_relay(self) -> None:
        """End the relay of the last round, if there is one: its ranks have ended."""
        if self._relay is not None:
            self._relay.release()
            self._relay = None

    def _end_round(self) -> None:
        if self._round is not None:
            self._round.release()
        self._round = self._kept = None

    def take_lost(self) -> Iterator[tuple[LostServer, str]]:
        """The servers that have ended although this machine still holds them, and what becomes of the job.

        Each comes once.
        """
        is_direct = self._kept is not None and not self._kept.name
        for what, server, then in (
            (_STORE if is_direct else _RELAY, self._round, WITHOUT_STORE),
            (_RELAY, self._relay, WITHOUT_STORE),
            self._of_server(is_direct),
        ):
            if server is not None and server.pid not in self._told_lost and (how := server.how_it_ended()):
                self._told_lost.add(server.pid)
                if server is (self._relay or self._round):  # ranks connect to it, and no relay does
                    self._orphaned.append(OrphanedPort(server))
                yield lost_server(what, server.pid, server.places, how), then

    def has_stranded_rank(self) -> bool:
        """Whether a rank of the round tries to connect to a store or relay of this machine that has died."""
        return any(each.has_rank() for each in self._orphaned)

    def close_orphaned(self) -> None:
        """The ranks of the round have ended, or are about to."""
        for each in self._orphaned:
            each.close()
        self._orphaned.clear()

    def _of_server(self, is_direct: bool) -> tuple[str, HostedServer | None, str]:
        """The server at the endpoint: what it is for the job, and what becomes of the job without it."""
        if is_direct:
            return "the job's meeting place", self._server, WITHOUT_MEETING_PLACE
        return _STORE, self._server, _WITHOUT_BOTH

    def close(self, *, alone: bool) -> None:
        """Let go. Servers end; unless others still use them: then they stay until those have gone."""
        self.close_orphaned()
        self.store.close()
        self.end_relay()
        for process in self._prepared:
            process.end()
        self._prepared.clear()
        if self._round is not None and alone:
            self._round.release()
        elif self._round is not None:
            self._round.abandon()
        if self._server is not None:
            self._server.abandon(_PARTING_SECONDS)  # another job may meet there as well
        self._round = self._server = None


_ahead: list[ServerProcess] = []


def prepare_first_store() -> None:
    """Start the process of a store for a job of one machine, before there is a rendezvous."""
    with suppress(RallypointError, OSError):  # it is reported when it is needed
        _ahead.append(ServerProcess(STORE_SERVER))


class _OwnPlace(RendezvousPlace):
    """Of a job on one machine, which meets in the memory of its agent, and has its store at the endpoint."""

    _prepared_kind = STORE_SERVER

    @property
    def is_here(self) -> bool:
        return True

    def _host_round(self, workers: int) -> HostedServer:
        port = self._endpoint.port
        try:
            return self._host(self._here.host, range(port, port + 1), workers)
        except PortInUseError as error:
            logger.warning("%s: taking a free port instead", error.message)  # nobody else has to know it
            return self._host(self._here.host, ANY_PORT, workers)


def workers_for(machines: int, *, have_relays: bool) -> int:
    """How many workers the store of a round gets: some, if very many ranks connect to it and to no relay."""
    if have_relays or machines < _MANY_MACHINES:
        return 0
    from rallypoint.store.relay.store_with_workers import auto_workers  # late: it has all of a server

    return auto_workers()


class RoundsHere(NamedTuple):
    """What the rounds of a job are called, and where this machine may have something of them."""

    run_id: str
    host: str
    """By which other machines reach this one."""
    ports: range = ANY_PORT
    """Which ports may be opened to them."""
    has_names: bool = True
    """Whether the endpoint holds stores with names; torch's own server does not."""


def open_place(
    places: Endpoints,
    machines: int,
    run_id: str,
    *,
    seconds: float,
    hosts: bool | None = None,
    local_address: str | None = None,
    ports: range = ANY_PORT,
    has_relays: bool = False,
) -> RendezvousPlace:
    """The meeting place at an endpoint: held here, or reached over the network within `seconds`.

    Several places are those of a store that outlives its machine: ConnectError if it is at none of them.
    `hosts` says whether this machine holds it; None: if the endpoint means this machine. By
    `local_address` the others reach this machine; None: by the address with which it reaches the endpoint.
    `ports` may be opened to other machines, besides the endpoint's own. `has_relays`: the ranks have a relay,
    which logs when a store that moves is away.
    """
    endpoint = places[0]
    if machines > 1 and not endpoint.port:
        raise UsageError(
            "several machines need an endpoint to meet at",
            hint="pass --rdzv-endpoint=HOST:PORT, the same on every machine",
        )
    if len(places) > 1:
        return _open_replicated(places, run_id, local_address, seconds, ports, has_relays)
    if machines == 1 and not _is_expected_at(endpoint, run_id):
        is_here = is_this_machine(endpoint.host)
        if not is_here:
            logger.warning(
                "rallypoint: --nnodes=1: this machine trains alone, and does not meet others at %s", endpoint
            )
        host = endpoint.host if is_here else "localhost"
        own = _OwnPlace(endpoint, HashStore(seconds), None, RoundsHere(run_id, host, has_names=False))
        own.take_over(_ahead)
        return own
    if endpoint.host in ("0.0.0.0", "::"):
        raise UsageError(
            f"{endpoint} is no address by which other machines could reach this one",
            hint="name the machine: its host name, or its address in their network",
        )
    from rallypoint.store.relay.reaching import knows_names  # late: a job of one machine does not need it

    server = _hold(endpoint, seconds) if await_host(endpoint, Deadline(seconds), hosts) else None
    place = server.address if server else endpoint
    store = TCPStore(*place, timeout=seconds, role=Role.AGENT)
    store.set_timeout(min(seconds, _ANSWER_SECONDS))  # it is up now, and answers at once
    reachable = endpoint.host if server else local_address or own_address([endpoint])
    has_names = server is not None or knows_names(*place, seconds)
    return RendezvousPlace(endpoint, store, server, RoundsHere(run_id, reachable, ports, has_names))


def _jobs_at(place: tuple[str, int], seconds: float) -> tuple[JobRound, ...]:
    found = fetch_snapshot(*place, Question(), Deadline(seconds))
    return meetings_of(Plan.from_json(found.plan), found.rosters)


def _is_expected_at(endpoint: Endpoint, run_id: str) -> bool:
    """Whether a job of this id with several machines meets at an endpoint, which is not waited for.

    A machine that was started as the only one meets it there all the same: all of them are told that their
    settings differ.
    """

    def give_up(_: object) -> None:
        raise ConnectError("nobody answers there at once")

    if not endpoint.port:
        return False
    deadline = Deadline(_GLANCE_SECONDS)
    try:
        connect(*endpoint, deadline, who_am_i(Role.TOOL), snapshot_only=True, after_try=give_up).close()
        jobs = _jobs_at(endpoint, _GLANCE_SECONDS)
    except RallypointError:
        return False
    return any(each.job == run_id and each.expected > 1 and not each.closed for each in jobs)


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


# A store that outlives its machine --------------------------------------------------------------------------

_RELAYED_ANSWER_SECONDS = 60.0  # a relay keeps what is under way for as long
_NO_ID = "none"  # what torchrun calls a job that was given no id


class ReplicatedPlace(RendezvousPlace):
    """A store that outlives its machine: `rallypoint serve --engine`.

    No server is started but relays. The agent uses one on its own machine for the rendezvous: a plain client
    would lose what is under way when the store moves. The ranks of a machine have another one, as in other
    jobs. The round's keeper puts one more where the round's store would listen: MASTER_ADDR and MASTER_PORT
    name it, alike on all machines, for scripts that use them for more than the store, and for ranks that know
    nothing of relays. One such store is for many jobs: each rendezvous and each round has a named store.
    """

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


def _open_replicated(
    places: Endpoints, run_id: str, local_address: str | None, seconds: float, ports: range, has_relays: bool
) -> ReplicatedPlace:
    from rallypoint.store.relay.reaching import find_upstream

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
    store = TCPStore(*relay.address, timeout=min(seconds, _RELAYED_ANSWER_SECONDS), role=Role.AGENT)
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


# Addresses --------------------------------------------------------------------------------------------------


def openness(store: str, environ: Mapping[str, str] = os.environ) -> str:
    """That whoever reaches the store of a job may change it; nothing if that is not so, or is allowed."""
    if job_secret() is not None or access_of_environment(environ).insecure:
        return ""
    return (
        f"whoever reaches {store} can read and change this job's store: give the job a secret (`rallypoint "
        "secret --help`)"
    )


def own_address(places: Sequence[tuple[str, int]]) -> str:
    """The address of this machine by which it reaches the places, and so, most likely, is reached."""
    for place in places:
        with suppress(OSError):
            for family, address in look_up(*place):
                with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)  # sends nothing
                    return str(probe.getsockname()[0])
    return socket.gethostname()
