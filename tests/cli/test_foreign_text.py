"""What comes from elsewhere is never printed raw: every way out, with texts that a terminal would obey.

Each object that can come from elsewhere is filled with such texts in all its fields, also those that a later
version adds. What is printed of it has to be lines of printable characters, and none may be endless.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import pytest

from command_line import invoke
from processes import Server
from rallypoint.cli import findings as doctor_lines
from rallypoint.cli import main as command
from rallypoint.cli import run as launcher
from rallypoint.cli.printing import print_rows, print_settings_file
from rallypoint.cli.signals import ChangedLines, in_a_line
from rallypoint.client.base import keys_missing
from rallypoint.client.filelog import Member as FileMember
from rallypoint.client.filelog import describe as describe_members
from rallypoint.client.local import HashStore
from rallypoint.client.tcp import TCPStore
from rallypoint.codec import Within, to_json, to_text
from rallypoint.diagnose.doctor.between_machines import judge_machines
from rallypoint.diagnose.doctor.exchange import Gathered
from rallypoint.diagnose.findings import Finding, Outlook
from rallypoint.errors import RallypointError, UsageError
from rallypoint.explain import Source, explain, report
from rallypoint.launch.blame import Failure, RankIdentity
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.options import RendezvousSettings
from rallypoint.launch.rendezvous.digest import Assignment
from rallypoint.launch.rendezvous.participant import Participant
from rallypoint.launch.rendezvous.roster import Member, Roster, Sick, Size, closed_error, read_value
from rallypoint.launch.reports import JoinProgress, Reports
from rallypoint.launch.stacks.activity import MachineActivity, pack
from rallypoint.launch.stacks.progress import machine_activities
from rallypoint.store.rollcall.events import _KINDS
from rallypoint.store.rollcall.identity import Identity
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.plan import JobRound
from rallypoint.store.rollcall.roll import RankState, Roll, Standing, stall_text
from rallypoint.store.rollcall.snapshot import Client, Snapshot
from rallypoint.store.server.process.startup import DroppingHandler
from rallypoint.store.wire.encoding import request
from rallypoint.store.wire.opcodes import Op
from rallypoint.text import printable, printable_lines, shown
from rallypoint.watch.status.report import ForeignReport, RollReport, StatusRequest
from rallypoint.watch.status.torch_store import ForeignStore
from rallypoint.watch.timeline.reading import read_timeline
from rallypoint.watch.timeline.words import as_text
from rallypoint.watch.web import metrics
from raw import RawClient, until
from rosters import join

pytestmark = pytest.mark.windows

FORGED = "rallypoint: all is well"
EVIL = f"\x1b[2J\x1b]0;title\x07\n{FORGED}\r{FORGED}\u2028{FORGED}\u202e\u200f\u2066\x9b31m\x00\udcff\t"
"""Escapes, line ends, marks for text from right to left, and a byte that is no text."""
ENDLESS = EVIL + "n" * (1 << 20)
LONG = EVIL + "n" * 200
"""For what is bounded where it is read, and for what would be too large to be read a hundred times."""

LONGEST_LINE = 5000
MOST_LINES = 500

T = TypeVar("T")


# Objects full of such texts --------------------------------------------------------------------------------


def filled(kind: type[T], text: str = ENDLESS) -> T:
    """An object of a class, with this text in all its fields."""
    found: T = _fill(kind, text, 0)
    return found


def _fill(kind: Any, text: str, depth: int) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = parts[1]
        return bounds.most if isinstance(bounds, Within) and bounds.most < 1 else _fill(parts[0], text, depth)
    if kind is str:
        return text
    if kind in (int, float, bool):
        return kind(1)
    if origin in (Union, UnionType):
        return None if NoneType in parts and depth > 3 else _fill(parts[0], text, depth)
    if origin is dict:
        key, value = (_fill(each, text, depth + 1) for each in parts)
        return {0: value, 1: value} if isinstance(key, int) else {key: value}
    if origin is tuple and parts[1:] == (Ellipsis,):
        return (_fill(parts[0], text, depth + 1),) * 2
    if origin is tuple:
        return tuple(_fill(each, text, depth + 1) for each in parts)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        hints = {each.name: hints[each.name] for each in fields(kind) if each.init}
    return kind(**{name: _fill(hint, text, depth + 1) for name, hint in hints.items()})


# What is printed of them -----------------------------------------------------------------------------------


def check(told: str) -> None:
    """No character that a terminal would obey, no line that only seems to be ours, and none without end."""
    lines = told.removesuffix("\n").split("\n")
    assert len(lines) <= MOST_LINES
    for line in lines:
        assert line.isprintable(), repr(line[:200])
        assert len(line) <= LONGEST_LINE, line[:200]
        assert not line.startswith(FORGED), "a line of its own"


def test_the_helper_itself() -> None:
    check(shown(ENDLESS))
    check(printable(EVIL))
    assert len(shown(ENDLESS)) == 80
    assert shown("größe 名") == "größe 名"
    assert printable_lines("a\n\x1b\u2028") == "a\n\\x1b\\u2028"


def roll_of(snapshot: Snapshot) -> Roll:
    """What is judged of it, and every other thing that a roll can hold."""
    late = tuple(replace(filled(Standing), rank=rank, state=state) for rank, state in enumerate(RankState))
    return replace(judge(snapshot), expected=9, ranks=late, meetings=(filled(JobRound),), remarks=(ENDLESS,))


def of_status() -> Iterator[str]:
    roster = filled(Roster, LONG)
    machine = filled(MachineActivity, LONG)
    machine = replace(machine, ranks=(replace(machine.ranks[0], rank=2), replace(machine.ranks[0], ended="")))
    teller = replace(filled(Client), who=filled(Identity, "another"), told=pack(machine))
    snapshot = replace(filled(Snapshot), rosters=((ENDLESS, to_text(roster)),), plan=ENDLESS)
    snapshot = replace(snapshot, clients=(*snapshot.clients, teller))
    assert machine_activities(snapshot)
    here = StatusRequest([Endpoint("localhost", 1)])
    for roll in (judge(snapshot), roll_of(snapshot)):
        for asked in (
            here,
            replace(here, waits=True),
            replace(here, keys=True),
            replace(here, stacks=True),
            replace(here, rank=1),
        ):
            report = RollReport(asked, snapshot, roll, ENDLESS)
            yield from report.lines()
            yield from report.lines(80)
            yield from report.below
        yield stall_text(roll, 1.0)
    for asked in (here, replace(here, keys=True)):
        yield from ForeignReport(asked, filled(ForeignStore)).lines()
    yield in_a_line(RallypointError(ENDLESS))


def of_metrics() -> Iterator[str]:
    snapshot = filled(Snapshot)
    yield metrics.encode((snapshot, roll_of(snapshot)))[0].decode()


def of_meetings() -> Iterator[str]:
    member, other = filled(Member), replace(filled(Member), id="other")
    yield str(member)
    yield str(closed_error(ENDLESS))
    meeting = Participant(HashStore(1.0), "job", member, Size(3, 3), RendezvousSettings())
    yield str(meeting._missing(filled(Roster)))
    with pytest.raises(UsageError) as caught:
        join(Roster(present=(replace(member, host=EVIL),)), other, Size(3, 3))
    yield str(caught.value)
    with pytest.raises(RallypointError) as unreadable:
        read_value(Roster, json.dumps({"round": ENDLESS}))
    yield str(unreadable.value)
    for seat in (Assignment(closed=ENDLESS, hint=EVIL), Assignment(refused=ENDLESS, hint=EVIL)):
        yield str(seat.error)
    yield str(Sick(EVIL, 1, ENDLESS))


def of_stores() -> Iterator[str]:
    yield str(keys_missing("the store", [ENDLESS] * 9, 9, 1.0))
    yield describe_members([filled(FileMember)] * 20)
    with pytest.raises(RallypointError) as caught:
        FileMember.from_json(ENDLESS.encode(errors="surrogateescape"))
    yield str(caught.value)
    for kind in (Snapshot.from_json, lambda text: Snapshot.from_json(f'{{"kind": {text}}}')):
        with pytest.raises(RallypointError) as unreadable:
            kind(json.dumps([ENDLESS]))
        yield str(unreadable.value)


def of_events(folder: Path) -> Iterator[str]:
    lines = [{"event": name, "pid": 1, **to_json(filled(kind, LONG))} for name, kind in _KINDS.items()]
    for at, line in enumerate(lines):
        line["time"] = float(at)
    (folder / "events").write_text("\n".join(map(json.dumps, lines)))
    yield as_text(read_timeline([folder / "events"]))


def of_logs() -> Iterator[str]:
    log = f"Traceback (most recent call last):\nRuntimeError: {ENDLESS}: Connection refused\n"
    found = explain([Source(EVIL, [log.encode(errors="surrogateescape")], host=EVIL)])
    yield report.as_text(found, everything=True)


def of_servers_log() -> Iterator[str]:
    for text in (EVIL.replace("\n", ""), ENDLESS.replace("\n", "")):
        record = logging.LogRecord("rallypoint", logging.WARNING, "", 0, "closed %s", (text,), None)
        yield DroppingHandler().format(record)


@pytest.mark.parametrize("way_out", [of_status, of_metrics, of_meetings, of_stores, of_logs, of_servers_log])
def test_no_text_from_elsewhere_is_raw(way_out: Callable[[], Iterator[str]]) -> None:
    for told in way_out():
        check(told)


def test_no_text_of_an_events_file_is_raw(tmp_path: Path) -> None:
    for told in of_events(tmp_path):
        check(told)


def test_a_summary_fits_its_screen() -> None:
    snapshot = filled(Snapshot)
    lines = RollReport(StatusRequest([Endpoint("a", 1)]), snapshot, roll_of(snapshot), ENDLESS).lines(80)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


# What commands print ---------------------------------------------------------------------------------------


def gathered() -> Gathered:
    found = filled(Gathered, LONG)
    cards = {number: replace(each, number=number) for number, each in found.cards.items()}
    ways = tuple(
        replace(found.ways[0], start=start, goal=1 - start, error=error)
        for start in (0, 1)
        for error in ("", ENDLESS)
    )
    return replace(found, count=2, cards=cards, ways=ways)


def test_no_text_of_another_machine_that_the_doctor_prints_is_raw(capsys: pytest.CaptureFixture[str]) -> None:
    everything = gathered()
    doctor_lines.print_findings([filled(Finding), *judge_machines(everything)])
    doctor_lines.print_heading(f"{everything.name(1)} came")
    doctor_lines.print_matrix(everything)
    doctor_lines.print_outlook([replace(filled(Outlook), name="a script")])
    check(capsys.readouterr().out)


def test_no_text_of_a_rank_that_the_launcher_prints_is_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    who = replace(filled(RankIdentity), rank=0)
    (tmp_path / "elsewhere.json").write_text(to_text((ENDLESS,)))
    for number in range(2):
        failure = replace(filled(Failure), who=replace(who, rank=number))
        (tmp_path / f"failed-{number}-1.json").write_text(to_text(failure))
    (tmp_path / "roll.json").write_text(to_text(replace(filled(JoinProgress), expected=9)))
    blame = launcher._print_failure(Reports(tmp_path), [])
    assert blame is not None
    launcher._explain(blame, "", 0.0)
    launcher._print_missing(Reports(tmp_path))
    line = launcher._JoinLine(Reports(tmp_path), from_start=True)
    line._began -= 1000.0
    line.refresh()
    check(capsys.readouterr().err.replace("\n\n", "\n"))


def test_no_name_of_a_file_and_no_error_is_raw(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = EVIL.replace("\n", "")
    print_settings_file(Path(f"/tmp/{text}"), [text])
    print_rows([("a", text, text)])
    ChangedLines().miss(RallypointError(ENDLESS))

    def fail(_: list[str]) -> int:
        raise UsageError(text, hint=text)

    monkeypatch.setattr(command, "call", fail)
    with pytest.raises(SystemExit):
        command.main()
    said = capsys.readouterr()
    check(said.out)
    check(said.err)


def test_no_key_is_printed_raw(server: Server) -> None:
    """Nor what a server logs of one, or of a question that it does not understand."""
    name = ENDLESS.encode(errors="surrogateescape")[:8000]  # a key is no longer than the limit key_bytes
    with RawClient(server.port) as client:
        client.set(b"/" + name, b"no number")
        client.set(b"/tidy", b"x")
        listed = invoke("kv", "list", "--store", server.address)
        assert invoke("kv", "list", "--json", "--store", server.address).exit_code == 0
    check(listed.stdout)
    assert listed.stdout.splitlines()[-1] == "tidy"
    check(invoke("status", server.address, "--keys").stdout)
    questions = [
        b'{"search": ["' + b"x" * 9000 + b'"]}',
        b'{"\x1b[2J": 1, "value": {"\x1b[2J": 1}}',
        b"\x1b[2J",
    ]
    for sent in (
        *(request(Op.SNAPSHOT, each) for each in questions),
        request(Op.ADD, b"/" + name) + bytes(8),
    ):
        with RawClient(server.port) as client:
            client.send(sent)
            client.read_rest()
    until(lambda: server.read_log().count("closed ") >= 4, "all of that is in the log")
    check(server.read_log())
    check(invoke("status", server.address).stdout)


def test_a_console_without_the_characters_is_told_their_numbers(server: Server) -> None:
    """As on Windows, where most consoles and pipes have a code page of their country."""
    with TCPStore("127.0.0.1", server.port) as store:
        store.set("gr\u00fc\u00dfe-\u2713-\U0001f642", "value")
    shown = "gr\u00fc\u00dfe-\\u2713-\\U0001f642"
    for question in (["kv", "list", "--store"], ["status", "--keys"]):
        said = subprocess.run(
            [sys.executable, "-m", "rallypoint", *question, server.address],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "cp437"},
            timeout=60,
        )
        assert (said.returncode, said.stderr) == (0, b"")
        assert shown in said.stdout.decode("cp437")
    missing = subprocess.run(
        [sys.executable, "-m", "rallypoint", "kv", "get", "\u2713", "--store", server.address],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "cp437"},
        timeout=60,
    )
    assert (missing.returncode, missing.stdout) == (1, b"")
    assert b"there is no key '\\u2713'" in missing.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no such terminal")
def test_a_terminal_obeys_no_value(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets it as it is: a value may be anything."""
    value = EVIL.encode(errors="surrogateescape")
    with TCPStore("127.0.0.1", server.port) as store:
        store.set("key", value)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8", errors="backslashreplace") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        from rallypoint.cli.main import call

        assert call(["kv", "get", "key", "--store", server.address]) == 0
        terminal.flush()
        told = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert all(each.isprintable() for each in told.split("\r\n"))
