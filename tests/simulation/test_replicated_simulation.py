"""Random runs of a replicated store whose processes are killed and stopped, and proof that its checks see.

Each broken rule below is one that somebody could think of as an improvement, or forget.
"""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest

from memory_log import MemoryLog, _Record
from rallypoint.store.core.context import DriverTask
from rallypoint.store.replica.core.leader import Caller, LeaderCore
from rallypoint.store.replica.core.replica import Replica
from replicated_simulation import simulate
from simulation import in_batches, must_catch


@in_batches(300, 2_050)
def test_every_run_could_have_been_one_store(seeds: range) -> None:
    for seed in seeds:
        simulate(seed)


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in range(3):
        assert simulate(seed).report() == simulate(seed).report()


# Broken rules


def test_replies_that_leave_before_the_commit_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    next_record, committed = LeaderCore.next_record, LeaderCore.committed

    def carry_out_at_once(self: LeaderCore, most: int) -> Sequence[bytes]:
        parts = next_record(self, most)
        under_way = self._in_flight
        if parts:
            committed(self)
            self._in_flight = under_way
        return parts

    def only_go_on(self: LeaderCore) -> None:
        self._in_flight = []
        if self._entries:
            self.outbox.others.append(DriverTask.FLUSH)

    monkeypatch.setattr(LeaderCore, "next_record", carry_out_at_once)
    monkeypatch.setattr(LeaderCore, "committed", only_go_on)
    what = "should be one of|no order explains|lost or doubled|has lost its session"
    must_catch(what, first=1, simulate=simulate)


def test_appends_of_an_old_term_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: MemoryLog, term: int, sequence: int, data: bytes) -> None:
        memory = self._memory
        memory.begin(writes=True)
        memory.records[memory.last + 1] = _Record(term, data)
        memory.end()

    monkeypatch.setattr(MemoryLog, "_check", lambda _, __: None)
    monkeypatch.setattr(MemoryLog, "append", append)
    must_catch("differ after record|goes on from another record", first=2, simulate=simulate)


def test_a_read_after_the_lease_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_read(self: LeaderCore, name: str, awaited: Sequence[bytes]) -> bool:
        store = self.replica.stores.get(name)
        return not awaited or (store is not None and not store.engine.missing(awaited))

    monkeypatch.setattr(LeaderCore, "may_read", may_read)
    must_catch("no order explains", first=5, simulate=simulate)


def test_an_expiry_that_is_not_logged_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    overdue = LeaderCore.overdue

    def expire_by_its_own_clock(self: LeaderCore) -> list[tuple[Caller, str]]:
        for core in self.replica.stores.values():
            core.sessions.expire(self.time)
        with patch.object(Replica, "awaits_sessions", False):
            return overdue(self)

    monkeypatch.setattr(LeaderCore, "overdue", expire_by_its_own_clock)
    must_catch("differ after record", first=3, simulate=simulate)
