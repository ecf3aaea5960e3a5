"""One load with several targets, in turns: a noisy machine is then equally noisy to all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Protocol

from rallypoint.bench.faults import BenchError
from rallypoint.bench.results import Entry, Record, title
from rallypoint.bench.session import Measurement, Session
from rallypoint.bench.targets import Hosts, Target
from rallypoint.bench.workers import start


class Watcher(Protocol):
    """Who wants to know what is going on."""

    def begin(self, measurement: Measurement, target: str, round_number: int) -> None:
        """A round begins; round 0 is the start of the server and of the load."""

    def end(self) -> None:
        """It is over."""

    def drop(self, measurement: Measurement, target: str, fault: str) -> None:
        """No more rounds of this target: it has failed."""


class Contest:
    """A measurement in progress. Whatever it starts it ends when its `with` block does."""

    def __init__(self, measurement: Measurement, hosts: Hosts, watcher: Watcher) -> None:
        self._measurement = measurement
        self._hosts = hosts
        self._watcher = watcher
        self.record: Record = measurement.record()
        self.record.entries = {name: Entry(name) for name in measurement.targets}
        self._sessions: dict[str, Session] = {}
        self._targets: dict[str, Target] = {}
        self._start_seconds: dict[str, float] = {}
        self._resources = ExitStack()

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def run(self) -> None:
        """All rounds; the record is filled as they go."""
        # All servers first: once thousands of ranks have ports, there may be none left to listen on.
        for name in self._measurement.targets:
            self._attempt(name, partial(self._start, name))
        for name in list(self._targets):
            self._watcher.begin(self._measurement, name, 0)
            self._attempt(name, partial(self._open, name))
            self._watcher.end()
        for number in range(1, self._measurement.rounds + 1):
            for name in in_turn(list(self._sessions), number):
                self._watcher.begin(self._measurement, name, number)
                self._attempt(name, partial(self._round, name))
                self._watcher.end()

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        """Do something with a target; one that fails is left out from there on."""
        try:
            work()
        except (BenchError, OSError) as error:
            self._fail(name, str(error))
        except Exception as error:  # of ours, most likely: the others can still be measured
            self._fail(name, f"{type(error).__name__}: {error}")

    def _start(self, name: str) -> None:
        begun = time.monotonic()
        measurement = self._measurement
        make = partial(measurement.make_target, name, self._hosts, measurement.ranks)
        target = self._targets[name] = start(self._resources, make)
        target.start()
        self._start_seconds[name] = time.monotonic() - begun

    def _open(self, name: str) -> None:
        begun = time.monotonic()
        session = self._measurement.session(self._targets[name], self._measurement)
        self._resources.callback(session.close)
        session.open()
        session.start_seconds = self._start_seconds[name] + time.monotonic() - begun
        self._sessions[name] = session

    def _round(self, name: str) -> None:
        session = self._sessions[name]
        sample = session.round()
        if session.relay_cpu:
            sample = replace(sample, extras={**sample.extras, "relays_cpu": session.relay_cpu})
        self.record.entries[name].samples.append(sample)
        self._targets[name].check_alive()

    def _fail(self, name: str, fault: str) -> None:
        """Leave a target out, and end what belongs to it: it would take CPU time from the others."""
        target, session = self._targets.pop(name, None), self._sessions.pop(name, None)
        try:
            if target and target.pid:
                target.check_alive()
        except BenchError as death:
            fault = f"{fault}; {death}"
        self.record.entries[name].fault = fault
        if session:
            session.close()
        if target:
            target.stop()
        self._watcher.drop(self._measurement, name, f"{title(self.record)}: {fault}")


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: who is first changes, and so does who comes after whom."""
    first = number // 2 % len(names) if names else 0
    turned = [*names[first:], *names[:first]]
    return turned[::-1] if number % 2 else turned
