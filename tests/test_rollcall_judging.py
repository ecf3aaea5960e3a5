"""What a snapshot means: who is here, who is missing, who waits; and that nothing is guessed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.rollcall.identity import Identity, Role, Source
from rallypoint.rollcall.judgement import judge
from rallypoint.rollcall.plan import MOST_RANKS
from rallypoint.rollcall.roll import MachineRanks, RankState, Roll, Standing
from rallypoint.rollcall.snapshot import Barrier, Gone
from rolls import GLOO, client, part, plan, rank, ranks, relay, snapshot, wait

TWO_NODES = plan(("node-a", 4), ("node-b", 4))


def states(roll: Roll) -> dict[int, str]:
    return {each.rank: each.state.value for each in roll.ranks}


def standing(roll: Roll, number: int) -> Standing:
    return next(each for each in roll.ranks if each.rank == number)


# Who is here


def test_an_empty_store_has_nobody_and_expects_nobody() -> None:
    roll = judge(snapshot())
    assert (roll.expected, roll.ranks, roll.unknown, roll.machines, roll.remarks) == (-1, (), 0, (), ())
    assert not roll.is_complete


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


def test_a_client_that_says_no_rank_is_unknown() -> None:
    roll = judge(snapshot(clients=(client(1), client(2, Identity("node-a", 5)))))
    assert (roll.ranks, roll.unknown, roll.machines) == ((), 2, ())


def test_a_client_of_a_relay_is_on_its_machine_unless_it_says_otherwise() -> None:
    told = part("node-b", clients=(client(1, rank(4)), client(2, rank(5, "node-c"))))
    deep = part("node-d", clients=(client(1, rank(6)),))
    told = replace(told, relays=(relay(9, deep),))
    roll = judge(snapshot(clients=ranks([0]), relays=(relay(2, told),)))
    assert {each.rank: each.host for each in roll.ranks} == {0: "", 4: "node-b", 5: "node-c", 6: "node-d"}
    assert roll.machines == (
        MachineRanks("node-b", (4,)),
        MachineRanks("node-c", (5,)),
        MachineRanks("node-d", (6,)),
        MachineRanks("", (0,)),
    )


# Known by keys


def test_the_writer_of_a_ranks_key_is_that_rank() -> None:
    roll = judge(snapshot(clients=(client(1), client(2), client(3)), group_writers=((0, 1), (5, 3))))
    assert states(roll) == {0: "joined", 5: "joined"}
    assert [each.source for each in roll.ranks] == [Source.KEYS, Source.KEYS]
    assert roll.unknown == 1


def test_what_a_client_says_counts_more_than_its_keys() -> None:
    roll = judge(snapshot(clients=ranks([2]), group_writers=((0, 3),)))
    assert states(roll) == {2: "joined"}


def test_one_client_may_write_the_keys_of_several_ranks() -> None:
    roll = judge(snapshot(clients=(client(1),), group_writers=((0, 1), (1, 1))))
    assert states(roll) == {0: "joined", 1: "joined"}
    assert roll.unknown == 0


def test_a_key_that_came_by_a_relay_is_of_one_of_its_unknown_clients() -> None:
    told = part("node-b", clients=(client(1), client(2), client(3, rank(4))))
    roll = judge(snapshot(relays=(relay(7, told),), group_writers=((5, 7),)))
    assert states(roll) == {4: "joined", 5: "joined"}
    assert (standing(roll, 5).host, standing(roll, 5).source) == ("node-b", Source.KEYS)
    assert roll.unknown == 1


def test_a_relay_may_know_the_writer_itself() -> None:
    told = part("node-b", clients=(client(1), client(2)), group_writers=((5, 2),))
    roll = judge(snapshot(relays=(relay(7, told),), group_writers=((5, 7),)))
    assert states(roll) == {5: "joined"}
    assert standing(roll, 5).seconds == 50.0
    assert roll.unknown == 1


def test_a_relay_of_relays_does_not_tell_on_which_machine_the_writer_is() -> None:
    told = part("node-b", relays=(relay(1, part("node-c", clients=(client(1),))),))
    roll = judge(snapshot(relays=(relay(7, told),), group_writers=((5, 7),)))
    assert (standing(roll, 5).host, roll.unknown) == ("", 0)


def test_the_nearest_relay_knows_best_where_the_writer_is() -> None:
    deep = part("node-c", clients=(client(1), client(2)))
    told = part("node-b", relays=(relay(1, deep),), group_writers=((5, 1),))
    roll = judge(snapshot(relays=(relay(7, told),), group_writers=((5, 7),)))
    assert (standing(roll, 5).host, roll.unknown) == ("node-c", 1)


def test_a_relay_that_has_told_nothing_yet_has_written_for_somebody() -> None:
    roll = judge(snapshot(relays=(relay(7, None),), group_writers=((5, 7),)))
    assert states(roll) == {5: "joined"}
    assert roll.unknown == 0


def test_writers_whose_clients_are_not_there_any_more_have_gone() -> None:
    told = part("node-b", clients=(client(3, rank(4)),))
    roll = judge(snapshot(relays=(relay(7, told),), group_writers=((5, 7),)))
    assert states(roll) == {4: "joined", 5: "gone"}


def test_of_more_writers_than_clients_nobody_knows_who_has_gone() -> None:
    told = part("node-b", clients=(client(1),))
    roll = judge(snapshot(relays=(relay(7, told),), group_writers=((4, 7), (5, 7))))
    assert states(roll) == {4: "unseen", 5: "unseen"}
    assert roll.unknown == 1


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


def test_what_ranks_disagree_about_is_remarked() -> None:
    roll = judge(snapshot(clients=(*ranks([0], world_size=2), *ranks([1], world_size=4))))
    assert roll.expected == 4
    assert roll.remarks == ("ranks disagree about how many they are: 2 and 4",)


def test_a_plan_counts_more_than_what_ranks_say() -> None:
    roll = judge(snapshot(clients=ranks(range(8), world_size=16), plan=TWO_NODES))
    assert roll.expected == 8
    assert roll.remarks == ("8 ranks are planned, but they say that they are 16",)


def test_ranks_beyond_the_expected_are_remarked_and_do_not_fill_a_place() -> None:
    roll = judge(snapshot(clients=ranks([*range(7), 9]), plan=TWO_NODES))
    assert roll.remarks == ("beyond the 8 ranks that are expected, there are: 9",)
    assert [each.rank for each in roll.missing] == [7]
    assert not roll.is_complete


def test_a_size_that_cannot_be_is_not_believed() -> None:
    roll = judge(snapshot(clients=ranks([0], world_size=MOST_RANKS + 1)))
    assert (roll.expected, len(roll.ranks)) == (-1, 1)
    assert "not believed" in roll.remarks[0]


def test_those_who_have_gone_said_how_many_they_were() -> None:
    gone = (Gone(1, rank(0, "node-a", world_size=2), 3.0, ""),)
    roll = judge(snapshot(gone=gone))
    assert (roll.expected, states(roll)) == (2, {0: "gone", 1: "late"})


def test_the_size_of_a_barrier_tells_nothing() -> None:
    barrier = Barrier("b", 8, 1, ((1, 3.0),))
    assert judge(snapshot(clients=ranks([0]), barriers=(barrier,))).expected == -1


def test_a_relay_does_not_know_who_is_expected() -> None:
    roll = judge(part("node-b", clients=ranks([4, 5], world_size=8), plan=TWO_NODES))
    assert (roll.expected, states(roll)) == (-1, {4: "joined", 5: "joined"})
    assert {each.host for each in roll.ranks} == {"node-b"}
    assert "this is a relay" in roll.remarks[0]


# Late, unseen, gone


def test_a_rank_that_may_be_an_unknown_client_is_not_late() -> None:
    roll = judge(snapshot(clients=(*ranks([0, 1], world_size=4), client(9))))
    assert states(roll) == {0: "joined", 1: "joined", 2: "unseen", 3: "unseen"}
    assert roll.missing == ()
    assert not roll.is_complete


def test_an_unknown_client_of_another_machine_is_no_excuse() -> None:
    told = part("node-b", clients=(client(1),))
    here = snapshot(clients=ranks([0, 1, 2], "node-a"), relays=(relay(7, told),), plan=TWO_NODES)
    assert states(judge(here)) == {
        **dict.fromkeys(range(3), "joined"),
        3: "late",
        **dict.fromkeys(range(4, 8), "unseen"),
    }


def test_a_machine_may_have_another_name_than_in_the_plan() -> None:
    told = part("node-b.cluster", clients=(client(1),))
    roll = judge(snapshot(clients=ranks([0, 1, 2], "node-a"), relays=(relay(7, told),), plan=TWO_NODES))
    assert {each.rank for each in roll.unseen} == {3, 4, 5, 6, 7}


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


def test_the_settled_clients_of_a_relay_are_nobody_else() -> None:
    told = part("node-b", clients=(client(1), client(2)))
    here = snapshot(
        clients=ranks(range(4), "node-a"),
        relays=(relay(7, told),),
        group_writers=((4, 7), (5, 7)),
        plan=TWO_NODES,
    )
    roll = judge(here)
    assert states(roll) == {**dict.fromkeys(range(6), "joined"), 6: "late", 7: "late"}
    assert roll.unknown == 0


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


def test_who_has_come_back_behind_a_relay_has_not_gone() -> None:
    told = part("node-b", clients=(client(1),), gone=(Gone(2, rank(5), 9.0, ""),))
    assert states(judge(snapshot(relays=(relay(7, told),), group_writers=((5, 7),)))) == {5: "joined"}


def test_who_has_gone_from_a_relay_was_on_its_machine() -> None:
    told = part("node-b", gone=(Gone(1, rank(4), 9.0, ""),))
    assert standing(judge(snapshot(relays=(relay(7, told),))), 4).host == "node-b"


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


def test_a_relay_that_tells_nothing_waits_for_its_clients() -> None:
    silent = relay(7, None, waits=(wait("k"),))
    (found,) = judge(snapshot(relays=(silent,))).awaited
    assert (found.key, found.ranks, found.others, found.seconds) == ("k", (), 1, 41.0)


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


def test_who_has_not_come_to_a_barrier_of_all() -> None:
    (found,) = at_barrier().gatherings
    assert (found.key, found.size, found.arrived, found.ranks) == ("b", 8, 3, (0, 1, 2))
    assert (found.missing, found.seconds) == ((3, 4, 5, 6, 7), 9.0)


def test_who_waits_at_a_barrier_waits() -> None:
    roll = at_barrier()
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


def test_a_process_with_several_connections_is_one_stranger() -> None:
    who = Identity("node-a", 7)
    found = judge(snapshot(clients=tuple(client(number, who) for number in (1, 2, 3))))
    assert found.unknown == 1


def test_where_machines_meet_it_is_said_where_their_ranks_are() -> None:
    roster: dict[str, object] = {"round": 0, "complete": True, "closed": "", "store": "node-a:4711"}
    people: dict[str, list[str]] = {name: [] for name in ("present", "members", "waiting", "lost", "told")}
    found = judge(snapshot(rosters=(("job", json.dumps({**roster, **people})),)))
    assert any("node-a:4711" in remark for remark in found.remarks)
