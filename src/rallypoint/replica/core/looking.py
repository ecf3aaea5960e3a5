"""Looks at the stores of a leader: each is a snapshot of what its replica holds. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol

from rallypoint.replica.core.replica import Replica
from rallypoint.rollcall.question import Question
from rallypoint.server.core.about import About
from rallypoint.server.core.clients import Client
from rallypoint.server.core.looks import Deliver, Looks, LookStep
from rallypoint.server.core.outbox import Outbox
from rallypoint.server.core.sessions import Session
from rallypoint.server.core.store import Core
from rallypoint.server.core.turn import Turn
from rallypoint.wire.limits import Limits

if TYPE_CHECKING:
    from rallypoint.rollcall.snapshot import Replication, Snapshot


class Looked(Protocol):
    """The leader, as far as looks are concerned."""

    replica: Replica
    limits: Limits
    about: About
    outbox: Outbox[Any]
    turn: Turn
    tell_replication: Callable[[], Replication | None]

    @property
    def time(self) -> float:
        """The time, as the log has it."""

    def ask_in(self, name: str) -> bool:
        """Have the relays of a store tell of themselves; False if that cannot be written down now."""

    def caller_of(self, client: Client) -> Client | None:
        """Who it is to the leader; None if it has gone. A replica's client has no connection."""


class LeaderLooks(Looks):
    """The looks at the stores of one leader."""

    __slots__ = ("_by_name", "_leader")

    def __init__(self, leader: Looked) -> None:
        self._leader = leader
        self._by_name: dict[str, Looks] = {}

    def start(self, question: Question, deliver: Deliver, name: str = "") -> None:
        """As `Looks.start`, of the store of this name."""
        looks = self._by_name.get(name)
        if looks is None:
            looks = self._by_name[name] = Looks(_Subject(self._leader, name))
        looks.start(question, deliver)

    def step(self) -> LookStep | Client:
        """As `Looks.step`, of the first store at which somebody looks."""
        for name, looks in list(self._by_name.items()):
            step = looks.step()
            if step is LookStep.DONE:
                del self._by_name[name]
            else:
                return self._leader.caller_of(step) or LookStep.MORE if isinstance(step, Client) else step
        return LookStep.DONE


class _Subject:
    """One store of the leader, to be looked at."""

    is_finding = False

    def __init__(self, leader: Looked, name: str) -> None:
        self._leader = leader
        self._name = name
        self._core = leader.replica.stores.get(name) or Core(leader.limits, leader.replica.turn)
        self.outbox = leader.outbox
        self.clients = self._core.clients
        self.sessions = self._core.sessions
        self.describe = self._core.describe
        self.waits_of = self._core.waits_of
        self.waits_behind = self._core.waits_behind

    @property
    def turn(self) -> Turn:
        leader = self._leader
        return Turn(leader.time, leader.turn.wall - leader.time)

    def find_processes(self) -> None:
        """Processes are not looked for: most clients come from other machines."""

    def ask(self, _: Session) -> bool:
        return self._leader.ask_in(self._name)

    def sum_up(self) -> Snapshot:
        leader, core = self._leader, self._core
        leader.replica.turn.wall_ahead = leader.turn.wall - leader.time
        for client in core.clients:
            caller = leader.caller_of(client)
            if caller is not None:
                client.received, client.sent = caller.received, caller.sent
        kept = leader.tell_replication()
        if kept is not None and self._name and self._name not in leader.replica.stores:
            kept = replace(kept, unknown_store=self._name)
        return replace(core.sum_up(), replication=kept, **asdict(leader.about))
