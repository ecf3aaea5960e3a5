"""Asking a server or relay for a snapshot: its clients, and the keys that they wait for. Changes nothing."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Final

from rallypoint.errors import NotOursError, RallypointError
from rallypoint.store.connect.connecting import connect
from rallypoint.store.connect.connection import Connection, who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.rollcall.clients import whole
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.plan import only_store
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.store.wire.encoding import counted_request, request
from rallypoint.store.wire.opcodes import READY, Op
from rallypoint.store.wire.sessions import ASK
from rallypoint.text import shown

MEETING: Final = "/meeting"
"""The suffix of the store that holds the rendezvous of a job, where a server has several stores."""
_NAMES_TOLD: Final = 20


def look(host: str, port: int, question: Question, deadline: Deadline, store: str = "") -> Snapshot:
    """A snapshot of the server or relay at an address. The caller is not counted as a rank there.

    `store` says which of several stores is meant that are there.

    Raises ConnectError, StoreTimeoutError, or NotOursError if it is a store of torch's own.
    """
    who = who_am_i(Role.TOOL)
    with closing(connect(host, port, deadline, who, to_look=True, store=store)) as connection:
        return look_through(connection, format_address(host, port), question, deadline)


def look_at_job(host: str, port: int, question: Question, deadline: Deadline) -> Snapshot:
    """As `look`; but where one job has its store beside others, at that one."""
    found = look(host, port, question, deadline)
    return look_at_round(found, host, port, question, deadline)


def look_at_round(found: Snapshot, host: str, port: int, question: Question, deadline: Deadline) -> Snapshot:
    """What was found; or instead, the store of the round of the only job whose machines meet there."""
    names = found.replication.stores if found.replication is not None else found.stores
    rosters = found.rosters
    meetings = [each for each in names or () if each.endswith(MEETING)]
    if not rosters and len(meetings) == 1:
        rosters = look(host, port, Question(), deadline, meetings[0]).rosters
    name = only_store(rosters)
    if not rosters and names and len(names) == 1 and not found.key_count:
        [name] = names
    if not name or (names is not None and name not in names):
        return replace(found, rosters=rosters)
    return replace(look(host, port, question, deadline, name), rosters=rosters)


def check_name(found: Snapshot, store: str, server: str) -> None:
    """RallypointError if a server has told that it has no store of this name: a look would make one."""
    names = found.stores
    if names is not None and store not in names:
        told = ", ".join(map(shown, sorted(names)[:_NAMES_TOLD]))
        rest = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
        raise RallypointError(
            f"there is no store named {shown(store)} at {server}",
            hint=f"there are: {told}{rest}" if names else "the only store there has no name",
        )


def look_through(connection: Connection, server: str, question: Question, deadline: Deadline) -> Snapshot:
    """A snapshot, over a connection that nobody else uses meanwhile."""
    connection.send(ASK, deadline)
    if connection.read(1, deadline) != READY:
        connection.finish()
        raise NotOursError(
            f"the store at {server} is not Rallypoint's: it tells nobody who its clients are",
            hint="start the job with `rallypoint run`; or serve its store with `rallypoint serve`, and set "
            "TORCHELASTIC_USE_AGENT_STORE=True for its ranks, so that none starts a store of torch's",
        )
    connection.send(request(Op.LOOK, question.to_json()), deadline)
    content = connection.read_blob(deadline)
    connection.finish()
    return whole(Snapshot.from_json(content))


def read_if_there(connection: Connection, wire_key: bytes, deadline: Deadline) -> bytes | None:
    """The value of a key, over a connection that nobody else uses meanwhile; None if there is none."""
    value = None
    connection.send(counted_request(Op.CHECK, [wire_key]), deadline)
    if connection.read(1, deadline) == READY:
        connection.send(request(Op.GET, wire_key), deadline)
        value = connection.read_blob(deadline)
    connection.finish()
    return value
