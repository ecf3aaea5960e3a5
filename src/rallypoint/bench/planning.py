"""Which measurements this machine can do, with which targets and how often."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final

from rallypoint.bench import machine
from rallypoint.bench.contest import Kinds, Measurement
from rallypoint.errors import UsageError

MANY: Final = 30_000
FEW_ROUNDS: Final = 3
"""Of loads with more ranks than that."""

BYTES_PER_RANK: Final = 32 << 10
"""Memory of a rank and its part of a server, kernel included; generous, as all have to fit."""

LEAST_CONNECTIONS: Final = 128
"""With less, there is hardly anything to measure."""


@dataclass(frozen=True)
class Wish:
    """The options of the user."""

    commands: Sequence[str]
    targets: Sequence[str]
    ranks: Sequence[int] = ()
    """None: those that suit."""
    repeat: int = 0
    """How many rounds; 0: the usual number."""
    quick: bool = False


def make_plan(wish: Wish, table: Sequence[Measurement], kinds: Kinds) -> BenchPlan:
    """The measurements asked for that can be done here; UsageError if there are none."""
    check_system()
    if machine.most_connections() < LEAST_CONNECTIONS:
        raise UsageError(
            f"a process may have no more than {machine.most_connections()} connections here",
            hint="raise the limit of open files (ulimit -n) to 1,024 at least",
        )
    plan = BenchPlan(wish, table, kinds)
    if not plan.measurements:
        raise UsageError("there is nothing to measure here", hint="; ".join(plan.notes))
    return plan


def check_system() -> None:
    """UsageError where the measurements cannot run; else raise the limit of open files to its maximum."""
    if sys.platform != "linux":
        raise UsageError(
            f"rallypoint bench needs Linux, and this is {platform.system()}",
            hint="it reads CPU times and memory from /proc, and simulates ranks with epoll",
        )
    machine.raise_open_file_limit()


class BenchPlan:
    """The measurements of a table that are asked for, in its order, and notes on those that are left out."""

    def __init__(self, wish: Wish, table: Sequence[Measurement], kinds: Kinds) -> None:
        self.kinds = kinds
        self.measurements: list[Measurement] = []
        missing = absences(wish.targets, kinds)
        self.notes = [f"{name} is left out: {why}" for name, why in missing.items()]
        self._wish = wish
        self._targets = tuple(name for name in wish.targets if name not in missing)
        for command in wish.commands:
            chosen = [each for each in table if each.command == command]
            for each in chosen:
                for size in self._sizes(each):
                    self._add(each, size)
            if wish.ranks and not any(each.sizes for each in chosen):
                self.notes.append(f"{command} has no ranks: --ranks does not matter to it")

    def _sizes(self, each: Measurement) -> Sequence[int]:
        if each.sizes and self._wish.ranks:
            return list(dict.fromkeys(self._wish.ranks))
        return (each.quick_sizes if self._wish.quick else each.sizes) or [each.ranks]

    def _add(self, each: Measurement, size: int) -> None:
        """With the targets that can do it here, all at the same time."""
        targets = each.targets or self._targets
        for name, why in each.unfit.items():
            self._leave_out(each.name, [name] if name in targets else [], why)
        able = [name for name in targets if name not in each.unfit]
        what = f"{each.name}, {size:,} ranks" if size else each.name
        most = machine.most_connections()
        needed = max(size, each.connections)
        kept = [name for name in able if self.kinds[name].is_relayed or needed <= most]
        how = "; through relays it is measured" if any(self.kinds[name].is_relayed for name in kept) else ""
        dropped = [name for name in able if name not in kept]
        self._leave_out(what, dropped, f"a process may have {most:,} connections here{how}")
        if size * BYTES_PER_RANK * len(kept) > machine.available_bytes() * 0.8:
            self._leave_out(what, kept, "there is not enough memory")
        elif kept:
            quick, rounds = self._wish.quick, FEW_ROUNDS if size > MANY else each.rounds
            planned = replace(
                each,
                load=f"{size:,} {each.load}" if size else each.load,
                targets=tuple(kept),
                rounds=self._wish.repeat or (min(rounds // 2, 3) if quick else rounds),
                seconds=each.seconds / 4 if quick else each.seconds,
                ranks=size,
            )
            self.measurements.append(planned)

    def _leave_out(self, what: str, which: Sequence[str], why: str) -> None:
        note = f"{what}: {', '.join(which)} left out: {why}"
        if which and note not in self.notes:
            self.notes.append(note)


def absences(names: Sequence[str], kinds: Kinds) -> dict[str, str]:
    """The targets that are not installed here, each with the reason."""
    return {
        name: f"{need} is not installed"
        for name in names
        if (need := kinds[name].needs) and find_spec(need) is None and shutil.which(need) is None
    }
