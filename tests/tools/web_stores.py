"""Stores that exist only as what they tell of themselves, and the page about them, served in this process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from rallypoint.errors import RallypointError
from rallypoint.launch.stacks.activity import MachineActivity, pack
from rallypoint.store.rollcall.identity import Identity, Role, Source
from rallypoint.store.rollcall.plan import Plan
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.snapshot import (
    Barrier,
    Client,
    ClientWait,
    Gone,
    Key,
    Mishap,
    Operation,
    Second,
    Snapshot,
    Value,
)
from rallypoint.store.server.guard.other_users import INSECURE_VARIABLE
from rallypoint.store.server.process.binding import listen
from rallypoint.watch.web.hosting import Access
from rallypoint.watch.web.poller import StoreWatch
from rallypoint.watch.web.serving import WebServer
from rolls import planned

NOW = 1_760_000_000.0
START_SECONDS = 30.0


def job(
    machines: Mapping[str, int],
    *,
    late: Iterable[int] = (),
    gone: Mapping[int, str] | None = None,
    waits: Mapping[int, tuple[str, float]] | None = None,
    barrier: tuple[str, Iterable[int]] | None = None,
    now: float = NOW,
) -> Snapshot:
    """The store of a job that was planned: machines with so many ranks; some are not there, some wait."""
    plan = planned(*machines.items())
    whos = _identities(plan)
    left, waiting, absent = gone or {}, waits or {}, {*late, *(gone or {})}
    here = [rank for rank in range(plan.world_size) if rank not in absent]
    clients = tuple(_client(whos[rank], waiting.get(rank)) for rank in here)
    return Snapshot(
        kind="server",
        version="0.1.0",
        host="node-0",
        pid=4242,
        backend="libuv",
        time=now,
        seconds=300.0,
        quiet_seconds=41.0 if waiting or barrier else 0.2,
        stalled_seconds=41.0 if waiting or barrier else 0.0,
        clients=clients,
        barriers=_barriers(barrier, plan),
        gone=tuple(Gone(rank + 1, whos[rank], 12.0, why) for rank, why in left.items()),
        key_count=len(here),
        stored_bytes=48 * len(here),
        plan=plan.to_json(),
        received=1_000 * len(here),
        sent=2_000 * len(here),
        accepted=plan.world_size,
        operations=(
            Operation("SET", 3 * len(here), 12.0),
            Operation("WAIT", len(here), 4.0),
        ),
        turn_p50=2.1e-5,
        turn_p99=8.4e-5,
        history=tuple(
            Second(now - 120 + each, 400 + (each * 37) % 90, 6e-5 + (each * 13 % 17) * 4e-6, 8, 0)
            for each in range(121)
        ),
        errors=(Mishap(now - 61, "10.0.0.9:51000", "there is no operation 71"),),
        error_count=1,
    )


def telling(snapshot: Snapshot, *machines: MachineActivity, seconds: float = 2.0) -> Snapshot:
    """The same, with a launcher on each machine that has told so many seconds ago what its ranks do."""
    first = len(snapshot.clients) + 1
    launchers = (
        Client(
            first + at,
            f"10.0.1.1:{at}",
            60.0,
            Identity(each.host, 500 + at, role=Role.AGENT, source=Source.HELLO),
            told=pack(each),
            told_seconds=seconds,
        )
        for at, each in enumerate(machines)
    )
    return replace(snapshot, clients=(*snapshot.clients, *launchers))


def _identities(plan: Plan) -> list[Identity]:
    size = plan.world_size
    return [
        Identity(machine.host, 1000 + rank, rank, rank - machine.first, size, Role.RANK, Source.HELLO)
        for machine in plan.machines
        for rank in machine.ranks
    ]


def _client(who: Identity, wait: tuple[str, float] | None) -> Client:
    waits = (ClientWait((wait[0],), 1, wait[1]),) if wait else ()
    return Client(who.rank + 1, f"10.0.0.1:{who.rank}", 60.0, who, 12 + who.rank, 1_000, 2_000, waits)


def _barriers(barrier: tuple[str, Iterable[int]] | None, plan: Plan) -> tuple[Barrier, ...]:
    if barrier is None:
        return ()
    key, ranks = barrier
    members = tuple((rank + 1, 20.0 - rank / 10) for rank in ranks)
    return (Barrier(key, plan.world_size, len(members), members),)


@dataclass
class ScriptedStore:
    """A store that tells what the test wants it to; `look` is asked from other threads."""

    snapshot: Snapshot
    values: dict[str, bytes] = field(default_factory=dict)
    failure: RallypointError | None = None
    looks: int = 0
    moves: bool = True
    """Whether its clock goes on from look to look."""

    def look(self, question: Question) -> Snapshot:
        self.looks += 1
        if self.failure is not None:
            raise self.failure
        if self.moves:
            self.snapshot = _later(self.snapshot)
        found = sorted(key for key in self.values if question.search in key)
        keys = tuple(Key(key, len(self.values[key]), 0, 1, "rank 0") for key in found[: question.keys])
        told = replace(self.snapshot, keys=keys, keys_found=len(found), value=self._value(question))
        return replace(told, key_count=len(self.values)) if self.values else told

    def _value(self, question: Question) -> Value | None:
        data = self.values.get(question.value) if question.value is not None else None
        if question.value is None or data is None:
            return None
        return Value(question.value, len(data), data[: question.value_bytes].hex())


def _later(snapshot: Snapshot) -> Snapshot:
    """The same a second later: what lasts has lasted longer."""
    return replace(
        snapshot,
        time=snapshot.time + 1,
        seconds=snapshot.seconds + 1,
        quiet_seconds=snapshot.quiet_seconds + 1,
        stalled_seconds=snapshot.stalled_seconds and snapshot.stalled_seconds + 1,
        clients=tuple(
            replace(
                each,
                seconds=each.seconds + 1,
                told_seconds=each.told_seconds + 1 if each.told else each.told_seconds,
                waits=tuple(replace(wait, seconds=wait.seconds + 1) for wait in each.waits),
            )
            for each in snapshot.clients
        ),
        barriers=tuple(
            replace(each, members=tuple((member, seconds + 1) for member, seconds in each.members))
            for each in snapshot.barriers
        ),
        gone=tuple(replace(each, seconds=each.seconds + 1) for each in snapshot.gone),
    )


@contextmanager
def page_about(
    store: ScriptedStore, *, token: str = "", port: int = 0, loopback: bool = True
) -> Iterator[str]:
    """The address of the page, served by a thread of this process until the block is left."""
    with page_of(StoreWatch(store.look, "node-0:29500"), token=token, port=port, loopback=loopback) as url:
        yield url


@contextmanager
def page_of(watch: StoreWatch, *, token: str = "", port: int = 0, loopback: bool = True) -> Iterator[str]:
    """The same, of any store that can be watched."""
    listeners = listen("127.0.0.1", port)
    port = listeners[0].getsockname()[1]
    ready = threading.Event()
    server = WebServer(watch, Access(token, loopback, f"rallypoint_{port}"), ready.set)
    thread = threading.Thread(target=server.run, args=(listeners,))
    thread.start()
    try:
        assert ready.wait(START_SECONDS), "the page did not come up"
        with pytest.MonkeyPatch.context() as patch:
            if sys.platform == "win32":  # which does not tell users apart
                patch.setenv(INSECURE_VARIABLE, "1")
            yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
        assert not thread.is_alive()
