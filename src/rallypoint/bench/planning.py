"""All measurements; and which of them this machine can do, with which targets and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from rallypoint.bench import client_loads as loads
from rallypoint.bench import clients, machine, names
from rallypoint.bench import rank_loads as ranks
from rallypoint.bench.clients import Ask
from rallypoint.bench.contest import Measurement
from rallypoint.bench.servers import absences
from rallypoint.errors import UsageError
from rallypoint.server.machine import names as system_names

# All loads, in the order of the tables

_RESTART: Final = "ranks leave, the store is made anew, they come back and pass a barrier"
_SPREAD: Final = {names.RELAY: "here all relays would start in a few processes, and not each on its machine"}

WITH_RANKS: Final = (
    Measurement("init", "init", "ranks connect, and are counted", ranks.ComingUp),
    Measurement("barrier", "barrier", "ranks come to a barrier all at once", ranks.Barriers),
    Measurement(
        "barrier", "barrier-trickle", "ranks come to a barrier one after the other", ranks.TrickledBarriers
    ),
    Measurement("wakeup", "wakeup", "ranks wait for one key, which is set", ranks.Wakeups),
    Measurement("restart", "restart", _RESTART, ranks.Restarts, unfit=_SPREAD),
)
"""At several sizes: their words go behind the number of ranks."""

_AS_IS: Final = "ranks connect; -as-is: to torch's own socket, with a reverse look-up of each"
_TUTORIAL: Final = "real clients of torch, a process each: {} as rank 0 sees it"
AS_IS: Final = Measurement("init", "init-as-is", _AS_IS, ranks.ComingUp)

TUTORIAL: Final = (
    Measurement("init", "tutorial-init", _TUTORIAL.format("TCPStore(...)"), ranks.TutorialInit),
    Measurement(
        *("barrier", "tutorial-barrier"),
        _TUTORIAL.format("the barrier of init_process_group"),
        ranks.TutorialBarrier,
    ),
)


def _many(name: str, load: str, operation: str, ask: Ask, per_request: int = 1) -> Measurement:
    load = f"{loads.CLIENTS} clients, {load} in flight each"
    session = partial(loads.Steady, ask=ask, per_request=per_request)
    return Measurement("ops", name, load, session, operation, "rate", seconds=0.8)


def _one(operation: str, ask: Ask) -> Measurement:
    load = f"one client, one {operation} at a time"
    session = partial(loads.OneAtATime, ask=ask)
    return Measurement("ops", f"one-{operation.lower()}", load, session, operation, seconds=0.4)


def _accept(name: str, load: str, per_request: int, rounds: int) -> Measurement:
    load = f"{loads.NEW_CLIENTS:,} new clients beside {loads.BUSY_CLIENTS} with {load} in flight"
    count = loads.BUSY_CLIENTS + loads.NEW_CLIENTS
    session = partial(loads.Accepts, per_request=per_request)
    return Measurement(
        "accept", name, load, session, "new client", unfit=_BEHIND, connections=count, rounds=rounds
    )


_BEHIND: Final = {names.RELAY: "behind one relay, the server sees nothing of its clients"}
_STORM: Final = f"{loads.STORM_CLIENTS:,} clients connect at once"
_KEYS: Final = f"{loads.MANY_KEYS:,} keys"
_CANCEL: Final = f"a wait is given up beside a wait for {_KEYS}"
_CANCELS: Final = partial(loads.BesideWait, ask=clients.give_up, count=1)
_NO_CANCEL: Final = {names.REDIS: "it has no such thing"}

WITH_CLIENTS: Final = (
    _many("get", "one GET", "GET", clients.get),
    _many("get-pipelined", f"{loads.PIPELINED} GETs", "GET", clients.get, loads.PIPELINED),
    _many("set", "one SET", "SET", clients.store),
    _many("add", "one ADD", "ADD", clients.add),
    _one("GET", clients.get),
    _one("SET", clients.store),
    _one("ADD", clients.add),
    _accept("accept", "one GET", 1, rounds=15),  # short ones, which differ much
    _accept("accept-pipelined", f"{loads.BUSY_PIPELINED} GETs", loads.BUSY_PIPELINED, rounds=3),
    Measurement(
        *("accept", "connect-storm", _STORM, loads.Storm, "connection"),
        unfit=_BEHIND,
        connections=loads.STORM_CLIENTS,
    ),
    Measurement("bulk", "multi-get", f"one request for {_KEYS}", loads.MultiGet, "request", rounds=3),
    Measurement("bulk", "multi-set", f"one request with {_KEYS}", loads.MultiSet, "request", rounds=3),
    Measurement("wakeup", "cancel", _CANCEL, _CANCELS, "cancel", unfit=_NO_CANCEL, seconds=0.8),
)

# What is planned

RANKS: Final = (1_024, 4_096, 16_384, 98_304)
QUICK_RANKS: Final = (1_024, 4_096)
MANY: Final = 30_000
"""More are brought up only where that is the point."""
ROUNDS_OF_MANY: Final = 3
REAL_RANKS: Final = 64
QUICK_REAL_RANKS: Final = 16
LEAST_REAL_RANKS: Final = 2
AS_IS_RANKS: Final = 256
STALLING_RANKS: Final = 64
STALLING_ROUNDS: Final = 3
"""Where look-ups take seconds: torch's server does one for every rank."""

BYTES_PER_RANK: Final = 32 << 10
"""What a rank and its part of a server take, kernel included: generously, as all have to fit into memory."""

REAL_RANK_BYTES: Final = 64 << 20

LEAST_CONNECTIONS: Final = 128
"""With less, there is hardly anything to measure."""


