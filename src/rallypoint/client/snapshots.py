"""Snapshots of a server or relay, fetched without changing it; the roll of the job in them; and the text on
missing ranks for the error of a wait.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from rallypoint.errors import NotOursError, RallypointError, StoreTimeoutError
from rallypoint.store.connect.connecting import connect, first_to_answer
from rallypoint.store.connect.connection import Connection, ConnectionPool, who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import format_address
from rallypoint.store.rollcall.clients import whole
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.judgement import judge, trouble_of
from rallypoint.store.rollcall.plan import only_store
from rallypoint.store.rollcall.question import Question, owing_rank
from rallypoint.store.rollcall.roll import (
    Gathering,
    RankState,
    Roll,
    headline,
    missing_text,
    owed_text,
    unseen_text,
)
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.store.wire.encoding import counted_request, request
from rallypoint.store.wire.opcodes import READY, Op
from rallypoint.store.wire.sessions import ASK
from rallypoint.text import shown

MEETING: Final = "/meeting"
"""The suffix of the store that holds the rendezvous of a job, where a server has several stores."""
HEAD: Final = "rallypoint/head"
"""The key where a launcher says where the store is, `[host, port, name]`, for ranks behind a relay."""

_NAMES_TOLD: Final = 20
_REMARKS: Final = 2
"""How many of a roll's remarks an error has."""


def fetch_snapshot(host: str, port: int, question: Question, deadline: Deadline, store: str = "") -> Snapshot:
    """Fetch a snapshot of the server or relay at an address. The caller does not count as a rank there.

    `store` is the name of the store, if the server has several.

    Raises ConnectError, StoreTimeoutError, or NotOursError if it is a store of torch's own.
    """
    who = who_am_i(Role.TOOL)
    with closing(connect(host, port, deadline, who, snapshot_only=True, store=store)) as connection:
        return fetch_snapshot_over(connection, format_address(host, port), question, deadline)


def fetch_job_snapshot(host: str, port: int, question: Question, deadline: Deadline) -> Snapshot:
    """As `fetch_snapshot`, but of the store of the only job, if the server has that beside others."""
    found = fetch_snapshot(host, port, question, deadline)
    return fetch_round_snapshot(found, host, port, question, deadline)


def fetch_round_snapshot(
    found: Snapshot, host: str, port: int, question: Question, deadline: Deadline
) -> Snapshot:
    """A snapshot of the round's store, if one job has its rendezvous at this address; otherwise `found`."""
    names = found.replication.stores if found.replication is not None else found.stores
    rosters = found.rosters
    meetings = [each for each in names or () if each.endswith(MEETING)]
    if not rosters and len(meetings) == 1:
        rosters = fetch_snapshot(host, port, Question(), deadline, meetings[0]).rosters
    name = only_store(rosters)
    if not rosters and names and len(names) == 1 and not found.key_count:
        [name] = names
    if not name or (names is not None and name not in names):
        return replace(found, rosters=rosters)
    return replace(fetch_snapshot(host, port, question, deadline, name), rosters=rosters)


def check_name(found: Snapshot, store: str, server: str) -> None:
    """RallypointError if a server that lists its stores has none of this name: a request would create it."""
    names = found.stores
    if names is not None and store not in names:
        told = ", ".join(map(shown, sorted(names)[:_NAMES_TOLD]))
        rest = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
        raise RallypointError(
            f"there is no store named {shown(store)} at {server}",
            hint=f"there are: {told}{rest}" if names else "the only store there has no name",
        )


def fetch_snapshot_over(
    connection: Connection, server: str, question: Question, deadline: Deadline
) -> Snapshot:
    """A snapshot, over a connection that no other thread uses meanwhile."""
    connection.send(ASK, deadline)
    if connection.read(1, deadline) != READY:
        connection.finish()
        raise NotOursError(
            f"the store at {server} is not Rallypoint's: it tells nobody who its clients are",
            hint="start the job with `rallypoint run`; or serve its store with `rallypoint serve`, and set "
            "TORCHELASTIC_USE_AGENT_STORE=True for its ranks, so that none starts a store of torch's",
        )
    connection.send(request(Op.SNAPSHOT, question.to_json()), deadline)
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


# The roll of the job


def find_roll(pool: ConnectionPool, server: tuple[str, int], deadline: Deadline) -> Roll | None:
    """The roll of the whole job; None behind a relay, if no launcher has said where its server is.

    Of a relay that does not reach its server, what it can tell.
    """
    snapshot = fetch_snapshot(*server, Question(), deadline)
    if snapshot.kind != "relay" or trouble_of(snapshot)[0]:
        return judge(snapshot)
    with pool.lend(deadline) as connection:
        head = read_head(connection, deadline)
    return roll_at(head[:2], deadline, head[2]) if head is not None else None


