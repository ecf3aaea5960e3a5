"""What a snapshot means: who is here, who is missing, who waits; and that nothing is guessed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.store.rollcall.identity import Identity, Role, Source
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.plan import MOST_RANKS
from rallypoint.store.rollcall.roll import Gathering, MachineRanks, RankState, Roll, Standing
from rallypoint.store.rollcall.snapshot import Barrier, Gone, Snapshot
from rolls import GLOO, client, part, plan, rank, ranks, relay, snapshot, wait

pytestmark = pytest.mark.windows

TWO_NODES = plan(("node-a", 4), ("node-b", 4))


def states(roll: Roll) -> dict[int, str]:
    return {each.rank: each.state.value for each in roll.ranks}


def standing(roll: Roll, number: int) -> Standing:
    return next(each for each in roll.ranks if each.rank == number)


# Who is here


def test_a_rank_is_the_sum_of_its_connections() -> None:
    one = client(
        1, rank(3, "node-b"), wait("a", seconds=2.0), seconds=9.0, operations=5, received=10, sent=100
    )
    other = client(
        2, rank(3, "node-b"), wait("b", seconds=7.0), seconds=8.0, operations=2, received=1, sent=1
    )
    (found,) = judge(snapshot(clients=(one, other))).ranks
    assert found == Standing(
        rank=3,
        state=RankState.WAITING,
        host="node-b",
        pid=103,
        source=Source.HELLO,
        seconds=9.0,
        waits=("b", "a"),
        wait_seconds=7.0,
        operations=7,
        received=11,
        sent=101,
    )


def test_the_most_reliable_connection_tells_who_a_rank_is() -> None:
    by_process = client(1, Identity("node-x", 7, 3, source=Source.PROCESS))
    by_hello = client(2, Identity("node-b", 8, 3, 1, role=Role.RANK, source=Source.HELLO))
    (found,) = judge(snapshot(clients=(by_process, by_hello))).ranks
    assert (found.host, found.pid, found.local_rank, found.source) == ("node-b", 8, 1, Source.HELLO)


@pytest.mark.parametrize("role", [Role.TOOL, Role.AGENT])
def test_tools_and_agents_count_nowhere(role: Role) -> None:
    who = Identity("node-a", 5, rank=0, world_size=8, role=role, source=Source.HELLO)
    roll = judge(snapshot(clients=(client(1, who, wait("k")),), group_writers=((2, 1),)))
    assert (roll.expected, roll.ranks, roll.unknown, roll.awaited) == (-1, (), 0, ())


# Known by keys


def behind(told: Snapshot | None, *written: int, planned: bool = False) -> Snapshot:
    """A server whose only relay has written the keys of some ranks; a planned one has three ranks itself."""
    writers = tuple((each, 7) for each in written)
    found = snapshot(relays=(relay(7, told),), group_writers=writers)
    return replace(found, clients=ranks(range(3), "node-a"), plan=TWO_NODES) if planned else found


THREE = dict.fromkeys(range(3), "joined on node-a")


STRANGER = part("node-c", clients=(client(1),))
WAITING = client(2, Identity(), wait("k"))
STRANGERS = part("node-c", clients=(client(1), client(2)))
BY_KEYS: dict[str, tuple[Snapshot, dict[int, str], int]] = {
    "what a client says counts more": (
        snapshot(clients=ranks([2]), group_writers=((0, 3),)),
        {2: "joined on "},
        0,
    ),
    "one client may write those of several ranks": (
        snapshot(clients=(client(1),), group_writers=((0, 1), (1, 1))),
        {0: "joined on ", 1: "joined on "},
        0,
    ),
    "one that came by a relay is of one of its unknown clients": (
        behind(part("node-b", clients=(client(1), client(2), client(3, rank(4)))), 5),
        {4: "joined on node-b", 5: "joined on node-b"},
        1,
    ),
    "a relay may know the writer itself": (
        behind(part("node-c", clients=(client(1), WAITING), group_writers=((5, 2),)), 5),
        {5: "waiting on node-c"},
        1,
    ),
    "a relay of relays does not tell on which machine the writer is": (
        behind(part("node-b", relays=(relay(1, STRANGER),)), 5),
        {5: "joined on "},
        0,
    ),
    "the nearest relay knows best where the writer is": (
        behind(part("node-b", relays=(relay(1, STRANGERS),), group_writers=((5, 1),)), 5),
        {5: "joined on node-c"},
        1,
    ),
    "a relay that has told nothing yet has written for somebody": (behind(None, 5), {5: "joined on "}, 0),
    "a writer that is not there any more has gone": (
        behind(part("node-b", clients=(client(3, rank(4)),)), 5),
        {4: "joined on node-b", 5: "gone on "},
        0,
    ),
    "of more writers than clients nobody knows who has gone": (
        behind(STRANGER, 4, 5),
        {4: "unseen on ", 5: "unseen on "},
        1,
    ),
    "who has come back behind a relay has not gone": (
        behind(replace(STRANGER, gone=(Gone(2, rank(5), 9.0, ""),)), 5),
        {5: "joined on node-c"},
        0,
    ),
    "who has gone from a relay was on its machine": (
        behind(part("node-b", gone=(Gone(1, rank(4), 9.0, ""),))),
        {4: "gone on node-b"},
        0,
    ),
    "of which nothing tells a rank": (snapshot(clients=(client(1), client(2, Identity("node-a", 5)))), {}, 2),
    "a process with several connections is one stranger": (
        snapshot(clients=tuple(client(number, Identity("node-a", 7)) for number in (1, 2, 3))),
        {},
        1,
    ),
    "on the machine of its relay, unless it says otherwise": (
        snapshot(
            clients=ranks([0]),
            relays=(
                relay(
                    2,
                    part(
                        "node-b",
                        clients=(client(1, rank(4)), client(2, rank(5, "node-c"))),
                        relays=(relay(9, part("node-d", clients=(client(1, rank(6)),))),),
                    ),
                ),
            ),
        ),
        {0: "joined on ", 4: "joined on node-b", 5: "joined on node-c", 6: "joined on node-d"},
        0,
    ),
    "those who have gone said how many they were": (
        snapshot(gone=(Gone(1, rank(0, "node-a", world_size=2), 3.0, ""),)),
        {0: "gone on node-a", 1: "late on "},
        0,
    ),
    "who may be an unknown client is not late": (
        snapshot(clients=(*ranks([0, 1], world_size=4), client(9))),
        {0: "joined on ", 1: "joined on ", 2: "unseen on ", 3: "unseen on "},
        1,
    ),
    "an unknown client of another machine is no excuse": (
        behind(part("node-b", clients=(client(1),)), planned=True),
        {**THREE, 3: "late on node-a", **dict.fromkeys(range(4, 8), "unseen on node-b")},
        1,
    ),
    "a machine may have another name than in the plan": (
        behind(part("node-b.cluster", clients=(client(1),)), planned=True),
        {**THREE, 3: "unseen on node-a", **dict.fromkeys(range(4, 8), "unseen on node-b")},
        1,
    ),
    "the settled clients of a relay are nobody else": (
        behind(part("node-b", clients=(client(1), client(2))), 4, 5, planned=True),
        {
            **THREE,
            3: "late on node-a",
            **dict.fromkeys((4, 5), "joined on node-b"),
            **dict.fromkeys((6, 7), "late on node-b"),
        },
        0,
    ),
}


@pytest.mark.parametrize(("told", "found", "unknown"), BY_KEYS.values(), ids=list(BY_KEYS))
def test_who_is_known_by_keys_and_relays(told: Snapshot, found: dict[int, str], unknown: int) -> None:
    roll = judge(told)
    assert {each.rank: f"{each.state.value} on {each.host}" for each in roll.ranks} == found
    assert roll.unknown == unknown


# Who is expected


def test_a_plan_says_who_is_expected_and_where() -> None:
    roll = judge(snapshot(clients=ranks([0, 1, 2, 4, 5, 6]), plan=TWO_NODES))
    assert (roll.expected, roll.joined) == (8, 6)
    assert [(each.rank, each.state, each.host) for each in roll.missing] == [
        (3, RankState.LATE, "node-a"),
        (7, RankState.LATE, "node-b"),
    ]
    assert roll.machines == (MachineRanks("node-a", (0, 1, 2, 3)), MachineRanks("node-b", (4, 5, 6, 7)))


def test_ranks_say_how_many_they_are() -> None:
    roll = judge(snapshot(clients=ranks([0, 2], world_size=3)))
    assert (roll.expected, states(roll)) == (3, {0: "joined", 1: "late", 2: "joined"})
    assert not roll.is_complete
    assert judge(snapshot(clients=ranks(range(3), world_size=3))).is_complete


@pytest.mark.parametrize(
    ("told", "expected", "missing", "remark"),
    [
        (
            snapshot(clients=(*ranks([0], world_size=2), *ranks([1], world_size=4))),
            4,
            [2, 3],
            "ranks disagree about how many they are: 2 and 4",
        ),
        (
            snapshot(clients=ranks(range(8), world_size=16), plan=TWO_NODES),
            8,
            [],
            "8 ranks are planned, but they say that they are 16",
        ),
        (
            snapshot(clients=ranks([*range(7), 9]), plan=TWO_NODES),
            8,
            [7],
            "beyond the 8 ranks that are expected, there are: 9",
        ),
        (
            snapshot(clients=ranks([0], world_size=MOST_RANKS + 1)),
            -1,
            [],
            "a rank says that there are 131,073 of them, which is not believed of 1 client",
        ),
    ],
)
def test_what_does_not_fit_together_is_remarked(
    told: Snapshot, expected: int, missing: list[int], remark: str
) -> None:
    roll = judge(told)
    assert (roll.expected, [each.rank for each in roll.missing], roll.remarks) == (
        expected,
        missing,
        (remark,),
    )


def test_one_forged_hello_changes_little() -> None:
    """What the others say counts more, and a large number counts only with many clients."""
    forged = ranks([9], world_size=4096)
    assert judge(snapshot(clients=(*ranks(range(8), world_size=8), *forged))).expected == 8
    for size, count in ((MOST_RANKS, 1), (4096 + 64 * 9, 8)):
        roll = judge(snapshot(clients=ranks(range(count), world_size=size)))
        assert (roll.expected, len(roll.ranks)) == (-1, count)
    assert judge(snapshot(clients=ranks(range(8), world_size=4096 + 64 * 8))).expected == 4096 + 64 * 8


def test_many_barriers_of_all_ranks_do_not_each_list_all_ranks() -> None:
    """A client can wait at many of them at once, under names that it makes up."""
    keys = [f"{number}/store_based_barrier_key:0:last_worker" for number in range(200)]
    waits = [wait(key, seconds=float(at)) for at, key in enumerate(keys)]
    roll = judge(snapshot(clients=(client(1, rank(0, world_size=1000), *waits),)))
    listed = [each.key for each in roll.gatherings if each.missing is not None]
    assert len(roll.gatherings) == 200
    assert listed == [key.removesuffix(":last_worker") for key in reversed(keys)][: len(listed)]
    assert 0 < len(listed) < 50


def test_a_relay_does_not_know_who_is_expected() -> None:
    roll = judge(part("node-b", clients=ranks([4, 5], world_size=8), plan=TWO_NODES))
    assert (roll.expected, states(roll)) == (-1, {4: "joined", 5: "joined"})
    assert {each.host for each in roll.ranks} == {"node-b"}
    assert "this is a relay" in roll.remarks[0]


# Late, unseen, gone


@pytest.mark.parametrize(
    "silent",
    [
        relay(7, None),
        relay(7, part("node-b"), present=False),
        relay(7, part("node-b"), part_seconds=60.0),
    ],
)
def test_behind_a_silent_relay_may_be_anybody(silent: Any) -> None:
    roll = judge(snapshot(clients=ranks(range(4), "node-a"), relays=(silent,), plan=TWO_NODES))
    assert {each.rank for each in roll.unseen} == {4, 5, 6, 7}


def test_gone_is_who_was_here_and_has_no_client() -> None:
    gone = (
        Gone(1, rank(0, "node-a"), 9.0, "first"),
        Gone(2, rank(1, "node-a"), 5.0, ""),
        Gone(3, rank(0, "node-a"), 2.0, "last"),
        Gone(4, Identity("node-a", 4, role=Role.TOOL), 1.0, ""),
    )
    roll = judge(snapshot(clients=ranks([1]), gone=gone, plan=plan(("node-a", 2))))
    assert states(roll) == {0: "gone", 1: "joined"}
    assert (standing(roll, 0).seconds, standing(roll, 0).why) == (2.0, "last")
    assert [each.rank for each in roll.missing] == [0]


# Who waits


def test_waits_are_by_key_and_the_longest_comes_first() -> None:
    clients = (
        client(1, rank(0), wait(GLOO.format(3), "other", seconds=5.0)),
        client(2, rank(1), wait(GLOO.format(3), seconds=9.0)),
        client(3, Identity(), wait("other", seconds=1.0)),
        client(4, Identity(), wait("other", seconds=2.0)),
    )
    first, second = judge(snapshot(clients=clients)).awaited
    assert (first.key, first.ranks, first.others, first.seconds) == (GLOO.format(3), (0, 1), 0, 9.0)
    assert (first.owed_by, first.owed, first.is_barrier) == (3, "rank 3", False)
    assert (second.key, second.ranks, second.others, second.seconds) == ("other", (0,), 2, 5.0)
    assert (second.owed_by, second.owed) == (-1, "")


def test_what_a_silent_relay_has_told_is_not_counted_twice() -> None:
    told = part("node-b", clients=(client(1, rank(4), wait("k", seconds=30.0)),))
    silent = relay(7, told, present=False, waits=(wait("k", "new"),))
    found = {each.key: (each.ranks, each.others) for each in judge(snapshot(relays=(silent,))).awaited}
    assert found == {"k": ((4,), 0), "new": ((), 1)}


def test_the_waits_of_a_relay_that_tells_of_its_clients_are_theirs() -> None:
    told = part("node-b", clients=(client(1, rank(4), wait("k")),))
    roll = judge(snapshot(relays=(relay(7, told, waits=(wait("k"), wait("over"))),)))
    assert [(each.key, each.ranks, each.others) for each in roll.awaited] == [("k", (4,), 0)]


# Barriers


def at_barrier(**told: Any) -> Roll:
    barrier = Barrier("b", 8, 3, ((1, 9.0), (2, 8.0), (3, 7.0)))
    return judge(snapshot(**{"barriers": (barrier,), "clients": ranks([0, 1, 2]), "plan": TWO_NODES, **told}))


def test_who_has_not_come_to_a_barrier_of_all_and_who_waits_there() -> None:
    roll = at_barrier()
    assert roll.gatherings == (Gathering("b", 8, 3, (0, 1, 2), (3, 4, 5, 6, 7), 9.0),)
    assert standing(roll, 2).state is RankState.WAITING
    assert (standing(roll, 2).waits, standing(roll, 2).wait_seconds) == (("b",), 7.0)
    (found,) = roll.awaited
    assert (found.key, found.is_barrier, found.ranks, found.others) == ("b", True, (0, 1, 2), 0)


def test_the_last_one_owes_the_barrier() -> None:
    barrier = Barrier("b", 4, 3, ((1, 9.0), (2, 8.0), (3, 7.0)))
    (found,) = at_barrier(barriers=(barrier,), plan=plan(("node-a", 4))).awaited
    assert (found.owed_by, found.owed) == (3, "rank 3")


@pytest.mark.parametrize(
    "told",
    [
        {"plan": ""},
        {"plan": plan(("node-a", 9))},
        {"clients": (*ranks([0, 1]), client(3))},
        {"relays": (relay(7, None),)},
    ],
    ids=["nobody is expected", "not of all", "one is not known", "a relay is silent"],
)
def test_else_nobody_knows_who_has_not_come(told: dict[str, Any]) -> None:
    (found,) = at_barrier(**told).gatherings
    assert (found.arrived, found.missing) == (3, None)


def test_the_members_of_a_barrier_behind_relays() -> None:
    deep = part("node-c", clients=(client(5, rank(6)),), barriers=(Barrier("b", 8, 1, ((5, 4.0),)),))
    told = part(
        "node-b",
        clients=(client(1, rank(4)), client(2, rank(5))),
        barriers=(Barrier("b", 8, 2, ((1, 6.0), (9, 4.0))), Barrier("b", 9, 1, ((2, 1.0),))),
        relays=(relay(9, deep),),
    )
    barrier = Barrier("b", 8, 3, ((1, 9.0), (7, 6.0)))
    roll = at_barrier(clients=ranks([0]), relays=(relay(7, told),), barriers=(barrier,))
    other, found = sorted(roll.gatherings, key=lambda each: -each.size)
    assert (found.arrived, found.ranks, found.missing) == (3, (0, 4, 6), (1, 2, 3, 5, 7))
    assert (other.size, other.ranks) == (9, (5,))


def test_the_server_counts_those_of_whom_its_relays_do_not_tell() -> None:
    told = part("node-b", barriers=(Barrier("b", 8, 2, ((9, 6.0),)),), relays=(relay(9, part("node-c")),))
    barrier = Barrier("b", 8, 3, ((1, 9.0), (7, 6.0)))
    (found,) = at_barrier(clients=ranks([0]), relays=(relay(7, told),), barriers=(barrier,)).gatherings
    assert (found.arrived, found.ranks, found.missing) == (3, (0,), None)


def test_torchs_barrier_of_all_is_a_barrier() -> None:
    key = "default_pg/store_based_barrier_key:0:last_worker"
    clients = tuple(client(number + 1, rank(number), wait(key)) for number in range(7))
    roll = judge(snapshot(clients=(*clients, *ranks([7])), plan=TWO_NODES))
    (found,) = roll.gatherings
    assert found.key == "default_pg/store_based_barrier_key:0"
    assert (found.size, found.arrived, found.missing) == (8, 7, (7,))
    assert [(each.key, each.is_barrier, each.owed_by) for each in roll.awaited] == [(found.key, True, 7)]
    assert standing(roll, 0).waits == (key,)


def test_of_torchs_other_barriers_nobody_knows_the_size() -> None:
    clients = (client(1, rank(0), wait("store_based_barrier_key:3:last_worker")),)
    (found,) = judge(snapshot(clients=clients, plan=TWO_NODES)).gatherings
    assert (found.size, found.arrived, found.missing) == (-1, 1, None)


def test_those_of_a_larger_job_before_are_not_missing_in_a_smaller_one() -> None:
    before = tuple(Gone(number, rank(number, "node-a", world_size=8), 99.0, "") for number in range(8))
    written = tuple((number, 0) for number in range(8))
    here = ranks(range(4), "node-a", world_size=4)
    found = judge(snapshot(clients=here, gone=before, group_writers=written))
    assert (found.expected, found.joined, found.missing) == (4, 4, ())
    assert found.is_complete


def test_where_machines_meet_it_is_said_where_their_ranks_are() -> None:
    roster: dict[str, object] = {"round": 0, "complete": True, "closed": "", "store": "node-a:4711"}
    people: dict[str, list[str]] = {name: [] for name in ("present", "members", "waiting", "lost", "told")}
    found = judge(snapshot(rosters=(("job", json.dumps({**roster, **people})),)))
    assert any("node-a:4711" in remark for remark in found.remarks)
