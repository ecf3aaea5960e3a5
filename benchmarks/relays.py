"""What relays save the store, what they add to a request, and how many ranks they carry.

Run it as `python benchmarks/relays.py`. All load stays on this machine's loopback, and is bounded in count
and time. The exit code says only whether every answer was right: the figures are in the tables.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from socket import MSG_WAITALL, socket
from typing import Any

from rich.box import ASCII
from rich.table import Table

import frames
import report
from against_torch import INTERRUPTED, interrupt, positive, raise_open_file_limit
from contest import quartiles, say, uninterrupted
from load import check, connect
from rank_jobs import Job, Phase, Shape, fit
from servers import HOST, Server, ServerError

CPU_WANTED = 1 / 5
MESSAGES_WANTED = 1 / 6
ADDED_WANTED_US = 150.0
MANY_BARRIERS = 3
BUSY = 0.9
"""A process that takes so much of a core may be what the others wait for."""


@dataclass
class Result:
    """The outcome of one measurement: a table, verdicts, and all figures."""

    title: str
    table: Table
    verdicts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def judge(self, is_met: bool, what: str) -> None:
        self.verdicts.append(f"{'met' if is_met else 'not met':<8} {what}")


@dataclass(frozen=True)
class Sizes:
    """How much to measure."""

    rounds: int
    barrier: Shape
    many: Shape
    operations: int
    """In one round of the latency."""


def table_of(*headings: str) -> Table:
    """A table whose first column names what is in the others."""
    table = Table(box=ASCII)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="right")
    return table


def mib(count: float) -> str:
    return f"{count / (1 << 20):,.0f} MiB"


def inverse(ratio: float) -> str:
    """A ratio as people say it: below 1 as a fraction."""
    return f"1/{1 / ratio:.1f}" if 0 < ratio < 1 else f"{ratio:.1f}"


# A barrier, with relays and without

ARRIVALS = {"one after the other": False, "all at once": True}


def measure_barrier(sizes: Sizes) -> Result:
    """The same barriers behind relays and directly, in turns."""
    shape = fit(sizes.barrier)
    plain = Shape(shape.ranks, 0)
    if fit(plain) != plain:
        raise ServerError(f"this machine has no room for {plain} on one store, to compare with")
    with Job("direct", plain) as direct, Job("relayed", shape) as relayed:
        jobs = (direct, relayed)
        for job in jobs:
            job.start()
            job.come_up()
            job.barrier(at_once=False)  # to warm up
        phases: dict[str, dict[str, list[Phase]]] = {how: {"direct": [], "relayed": []} for how in ARRIVALS}
        for number in range(sizes.rounds):
            for how, at_once in ARRIVALS.items():
                for job in jobs if number % 2 == 0 else jobs[::-1]:
                    phases[how][job.name].append(job.barrier(at_once=at_once))
        memory = {job.name: job.head.resident_bytes() for job in jobs}
        memory["relays"] = relayed.hosts_bytes()
        for job in jobs:
            job.leave()
    title = f"barrier: {shape}, against the same ranks without relays; {sizes.rounds} rounds"
    result = Result(title, table_of("direct", "relayed", "ratio", "quartiles", "wanted"))
    for how in ARRIVALS:
        add_barrier_rows(result, how, phases[how])
    result.table.add_section()
    result.table.add_row("head: memory", mib(memory["direct"]), mib(memory["relayed"]))
    result.table.add_row("relays: memory", "-", mib(memory["relays"]))
    result.figures = {
        "shape": asdict(shape),
        "phases": {
            how: {name: [asdict(phase) for phase in each] for name, each in sides.items()}
            for how, sides in phases.items()
        },
        "bytes": memory,
    }
    return result


ROWS: list[tuple[str, str, Callable[[float], str], float]] = [
    ("head: CPU time", "head_cpu", report.duration, CPU_WANTED),
    ("head: messages", "messages", "{:,.0f}".format, MESSAGES_WANTED),
    ("head: single requests", "requests", "{:,.0f}".format, 0),
    ("wall time", "seconds", report.duration, 0),
    ("ranks: CPU time", "swarm_cpu", report.duration, 0),
    ("relays: CPU time", "relays_cpu", report.duration, 0),
    ("ranks that SET the last key", "full", "{:,.0f}".format, 0),
]
"""What is told of a barrier: in which words, under which name, how written, and the ratio that is wanted."""


def add_barrier_rows(result: Result, how: str, phases: dict[str, list[Phase]]) -> None:
    """The part of the table for one way to arrive."""
    result.table.add_section()
    result.table.add_row(f"ranks come {how}")
    for label, name, form, wanted in ROWS:
        sides = [[float(getattr(phase, name)) for phase in phases[side]] for side in ("direct", "relayed")]
        cells = [form(statistics.median(side)) for side in sides]
        if all(map(all, sides)):
            lower, median, upper = quartiles([ours / theirs for theirs, ours in zip(*sides, strict=True)])
            cells += [inverse(median), f"{inverse(lower)} to {inverse(upper)}"]
            if wanted:
                cells += [inverse(wanted)]
                what = f"barrier, ranks come {how}, {label}: {inverse(median)}, wanted {inverse(wanted)}"
                result.judge(median <= wanted, what)
        result.table.add_row(f"  {label}", *cells)
    result.notes += bottlenecks(f"barrier, ranks come {how}", phases)


SHARES = {
    "the head": "head_share",
    "a process of ranks": "swarm_share",
    "a process of relays": "relays_share",
    "all processes together, of all cores": "machine_share",
}


def bottlenecks(what: str, phases: dict[str, list[Phase]]) -> list[str]:
    """How busy who was: what takes nearly a whole core holds the others back."""
    lines = []
    for name, each in phases.items():
        said = []
        for who, attribute in SHARES.items():
            share = statistics.median(getattr(phase, attribute) for phase in each)
            said.append(f"{who} {share:.0%}{' (the bottleneck)' if share >= BUSY else ''}")
        lines.append(f"{what}, {name}, share of a core: {', '.join(said)}")
    return lines


# What a relay adds to a request


@dataclass(frozen=True)
class Operation:
    """What one client asks again and again."""

    name: str
    request: bytes
    reply: bytes | None
    size: int = 8


VALUE = b"sixteen bytes..."
OPERATIONS = [
    Operation("ADD", frames.add(b"/bench/counter", 1), None),
    Operation("GET of 16 bytes", frames.get(b"/bench/value"), frames.blob(VALUE), 24),
    Operation("SET and PING", frames.store(b"/bench/other", VALUE) + frames.PING, frames.PONG, 4),
]


def measure_latency(sizes: Sizes) -> Result:
    """One client, one operation at a time, through one relay and directly, in turns."""
    with ExitStack() as resources:
        head = start_server(resources, "libuv")
        upstream = f"{HOST}:{head.port}"
        relay = start_server(resources, "relay", ["-m", "rallypoint", "relay", "--upstream", upstream])
        routes = {}
        for name, port in (("direct", head.port), ("relayed", relay.port)):
            routes[name] = resources.enter_context(connect(port))
        routes["direct"].sendall(frames.store(b"/bench/value", VALUE))
        times: dict[str, dict[str, list[float]]] = {
            each.name: {"direct": [], "relayed": []} for each in OPERATIONS
        }
        for number in range(-1, sizes.rounds * 2):  # the first is to warm up
            names = list(routes) if number % 2 == 0 else list(routes)[::-1]
            for operation in OPERATIONS:
                for name in names:
                    median = time_operations(routes[name], operation, sizes.operations)
                    if number >= 0:
                        times[operation.name][name].append(median)
    say(f"latency: {2 * sizes.rounds} rounds of {sizes.operations} for each operation and route")
    return latency_result(times, sizes)


def start_server(resources: ExitStack, name: str, command: list[str] | None = None) -> Server:
    """A server that is ready."""
    with uninterrupted():
        server = Server(name, command)
        resources.callback(server.stop)
    server.await_ready()
    return server


def time_operations(client: socket, operation: Operation, count: int) -> float:
    """The median time of one operation, in microseconds."""
    taken = []
    clock, request, size = time.perf_counter_ns, operation.request, operation.size
    last = None
    for _ in range(count):
        start = clock()
        client.send(request)
        reply = client.recv(size, MSG_WAITALL)
        taken.append(clock() - start)
        if operation.reply is not None:
            check(reply, operation.reply)
        else:
            value = int.from_bytes(reply, "little")
            if last is not None and value != last + 1:
                raise ServerError(f"an ADD of 1 gave {value} after {last}")
            last = value
    return statistics.median(taken) / 1000


def latency_result(times: dict[str, dict[str, list[float]]], sizes: Sizes) -> Result:
    """The table of latencies."""
    rounds = f"medians of {sizes.operations:,}, {2 * sizes.rounds} rounds"
    title = f"latency: one client, one operation at a time; {rounds}"
    result = Result(title, table_of("direct", "through a relay", "added", "quartiles", "wanted"))
    result.figures = {"microseconds": times}
    for name, routes in times.items():
        added = [ours - theirs for theirs, ours in zip(routes["direct"], routes["relayed"], strict=True)]
        lower, median, upper = quartiles(added)
        cells = [f"{statistics.median(routes[route]):.0f} us" for route in ("direct", "relayed")]
        cells += [f"{median:.0f} us", f"{lower:.0f} to {upper:.0f} us", f"{ADDED_WANTED_US:.0f} us"]
        result.table.add_row(name, *cells)
        is_met = median <= ADDED_WANTED_US
        result.judge(
            is_met, f"latency, {name}: {median:.0f} us more, wanted at most {ADDED_WANTED_US:.0f} us"
        )
    return result


# Very many ranks


def measure_many(sizes: Sizes) -> Result:
    """Very many ranks come up behind relays, and pass barriers."""
    shape = fit(sizes.many)
    say(f"many: {shape}; {shape.hosts} processes of relays and {shape.swarms} of ranks")
    with Job("many", shape) as job:
        begun, cpu = time.monotonic(), 0.0
        job.start()
        relays_s, cpu = time.monotonic() - begun, job.head.cpu_seconds()
        up = job.come_up()
        barriers = [job.barrier(at_once=False) for _ in range(MANY_BARRIERS)]
        head_bytes, hosts_bytes = job.head.resident_bytes(), job.hosts_bytes()
        job.leave()
    headings = ("wall time", "head: CPU time", "head: messages", "relays: CPU", "ranks: CPU")
    result = Result(f"many: {shape}", table_of(*headings))
    result.table.add_row("processes and relays start", report.duration(relays_s), report.duration(cpu))
    for label, phase in [
        ("ranks come up", up),
        *((f"barrier {n}", each) for n, each in enumerate(barriers, 1)),
    ]:
        times = [report.duration(value) for value in (phase.seconds, phase.head_cpu)]
        more = [report.duration(value) for value in (phase.relays_cpu, phase.swarm_cpu)]
        result.table.add_row(label, *times, f"{phase.messages:,}", *more)
    result.notes.append(
        f"many: memory of the head {mib(head_bytes)}, of {shape.hosts} processes of relays {mib(hosts_bytes)}"
    )
    if shape != sizes.many:
        result.notes.append(f"many: this machine has no room for {sizes.many}")
    is_met = shape.ranks == sizes.many.ranks
    passed = f"{shape.ranks:,} ranks came up and passed {MANY_BARRIERS} barriers"
    result.judge(is_met, f"many: {passed}, wanted {sizes.many.ranks:,}")
    result.notes += bottlenecks("many", {"coming up": [up], "barriers": barriers})
    result.figures = {
        "shape": asdict(shape),
        "relays_start_seconds": relays_s,
        "come_up": asdict(up),
        "barriers": [asdict(phase) for phase in barriers],
        "head_bytes": head_bytes,
        "relays_bytes": hosts_bytes,
    }
    return result


# The program

MEASURES: dict[str, Callable[[Sizes], Result]] = {
    "barrier": measure_barrier,
    "latency": measure_latency,
    "many": measure_many,
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what relays save, what they add, what they carry.")
    add = parser.add_argument
    add("--rounds", type=positive, metavar="N", help="rounds of barrier and latency (default 5)")
    add("--quick", action="store_true", help="fewer rounds and ranks")
    add("--json", metavar="FILE", type=Path, help="write all figures there")
    add("--only", choices=list(MEASURES), help="measure no more than this")
    return parser.parse_args()


def sizes_of(options: argparse.Namespace) -> Sizes:
    """How much to measure."""
    if options.quick:
        return Sizes(options.rounds or 3, Shape(2_048, 8), Shape(8_192, 8), 500)
    return Sizes(options.rounds or 5, Shape(16_384, 8), Shape(98_304, 8), 1_500)


def run(options: argparse.Namespace, results: dict[str, Result]) -> int:
    """All measurements; the exit code."""
    code = 0
    for name in [options.only] if options.only else list(MEASURES):
        try:
            results[name] = MEASURES[name](sizes_of(options))
        except KeyboardInterrupt:
            say("interrupted: what follows is what was finished before")
            return INTERRUPTED
        except (ServerError, OSError) as error:
            print(f"FAULT    {name}: {error}", flush=True)
            code = 1
    return code


def main() -> int:
    """Measure, then report."""
    options = arguments()
    signal.signal(signal.SIGTERM, interrupt)
    raise_open_file_limit()
    facts = report.machine()
    report.print_header(facts)
    results: dict[str, Result] = {}
    code = run(options, results)
    for result in results.values():
        print(f"\n{result.title}")
        report.print_whole(result.table)
        print("\n".join([*result.notes, *result.verdicts]))
    if options.json:
        figures = {name: result.figures for name, result in results.items()}
        options.json.write_text(json.dumps({"machine": facts, **figures}, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
