"""The measurements in words: the header, the table, the memory, the verdicts, and all of it as JSON."""

from __future__ import annotations

import os
import platform
import resource
import sys
import sysconfig
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.box import ASCII
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from contest import Entry, Outcome, quartiles

NOTES = """\
Rates and times are medians over the rounds. A ratio above 1 means that Rallypoint is better; it is the median
of the ratios of each round, beside its quartiles. Pairs are torch / ours. CPU/op is the server's CPU time for
one operation (accept: with the GETs meanwhile); server and generator are how much of a core was taken by the
server and by the busiest load generator. Where the generator is near 100%, it holds the server back. Where
the two add up to 100%, they had one core between them: other work ran here, and the ratio says little."""


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    optimised = "with" if "--enable-optimizations" in arguments else "without"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_version()}, built {optimised} --enable-optimizations",
        "torch": installed("torch"),
        "uvloop": installed("uvloop"),
        "open files": f"{soft} at most",
    }


def installed(package: str) -> str:
    """The version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def duration(seconds: float) -> str:
    """A time with three digits and the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return (
                f"{seconds / scale:.3g} {unit}" if seconds < 100 * scale else f"{seconds / scale:.0f} {unit}"
            )
    return f"{seconds / 1e-9:.0f} ns"


def print_header(facts: dict[str, str]) -> None:
    """What the numbers were measured on, a line each."""
    for name, fact in facts.items():
        print(f"{name + ':':<12}{fact}")
    sys.stdout.flush()


def print_table(outcomes: list[Outcome]) -> None:
    """A row for each scenario and each server that torch's was compared with."""
    table = Table(box=ASCII)
    for heading in ("scenario", "load", "ours"):
        table.add_column(heading, no_wrap=True)
    for heading in ("torch", "ours", "CPU/op", "server", "generator", "wanted", "quartiles", "ratio"):
        table.add_column(heading, no_wrap=True, justify="right")
    for outcome in outcomes:
        for entry in outcome.rivals():
            table.add_row(*cells(outcome, entry))
    print_whole(table)
    print(NOTES)


def print_whole(table: Table) -> None:
    """Print a table at its full width unless it is for a terminal, which has a width of its own."""
    console = Console(highlight=False)
    if not console.is_terminal:
        wide = Console(width=1_000)
        needed = Measurement.get(wide, wide.options, table).maximum
        console = Console(width=max(80, needed), highlight=False)
    console.print(table)


def cells(outcome: Outcome, entry: Entry) -> list[str]:
    """One row of the table."""
    scenario, torch = outcome.scenario, outcome.torch
    row = [scenario.name, scenario.load, entry.name]
    row += [value_cell(outcome, torch), value_cell(outcome, entry)]
    row += [f"{cell(torch)} / {cell(entry)}" for cell in (cpu_cell, busy_cell, share_cell)]
    row += [f"{scenario.wanted:g}x"]
    ratios = outcome.ratios(entry)
    if not ratios:
        return [*row, "-", "-"]
    lower, median, upper = quartiles(ratios)
    return [*row, f"{lower:.3g} to {upper:.3g}", f"{median:.3g}x"]


def value_cell(outcome: Outcome, entry: Entry) -> str:
    """The rate or the time of one server."""
    if not entry.samples:
        return "fault"
    value = entry.median("value")
    return f"{value:,.0f}/s" if outcome.scenario.kind == "rate" else duration(value)


def cpu_cell(entry: Entry) -> str:
    """The CPU time that one server takes for an operation."""
    return duration(entry.median("cpu")) if entry.samples else "-"


def busy_cell(entry: Entry) -> str:
    """The load of the server."""
    return f"{entry.median('busy'):.0%}" if entry.samples else "-"


def share_cell(entry: Entry) -> str:
    """The load of the generator."""
    return f"{entry.median('share'):.0%}" if entry.samples else "-"


def print_storms(outcomes: list[Outcome]) -> None:
    """What a scenario has measured besides: memory, and connects that found the backlog full."""
    for outcome in outcomes:
        for entry in outcome.entries.values():
            if entry.samples and entry.samples[0].memory is not None:
                label = f"{outcome.scenario.name}, {entry.name}:"
                dropped = f"{entry.median('dropped'):,.0f} connects dropped by a full backlog"
                print(f"{label} {entry.memory():,.0f} bytes of memory per idle connection, {dropped}")


def print_verdicts(outcomes: list[Outcome]) -> None:
    """A line for each target: met or not."""
    for outcome in outcomes:
        for entry in outcome.rivals():
            print(verdict(outcome, entry))
        for entry in outcome.entries.values():
            if entry.fault:
                print(f"FAULT    {outcome.scenario.name}, {entry.name}: {entry.fault}")


def verdict(outcome: Outcome, entry: Entry) -> str:
    """Whether one server met one target."""
    wanted = outcome.scenario.wanted
    label = f"{outcome.scenario.name}, {entry.name}"
    ratios = outcome.ratios(entry)
    if not ratios:
        return f"{'unknown':<8} {label}: nothing measured, wanted {wanted:g}x"
    median = quartiles(ratios)[1]
    met = "met" if median >= wanted else "not met"
    return f"{met:<8} {label}: {median:.3g}x torch, wanted {wanted:g}x"


def as_json(facts: dict[str, str], outcomes: list[Outcome]) -> dict[str, Any]:
    """Everything, every round of it."""
    return {"machine": facts, "scenarios": [outcome_json(outcome) for outcome in outcomes]}


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """One scenario."""
    scenario = outcome.scenario
    return {
        "name": scenario.name,
        "load": scenario.load,
        "operation": scenario.operation,
        "kind": scenario.kind,
        "wanted": scenario.wanted,
        "servers": {name: asdict(entry) for name, entry in outcome.entries.items()},
        "ratios": {entry.name: outcome.ratios(entry) for entry in outcome.rivals()},
    }
