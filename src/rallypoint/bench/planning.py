"""What will be measured on this machine, with whom, how often; and what will not, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rallypoint.bench import machine, names, tutorial
from rallypoint.bench.catalogue import AS_IS, TUTORIAL, WITH_CLIENTS, WITH_RANKS
from rallypoint.bench.session import Measurement
from rallypoint.bench.targets import absences
from rallypoint.errors import UsageError
from rallypoint.server.machine import names as system_names

RANKS: Final = (1_024, 4_096, 16_384, 98_304)
QUICK_RANKS: Final = (1_024, 4_096)
MANY: Final = 30_000
"""So many are brought up only where that is the point."""
ROUNDS_OF_MANY: Final = 3
REAL_RANKS: Final = 64
QUICK_REAL_RANKS: Final = 16
LEAST_REAL_RANKS: Final = 2
AS_IS_RANKS: Final = 256
STALLING_RANKS: Final = 64
STALLING_ROUNDS: Final = 3
STALL_S: Final = 6.0
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
    """How many rounds; 0: as many as suit."""
    quick: bool = False


@dataclass
class Plan:
    """What will be measured, in this order, and what will not, in words."""

    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make_plan(wish: Wish) -> Plan:
    """What can be measured here of what is asked for; UsageError if that is nothing."""
    if machine.most_connections() < LEAST_CONNECTIONS:
        raise UsageError(
            f"a process may have no more than {machine.most_connections()} connections here",
            hint="raise the limit of open files (ulimit -n) to 1,024 at least",
        )
    for name in wish.targets:
        if name not in names.TARGETS:
            raise UsageError(f"{name!r} is no target", hint=f"there are {', '.join(names.TARGETS)}")
    planner = _Planner(wish)
    for command in wish.commands:
        planner.add(command)
    plan = planner.plan
    if not plan.measurements:
        raise UsageError("there is nothing to measure here", hint="; ".join(plan.notes))
    return plan


class _Planner:
    """Fits a wish to this machine."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self.plan = Plan()
        missing = absences(wish.targets)
        self.plan.notes += [f"{name} is left out: {why}" for name, why in missing.items()]
        self._targets = tuple(name for name in wish.targets if name not in missing)
        self._has_torch = any(name.startswith("torch-") for name in self._targets)

    def add(self, command: str) -> None:
        """Plan all that belongs to a command."""
        for each in WITH_RANKS:
            if each.command == command:
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
        if self._wish.ranks and command not in {each.command for each in WITH_RANKS}:
            self.plan.notes.append(f"{command} has no ranks: --ranks does not matter to it")

    def _sizes(self, command: str) -> Sequence[int]:
        if self._wish.ranks:
            return list(dict.fromkeys(self._wish.ranks))
        if command in ("init", "barrier"):  # where growth is the point
            return QUICK_RANKS if self._wish.quick else RANKS
        return QUICK_RANKS[-1:] if self._wish.quick else [size for size in RANKS if size < MANY]

    def _add_ranks(self, each: Measurement, size: int) -> None:
        able = self._fit_for(each, self._targets)
        targets = self._with_room(f"{each.name}, {size:,} ranks", able, size)
        rounds = ROUNDS_OF_MANY if size > MANY else each.rounds
        self._add(replace(each, rounds=rounds, seconds=0.2 + size * 1e-4), targets, size)

    def _with_room(self, what: str, able: Sequence[str], size: int) -> tuple[str, ...]:
        """Those that can have so many ranks here, all at the same time."""
        most = machine.most_connections()
        kept = [name for name in able if name == names.RELAY or size <= most]
        dropped = [name for name in able if name not in kept]
        how = "; through relays it is measured" if names.RELAY in able else ""
        self._leave_out(what, dropped, f"a process may have {most:,} connections here{how}")
        files = 2 * size * sum(2 if name == names.RELAY else 1 for name in kept)
        if size * BYTES_PER_RANK * len(kept) > machine.available_bytes() * 0.8:
            self._leave_out(what, kept, "there is not enough memory")
        elif files > machine.room_for_files():
            self._leave_out(what, kept, "this system may not open so many files")
        else:
            return tuple(kept)
        return ()

    def _fit_for(self, each: Measurement, targets: Sequence[str]) -> list[str]:
        for name, why in each.unfit.items():
            note = f"{each.name}: {name} left out: {why}"
            if name in targets and note not in self.plan.notes:
                self.plan.notes.append(note)
        return [name for name in targets if name not in each.unfit]

    def _leave_out(self, what: str, which: Iterable[str], why: str) -> None:
        if joined := ", ".join(which):
            self.plan.notes.append(f"{what}: {joined} left out: {why}")

    def _add_as_is(self) -> None:
        """torch's servers as they come, which look up the name of each rank that connects."""
        found = system_names.look_up()
        effect = "; torch's server as it comes does one for every rank" if found.stall else ""
        self.plan.notes.append(f"{found}{effect}")
        theirs = [name for name in names.AS_IS if name.removesuffix("-as-is") in self._targets]
        beside = [name for name in ("torch-libuv", "rallypoint-libuv") if name in self._targets]
        each, size = AS_IS, AS_IS_RANKS
        if found.stall:
            size = STALLING_RANKS
            each = replace(each, seconds=STALL_S, rounds=STALLING_ROUNDS, quick_rounds=1)
        self._add(each, (*theirs, *beside), size)

    def _add_tutorial(self, each: Measurement) -> None:
        """What the tutorial times, with as many real clients of torch as there is room for."""
        most = int(machine.available_bytes() * 0.8) // REAL_RANK_BYTES
        size = min(QUICK_REAL_RANKS if self._wish.quick else REAL_RANKS, most)
        targets = [name for name in tutorial.TARGETS if name in self._targets]
        if size < LEAST_REAL_RANKS:
            self._leave_out(each.name, targets, "there is not enough memory")
        else:
            self._add(each, targets, size)

    def _add(self, each: Measurement, targets: Sequence[str], size: int = 0) -> None:
        able = tuple(self._fit_for(each, targets))
        most = machine.most_connections()
        if each.connections > most:
            self._leave_out(each.name, able, f"a process may have {most:,} connections here")
            return
        if not able:
            return
        rounds = self._wish.repeat or (each.quick_rounds if self._wish.quick else each.rounds)
        seconds = each.seconds / 4 if self._wish.quick and each.is_steady else each.seconds
        words = f"{size:,} {each.load}" if size else each.load
        self.plan.measurements.append(
            replace(each, load=words, targets=able, rounds=rounds, seconds=seconds, ranks=size)
        )
