"""`rallypoint doctor`: what is wrong on this machine, and between machines, before a job is."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import rallypoint
from rallypoint.cli.command import JSON, Argument, command
from rallypoint.cli.findings import conclude, print_findings, print_heading, print_matrix, print_outlook
from rallypoint.cli.printing import print_settings_file, progress_bar
from rallypoint.cli.signals import signals_as_interrupts
from rallypoint.codec import to_json
from rallypoint.diagnose.doctor.between_machines import judge_machines
from rallypoint.diagnose.doctor.checks import CHECKS, EXAMINATIONS, Check, run_checks
from rallypoint.diagnose.doctor.exchange import (
    Gathered,
    attend_job,
    by_launcher,
    open_practice,
    own_address,
    visit,
)
from rallypoint.diagnose.doctor.exchange import receive as receive_visitors
from rallypoint.diagnose.doctor.machine import versions
from rallypoint.diagnose.doctor.situation import Situation, endpoint_of
from rallypoint.diagnose.findings import Finding, Fix, Outlook, State, look_ahead, worst
from rallypoint.errors import RallypointError, UsageError
from rallypoint.launch.endpoint import Endpoint, parse_endpoint
from rallypoint.launch.environment import without_rank
from rallypoint.launch.settings_file import FILES, read_file
from rallypoint.store.machine.system import ABSENT
from rallypoint.text import printable

_QUIET: Final = (State.OK, State.NOTE)


@command(
    Argument(
        "--endpoint", metavar="HOST:PORT", help="Where a job is to meet; else by MASTER_ADDR and MASTER_PORT."
    ),
    Argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        default=Path(),
        help="Where the file of a file init would be; by default here.",
    ),
    Argument(
        "--engine",
        metavar="URL",
        variable="RALLYPOINT_ENGINE",
        default="",
        help="Examine the engine that is to keep the store, too: see rallypoint serve --engine.",
    ),
    Argument(
        "--acks",
        type=int,
        metavar="NUMBER",
        default=0,
        help="With --engine, of Redis: as for rallypoint serve.",
    ),
    Argument(
        "--listen",
        action="store_true",
        help="Wait for doctors of other machines, and examine the ways to them.",
    ),
    Argument(
        "--all",
        dest="everyone",
        action="store_true",
        help="Under torchrun on every machine: examine the ways between all of them.",
    ),
    Argument(
        "--health",
        choices=tuple(EXAMINATIONS),
        default="",
        help="Examine only whether this machine is fit for a job, as rallypoint run --health does.",
    ),
    Argument(
        "--fix",
        action="store_true",
        help="Show settings for rallypoint run that mend something; write them, if there is no file yet.",
    ),
    JSON,
)
def doctor(
    endpoint: str | None,
    folder: Path,
    engine: str,
    acks: int,
    listen: bool,
    everyone: bool,
    health: str,
    fix: bool,
    as_json: bool,
) -> int:
    """Examine this machine: torch, names, ports, stores, limits; and what will work here.

    Exit 1 if a job would fail because of something. With --listen on one machine and --endpoint on another,
    also the ways between them.
    """
    if sum((listen, everyone, fix, bool(health))) > 1:
        raise UsageError(
            "--listen, --all, --health and --fix are for different things", hint="give one of them"
        )
    if engine:
        from rallypoint.store.replica.engines.opening import open_log  # late: few jobs have an engine

        open_log(engine, acks=acks).close()  # says what is wrong with the URL, and connects to nothing
    named = _parse(endpoint) if endpoint is not None else None
    with signals_as_interrupts():
        if listen:
            return 0 if receive(named, as_json=as_json) else 1
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder", hint="name one that is there, or none")
        situation = Situation(os.environ, named or endpoint_of(os.environ), folder, engine, acks)
        if everyone:
            good = examine_everyone(folder, as_json=as_json)
        elif fix:
            good = mend(situation, as_json=as_json)
        else:
            visits = named is not None and not health
            good = examine(situation, EXAMINATIONS.get(health, ()), visits=visits, as_json=as_json)
    return 0 if good else 1


def _parse(text: str) -> Endpoint:
    endpoint = parse_endpoint(text)
    if not endpoint.port:
        raise UsageError(f"{text!r} names no port", hint="write HOST:PORT, such as node-a:29500")
    return endpoint


def examine(situation: Situation, health: Sequence[Check] = (), *, visits: bool, as_json: bool) -> bool:
    """This machine, by all checks; or by those of `health`, whether it is fit for a job.

    `visits`: also the way to another machine whose doctor listens at the endpoint.
    """
    begun = time.monotonic()
    findings = _run_checks(situation, health, show_progress=not health)
    store = worst(findings, "store")
    is_lost = store is not None and store.state in (State.FAILURE, State.UNKNOWN)
    place = situation.endpoint if visits and not is_lost else None
    gathered, between = _visit(place, findings) if place else (None, [])
    outlook = [] if health else _outlook(findings)
    seconds = time.monotonic() - begun
    if as_json:
        own = findings if gathered else [*findings, *between]
        print(json.dumps({**_document(own, outlook, seconds), **_about(gathered, between)}, indent=2))
    else:
        print_findings([*findings, *between])
        if gathered:
            print_matrix(gathered)
        if outlook:
            print_outlook(outlook)
    return conclude([*findings, *between], seconds)


def _visit(endpoint: Endpoint, findings: Sequence[Finding]) -> tuple[Gathered | None, list[Finding]]:
    """The ways between this machine and the one of a doctor at the endpoint, and findings about them."""
    try:
        gathered = visit(endpoint, findings)
    except RallypointError as error:
        lost = f"the doctor at {endpoint} went away: {error.message}"
        return None, [Finding("machines", State.FAILURE, lost, error.hint)]
    return gathered, judge_machines(gathered) if gathered else []


def examine_everyone(folder: Path, *, as_json: bool) -> bool:
    """All machines of a launched job; the first one prints, the others only take part."""
    job = by_launcher(os.environ)
    if not job.is_first_here:
        return True
    begun = time.monotonic()
    # What the launcher says of this rank is right for this job, and says nothing about the next one.
    situation = Situation(without_rank(os.environ), None, folder)
    gathered = attend_job(job, _run_checks(situation, show_progress=False))
    if job.number != 0:
        return True  # else a launcher would call it a failure of its own
    between = judge_machines(gathered)
    if as_json:
        print(json.dumps({"rallypoint": rallypoint.__version__, **_about(gathered, between)}, indent=2))
    else:
        _print_machines(gathered)
        print_heading("between the machines")
        print_findings(between)
        print_matrix(gathered)
    everything = [*(each for found in gathered.findings.values() for each in found), *between]
    return conclude(everything, time.monotonic() - begun)


def _print_machines(gathered: Gathered) -> None:
    """The findings that are not good: first those of all machines, then those of each."""
    of_each = {
        number: {(each.name, each.state, each.found): each for each in found if each.state not in _QUIET}
        for number, found in gathered.findings.items()
    }
    common = set.intersection(*(set(found) for found in of_each.values())) if len(of_each) > 1 else set()
    if common:
        print_heading("on every machine")
        print_findings([each for key, each in next(iter(of_each.values())).items() if key in common])
    for number, found in sorted(of_each.items()):
        print_heading(f"on {gathered.name(number)}")
        own = [each for key, each in found.items() if key not in common]
        nothing = Finding("machine", State.OK, "nothing else" if common else "nothing is wrong")
        print_findings(own or [nothing])


def receive(endpoint: Endpoint | None, *, as_json: bool) -> bool:
    """Wait for doctors of other machines, until interrupted; whether all ways were good."""
    good = [True]
    lock = threading.Lock()

    def report(gathered: Gathered) -> None:
        between = judge_machines(gathered)
        with lock:
            good[0] = good[0] and all(each.state is not State.FAILURE for each in between)
            if as_json:
                print(json.dumps(_about(gathered, between)))
                return
            print_heading(f"{gathered.name(1)} came" if 1 in gathered.cards else "somebody came, and left")
            print_findings(between)

    with open_practice(endpoint) as store:
        where = Endpoint(endpoint.host if endpoint else own_address(), store.port)
        try:
            hint = f"on another machine: rallypoint doctor --endpoint {where}"
            print(f"rallypoint: listening; {hint}", file=sys.stderr)
            receive_visitors(store, report)
        except KeyboardInterrupt:
            print("rallypoint: done", file=sys.stderr)
    return good[0]


def mend(situation: Situation, *, as_json: bool) -> bool:
    """Examine this machine, show what would mend something, and write it, if there is no file yet."""
    begun = time.monotonic()
    findings = _run_checks(situation, show_progress=True)
    if not as_json:
        print_findings([each for each in findings if each.state is not State.OK])
    # A variable that is set goes before the file: there, only the hint helps.
    wanted = dict.fromkeys(each.fix for each in findings if each.fix)
    fixes = [each for each in wanted if each and not (each.table == "env" and each.key in situation.environ)]
    tables = _not_in_file(fixes)
    path = Path.cwd() / "rallypoint.toml"
    name = printable(str(path))
    if not as_json and not tables:
        why = "rallypoint.toml has it all already" if fixes else "none of this is for rallypoint.toml to mend"
        print(f"\nNothing to write: {why}.")
    elif not as_json:
        print(f"\n{name} would be:\n\n{textwrap.indent(_as_toml(tables), '    ')}")
    if tables and not as_json and sys.stdin.isatty() and not _confirm(f"write {name}?"):
        print("rallypoint: nothing was written", file=sys.stderr)
    elif tables:
        _write(path, _as_toml(tables))
    if as_json:
        written = {"file": str(path), "settings": tables, "undo": f"delete {path}"} if tables else None
        document = _document(findings, _outlook(findings), time.monotonic() - begun)
        print(json.dumps({**document, "written": written}, indent=2))
    return conclude(findings, time.monotonic() - begun)


def _not_in_file(fixes: Sequence[Fix]) -> dict[str, dict[str, str]]:
    """The fixes that no file of settings has, by table. UsageError names them if there is a file already."""
    file = read_file(Path.cwd())
    print_settings_file(file.path, file.warnings)
    known = {*file.options, *file.variables}
    missing = [each for each in fixes if not known & {each.key, each.key.replace("-", "_")}]
    if file.path is not None and missing:
        lines = [
            f"{_as_line(each.key, each.value)} below [{'.'.join((*FILES[file.path.name], each.table))}]"
            for each in missing
        ]
        hint = f"put in: {'; '.join(lines)}"
        raise UsageError(f"{file.path} has settings already, and is not edited", hint=hint)
    tables: dict[str, dict[str, str]] = {}
    for each in missing:
        tables.setdefault(each.table, {})[each.key] = each.value
    return tables


def _as_toml(tables: Mapping[str, Mapping[str, str]]) -> str:
    lines = [
        [f"[{table}]", *(_as_line(*each) for each in pairs.items()), ""] for table, pairs in tables.items()
    ]
    return "\n".join(["# by rallypoint doctor --fix", *chain.from_iterable(lines)])


def _as_line(key: str, value: str) -> str:
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"


def _write(path: Path, text: str) -> None:
    """Write a new file. One that is there is left alone: it does not count, but somebody may want it."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RallypointError(f"{path} cannot be written: {error.strerror or error}") from error
    name = printable(str(path))
    print(f"rallypoint: wrote {name}; to undo it, delete {name}", file=sys.stderr)
    print_settings_file(None, read_file(path.parent).warnings)


