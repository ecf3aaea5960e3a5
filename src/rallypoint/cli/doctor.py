"""`rallypoint doctor`: what is wrong on this machine, and between machines, before a job is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rallypoint.cli.signals import exit_code, signals_as_interrupts
from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import Endpoint, parse_endpoint


def doctor(
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where a job is to meet; else by MASTER_ADDR and MASTER_PORT."
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the file of a file init would be.")
    ] = Path(),
    listen: Annotated[
        bool,
        typer.Option("--listen", help="Wait for doctors of other machines, and examine the ways to them."),
    ] = False,
    everyone: Annotated[
        bool,
        typer.Option("--all", help="Under torchrun on every machine: examine the ways between all of them."),
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Show, then write, settings for rallypoint run that mend something.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examine this machine: torch, names, ports, stores, limits; and what will work here.

    Exit 1 if a job would fail because of something. With --listen on one machine and --endpoint on another,
    also the ways between them.
    """
    if sum((listen, everyone, fix)) > 1:
        raise UsageError("--listen, --all and --fix are for different things", hint="give one of them")
    try:
        with signals_as_interrupts():
            good = _doctor(endpoint, folder, listen, everyone, fix, as_json)
    except KeyboardInterrupt as stop:
        print("rallypoint: interrupted", file=sys.stderr)
        raise typer.Exit(exit_code(stop)) from None
    raise typer.Exit(0 if good else 1)


def _doctor(
    endpoint: str | None, folder: Path, listen: bool, everyone: bool, fix: bool, as_json: bool
) -> bool:
    from rallypoint.cli import examining
    from rallypoint.diagnose.doctor.situation import Situation, check_folder, endpoint_of

    named = _parse(endpoint) if endpoint is not None else None
    if listen:
        return examining.receive(named, as_json=as_json)
    check_folder(folder)
    if everyone:
        return examining.examine_everyone(folder, as_json=as_json)
    situation = Situation(os.environ, named or endpoint_of(os.environ), folder)
    if fix:
        return examining.mend(situation, as_json=as_json)
    return examining.examine(situation, asked_for=named is not None, as_json=as_json)


def _parse(text: str) -> Endpoint:
    endpoint = parse_endpoint(text)
    if not endpoint.port:
        raise UsageError(f"{text!r} names no port", hint="write HOST:PORT, such as node-a:29500")
    return endpoint
