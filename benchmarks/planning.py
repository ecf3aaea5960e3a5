"""All measurements."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from benchmarks import loads, targets
from rallypoint.bench.contest import Measurement, absences
from rallypoint.bench.loads import MEASUREMENTS, RANKS, ComingUp
from rallypoint.store.machine import interfaces, system

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

_RESTART: Final = "ranks leave, the store is made anew, they come back and pass a barrier"
_SPREAD: Final = {
    targets.RELAY: "here all relays would start in a few processes, and not each on its machine"
}
_BEHIND: Final = {targets.RELAY: "behind one relay, the server sees nothing of its clients"}
_STORM: Final = f"{loads.STORM_CLIENTS:,} clients connect at once"
_KEYS: Final = f"{loads.MANY_KEYS:,} keys"
_CANCEL: Final = f"a wait is given up beside a wait for {_KEYS}"
_NO_CANCEL: Final = {targets.REDIS: "it has no such thing"}


def _simulated(each: Measurement) -> Measurement:
    session = loads.ComingUpBehindRelays if each.name == "init" else each.session
    return replace(each, session=session, sizes=(*each.sizes, MOST_RANKS) if each.sizes else ())


def _accept(name: str, load: str, per_request: int, rounds: int) -> Measurement:
    load = f"{loads.NEW_CLIENTS:,} new clients beside {loads.BUSY_CLIENTS} with {load} in flight"
    count = loads.BUSY_CLIENTS + loads.NEW_CLIENTS
    session = partial(loads.Accepts, per_request=per_request)
    return Measurement(
        "accept", name, load, session, "new client", unfit=_BEHIND, connections=count, rounds=rounds
    )


_CANCELS: Final = partial(loads.Cancels, operation="CANCEL", count=1)

TABLE: Final = (
    *map(_simulated, MEASUREMENTS),
    Measurement("wakeup", "wakeup", "ranks wait for one key, which is set", loads.Wakeups, sizes=RANKS),
    Measurement("restart", "restart", _RESTART, loads.Restarts, unfit=_SPREAD, sizes=RANKS),
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


def make_table(
    commands: Sequence[str], wished: Sequence[str], quick: bool
) -> tuple[list[Measurement], list[str]]:
    """The measurements of some commands with these targets, in the commands' order; and notes on them."""
    notes: list[str] = []
    missing = absences([name for name in wished if name in targets.TARGETS], targets.TARGETS)
    present = [name for name in wished if name not in missing]
    beside = (
        _beside_torch(commands, present, quick, notes) if any("torch-" in each for each in present) else ()
    )
    table = [*TABLE, *beside]
    return [each for command in commands for each in table if each.command == command], notes


def _beside_torch(
    commands: Sequence[str], present: Sequence[str], quick: bool, notes: list[str]
) -> Iterator[Measurement]:
    """Look-ups are timed only for a measurement that does them."""
    if "init" in commands:
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
    most = int(psutil.virtual_memory().available * 0.8) // REAL_RANK_BYTES
    real = min(QUICK_REAL_RANKS if quick else REAL_RANKS, max(2, most))
    able = tuple(name for name in loads.TUTORIAL_TARGETS if name in present)
    for each in _REAL_CLIENTS:
        yield replace(each, targets=able, ranks=real)


# What it is measured on, in words


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "unknown")


def python_build() -> str:
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    optimised = "with" if "--enable-optimizations" in arguments else "without"
    return f"{platform.python_version()}, built {optimised} --enable-optimizations"


def limits() -> dict[str, str]:
    """The limits of this system that bound the measurements, but for open files."""
    low, high = system.client_ports()
    return {
        "backlog (somaxconn)": str(system.accept_backlog()),
        "SYN backlog": str(system.syn_backlog()),
        "ports for clients": f"{high - low + 1:,}",
    }
