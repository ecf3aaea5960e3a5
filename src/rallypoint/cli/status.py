"""`rallypoint status`: who is here, who is missing, who waits for what."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rallypoint.cli.signals import exit_code, signals_as_interrupts
from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import Endpoint, parse_endpoint

if TYPE_CHECKING:
    from rallypoint.watch.status.report import Asked


def status(
    store: Annotated[
        str,
        typer.Argument(metavar="HOST:PORT", envvar="RALLYPOINT_STORE", help="The store, or relay, to ask."),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    waits: Annotated[bool, typer.Option("--waits", help="Every key and barrier that is waited for.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="The keys, with size and last writer.")] = False,
    search: Annotated[
        str, typer.Option(metavar="TEXT", help="With --keys: only keys that hold this text.")
    ] = "",
    rank: Annotated[int | None, typer.Option(min=0, help="All that is known about one rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show who is here, who is missing, and who waits for what.

    Of a server, the whole job; of a relay, its part; of torch's own server, what its protocol tells. It only
    reads. Exit 1 if ranks are missing; with --rank, if that one is not known to be here.
    """
    _check(watch, waits, keys, search, rank, as_json)
    from rallypoint.watch.status.report import Asked

    asked = Asked(_parse(store), waits, keys, search, rank)
    try:
        with signals_as_interrupts():
            good = _watch(asked) if watch else _show(asked, as_json)
    except KeyboardInterrupt as stop:
        if watch and not stop.args:
            raise typer.Exit(0) from None  # Ctrl-C is how it is meant to end
        print("rallypoint: interrupted", file=sys.stderr)
        raise typer.Exit(exit_code(stop)) from None
    raise typer.Exit(0 if good else 1)


def _check(watch: bool, waits: bool, keys: bool, search: str, rank: int | None, as_json: bool) -> None:
    if sum((waits, keys, rank is not None)) > 1:
        raise UsageError("--waits, --keys and --rank are for different things", hint="give one of them")
    if search and not keys:
        raise UsageError("--search is for keys", hint="give --keys with it")
    if watch and as_json:
        raise UsageError("--watch shows no JSON", hint="ask for --json again and again")


def _parse(store: str) -> Endpoint:
    endpoint = parse_endpoint(store)
    if not endpoint.port or not store.strip().endswith(f":{endpoint.port}"):
        raise UsageError(f"the store is {store!r}", hint="write HOST:PORT, for example localhost:29500")
    return endpoint


def _show(asked: Asked, as_json: bool) -> bool:
    """Print it once; whether nobody is missing."""
    from rallypoint.watch.status.report import report_on

    report = report_on(asked)
    if as_json:
        print(json.dumps(report.content()))
        return report.is_good
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    lines = report.lines(shutil.get_terminal_size().columns if console.is_terminal else None)
    for at, line in enumerate(lines):
        style = "" if at else "bold" if report.is_good else "bold red"
        console.print(Text(line, style), soft_wrap=True)
    return report.is_good


def _watch(asked: Asked) -> bool:
    from rallypoint.cli.living import live

    live(asked)
    return True
