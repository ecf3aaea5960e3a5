"""Machines that meet: what they agree on, whatever comes between them, and whom they miss.

Time passes only when a test says so. Where several machines act at once, they are threads around one store;
where it matters which acts when, they take turns from one store operation to the next (`Turns`).
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any, Generic, NamedTuple, TypeVar

import pytest

from meeting_bench import exponent, measure
from rallypoint.client.base import PrefixStore, Store, Timeout, Value
from rallypoint.client.local import HashStore
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import (
    ConnectError,
    JoinTimeoutError,
    MeetingClosedError,
    RallypointError,
    StoreTimeoutError,
    UsageError,
)
from rallypoint.launch.endpoint import Endpoint, Endpoints
from rallypoint.launch.options import RendezvousSettings
from rallypoint.launch.rendezvous.digest import Assignment, RoundEnd
from rallypoint.launch.rendezvous.participant import Heartbeat, Participant, Round
from rallypoint.launch.rendezvous.register import Register
from rallypoint.launch.rendezvous.roster import Ending, Member, RosterRequest, Size
from rallypoint.launch.rendezvous.servers import open_place
from rallypoint.store.rollcall.plan import JobRound
from rallypoint.store.server.process.binding import reserve
from rallypoint.store.server.process.hosting import HostedServer, host_server
from rallypoint.store.wire.opcodes import Op
from raw import SECONDS, until

T = TypeVar("T")

TIMES = RendezvousSettings(
    join_timeout=60, last_call_timeout=30, close_timeout=30, keep_alive_interval=5, keep_alive_max_attempt=3
)
LOOK = "rallypoint.launch.rendezvous.participant._CHECK_SECONDS"


class Time:
    """A clock for each machine; it stands still until it is advanced."""

    def __init__(self) -> None:
        self._now: Counter[str] = Counter()
        self._looks: Counter[str] = Counter()

    def watch(self, name: str) -> Callable[[], float]:
        def look() -> float:
            self._looks[name] += 1
            return self._now[name]

        self._now[name] = self._now.get(name, 0)
        return look

    def advance(self, seconds: int, *names: str) -> None:
        """For the machines named, or for all."""
        for name in names or self._now:
            self._now[name] += seconds

    def await_looks(self, *names: str) -> None:
        """Wait until these machines have seen what the time is now, and have acted on it."""
        before = self._looks.copy()
        until(
            lambda: all(self._looks[name] > before[name] + 6 for name in names),
            f"{names} looked at the clock",
        )


class Call(Generic[T]):
    """A call in a thread of its own."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._act = act
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._future.set_result(self._act())
        except BaseException as error:
            self._future.set_exception(error)

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self) -> T:
        return self._future.result(SECONDS)


class Machine(Participant):
    """A machine whose stores are but names, which it notes in `started`: the round, and itself."""

    def __init__(
        self, hall: Hall, store: Store, member: Member, size: Size, times: RendezvousSettings
    ) -> None:
        super().__init__(
            store, hall.run_id, member, size, times, hall.time.watch(member.id), on_end=self._hear
        )
        self.ends: list[tuple[int, RoundEnd]] = []
        self.store = store
        self.started = hall.started
        self.before_start: Callable[[], object] = lambda: None

    def enter(self) -> Round:
        return self.next_round(self._start)

    def coming(self) -> Call[Round]:
        return Call(self.enter)

    def _hear(self, number: int, end: RoundEnd) -> None:
        self.ends.append((number, end))

    def _start(self, seat: Assignment) -> str:
        self.before_start()
        self.started.append((seat.round, self.member.id))
        return f"{self.member.id}:{seat.round}:{len(self.started)}"


class Hall:
    """Where the machines of a job meet, each with a client of its own."""

    def __init__(self, client: Callable[[], Store], run_id: str) -> None:
        self._client = client
        self.run_id = run_id
        self.time = Time()
        self.started: list[tuple[int, str]] = []
        self._stores: list[Store] = []

    def store(self) -> Store:
        self._stores.append(self._client())
        return self._stores[-1]

    def machine(
        self,
        name: str,
        size: Size,
        rank: int = -1,
        *,
        keeps: bool = False,
        times: RendezvousSettings = TIMES,
        store: Store | None = None,
    ) -> Machine:
        member = Member(name, f"host-{name}", 100 + len(self._stores), rank, keeps)
        return Machine(self, store or self.store(), member, size, times)

    def machines(self, names: str, size: Size, times: RendezvousSettings = TIMES) -> list[Machine]:
        return [self.machine(name, size, times=times) for name in names]

    def close(self) -> None:
        """End every client, and with them all threads that still wait."""
        for store in self._stores:
            store.close()


def together(machines: Sequence[Machine]) -> list[Round]:
    """All enter the next round at the same time."""
    calls = [machine.coming() for machine in machines]
    return [call.result() for call in calls]


class Agreed(NamedTuple):
    """What all members of a round say of it."""

    number: int
    store: str
    members: tuple[Member, ...]


def agreed(machines: Sequence[Machine], rounds: Sequence[Round]) -> Agreed:
    """What all say of a round; the rank is each one's own, and its place among the members."""
    first = rounds[0]
    for met in rounds:
        assert replace(met, rank=first.rank) == first
    assert first.size == len(machines)
    by_rank = {met.rank: machine.member for machine, met in zip(machines, rounds, strict=True)}
    members = tuple(by_rank[rank] for rank in range(first.size))
    assert first.name == f"{first.number}-{members[0].id}"
    return Agreed(first.number, first.store, members)


def names(members: Sequence[Member]) -> str:
    return "".join(each.id for each in members)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOOK, 0.01)


