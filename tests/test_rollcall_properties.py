"""What holds of every roll, whatever the snapshot; and how long it takes to judge large ones."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rollcall.identity import Identity, Role, Source
from rallypoint.rollcall.judging import judge
from rallypoint.rollcall.roll import State
from rallypoint.rollcall.snapshot import Barrier, Gone, Relay, Snapshot
from rolls import GLOO, big_job, client, part, plan, relay, snapshot, wait

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


@given(SNAPSHOTS)
def test_a_roll_fits_together(whole: Snapshot) -> None:
    roll = judge(whole)
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


@given(SNAPSHOTS)
def test_nothing_is_guessed(whole: Snapshot) -> None:
    """Who is here has said so, or has written a key; who is late can be nobody who is here."""
    roll = judge(whole)
    told = everywhere(whole)
    claimed = {each.who.rank for place in told for each in place.clients}
    written = {number for place in told for number, _ in place.group_writers}
    assert {
        each.rank for each in roll.ranks if each.state in (State.JOINED, State.WAITING)
    } <= claimed | written
    if any(each.state is State.LATE for each in roll.ranks):
        assert all(relay.part is not None and relay.present for place in told for relay in place.relays)
        assert roll.unknown == 0 or len(roll.meetings) == 1


@given(SNAPSHOTS)
def test_a_snapshot_means_the_same_after_its_way_over_the_network(whole: Snapshot) -> None:
    assert judge(Snapshot.from_json(whole.to_json())) == judge(whole)


# Size


def test_sixteen_thousand_ranks_are_judged_in_less_than_a_second() -> None:
    job = big_job(16_384, range(5, 16_384, 97))
    begin = time.process_time()
    roll = judge(job)
    seconds = time.process_time() - begin
    assert (roll.expected, roll.joined, len(roll.missing)) == (16_384, 16_215, 169)
    assert seconds < 1.0


def test_sixteen_thousand_clients_behind_relays_are_told_by_their_keys() -> None:
    """Two thousand relays, whose clients nobody knows but by the keys that the relays wrote."""
    relays = tuple(
        relay(number, part(f"node-{number}", clients=tuple(client(each) for each in range(1, 9))))
        for number in range(2048)
    )
    writers = tuple((each, each // 8) for each in range(16_384) if each % 97 != 5)
    begin = time.process_time()
    roll = judge(snapshot(relays=relays, group_writers=writers))
    seconds = time.process_time() - begin
    assert (roll.joined, roll.unknown) == (16_215, 169)
    assert seconds < 1.0
