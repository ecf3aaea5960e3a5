"""What a server or a relay knows at one moment, as JSON: the answer to a `Question`.

Times are seconds before the snapshot was made (`seconds`), so that no clocks are compared; `time` alone is
the maker's clock. Keys are named as scripts name them, without the slash that clients put in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rallypoint.codec import ReadBy, from_json, from_text, to_text
from rallypoint.errors import ProtocolError
from rallypoint.store.rollcall.identity import NOBODY, Identity


@dataclass(frozen=True)
class Wait:
    """One wait of a client: for keys that are not there."""

    keys: tuple[str, ...]
    """The first few of them."""
    count: int
    seconds: float


@dataclass(frozen=True)
class Client:
    """One connection."""

    id: int
    """Counts connections, from 1; never used again."""
    peer: str
    """Its address, as `host:port`."""
    seconds: float
    """Since it connected."""
    who: Identity = NOBODY
    operations: int = 0
    received: int = 0
    sent: int = 0
    waits: tuple[Wait, ...] = ()
    told: str = ""
    """What it has said of itself by the operation TELL, which is for launchers; nothing: it has not."""
    told_seconds: float = -1.0
    """Since it said so."""


@dataclass(frozen=True)
class Barrier:
    """A barrier (the operation BARRIER) at which somebody waits."""

    key: str
    size: int
    arrived: int
    """Ranks, those behind relays included."""
    members: tuple[tuple[int, float], ...]
    """Clients and relays that wait there, by their ids, and for how many seconds."""


@dataclass(frozen=True)
class Gone:
    """A client that has left, and was known."""

    id: int
    who: Identity
    seconds: float
    """Since then."""
    why: str
    """As the log says; nothing if it closed its connection by itself."""


@dataclass(frozen=True)
class Key:
    """A key with a value, or a queue."""

    key: str
    size: int
    """In bytes, all values of a queue together; -1: there are too many of them to be added up."""
    queued: int = 0
    """Values in the queue; 0: it is no queue."""
    writer: int = 0
    """The id of the client or relay that wrote it last; 0: not known."""
    writer_is: str = ""
    """Who that was, also if it has gone: `rank 3`, `process 12 on node-a`, or its address."""


@dataclass(frozen=True)
class Value:
    """The beginning of a value."""

    key: str
    size: int
    data: str
    """Hexadecimal."""


@dataclass(frozen=True)
class Operation:
    """What has been asked of one kind, since the start."""

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
    """Seconds that 99 % of the loop's turns did not go beyond; -1: none was timed."""
    clients: int
    waiting: int
    """Clients that waited at its end."""


@dataclass(frozen=True)
class Mishap:
    """A connection that was closed or refused, and why."""

    time: float
    peer: str
    reason: str


def _read_part(told: object) -> Snapshot | None:
    """A part is a text within the text: what a relay tells is passed on unread, and cannot break the rest.

    One that cannot be read, as it may be of another version, is as good as none.
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
    """False: it has lost its connection, and may come back."""
    part: Annotated[Snapshot | None, ReadBy(_read_part)] = None
    """What it said last of itself; None: nothing yet."""
    part_seconds: float = -1.0
    """Since it said so."""
    waits: tuple[Wait, ...] = ()
    """What it waits for, on behalf of its clients."""


@dataclass(frozen=True)
class Worker:
    """A process of a server, which serves some of its clients."""

    id: int
    """As relays have one."""
    peer: str
    """Its name and its process: `worker-1:4711`."""
    seconds: float
    clients: int = -1
    """-1: it has told nothing yet."""


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
    """A process that would take over from the leader of a replicated store."""

    address: str
    lag: int
    """How many records of the log it had not read when it was heard of last."""


@dataclass(frozen=True)
class Replication:
    """How a store stands that is kept on an engine."""

    engine: str
    """What and where that is: `etcd at a:2379, b:2379, job x`."""
    term: int
    """Counts the leaders, from 1."""
    leader: str
    """Where clients reach it."""
    standbys: tuple[Standby, ...] = ()
    stores: tuple[str, ...] = ()
    """The names of the stores that are there besides the one without a name: of jobs and their rounds."""
    unknown_store: str = ""
    """The name that was asked for, if there is no store of that name."""
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
    """What is wrong with it then, and what to do."""
    hint: str = ""

    @property
    def failovers(self) -> int:
        """How often the lead has changed."""
        return max(self.term - 1, 0)


@dataclass(frozen=True)
class Upstream:
    """Where the store of a relay is."""

    places: tuple[str, ...]
    """Where it may be."""
    place: str = ""
    """Where the relay has reached it; nothing: it has no connection now."""
    down_seconds: float = -1.0
    """Since when it has none; -1: it has one."""
    error: str = ""
    """What is wrong with each place then."""
    trouble: str = ""
    """What keeps the store from going on, as it says itself, and what to do."""
    advice: str = ""
    store: str = ""
    """Which of several stores is meant that are there."""

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
    """One server, or one relay, with all that are behind it."""

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
    """Since somebody has made progress: connected, set, appended, pushed, popped, or come to a barrier."""
    stalled_seconds: float = 0.0
    """Since nobody has made progress while somebody waited; 0: nobody waits, or somebody has."""
    clients: tuple[Client, ...] = ()
    relays: tuple[Relay, ...] = ()
    """Relays; as a server tells it, its own workers as well (see `store/rollcall/clients.py`)."""
    own_workers: tuple[Worker, ...] = ()
    """The processes that serve the clients of a server, if it has such."""
    ended_workers: Counters | None = None
    """What such processes that have ended had counted when they last told of themselves."""
    barriers: tuple[Barrier, ...] = ()
    gone: tuple[Gone, ...] = ()
    """The last to leave, the latest at the end."""
    key_count: int = 0
    queue_count: int = 0
    stored_bytes: int = 0
    keys: tuple[Key, ...] = ()
    keys_found: int = 0
    """How many keys there are that the question searches for; `keys` may be fewer."""
    value: Value | None = None
    group_writers: tuple[tuple[int, int], ...] = ()
    """Ranks that have written their key in torch's default group, with the client or relay that wrote it;
    that may have gone, or not be known (0)."""
    workers: int = 0
    """Clients that have counted themselves in, as torch's do that know the world size."""
    plan: str = ""
    """The value of the key `PLAN`."""
    stall: str = ""
    """The value of the key `STALL`: what a launcher has found out about a job that stands still."""
    rosters: tuple[tuple[str, str], ...] = ()
    """The jobs that meet here: their ids, and their rosters as JSON (see `launch/rendezvous/roster.py`)."""
    stores: tuple[str, ...] | None = None
    """The names of the other stores at this address; None: there can be none, or it does not tell."""
    received: int = 0
    sent: int = 0
    accepted: int = 0
    """Connections since the start."""
    operations: tuple[Operation, ...] = ()
    turn_p50: float = -1.0
    """Seconds that half of the loop's turns of the last minutes did not go beyond; a client waits no longer
    than a turn for its answer. `turn_p99`: that 99 % did not go beyond. -1: none was timed."""
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
    """What could not be told, and why; nothing if all is there."""

    def to_json(self) -> str:
        return to_text(self, sparse=True)

    @staticmethod
    def from_json(data: bytes | str) -> Snapshot:
        """Raises ProtocolError for what is no snapshot: it came over the network."""
        try:
            return from_text(Snapshot, data)
        except ValueError as error:
            raise ProtocolError(
                f"what the store tells of itself cannot be read: {error}",
                hint="do both sides run the same version of Rallypoint?",
            ) from None
