"""The rules of a meeting: each by example, and all of them over random histories."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rallypoint.codec import to_text
from rallypoint.errors import MeetingClosedError, RallypointError, UsageError
from rallypoint.launch.rendezvous.digest import (
    Assignment,
    Digest,
    RoundEnd,
    arc_of,
    arcs,
    assignment_of_refused,
    end_of,
    notices,
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
from rallypoint.store.rollcall.plan import meetings_of
from rosters import close, join, leave

pytestmark = pytest.mark.windows

TWO = Size(2, 2)
THREE = Size(3, 3)


def member(name: str, rank: int = -1, *, host: str = "", keeps: bool = False) -> Member:
    return Member(name, host or f"host-{name}", 100 + ord(name[0]), rank, keeps)


A, B, C, D, E = map(member, "abcde")


def gather(size: Size, *members: Member) -> Roster:
    """A new meeting to which these come, one after the other."""
    return gather_into(Roster(), size, *members)


def gather_into(roster: Roster, size: Size, *members: Member) -> Roster:
    for each in members:
        roster = join(roster, each, size)
    return roster


def names(members: tuple[Member, ...]) -> str:
    return "".join(each.id for each in members)


# Coming


def test_how_many_are_to_come_is_written_down_for_those_who_look() -> None:
    roster = gather(Size(2, 4), A)
    assert (roster.least, roster.most) == (2, 4)
    roster = join(roster, B, Size(2, 3))  # which is another --nnodes: the last word counts
    assert (roster.least, roster.most) == (2, 3)
    (meeting,) = meetings_of(None, [("job", to_text(roster))])
    assert (meeting.expected, meeting.joined) == (2, ("host-a", "host-b"))
    (meeting,) = meetings_of(None, [("job", to_text(gather(THREE, A)))])
    assert (meeting.expected, meeting.joined) == (3, ("host-a",))


def test_a_roster_that_does_not_say_it_can_be_read() -> None:
    text = to_text(Roster()).replace('"least":-1,"most":-1,', "")
    assert "least" not in text
    assert read_value(Roster, text) == Roster()


# Settings


def with_settings(roster: Roster, member: Member, **settings: str) -> tuple[Roster, dict[str, str]]:
    """The roster after a machine with these settings has come to a job of two, and who is refused why."""
    line = RosterRequest(come=member, least=2, most=2, settings=tuple(settings.items()))
    after, refused = roster.apply([line], TWO)
    return read_value(Roster, to_text(after)), {each.id: str(error) for each, error in refused.items()}


MISMATCH = (
    "machines were started with different settings: host-b (process 198) has relay=off, and host-a (process "
    "197) has relay=on\nhint: start every machine with the same relay"
)


def test_a_different_setting_fails_all_machines_of_a_job_that_has_not_run() -> None:
    roster, refused = with_settings(Roster(), A, nnodes="2", relay="on")
    assert not refused
    roster, refused = with_settings(roster, B, nnodes="2", relay="off")
    assert refused == {"a": MISMATCH, "b": MISMATCH}
    assert not roster.everybody
    assert not with_settings(roster, B, nnodes="2", relay="off")[1], "it can be started again as it should be"


def test_a_different_setting_does_not_end_a_job_that_runs() -> None:
    roster, _ = with_settings(Roster(), A, relay="on")
    roster, _ = with_settings(roster, C, relay="on")
    assert roster.complete
    after, refused = with_settings(roster, B, relay="off")
    assert refused == {"b": MISMATCH}
    assert after.everybody == (A, C)
    again = with_settings(roster, replace(A, visit=1), relay="on")[0].lose({C}, TWO)  # its next round is open
    assert (again.round, names(again.present), again.complete) == (1, "a", False)
    after, refused = with_settings(again, B, relay="off")
    assert refused == {"b": MISMATCH}
    assert names(after.everybody) == "a"


def test_only_settings_that_both_machines_know_are_compared() -> None:
    roster, _ = with_settings(Roster(), A, nnodes="2", relay="on")
    assert with_settings(roster, B, nnodes="2", restarts="3")[0].complete
    assert with_settings(roster, B)[0].complete


# Ranks


def test_a_rank_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match=r"machine rank 2 does not exist among 2 machines\nhint: ranks"):
        join(Roster(), member("a", 2), TWO)


@pytest.mark.parametrize("size", [THREE, Size(1, 3)], ids=["open", "complete"])
@pytest.mark.parametrize("rival_waits", [False, True])
def test_a_rank_that_another_host_has(size: Size, rival_waits: bool) -> None:
    roster = gather(size, C, D, E) if rival_waits else Roster()
    roster = join(roster, member("a", 1), size)
    with pytest.raises(UsageError) as caught:
        join(roster, member("b", 1), size)
    assert "host-b (process 198) asks for a rank that is taken" in caught.value.message
    assert "machine rank 1 on host-a (process 197)" in caught.value.message
    assert "rank of its own" in caught.value.hint


def test_an_agent_started_again_takes_the_place_of_its_predecessor_in_the_next_round() -> None:
    dead, again, other = member("a", 0, host="one"), member("b", 0, host="one"), member("c", 1)
    roster = gather(TWO, dead, other, again)
    assert not roster.wants_restart(TWO)
    roster = roster.lose({dead}, TWO)
    assert roster.wants_restart(TWO)
    roster = join(leave(roster, "c", TWO), other, TWO)
    assert (roster.round, roster.complete, names(roster.present)) == (1, True, "bc")


# Keeping


def test_the_keeper_is_whom_the_endpoint_names_whatever_its_rank() -> None:
    roster = gather(THREE, member("a", 0), member("b", 1), member("c", 2, keeps=True))
    assert roster.keeper == member("c", 2, keeps=True)
    assert roster.rank_of("c") == 2


def test_without_such_a_machine_rank_0_is_the_keeper() -> None:
    assert gather(TWO, member("a", 1), member("b", 0)).keeper == member("b", 0)
    assert Roster().keeper is None


# Going


def test_who_was_lost_in_earlier_rounds_is_remembered_for_a_while() -> None:
    roster = Roster()
    for number in range(20):
        victim = member("a", host=f"host-{number}")
        roster = gather_into(roster, TWO, victim, B)
        assert not roster.wants_restart(TWO)
        roster = leave(roster.lose({victim}, TWO), "b", TWO)
    assert roster.round == 20
    assert [each.host for each in roster.gone] == [f"host-{number}" for number in range(4, 20)]


def test_who_has_come_again_is_not_lost_for_its_silence_before() -> None:
    roster = join(gather(TWO, A, B), replace(A, visit=1), TWO)
    assert roster.lose({A}, TWO) == roster


# Spares and machines that are not fit


def test_a_spare_takes_the_place_of_the_one_that_is_lost_and_of_no_other() -> None:
    roster = gather(THREE, A, B, C, D, E).lose({B}, THREE)
    for each in (C, A):  # in whichever order they come back
        roster = join(roster, replace(each, visit=1), THREE)
    assert (roster.round, roster.complete, names(roster.present), names(roster.waiting)) == (
        1,
        True,
        "acd",
        "e",
    )


def test_one_that_gives_up_is_missed() -> None:
    (roster, _) = gather(TWO, A, B).apply([RosterRequest(leave=A, lost=True)], TWO)
    assert (roster.lost, roster.wants_restart(TWO)) == ((A,), True)
    assert roster.apply([RosterRequest(leave=A, lost=True)], TWO)[0] == roster


def test_one_that_is_not_fit_is_named_and_no_reason_to_start_again() -> None:
    (roster, _) = gather(TWO, A, B).apply([RosterRequest(leave=C, sick="its GPU is gone")], TWO)
    assert not roster.wants_restart(TWO)
    roster = leave(leave(roster, "a", TWO), "b", TWO)
    assert list(map(str, roster.sick)) == ["host-c (process 199) is not fit: its GPU is gone"]
    (meeting,) = meetings_of(None, [("job", to_text(roster))])
    assert meeting.sick == ("host-c: its GPU is gone",)


def test_only_as_many_as_were_asked_for_are_spares() -> None:
    (roster, _) = gather(TWO, A, B).apply([RosterRequest(come=each, spares=1) for each in (C, D)], TWO)
    (meeting,) = meetings_of(None, [("job", to_text(roster))])
    assert (meeting.spares, meeting.waiting) == (("host-c",), ("host-d",))


@given(st.lists(st.sampled_from([A, B, C, D, E]), max_size=12), st.integers(0, 12))
def test_many_lines_at_once_are_the_same_as_one_after_the_other(came: list[Member], first: int) -> None:
    lines = [RosterRequest(come=each, least=3, most=3) for each in came]
    whole, _ = Roster().apply(lines, THREE)
    begun, _ = Roster().apply(lines[:first], THREE)
    assert begun.apply(lines[first:], THREE)[0] == whole


# Starting again


@pytest.mark.parametrize(
    ("roster", "wanted"),
    [
        (gather(Size(1, 2), A), False),
        (gather(Size(1, 2), A).fill(), False),
        (join(gather(Size(1, 2), A).fill(), B, Size(1, 2)), True),
        (gather(Size(1, 2), A, B, C), False),
        (leave(gather(Size(1, 2), A, B), "a", Size(1, 2)), False),
        (leave(gather(Size(1, 2), A, B, C), "a", Size(1, 2)), True),
        (gather(Size(1, 2), A, B).lose({A}, Size(1, 2)), True),
        (gather(Size(1, 2), A, B, C).lose({C}, Size(1, 2)), False),
        (gather(Size(1, 2), A).lose({A}, Size(1, 2)), False),
    ],
    ids=[
        *("open", "complete", "one waits and there is room", "one waits, but there is no room"),
        *("one left, and none waits", "one left, and one waits", "one is lost", "one who waited is lost"),
        *("one is lost while the round is open",),
    ],
)
def test_wants_restart(roster: Roster, wanted: bool) -> None:
    assert roster.wants_restart(Size(1, 2)) is wanted


# How a round ends


def test_a_consequence_never_comes_before_a_cause_whatever_the_clocks_show() -> None:
    crash, later = Ending("rank 3 ended by SIGKILL", 900.0), Ending("rank 1 failed first: KeyError", 901.0)
    lost = Ending("rank 0 failed first: Connection closed by peer", 1.0, follows=True)
    for order in itertools.permutations([crash, later, lost]):
        roster = gather(Size(3, 3), A, B, C)
        for name, ending in zip("abc", order, strict=True):
            roster = leave(roster, name, Size(3, 3), ending)
        assert (roster.round, roster.ended) == (1, crash)
        assert set(roster.told) == {crash.text, later.text}


def test_only_a_machine_of_a_round_tells_how_it_ended() -> None:
    ending = Ending("too late")
    roster = leave(gather(TWO, A, B, C), "c", TWO, ending)
    assert leave(gather(TWO, A), "a", TWO, ending).told == roster.told == ()
    assert leave(leave(roster, "a", TWO), "a", TWO, ending).told == ()
    ended = roster.lose({A, B}, TWO, Ending("a and b gave no sign of life"))
    assert ended.ended == Ending("a and b gave no sign of life")


def test_what_machines_tell_is_bounded_and_outlives_the_round() -> None:
    roster, size = Roster(), Size(70, 70)
    names = [f"m{number}" for number in range(70)]
    for name in names:
        roster = join(roster, Member(name, name, 1), size)
    for name in names[:-1]:
        roster = leave(roster, name, size, Ending(f"{name} failed", -float(name[1:])))
    assert [each.text for each in roster.endings] == [f"m{number} failed" for number in range(68, 60, -1)]
    roster = leave(roster, names[-1], size)
    assert (roster.endings, roster.ended) == ((), Ending("m68 failed", -68.0))
    assert roster.told == tuple(f"{name} failed" for name in names[:64])


# Closing


def test_nobody_joins_a_closed_meeting() -> None:
    roster = close(gather(TWO, A), "the job has ended", TWO)
    with pytest.raises(MeetingClosedError, match=r"is closed: the job has ended\nhint: .*another --rdzv-id"):
        join(roster, B, TWO)
    assert leave(roster, "a", TWO).closed == "the job has ended"


def test_nobody_is_to_start_again_when_it_is_closed() -> None:
    roster = close(gather(TWO, A, B), "the job has ended", TWO)
    assert not roster.lose({A}, TWO).wants_restart(TWO)


def test_a_closed_meeting_has_no_next_round() -> None:
    """Who waits may not have looked yet when the last of the others leaves."""
    closed = close(gather(TWO, A, B, C, D), "the job has ended", TWO)
    roster = leave(leave(closed, "a", TWO), "b", TWO)
    assert not roster.complete


def test_a_closed_meeting_that_all_have_left_may_be_another_jobs() -> None:
    closed = leave(close(gather(TWO, A, B), "done", TWO), "a", TWO)
    assert closed.reopen() == closed
    assert gather(TWO, A, B).reopen() == gather(TWO, A, B)
    reopened = leave(closed, "b", TWO).reopen()
    assert not reopened.closed
    assert reopened.round > closed.round, "no round has the name of an earlier one"
    assert gather_into(reopened, TWO, C, D).complete


# On the wire


NO_ROSTERS: list[str | bytes] = ["", b"\xff\xfe", to_text(Roster()).replace('"lost":[]', '"lost":[5]')]


def test_text_that_is_no_roster() -> None:
    for text in NO_ROSTERS:
        with pytest.raises(RallypointError, match=r"cannot be read: .+\nhint: .*same version"):
            read_value(Roster, text)


def test_a_member_has_a_name_to_print() -> None:
    assert str(member("a")) == "host-a (process 197)"
    assert str(member("a", 0)) == "machine rank 0 on host-a (process 197)"


# What machines read of a roster, and who is told what when it changes


def digest(roster: Roster) -> Digest:
    return Digest.of(roster, TWO, Digest(version=6, names="old"), "new")


def told(before: Roster, after: Roster) -> dict[str, Assignment]:
    return {each.id: seat for each, seat in notices(before, after, 5.0)}


def test_a_digest_has_no_names_and_says_where_they_are() -> None:
    found = digest(gather(TWO, A, B, C).publish("host-a:1"))
    assert (found.version, found.names, found.names_before) == (7, "new", "old")
    assert (found.present, found.everybody, found.scribe, found.keeper) == (2, 3, "a", "a")
    assert read_value(Digest, to_text(found)) == found
    assert "host-b" not in to_text(found)


def due(roster: Roster) -> list[int]:
    """The numbers of the lines, of the next few, whose writers take lines in."""
    return [number for number in range(1, 6) if digest(roster).is_due(number, TWO)]


def test_few_machines_take_lines_in() -> None:
    assert due(Roster()) == [1, 2], "the first of all, and the last that is waited for"
    assert due(gather(TWO, A)) == [1], "the second has come"
    assert due(gather(TWO, A, B)) == [1, 2], "the first to start again, and the last"
    assert due(gather(TWO, A, B).lose({A}, TWO)) == [1]
    assert due(close(gather(TWO, A, B, C), "over", TWO)) == [3], "all have left"


def test_the_keeper_is_told_first_and_then_all() -> None:
    complete = gather(TWO, A, B)
    assert told(gather(TWO, A), complete) == {"a": Assignment(0, 0, 2, "0-a", time=5.0)}
    published = complete.publish("host-a:1")
    assert told(complete, published) == {
        name: Assignment(0, rank, 2, "0-a", "host-a:1", time=5.0) for rank, name in enumerate("ab")
    }
    assert told(published, join(published, C, TWO)) == {}


def test_when_a_round_ends_it_is_known_why_and_what_the_job_waits_for() -> None:
    crash = Ending("rank 3 ended by SIGKILL", 1.0)
    one_left = leave(gather(TWO, A, B), "b", TWO, crash)
    assert end_of(gather(TWO, A, B), one_left) is None
    ended = end_of(one_left, leave(one_left, "a", TWO))
    assert ended == RoundEnd(crash)
    assert read_value(RoundEnd, to_text(ended, sparse=True)) == ended
    with_spare = leave(join(gather(TWO, A, B, C), replace(A, visit=1), TWO), "b", TWO, crash)
    ended = end_of(gather(TWO, A, B, C), with_spare)
    assert ended == RoundEnd(crash, complete=True, present=2, newcomers=("host-c (process 199)",))


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
    complete = gather(TWO, A, B)
    again = {"b": Assignment(again=True)}
    assert told(complete, leave(complete, "a", TWO)) == again
    published = complete.publish("host-a:1")
    assert told(published, published.lose({A}, TWO)) == again, "it may have told nobody"
    assert told(published, leave(published, "a", TWO)) == {}, "the seats stay what they are"


def test_who_waits_is_told_that_the_meeting_is_closed() -> None:
    roster = gather(TWO, A, B, C)
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
    assert arcs(gather(TWO, A, B, C)) == [["a", "b", "c"]]
    assert digest(gather(TWO, A, B)).arcs == 1


def test_a_line_of_an_earlier_visit_does_not_count() -> None:
    again, _ = gather(TWO, A, B).apply([RosterRequest(come=replace(A, visit=2))], TWO)
    assert again.apply([RosterRequest(leave=A)], TWO)[0] == again
    assert again.apply([RosterRequest(come=A)], TWO)[0] == again


# All rules, over random histories


def arrival(each: Member) -> tuple[bool, int, bool]:
    """What decides a rank before the order of arrival does."""
    return each.rank < 0, each.rank, not each.keeps


class Histories(RuleBasedStateMachine):
    """Six machines that come, go and are lost; after every step, what may not be is not."""

    @initialize(
        bounds=st.tuples(st.integers(1, 6), st.integers(1, 6)),
        ranks=st.lists(st.integers(-1, 3), min_size=6, max_size=6),
        hosts=st.lists(st.sampled_from(["one", "two", "three"]), min_size=6, max_size=6),
        keeps=st.lists(st.booleans(), min_size=6, max_size=6),
    )
    def meet(self, bounds: tuple[int, int], ranks: list[int], hosts: list[str], keeps: list[bool]) -> None:
        self.size = Size(min(bounds), max(bounds))
        rest = zip("abcdef", hosts, ranks, keeps, strict=True)
        self.members = [Member(name, host, 100, rank, keep) for name, host, rank, keep in rest]
        self.roster = Roster()

    who = st.integers(0, 5)

    @rule(who=who)
    def join(self, who: int) -> None:
        member, roster = self.members[who], self.roster
        taken = any(each.rank == member.rank >= 0 and each.host != member.host for each in roster.everybody)
        known = member.id in {each.id for each in roster.everybody}
        try:
            joined = join(roster, member, self.size)
        except MeetingClosedError:
            assert roster.closed
            assert not known
        except UsageError:
            assert taken or member.rank >= self.size.most
            assert not known
        else:
            assert known or not (roster.closed or taken or member.rank >= self.size.most)
            self._step(joined, {*self._ids(), member.id}, unchanged=known)

    @rule(who=who)
    def leave(self, who: int) -> None:
        name = self.members[who].id
        self._step(
            leave(self.roster, name, self.size), self._ids() - {name}, unchanged=name not in self._ids()
        )

    @rule(who=st.sets(who, min_size=1, max_size=3))
    def lose(self, who: set[int]) -> None:
        before, silent = self.roster, {self.members[each] for each in who}
        names = {each.id for each in silent}
        took_part = tuple(each for each in before.present if each.id in names)
        after = before.lose(silent, self.size)
        self._step(after, self._ids() - names, unchanged=not names & self._ids(), loses=True)
        if after.round == before.round:
            assert after.lost == (*before.lost, *took_part)
        else:
            assert took_part == before.present
            assert set(took_part) <= set(after.gone)

    @precondition(lambda self: len(self.roster.present) >= self.size.least)
    @rule()
    def fill(self) -> None:
        self._step(self.roster.fill(), self._ids(), unchanged=self.roster.complete)
        assert self.roster.complete

    @precondition(lambda self: self.roster.complete)
    @rule(port=st.integers(1, 3))
    def publish(self, port: int) -> None:
        """As a machine does: only in a complete round."""
        store = f"one:{port}"
        self._step(
            self.roster.publish(store), self._ids(), unchanged=self.roster.store == store, publishes=True
        )
        assert self.roster.store == store

    @rule(reason=st.sampled_from(["first", "second"]))
    def close(self, reason: str) -> None:
        self._step(close(self.roster, reason, self.size), self._ids(), unchanged=bool(self.roster.closed))
        assert self.roster.closed

    def _ids(self) -> set[str]:
        return {each.id for each in self.roster.everybody}

    def _step(
        self,
        after: Roster,
        ids: set[str],
        *,
        unchanged: bool,
        loses: bool = False,
        publishes: bool = False,
    ) -> None:
        before, self.roster = self.roster, after
        assert (after == before) is unchanged
        assert self._ids() == ids
        assert read_value(Roster, to_text(after)) == after
        self._check_state(after)
        if after.round == before.round:
            self._check_same_round(before, after)
            assert loses or after.lost == (before.lost if after.complete == before.complete else ())
            assert publishes or after.store == before.store
        else:
            self._check_new_round(before, after)
            assert loses or len(before.present) == 1
        assert after.closed == before.closed or not before.closed
        assert after.told[: len(before.told)] == before.told
        assert (after.least, after.most) in ((before.least, before.most), (self.size.least, self.size.most))

    def _check_state(self, roster: Roster) -> None:
        present, waiting = roster.present, roster.waiting
        everybody = [each.id for each in roster.everybody]
        assert len(everybody) == len(set(everybody))
        assert all(each in self.members for each in roster.everybody)
        assert len(present) <= self.size.most
        asked = [each.rank for each in present if each.rank >= 0]
        assert len(asked) == len(set(asked))
        if roster.complete:
            assert present
            ranks = [roster.rank_of(each.id) for each in present]
            assert ranks == sorted(set(ranks), key=lambda rank: -1 if rank is None else rank)
            assert None not in ranks
            assert sorted(present, key=arrival) == list(present)
        else:
            assert len(present) < self.size.most
            assert not roster.store
            assert roster.closed or all(each.rank in asked for each in waiting), "who could come in waits"

    def _check_same_round(self, before: Roster, after: Roster) -> None:
        if before.complete == after.complete:
            assert after.lost[: len(before.lost)] == before.lost
        assert {each.id for each in before.lost} <= {each.id for each in (*after.lost, *after.gone)}
        if before.complete:
            assert after.complete
            assert after.present == tuple(each for each in before.present if each in after.present)
        elif after.complete:
            came = [each for each in (*before.everybody, *after.everybody) if each in after.present]
            assert after.present == tuple(sorted(dict.fromkeys(came), key=arrival))
            assert [after.rank_of(each.id) for each in after.present] == [*range(len(after.present))]
            assert after.keeper in after.present

    def _check_new_round(self, before: Roster, after: Roster) -> None:
        assert after.round == before.round + 1
        assert before.complete
        assert (after.store, after.lost) == ("", ())
        assert {each.id for each in before.lost} <= {each.id for each in after.gone}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40)
