"""The clients of a leader: what they ask becomes entries of the log, or is read at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from rallypoint.errors import LimitError, ProtocolError
from rallypoint.store.core.clients import Client, Clients
from rallypoint.store.core.looks import SnapshotCallback
from rallypoint.store.core.outbox import Close, Outbox
from rallypoint.store.core.registry import Sessions
from rallypoint.store.rollcall.identity import Role, is_hello, parse_hello
from rallypoint.store.rollcall.question import Question
from rallypoint.store.wire.encoding import EMPTY_BLOB, blob, encode, pack_i64
from rallypoint.store.wire.opcodes import READ_OPS, READY, Op
from rallypoint.store.wire.parser import RequestParser, RequestTable
from rallypoint.store.wire.sessions import ANNOUNCED, Note, pack_note
from rallypoint.store.wire.whole import Nature, Scanner

_SCANNED_BYTES: Final = 4_096
"""Longer data is parsed, so that one client's flood is cut into slices."""


class Leading(Protocol):
    """What a caller asks of its leader."""

    clients: Clients[Any]
    sessions: Sessions
    outbox: Outbox[Any]
    request_table: RequestTable[Any]
    scanner: Scanner

    def log_requests(self, caller: Any, data: bytes) -> None:
        """Have some whole requests carried out, in their turn."""

    def may_read(self, name: str, awaited: Sequence[bytes]) -> bool:
        """Whether what the leader holds is the truth, and all of these keys are there."""

    def read(self, name: str, data: bytes) -> bytes:
        """The replies to requests that only read."""

    def trouble(self) -> Note:
        """What keeps the leader from going on."""

    def look_at(self, name: str, question: Question, deliver: SnapshotCallback) -> None:
        """Make a snapshot of a store."""


class Caller(Client):
    """One client of the leader."""

    __slots__ = (
        "_has_only_looked",
        "_is_looking",
        "_leader",
        "_most_bytes",
        "_outgoing",
        "_outgoing_bytes",
        "_woken",
        "has_left",
        "is_known",
        "name",
        "pending",
    )

    def __init__(self, leader: Leading, peer: str) -> None:
        super().__init__(leader.clients, leader.sessions, peer)
        self._leader = leader
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._most_bytes = self._context.limits.unsent_bytes
        self._woken = leader.outbox.woken
        self._is_looking = False
        self._has_only_looked = True  # so far
        self.name = ""
        """Which store it means."""
        self.is_known = False
        """Whether the log knows of it."""
        self.has_left = False
        """Whether the log knows that it has gone, or will."""
        self.pending = 0
        """How many of its entries are not committed."""
        self.read_with(RequestParser(self, leader.request_table))
        self.receive = self._receive

    def _receive(self, data: bytes) -> bytes:
        parser = self._parser
        assert parser is not None
        if not self._has_only_looked and parser.is_between_requests and 0 < len(data) <= _SCANNED_BYTES:
            nature, awaited = self._leader.scanner.classify(data)
            if nature is Nature.READS and self._may_read(awaited):
                return self._read(data)
            if nature is not Nature.OTHER:
                self._leader.log_requests(self, data)
                return b""
        return parser.feed(data)

    def _may_read(self, awaited: Sequence[bytes]) -> bool:
        """Whether requests that only read can be answered now, without a record."""
        return not self.pending and self._leader.may_read(self.name, awaited)

    def _read(self, data: bytes) -> bytes:
        reply = self._leader.read(self.name, data)
        return self.take_notice() + reply if self._outgoing else reply

    # What the parser calls

    def get(self, key: bytes) -> bytes:
        return self.carry(Op.GET, [key], b"")

    def carry(self, op: Op, blobs: list[bytes], tail: bytes) -> bytes:
        if self._has_only_looked and (answer := self._answer_tool(op, blobs)):
            return answer
        self._has_only_looked = False
        data = encode(op, blobs, tail)
        if (op in READ_OPS or op is Op.WAIT) and self._may_read(blobs if op is Op.WAIT else ()):
            return self._read(data)
        self._leader.log_requests(self, data)
        return b""

    def _answer_tool(self, op: Op, blobs: list[bytes]) -> bytes:
        """What a tool asks that looks: first who it is, then whether it may. Nothing, if it asks for more.

        No record is needed, so it is answered also while the engine is away.
        """
        if op is Op.DELETE_KEY and is_hello(blobs[0]):
            who = parse_hello(blobs[0])
            if who is not None and who.role is Role.TOOL:
                self.greet(blobs[0])
                return pack_i64(0)
        elif op is Op.CHECK and blobs == [ANNOUNCED] and self.who.role is Role.TOOL:
            return READY
        return b""

    def enter(self, name: bytes) -> bytes:
        if self.is_known:
            raise ProtocolError("it says which store it means behind its first request")
        if b"\0" in name:
            raise ProtocolError("the name of a store has no zero byte")
        self.name = name.decode(errors="surrogateescape")
        return b""

    def beat(self) -> bytes:
        """Who may lead no more says so: the relay looks for another one then."""
        if self._leader.may_read(self.name, ()):
            return EMPTY_BLOB
        return pack_note(self._leader.trouble())

    def look(self, question: bytes) -> bytes:
        if self._is_looking:
            raise ProtocolError("a second LOOK before the first is answered")
        self._leader.look_at(self.name, Question.from_json(question), self._take_look)
        self._is_looking = True
        return b""

    def tell(self, _: bytes) -> bytes:
        """Forgotten: launchers tell their relays, and the log is no place for it."""
        return b""

    def _take_look(self, snapshot: bytes) -> None:
        self._is_looking = False
        if self in self._leader.clients:
            self.take(blob(snapshot))

    # What it is sent

    @property
    def is_owed(self) -> bool:
        return self._is_looking or self.pending > 0

    def take(self, data: bytes) -> None:
        """It is to be sent this. If that is too much, it is closed instead."""
        self._outgoing_bytes += len(data)
        if self._outgoing_bytes > self._most_bytes:
            why = f"it asked for more than {self._most_bytes:,} bytes at once, the limit unsent_bytes"
            self._leader.outbox.others.append(Close(self, LimitError(why), at_once=True))
            return
        if not self._outgoing:
            self._woken.append(self)
        self._outgoing.append(data)

    def take_notice(self) -> bytes:
        outgoing, self._outgoing = self._outgoing, []
        self._outgoing_bytes = 0
        return outgoing[0] if len(outgoing) == 1 else b"".join(outgoing)
