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
from rallypoint.launch.rendezvous.roster import Ending, Member, Roster, RosterRequest, Size, read_value
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


def test_a_round_is_complete_when_the_last_machine_that_may_take_part_has_come() -> None:
    roster = gather(THREE, A, B)
    assert (roster.round, roster.complete, roster.present) == (0, False, (A, B))
    roster = join(roster, C, THREE)
    assert (roster.round, roster.complete, roster.present) == (0, True, (A, B, C))
    assert [roster.rank_of(name) for name in "abcd"] == [0, 1, 2, None]


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
    after, refused = roster.take_in([line], TWO)
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


@pytest.mark.parametrize(
    ("came", "ranked"),
    [
        ((A, B, C), "abc"),
        ((C, A, B), "cab"),
        ((member("a", 2), member("b", 0), member("c", 1)), "bca"),
        ((A, B, member("c", keeps=True)), "cab"),
        ((A, member("b", keeps=True), member("c", keeps=True)), "bca"),
        ((member("a", 1), member("b", 2, keeps=True), member("c", 0)), "cab"),
        ((A, member("b", 0), member("c", keeps=True)), "bca"),
    ],
    ids=[
        *("as they came", "as they came, whoever that is", "as asked for", "the keeper first"),
        *("two keepers", "asked for goes before keeping", "asked for, keeper, the rest"),
    ],
)
def test_ranks(came: tuple[Member, ...], ranked: str) -> None:
    assert names(gather(THREE, *came).present) == ranked


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


def test_the_last_to_leave_opens_the_next_round_for_those_who_wait() -> None:
    roster = gather(THREE, A, B, C).publish("host-a:1")
    for number, each in enumerate((B, A)):
        roster = join(leave(roster, each.id, THREE), each, THREE)
        assert (roster.round, roster.store, len(roster.waiting)) == (0, "host-a:1", number + 1)
    roster = leave(roster, "c", THREE)
    assert (roster.round, roster.complete, roster.store, roster.present) == (1, False, "", (A, B))
    roster = join(roster, C, THREE)
    assert (roster.round, roster.complete, roster.present) == (1, True, (A, B, C))


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


def test_the_last_to_be_lost_are_remembered_as_well() -> None:
    roster = gather(TWO, A, B, C).lose({A, B, C}, TWO)
    assert (roster.round, roster.complete, roster.everybody) == (1, False, ())
    assert roster.gone == (A, B), "c did not take part"


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
    (roster, _) = gather(TWO, A, B).take_in([RosterRequest(leave=A, lost=True)], TWO)
    assert (roster.lost, roster.wants_restart(TWO)) == ((A,), True)
    assert roster.take_in([RosterRequest(leave=A, lost=True)], TWO)[0] == roster


def test_one_that_is_not_fit_is_named_and_no_reason_to_start_again() -> None:
    (roster, _) = gather(TWO, A, B).take_in([RosterRequest(leave=C, sick="its GPU is gone")], TWO)
    assert not roster.wants_restart(TWO)
    roster = leave(leave(roster, "a", TWO), "b", TWO)
    assert list(map(str, roster.sick)) == ["host-c (process 199) is not fit: its GPU is gone"]
    (meeting,) = meetings_of(None, [("job", to_text(roster))])
    assert meeting.sick == ("host-c: its GPU is gone",)


def test_only_as_many_as_were_asked_for_are_spares() -> None:
    (roster, _) = gather(TWO, A, B).take_in([RosterRequest(come=each, spares=1) for each in (C, D)], TWO)
    (meeting,) = meetings_of(None, [("job", to_text(roster))])
    assert (meeting.spares, meeting.waiting) == (("host-c",), ("host-d",))


@given(st.lists(st.sampled_from([A, B, C, D, E]), max_size=12), st.integers(0, 12))
def test_many_lines_at_once_are_the_same_as_one_after_the_other(came: list[Member], first: int) -> None:
    lines = [RosterRequest(come=each, least=3, most=3) for each in came]
    whole, _ = Roster().take_in(lines, THREE)
    begun, _ = Roster().take_in(lines[:first], THREE)
    assert begun.take_in(lines[first:], THREE)[0] == whole


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


texts = st.text(max_size=8)
members = st.builds(Member, texts, texts, st.integers(0, 1 << 31), st.integers(-1, 9), st.booleans())
endings = st.builds(Ending, texts, st.floats(0, 1e10), st.booleans(), texts)
groups = st.lists(members, max_size=4).map(tuple)
rosters = st.builds(
    Roster,
    round=st.integers(0, 99),
    least=st.integers(-1, 9),
    most=st.integers(-1, 9),
    complete=st.booleans(),
    closed=texts,
    present=groups,
    waiting=groups,
    lost=groups,
    store=texts,
    gone=groups,
    told=st.lists(texts, max_size=3).map(tuple),
    endings=st.lists(endings, max_size=3).map(tuple),
    ended=st.none() | endings,
)


@settings(max_examples=50)
@given(rosters)
def test_json_and_back(roster: Roster) -> None:
    text = to_text(roster)
    assert read_value(Roster, text) == roster
    assert read_value(Roster, text.encode()) == roster
    assert text.isascii()


NO_ROSTERS: list[str | bytes] = [
    *("", "no json", "[]", "5", "null", '"roster"', b"\xff\xfe"),
    "[" * 100_000,
    to_text(Roster())[:-1],
    to_text(Roster()).replace('"lost":[]', '"lost":[5]'),
    to_text(Roster()).replace('"lost":[]', '"lost":[{"id":"a"}]'),
    to_text(Roster()).replace('"lost":[]', '"lost":5'),
    to_text(Roster()).replace('"folded":0', '"folded":"x"'),
    to_text(Roster()).replace('"complete":false', '"complete":0'),
    to_text(Roster()).replace('"told":[]', '"told":[1]'),
]


def test_text_that_is_no_roster() -> None:
    for text in NO_ROSTERS:
        with pytest.raises(RallypointError, match=r"cannot be read: .+\nhint: .*same version"):
            read_value(Roster, text)


def test_a_member_has_a_name_to_print() -> None:
    assert str(member("a")) == "host-a (process 197)"
    assert str(member("a", 0)) == "machine rank 0 on host-a (process 197)"


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
