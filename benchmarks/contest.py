"""One scenario with several servers, in turns: a noisy machine is then equally noisy to all of them."""

from __future__ import annotations

import signal
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from scenarios import Plan, Sample, Scenario, Session
from servers import TORCH, Server, ServerError


@dataclass
class Entry:
    """A server in a contest: its samples, one a round, and what went wrong if anything did."""

    name: str
    samples: list[Sample] = field(default_factory=list)
    fault: str = ""

    def median(self, attribute: str) -> float:
        """The median over all rounds of one attribute of the samples."""
        return float(statistics.median(getattr(sample, attribute) for sample in self.samples))

    def memory(self) -> float:
        """The most that the server grew per connection: later rounds find memory that is already there."""
        return max(sample.memory or 0.0 for sample in self.samples)


@dataclass
class Outcome:
    """A contest that is over."""

    scenario: Scenario
    entries: dict[str, Entry]

    @property
    def torch(self) -> Entry:
        return self.entries[TORCH]

    def rivals(self) -> list[Entry]:
        """All but torch's server."""
        return [entry for entry in self.entries.values() if entry is not self.torch]

    def ratios(self, entry: Entry) -> list[float]:
        """How many times better than torch in the same round, for each round that both finished."""
        pairs = zip(self.torch.samples, entry.samples, strict=False)
        return [self.scenario.ratio(torch.value, ours.value) for torch, ours in pairs]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def say(line: str) -> None:
    """Progress: not data, so not on standard output."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off an interruption that comes meanwhile: it must not fall between a start and the note to stop."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


class Contest:
    """A scenario in progress. Whatever it starts it ends when its `with` block does."""

    def __init__(self, scenario: Scenario, names: list[str], plan: Plan) -> None:
        self._scenario = scenario
        self._plan = plan
        self._entries = {name: Entry(name) for name in names}
        self._servers: dict[str, Server] = {}
        self._sessions: dict[str, Session] = {}
        self._resources = ExitStack()

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def run(self) -> Outcome:
        """All rounds."""
        say(f"{self._scenario.name}: {self._scenario.load}; starting servers and warming up")
        self._start()
        rounds = self._scenario.rounds(self._plan)
        for number in range(rounds):
            self._round(number, rounds)
        return Outcome(self._scenario, self._entries)

    def _start(self) -> None:
        for name in self._entries:  # all of them first: they take seconds to start, side by side
            with uninterrupted():
                self._servers[name] = Server(name)
                self._resources.callback(self._servers[name].stop)
        for name, server in self._servers.items():
            session = self._scenario.session(server, self._plan)
            self._resources.callback(session.close)
            try:
                server.await_ready()
                session.open()
                self._sessions[name] = session
            except (ServerError, OSError) as error:
                self._fail(name, error)

    def _round(self, number: int, rounds: int) -> None:
        # Who goes first changes: whatever follows from the order falls on each in turn.
        names = list(self._sessions)
        first = number % len(names) if names else 0
        for name in names[first:] + names[:first]:
            try:
                self._entries[name].samples.append(self._sessions[name].round())
                self._servers[name].check_alive()
            except (ServerError, OSError) as error:
                self._fail(name, error)
        values = ", ".join(f"{name} {self._last_value(name)}" for name in self._sessions)
        say(f"{self._scenario.name}: round {number + 1} of {rounds}: {values}")

    def _fail(self, name: str, error: Exception) -> None:
        """Leave one server out from here on; a dead one says why it died."""
        fault = f"{error}; {self._servers[name].last_words()}"
        try:
            self._servers[name].check_alive()
        except ServerError as death:
            fault = str(death)
        self._entries[name].fault = fault
        self._sessions.pop(name, None)
        say(f"{self._scenario.name}: FAULT of {name}: {fault}")

    def _last_value(self, name: str) -> str:
        value = self._entries[name].samples[-1].value
        return f"{value:,.0f}/s" if self._scenario.kind == "rate" else f"{value:.6f} s"
