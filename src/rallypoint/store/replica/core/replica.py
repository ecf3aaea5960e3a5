"""A store that is made by the records of its log alone: the same records give the same store. Pure.

The core of a store is deterministic: the same inputs in the same order, with the same times, make the same
state and the same replies. So a store is replicated by its inputs. They are a log of records, numbered from
1, on an engine that many machines reach. One process leads: it appends its clients' requests to the log.
Others stand by: they read the log, and apply each record to a replica of their own. Waits, barriers, queues
and the sessions of relays are state like any other, so they survive without code of their own.

A record has a time and entries (`records.Kind`): a client has come, has sent these requests, is gone;
sessions whose time is over are given up; a store is dropped; somebody else leads. Its time is the only time
that a replica knows. Only whole requests are logged, so no replica holds half of one.

Apply after commit. The leader appends requests before it carries them out. When the engine has acknowledged
the record, it applies it exactly as a standby does, and only then replies. So nobody sees what may be lost,
the leader's state is never ahead of the log, nothing is ever rolled back, and all replicas are equal, byte by
byte, at every record. One append is under way at a time; what is asked meanwhile goes into the next record.

Terms. Each leadership has a number, and every write names it: the engine refuses a write of an old term. A
leader that was paused for an hour writes nothing, so it applies and answers nothing either. It renews its
term all the time; a standby that has seen no change for a while acquires the next term, on the condition that
nothing has changed since it looked. It reads the log to its end, and its first record closes all connections
of the term before. Sessions wait for their relays.

Leases. A request that only reads is answered from the applied state, without a record, if nothing that its
client asked before is under way, and if the engine has confirmed the term less than LEASE_SECONDS ago. Others
lead only after a longer silence, so until then this is the only leader. No clocks are compared, but a second
must last about equally long everywhere. Without a lease, reads become entries of a record, which is always
right. The time of the log stands still meanwhile: no session is given up while its relay could not come back.

Checkpoints. From time to time the leader packs its whole state, which takes the place of the records before
it. A checkpoint and the first record of each term name the version and the limits that decide what a request
does: of two processes that differ in that, each would make another store of the same log, so one refuses.

A log holds several stores by name, which ENTER chooses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple
from zlib import crc32

from rallypoint import __version__
from rallypoint.codec import to_text
from rallypoint.errors import ProtocolError, UnknownOperationError
from rallypoint.store.core.clients import Client
from rallypoint.store.core.context import About, Close, CoreFault, DriverTask
from rallypoint.store.core.store import Connection, Core
from rallypoint.store.core.turn import Turn
from rallypoint.store.replica.core.records import (
    DAMAGED,
    FORMAT,
    SAME_VERSION,
    Assembly,
    Entry,
    FormatError,
    Kind,
    pack,
    parse_record,
    seal,
    unlink,
    unpack,
    unseal,
)
from rallypoint.store.replica.log import LostRecordsError
from rallypoint.store.wire.encoding import VALIDATE
from rallypoint.store.wire.limits import Limits

State = Any
"""Plain data, as `packing` knows it."""

_REQUESTS: Final = int(Kind.REQUESTS)
_RULES: Final = (
    *("key_bytes", "value_bytes", "keys_per_request", "request_bytes", "batch_bytes", "connections"),
    *("unsent_bytes", "stored_bytes", "stored_entries", "session_seconds"),
)


def rules_of(limits: Limits) -> bytes:
    """What decides what a request does: the version, and some limits. It stands beside each leader's term."""
    return to_text({"version": __version__, **{name: getattr(limits, name) for name in _RULES}}).encode()


def with_rules(limits: Limits, rules: bytes) -> Limits:
    """These limits, with those that decide as a leader has written them.

    FormatError if that was another version: it may make something else of the same requests.
    """
    try:
        written = json.loads(rules)
        version = written.pop("version", "an unknown version")
        if version != __version__:
            raise FormatError(
                f"the log is written by Rallypoint {version}, and this is {__version__}", hint=SAME_VERSION
            )
        found = {name: written[name] for name in _RULES}
        if not all(type(value) in (int, float) and value > 0 for value in found.values()):
            raise ValueError("a limit is no number, or not positive")
        return replace(limits, **found)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise FormatError(f"the rules of a leader cannot be read: {error!r}", hint=SAME_VERSION) from error


def pack_state(state: State) -> bytes:
    """A checkpoint, of `Replica.plain_state`. It takes long if that is large, and may be done in a thread."""
    return seal(pack(state))


class Output(NamedTuple):
    """What a client is to be sent, and why it is to be closed then, if it is."""

    client: int
    data: bytes
    error: ProtocolError | None = None


Put = Callable[[Output], None]


