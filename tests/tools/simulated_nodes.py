"""The processes of a replicated store, in a simulation: each stands by or leads, and all share one log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from memory_log import Memory, MemoryLog
from rallypoint.errors import RallypointError
from rallypoint.store.core.context import DriverTask, Other
from rallypoint.store.core.sessions import Session
from rallypoint.store.replica.core.leader import RENEW_SECONDS, LeaderCore
from rallypoint.store.replica.core.replica import Replica
from rallypoint.store.replica.log import (
    Checkpoint,
    EngineAwayError,
    FencedError,
    Leadership,
    LostRecordsError,
    TrimmedError,
)
from rallypoint.store.replica.node import LeaderWatch
from rallypoint.store.wire.limits import Limits
from simulated_network import Link, Node, Relay, Task
from simulated_ranks import FailedError

if TYPE_CHECKING:
    from replicated_simulation import ReplicatedSimulation

SECONDS_EACH: Final = 0.01
"""How long a step takes."""
_RECORD_BYTES: Final = 700
"""So few that some records come in parts."""
_COMPARED: Final = 3
"""Every third state is compared: `test_replica.py` compares all."""
_LOOK_STEPS: Final = 10
_SECOND: Final = 100


class Serving(Node):
    """The clients of a process that leads, for one term."""

    def __init__(self, process: Process, core: LeaderCore) -> None:
        super().__init__(process.net, process.name, core)
        self.process = process
        self.core = core
        self.children = process.cluster.children
        self.is_listening = False

    @property
    def is_idle(self) -> bool:
        """Whether it serves clients, and no record is under way."""
        return self.is_listening and not self.core._entries and not self.core._in_flight

    @property
    def now(self) -> float:
        return self.process.clock()

    def receive(self, link: Link, data: bytes) -> None:
        self.process.do(partial(super().receive, link, data))

    def drop(self, link: Link) -> None:
        self.process.do(partial(super().drop, link))

    def do(self, other: Other) -> None:
        if other is DriverTask.FLUSH:
            self.process.append()
        else:
            super().do(other)

    def _may_be_displaced(self, link: Link, relay: Relay) -> bool:
        """That is known when the record is committed, and others have been heard meanwhile."""
        return True

    def leave(self, excuse: str, *, at_once: bool) -> None:
        """All clients lose their connection: what was sent before may still come, unless it is all over."""
        links, self.links = list(self.links.values()), {}
        self.process.net.replace_ranks(sum(not isinstance(link.endpoint, Relay) for link in links))
        for link in links:
            link.connection = None
            link.excuse = excuse
            if at_once:
                link.break_()
            else:
                link.close_at_server(excuse)


class Process:
    """One process: as `rallypoint.store.replica.node`, but its calls to the engine take simulated time."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.net = cluster.net
        self.name = name
        self.is_up = self.is_paused = False
        self.serving: Serving | None = None
        self._life = 0  # what was asked in an earlier one is of no interest
        self._calls: Counter[int] = Counter()  # that have not come to the engine, by that
        self._frozen: list[Task] = []
        self._rng = self.net.rng
        self.start()

    def start(self) -> None:
        """A new process, which knows nothing."""
        self._life += 1
        self.is_up = True
        self._rate, self._origin = self._rng.uniform(0.9, 1.1), self._rng.uniform(0, 1000)
        self.log = MemoryLog(self.cluster.memory, self.name, most=self._rng.choice((1, 4, 16)))
        self.replica = Replica(self.cluster.limits)
        self._stand_by()

    def clock(self) -> float:
        """Its monotonic clock: no two go alike."""
        return self._origin + self.net.now * self._rate

    @property
    def has_calls_of_the_past(self) -> bool:
        return any(count for life, count in self._calls.items() if life != self._life)

    # Time, and being stopped

    def do(self, task: Task) -> None:
        """Do something now, or when the process goes on."""
        if self.is_paused:
            self._frozen.append(task)
        else:
            task()

    def _later(self, steps: int, task: Task) -> None:
        life = self._life

        def do() -> None:
            if life == self._life:
                task()

        self.net.behind(steps, partial(self.do, do))

    def pause(self, steps: int) -> None:
        if self.is_up and not self.is_paused:
            self.net.counts["pauses"] += 1
            self.is_paused = True
            life = self._life
            self.net.behind(steps, lambda: self._go_on(life))

    def _go_on(self, life: int) -> None:
        if life == self._life:
            self.is_paused = False
            frozen, self._frozen = self._frozen, []
            for task in frozen:
                self.do(task)

    def kill(self, steps: int) -> None:
        """It is gone at once, with all that it knew; another is started after so many steps."""
        if self.is_up:
            self.net.counts["kills"] += 1
            if self.serving is not None:
                self.net.counts["leaders killed"] += 1
            self._end("the store's process was killed", at_once=True)
            self.is_up = self.is_paused = False
            self._frozen.clear()
            self.net.behind(steps, self.start)

    def stop(self, steps: int) -> None:
        """It is told to end, and lets others lead at once."""
        if self.is_up and not self.is_paused and self.serving is not None:
            self.net.counts["stops"] += 1
            term, log = self._term, self.log
            self._end("the store's process was told to end", at_once=False)
            self.is_up = False
            self._call(lambda: log.release(term), lambda _: None)
            self.net.behind(steps, self.start)

    def _fail(self, error: RallypointError) -> None:
        """It ends with an error; somebody starts it again."""
        if not self.cluster.may_lose:
            raise FailedError(f"{self.name} ends: {error.message}") from error
        self.net.counts["lost records"] += 1
        self._end(f"the store's process has ended: {error.message}", at_once=False)
        self.is_up = False
        self.net.behind(self._rng.randint(20, 200), self.start)

    def _end(self, excuse: str, *, at_once: bool) -> None:
        self._life += 1
        serving, self.serving = self.serving, None
        if serving is not None:
            serving.leave(excuse, at_once=at_once)

    # The engine

    def _call(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Ask the engine, and go on with its answer, if this process still is what it was."""
        life = self._life
        self._calls[life] += 1

        def carry_out() -> None:
            self._calls[life] -= 1
            if life != self._life and self._rng.random() < 0.5:
                return
            try:
                answer = call()
            except RallypointError as error:
                answer = error
            if life == self._life:
                self._later(self.cluster.delay(), lambda: self._answered(call, then, answer))

        self.net.behind(self.cluster.delay(), carry_out)

    def _answered(self, call: Callable[[], Any], then: Callable[[Any], None], answer: Any) -> None:
        if isinstance(answer, EngineAwayError):
            self.net.counts["engine away"] += 1
            self._later(_LOOK_STEPS, lambda: self._call(call, then))
        elif isinstance(answer, FencedError):
            self.net.counts["fenced"] += self.serving is not None
            self._end("another process leads the store", at_once=False)
            self._stand_by()
        elif isinstance(answer, TrimmedError):
            self._call(self.log.checkpoint, self._restore)
        elif isinstance(answer, LostRecordsError):
            self._fail(answer)
        else:
            then(answer)

    # Standing by

    def _stand_by(self) -> None:
        self._term = 0
        self._is_keeping = False
        self._confirmed = float("-inf")
        self._watch = LeaderWatch()
        self._look()

    def _look(self) -> None:
        self._call(self.log.read_leadership, self._looked)

    def _looked(self, seen: Leadership) -> None:
        if self._watch.should_take_over(self.clock(), seen):
            self._call(lambda: self.log.acquire(seen, self.name), self._acquired)
        else:
            self._read()

    def _read(self) -> None:
        self._call(lambda: self.log.read(self.replica.sequence + 1), self._take)

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.net.counts["restored"] += 1
        self.replica = Replica.of(checkpoint.data, self.cluster.limits)
        self._read()

    def _take(self, records: Sequence[bytes]) -> None:
        life = self._life
        for record in records:
            self._apply(partial(self.replica.apply, record))
            if life != self._life:
                return
        if records:
            self._read()
        elif self._term:
            self._lead()
        else:
            self._later(_LOOK_STEPS, self._look)

    def _apply(self, task: Callable[[], object]) -> None:
        """Have the replica take something, and see what has become of it."""
        before = {session.token for session in self.sessions}
        try:
            task()
        except LostRecordsError as error:
            self._fail(error)
            return
        for token in before - {session.token for session in self.sessions}:
            self.cluster.excuse(token)
        self.cluster.compare(self)

    @property
    def sessions(self) -> Iterable[Session]:
        return self.replica.stores[""].sessions if "" in self.replica.stores else ()

    # Leading

    def _acquired(self, term: int) -> None:
        self.net.counts["terms"] += 1
        self._term = term
        self._renew()
        sequence = self.replica.sequence
        if sequence:
            self._call(lambda: self.log.read(sequence), self._take_again)
        else:
            self._read()

    def _take_again(self, records: Sequence[bytes]) -> None:
        """The last record that it knows, before it leads: is it still the same?"""
        try:
            self.replica.check_last(records[0] if records else b"")
        except LostRecordsError as error:
            self._fail(error)
            return
        self._take(records[1:])

    def _renew(self) -> None:
        began, term = self.clock(), self._term
        self._call(lambda: self.log.renew(term), lambda _: self._renewed(began))

    def renew_at_once(self) -> None:
        """As `_renew`, but in no time."""
        assert self.serving is not None
        try:
            self.log.renew(self._term)
        except EngineAwayError:
            return
        self._confirmed = self.clock()
        self.serving.core.confirm(self._confirmed)

    def _renewed(self, began: float) -> None:
        self._confirmed = began
        if self.serving is not None:
            self.serving.core.confirm(began)
        left = began + RENEW_SECONDS - self.clock()
        self._later(int(left / SECONDS_EACH), self._renew)

    def _lead(self) -> None:
        core = LeaderCore(self.replica, self.clock, self.cluster.limits)
        core.confirm(self._confirmed)
        self.serving = Serving(self, core)
        core.begin(self._term)
        self.serving.settle()
        self._later(_SECOND, self._tick)

    def _tick(self) -> None:
        if self.serving is not None:
            self.serving.pass_time()
            self._later(_SECOND, self._tick)

    def append(self) -> None:
        assert self.serving is not None
        sequence = self.replica.sequence + 1
        parts = self.serving.core.next_record(_RECORD_BYTES)
        if parts:
            self._append_parts(sequence, parts)

    def _append_parts(self, sequence: int, parts: Sequence[bytes]) -> None:
        serving, term = self.serving, self._term
        assert serving is not None

        def appended(_: None) -> None:
            if parts[1:]:
                self._append_parts(sequence + 1, parts[1:])
                return
            serving.front.turn.now = self.clock()
            self._apply(serving.core.committed)
            serving.is_listening = True
            serving.settle()

        self._call(lambda: self.log.append(term, sequence, parts[0]), appended)

    def keep(self) -> None:
        """Put a checkpoint, and drop what it covers: one at a time."""
        if self.serving is None or self.is_paused or self._is_keeping or not self.replica.can_be_kept:
            return
        self._is_keeping = True
        term, checkpoint = self._term, Checkpoint(self.replica.sequence, self.replica.state())

        def trim(_: None) -> None:
            self.net.counts["checkpoints"] += 1
            self._call(lambda: self.log.trim(term, checkpoint.sequence), trimmed)

        def trimmed(_: None) -> None:
            self._is_keeping = False

        self._call(lambda: self.log.put_checkpoint(term, checkpoint), trim)


class Cluster:
    """All processes of one store, as its clients see them: one place, where somebody answers or nobody."""

    name = "store"

    def __init__(self, net: ReplicatedSimulation, limits: Limits, count: int, *, may_lose: bool) -> None:
        self.net = net
        self.limits = limits
        self.may_lose = may_lose
        """Whether the engine loses what it has acknowledged: then processes may end with an error."""
        self.memory = Memory()
        self.children: list[Relay] = []
        self.has_lost = False
        self._states: dict[tuple[int, int], tuple[str, bytes]] = {}
        self._delays = net.rng.choice(((0, 1, 1), (1, 2, 3, 12), (1, 1, 2, 2, 5, 80)))
        self.processes = [Process(self, f"n{number}") for number in range(count)]
        net.behind(50, self._beat)

    def delay(self) -> int:
        """How many steps a message to or from the engine takes."""
        return self.net.rng.randint(0, self.net.rng.choice(self._delays))

    def _beat(self) -> None:
        for relay in self.children:
            relay.beat()
        self.net.behind(50, self._beat)

    @property
    def leader(self) -> Process | None:
        """The process that leads by the engine's word, if it serves."""
        found = [
            each for each in self.processes if each.log is self.memory.owner and each.serving is not None
        ]
        return found[0] if found else None

    def renew(self) -> None:
        """The leader has its term confirmed, if it goes on and the engine is there."""
        leader = self.leader
        if leader is not None and not leader.is_paused:
            leader.renew_at_once()

    def remember(self) -> Task:
        """What takes the engine back to what it is now, as when a copy takes its place that is behind."""
        memory = self.memory
        leadership, owner, first, checkpoint = (
            memory.leadership,
            memory.owner,
            memory.first,
            memory.checkpoint,
        )
        records = dict(memory.records)

        def go_back() -> None:
            if (memory.first, memory.records) != (first, records) or memory.owner is not owner:
                self.has_lost = True
                self.net.counts["losses"] += 1
                for relay in self.children:
                    relay.may_lose_session = True
            memory.leadership, memory.owner, memory.records = leadership, owner, records
            memory.first, memory.checkpoint = first, checkpoint

        return go_back

    # As a place

    def find(self) -> Node | None:
        """Anybody who believes to lead: who is wrong will not answer."""
        serving = [each.serving for each in self.processes if not each.is_paused]
        listening = [each for each in serving if each is not None and each.is_listening]
        return self.net.rng.choice(listening) if listening else None

    @property
    def sessions(self) -> Iterable[Session]:
        return self.leader.sessions if self.leader is not None else ()

    def pass_time(self) -> None:
        for process in self.processes:
            if process.serving is not None:
                process.do(process.serving.pass_time)

    def check_invariants(self) -> None:
        for process in self.processes:
            if process.serving is not None:
                process.serving.check_invariants()
            else:
                process.replica.check_invariants()

    # What must hold

    def compare(self, process: Process) -> None:
        """All that have taken the same records are equal."""
        replica = process.replica
        if replica.faults:
            raise FailedError(f"{process.name} has failed: {replica.faults[0]!r}") from replica.faults[0]
        if replica.sequence % _COMPARED or not replica.can_be_kept:
            return
        state = replica.state()
        name, other = self._states.setdefault((replica.sequence, replica.last), (process.name, state))
        if state != other:
            raise FailedError(f"{name} and {process.name} differ after record {replica.sequence}")

    def excuse(self, token: bytes) -> None:
        """A session has been given up, and all of them know."""
        for child in self.children:
            if child.token == token:
                child.may_lose_session = True

    @property
    def is_at_rest(self) -> bool:
        leader = self.leader
        return (
            leader is not None
            and leader.serving is not None
            and leader.serving.is_idle
            and not self.memory.is_away
            and all(self._is_settled(each) for each in self.processes)
        )

    def _is_settled(self, process: Process) -> bool:
        return (
            process.is_up
            and not process.is_paused
            and (process.serving is None or process is self.leader)
            and not process.has_calls_of_the_past
            and process.replica.sequence >= self.memory.last
        )
