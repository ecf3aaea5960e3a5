"""Reading events files: rotated, torn, mixed with garbage, of several runs and several servers."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rallypoint.errors import RallypointError, UsageError
from rallypoint.store.rollcall.events import Connected, Left, Started, Stopped, Waited, Waiting, to_line
from rallypoint.store.server import events as server_events
from rallypoint.store.server.events import EventLog
from rallypoint.watch.timeline.reading import read_events
from rallypoint.watch.timeline.records import ClientRecord, WaitEnding, WaitRecord, merge
from startups import BEGIN, PID, START, arrival, open_wait, record_of, straggler, wait, write_events

pytestmark = pytest.mark.windows


def test_the_older_parts_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_events, "_SLICE", 1)  # what is written at once comes into one part
    path, start = tmp_path / "events.jsonl", replace(START, pid=os.getpid())
    events = [start, *straggler(40, last=5, late=3.0)[1:]]
    log = EventLog(path, most_bytes=1_500, kept=30)
    for event in events:
        log.put(event)
    log.close()
    assert (tmp_path / "events.jsonl.10").exists()  # whose name would come before that of .2
    assert read_events(path).record == record_of(events)


def test_garbage_is_counted_and_passed_over(tmp_path: Path) -> None:
    path = write_events(tmp_path / "events.jsonl", straggler(8, last=5, late=3.0))
    lines = path.read_bytes().splitlines(keepends=True)
    garbage = [
        b"\n",
        b"garbage\n",
        b"\xff\xfe\x00\n",
        b"[1\n",
        b"2]\n",
        b"{}\n",
        b"   \n",
        b"[" * 9_999 + b"\n",
    ]
    later = [b'{"time": 1, "event": "of later versions"}\n']
    path.write_bytes(b"".join([*lines[:5], *garbage, *lines[5:], *later, lines[-1][:-20]]))
    reading = read_events(path)
    assert reading.record == record_of(straggler(8, last=5, late=3.0))
    assert reading.garbage == len(garbage) - 2 + 1  # empty lines are none; the last one was torn
    assert reading.unknown == 1


def test_lines_that_only_together_are_json_are_garbage(tmp_path: Path) -> None:
    path = write_events(tmp_path / "events.jsonl", [START])
    path.write_text(path.read_text() + '[{"time": 1, "event": "stop"}\n{"time": 1, "event": "stop"}]\n')
    reading = read_events(path)
    assert reading.garbage == 2
    assert reading.record == record_of([START])


def test_lines_without_end_do_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.write(f"{to_line(START, PID)}\n".encode())
        file.truncate(100 << 20)  # zeros
    assert read_events(path).garbage == 7  # in pieces


def test_the_last_run_is_read_unless_another_is_wanted(tmp_path: Path) -> None:
    runs = [straggler(4, last=rank, late=3.0) for rank in range(3)]
    path = write_events(tmp_path / "events.jsonl", [event for run in runs for event in run])
    assert read_events(path).record == record_of(runs[2])
    assert (read_events(path).run, read_events(path).runs) == (3, 3)
    for number, run in enumerate(runs, 1):
        assert read_events(path, number).record == record_of(run)
        assert read_events(path, number).run == number


def test_a_run_whose_beginning_is_gone_is_one(tmp_path: Path) -> None:
    events = [*arrival(0, 0.0), START, *arrival(1, 0.0)]
    path = write_events(tmp_path / "events.jsonl", events)
    assert set(read_events(path, 1).record.clients) == {1}
    assert read_events(path, 1).record.writers == []
    assert set(read_events(path, 2).record.clients) == {2}


def test_servers_that_share_a_file_are_told_apart(tmp_path: Path) -> None:
    mine = [replace(START, pid=1), *straggler(4, last=1, late=3.0)[1:]]
    theirs = [replace(START, pid=2), *straggler(6, last=2, late=3.0)[1:]]
    lines = [to_line(event, 1) for event in mine], [to_line(event, 2) for event in theirs]
    mixed = [line for pair in zip(*lines, strict=False) for line in pair] + lines[1][len(lines[0]) :]
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(mixed))
    assert read_events(path, 1).record == record_of(mine)
    assert read_events(path, 2).record == record_of(theirs)


@pytest.mark.parametrize("run", [0, -1, 2])
def test_a_run_that_is_not_there(run: int, tmp_path: Path) -> None:
    path = write_events(tmp_path / "events.jsonl", [START])
    with pytest.raises(UsageError, match=f"there is no run {run} in") as caught:
        read_events(path, run)
    assert "from 1 to 1" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no file"), ("", "there is nothing in"), ("x\ny\n", "there is no event in")],
)
def test_files_without_events(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_events(path)
    assert "--events" in caught.value.hint


def test_what_cannot_be_read_is_told() -> None:
    with pytest.raises(UsageError, match="there is no file"):
        read_events(Path("/"))
    if sys.platform == "linux":
        with pytest.raises(RallypointError, match="cannot read /proc/self/mem: Input/output error"):
            read_events(Path("/proc/self/mem"))


# What a record keeps


def test_a_wait_is_met_or_given_up_or_lasts_until_the_events_end() -> None:
    met = record_of([START, *wait(0, 0.0, 5.0, "k", by=1)])
    assert met.open_waits == []
    assert met.waits == [WaitRecord(1, BEGIN, BEGIN + 5.0, ("k",), 1, WaitEnding.MET, 2)]
    left, stopped = Left(BEGIN + 7.0, 1, "lost"), Stopped(BEGIN + 9.0)
    record = record_of([START, open_wait(0, 1.0, "k"), open_wait(1, 1.0, "k"), left, stopped])
    assert record.waits == [WaitRecord(1, BEGIN + 1.0, BEGIN + 7.0, ("k",), 1, WaitEnding.GIVEN_UP)]
    assert record.open_waits == [WaitRecord(2, BEGIN + 1.0, BEGIN + 9.0, ("k",), 1, WaitEnding.OPEN)]


def test_several_waits_of_one_client_are_told_apart_by_their_beginnings() -> None:
    first, second = Waiting(3.0, 1, ("a",), 1.0, 2.0), Waiting(3.0, 1, ("b",), 2.0, 1.0)
    record = record_of([first, second, Waited(4.0, 1, ("a",), 1.0, 3.0)])
    assert [each.keys for each in record.open_waits] == [("b",)]


def test_who_a_client_is_may_become_known_later() -> None:
    connected, joined = arrival(3, 0.0)
    assert record_of([connected]).clients[4].who.rank == -1
    client = record_of([connected, joined]).clients[4]
    assert client == ClientRecord(4, "10.0.0.3:4000", BEGIN, BEGIN + 0.01, client.who)
    assert client.who.rank == 3


def test_several_records_become_one_whose_clients_have_their_own_numbers() -> None:
    head = record_of([START, Connected(BEGIN, 1, "10.0.0.1:1")])
    relays = [
        record_of([Started(BEGIN, "node-b", 1, "0.1.0", "libuv", "relay"), *straggler(3, 1, 2.0)[1:]])
        for _ in range(2)
    ]
    whole = merge([head, *relays])
    assert sorted(whole.clients) == list(range(1, 8))
    assert all(client.id == number for number, client in whole.clients.items())
    assert [each.kind for each in whole.writers] == ["server", "relay", "relay"]
    assert {(each.client, each.by) for each in whole.waits} == {(2, 3), (4, 3), (5, 6), (7, 6)}


@pytest.mark.slow
def test_a_million_lines_take_seconds(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = to_line(Waited(BEGIN, 17, ("default_pg/0//cpu//0/3",), BEGIN - 1, 1.0, by=4), PID) + "\n"
    path.write_text(f"{to_line(START, PID)}\n" + line * 1_000_000)
    begun = time.process_time()
    assert len(read_events(path).record.waits) == 1_000_000
    assert time.process_time() - begun < 30