@pytest.fixture
def _looks_seldom(_looks_often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not woken by a change itself sees it too late."""
    monkeypatch.setattr(LOOK, 10 * SECONDS)


@pytest.fixture
def hall() -> Iterator[Hall]:
    """A meeting in the memory of this process."""
    place = HashStore(SECONDS)
    hall = Hall(place.clone, "job")
    yield hall
    hall.close()


@pytest.fixture(scope="module")
def server() -> Iterator[HostedServer]:
    running = host_server("localhost", 0)
    yield running
    running.release()


@pytest.fixture(params=["memory", "server"])
def any_hall(request: pytest.FixtureRequest, server: HostedServer) -> Iterator[Hall]:
    """A meeting in memory, or at a store server."""
    if request.param == "memory":
        hall = Hall(HashStore(SECONDS).clone, "job")
    else:
        hall = Hall(lambda: TCPStore(*server.address, timeout=SECONDS), request.node.name)
    yield hall
    hall.close()


# Coming together


@pytest.mark.usefixtures("_looks_seldom")
@pytest.mark.parametrize("count", [1, 8])
def test_machines_that_come_at_the_same_time_agree(any_hall: Hall, count: int) -> None:
    machines = any_hall.machines("abcdefgh"[:count], Size(count, count))
    met = agreed(machines, together(machines))
    assert (met.number, met.store) == (0, f"{met.members[0].id}:0:1")
    assert any_hall.started == [(0, met.members[0].id)]


def test_a_store_that_nobody_leads_is_named() -> None:
    """The sockets do not listen, as those of processes that stand by."""
    standbys = [reserve("127.0.0.1", 0)[0] for _ in range(2)]
    places = Endpoints(Endpoint(*each.getsockname()) for each in standbys)
    with pytest.raises(ConnectError) as caught:
        open_place(places, 2, "job", seconds=0.2)
    for place in map(str, places):
        assert place in caught.value.message
        assert place in caught.value.hint
    assert "serve --engine" in caught.value.hint
    for each in standbys:
        each.close()


def test_jobs_at_one_place_do_not_meet(hall: Hall) -> None:
    alone = Hall(hall.store, "another job")
    one, two = hall.machine("a", Size(1, 1)), alone.machine("b", Size(1, 1))
    assert agreed([one], [one.enter()]).number == agreed([two], [two.enter()]).number == 0


class OneByOne(PrefixStore):
    """A part of a store, to which requests that go together come one after the other."""

    def add_and_look(
        self, counter: str, amount: int, key: str, *, after: tuple[str, Value] | None = None
    ) -> tuple[int, bytes]:
        return Store.add_and_look(self, counter, amount, key, after=after)


def traffic(count: int) -> int:
    """How many bytes go to and from the store until so many machines have met, one coming after the other."""
    sizes: list[int] = []
    hall = Hall(HashStore(SECONDS).clone, "job")

    class Weighed(OneByOne):
        def _call(self, op: Op, *blobs: bytes, tail: bytes = b"") -> Any:
            found = super()._call(op, *blobs, tail=tail)
            sizes.extend(map(len, blobs))
            if isinstance(found, bytes):
                sizes.append(len(found))
            return found

    size = Size(count, count)
    machines = [
        hall.machine(f"{number:04}", size, store=Weighed("weighed", hall.store())) for number in range(count)
    ]
    arrived = {machine: machine._join() for machine in machines}
    for machine in machines:
        machine._join = lambda *_: arrived[machine]  # type: ignore[method-assign]  # noqa: B023
        machine.enter()
    hall.close()
    return sum(sizes)


@pytest.mark.usefixtures("_looks_seldom")
def test_a_machine_reads_and_writes_as_little_among_many_as_among_few() -> None:
    """If each read the names of all, four times as many would move sixteen times as much."""
    assert traffic(320) < 5 * traffic(80)


def test_all_machines_are_one_ring(hall: Hall) -> None:
    """Each looks after the next one, and can go on from there to all others."""
    members = [Member(f"{number:016x}", "host", number) for number in range(300)]
    registers = {each.id: Register(hall.store(), each.id, Size(300, 300)) for each in members}
    for each in members:
        registers[each.id].post(RosterRequest(come=each))
    rings = {each: list(register.ring(register.digest())) for each, register in registers.items()}
    walk = [members[0].id]
    while (following := rings[walk[-1]][0]) != walk[0]:
        walk.append(following)
    assert sorted(walk) == sorted(registers)
    for place, one in enumerate(walk):
        assert rings[one] == walk[place + 1 :] + walk[:place]
    stranger = Register(hall.store(), "z", Size(300, 300))
    assert list(stranger.ring(stranger.digest())) == []


def test_while_machines_keep_coming_the_scribe_takes_many_in_at_once(hall: Hall) -> None:
    size = Size(300, 300)
    scribe = hall.machine("scribe", size)
    scribe._join()
    for number in range(256):
        member = Member(f"{number:016x}", "host", number)
        Register(PrefixStore(scribe.prefix, hall.store()), member.id, size).post(RosterRequest(come=member))
        digest = scribe._read_digest()
    assert digest.version < 64
    assert scribe._read_digest().everybody == 257, "as no more came"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_machines_meet() -> None:
    figures = [measure(count) for count in (2_500, 10_000)]
    assert exponent(figures) < 1.2, figures


# Starting again


def test_one_that_starts_again_takes_the_others_along(any_hall: Hall) -> None:
    machines = any_hall.machines("abc", Size(3, 3))
    stores = {agreed(machines, together(machines)).store}
    for number, starter in enumerate((0, 2, 0, 1), start=1):
        first, *others = machines[starter:] + machines[:starter]
        assert not any(machine.wants_restart() for machine in machines)
        again = first.coming()
        for other in others:
            until(other.wants_restart, "the others notice")
        assert not again.done
        met = agreed([*others, first], [*together(others), again.result()])
        assert met.number == number
        assert met.store not in stores
        stores.add(met.store)
    assert [number for number, _ in any_hall.started] == [0, 1, 2, 3, 4]


# More than enough, and less


def test_who_comes_before_the_last_call_takes_part(hall: Hall) -> None:
    size = Size(2, 4)
    first, second, third = hall.machines("abc", size)
    calls = [first.coming(), second.coming()]
    until(lambda: len(first.roster.present) == 2, "two have come")
    hall.time.await_looks("a", "b")
    hall.time.advance(29)
    hall.time.await_looks("a", "b")
    assert not first.roster.complete
    calls.append(third.coming())
    until(lambda: len(first.roster.present) == 3, "the third has come")
    hall.time.await_looks("a", "b", "c")
    hall.time.advance(29)  # the call is the last one only when nobody else comes
    hall.time.await_looks("a", "b", "c")
    assert not first.roster.complete
    hall.time.advance(1)
    met = agreed([first, second, third], [call.result() for call in calls])
    assert len(hall.started) == 1
    assert met.number == 0


def test_one_too_many_waits_as_long_as_it_takes(hall: Hall) -> None:
    size = Size(2, 2)
    first, second, spare = hall.machines("abc", size)
    together([first, second])
    coming = spare.coming()
    until(lambda: first.roster.waiting, "the spare one waits")
    hall.time.advance(100_000)
    assert not first.wants_restart()
    first.leave()
    assert second.wants_restart()
    met = agreed([second, spare], [second.enter(), coming.result()])
    assert (met.number, names(met.members)) == (1, "bc")


# Waiting in vain


def test_who_came_and_who_is_missing_is_said(hall: Hall) -> None:
    size = Size(4, 4)
    first, second = hall.machine("a", size, 0), hall.machine("b", size, 2)
    coming = first.coming()
    second.coming()
    until(lambda: len(first.roster.present) == 2, "two have come")
    hall.time.await_looks("a")
    hall.time.advance(59, "a")
    hall.time.await_looks("a")
    assert not coming.done
    hall.time.advance(1, "a")
    with pytest.raises(JoinTimeoutError) as caught:
        coming.result()
    assert isinstance(caught.value, StoreTimeoutError)
    message = caught.value.message
    assert message.startswith("2 of 4 machines connected within 60 s: ")
    assert "machine rank 0 on host-a (process 100)" in message
    assert "machine rank 2 on host-b (process 101)" in message
    assert message.endswith("; missing: machine rank 1, 3")
    assert "endpoint" in caught.value.hint
    assert names(second.roster.everybody) == "b", "who gives up leaves"


def test_who_waits_for_a_rank_that_is_taken_is_said(hall: Hall) -> None:
    """As two agents of one machine do that were given the same rank."""
    first, second = hall.machine("a", Size(2, 2), 0), hall.machine("b", Size(2, 2), 0)
    second.member = replace(second.member, host="host-a")
    coming = first.coming()
    until(lambda: len(first.roster.present) == 1, "the first has come")
    second.coming()
    until(lambda: len(first.roster.waiting) == 1, "the second waits")
    hall.time.await_looks("a")
    hall.time.advance(60, "a")
    with pytest.raises(JoinTimeoutError) as caught:
        coming.result()
    assert caught.value.message == (
        "1 of 2 machines connected within 60 s: machine rank 0 on host-a (process 100); "
        "missing: machine rank 1; "
        "waiting for a rank that is taken: machine rank 0 on host-a (process 101)"
    )


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], str]]:
    """What describes the state of each machine that waits; no thread prints it."""
    found: dict[str, Callable[[], str]] = {}

    def waiting(describe: Callable[[], str], *, at_start: bool, update_seconds: float) -> nullcontext[None]:
        assert at_start or found
        found[chr(ord("a") + len(found))] = describe
        return nullcontext()

    monkeypatch.setattr("rallypoint.launch.rendezvous.participant.Waiting", waiting)
    return found


def test_a_machine_describes_what_it_waits_for(hall: Hall, states: dict[str, Callable[[], str]]) -> None:
    size = Size(2, 3)
    machines = hall.machines("abcd", size)
    rival = JobRound("exp/2", 0, 4, ("node-x",))
    machines[0]._find_jobs = lambda: (rival, replace(rival, closed="it has ended"), replace(rival, job="job"))
    calls = [machines[0].coming()]
    until(lambda: len(machines[0].roster.present) == 1, "the first has come")
    other = "another job is using this endpoint: ID exp/2 (1 of 4 machines); this job's ID is job"
    hall.time.advance(10, "a")
    assert (
        states["a"]()
        == f"waiting for 1 of 2 machines at the endpoint (connected: host-a), 50 s left; {other}"
    )
    calls.append(machines[1].coming())
    until(lambda: len(machines[0].roster.present) == 2, "the second has come")
    until(lambda: len(states) == 2, "the second waits")
    state = "waiting for up to 1 more machine at the endpoint (connected: host-a, host-b), 30 s left"
    until(lambda: states["b"]() == state, "the second says it")
    calls.append(machines[2].coming())
    for call in calls:
        call.result()
    machines[3].coming()
    until(lambda: len(states) == 4, "the last waits")
    assert states["d"]() == "the job runs on 3 machines; this machine waits for a place"


def test_one_that_comes_after_others_were_refused_is_told_of_them(
    hall: Hall, states: dict[str, Callable[[], str]]
) -> None:
    def coming(name: str, size: Size) -> tuple[Machine, Call[Round]]:
        machine = hall.machine(name, size)
        machine._settings = (("--nnodes", str(size)),)
        return machine, machine.coming()

    first, refused = coming("a", Size(3, 3))
    until(lambda: len(first.roster.present) == 1, "the first has come")
    calls = [refused, coming("b", Size(2, 2))[1]]
    why = "machines were started with different settings: host-b (process 101) has --nnodes=2, and host-a"
    for call in calls:
        with pytest.raises(UsageError, match=re.escape(why)):
            call.result()
    _, waits = coming("c", Size(3, 3))
    until(lambda: "c" in states, "it waits")
    assert (
        f"2 of 3 machines at the endpoint (connected: host-c), 60 s left; before that, {why}" in states["c"]()
    )
    hall.time.advance(60, "c")
    with pytest.raises(JoinTimeoutError, match=re.escape(why)):
        waits.result()
    correct = hall.machines("def", Size(3, 3))
    assert names(agreed(correct, together(correct)).members) == "def"


def test_a_machine_that_finds_a_job_of_one_machine_at_the_endpoint_is_told_that_settings_differ(
    hall: Hall, states: dict[str, Callable[[], str]]
) -> None:
    machine = hall.machine("a", Size(2, 2))
    machine._find_jobs = lambda: (JobRound("", 0, 1, ("host-x",)),)
    coming = machine.coming()
    until(lambda: "a" in states, "it waits")
    states["a"]()
    with pytest.raises(UsageError, match=r"host-a \(process 100\) has --nnodes=2, and host-x has --nnodes=1"):
        coming.result()
    assert not machine.roster.everybody


def test_a_job_of_one_machine_is_refused_where_several_meet_for_it(server: HostedServer) -> None:
    """Who meets there alone, or under another id, keeps nobody from training alone."""
    endpoint = Endpoint(*server.address)

    def meets_here(run_id: str) -> bool:
        place = open_place(Endpoints([endpoint]), 1, run_id, seconds=SECONDS)
        place.close(alone=True)
        return isinstance(place.store, TCPStore)

    hall = Hall(lambda: TCPStore(*endpoint, timeout=SECONDS), "of two")
    hall.machine("a", Size(2, 2)).coming()
    until(lambda: meets_here("of two"), "it is there")
    assert not meets_here("another")
    hall.close()


def test_who_was_lost_meanwhile_is_said(hall: Hall) -> None:
    machines = hall.machines("abc", Size(4, 4))
    calls = []
    for count, machine in enumerate(machines, start=1):
        calls.append(machine.coming())
        until(lambda: len(machines[0].roster.present) == count, "one more has come")  # noqa: B023
    machines[2].store.close()
    with pytest.raises(RallypointError, match="closed"):
        calls[2].result()
    miss(hall, machines, machines[2])
    hall.time.advance(60, "a")
    with pytest.raises(JoinTimeoutError, match=r"2 of 4 .*; lost before: host-c \(process 102\)\n"):
        calls[0].result()


# Signs of life


def miss(hall: Hall, machines: Sequence[Machine], *dead: Machine) -> None:
    """Let machines live on without those that are dead until they have noticed it."""
    alive = [machine for machine in machines if machine not in dead]
    gone = {machine.member.id for machine in dead}
    for _ in range(TIMES.keep_alive_max_attempt + 4):
        beat(hall, alive)
        if not gone & {each.id for each in alive[0].roster.everybody}:
            return
    raise AssertionError(f"{gone} are not missed: {alive[0].roster}")


def beat(hall: Hall, alive: Sequence[Machine]) -> None:
    hall.time.advance(5)
    for machine in alive:
        machine.beat()


@pytest.mark.parametrize("victim", [0, 2])
def test_who_gives_none_is_lost_and_the_others_start_again(any_hall: Hall, victim: int) -> None:
    machines = any_hall.machines("abc", Size(2, 3))
    together(machines)
    dead = machines.pop(victim)
    for _ in range(TIMES.keep_alive_max_attempt):
        beat(any_hall, machines)
        assert not machines[0].wants_restart()
    miss(any_hall, [*machines, dead], dead)
    assert machines[0].roster.lost == (dead.member,)
    assert all(machine.wants_restart() for machine in machines)
    calls = [machine.coming() for machine in machines]
    call_last(any_hall, machines)
    assert agreed(machines, [call.result() for call in calls]).number == 1
    assert not any(machine.wants_restart() for machine in machines)


@pytest.mark.parametrize("count", [2, 20])
def test_a_job_whose_machines_were_all_killed_is_soon_started_again(hall: Hall, count: int) -> None:
    """All are lost after about the time that one takes, however many they are."""
    size = Size(count, count)
    together(hall.machines("abcdefghijklmnopqrst"[:count], size))
    machines = hall.machines("ABCDEFGHIJKLMNOPQRST"[:count], size)
    calls = [machine.coming() for machine in machines]
    until(lambda: len(machines[0].roster.waiting) == count, "all wait")
    for _ in range(TIMES.keep_alive_max_attempt + 4):
        beat(hall, machines)
    assert agreed(machines, [call.result() for call in calls]).number == 1


def test_who_was_counted_as_lost_may_come_back(hall: Hall) -> None:
    machines = hall.machines("ab", Size(2, 2))
    together(machines)
    miss(hall, machines, machines[1])
    assert agreed(machines, together(machines)).number == 1
    for _ in range(10):
        beat(hall, machines)
    assert machines[0].roster.lost == ()


def test_who_was_counted_as_lost_learns_of_it(hall: Hall) -> None:
    first, second, stalled = machines = hall.machines("abc", Size(2, 3))
    together(machines)
    miss(hall, machines, stalled)
    calls = [first.coming(), second.coming()]
    call_last(hall, [first, second])
    assert {call.result().number for call in calls} == {1}
    assert stalled.wants_restart()


def test_a_pause_of_all_costs_nobody_its_place(hall: Hall) -> None:
    """As when the meeting place does not answer for a while."""
    machines = [hall.machine(name, Size(3, 3), rank) for rank, name in enumerate("abc")]
    together(machines)
    for _ in range(3):
        beat(hall, machines[::-1])  # so that each has seen the latest of its neighbour
    hall.time.advance(1000)
    for _ in range(5):
        beat(hall, machines)
    assert machines[0].roster.lost == ()


@pytest.mark.parametrize(("beat", "missed", "expected"), [(5.0, 3, 3), (5.0, 1, 2), (0.3, 3, 34)])
def test_patience_outlasts_a_store_that_moves(beat: float, missed: int, expected: int) -> None:
    times = RendezvousSettings(keep_alive_interval=beat, keep_alive_max_attempt=missed)
    assert times.outlasting(10.0).keep_alive_max_attempt == expected
    assert times.outlasting(0.0) == times


def test_one_that_waits_for_a_keeper_goes_on_when_that_is_lost(hall: Hall) -> None:
    size = Size(1, 2)
    keeper, other = machines = hall.machine("a", size, keeps=True), hall.machine("b", size)
    starts, may_go_on = threading.Event(), threading.Event()

    def start_slowly() -> None:
        starts.set()
        may_go_on.wait(SECONDS)

    keeper.before_start = start_slowly
    late, coming = keeper.coming(), other.coming()
    assert starts.wait(SECONDS)
    until(lambda: other.roster.complete, "the round is complete")
    miss(hall, machines, keeper)
    call_last(hall, [other])
    met = agreed([other], [coming.result()])
    assert (met.number, met.store) == (1, "b:1:1")
    may_go_on.set()  # what it started is for a round that is over
    until(other.wants_restart, "who was lost has come back")
    assert other.roster.store == "b:1:1"
    met = agreed([other, keeper], [other.enter(), late.result()])
    assert (met.number, met.store) == (2, "a:2:3")


def call_last(hall: Hall, machines: Sequence[Machine]) -> None:
    """Let the time of the last call pass, once these have come to an open round."""
    wanted = {machine.member.id for machine in machines}
    watch = machines[0]

    def are_there() -> bool:
        roster = watch.roster
        return not roster.complete and {each.id for each in roster.present} == wanted

    until(are_there, "all of them are in an open round")
    hall.time.await_looks(*wanted)
    hall.time.advance(30)


def test_a_heart_beats_until_it_is_stopped(hall: Hall, caplog: pytest.LogCaptureFixture) -> None:
    machine = hall.machine("a", Size(1, 1), times=RendezvousSettings(keep_alive_interval=0.001))
    beats = PrefixStore("rallypoint/meeting/job/beat", hall.store())
    heart = Heartbeat(machine)
    until(lambda: beats.add("a", 0) >= 3, "it beats")
    heart.stop()
    count = beats.add("a", 0)
    machine.beat()
    assert beats.add("a", 0) == count + 1
    assert not caplog.records


def test_a_heart_outlives_the_meeting_place(hall: Hall, caplog: pytest.LogCaptureFixture) -> None:
    machine = hall.machine("a", Size(1, 1), times=RendezvousSettings(keep_alive_interval=0.001))
    heart = Heartbeat(machine)
    machine.store.close()
    with caplog.at_level(logging.WARNING, "rallypoint.meeting"):
        until(lambda: len(caplog.records) >= 2, "it says so, and goes on")
        heart.stop()
    assert "the meeting place does not answer" in caplog.records[0].getMessage()


# The end


@pytest.mark.usefixtures("_looks_seldom")
def test_who_waits_is_told_that_the_meeting_is_closed(any_hall: Hall) -> None:
    first, second, spare = any_hall.machines("abc", Size(2, 2))
    together([first, second])
    coming = spare.coming()
    until(lambda: first.roster.waiting, "the spare one waits")
    first.close("the job has ended")
    with pytest.raises(MeetingClosedError, match="the job has ended"):
        coming.result()
    assert {each.id for each in second.roster.everybody} == {"a", "b"}
    assert not second.wants_restart(), "who takes part goes on"


def test_who_is_in_an_open_round_is_told_that_the_meeting_is_closed(hall: Hall) -> None:
    first, second = hall.machines("ab", Size(2, 2))
    coming = first.coming()
    until(lambda: first.roster.present, "the first has come")
    second.close("enough")
    with pytest.raises(MeetingClosedError, match="enough"):
        coming.result()
    with pytest.raises(MeetingClosedError, match="enough"):
        second.enter()
    assert second.roster.everybody == ()


def test_who_holds_the_place_waits_for_the_others_to_leave(any_hall: Hall) -> None:
    machines = any_hall.machines("abc", Size(3, 3))
    together(machines)
    waiting = Call(machines[0].await_others_gone)
    machines[1].leave()
    any_hall.time.await_looks("a")
    assert not waiting.done
    machines[2].leave()
    assert waiting.result() is True


def test_it_waits_no_longer_than_it_should(hall: Hall) -> None:
    machines = hall.machines("ab", Size(2, 2))
    together(machines)
    waiting = Call(machines[0].await_others_gone)
    hall.time.await_looks("a")
    hall.time.advance(29)
    hall.time.await_looks("a")
    assert not waiting.done
    hall.time.advance(1)
    assert waiting.result() is False


def test_an_id_can_be_used_again_when_all_machines_of_a_job_have_left(hall: Hall) -> None:
    machines = hall.machines("ab", Size(2, 2))
    [before, _] = together(machines)
    for each in machines:
        each.close("the job has ended")
        each.leave()
    others = hall.machines("cd", Size(2, 2))
    for each in others:
        each.open_again()
    assert agreed(others, together(others)).number > before.number


def test_machines_that_were_killed_before_they_left_do_not_keep_an_id(
    hall: Hall, caplog: pytest.LogCaptureFixture
) -> None:
    dead, alive, last = machines = hall.machines("abc", Size(3, 3))
    together(machines)
    alive.beat()  # the dead one has not even given its first sign
    last.close("the job has ended")
    last.leave()
    others = hall.machines("def", Size(3, 3))
    with caplog.at_level(logging.WARNING, "rallypoint.meeting"):
        opening = [Call(each.open_again) for each in others]
        until(lambda: len(caplog.records) == 3, "they wait for signs of life")
    alive.beat()
    hall.time.advance(5)
    for call in opening:
        with pytest.raises(MeetingClosedError, match="the job has ended"):
            call.result()
    opening = [Call(each.open_again) for each in others]
    hall.time.await_looks("d", "e", "f")
    alive.leave()
    for _ in range(TIMES.keep_alive_max_attempt):
        hall.time.advance(5)
        hall.time.await_looks("d", "e", "f")
    assert dead.is_closed

    def all_are_done_later() -> bool:
        hall.time.advance(5)
        return all(call.done for call in opening)

    until(all_are_done_later, "the dead one is given up")
    for call in opening:
        call.result()
    assert agreed(others, together(others)).number > 0


@pytest.mark.usefixtures("_looks_seldom")
def test_one_that_gives_up_is_missed_at_once_and_a_spare_takes_its_place(hall: Hall) -> None:
    first, second, spare = hall.machines("abc", Size(2, 2))
    together([first, second])
    coming = spare.coming()
    until(lambda: first.roster.waiting, "the spare one waits")
    second.give_up()
    assert first.wants_restart()
    assert names(agreed([first, spare], [first.enter(), coming.result()]).members) == "ac"


def test_one_that_is_not_fit_is_named_and_waits_for_the_end(
    hall: Hall, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, sick = hall.machines("abc", Size(2, 2))
    together([first, second])
    out = Call(lambda: sick.stay_out("its GPU is gone"))
    until(lambda: first.roster.sick, "it has said so")
    with caplog.at_level(logging.WARNING, "rallypoint.meeting"):
        assert not first.wants_restart()
        assert not first.wants_restart()
    assert [each.getMessage() for each in caplog.records] == [
        "rallypoint: host-c (process 102) is not fit: its GPU is gone"
    ]
    assert not out.done
    second.close("the job has ended")
    out.result()


def test_one_that_is_not_fit_does_not_wait_for_a_job_that_never_comes(hall: Hall) -> None:
    alone = hall.machine("a", Size(2, 2), times=RendezvousSettings(join_timeout=0))
    Call(lambda: alone.stay_out("its GPU is gone")).result()


# How a round ends


_CAUSE = Ending("rank 1 failed first: ValueError", 9.0)
_CONSEQUENCE = Ending("rank 0 failed first: Connection closed by peer", 1.0, follows=True)


@pytest.mark.usefixtures("_looks_seldom")
def test_all_machines_of_a_job_that_ends_name_the_same_first_failure(any_hall: Hall) -> None:
    machines = any_hall.machines("ab", Size(2, 2))
    together(machines)
    machines[0].leave(_CONSEQUENCE, "over")
    first = Call(lambda: machines[0].first_failure(10 * SECONDS))
    machines[1].leave(_CAUSE, "over")
    assert first.result() == machines[1].first_failure(0) == _CAUSE


def test_a_machine_waits_no_longer_than_it_should_for_what_the_others_tell(hall: Hall) -> None:
    machines = hall.machines("ab", Size(2, 2))
    assert machines[0].first_failure(30) is None, "it was in no round"
    together(machines)
    machines[0].leave(_CONSEQUENCE, "over")
    first = Call(lambda: machines[0].first_failure(0.01))
    hall.time.advance(1)
    assert first.result() == _CONSEQUENCE


@pytest.mark.usefixtures("_looks_seldom")
def test_machines_that_start_again_hear_how_the_round_has_ended_and_who_takes_over(any_hall: Hall) -> None:
    machines = any_hall.machines("ab", Size(2, 2))
    together(machines)
    spare = any_hall.machine("c", Size(2, 2))
    waiting = spare.coming()
    until(lambda: spare.roster.waiting, "it waits")

    def again(machine: Machine, ending: Ending | None) -> Round:
        return machine.next_round(machine._start, ending)

    machines[0].give_up()
    survivor = Call(lambda: again(machines[1], _CONSEQUENCE))
    assert (survivor.result().number, waiting.result().number) == (1, 1)
    [(number, end)] = machines[1].ends
    assert (number, end.complete, end.present, len(end.newcomers)) == (0, True, 2, 1)
    assert end.first is not None
    assert end.first.text == f"the launcher of {machines[0].member} was told to end"
    calls = [Call(lambda: again(machines[1], _CAUSE)), Call(lambda: again(spare, _CONSEQUENCE))]
    assert [call.result().number for call in calls] == [2, 2]
    assert machines[1].ends[1:] == spare.ends == [(1, RoundEnd(_CAUSE, complete=True, present=2))]


# Stores that do not start


@pytest.mark.parametrize(
    "error", [OSError("no port is free"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_a_keeper_that_cannot_start_a_store_leaves_it_to_another(hall: Hall, error: BaseException) -> None:
    size = Size(1, 2)
    keeper, other = hall.machine("a", size, keeps=True), hall.machine("b", size)

    def fail() -> None:
        raise error

    keeper.before_start = fail
    calls = [keeper.coming(), other.coming()]
    with pytest.raises(type(error)):
        calls[0].result()
    call_last(hall, [other])
    met = agreed([other], [calls[1].result()])
    assert met.store[0] == "b"
    assert names(other.roster.everybody) == "b"


# The roster's versions


def state(hall: Hall) -> dict[str, bytes]:
    """All that the store holds, but for signs of life."""
    store = hall.store()
    return {key: store.get(key) for key in store.list_keys() if "/beat/" not in key}


def test_old_versions_are_deleted_and_a_newcomer_finds_the_latest(hall: Hall) -> None:
    machine, sleeper = hall.machine("a", Size(1, 1)), hall.machine("b", Size(1, 1))
    machine.enter()
    assert sleeper.roster == machine.roster
    for number in range(1, 60):
        assert machine.enter().number == number
    assert len(state(hall)) <= 70
    newcomer = hall.machine("c", Size(1, 1))
    for other in (newcomer, sleeper):
        assert other.roster == machine.roster
        assert other.roster.round == 59


def test_what_changes_nothing_writes_nothing(hall: Hall) -> None:
    machine = hall.machine("a", Size(1, 1))
    machine.enter()
    before = state(hall)
    hall.machine("b", Size(1, 1)).leave()
    for _ in range(3):
        assert machine.roster.complete
        assert not machine.wants_restart()
        machine.beat()
    assert state(hall) == before
    machine.close("over")
    closed = state(hall)
    assert closed != before
    machine.close("over again")
    assert state(hall) == closed


# Whoever acts when


class Tapped(OneByOne):
    """A part of a store that says what is about to be done to it. A wait only looks once, if it is tapped."""

    def __init__(self, store: Store, tap: Callable[[str, str], None], *, waits: bool = False) -> None:
        super().__init__("tapped", store)
        self._tap, self._waits = tap, waits

    def _call(self, op: Op, *blobs: bytes, tail: bytes = b"") -> Any:
        if op is not Op.CHECK:
            self._tap(op.name.lower(), blobs[0].decode())
        return super()._call(op, *blobs, tail=tail)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        if not self._waits:
            self._tap("wait", keys[0])
            timeout = 1e-6
        super().wait(keys, timeout)


def test_a_round_stays_what_it_is_for_who_looks_after_another_has_left_it(hall: Hall) -> None:
    rounds: list[Round] = []

    def come_and_go(operation: str, _: str) -> None:
        if operation == "wait" and not rounds:
            rounds.append(keeper.enter())
            keeper.leave()

    late = hall.machine("a", Size(2, 2), store=Tapped(hall.store(), come_and_go))
    keeper = hall.machine("b", Size(2, 2), keeps=True, store=PrefixStore("tapped", hall.store()))
    rounds.append(late.enter())
    agreed([keeper, late], rounds)
    assert hall.started == [(0, "b")]


@pytest.mark.parametrize("operation", ["compare_set", "multi_set"])
def test_one_that_was_held_up_for_many_versions_does_no_harm(operation: str) -> None:
    hall = Hall(HashStore(0.2).clone, "job")
    held_up: list[str] = []

    def hold_up(what: str, key: str) -> None:
        if what == operation and not held_up:
            held_up.append(key)
            for number in range(100):
                busy._register.change(lambda roster: roster.publish(f"busy:{number}"))  # noqa: B023

    busy, newcomer = (
        hall.machine(name, Size(1, 1), store=PrefixStore("tapped", hall.store())) for name in "ab"
    )
    sleeper = hall.machine("c", Size(1, 1), store=Tapped(hall.store(), hold_up))
    sleeper.close("over")
    for machine in (newcomer, busy, sleeper):
        assert (machine.roster.closed, machine.roster.store) == ("over", "busy:99")
    hall.close()


def doomed(
    hall: Hall, name: str, size: Size, *, in_this_thread: bool = False
) -> tuple[Machine, threading.Event]:
    """A machine that dies, once the event is set, between its change of the roster and its word to others."""
    dies, dead, here = threading.Event(), threading.Event(), threading.current_thread()

    def cut_off(operation: str, key: str) -> None:
        may = not in_this_thread or threading.current_thread() is here
        if operation == "multi_set" and "/names/" not in key and dies.is_set() and may:
            dead.set()
        if dead.is_set():
            raise OSError("cut off")

    return hall.machine(name, size, store=Tapped(hall.store(), cut_off, waits=True)), dies


def test_what_one_told_before_it_died_the_others_hear(hall: Hall) -> None:
    first = hall.machine("a", Size(2, 2), store=PrefixStore("tapped", hall.store()))
    second, dies = doomed(hall, "b", Size(2, 2))
    together([first, second])
    first.leave(_CONSEQUENCE)
    dies.set()
    with pytest.raises(OSError, match="cut off"):
        second.leave(_CAUSE)
    assert Call(lambda: first.first_failure(0)).result() == _CAUSE


@pytest.mark.usefixtures("_looks_seldom")  # so that no other takes its line in
@pytest.mark.parametrize("others", ["a", "ab", "abcdefghijklm"])
def test_one_that_died_before_anybody_knew_of_it_is_missed(hall: Hall, others: str) -> None:
    size = Size(len(others) + 1, len(others) + 1)
    alive = [hall.machine(each, size, store=PrefixStore("tapped", hall.store())) for each in others]
    for count, machine in enumerate(alive, start=1):
        machine.coming()
        until(lambda: len(alive[0].roster.present) == count, "one more has come")  # noqa: B023
    victim, dies = doomed(hall, "z", size)
    dies.set()
    assert dies_in(victim.enter)
    assert alive[0].roster.complete
    miss(hall, [*alive, victim], victim)


def test_those_whom_nobody_tells_that_the_keeper_is_lost_come_again(hall: Hall) -> None:
    """Who has missed the keeper dies before it tells the others, which wait for the round's store."""
    size = Size(2, 4)
    starts, cut_off = threading.Event(), threading.Event()

    def start_never() -> None:
        starts.set()
        cut_off.wait(SECONDS)
        raise OSError("cut off")

    keeper, first, second = (
        hall.machine(name, size, rank, store=PrefixStore("tapped", hall.store()))
        for rank, name in enumerate("abc")
    )
    watcher, dies = doomed(hall, "d", size, in_this_thread=True)  # its own may still tell the round
    keeper.before_start = start_never
    calls = [machine.coming() for machine in (keeper, first, second, watcher)]
    assert starts.wait(SECONDS)
    dies.set()
    until(lambda: dies_in(lambda: beat(hall, [watcher, second, first])), "the watcher misses the keeper")
    assert names(first.roster.lost) == "a"

    def have_met() -> bool:
        beat(hall, [first, second])
        return calls[1].done and calls[2].done

    until(have_met, "the others meet")
    assert agreed([first, second], [call.result() for call in calls[1:3]]).number == 1
    cut_off.set()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_machine_that_dies_at_any_point_keeps_nobody_from_meeting(keeps: bool) -> None:
    """It is cut off before each of the requests that it makes, up to the one after which it is in a round."""
    for count in range(40):
        if not outlive(count, keeps=keeps):
            assert count > 10
            return
    raise AssertionError("it never met the others")


def outlive(count: int, *, keeps: bool) -> bool:
    """Whether a machine died before its next request after `count`; the two others meet in any case."""
    hall = Hall(HashStore(1).clone, "job")
    left = Counter(requests=count)

    def cut_off(_: str, __: str) -> None:
        left["requests"] -= 1
        if left["requests"] < 0:
            raise OSError("cut off")

    store = Tapped(hall.store(), cut_off, waits=True)
    victim = hall.machine("a", Size(2, 2), keeps=keeps, store=store)
    others = [hall.machine(name, Size(2, 2), store=PrefixStore("tapped", hall.store())) for name in "bc"]
    first = others[0].coming()
    died = dies_in(victim.enter)
    calls = {"b": first, "c": others[1].coming()}

    def met() -> bool:
        beat(hall, others)
        if calls["b"].done and others[0].wants_restart():  # it was in a round with the victim
            calls["b"] = others[0].coming()
        return calls["b"].done and calls["c"].done

    if died:
        until(met, f"the others meet, cut off after {count}")
        agreed(others, [calls["b"].result(), calls["c"].result()])
    hall.close()
    return died


def dies_in(act: Callable[[], object]) -> bool:
    """Whether a machine is cut off while it does something."""
    try:
        act()
    except OSError:
        return True
    return False


class Over(Exception):  # noqa: N818 - it is no error
    """No more turns."""


class Turns:
    """Lets one thread act at a time, up to its next `pause`; a seed says whose turn it is."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._turns: dict[str, threading.Semaphore] = {}
        self._errors: list[BaseException] = []
        self._passed_on = threading.Semaphore(0)
        self._over = False

    def start(self, name: str, act: Callable[[], object]) -> None:
        self._turns[name] = threading.Semaphore(0)
        threading.Thread(target=self._run, args=(name, act), daemon=True).start()

    def _run(self, name: str, act: Callable[[], object]) -> None:
        turn = self._turns[name]
        turn.acquire()
        try:
            act()
        except BaseException as error:
            if not self._over:
                self._errors.append(error)
        del self._turns[name]
        self._passed_on.release()

    def pause(self, name: str) -> None:
        self._passed_on.release()
        self._turns[name].acquire()
        if self._over:
            raise Over

    def play(self, most: int) -> None:
        """Until all have ended."""
        try:
            while self._turns and not self._errors:
                assert (most := most - 1), f"still at it: {sorted(self._turns)}"
                self._turns[self._random.choice(sorted(self._turns))].release()
                assert self._passed_on.acquire(timeout=SECONDS)
        finally:
            self._over = True
            for turn in list(self._turns.values()):
                turn.release()
        for error in self._errors:
            raise error


class Story:
    """A job of a few machines that come, go, fail, die and start again, one step of one machine at a time."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.turns = Turns(seed)
        self.place = HashStore(1)
        self.hall = Hall(self.place.clone, "job")
        count = self._random.randint(2, 4)
        self.size = Size(self._random.randint(1, count), count)
        self.met: list[tuple[Member, Round]] = []
        for name in "abcde"[: count + self._random.randint(0, 1)]:
            self._cast(name)

    def _cast(self, name: str) -> None:
        times = RendezvousSettings(
            join_timeout=200, last_call_timeout=4, keep_alive_interval=5, keep_alive_max_attempt=8
        )
        rank = self._random.choice([-1, -1, ord(name) - ord("a")])
        rank = rank if rank < self.size.most else -1

        def tap(operation: str, _: str) -> None:
            self.turns.pause(name)
            if operation == "wait":
                self.hall.time.advance(1)
                machine.beat()

        machine = self.hall.machine(
            name,
            self.size,
            rank,
            keeps=self._random.random() < 0.3,
            times=times,
            store=Tapped(self.hall.store(), tap),
        )
        machine.before_start = self._maybe_fail
        self.turns.start(name, lambda: self._live(machine))

    def _live(self, machine: Machine) -> None:
        try:
            for _ in range(3):
                self.met.append((machine.member, machine.enter()))
                self._work(machine)
                if self._random.random() < 0.1:
                    return  # it dies
        except (JoinTimeoutError, MeetingClosedError, OSError):
            return
        if self._random.random() < 0.1:
            machine.close("the job has ended")
        machine.leave()

    def _maybe_fail(self) -> None:
        if self._random.random() < 0.1:
            raise OSError("no port is free")

    def _work(self, machine: Machine) -> None:
        for _ in range(self._random.randrange(6)):
            if machine.wants_restart():
                return
            machine.beat()

    def check(self) -> None:
        """Who was in a round says the same of it as all others who were."""
        rounds: dict[int, Round] = {}
        ranks: dict[tuple[int, int], str] = {}
        for member, met in self.met:
            first = rounds.setdefault(met.number, met)
            assert replace(met, rank=first.rank) == first
            assert ranks.setdefault((met.number, met.rank), member.id) == member.id
            assert self.size.least <= met.size <= self.size.most
            keeper, number, _ = met.store.split(":")
            assert int(number) == met.number
            assert (met.number, keeper) in self.hall.started
        assert len(self.hall.started) == len({number for number, _ in self.hall.started})
        for name in {member.id for member, _ in self.met}:
            numbers = [met.number for each, met in self.met if each.id == name]
            assert numbers == sorted(set(numbers))


def test_who_acts_when_makes_no_difference() -> None:
    for seed in range(20):
        story = Story(seed)
        story.turns.play(100_000)
        story.check()
