"""A plausible full run of `rallypoint bench all`, made up: for tests of tables, figures and the page.

Times grow with the ranks by known exponents, rounds scatter by known factors, and nothing is random.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rallypoint.bench.results import Entry, Record, Results, Sample, Unit

SCATTER = (1.0, 0.94, 1.07, 0.97, 1.03)
"""By which the rounds differ from their median."""

SIZES = (1_024, 4_096, 16_384)
MOST = 98_304

# Seconds for 1,024 ranks, CPU seconds of the server per rank, its bytes per connection.
COSTS: Mapping[str, tuple[float, float, float]] = {
    "rallypoint-libuv": (0.070, 41e-6, 2_900.0),
    "rallypoint-relay": (0.110, 7.5e-6, 640.0),
    "torch-libuv": (0.095, 58e-6, 9_400.0),
    "torch-legacy": (0.160, 75e-6, 1_300.0),
}
EXPONENTS: Mapping[str, float] = {"torch-legacy": 1.8, "rallypoint-relay": 0.95}

# Operations per second, or seconds of one.
RATES: Mapping[str, Mapping[str, float]] = {
    "get": {"rallypoint-libuv": 52e3, "rallypoint-legacy": 49e3, "torch-libuv": 55e3, "redis": 61e3},
    "get-pipelined": {"rallypoint-libuv": 610e3, "torch-libuv": 150e3, "redis": 700e3},
    "set": {"rallypoint-libuv": 50e3, "torch-libuv": 51e3, "redis": 58e3},
    "add": {"rallypoint-libuv": 48e3, "torch-libuv": 49e3, "redis": 57e3},
}
TIMES: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "connect-storm": ("accept", {"rallypoint-libuv": 7e-5, "torch-libuv": 1e-4}),
    "multi-get": ("bulk", {"rallypoint-libuv": 5e-7, "torch-libuv": 2e-5}),
    "cancel": ("wakeup", {"rallypoint-libuv": 1e-5, "torch-libuv": 2e-3}),
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
        machine={"cores": "2", "processor": "An Example 3000"},
        versions={"python": "3.11.7, built without --enable-optimizations", "torch": "2.13.0+cpu"},
        limits={"open files per process": "20,000"},
        notes=["restart: torch's server cannot be restarted on its port, and is left out"],
        records=list(_records()),
    )


def _records() -> Iterable[Record]:
    for command, name in (("init", "init"), ("barrier", "barrier"), ("barrier", "barrier-trickle")):
        for size in SIZES:
            yield _scaled(command, name, size, COSTS)
        yield _scaled(command, name, MOST, ("rallypoint-relay",))
    as_is = {"torch-libuv-as-is": _around(5.1), "torch-libuv": _around(0.095)}
    yield make_record("init-as-is", "time", as_is, 1_024, "init")
    yield make_record("tutorial-init", "time", {"torch-libuv": _around(0.2)}, 64, "init")
    for name, rates in RATES.items():
        record = make_record(name, "rate", {})
        for target, rate in rates.items():
            busy = 0.72 if (name, target) == ("get-pipelined", "redis") else 0.96
            values = _around(rate, sum(target.encode()))
            record.entries[target] = make_entry(target, values, server_share=busy, load_share=0.93)
        yield record
    for name, (command, times) in TIMES.items():
        rounds = {target: _around(seconds) for target, seconds in times.items()}
        yield make_record(name, "time", rounds, command=command)
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
        middle = base * (ranks / 1_024) ** EXPONENTS.get(target, 1.02)
        samples = [
            Sample(value, cpu, 0.55, 0.7, value / 2, value * 0.99, memory - number, {"messages": ranks * 4.0})
            for number, value in enumerate(_around(middle, sum(target.encode())))
        ]
        entries[target] = Entry(target, samples)
    return Record(command, name, f"{ranks:,} ranks that {command}", "rank", "time", ranks, entries)
