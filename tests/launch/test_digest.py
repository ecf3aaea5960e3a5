"""What machines read of a roster, and who is told what when it changes."""

from __future__ import annotations

import pytest

from rallypoint.codec import to_text
from rallypoint.errors import MeetingClosedError, UsageError
from rallypoint.launch.rendezvous.digest import (
    Assignment,
    Digest,
    RoundEnd,
    arc_of,
    arcs,
    assignment_of_refused,
    calls,
    end_of,
)
from rallypoint.launch.rendezvous.roster import (
    Ending,
    Member,
    Roster,
    RosterRequest,
    Size,
    closed_error,
    read_value,
)
from rosters import close, join, leave

pytestmark = pytest.mark.windows

TWO = Size(2, 2)
A, B, C = (Member(name, f"host-{name}", 100) for name in "abc")
A2 = Member("a", "host-a", 100, visit=1)


def gather(*members: Member) -> Roster:
    roster = Roster()
    for each in members:
        roster = join(roster, each, TWO)
    return roster


def digest(roster: Roster) -> Digest:
    return Digest.of(roster, TWO, Digest(version=6, names="old"), "new")


def told(before: Roster, after: Roster) -> dict[str, Assignment]:
    return {each.id: seat for each, seat in calls(before, after, 5.0)}


def test_a_digest_has_no_names_and_says_where_they_are() -> None:
    found = digest(gather(A, B, C).publish("host-a:1"))
    assert (found.version, found.names, found.names_before) == (7, "new", "old")
    assert (found.present, found.everybody, found.scribe, found.keeper) == (2, 3, "a", "a")
    assert read_value(Digest, to_text(found)) == found
    assert "host-b" not in to_text(found)


def due(roster: Roster) -> list[int]:
    """The numbers of the lines, of the next few, whose writers take lines in."""
    return [number for number in range(1, 6) if digest(roster).is_due(number, TWO)]


def test_few_machines_take_lines_in() -> None:
    assert due(Roster()) == [1, 2], "the first of all, and the last that is waited for"
    assert due(gather(A)) == [1], "the second has come"
    assert due(gather(A, B)) == [1, 2], "the first to start again, and the last"
    assert due(gather(A, B).lose({A}, TWO)) == [1]
    assert due(close(gather(A, B, C), "over", TWO)) == [3], "all have left"


def test_the_keeper_is_told_first_and_then_all() -> None:
    complete = gather(A, B)
    assert told(gather(A), complete) == {"a": Assignment(0, 0, 2, "0-a", time=5.0)}
    published = complete.publish("host-a:1")
    assert told(complete, published) == {
        name: Assignment(0, rank, 2, "0-a", "host-a:1", time=5.0) for rank, name in enumerate("ab")
    }
    assert told(published, join(published, C, TWO)) == {}


def test_when_a_round_ends_it_is_known_why_and_what_the_job_waits_for() -> None:
    crash = Ending("rank 3 ended by SIGKILL", 1.0)
    one_left = leave(gather(A, B), "b", TWO, crash)
    assert end_of(gather(A, B), one_left) is None
    ended = end_of(one_left, leave(one_left, "a", TWO))
    assert ended == RoundEnd(crash)
    assert read_value(RoundEnd, to_text(ended, sparse=True)) == ended
    with_spare = leave(join(gather(A, B, C), A2, TWO), "b", TWO, crash)
    ended = end_of(gather(A, B, C), with_spare)
    assert ended == RoundEnd(crash, complete=True, present=2, newcomers=("host-c (process 100)",))


@pytest.mark.parametrize(
    ("end", "size", "outlook"),
    [
        (RoundEnd(Ending("x"), complete=True, present=2, newcomers=("node-c",)), TWO, "node-c takes over"),
        (RoundEnd(complete=True, present=2, newcomers=("node-c",)), TWO, "node-c joins"),
        (RoundEnd(Ending("x"), complete=True, present=2), TWO, "all 2 machines go on"),
        (RoundEnd(Ending("x"), present=1), Size(1, 2), "waiting 30 s for more machines; 1 of 1:2 are here"),
        (RoundEnd(Ending("x"), present=1), TWO, "waiting up to 600 s for 1 of 2 machines"),
    ],
)
def test_an_outlook(end: RoundEnd, size: Size, outlook: str) -> None:
    assert end.outlook(size, 600.0, 30.0) == outlook


def test_who_waits_for_a_keeper_that_is_gone_is_told() -> None:
    complete = gather(A, B)
    again = {"b": Assignment(again=True)}
    assert told(complete, leave(complete, "a", TWO)) == again
    published = complete.publish("host-a:1")
    assert told(published, published.lose({A}, TWO)) == again, "it may have told nobody"
    assert told(published, leave(published, "a", TWO)) == {}, "the seats stay what they are"


def test_who_waits_is_told_that_the_meeting_is_closed() -> None:
    roster = gather(A, B, C)
    (seat,) = told(roster, close(roster, "over", TWO)).values()
    assert isinstance(seat.error, MeetingClosedError)
    assert seat == assignment_of_refused(closed_error("over"))
    assert isinstance(assignment_of_refused(UsageError("no", hint="why")).error, UsageError)
    assert Assignment().error is None


def test_a_machine_finds_its_arc_of_the_ring_by_its_id() -> None:
    many = tuple(Member(f"{number:016x}", "h", 1) for number in range(1000))
    cut = arcs(Roster(present=many[:990], waiting=many[990:]))
    assert sorted(each for arc in cut for each in arc) == [each.id for each in many]
    assert all(each in cut[arc_of(each, len(cut))] for each in (each.id for each in many))
    assert max(map(len, cut)) < 200
    assert arcs(Roster()) == []
    assert arcs(gather(A, B, C)) == [["a", "b", "c"]]
    assert digest(gather(A, B)).arcs == 1


def test_a_line_of_an_earlier_visit_does_not_count() -> None:
    again, _ = gather(A, B).take_in([RosterRequest(come=Member("a", "host-a", 100, visit=2))], TWO)
    assert again.take_in([RosterRequest(leave=A)], TWO)[0] == again
    assert again.take_in([RosterRequest(come=A)], TWO)[0] == again
