"""Texts that come from elsewhere, a parser for each kind: it may refuse what it reads, and do nothing worse.

What is then said of a text that was taken has to be lines of printable characters.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

import rosters
from explain_corpus import REPRODUCED, samples
from rallypoint.client.snapshots import fetch_snapshot_over, read_if_there
from rallypoint.codec import to_text
from rallypoint.errors import ConnectionLostError, RallypointError
from rallypoint.explain import Source, explain
from rallypoint.explain.report import as_text
from rallypoint.launch.rendezvous.roster import Ending, Member, Roster, RosterRequest, Size, read_value
from rallypoint.store.connect.connection import Connection
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.events import SnapshotChanges, to_line
from rallypoint.store.rollcall.identity import HELLO, parse_hello
from rallypoint.store.rollcall.judgement import judge
from rallypoint.store.rollcall.plan import Plan, meetings_of
from rallypoint.store.rollcall.question import Question
from rallypoint.store.rollcall.roll import stall_text
from rallypoint.store.rollcall.snapshot import Snapshot
from rallypoint.store.wire.encoding import blob
from rallypoint.watch.status.views import summary
from rallypoint.watch.timeline import words as timeline_words
from rallypoint.watch.timeline.reading import read_timeline
from rolls import client, part, plan, rank, ranks, relay, snapshot, wait
from startups import PID, straggler

_SIZE: Final = Size(2, 3)
_NEW: Final = Member("new", "node-z", 1)


def _say(*texts: str) -> None:
    for line in "\n".join(texts).split("\n"):
        assert line.isprintable(), f"{line!r} is for a terminal to obey"


def _hello(data: bytes) -> None:
    parse_hello(b"/" + HELLO.encode() + data)


def _question(data: bytes) -> None:
    asked = Question.from_json(data)
    assert Question.from_json(asked.to_json()) == asked


def _snapshot(data: bytes) -> None:
    told = Snapshot.from_json(data)
    told = Snapshot.from_json(told.to_json())  # times are rounded
    assert Snapshot.from_json(told.to_json()) == told
    roll = judge(told)
    _say(*summary(told, roll), stall_text(roll, 3.0))
    heard = SnapshotChanges()
    for _ in range(2):
        for event in heard.read(told, lambda key: len(key) % 2 == 0):
            _say(to_line(event, 1))


def _plan(data: bytes) -> None:
    found = Plan.from_json(data.decode(errors="replace"))
    assert found is None or len(found.hosts) == found.world_size


def _roster(data: bytes) -> None:
    meetings_of(None, [("job", data.decode(errors="replace"))])
    roster = read_value(Roster, data)
    assert read_value(Roster, to_text(roster)) == roster
    for each in (
        roster.fill(),
        roster.apply([RosterRequest(come=_NEW)], _SIZE)[0],
        rosters.leave(roster, "a", _SIZE),
        roster.lose(set(roster.everybody[-1:]), _SIZE),
    ):
        assert read_value(Roster, to_text(each)) == each


def _events(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events"
        path.write_bytes(data)
        timeline = read_timeline([path])
    _say(timeline_words.as_text(timeline))


def _log(data: bytes) -> None:
    _say(as_text(explain([Source("a log", [data[:100], data[100:]])]), everything=True))


class _Deaf:
    """A socket from which the server's answers come, whatever it is asked."""

    def __init__(self, answers: bytes) -> None:
        self._answers = answers

    def recv(self, count: int) -> bytes:
        assert count <= 1 << 20, f"room for {count:,} bytes at once"
        found, self._answers = self._answers[:count], self._answers[count:]
        return found

    def sendall(self, _: bytes) -> None: ...
    def settimeout(self, _: float) -> None: ...
    def setsockopt(self, *_: object) -> None: ...


def _answers(data: bytes) -> None:
    for ask in (_ask_look, _ask_key):
        try:
            ask(Connection(cast(socket.socket, _Deaf(data)), "server"))
        except ConnectionLostError:  # which is how all of them may end
            pass


def _ask_look(connection: Connection) -> None:
    fetch_snapshot_over(connection, "server", Question(), Deadline(60.0))


def _ask_key(connection: Connection) -> None:
    read_if_there(connection, b"/key", Deadline(60.0))


class Text(NamedTuple):
    """A kind of texts: what reads one, and some that are good."""

    read: Callable[[bytes], None]
    seeds: Sequence[bytes]


def _seeds() -> dict[str, Text]:
    waiting = client(9, rank(2, "node-b"), wait("default_pg/0//cpu//0/1", "key"))
    machines = plan(("node-a", 2), ("node-b", 2))
    told = snapshot(clients=(*ranks(range(2), "node-a"), waiting), plan=machines)
    behind = snapshot(relays=(relay(1, part("node-b", clients=ranks(range(2, 4)))), relay(2, None)))
    members = [Member(name, f"node-{name}", 7, number) for number, name in enumerate("abc")]
    roster = Roster()
    for member in members[:2]:
        roster = rosters.join(roster, member, _SIZE)
    known = [
        roster,
        rosters.leave(
            roster.fill().publish("node-a:29500"), "a", _SIZE, Ending("it failed", 1.0, True, "{}")
        ),
        roster.fill().lose({members[1]}, _SIZE),
    ]
    snapshots = [
        each.to_json().encode() for each in (told, behind, snapshot(rosters=(("j", to_text(known[1])),)))
    ]
    return {
        "hello": Text(_hello, [b'{"rank":3,"role":"rank","world_size":4,"host":"a","pid":7}', b"{}"]),
        "question": Text(_question, [b"", Question(9, "k", "key").to_json()]),
        "snapshot": Text(_snapshot, snapshots),
        "plan": Text(_plan, [machines.encode()]),
        "roster": Text(_roster, [to_text(each).encode() for each in known]),
        "events": Text(_events, ["\n".join(to_line(each, PID) for each in straggler(4, 2, 3.0)).encode()]),
        "log": Text(_log, [each.data[-3000:] for each in samples(REPRODUCED)]),
        "answers": Text(_answers, [b"\x00" + blob(each) for each in (*snapshots, b"value")] + [b"\x01"]),
    }


def _words(texts: dict[str, Text]) -> list[bytes]:
    """What a mutation puts into a text: parts of others, and what is hard to read."""
    hard = [
        "NaN",
        "-1",
        "1e999",
        "null",
        "true",
        "[]",
        "{}",
        "\\ud800",
        "\u202e",
        "\x1b[2J",
        "\n",
        "Traceback (most ",
    ]
    names = {word for text in texts.values() for seed in text.seeds for word in seed.split(b'"')[1::2]}
    return [*(each.encode() for each in hard), b"[" * 500, b"9" * 5_000, b"\xff", b'",', *sorted(names)[:300]]


TEXTS: Final = _seeds()
WORDS: Final = _words(TEXTS)


def read(kind: str, data: bytes) -> None:
    """Read one; what it raises is a finding."""
    try:
        TEXTS[kind].read(data)
    except RallypointError as error:
        _say(error.message)