def find_roll_behind(relay: tuple[str, int], head: tuple[str, int], deadline: Deadline) -> Roll:
    """The roll of the job, at its store: at the head, or where the relay knows that one that moves may be.

    If none of these places answers, what the relay can tell.
    """
    try:
        part = fetch_snapshot(*relay, Question(), Deadline(deadline.remaining / 4))
    except RallypointError:
        return roll_at(head, deadline)
    places: tuple[tuple[str, int], ...] = (head,)
    store = ""
    if part.upstream is not None and (part.upstream.moves or part.upstream.store):
        places, store = part.upstream.addresses, part.upstream.store
    try:
        return first_to_answer(places, lambda host, port: roll_at((host, port), deadline, store))
    except RallypointError:
        return judge(part)


def roll_at(server: tuple[str, int], deadline: Deadline, store: str = "") -> Roll:
    """The roll of the job whose store this is."""
    return judge(fetch_snapshot(*server, Question(), deadline, store))


def read_head(connection: Connection, deadline: Deadline) -> tuple[str, int, str] | None:
    """Where the server of a relay is, and the name of the store there; None if no launcher has said so.

    ValueError, TypeError for nonsense.
    """
    value = read_if_there(connection, b"/" + HEAD.encode(), deadline)
    if value is None:
        return None
    host, port, *name = json.loads(value)
    return str(host), int(port), "".join(name)


# Who is missing, in words


@dataclass(frozen=True)
class Absence:
    """The missing ranks: as a part of a message, and as numbers."""

    text: str = ""
    ranks: tuple[int, ...] = ()

    def named_in(self, error: StoreTimeoutError) -> StoreTimeoutError:
        """The error with the missing ranks in it; the error as it is if they are not known."""
        if not self.text:
            return error
        message = f"{error.message}; {self.text}"
        return StoreTimeoutError(message, hint=error.hint, keys=error.keys, missing=self.ranks)


NOT_KNOWN: Final = Absence()


def absent_for_keys(roll: Roll | None, keys: Iterable[str]) -> Absence:
    """The ranks that have not joined, and the rank that is here and should have written one of the keys.

    If nobody is missing, also what else is odd: a relay that is silent, for one, with all ranks behind it.
    """
    if roll is None or roll.expected < 0:
        return NOT_KNOWN
    missing = tuple(each.rank for each in roll.missing)
    wanted = {key for key in keys if owing_rank(key) not in missing}
    owed = next((owed_text(roll, each) for each in roll.awaited if each.key in wanted and each.owed), "")
    odd = () if missing else roll.remarks[:_REMARKS]
    return Absence("; ".join(filter(None, (headline(replace(roll, awaited=())), owed, *odd))), missing)


def absent_at_barrier(roll: Roll | None, key: str, size: int) -> Absence:
    """The ranks that have not come to a barrier, and those that have not joined at all."""
    if roll is None:
        return NOT_KNOWN
    found = next((each for each in roll.gatherings if (each.key, each.size) == (key, size)), None)
    joined = absent_for_keys(roll, ())
    if found is None:
        return joined
    arrived = f"{found.arrived:,} of {size:,} have arrived"
    if found.missing is None:
        return replace(joined, text="; ".join(filter(None, (arrived, joined.text, *roll.remarks[:_REMARKS]))))
    there = f"{arrived}; missing there: {_machines_of(roll, found)}"
    more = "" if found.missing == joined.ranks else f"; {joined.text}"
    return Absence(there + more, found.missing)


def absent_workers(roll: Roll | None, size: int) -> Absence:
    """The workers, of `size`, that have not come."""
    if roll is None or roll.expected != size:  # the workers may be others than the ranks of the job
        return NOT_KNOWN
    return Absence(absent_text(roll), tuple(each.rank for each in roll.missing))


def absent_text(roll: Roll) -> str:
    """The ranks that are missing, and those that may be here, unseen; empty if all are here."""
    named = {"missing": missing_text(roll), "not seen": unseen_text(roll)}
    return "; ".join(f"{word}: {text}" for word, text in named.items() if text)


def _machines_of(roll: Roll, found: Gathering) -> str:
    """The ranks that are missing at a barrier, with their machines; some of these ranks may have joined."""
    missing = set(found.missing or ())
    late = tuple(replace(each, state=RankState.LATE) for each in roll.ranks if each.rank in missing)
    return missing_text(replace(roll, ranks=late))
