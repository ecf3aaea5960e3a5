"""A plausible full run of `rallypoint bench all`, made up: for tests of whatever shows results.

Times grow with the ranks by known exponents, rounds scatter by known factors, and nothing is random.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rallypoint.bench.results import Entry, Record, Results, Sample, Unit

SCATTER = (1.0, 0.94, 1.07, 0.97, 1.03)
"""By which the rounds differ from their median."""

SIZES = (1_024, 4_096, 16_384)
MOST = 98_304

COMPARED = ("rallypoint-libuv", "rallypoint-legacy", "rallypoint-relay", "torch-libuv", "torch-legacy")

# Seconds for 1,024 ranks, CPU seconds of the server per rank, its bytes per connection.
COSTS: Mapping[str, tuple[float, float, float]] = {
    "rallypoint-libuv": (0.070, 41e-6, 2_900.0),
    "rallypoint-legacy": (0.079, 46e-6, 2_750.0),
    "rallypoint-relay": (0.110, 7.5e-6, 640.0),
    "torch-libuv": (0.095, 58e-6, 9_400.0),
    "torch-legacy": (0.160, 75e-6, 1_300.0),
}
EXPONENTS: Mapping[str, float] = {"torch-legacy": 1.8, "rallypoint-relay": 0.95}

# Operations per second; what is not of the command `ops` is measured as the time of one.
RATES: Mapping[str, Mapping[str, float]] = {
    "get": {"rallypoint-libuv": 52e3, "rallypoint-legacy": 49e3, "torch-libuv": 55e3, "redis": 61e3},
    "get-pipelined": {
        "rallypoint-libuv": 610e3,
        "rallypoint-legacy": 500e3,
        "torch-libuv": 150e3,
        "redis": 700e3,
    },
    "set": {"rallypoint-libuv": 50e3, "rallypoint-legacy": 47e3, "torch-libuv": 51e3, "redis": 58e3},
    "add": {"rallypoint-libuv": 48e3, "rallypoint-legacy": 46e3, "torch-libuv": 49e3, "redis": 57e3},
    "accept": {"rallypoint-libuv": 21e3, "torch-libuv": 1_500.0},
    "accept-pipelined": {"rallypoint-libuv": 9e3, "torch-libuv": 310.0},
    "connect-storm": {"rallypoint-libuv": 14e3, "torch-libuv": 8e3},
    "multi-get": {"rallypoint-libuv": 1_900e3, "torch-libuv": 61e3},
    "multi-set": {"rallypoint-libuv": 1_400e3, "torch-libuv": 47e3},
    "cancel": {"rallypoint-libuv": 90e3, "torch-libuv": 600.0},
}
COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("accept", "accept-pipelined", "connect-storm"), "accept"),
    **dict.fromkeys(("multi-get", "multi-set"), "bulk"),
    "cancel": "wakeup",
}


def make_entry(target: str, values: Iterable[float], **figures: float) -> Entry:
    """A target whose rounds differ in their value alone."""
    return Entry(target, [Sample(value, **figures) for value in values])  # type: ignore[arg-type]


def make_record(
    name: str, unit: Unit, values: Mapping[str, Iterable[float]], ranks: int = 0, command: str = "ops"
) -> Record:
    """A record of rounds that have nothing but a value."""
    entries = {target: make_entry(target, rounds) for target, rounds in values.items()}
    return Record(command, name, f"the load of {name}", f"one {name}", unit, ranks, entries)


def make_results(*records: Record) -> Results:
    """A run of these records alone."""
    return Results("rallypoint bench ops", "2026-01-02T03:04:05+00:00", records=list(records))


def full_results() -> Results:
    """A run of everything."""
    return Results(
        command="rallypoint bench all --json result.json",
        started="2026-01-02T03:04:05+00:00",
        seconds=1_234.5,
        machine={
            "cores": "2",
            "processor": "An Example 3000",
            "memory": "8 GiB",
            "system": "Linux 6.1 x86_64",
        },
        versions={
            "rallypoint": "0.1.0",
            "python": "3.11.7, built without --enable-optimizations",
            "torch": "2.13.0+cpu",
            "redis": "7.0.15",
        },
        limits={"open files per process": "20,000", "backlog (somaxconn)": "4096"},
        notes=["restart: torch's server cannot be restarted on its port, and is left out"],
        records=list(_records()),
    )


def _records() -> Iterable[Record]:
    for size in SIZES:
        yield _scaled("init", "init", size, COMPARED)
    yield _scaled("init", "init", MOST, ("rallypoint-relay",))
    yield make_record(
        "init-as-is",
        "time",
        {
            "torch-libuv-as-is": _around(5.1),
            "torch-legacy-as-is": _around(5.3),
            "torch-libuv": _around(0.095),
            "rallypoint-libuv": _around(0.070),
        },
        1_024,
        "init",
    )
    yield _tutorial("init")
    for name in ("barrier", "barrier-trickle"):
        for size in SIZES:
            yield _scaled("barrier", name, size, COMPARED)
        yield _scaled("barrier", name, MOST, ("rallypoint-relay",))
    yield _tutorial("barrier")
    yield from (_rates(name, values) for name, values in RATES.items())
    yield from (_one(name) for name in ("one-get", "one-set", "one-add"))
    for command in ("wakeup", "restart"):
        for size in SIZES[:2]:
            yield _scaled(command, command, size, ("rallypoint-libuv", "torch-libuv"))


def _around(middle: float, turn: int = 0) -> list[float]:
    """Rounds about a median; each target's in an order of its own, so that ratios scatter as well."""
    turn %= len(SCATTER)
    return [middle * factor for factor in SCATTER[turn:] + SCATTER[:turn]]