@dataclass(frozen=True)
class Wish:
    """What the user asks for."""

    commands: Sequence[str] = names.COMMANDS
    ranks: Sequence[int] = ()
    """None: those that suit."""
    targets: Sequence[str] = names.TARGETS
    repeat: int = 0
    """How many rounds; 0: the usual number."""
    quick: bool = False


def make_plan(wish: Wish) -> BenchPlan:
    """The measurements asked for that can be done here; UsageError if there are none."""
    if machine.most_connections() < LEAST_CONNECTIONS:
        raise UsageError(
            f"a process may have no more than {machine.most_connections()} connections here",
            hint="raise the limit of open files (ulimit -n) to 1,024 at least",
        )
    for name in wish.targets:
        if name not in names.TARGETS:
            raise UsageError(f"{name!r} is no target", hint=f"there are {', '.join(names.TARGETS)}")
    plan = BenchPlan(wish)
    for command in wish.commands:
        plan.add(command)
    if not plan.measurements:
        raise UsageError("there is nothing to measure here", hint="; ".join(plan.notes))
    return plan


class BenchPlan:
    """What will be measured, in this order, and what will not, in words."""

    def __init__(self, wish: Wish) -> None:
        self.measurements: list[Measurement] = []
        missing = absences(wish.targets)
        self.notes = [f"{name} is left out: {why}" for name, why in missing.items()]
        self._wish = wish
        self._targets = [name for name in wish.targets if name not in missing]
        self._has_torch = any(name.startswith("torch-") for name in self._targets)

    def add(self, command: str) -> None:
        """Plan all that belongs to a command."""
        with_ranks = [each for each in WITH_RANKS if each.command == command]
        for each in with_ranks:
            for size in self._sizes(command):
                self._add_ranks(each, size)
        if self._has_torch and command == AS_IS.command:
            self._add_as_is()
        for each in TUTORIAL if self._has_torch else ():
            if each.command == command:
                self._add_tutorial(each)
        for each in WITH_CLIENTS:
            if each.command == command:
                self._add(each, self._targets)
        if self._wish.ranks and not with_ranks:
            self.notes.append(f"{command} has no ranks: --ranks does not matter to it")

    def _sizes(self, command: str) -> Sequence[int]:
        if self._wish.ranks:
            return list(dict.fromkeys(self._wish.ranks))
        if command in ("init", "barrier"):  # where growth is the point
            return QUICK_RANKS if self._wish.quick else RANKS
        return QUICK_RANKS[-1:] if self._wish.quick else [size for size in RANKS if size < MANY]

    def _add_ranks(self, each: Measurement, size: int) -> None:
        """With the targets that can have that many ranks here, all at the same time."""
        what, able = f"{each.name}, {size:,} ranks", self._fit_for(each, self._targets)
        most = machine.most_connections()
        kept = [name for name in able if name == names.RELAY or size <= most]
        how = "; through relays it is measured" if names.RELAY in able else ""
        dropped = [name for name in able if name not in kept]
        self._leave_out(what, dropped, f"a process may have {most:,} connections here{how}")
        files = 2 * size * sum(2 if name == names.RELAY else 1 for name in kept)
        if size * BYTES_PER_RANK * len(kept) > machine.available_bytes() * 0.8:
            self._leave_out(what, kept, "there is not enough memory")
        elif files > machine.room_for_files():
            self._leave_out(what, kept, "this system may not open so many files")
        else:
            self._add(replace(each, rounds=ROUNDS_OF_MANY) if size > MANY else each, kept, size)

    def _add_as_is(self) -> None:
        """torch's servers as they come, which look up the name of each rank that connects."""
        found = system_names.look_up()
        effect = "; torch's server as it comes does one for every rank" if found.stall else ""
        self.notes.append(f"{found}{effect}")
        theirs = [name for name in names.AS_IS if name.removesuffix("-as-is") in self._targets]
        beside = [name for name in ("torch-libuv", "rallypoint-libuv") if name in self._targets]
        if found.stall:
            self._add(replace(AS_IS, rounds=STALLING_ROUNDS), [*theirs, *beside], STALLING_RANKS)
        else:
            self._add(AS_IS, [*theirs, *beside], AS_IS_RANKS)

    def _add_tutorial(self, each: Measurement) -> None:
        """What the tutorial times, with real clients of torch, if there is room for them."""
        most = int(machine.available_bytes() * 0.8) // REAL_RANK_BYTES
        size = min(QUICK_REAL_RANKS if self._wish.quick else REAL_RANKS, most)
        targets = [name for name in ranks.TUTORIAL_TARGETS if name in self._targets]
        if size < LEAST_REAL_RANKS:
            self._leave_out(each.name, targets, "there is not enough memory")
        else:
            self._add(each, targets, size)

    def _add(self, each: Measurement, targets: Sequence[str], size: int = 0) -> None:
        able = self._fit_for(each, targets)
        most = machine.most_connections()
        if each.connections > most:
            self._leave_out(each.name, able, f"a process may have {most:,} connections here")
        elif able:
            quick = self._wish.quick
            self.measurements.append(
                replace(
                    each,
                    load=f"{size:,} {each.load}" if size else each.load,
                    targets=tuple(able),
                    rounds=self._wish.repeat or (min(each.rounds // 2, 3) if quick else each.rounds),
                    seconds=each.seconds / 4 if quick else each.seconds,
                    ranks=size,
                )
            )

    def _fit_for(self, each: Measurement, targets: Sequence[str]) -> list[str]:
        for name, why in each.unfit.items():
            note = f"{each.name}: {name} left out: {why}"
            if name in targets and note not in self.notes:
                self.notes.append(note)
        return [name for name in targets if name not in each.unfit]

    def _leave_out(self, what: str, which: Sequence[str], why: str) -> None:
        if which:
            self.notes.append(f"{what}: {', '.join(which)} left out: {why}")
