"""`rallypoint verify`: real trainings, by every usual route, on a torch with and without libuv."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from rallypoint.cli.command import Argument, command
from rallypoint.cli.printing import print_rows, progress_bar
from rallypoint.cli.signals import signals_as_interrupts
from rallypoint.codec import to_json
from rallypoint.diagnose.verify import trainings
from rallypoint.diagnose.verify.routes import ONE_GPU, Build, Route, select
from rallypoint.diagnose.verify.trainings import Result, TrainingSettings, health_rows
from rallypoint.errors import RallypointError, UsageError
from rallypoint.text import printable

_LOG_LINES: Final = 40
_ROW: Final = "{:<21}  {:<13}  {:>10}  {:>18}  {:<6}"  # printed as they come, so the widths are settled


@command(
    Argument("--route", action="append", metavar="NAME", help="Only this route; may be repeated."),
    Argument("--quick", action="store_true", help="Only a few routes, which stand for all."),
    Argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="Where the ranks compute; auto: on the GPU, if there is one.",
    ),
    Argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=120.0,
        help="After these, a training is ended and has failed.",
    ),
    Argument("--json", dest="as_json", action="store_true", help="Print JSON, with all that the ranks say."),
)
def verify(route: list[str] | None, quick: bool, device: str, timeout: float, as_json: bool) -> int:
    """Train two ranks for some seconds by every usual route: torchrun, accelerate, and by hand.

    Each route is run with torch as it is, and with that torch made to refuse libuv. Exit 1 if one fails.
    """
    if not 0 < timeout < math.inf:
        raise UsageError(f"--timeout is {timeout:g}", hint="write a positive number of seconds")
    names = route or []
    select(names, quick=quick)  # a wrong name is told before anything is started
    with signals_as_interrupts("the check"):
        return 0 if _check(names, quick, device, timeout, as_json) else 1


def _check(names: Sequence[str], quick: bool, device: str, timeout: float, as_json: bool) -> bool:
    """Run it all and print it all; whether all trainings were good."""
    began = time.monotonic()
    machine = trainings.find_equipment()
    if device == "cuda" and not machine.gpus:
        hint = "use --device cpu, or install a build of torch for CUDA"
        raise RallypointError(f"torch {machine.torch} sees no GPU", hint=hint)
    device = "cuda" if machine.gpus and device != "cpu" else "cpu"
    setting = TrainingSettings(device, os.environ.get("USE_LIBUV") or None, timeout)
    one_gpu = setting.device == "cuda" and len(machine.gpus) == 1 and machine.nccl
    routes = select(names, quick=quick, one_gpu=one_gpu)
    skipped = {route.name: why for route in routes if (why := _reason_to_skip(route, setting))}
    if len(skipped) == len(routes):
        name, reason = next(iter(skipped.items()))
        raise RallypointError(f"no route can be taken: {name} is skipped, since {reason}")
    place = ", ".join(machine.gpus) if setting.device == "cuda" else "the CPU"
    print(f"rallypoint: two ranks by each route, on {place}; torch {machine.torch}", file=sys.stderr)
    for name, reason in skipped.items():
        print(f"{name} is skipped: {reason}", file=sys.stderr)
    results = _train([route for route in routes if route.name not in skipped], setting, as_json)
    seconds = time.monotonic() - began
    if as_json:
        document = {
            "ok": all(result.ok for result in results),
            "seconds": round(seconds, 1),
            "torch": machine.torch,
            "gpus": machine.gpus,
            "device": setting.device,
            "use_libuv": setting.use_libuv,
            "results": [_as_json(result) for result in results],
            "skipped": [{"route": name, "reason": reason} for name, reason in skipped.items()],
        }
        print(json.dumps(document, indent=2))
    elif rows := health_rows([result.reports for result in results]):
        print()
        print_rows([["rank", "device", "backend", "steps per second", "peak memory", "GPU use"], *rows])
    _print_verdict(results, seconds)
    return all(result.ok for result in results)


def _train(routes: Sequence[Route], setting: TrainingSettings, as_json: bool) -> list[Result]:
    """Run the trainings, and print a row for each as soon as it is done."""
    results: list[Result] = []
    if not as_json:
        _print_row("route", "torch", "came up in", "loss", "result")
    with progress_bar() as bar:
        task = bar.add_task("", total=len(routes) * len(Build))
        for route, build in product(routes, Build):
            bar.update(task, description=f"{route.name}, {build.value}")
            results.append(trainings.run(route, build, setting))
            if not as_json:
                bar.stop()  # both streams may be the same terminal: the row goes where the bar was
                _print_row(*_row(results[-1]))
                bar.start()
            bar.advance(task)
    return results


def _reason_to_skip(route: Route, setting: TrainingSettings) -> str:
    if route.missing:
        return f"{route.missing} is not installed"
    return "it is for a GPU" if route is ONE_GPU and setting.device != "cuda" else ""


# What is printed -------------------------------------------------------------------------------------------


def _row(result: Result) -> list[str]:
    came_up = "" if result.came_up_seconds is None else f"{result.came_up_seconds:.1f} s"
    first = result.reports[0] if result.reports else None
    loss = f"{first.loss_first:.4f} -> {first.loss_last:.4f}" if first else ""
    return [result.route, result.build.value, came_up, loss, "ok" if result.ok else "FAILED"]


def _print_row(*cells: str) -> None:
    line = Text(_ROW.format(*cells), style="bold" if cells[0] == "route" else "")
    line.highlight_regex(r"\bok\b", "green")
    line.highlight_regex("FAILED", "bold red")
    Console(highlight=False).print(line, soft_wrap=True)


def _print_verdict(results: Sequence[Result], seconds: float) -> None:
    """Warnings, the ends of the logs of what failed, and one line at the end."""
    for result in results:
        for warning in result.warnings:
            print(f"warning: {result.route}, {result.build.value}: {warning}", file=sys.stderr)
    failed = [result for result in results if not result.ok]
    for result in failed:
        problems = "; ".join(result.problems)
        print(f"\n{result.route}, {result.build.value}: FAILED: {problems}", file=sys.stderr)
        for line in result.log.splitlines()[-_LOG_LINES:]:
            print(f"  | {printable(line.expandtabs())}", file=sys.stderr)
        print(f"hint: {result.hint}", file=sys.stderr)
    good = len(results) - len(failed)
    print(f"\nrallypoint: {good} of {len(results)} trainings were ok, in {seconds:.0f} s", file=sys.stderr)


def _as_json(result: Result) -> dict[str, Any]:
    """All but the log of a training that was good, which says nothing."""
    content = {**to_json(result), "ok": result.ok}
    return {name: value for name, value in content.items() if name != "log" or not result.ok}