def _scaled(command: str, name: str, ranks: int, targets: Iterable[str]) -> Record:
    """Seconds for all ranks."""
    entries = {}
    for target in targets:
        base, cpu, memory = COSTS[target]
        middle = (
            base * (ranks / 1_024) ** EXPONENTS.get(target, 1.02) * (1.4 if name.endswith("trickle") else 1)
        )
        extras = {"messages": ranks * (0.5 if target.endswith("relay") else 4.0), "whole_seconds": middle + 5}
        if target.endswith("relay"):
            extras |= {"relays": ranks / 8, "relays_cpu": ranks * 2e-4, "relays_bytes": ranks * 9e3}
        samples = [
            Sample(value, cpu, 0.55, 0.7, value / 2, value * 0.99, memory - number, dict(extras))
            for number, value in enumerate(_around(middle, sum(target.encode())))
        ]
        entries[target] = Entry(target, samples)
    return Record(command, name, f"{ranks:,} ranks that {command}", "rank", "time", ranks, entries)


def _tutorial(name: str) -> Record:
    targets = ("torch-libuv", "torch-legacy", "rallypoint-libuv", "rallypoint-legacy")
    values = {target: _around(0.2 + number / 100) for number, target in enumerate(targets)}
    return make_record(f"tutorial-{name}", "time", values, 64, name)


def _rates(name: str, values: Mapping[str, float]) -> Record:
    is_rate = name not in COMMANDS
    record = make_record(name, "rate" if is_rate else "time", {}, command=COMMANDS.get(name, "ops"))
    for target, rate in values.items():
        middle = rate if is_rate else 1 / rate
        extras = {"dropped": 3.0} if name == "connect-storm" else {}
        busy = 0.72 if name == "get-pipelined" and target == "redis" else 0.96
        record.entries[target] = Entry(
            target,
            [
                Sample(value, 1 / value, busy, 0.93, extras=dict(extras))
                for value in _around(middle, sum(target.encode()))
            ],
        )
    return record


def _one(name: str) -> Record:
    record = make_record(name, "time", {})
    for target, p50 in {"rallypoint-libuv": 48e-6, "rallypoint-relay": 110e-6, "torch-libuv": 45e-6}.items():
        samples = [
            Sample(value * 1_000, p50=value, p99=3 * value) for value in _around(p50, sum(target.encode()))
        ]
        record.entries[target] = Entry(target, samples)
    return record
