"""What the ways between machines come to, on gatherings that are made up; and that these survive JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.codec import from_json, from_text, to_json, to_text
from rallypoint.diagnose.doctor.between_machines import judge_machines, matrix
from rallypoint.diagnose.doctor.exchange import Gathered, MachineRow
from rallypoint.diagnose.doctor.probes import Card, Way
from rallypoint.diagnose.findings import Finding, State
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
    return [(each.name, each.state, each.found) for each in judge_machines(gathered) if each.state is not OK]


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
def test_a_gathering_survives_json_and_can_be_told(gathered: Gathered) -> None:
    assert from_text(Gathered, to_text(gathered)) == gathered
    for number, found in gathered.findings.items():
        own = [each for each in gathered.ways if each.start == number]
        row = MachineRow(tuple(own), found)
        assert from_text(MachineRow, to_text(row)) == row
    assert judge_machines(gathered)
    assert len(matrix(gathered)) == gathered.count


def test_a_way_as_json_has_the_words_of_the_report() -> None:
    words = ["from", "to", "address", "error", "round_trip", "seen_as", "resolved", "clock"]
    assert list(to_json(way(0, 1))) == words


def test_a_card_or_way_that_cannot_be_meant_is_refused() -> None:
    many = replace(card(0), addresses=tuple(f"10.0.0.{number}" for number in range(100)))
    assert from_text(Card, to_text(many)) == replace(many, addresses=many.addresses[:8])
    for good, name, values in (
        (card(0), "host", ("x" * 300,)),
        (card(0), "addresses", ([], ["node-a"])),
        (card(0), "port", (0, 65_536)),
        (card(0), "gloo", ("eth0",)),
        (card(0), "versions", ({"torch": "x" * 300}, {"x" * 300: "2"})),
        (way(0, 1), "seen_as", ("node-a",)),
    ):
        for value in values:
            with pytest.raises(ValueError, match=name):
                from_json(type(good), {**to_json(good), name: value})


# Judging ---------------------------------------------------------------------------------------------------


def test_two_machines_without_a_fault() -> None:
    assert judge_machines(gathering(2)) == [
        Finding("machines", OK, "all 2 came: node-0 (0), node-1 (1)"),
        Finding("ways", OK, "every machine reaches every other, in 200 us"),
        Finding("versions", OK, "equal: python 3.11.7, rallypoint 0.1.0, torch 2.13.0"),
        Finding("clocks", OK, "at most 10.0 ms apart"),
    ]
    one_takes_longer = gathering(2, replace(way(0, 1), round_trip=0.003, clock=-2.0))
    assert judge_machines(one_takes_longer)[1::2] == [
        Finding("ways", OK, "every machine reaches every other, in 200 us to 3.00 ms"),
        Finding("clocks", OK, "at most 2.00 s apart"),
    ]
    assert [(each.name, each.state) for each in judge_machines(gathering(1))] == [
        ("machines", OK),
        ("versions", OK),
    ]


def test_machines_that_have_not_come_or_went_away() -> None:
    three = gathering(3)
    two = gathering(2)
    gone = replace(three, ways=tuple(each for each in three.ways if each.start != 1), findings={0: (), 2: ()})
    # The first one has stopped waiting when a third comes, which the second still tries to reach.
    late = replace(two, count=3, ways=(*two.ways, way(1, 2)))
    missing = "2 of 3 came; missing: 2"
    for gathered, text, row in (
        (replace(two, count=3), missing, ["1", "200 us", "-", "?"]),
        (gone, "node-1 (1) came, but went away again", ["1", "?", "-", "?"]),
        (late, missing, ["1", "200 us", "-", "200 us"]),
    ):
        assert problems(gathered) == [("machines", F, text)]
        assert matrix(gathered)[1] == row
    assert "missing: 2, 3, 4, 5, 6, 7, 8, 9 and 10 more" in problems(replace(two, count=20))[0][2]


@pytest.mark.parametrize(
    ("gathered", "name", "state", "text", "hint"),
    [
        (
            gathering(2, replace(way(1, 0), error="no answer", round_trip=0.0, seen_as="", clock=9.0)),
            *("ways", F, "node-1 (1) does not reach node-0 (0): no answer"),
            "let node-0 (0) accept connections from 10.0.0.2 on every port",
        ),
        (
            gathering(2, replace(way(0, 1), address="fd00::2")),
            *("ways", W, "node-0 (0) reaches node-1 (1) at fd00::2, but not at 10.0.0.2"),
            "name an interface that all share",
        ),
        (
            gathering(2, replace(way(1, 0), seen_as="192.168.7.7")),
            *("names", W, "node-0 (0) sees node-1 (1) as 192.168.7.7, which is none of its addresses"),
            "gloo and NCCL publish",
        ),
        *(
            (
                gathering(3, replace(way(2, 1), resolved=resolved)),
                *("names", W, f"node-1 resolves to {seen} on node-2 (2), but has 10.0.0.2, fd00::2"),
                "as endpoint, use 10.0.0.2 and not the name node-1",
            )
            for resolved, seen in (
                ((), "nothing"),
                (("127.0.1.1",), "127.0.1.1"),
                (("10.9.9.9", "fd09::1"), "10.9.9.9, fd09::1"),
            )
        ),
        *(
            (
                gathering(2, cards=[replace(card(1), gloo=gloo)]),
                *("gloo", W, f"on node-1 (1), its own name is {gloo or 'not known'}: gloo would publish"),
                "set GLOO_SOCKET_IFNAME there",
            )
            for gloo in ("127.0.1.1", "::1", "")
        ),
        (
            gathering(
                4,
                cards=[
                    replace(card(1), versions={**VERSIONS, "torch": "2.12.0"}),
                    replace(card(2), versions={name: VERSIONS[name] for name in ("python", "rallypoint")}),
                ],
            ),
            *("versions", W, "torch: 2.13.0 on node-0 (0) and 1 more, 2.12.0 on node-1 (1), ? on node-2 (2)"),
            "install the same everywhere",
        ),
        *(
            (
                gathering(3, replace(way(0, 2), clock=clock)),
                *("clocks", W, "those of node-0 (0) and node-2 (2) are 2.0 s apart"),
                "timedatectl",
            )
            for clock in (-2.001, 2.001)
        ),
    ],
)
def test_one_problem(gathered: Gathered, name: str, state: State, text: str, hint: str) -> None:
    [finding] = [each for each in judge_machines(gathered) if each.state is not OK]
    assert (finding.name, finding.state) == (name, state)
    assert finding.found.startswith(text)
    assert finding.hint.startswith(hint)
    if text.endswith("no answer"):
        assert matrix(gathered) == [["0", "-", "200 us"], ["1", "no", "-"]]
        assert [each.name for each in judge_machines(gathered)].count("ways") == 1


ONE_MACHINE = replace(card(0), gloo="127.0.1.1")
VISITOR = replace(ONE_MACHINE, number=1, addresses=("127.0.0.1", *ONE_MACHINE.addresses))


@pytest.mark.parametrize(
    "gathered",
    [
        # Addresses that are not translated.
        *(
            gathering(2, replace(way(1, 0), seen_as=seen))
            for seen in ("127.0.0.1", "::1", "fd00::2", "10.0.0.2", "")
        ),
        # A name with one right address will do.
        gathering(2, replace(way(0, 1), resolved=("127.0.1.1", "fd00::2"))),
        # Two on one machine need no names.
        gathering(
            2,
            *(replace(way(a, 1 - a), address="10.0.0.1", seen_as="127.0.0.1", resolved=()) for a in (0, 1)),
            cards=[ONE_MACHINE, replace(ONE_MACHINE, number=1)],
        ),
        # Nor if they meet at loopback: the visitor knows itself by loopback first, the listener does not.
        gathering(
            2,
            replace(way(0, 1), address="127.0.0.1", seen_as="127.0.0.1", resolved=("127.0.1.1",)),
            replace(way(1, 0), address="10.0.0.1", seen_as="10.0.0.1", resolved=("127.0.1.1",)),
            cards=[ONE_MACHINE, VISITOR],
        ),
    ],
)
def test_no_problem(gathered: Gathered) -> None:
    assert problems(gathered) == []


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
    found = judge_machines(gathering(2, cards=[first, other]))
    assert ("gloo", W) in [(each.name, each.state) for each in found]


# Many machines ---------------------------------------------------------------------------------------------


def test_of_many_machines_the_first_are_named() -> None:
    gathered = gathering(40)
    found = judge_machines(gathered)
    assert [each.state for each in found] == [OK] * 4
    assert found[0].found.endswith("node-7 (7) and 32 more")
    broken = replace(gathered, ways=tuple(replace(each, error="no") for each in gathered.ways))
    of_ways = [each for each in judge_machines(broken) if each.name == "ways"]
    assert len(of_ways) == 9
    assert of_ways[-1] == Finding("ways", F, "1,552 more findings of this kind")
    wrong = [
        replace(each, seen_as="192.168.7.7", address="fd00::ff", resolved=("10.9.9.9",))
        for each in gathered.ways
    ]
    assert 20 < len(judge_machines(replace(gathered, ways=tuple(wrong)))) < 40
