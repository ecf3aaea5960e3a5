"""What a store's server, a relay and a replicated store's leader have in common: a `ServerCore`.

A core is a whole server without its I/O. It reads no clock, opens no socket, starts no thread and calls
nobody back. A *driver* (the pump, or a test) calls it, sends what it returns, and does what its outbox says.
So the same calls with the same times give the same bytes.

The driver of a core

- writes the time into its `turn` whenever a turn of the loop begins;
- calls `open` for each new connection, and `close` exactly once when it ends, for whatever reason;
- passes what it reads to the client's `receive`, and sends back what that returns, in one write;
- says how much of that the client has not taken (`leave_unread`), and does not serve it while that is much;
- calls `end` for a client that has sent its last request, and when `receive` raises ProtocolError (after
  sending the error's `replies`), and closes it as soon as it `is_owed` nothing more;
- closes a client at once when `overdue` names it, and when it does not read what it is sent
  (`Limits.unsent_bytes`);
- calls `overdue` and `end_second` about every second;
- empties the `outbox` after each of these calls, and does what is in it: see `context`.

The life of a connection (`clients.Client`; `parser` and `Clients` keep its state):

    state        begins when                                          ends when
    -----------  ---------------------------------------------------  --------------------------------------
    connected    `open`                                               VALIDATE is complete; or it is overdue
    idle         VALIDATE or a request is complete                    the first byte of a request arrives
    cut          a part of a request has arrived                      the rest has; or it is overdue
    postponed    its requests take long: a request `is_unfinished`,   `receive` has carried out the rest,
                 or whole ones are kept (`has_rest`); a GoOn is due   called once in each turn, with nothing
    ended        `end`: it sends no more, or has broken a rule        `is_owed` nothing more; or it is overdue
    closed       `close`: all that it holds is freed                  -

Two conditions are independent of these states:

- It *waits*: the engine has it as a member, from a WAIT or BARRIER that is not answered at once. It may send
  other requests meanwhile. When the wait is over, the engine returns the member, which enters
  `outbox.woken`; the driver then sends it its `take_notice`. CANCEL_WAIT, `end` and `close` withdraw waits.
- It *carries a session* (`sessions.Session`) after SESSION: its requests come in batches, each of which is
  carried out once, and its replies are frames.

A connection may leave for another core by ENTER, or be restricted to SNAPSHOT before its first byte.

The life of a session, which outlives its connections, is in `sessions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

from rallypoint.compiling import mypyc_attr
from rallypoint.errors import LimitError
from rallypoint.store.core.clients import Clients, ClientT
from rallypoint.store.core.context import Close, Context, DriverTask, Outbox
from rallypoint.store.core.sessions import Carrier, Session, Sessions
from rallypoint.store.core.snapshots import Fields, Pending, Snapshots
from rallypoint.store.core.turn import Durations, Progress, Traffic
from rallypoint.store.rollcall.question import Question
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.parser import RequestTable

if TYPE_CHECKING:
    from rallypoint.store.rollcall.snapshot import Snapshot


@mypyc_attr(allow_interpreted_subclasses=True)
class ServerCore(ABC, Generic[ClientT]):
    """One server, relay or leader. Not safe for threads."""

    kind = "server"
    """What it is called in snapshots."""

    __slots__ = (
        *("about", "began", "budget", "clients", "is_finding", "journal", "limits", "snapshots"),
        *("outbox", "progress", "request_table", "sessions", "traffic", "turn"),
    )

    def __init__(self, context: Context, carrier: Carrier, request_table: RequestTable[Any]) -> None:
        self.request_table = request_table
        self.limits = context.limits
        self.budget = context.budget
        self.turn = context.turn
        self.about = context.about
        self.outbox: Outbox[ClientT] = context.outbox
        self.journal = context.journal
        self.began = context.turn.now
        self.clients: Clients[ClientT] = Clients(context)
        self.sessions = Sessions(context, carrier, self.note_error)
        self.traffic = Traffic()
        self.progress = Progress(context.turn.now)
        self.is_finding = False
        self.snapshots = Snapshots(self)

    # What the driver calls

    def open(self, peer: str) -> ClientT:
        """A new connection; `peer` is its name in messages. LimitError if it is one too many."""
        limit = self.limits.connections
        if len(self.clients) + self.clients.elsewhere >= limit:
            raise LimitError(f"one more connection than {limit:,}, the limit connections")
        client = self._make(peer)
        self.clients.add(client)
        return client

    def end(self, client: ClientT) -> None:
        """A client has sent its last request; it stays open to take its replies."""
        self.clients.end(client)
        self._leave(client)

    def close(self, client: ClientT) -> None:
        """Forget a client. The driver has counted its bytes before."""
        self.clients.remove(client)
        self._leave(client)

    def overdue(self) -> list[tuple[ClientT, str]]:
        """The clients to close now, and why. Also ends the sessions whose time is over."""
        self.sessions.expire(self.turn.now)
        return self.clients.overdue()

    def end_second(self, turns: Durations | None = None) -> None:
        """About once a second: see what has happened since. `turns`: how long all turns of the loop took."""
        counts, waiting = self.counts(), self.waiting
        self.traffic.end_second(
            self.turn, turns or Durations(), self._seen(counts), clients=len(self.clients), waiting=waiting
        )
        self.check_held()
        self.progress.end_second(self.turn.now, self.clients.arrivals, counts, self.oldest_wait, waiting)
        if self.journal is not None:
            self.journal.end_second(self.plan, self.stall)
            self.find_processes()

    def go_on(self) -> bool:
        """Go on with what no client waits for, a slice at a time; return whether there is more to do."""
        return self.sessions.go_on()

    def check_held(self) -> None:
        """Ask the driver to lighten the load if clients hold too much."""
        if self.held > self.budget.limit:
            self.outbox.others.append(DriverTask.LIGHTEN)

    @property
    def most_held(self) -> int:
        """Bytes that are held for the client or session that holds the most."""
        return max((held for held, _ in self._holders()), default=0)

    def lighten(self) -> None:
        """Close the client, or end the session, that holds the most, if all together hold too much."""
        self.budget.is_reported = False
        held, limit = self.held, self.budget.limit
        heaviest = max(self._holders(), key=lambda each: each[0], default=None)
        if heaviest is not None and held > limit and not self.budget.ending:
            why = f"all clients hold {held:,} bytes, and it holds the most; the limit held_bytes is {limit:,}"
            self._end_holder(heaviest[1], LimitError(why))

    def _holders(self) -> Iterator[tuple[int, Any]]:
        """What is held for each client and each session."""
        yield from ((self.held_by(each), each) for each in self.clients)
        yield from ((self.held_behind(each), each) for each in self.sessions)

    def _end_holder(self, holder: Any, error: LimitError) -> None:
        client = holder
        if isinstance(holder, Session):
            client = holder.connection
            self.sessions.end(holder)
            if client is None:
                self.note_error(holder.peer, error.message)
        if client is not None:
            self.outbox.others.append(Close(client, error, at_once=True))

    @property
    def held(self) -> int:
        """Bytes that all stores of this server hold for clients, besides what is stored."""
        return self.budget.held

    def held_by(self, client: ClientT) -> int:
        """What is held for one client, but for its session."""
        return client.held

    def held_behind(self, session: Session) -> int:
        """What is held for one session."""
        return session.held

    def note_error(self, peer: str, reason: str) -> None:
        """A client was refused, or is about to be closed because of what it did or did not do."""
        self.traffic.note_error(self.turn.wall, peer, reason)
        if self.journal is not None:
            self.journal.erred(peer, reason)

    def find_processes(self) -> None:
        """Have the driver find the processes behind clients, if some have no name."""
        if not self.is_finding and any(client.is_nameless for client in self.clients):
            self.is_finding = True
            self.outbox.others.append(DriverTask.PROCESSES)

    def processes_found(self) -> None:
        """Called by the driver when it has called `Clients.name` for each client whose process it found."""
        self.is_finding = False

    def request_report(self, session: Session) -> bool:
        """Have a relay report what it knows, soon."""
        session.request_report()
        return True

    @property
    def has_clients(self) -> bool:
        """Whether a client is connected, or a session may be taken up again."""
        return len(self.clients) > 0 or len(self.sessions) > 0

    # What a server and a relay do in their own ways

    @abstractmethod
    def _make(self, peer: str) -> ClientT:
        """A connection; `peer` is its name in messages."""

    def _leave(self, client: ClientT) -> None:
        """A client will ask for nothing more: forget what it waits for."""
        if client.session is not None:
            self.sessions.lose(client.session)

    def counts(self) -> dict[Op, int]:
        """How many requests of each kind there have been, those within batches included."""
        counts = self.request_table.counts(self.clients.operations)
        for op, count in self.sessions.counts().items():
            counts[op] = counts.get(op, 0) + count
        return counts

    @property
    def plan(self) -> bytes | bytearray | None:
        """What a launcher has reported of its machines, where that is kept."""
        return None

    @property
    def stall(self) -> bytes | bytearray | None:
        """What a launcher has found out about a stalled job, where that is kept."""
        return None

    def has_key(self, _: str, /) -> bool:
        """Whether the store has a key of this name, as scripts name it."""
        return False

    @property
    def waiting(self) -> int:
        """How many connections wait for something."""
        return 0

    @property
    def oldest_wait(self) -> float | None:
        """When the longest wait began; None if nobody waits. A relay says None: the store
        knows of all waits."""
        return None

    def waits_of(self, _: ClientT, /) -> Sequence[Pending]:
        """What a client waits for."""
        return ()

    def waits_behind(self, _: Session, /) -> Sequence[Pending]:
        """What a relay waits for."""
        return ()

    def describe(self, _: Question, /) -> Fields:
        """The fields of a `Snapshot` that a server has and a relay has not, or the other way round."""
        return ()

    @property
    def stalled_seconds(self) -> float:
        """How long nobody has made progress while somebody waited, to a second; 0: somebody has."""
        return self.progress.stalled_seconds(self.turn.now)

    def sum_up(self) -> Snapshot:
        """The figures of a snapshot, but for those that are sums over all connections."""
        from rallypoint.store.rollcall.snapshot import (  # late: many servers are never asked
            Mishap,
            Operation,
            Second,
            Snapshot,
        )

        now, traffic, about = self.turn.now, self.traffic, self.about
        return Snapshot(
            kind=self.kind,
            version=about.version,
            host=about.host,
            pid=about.pid,
            backend=about.backend,
            time=self.turn.wall,
            seconds=now - self.began,
            quiet_seconds=now - self.progress.last,
            stalled_seconds=self.stalled_seconds,
            accepted=self.clients.opened,
            operations=tuple(Operation(*each) for each in traffic.operations(now, self._seen(self.counts()))),
            turn_p50=traffic.turn_quantile(0.5),
            turn_p99=traffic.turn_quantile(0.99),
            history=tuple(Second(*each) for each in traffic.history),
            errors=tuple(Mishap(*each) for each in traffic.errors),
            error_count=traffic.error_count,
            ended_workers=self.sessions.ended_workers,
        )

    def _seen(self, counts: dict[Op, int]) -> dict[Op, int]:
        """These counts without those of this server's workers, which report what their clients ask."""
        brought = self.sessions.counts_of_workers()
        return {op: count - brought.get(op, 0) for op, count in counts.items()} if brought else counts

    def check_invariants(self) -> None:
        """Assert that all parts agree; for tests."""
        self.sessions.check_invariants()
        self.clients.check_invariants()
        held = sum(map(self.held_by, self.clients)) + sum(map(self.held_behind, self.sessions))
        # An ended session is not among them, but its waits are withdrawn slice by slice.
        assert self.budget.held == held or self.budget.ending or self.clients.have_named
