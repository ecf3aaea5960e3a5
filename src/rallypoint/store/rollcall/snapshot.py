"""The state of a server or relay at one moment, as JSON: the answer to a `Question`.

Times are seconds before the snapshot was made (`seconds`), so that no clocks are compared; only `time` is by
the clock of its maker. Keys have the names that scripts use, without the slash that clients put in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rallypoint.codec import ReadBy, from_json, from_text, to_text
from rallypoint.errors import ProtocolError
from rallypoint.store.rollcall.identity import NOBODY, Identity


@dataclass(frozen=True)
class ClientWait:
    """One wait of a client, for missing keys."""

    keys: tuple[str, ...]
    """The first few of them."""
    count: int
    seconds: float


@dataclass(frozen=True)
class Client:
    """One connection."""

    id: int
    """The number of the connection, from 1; never reused."""
    peer: str
    """Its address, as `host:port`."""
    seconds: float
    """Since it connected."""
    who: Identity = NOBODY
    operations: int = 0
    received: int = 0
    sent: int = 0
    waits: tuple[ClientWait, ...] = ()
    told: str = ""
    """Its last report by the operation REPORT, which is for launchers; empty if none."""
    told_seconds: float = -1.0
    """Since that report."""


@dataclass(frozen=True)
class Barrier:
    """A barrier (the operation BARRIER) with waiting members."""

    key: str
    size: int
    arrived: int
    """Ranks, those behind relays included."""
    members: tuple[tuple[int, float], ...]
    """The ids of the clients and relays that wait there, and for how many seconds."""


@dataclass(frozen=True)
class Gone:
    """A rank that has left."""

    id: int
    who: Identity
    seconds: float
    """Since then."""
    why: str
    """The reason in the log; empty if it closed its connection itself."""


@dataclass(frozen=True)
class Key:
    """A key with a value, or a queue."""

    key: str
    size: int
    """In bytes; for a queue, all its values together, or -1 if there are too many to add up."""
    queued: int = 0
    """Values in the queue; 0: not a queue."""
    writer: int = 0
    """The id of the client or relay that wrote it last; 0: unknown."""
    writer_is: str = ""
    """Its name, even if it has left: `rank 3`, `process 12 on node-a`, or its address."""


@dataclass(frozen=True)
class Value:
    """The beginning of a value."""

    key: str
    size: int
    data: str
    """Hexadecimal."""


@dataclass(frozen=True)
class Operation:
    """The requests of one kind since the start."""

    name: str
    count: int
    per_second: float
    """In the last seconds."""


@dataclass(frozen=True)
class Second:
    """One second of the past."""

    time: float
    """When it ended, by the maker's clock."""
    operations: int
    p99: float
    """The 99th percentile of the loop's turns, in seconds; -1: none was timed."""
    clients: int
    waiting: int
    """Clients that waited at its end."""


@dataclass(frozen=True)
class Mishap:
    """A connection that was closed because of an error, or refused."""

    time: float
    peer: str
    reason: str


def _read_part(told: object) -> Snapshot | None:
    """A part is JSON within a JSON string: a relay's report is passed on unread, and cannot break the rest.

    A part that cannot be read, perhaps of another version, counts as missing.
    """
    if not isinstance(told, str):
        return None if told is None else from_json(Snapshot, told)
    try:
        return from_text(Snapshot, told)
    except ValueError:
        return None


@dataclass(frozen=True)
class Relay:
    """A relay of this server, or of this relay."""

    id: int
    peer: str
    seconds: float
    present: bool
    """False: it has lost its connection, and may reconnect."""
    part: Annotated[Snapshot | None, ReadBy(_read_part)] = None
    """Its last report; None: it has not reported yet."""
    part_seconds: float = -1.0
    """Since that report."""
    waits: tuple[ClientWait, ...] = ()
    """What it waits for, on behalf of its clients."""


@dataclass(frozen=True)
class ServerWorker:
    """A process of a server, which serves some of its clients."""

    id: int
    """As of a relay."""
    peer: str
    """Its name and its process: `worker-1:4711`."""
    seconds: float
    clients: int = -1
    """-1: it has not reported yet."""


@dataclass(frozen=True)
class Counters:
    """The fields of a snapshot that count from the start, and never go down."""

    received: int = 0
    sent: int = 0
    accepted: int = 0
    operations: tuple[Operation, ...] = ()
    error_count: int = 0


@dataclass(frozen=True)
class Standby:
    """A process that can take over from the leader of a replicated store."""

    address: str
    lag: int
    """How many records of the log it had not read when it last reported."""


