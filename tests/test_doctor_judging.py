"""What the ways between machines come to, on gatherings that are made up; and that these survive JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.codec import from_json, from_text, to_json, to_text
from rallypoint.diagnose.doctor.exchange import Gathered, MachineRow
from rallypoint.diagnose.doctor.judgement import judge, matrix
from rallypoint.diagnose.doctor.machine_card import Card, Way
from rallypoint.diagnose.findings import State, failure, ok
from test_doctor_checks import findings

F, W, OK = State.FAILURE, State.WARNING, State.OK
VERSIONS = {"python": "3.11.7", "rallypoint": "0.1.0", "torch": "2.13.0"}


def card(number: int) -> Card:
    address = f"10.0.0.{number + 1}"
    return Card(
        number, f"node-{number}", (address, f"fd00::{number + 1}"), 40_000 + number, address, VERSIONS
    )


def way(start: int, goal: int) -> Way:
    first, second = card(start).addresses[0], card(goal).addresses[0]
    return Way(start, goal, second, "", 0.0002, first, (second,), 0.01)


def gathering(count: int, *others: Way, cards: Iterable[Card] = ()) -> Gathered:
    """Machines that all came and reach each other, but for what is given."""
    instead = {(each.start, each.goal): each for each in others}
    ways = [
        instead.get((start, goal), way(start, goal))
        for start in range(count)
        for goal in range(count)
        if start != goal
    ]
    all_cards = {number: card(number) for number in range(count)} | {each.number: each for each in cards}
    return Gathered(count, all_cards, tuple(ways), dict.fromkeys(range(count), ()))


def problems(gathered: Gathered) -> list[tuple[str, State, str]]:
    return [(each.name, each.state, each.found) for each in judge(gathered) if each.state is not OK]


# JSON ------------------------------------------------------------------------------------------------------

texts = st.text(max_size=12)
address = st.ip_addresses().map(str) | st.just("fe80::1%eth0")
seconds = st.floats(allow_nan=False, allow_infinity=False)
cards = st.builds(
    Card,
    st.integers(0, 9),
    texts,
    st.lists(address, min_size=1, max_size=8).map(tuple),
    st.integers(1, 65_535),
    st.just("") | address,
    st.dictionaries(texts, texts, max_size=3),
)
numbers = st.integers(0, 9)
resolved = st.lists(texts, max_size=3).map(tuple)
ways = st.builds(Way, numbers, numbers, texts, texts, seconds, st.just("") | address, resolved, seconds)
gatherings = st.builds(
    Gathered,
    st.integers(0, 9),
    st.lists(cards, max_size=3).map(lambda all_of: {each.number: each for each in all_of}),
    st.lists(ways, max_size=3).map(tuple),
    st.dictionaries(st.integers(0, 9), st.lists(findings, max_size=2).map(tuple), max_size=3),
)


@settings(max_examples=30)
@given(gatherings)
def test_a_gathering_survives_json(gathered: Gathered) -> None:
    assert Gathered.from_text(gathered.to_text().encode()) == gathered


@settings(max_examples=30)
@given(gatherings)
def test_whatever_machines_say_of_each_other_can_be_told(gathered: Gathered) -> None:
    assert judge(gathered)
    assert len(matrix(gathered)) == gathered.count


def test_a_way_as_json_has_the_words_of_the_report() -> None:
    assert to_json(way(0, 1)) == {
        "from": 0,
        "to": 1,
        "address": "10.0.0.2",
        "error": "",
        "round_trip": 0.0002,
        "seen_as": "10.0.0.1",
        "resolved": ["10.0.0.2"],
        "clock": 0.01,
    }


def test_a_card_that_is_none_is_refused() -> None:
    assert from_text(Card, to_text(card(0))) == card(0)
    for name, values in {
        "number": ("0", None),
        "host": (7, "x" * 300),
        "addresses": ([], None, ["node-a"], [["10.0.0.1"]], "10.0.0.1"),
        "port": (0, 65_536, "80"),
        "gloo": ("eth0",),
        "versions": (["torch"], {"torch": 2}, {"torch": "x" * 300}),
    }.items():
        for value in values:
            with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
                from_json(Card, {**to_json(card(0)), name: value})


def test_of_many_addresses_the_first_are_tried() -> None:
    many = replace(card(0), addresses=tuple(f"10.0.0.{number}" for number in range(100)))
    assert from_text(Card, to_text(many)).addresses == many.addresses[:8]


def test_a_way_that_is_none_is_refused() -> None:
    for name, values in {
        "from": (None,),
        "to": ("1",),
        "address": (7,),
        "error": (["no"],),
        "resolved": (7,),
        "round_trip": ("soon", float("nan")),
        "clock": (float("inf"), 10**400),
        "seen_as": ("node-a", ["10.0.0.1"]),
    }.items():
        for value in values:
            row = {"ways": [{**to_json(way(0, 1)), name: value}], "findings": []}
            with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
                from_json(MachineRow, row)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    "number",
    "host",
    "addresses",
    "port",
    "gloo",
    "versions",
    "from",
    "to",
    "address",
    "error",
    "clock",
)
objects = st.dictionaries(st.sampled_from(FIELDS), anything)
MOULDS: list[st.SearchStrategy[object]] = [
    anything,
    objects,
    st.builds(lambda change: {**to_json(card(0)), **change}, objects),
    st.builds(
        lambda some, change, found: {"ways": [{**to_json(way(0, 1)), **change}, *some], "findings": found},
        st.lists(anything, max_size=1),
        objects,
        st.lists(anything, max_size=2),
    ),
]


READERS: tuple[Callable[[bytes], object], ...] = (
    partial(from_text, Card),
    partial(from_text, MachineRow),
    Gathered.from_text,
)


@settings(max_examples=40)
@given(content=st.one_of(MOULDS))
def test_of_any_text_there_is_something_or_one_kind_of_error(content: object) -> None:
    for read in READERS:
        with suppress(ValueError):
            read(json.dumps(content).encode())


def test_what_is_no_json_is_refused() -> None:
    for text in (b"", b"\xff\xfe", b"{", b"[" * 100_000, b"9" * 5000):
        for read in READERS:
            with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
                read(text)


# Judging ---------------------------------------------------------------------------------------------------


def test_two_machines_without_a_fault() -> None:
    assert judge(gathering(2)) == [
        ok("machines", "all 2 came: node-0 (0), node-1 (1)"),
        ok("ways", "every machine reaches every other, in 200 us"),
        ok("versions", "equal: python 3.11.7, rallypoint 0.1.0, torch 2.13.0"),
        ok("clocks", "at most 10.0 ms apart"),
    ]


def test_ways_of_which_some_take_longer() -> None:
    found = judge(gathering(2, replace(way(0, 1), round_trip=0.003)))
    assert ok("ways", "every machine reaches every other, in 200 us to 3.00 ms") in found


def test_one_machine_alone() -> None:
    assert [(each.name, each.state) for each in judge(gathering(1))] == [("machines", OK), ("versions", OK)]


def test_a_machine_that_has_not_come() -> None:
    there = gathering(2)
    gathered = replace(there, count=3)
    assert gathered.missing == [2]
    assert problems(gathered) == [("machines", F, "2 of 3 came; missing: 2")]
    many = replace(there, count=20)
    assert "missing: 2, 3, 4, 5, 6, 7, 8, 9 and 10 more" in problems(many)[0][2]


def test_a_machine_that_came_and_went() -> None:
    there = gathering(3)
    gathered = replace(
        there, ways=tuple(each for each in there.ways if each.start != 1), findings={0: (), 2: ()}
    )
    assert gathered.silent == [1]
    assert problems(gathered) == [("machines", F, "node-1 (1) came, but went away again")]
    assert matrix(gathered)[1] == ["1", "?", "-", "?"]


def test_one_direction_that_does_not_work() -> None:
    broken = replace(way(1, 0), error="no answer within 3 s", round_trip=0.0, seen_as="", clock=0.0)
    found = judge(gathering(2, broken))
    assert [(each.name, each.state) for each in found if each.state is not OK] == [("ways", F)]
    [finding] = [each for each in found if each.name == "ways"]
    assert finding.found == "node-1 (1) does not reach node-0 (0): no answer within 3 s"
    assert finding.hint.startswith("let node-0 (0) accept connections from 10.0.0.2 on every port")
    assert matrix(gathering(2, broken)) == [["0", "-", "200 us"], ["1", "no", "-"]]


def test_a_machine_that_is_reached_at_its_second_address() -> None:
    gathered = gathering(2, replace(way(0, 1), address="fd00::2"))
    assert problems(gathered) == [
        ("ways", W, "node-0 (0) reaches node-1 (1) at fd00::2, but not at 10.0.0.2")
    ]


def test_addresses_that_are_translated() -> None:
    gathered = gathering(2, replace(way(1, 0), seen_as="192.168.7.7"))
    [(name, state, text)] = problems(gathered)
    assert (name, state) == ("names", W)
    assert text.startswith("node-0 (0) sees node-1 (1) as 192.168.7.7, which is none of its addresses")


def test_addresses_that_are_not_translated() -> None:
    for seen in ("127.0.0.1", "::1", "fd00::2", "10.0.0.2", ""):
        assert problems(gathering(2, replace(way(1, 0), seen_as=seen))) == []


def test_a_name_that_means_something_else_elsewhere() -> None:
    for resolved, seen in (
        ((), "nothing"),
        (("127.0.1.1",), "127.0.1.1"),
        (("10.9.9.9", "fd09::1"), "10.9.9.9, fd09::1"),
    ):
        found = judge(gathering(3, replace(way(2, 1), resolved=resolved)))
        [finding] = [each for each in found if each.state is not OK]
        assert (finding.name, finding.state) == ("names", W)
        assert finding.found == f"node-1 resolves to {seen} on node-2 (2), but has 10.0.0.2, fd00::2"
        assert finding.hint == "as endpoint, use 10.0.0.2 and not the name node-1"


def test_a_name_with_one_right_address_will_do() -> None:
    assert problems(gathering(2, replace(way(0, 1), resolved=("127.0.1.1", "fd00::2")))) == []


def test_two_on_one_machine_need_no_names() -> None:
    both = [replace(card(0), number=number, gloo="127.0.0.1") for number in (0, 1)]
    some = [
        replace(way(a, b), address="10.0.0.1", seen_as="127.0.0.1", resolved=()) for a, b in ((0, 1), (1, 0))
    ]
    assert problems(gathering(2, *some, cards=both)) == []


def test_two_on_one_machine_that_meet_at_loopback() -> None:
    """The one that comes knows itself by loopback first, the one that listens does not."""
    listener = replace(card(0), gloo="127.0.1.1")
    visitor = replace(listener, number=1, addresses=("127.0.0.1", *listener.addresses))
    some = [
        replace(way(0, 1), address="127.0.0.1", seen_as="127.0.0.1", resolved=("127.0.1.1",)),
        replace(way(1, 0), address="10.0.0.1", seen_as="10.0.0.1", resolved=("127.0.1.1",)),
    ]
    assert problems(gathering(2, *some, cards=[listener, visitor])) == []


@pytest.mark.parametrize(
    "other",
    [
        replace(card(0), number=1, host="other", gloo="127.0.0.1"),
        replace(card(1), host="node-0", gloo="127.0.0.1"),
        replace(card(1), host="node-0", gloo="127.0.0.1", addresses=("10.0.0.2", "127.0.0.1")),
    ],
    ids=["same addresses", "same name", "same name and loopback"],
)
def test_machines_are_two_if_name_or_addresses_differ(other: Card) -> None:
    """Containers of two machines may have the same addresses, and machines are often called the same."""
    first = replace(card(0), addresses=(*card(0).addresses, "127.0.0.1"))
    found = judge(gathering(2, cards=[first, other]))
    assert ("gloo", W) in [(each.name, each.state) for each in found]


def test_a_machine_whose_own_name_is_loopback() -> None:
    for gloo, said in {"127.0.1.1": "127.0.1.1", "::1": "::1", "": "not known"}.items():
        gathered = gathering(2, cards=[replace(card(1), gloo=gloo)])
        [found] = [each for each in judge(gathered) if each.state is not OK]
        assert (found.name, found.state) == ("gloo", W)
        assert found.found.startswith(f"on node-1 (1), its own name is {said}: gloo would publish")
        assert "GLOO_SOCKET_IFNAME" in found.hint


def test_versions_that_differ() -> None:
    other = replace(card(1), versions={**VERSIONS, "torch": "2.12.0"})
    third = replace(card(2), versions={name: VERSIONS[name] for name in ("python", "rallypoint")})
    found = problems(gathering(4, cards=[other, third]))
    text = "torch: 2.13.0 on node-0 (0) and 1 more, 2.12.0 on node-1 (1), ? on node-2 (2)"
    assert found == [("versions", W, text)]


def test_clocks_that_are_apart() -> None:
    for clock in (-2.001, 2.001):
        found = problems(gathering(3, replace(way(0, 2), clock=clock)))
        assert found == [("clocks", W, "those of node-0 (0) and node-2 (2) are 2.0 s apart")]


def test_clocks_that_are_near_enough_and_of_a_way_that_was_none() -> None:
    assert judge(gathering(2, replace(way(0, 1), clock=-2.0)))[-1] == ok("clocks", "at most 2.00 s apart")
    assert not [
        each
        for each in judge(gathering(2, replace(way(0, 1), error="no", clock=9.0)))
        if each.name == "clocks" and each.state is W
    ]


def test_a_machine_that_only_some_have_seen() -> None:
    """The first one has stopped waiting when a third comes, which the second still tries to reach."""
    there = gathering(2)
    gathered = replace(there, count=3, ways=(*there.ways, way(1, 2)))
    assert ("machines", F, "2 of 3 came; missing: 2") in problems(gathered)
    assert matrix(gathered)[1] == ["1", "200 us", "-", "200 us"]


# Many machines ---------------------------------------------------------------------------------------------

MANY = 40


def test_many_machines_that_all_reach_each_other() -> None:
    found = judge(gathering(MANY))
    assert [each.state for each in found] == [OK] * 4
    assert found[0].found.endswith("node-7 (7) and 32 more")
    rows = matrix(gathering(MANY))
    assert len(rows) == MANY
    assert all(len(row) == MANY + 1 and row[number + 1] == "-" for number, row in enumerate(rows))


def test_of_many_machines_of_which_none_reaches_another_some_are_named() -> None:
    gathered = gathering(MANY)
    gathered = replace(gathered, ways=tuple(replace(each, error="no") for each in gathered.ways))
    found = [each for each in judge(gathered) if each.name == "ways"]
    assert len(found) == 9
    assert found[-1] == failure("ways", "1,552 more findings of this kind")


def test_what_is_wrong_everywhere_does_not_fill_pages() -> None:
    gathered = gathering(MANY)
    wrong = [
        replace(each, seen_as="192.168.7.7", address="fd00::ff", resolved=("10.9.9.9",))
        for each in gathered.ways
    ]
    assert 20 < len(judge(replace(gathered, ways=tuple(wrong)))) < 40


few = st.integers(0, 4)


@given(
    st.integers(1, 5),
    st.dictionaries(st.tuples(few, few), st.sampled_from(["", "no answer"])),
    st.sets(few),
)
def test_every_broken_way_and_every_missing_machine_is_a_failure(
    count: int, errors: dict[tuple[int, int], str], absent: set[int]
) -> None:
    full = gathering(count, *(replace(way(*pair), error=error) for pair, error in errors.items()))
    gathered = replace(
        full,
        cards={number: each for number, each in full.cards.items() if number not in absent},
        ways=tuple(each for each in full.ways if not {each.start, each.goal} & absent),
        findings={number: () for number in full.findings if number not in absent},
    )
    found = judge(gathered)
    broken = [each for each in gathered.ways if each.error]
    assert sum(each.state is F for each in found) == min(len(broken), 9) + bool(gathered.missing)
    rows = matrix(gathered)
    assert len(rows) == count
    assert sum(row.count("no") for row in rows) == len(broken)