class Replica:
    """The stores of one log, by their names. Not safe for threads."""

    __slots__ = (
        *("_about", "_assembly", "_clients", "_limits", "_numbers", "faults", "last", "sequence", "stores"),
        *("taken_bytes", "taken_records", "turn"),
    )

    def __init__(self, limits: Limits | None = None, about: About | None = None) -> None:
        self._limits = limits or Limits()
        self._about = about or About()
        self._assembly = Assembly()
        self._clients: dict[int, tuple[Core, Connection]] = {}
        self._numbers: dict[Client, int] = {}
        self.turn = Turn()
        """The time of the record that was applied last."""
        self.sequence = 0
        """The number of the last record of the log."""
        self.last = 0
        """The sum of that record."""
        self.taken_bytes = 0
        """How long the records since the last checkpoint are, as far as it knows; the leader sets it back."""
        self.taken_records = 0
        """How many they are; as `taken_bytes`."""
        self.stores: dict[str, Core] = {}
        self.faults: list[Exception] = []
        """Exceptions that are faults of ours, for the log of the process; whoever writes them clears it."""

    # Records

    def apply(self, data: bytes, put: Put = lambda _: None) -> None:
        """Apply the next entry of the log; `put` is called with everything to be sent because of it.

        Nothing of that is kept here: a short record may ask for a lot. A replica that runs out of memory must
        end: it would differ from the others.
        """
        self.taken_bytes += len(data)
        self.taken_records += 1
        self.sequence += 1
        try:
            self._take(data, put)
        except FormatError as error:
            raise FormatError(
                f"record {self.sequence} of the log: {error.message}", hint=error.hint
            ) from error

    def _take(self, data: bytes, put: Put) -> None:
        data, self.last = unlink(data, self.last), crc32(data)
        record = self._assembly.feed(data)
        if record is None:
            return
        self.turn.now, entries = parse_record(record)
        for kind, client, content in entries:
            if kind == _REQUESTS:
                self._receive(client, content, put)
            else:
                self._do(Entry(Kind(kind), client, content), put)
        for core in self.stores.values():
            while core.engine.is_untidy:
                core.engine.sweep()

    def _receive(self, number: int, data: bytes, put: Put) -> None:
        core, client = self._clients.get(number, (None, None))
        if core is None or client is None:  # it was closed by what it sent before
            return
        error: ProtocolError | None = None
        outbox = core.outbox
        try:
            reply = client.receive(data)
            while outbox.others and client.has_rest:  # a rest is told in the outbox as well
                if reply:
                    put(Output(number, reply))
                reply = client.receive(b"")
        except UnknownOperationError as raised:  # the leader knew it, or it would not stand here
            raise FormatError(raised.message, hint=SAME_VERSION) from raised
        except ProtocolError as raised:
            error, reply = raised, raised.replies
        except MemoryError:
            raise
        except Exception as raised:
            self.faults.append(raised)
            error, reply = ProtocolError("the store failed to carry its request out"), b""
        if error is None and client.is_within_request:
            raise FormatError("an entry ends within a request", hint=DAMAGED)
        if reply or error is not None:
            put(Output(number, reply, error))
        if error is not None:
            self._close(number)
        if outbox.woken or outbox.others:
            self._empty_outbox(core, put)

    def _do(self, entry: Entry, put: Put) -> None:
        if entry.kind is Kind.OPEN:
            self._open(entry, put)
        elif entry.kind is Kind.CLOSE:
            self._close(entry.client)
        elif entry.kind is Kind.TERM:
            for number in list(self._clients):  # of the leader before, which tells them nothing any more
                self._close(number)
            for core in self.stores.values():
                self._empty_outbox(core, put)
            self._take_rules(entry.data)
        elif entry.kind is Kind.EXPIRE:
            for core in self.stores.values():
                core.sessions.expire(self.turn.now)
        else:
            name, _, token = entry.data.partition(b"\0")
            named = self.stores.get(name.decode(errors="surrogateescape"))
            if named is not None:
                self._do_in(named, entry.kind, token)
        for core in self.stores.values():
            self._empty_outbox(core, put)

    def _do_in(self, store: Core, kind: Kind, token: bytes) -> None:
        for session in list(store.sessions):
            if kind is Kind.TELL and session.is_present:
                session.request_report()
            elif kind is Kind.END_SESSION and session.token == token:
                store.sessions.end(session)
        if kind is Kind.DROP and not store.has_clients:
            self.stores = {name: each for name, each in self.stores.items() if each is not store}

    def _take_rules(self, rules: bytes) -> None:
        """The limits are the leader's, in all processes: they would differ if one refused what another
        does not."""
        if rules != rules_of(self._limits):
            self._limits = with_rules(self._limits, rules)
            for name, core in list(self.stores.items()):
                self.stores[name] = self._make()
                self.stores[name].take_state(core.state())

    def _make(self) -> Core:
        return Core(self._limits, self.turn, self._about, has_names=True)

    def _open(self, entry: Entry, put: Put) -> None:
        name, _, peer = entry.data.decode(errors="surrogateescape").partition("\0")
        core = self.stores.get(name)
        if core is None:
            core = self.stores[name] = self._make()
        try:
            client = core.open(peer)
        except ProtocolError as error:
            put(Output(entry.client, b"", error))
            return
        client.receive(VALIDATE)
        self._clients[entry.client] = core, client
        self._numbers[client] = entry.client

    def _close(self, number: int) -> None:
        core, client = self._clients.pop(number, (None, None))
        if core is not None and client is not None:
            del self._numbers[client]
            core.close(client)

    def _empty_outbox(self, core: Core, put: Put) -> None:
        """Send each its notice, and go on with what was left, until there is nothing to do."""
        outbox = core.outbox
        while outbox.woken or outbox.others:
            for client in outbox.take_woken():
                number = self._numbers.get(client)
                if number is not None and (notice := client.take_notice()):
                    put(Output(number, notice))
            for other in outbox.take_others():
                if isinstance(other, Close):
                    number = self._numbers.get(other.client)
                    if number is not None:
                        put(Output(number, b"", other.error))
                        self._close(number)
                elif other is DriverTask.REST:
                    while core.go_on():
                        pass
                elif isinstance(other, CoreFault):
                    if isinstance(other.error, MemoryError):
                        raise other.error
                    self.faults.append(other.error)

    def check_last(self, data: bytes) -> None:
        """LostRecordsError if this, which the log has as the last record that was taken, is another one.

        To be asked before it leads: otherwise a log that has lost its tail, and has grown again by as much,
        looks as if nothing were wrong.
        """
        if crc32(data) != self.last:
            raise LostRecordsError(
                f"record {self.sequence} of the log is another one than before: the engine has lost records",
            )

    # What the leader asks besides

    def client(self, number: int) -> tuple[Core, Connection] | None:
        """A client of this number, and its store."""
        return self._clients.get(number)

    def number_of(self, client: Client) -> int | None:
        """The number of a client; None if it has gone."""
        return self._numbers.get(client)

    @property
    def awaits_sessions(self) -> bool:
        """Whether a session is without its connection, and so may have to be given up."""
        return any(each.connection is None for core in self.stores.values() for each in core.sessions)

    # Checkpoints

    @property
    def can_be_kept(self) -> bool:
        """Whether `state` may be asked: not in the midst of a record."""
        return not self._assembly.is_open

    def state(self) -> bytes:
        """All of it. `Replica.of` makes one that goes on in the same way."""
        return pack_state(self.plain_state())

    def plain_state(self) -> State:
        """The same as plain data, for `pack_state`: it does not change when the replica goes on."""
        assert self.can_be_kept
        stores = [
            [
                name,
                core.state(),
                [(number, client.id) for number, (of, client) in self._clients.items() if of is core],
            ]
            for name, core in self.stores.items()
        ]
        return [FORMAT, self.sequence, self.last, self.turn.now, rules_of(self._limits), stores]

    @classmethod
    def of(cls, state: bytes, limits: Limits | None = None, about: About | None = None) -> Replica:
        """The replica that has given this state; FormatError if this version cannot read it."""
        try:
            version, *rest = unpack(unseal(state))
            if version != FORMAT:
                what = f"a checkpoint has format {version}, and this version knows {FORMAT}"
                raise FormatError(what, hint=SAME_VERSION)
            return cls._of(rest, limits, about)
        except (FormatError, MemoryError):
            raise
        except Exception as error:  # it can be anything, and each part of the state reads its own
            raise FormatError(f"a checkpoint cannot be read: {error!r}", hint=DAMAGED) from error

    @classmethod
    def _of(cls, state: State, limits: Limits | None, about: About | None) -> Replica:
        sequence, last, now, rules, stores = state
        replica = cls(with_rules(limits or Limits(), rules), about)
        replica.sequence, replica.last, replica.turn.now = sequence, last, now
        for name, core_state, here in stores:
            core = replica.stores[name] = replica._make()
            core.take_state(core_state)
            for number, client_id in here:
                client = core.clients.with_id(client_id)
                replica._clients[number] = core, client
                replica._numbers[client] = number
        return replica

    def check_invariants(self) -> None:
        for core in self.stores.values():
            core.check_invariants()
            assert not core.outbox.woken
            assert not core.outbox.others
