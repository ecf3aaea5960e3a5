"""All measurements, and what of them this machine can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from benchmarks import loads, targets
from benchmarks.dialects import TORCH
from rallypoint.bench import machine, planning
from rallypoint.bench.clients import Dialect, Exchange
from rallypoint.bench.contest import Measurement
from rallypoint.bench.loads import MEASUREMENTS, ComingUp
from rallypoint.bench.planning import BenchPlan, Wish
from rallypoint.store.machine import interfaces

COMMANDS: Final = ("init", "barrier", "ops", "accept", "bulk", "wakeup", "restart")
"""In the order of the tables."""

MOST_RANKS: Final = 98_304
"""So many are brought up only where that is the point."""
REAL_RANKS: Final = 64
QUICK_REAL_RANKS: Final = 16
REAL_RANK_BYTES: Final = 64 << 20
AS_IS_RANKS: Final = 256
STALLING_RANKS: Final = 64
"""Where look-ups take seconds: torch's server does one for every rank."""

_SIZES: Final = (1_024, 4_096, 16_384)
_RESTART: Final = "ranks leave, the store is made anew, they come back and pass a barrier"
_SPREAD: Final = {
    targets.RELAY: "here all relays would start in a few processes, and not each on its machine"
}
_BEHIND: Final = {targets.RELAY: "behind one relay, the server sees nothing of its clients"}
_STORM: Final = f"{loads.STORM_CLIENTS:,} clients connect at once"
_KEYS: Final = f"{loads.MANY_KEYS:,} keys"
_CANCEL: Final = f"a wait is given up beside a wait for {_KEYS}"
_NO_CANCEL: Final = {targets.REDIS: "it has no such thing"}


def give_up(_: Dialect, __: int, ___: int) -> Exchange:
    """Each waits for a key that nobody sets, and gives up."""
    return TORCH.give_up(b"/bench/missing")


def _accept(name: str, load: str, per_request: int, rounds: int) -> Measurement:
    load = f"{loads.NEW_CLIENTS:,} new clients beside {loads.BUSY_CLIENTS} with {load} in flight"
    count = loads.BUSY_CLIENTS + loads.NEW_CLIENTS
    session = partial(loads.Accepts, per_request=per_request)
    return Measurement(
        "accept", name, load, session, "new client", unfit=_BEHIND, connections=count, rounds=rounds
    )


_CANCELS: Final = partial(loads.BesideWait, ask=give_up, count=1)

TABLE: Final = (
    *(replace(each, sizes=(*each.sizes, MOST_RANKS) if each.sizes else ()) for each in MEASUREMENTS),
    Measurement(
        "wakeup",
        "wakeup",
        "ranks wait for one key, which is set",
        loads.Wakeups,
        sizes=_SIZES,
        quick_sizes=(4_096,),
    ),
    Measurement(
        "restart", "restart", _RESTART, loads.Restarts, unfit=_SPREAD, sizes=_SIZES, quick_sizes=(4_096,)
    ),
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

# Beside torch alone: torch's servers as they come, and real clients of torch

_AS_IS: Final = "ranks connect; -as-is: to torch's own socket, with a reverse look-up of each"
_TUTORIAL: Final = "real clients of torch, a process each: {} as rank 0 sees it"
_REAL_CLIENTS: Final = (
    Measurement("init", "tutorial-init", _TUTORIAL.format("TCPStore(...)"), loads.TutorialInit),
    Measurement(
        *("barrier", "tutorial-barrier"),
        _TUTORIAL.format("the barrier of init_process_group"),
        loads.TutorialBarrier,
    ),
)


def make_plan(wish: Wish) -> BenchPlan:
    """The measurements asked for that can be done here; UsageError if there are none."""
    notes: list[str] = []
    wished = [name for name in wish.targets if name in targets.TARGETS]
    present = [name for name in wished if name not in planning.absences(wished, targets.TARGETS)]
    beside = list(_beside_torch(wish, present, notes)) if any(map(_is_torchs, present)) else []
    plan = planning.make_plan(wish, [*TABLE, *beside], targets.TARGETS)
    plan.notes += notes
    return plan


def _is_torchs(name: str) -> bool:
    return name.startswith("torch-")


def _beside_torch(wish: Wish, present: Sequence[str], notes: list[str]) -> Iterator[Measurement]:
    """Look-ups are timed only for a measurement that does them."""
    if "init" in wish.commands:
        found = interfaces.time_look_ups()
        effect = "; torch's server as it comes does one for every rank" if found.stall else ""
        notes.append(f"{found}{effect}")
        as_is = [name for name in targets.AS_IS if name.removesuffix("-as-is") in present]
        others = [name for name in ("torch-libuv", "rallypoint-libuv") if name in present]
        size, rounds = (STALLING_RANKS, 3) if found.stall else (AS_IS_RANKS, 5)
        yield Measurement(
            *("init", "init-as-is", _AS_IS, ComingUp),
            targets=(*as_is, *others),
            rounds=rounds,
            ranks=size,
        )
    most = int(machine.available_bytes() * 0.8) // REAL_RANK_BYTES
    real = min(QUICK_REAL_RANKS if wish.quick else REAL_RANKS, max(2, most))
    able = tuple(name for name in loads.TUTORIAL_TARGETS if name in present)
    for each in _REAL_CLIENTS:
        yield replace(each, targets=able, ranks=real)
