"""What every log of a replicated store must do, whatever engine keeps it: one suite for all of them.

`LogContract` is inherited by a test class with the fixture `site`: a place where any number of logs of one
job can be opened, as several processes would, without a record at first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from rallypoint.errors import UsageError
from rallypoint.store.replica.log import (
    MOST_BYTES,
    Checkpoint,
    Extent,
    FencedError,
    Follower,
    Leadership,
    Log,
    LostRecordsError,
    TrimmedError,
)


@dataclass
class Site:
    """Where logs are opened: `connect` opens one of a job; `cleanup` closes them."""

    connect: Callable[[str], Log]
    cleanup: ExitStack = field(default_factory=ExitStack)

    def open(self, job: str = "job") -> Log:
        log = self.connect(job)
        self.cleanup.callback(log.close)
        return log

    def lead(self, job: str = "job") -> tuple[Log, int]:
        """A log that leads, and its term."""
        log = self.open(job)
        return log, log.acquire(log.read_leadership(), "a:1")


def read_all(log: Log, sequence: int = 1) -> Sequence[bytes]:
    """All records from this one on."""
    records: list[bytes] = []
    while some := log.read(sequence + len(records)):
        records += some
    return records


def fenced(call: Callable[[], object]) -> None:
    """Make a call that only who leads may make."""
    with pytest.raises(FencedError):
        call()


class LogContract:
    """The suite."""

    def test_a_new_log_is_empty(self, site: Site) -> None:
        log = site.open()
        assert log.read_leadership() == Leadership()
        assert log.read(1) == []
        assert log.checkpoint() is None
        assert log.followers() == []
        assert log.measure() == Extent()

    def test_records_come_back_in_order_to_all(self, site: Site) -> None:
        leader, term = site.lead()
        records = [b"record %d \x00\r\n\xff" % number for number in range(1, 25)]
        for number, data in enumerate(records, 1):
            leader.append(term, number, data)
        leader.renew(term)
        assert read_all(site.open()) == records
        assert read_all(site.open(), 23) == records[22:]
        assert read_all(leader, 25) == []

    def test_a_record_may_be_empty_or_very_long_but_not_longer(self, site: Site) -> None:
        leader, term = site.lead()
        longest = bytes(range(256)) * (MOST_BYTES // 256)
        leader.append(term, 1, b"")
        for number in range(2, 8):
            leader.append(term, number, longest)
        with pytest.raises(UsageError):
            leader.append(term, 8, longest + b"x")
        leader.renew(term)
        assert read_all(site.open()) == [b"", *[longest] * 6]

    def test_one_of_two_acquires_a_term_and_the_next_fences_it(self, site: Site) -> None:
        first, second = site.open(), site.open()
        seen = first.read_leadership()
        assert first.acquire(seen, "a:1") == 1
        fenced(lambda: second.acquire(seen, "b:1"))
        now = second.read_leadership()
        assert (now.term, now.address) == (1, "a:1")
        first.append(1, 1, b"of the first")
        assert second.acquire(now, "b:1") == 2
        fenced(lambda: first.append(1, 2, b"too late"))
        fenced(lambda: first.append(1, 1, b"of the first"))
        fenced(lambda: first.append(2, 2, b"with the number of another's term"))
        fenced(lambda: first.renew(1))
        fenced(lambda: first.put_checkpoint(1, Checkpoint(1, b"too late")))
        fenced(lambda: first.trim(1, 1))
        first.release(1)
        assert (second.read_leadership().term, second.read_leadership().address) == (2, "b:1")
        assert read_all(second) == [b"of the first"]
        assert second.checkpoint() is None
        second.append(2, 2, b"of the second")

    def test_a_beat_shows_that_the_leader_lives(self, site: Site) -> None:
        leader, term = site.lead()
        standby = site.open()
        seen = standby.read_leadership()
        leader.renew(term)
        now = standby.read_leadership()
        assert now.beat > seen.beat
        assert (now.term, now.address) == (seen.term, seen.address)
        fenced(lambda: standby.acquire(seen, "b:1"))
        leader.append(term, 1, b"the leader lives, and leads")

    def test_a_released_term_can_be_followed_at_once(self, site: Site) -> None:
        leader, term = site.lead()
        leader.release(term)
        leader.release(term)
        standby = site.open()
        assert (standby.read_leadership().term, standby.read_leadership().address) == (term, "")
        fenced(lambda: leader.append(term, 1, b"too late"))
        assert standby.acquire(standby.read_leadership(), "b:1") == term + 1
        assert leader.acquire(leader.read_leadership(), "a:1") == term + 2

    def test_calls_may_be_made_again(self, site: Site) -> None:
        """As after an unknown outcome."""
        leader = site.open()
        seen = leader.read_leadership()
        assert leader.acquire(seen, "a:1") == leader.acquire(seen, "a:1") == 1
        leader.append(1, 1, b"one")
        leader.append(1, 1, b"one")
        leader.append(1, 2, b"two")
        leader.append(1, 2, b"two")
        for _ in range(2):
            leader.put_checkpoint(1, Checkpoint(1, b"state"))
        for _ in range(2):
            leader.trim(1, 1)
        leader.renew(1)
        assert read_all(site.open(), 2) == [b"two"]
        assert site.open().checkpoint() == Checkpoint(1, b"state")
        leader.renew(1)
        assert leader.acquire(seen, "a:1") == 1
        leader.release(1)
        fenced(lambda: leader.acquire(seen, "a:1"))

    def test_another_record_of_a_number_and_a_gap_are_refused(self, site: Site) -> None:
        leader, term = site.lead()
        with pytest.raises(LostRecordsError):
            leader.append(term, 2, b"without a first")
        leader.append(term, 1, b"one")
        fenced(lambda: leader.append(term, 1, b"another one"))
        with pytest.raises(LostRecordsError):
            leader.append(term, 3, b"without a second")
        leader.append(term, 2, b"two")
        fenced(lambda: leader.append(term, 1, b"another one"))
        assert read_all(leader) == [b"one", b"two"]

    def test_the_same_bytes_of_another_term_are_another_record(self, site: Site) -> None:
        first, term = site.lead()
        first.append(term, 1, b"bytes")
        second, next_term = site.lead()
        fenced(lambda: second.append(next_term, 1, b"bytes"))

    def test_whoever_knows_more_than_the_log_is_told(self, site: Site) -> None:
        leader, term = site.lead()
        leader.append(term, 1, b"one")
        leader.renew(term)
        log = site.open()
        assert log.read(2) == []
        with pytest.raises(LostRecordsError):
            log.read(3)

    def test_a_term_that_the_engine_does_not_know_any_more(self, site: Site) -> None:
        """As when a replica became the engine that had not heard of it."""
        leader, term = site.lead()
        leader.append(term, 1, b"one")
        with pytest.raises(LostRecordsError):
            leader.append(term + 1, 2, b"two")
        with pytest.raises(LostRecordsError):
            leader.renew(term + 1)

    @pytest.mark.parametrize("length", [0, 1, MOST_BYTES, 5 * MOST_BYTES + 77])
    def test_a_checkpoint_of_any_length(self, site: Site, length: int) -> None:
        leader, term = site.lead()
        for number in range(1, 4):
            leader.append(term, number, b"record")
        data = bytes(range(251)) * (length // 251 + 1)
        for sequence in (2, 3):
            leader.put_checkpoint(term, Checkpoint(sequence, data[sequence : sequence + length]))
            assert site.open().measure() == Extent(3, sequence, length)
            assert site.open().checkpoint() == Checkpoint(sequence, data[sequence : sequence + length])

    def test_a_checkpoint_is_not_ahead_of_the_log(self, site: Site) -> None:
        leader, term = site.lead()
        leader.append(term, 1, b"one")
        with pytest.raises(LostRecordsError):
            leader.put_checkpoint(term, Checkpoint(2, b"state"))
        assert site.open().checkpoint() is None

    def test_trimmed_records_are_gone_and_the_log_goes_on(self, site: Site) -> None:
        leader, term = site.lead()
        for number in range(1, 31):
            leader.append(term, number, b"%d" % number)
        leader.put_checkpoint(term, Checkpoint(30, b"state"))
        leader.trim(term, 20)
        leader.renew(term)
        log = site.open()
        assert log.read(21)[0] == b"21"
        for sequence in (1, 19):
            with pytest.raises(TrimmedError):
                log.read(sequence)
        leader.trim(term, 30)
        with pytest.raises(TrimmedError):
            log.read(29)
        assert log.read(31) == []
        leader.append(term, 31, b"31")
        leader.renew(term)
        assert log.read(31) == [b"31"]
        with pytest.raises(LostRecordsError):
            leader.append(term, 33, b"33")
        second, next_term = site.lead()
        second.append(next_term, 32, b"32")

    def test_followers_come_and_tell_how_far_they_are(self, site: Site) -> None:
        log = site.open()
        site.open().announce(Follower("b:1", 3))
        site.open().announce(Follower("a:1", 2))
        site.open().announce(Follower("b:1", 7))
        assert log.followers() == [Follower("a:1", 2), Follower("b:1", 7)]

    def test_jobs_do_not_see_each_other(self, site: Site) -> None:
        leader, term = site.lead()
        leader.append(term, 1, b"one")
        leader.put_checkpoint(term, Checkpoint(1, b"state"))
        leader.announce(Follower("a:1", 1))
        for job in ("job2", "jo", "job/x"):
            other = site.open(job)
            assert other.read_leadership() == Leadership()
            assert other.read(1) == []
            assert other.checkpoint() is None
            assert other.followers() == []
        leader.append(term, 2, b"two")
        assert read_all(leader) == [b"one", b"two"]
        assert leader.checkpoint() == Checkpoint(1, b"state")

    def test_nobody_goes_on_with_a_log_that_has_lost_records(self, site: Site) -> None:
        """Whoever finds it says so on the engine: the others may not know what was lost."""
        leader, term = site.lead()
        leader.append(term, 1, b"one")
        leader.put_checkpoint(term, Checkpoint(1, b"state"))
        finder, other = site.open(), site.open()
        assert other.read_leadership().lost == ""
        finder.mark_lost("record 7 is gone")
        finder.mark_lost("record 9 is gone")
        seen = other.read_leadership()
        assert (seen.lost, seen.term) == ("record 7 is gone", term)
        for call in (
            lambda: other.acquire(seen, "b:1"),
            lambda: other.read(1),
            lambda: other.read(2),
            lambda: leader.renew(term),
            lambda: leader.append(term, 2, b"two"),
            lambda: leader.put_checkpoint(term, Checkpoint(1, b"other")),
            lambda: leader.trim(term, 1),
        ):
            with pytest.raises(LostRecordsError, match="record 7 is gone") as caught:
                call()
            assert "rallypoint erase" in caught.value.hint
        assert site.open("job2").read(1) == []
        other.erase()
        self.test_a_new_log_is_empty(site)
        other, term = site.lead()
        other.append(term, 1, b"of a new history")

    def test_a_log_that_has_lost_all(self, site: Site) -> None:
        log = site.open()
        log.mark_lost("all is gone")
        with pytest.raises(LostRecordsError, match="all is gone"):
            log.acquire(log.read_leadership(), "a:1")

    def test_an_erased_log_is_new_and_its_leader_is_fenced(self, site: Site) -> None:
        leader, term = site.lead()
        other, other_term = site.lead("job2")
        other.append(other_term, 1, b"one")
        leader.append(term, 1, b"one")
        leader.put_checkpoint(term, Checkpoint(1, b"state"))
        leader.announce(Follower("a:1", 1))
        seen = leader.read_leadership()
        log = site.open()
        log.erase()
        log.erase()
        fenced(lambda: leader.renew(term))
        fenced(lambda: leader.append(term, 2, b"two"))
        fenced(lambda: leader.acquire(seen, "a:1"))
        with pytest.raises(LostRecordsError):
            leader.read(2)
        self.test_a_new_log_is_empty(site)
        another, term = site.lead()
        another.append(term, 1, b"of another history")
        fenced(lambda: leader.append(term, 1, b"of the old one"))
        assert read_all(other) == [b"one"]
