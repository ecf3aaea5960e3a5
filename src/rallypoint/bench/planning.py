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
from rallypoint.store.machine import interfaces

# All loads, in the order of the tables


def _barrier(name: str, how: str, *, at_once: bool) -> Measurement:
    session = partial(ranks.Barriers, at_once=at_once)
    return Measurement("barrier", name, f"ranks come to a barrier {how}", session)


_RESTART: Final = "ranks leave, the store is made anew, they come back and pass a barrier"
_SPREAD: Final = {names.RELAY: "here all relays would start in a few processes, and not each on its machine"}

WITH_RANKS: Final = (
    Measurement("init", "init", "ranks connect, and are counted", ranks.ComingUp),
    _barrier("barrier", "all at once", at_once=True),
    _barrier("barrier-trickle", "one after the other", at_once=False),
    Measurement("wakeup", "wakeup", "ranks wait for one key, which is set", ranks.Wakeups),
    Measurement("restart", "restart", _RESTART, ranks.Restarts, unfit=_SPREAD),
)
"""At several sizes: the number of ranks goes in front of their words."""

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


def _many(operation: str, ask: Ask, per_request: int = 1, count: int = loads.CLIENTS) -> Measurement:
    name = operation.lower() + ("-pipelined" if per_request > 1 else f"-{count}" * (count > loads.CLIENTS))
    each = f"{per_request} {operation}s" if per_request > 1 else f"one {operation}"
    session = partial(loads.Steady, ask=ask, count=count, per_request=per_request)
    return Measurement(
        *("ops", name, f"{count:,} clients, {each} in flight each", session, operation, "rate"),
        seconds=0.8,
        connections=count,
    )


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

_ASKED: Final = {"GET": clients.get, "SET": clients.store, "ADD": clients.add, "CHECK": clients.exists}

WITH_CLIENTS: Final = (
    *(_many(operation, ask) for operation, ask in _ASKED.items()),
    *(_many(operation, ask, count=loads.MANY_CLIENTS) for operation, ask in _ASKED.items()),
    _many("GET", clients.get, loads.PIPELINED),
    _many("ADD", clients.add, loads.PIPELINED),
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

MEASUREMENTS: Final = (*WITH_RANKS, AS_IS, *TUTORIAL, *WITH_CLIENTS)

# What is planned

RANKS: Final = (1_024, 4_096, 16_384, 98_304)
QUICK_RANKS: Final = (1_024, 4_096)
MANY: Final = 30_000
"""More are brought up only where that is the point."""
REAL_RANKS: Final = 64
QUICK_REAL_RANKS: Final = 16
AS_IS_RANKS: Final = 256
STALLING_RANKS: Final = 64
"""Where look-ups take seconds: torch's server does one for every rank."""
FEW_ROUNDS: Final = 3
"""For loads with many ranks, and for look-ups that stall."""

BYTES_PER_RANK: Final = 32 << 10
"""Memory of a rank and its part of a server, kernel included; generous, as all have to fit."""

REAL_RANK_BYTES: Final = 64 << 20

LEAST_CONNECTIONS: Final = 128
"""With less, there is hardly anything to measure."""


@dataclass(frozen=True)
class Wish:
    """The options of the user."""

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
        if name not in (known := (*names.TARGETS, *names.BY_NAME)):
            raise UsageError(f"{name!r} is no target", hint=f"there are {', '.join(known)}")
    plan = BenchPlan(wish)
    if not plan.measurements:
        raise UsageError("there is nothing to measure here", hint="; ".join(plan.notes))
    return plan


class BenchPlan:
    """The measurements in their order, and notes on those that are left out."""

    def __init__(self, wish: Wish) -> None:
        self.measurements: list[Measurement] = []
        missing = absences(wish.targets)
        self.notes = [f"{name} is left out: {why}" for name, why in missing.items()]
        self._wish = wish
        self._targets = [name for name in wish.targets if name not in missing]
        for command in wish.commands:
            for each in MEASUREMENTS:
                if each.command == command and (targets := self._targets_of(each)):
                    for size in self._sizes(each):
                        self._add(each, targets, size)
            if wish.ranks and all(each.command != command for each in WITH_RANKS):
                self.notes.append(f"{command} has no ranks: --ranks does not matter to it")

    def _targets_of(self, each: Measurement) -> list[str]:
        """The targets that take part; torch's clients, and its servers as they come, only beside torch."""
        if each in WITH_RANKS or each in WITH_CLIENTS:
            return self._targets
        if not any(name.startswith("torch-") for name in self._targets):
            return []
        if each in TUTORIAL:
            return [name for name in ranks.TUTORIAL_TARGETS if name in self._targets]
        theirs = [name for name in names.AS_IS if name.removesuffix("-as-is") in self._targets]
        return theirs + [name for name in ("torch-libuv", "rallypoint-libuv") if name in self._targets]

    def _sizes(self, each: Measurement) -> Sequence[int]:
        quick = self._wish.quick
        if each in WITH_CLIENTS:
            return [0]
        if each in TUTORIAL:
            most = int(machine.available_bytes() * 0.8) // REAL_RANK_BYTES
            return [min(QUICK_REAL_RANKS if quick else REAL_RANKS, max(2, most))]
        if each is AS_IS:
            found = interfaces.time_look_ups()
            effect = "; torch's server as it comes does one for every rank" if found.stall else ""
            self.notes.append(f"{found}{effect}")
            return [STALLING_RANKS if found.stall else AS_IS_RANKS]
        if self._wish.ranks:
            return list(dict.fromkeys(self._wish.ranks))
        if each.command in ("init", "barrier"):  # where growth is the point
            return QUICK_RANKS if quick else RANKS
        return QUICK_RANKS[-1:] if quick else [size for size in RANKS if size < MANY]

    def _add(self, each: Measurement, targets: Sequence[str], size: int) -> None:
        """With the targets that can do it here, all at the same time."""
        for name, why in each.unfit.items():
            self._leave_out(each.name, [name] if name in targets else [], why)
        able = [name for name in targets if name not in each.unfit]
        what = f"{each.name}, {size:,} ranks" if size else each.name
        most = machine.most_connections()
        kept = [name for name in able if name == names.RELAY or max(size, each.connections) <= most]
        how = "; through relays it is measured" if names.RELAY in kept else ""
        dropped = [name for name in able if name not in kept]
        self._leave_out(what, dropped, f"a process may have {most:,} connections here{how}")
        if size * BYTES_PER_RANK * len(kept) > machine.available_bytes() * 0.8:
            self._leave_out(what, kept, "there is not enough memory")
        elif kept:
            quick, is_long = self._wish.quick, size > MANY or (each is AS_IS and size == STALLING_RANKS)
            rounds = FEW_ROUNDS if is_long else each.rounds
            self.measurements.append(
                replace(
                    each,
                    load=f"{size:,} {each.load}" if size else each.load,
                    targets=tuple(kept),
                    rounds=self._wish.repeat or (min(rounds // 2, 3) if quick else rounds),
                    seconds=each.seconds / 4 if quick else each.seconds,
                    ranks=size,
                )
            )

    def _leave_out(self, what: str, which: Sequence[str], why: str) -> None:
        note = f"{what}: {', '.join(which)} left out: {why}"
        if which and note not in self.notes:
            self.notes.append(note)
