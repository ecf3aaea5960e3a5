"""What holds of every roll, whatever the snapshot; and how long it takes to judge large ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rallypoint.store.rollcall.identity import Identity, Role, Source
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.roll import RankState, Roll
from rallypoint.store.rollcall.snapshot import Barrier, Gone, Relay, Snapshot
from rolls import GLOO, big_job, client, part, plan, relay, snapshot, wait

pytestmark = pytest.mark.windows

HOSTS = st.sampled_from(["", "node-a", "node-b", "node-c"])
SMALL = st.integers(0, 5)
SECONDS = st.integers(0, 100).map(float)
WHO = st.builds(
    Identity,
    HOSTS,
    SMALL,
    st.integers(-1, 5),
    world_size=st.sampled_from([-1, 4, 6]),
    role=st.sampled_from(Role),
    source=st.sampled_from(Source),
)
WAITS = st.lists(st.sampled_from([GLOO.format(1), "k", "b:last_worker"]), min_size=1, max_size=2).map(
    lambda keys: (wait(*keys),)
)
CLIENTS = st.lists(
    st.builds(client, SMALL, WHO, waits=st.one_of(st.just(()), WAITS)),
    max_size=6,
    unique_by=lambda each: each.id,
).map(tuple)
BARRIERS = st.lists(
    st.builds(
        Barrier,
        st.sampled_from(["b", "c"]),
        st.sampled_from([4, 6]),
        st.integers(1, 5),
        st.lists(st.tuples(SMALL, SECONDS), max_size=3).map(tuple),
    ),
    max_size=2,
).map(tuple)
WRITERS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=6, unique_by=lambda each: each[0]
)
TOLD = {
    "clients": CLIENTS,
    "barriers": BARRIERS,
    "gone": st.lists(st.builds(Gone, SMALL, WHO, SECONDS, st.just("")), max_size=2).map(tuple),
    "group_writers": WRITERS.map(tuple),
}


def relays_of(parts: st.SearchStrategy[Snapshot]) -> st.SearchStrategy[tuple[Relay, ...]]:
    one = st.builds(
        relay,
        st.integers(6, 9),
        st.one_of(st.none(), parts),
        present=st.booleans(),
        part_seconds=st.sampled_from([0.1, 60.0]),
        waits=st.one_of(st.just(()), WAITS),
    )
    return st.lists(one, max_size=3, unique_by=lambda each: each.id).map(tuple)


LEAVES = st.builds(part, HOSTS, **TOLD)
PARTS = st.builds(part, HOSTS, **TOLD, relays=relays_of(LEAVES))
PLANS = st.sampled_from(["", "junk", plan(("node-a", 2), ("node-b", 2)), plan(("node-a", 6))])
SNAPSHOTS = st.builds(snapshot, **TOLD, relays=relays_of(PARTS), plan=PLANS)


def everywhere(whole: Snapshot) -> list[Snapshot]:
    return [whole, *(each for below in whole.relays if below.part for each in everywhere(below.part))]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SNAPSHOTS)
def test_what_holds_of_every_roll(whole: Snapshot) -> None:
    """One test, as it is the snapshots that take their time to be drawn."""
    roll = judge(whole)
    check_that_it_fits_together(whole, roll)
    check_that_nothing_is_guessed(whole, roll)
    assert judge(Snapshot.from_json(whole.to_json())) == roll, (
        "it means the same after a way over the network"
    )


def check_that_it_fits_together(whole: Snapshot, roll: Roll) -> None:
    numbers = [each.rank for each in roll.ranks]
    assert numbers == sorted(set(numbers))
    assert set(range(roll.expected)) <= set(numbers)
    assert sorted(number for machine in roll.machines for number in machine.ranks) == numbers
    assert roll.joined + len(roll.missing) + len(roll.unseen) == len(numbers)
    clients = [each for told in everywhere(whole) for each in told.clients]
    assert 0 <= roll.unknown <= sum(each.who.role not in (Role.TOOL, Role.AGENT) for each in clients)
    assert [each.seconds for each in roll.awaited] == sorted(
        (each.seconds for each in roll.awaited), reverse=True
    )
    assert all(each.ranks or each.others > 0 for each in roll.awaited)
    assert all(set(each.ranks).isdisjoint(each.missing or ()) for each in roll.gatherings)


def check_that_nothing_is_guessed(whole: Snapshot, roll: Roll) -> None:
    """Who is here has said so, or has written a key; who is late can be nobody who is here."""
    told = everywhere(whole)
    claimed = {each.who.rank for place in told for each in place.clients}
    written = {number for place in told for number, _ in place.group_writers}
    assert {
        each.rank for each in roll.ranks if each.state in (RankState.JOINED, RankState.WAITING)
    } <= claimed | written
    if any(each.state is RankState.LATE for each in roll.ranks):
        assert all(relay.part is not None and relay.present for place in told for relay in place.relays)
        assert roll.unknown == 0 or len(roll.meetings) == 1


# Size


def told_by_hellos(count: int) -> Snapshot:
    return big_job(count, range(5, count, 97))


def told_by_keys(count: int) -> Snapshot:
    """Relays whose clients nobody knows but by the keys that the relays wrote."""
    relays = tuple(
        relay(number, part(f"node-{number}", clients=tuple(client(each) for each in range(1, 9))))
        for number in range(count // 8)
    )
    writers = tuple((each, each // 8) for each in range(count) if each % 97 != 5)
    return snapshot(relays=relays, group_writers=writers)


def judged(job: Snapshot) -> tuple[Roll, float]:
    """The roll, and the CPU seconds that it takes to judge: the least of some."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        roll = judge(job)
        times.append(time.process_time() - begin)
    return roll, min(times)


@pytest.mark.parametrize(
    ("make", "expected", "missing", "unknown"), [(told_by_hellos, 8_192, 85, 0), (told_by_keys, -1, 0, 85)]
)
def test_many_ranks_are_judged_in_no_more_time_for_each_than_few(
    make: Callable[[int], Snapshot], expected: int, missing: int, unknown: int
) -> None:
    """Sixteen thousand take a fifth of a second; were each compared with each, it would be minutes."""
    _, few = judged(make(1_024))
    roll, many = judged(make(8_192))
    assert (roll.expected, roll.joined) == (expected, 8_192 - 85)
    assert (len(roll.missing), roll.unknown) == (missing, unknown)
    tick = 1 / 64 if sys.platform == "win32" else 0.0  # of its clock: few ranks may take less
    assert many < 8 * 4 * max(few, tick)