def _confirm(question: str) -> bool:
    print(f"{question} [Y/n]: ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()  # its end without a word is no consent
    return answer.strip().lower() in ("", "y", "yes") and answer != ""


# Running ----------------------------------------------------------------------------------------------------


def _run_checks(situation: Situation, wanted: Sequence[Check] = (), *, show_progress: bool) -> list[Finding]:
    """The findings of the checks that are wanted, or of all, in their order."""
    checks = wanted or CHECKS
    found: dict[str, Sequence[Finding]] = {}
    with progress_bar(shown=show_progress) as bar:
        examined = run_checks(checks, situation)
        for check, findings in bar.track(examined, len(checks), description="examining"):
            found[check.name] = findings
    return [finding for check in checks for finding in found.get(check.name, ())]


def _outlook(findings: Sequence[Finding]) -> list[Outlook]:
    return look_ahead(findings, {name: each for name, each in versions().items() if each != ABSENT})


# As JSON ---------------------------------------------------------------------------------------------------


def _document(findings: Sequence[Finding], outlook: Sequence[Outlook], seconds: float) -> dict[str, Any]:
    return {
        "rallypoint": rallypoint.__version__,
        "seconds": round(seconds, 3),
        "findings": to_json(list(findings)),
        "outlook": to_json(list(outlook)),
    }


def _about(gathered: Gathered | None, between: Sequence[Finding]) -> dict[str, Any]:
    if gathered is None:
        return {}
    return {"machines": {**gathered.as_json(), "between": to_json(list(between))}}