@dataclass(frozen=True)
class Replication:
    """The state of a store that is replicated through an engine."""

    engine: str
    """Its kind and addresses: `etcd at a:2379, b:2379, job x`."""
    term: int
    """Counts the leaders, from 1."""
    leader: str
    """Where clients reach it."""
    standbys: tuple[Standby, ...] = ()
    stores: tuple[str, ...] = ()
    """The names of all stores but the one without a name: stores of jobs and their rounds."""
    unknown_store: str = ""
    """The requested name, if there is no such store."""
    records: int = 0
    """The number of the last record of the log."""
    commit_p50: float = -1.0
    """Seconds that half of the records of this term took at most, until the engine had them; `commit_p99`:
    that 99 % took at most. -1: there was none."""
    commit_p99: float = -1.0
    log_bytes: int = 0
    """What this leader has written since its last checkpoint."""
    checkpoint_bytes: int = 0
    """Of its last checkpoint; 0: it has made none."""
    away_seconds: float = -1.0
    """For how long the engine has not answered; -1: it answers."""
    error: str = ""
    """Its error then; `hint` says what to do."""
    hint: str = ""

    @property
    def failovers(self) -> int:
        """How often the lead has changed."""
        return max(self.term - 1, 0)


@dataclass(frozen=True)
class Upstream:
    """The store of a relay, as the relay reaches it."""

    places: tuple[str, ...]
    """The addresses where it may be."""
    place: str = ""
    """The address of the connection; empty: there is none now."""
    down_seconds: float = -1.0
    """Since there is no connection; -1: there is one."""
    error: str = ""
    """The error of each address then."""
    trouble: str = ""
    """What keeps the store from going on, in its own words; `advice` says what to do."""
    advice: str = ""
    store: str = ""
    """The name of the store, if there are several at that address."""

    @property
    def moves(self) -> bool:
        """Whether the store may go on at another place."""
        return len(self.places) > 1

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """The places as hosts and ports. ProtocolError for what is none: it came over the network."""
        pairs = (each.rpartition(":") for each in self.places)
        try:
            return tuple((host.strip("[]"), int(port)) for host, _, port in pairs)
        except ValueError:
            raise ProtocolError("a relay names places of its store that are no HOST:PORT") from None


@dataclass(frozen=True)
class Snapshot:
    """One server or relay, and the relays connected to it."""

    kind: str
    """`server` or `relay`."""
    version: str
    host: str
    pid: int
    backend: str
    time: float
    seconds: float
    """Since it was started."""
    quiet_seconds: float
    """Since a client made progress: connected, set, appended, pushed, popped, or arrived at a barrier."""
    stalled_seconds: float = 0.0
    """For how long clients have waited without any progress; 0: none waits, or there is progress."""
    clients: tuple[Client, ...] = ()
    relays: tuple[Relay, ...] = ()
    """Relays; before `rollcall.clients.whole`, the server's own workers as well."""
    own_workers: tuple[ServerWorker, ...] = ()
    """The processes that serve the clients of a server, if it has such."""
    ended_workers: Counters | None = None
    """What ended workers had counted in their last reports."""
    barriers: tuple[Barrier, ...] = ()
    gone: tuple[Gone, ...] = ()
    """The last to leave, the latest at the end."""
    key_count: int = 0
    queue_count: int = 0
    stored_bytes: int = 0
    keys: tuple[Key, ...] = ()
    keys_found: int = 0
    """How many keys match the question's search; `keys` may have fewer."""
    value: Value | None = None
    group_writers: tuple[tuple[int, int], ...] = ()
    """Ranks that have written their key in torch's default group, with the id of the client or relay that
    wrote it, which may have left or be unknown (0)."""
    workers: int = 0
    """Clients that have registered themselves, as torch's clients with a world size do."""
    plan: str = ""
    """The value of the key `PLAN`."""
    stall: str = ""
    """The value of the key `STALL`: a launcher's report of a stalled job."""
    rosters: tuple[tuple[str, str], ...] = ()
    """The rendezvous of jobs here: job ids, and rosters as JSON (see `launch/rendezvous/roster.py`)."""
    stores: tuple[str, ...] | None = None
    """The names of the other stores at this address; None if there can be none, or it is not reported."""
    received: int = 0
    sent: int = 0
    accepted: int = 0
    """Connections since the start."""
    operations: tuple[Operation, ...] = ()
    turn_p50: float = -1.0
    """The median and the 99th percentile of the loop's turns in the last minutes, in seconds; a client waits
    no longer than a turn for its answer. -1: none was timed."""
    turn_p99: float = -1.0
    history: tuple[Second, ...] = ()
    """The last minutes, the latest second at the end."""
    errors: tuple[Mishap, ...] = ()
    """The last ones, the latest at the end."""
    error_count: int = 0
    replication: Replication | None = None
    """Of a server that keeps its store on an engine."""
    upstream: Upstream | None = None
    """Of a relay."""
    incomplete: str = ""
    """What is left out, and why; empty if complete."""

    def to_json(self) -> str:
        return to_text(self, sparse=True)

    @staticmethod
    def from_json(data: bytes | str) -> Snapshot:
        """Raises ProtocolError for invalid data, which may come over the network."""
        try:
            return from_text(Snapshot, data)
        except ValueError as error:
            raise ProtocolError(
                f"what the store tells of itself cannot be read: {error}",
                hint="do both sides run the same version of Rallypoint?",
            ) from None
