"""The events file: all that is put into it is there, in order; and no disk stops whoever puts."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.store.rollcall.events import Connected, Erred, Event, Left, Lost
from rallypoint.store.server import events as eventlog
from rallypoint.store.server.events import EventLog
from raw import until
from startups import from_line

pytestmark = pytest.mark.windows

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX system")


def _numbered(numbers: Iterable[int]) -> list[Event]:
    return [Left(1.0, number) for number in numbers]


def _write(path: Path, events: Iterable[Event], most_bytes: int = 64 << 20, kept: int = 3) -> None:
    log = EventLog(path, most_bytes, kept)
    for event in events:
        log.put(event)
    log.close()


def _events_in(path: Path) -> list[Event]:
    found = [from_line(line) for line in path.read_bytes().splitlines() if line]
    return [event for event in found if event is not None]


def _parts(path: Path) -> list[Path]:
    """The file and its older parts, the oldest first."""
    older = sorted(path.parent.glob(f"{path.name}.*"), key=lambda part: -int(part.suffix[1:]))
    return [*older, path]


def _all_in(path: Path) -> list[Event]:
    return [event for part in _parts(path) for event in _events_in(part)]


# What is put is there


def test_all_events_are_there_in_order_when_it_is_closed(tmp_path: Path) -> None:
    path, events = tmp_path / "events.jsonl", _numbered(range(2_000))
    _write(path, events)
    assert _events_in(path) == events
    assert path.read_text().count(f'"pid":{os.getpid()}') == 2_000, "every line names the process"


def test_a_line_that_was_torn_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time":1.0,"event":"le')
    _write(path, [Left(2.0, 5)])
    torn, whole = path.read_text().splitlines()
    assert torn == '{"time":1.0,"event":"le'
    assert from_line(whole) == Left(2.0, 5)


def test_closing_twice_and_putting_afterwards_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.put(Left(1.0, 1))
    until(lambda: path.read_bytes().endswith(b"\n"), "it is written while the log is open")
    log.close()
    log.put(Left(1.0, 2))
    log.close()
    assert _events_in(path) == [Left(1.0, 1)]
    assert not any(thread.name == "rallypoint-events" for thread in threading.enumerate())


# Rotation


def test_rotation_loses_nothing_while_there_is_room(tmp_path: Path) -> None:
    """Over several runs, and with events that alone are larger than a file may be."""
    path = tmp_path / "events.jsonl"
    events: list[Event] = [Erred(float(at), "", "x" * (at % 7) * 60) for at in range(300)]
    for begin in range(0, 300, 100):
        _write(path, events[begin : begin + 100], most_bytes=300, kept=300)
    assert len(_parts(path)) > 3
    assert _all_in(path) == events


def test_the_oldest_go(tmp_path: Path) -> None:
    path, events = tmp_path / "events.jsonl", _numbered(range(1_000))
    _write(path, events, most_bytes=5_000, kept=2)
    assert [part.name for part in _parts(path)] == ["events.jsonl.2", "events.jsonl.1", "events.jsonl"]
    assert all(part.stat().st_size <= 5_000 for part in _parts(path))
    left = _all_in(path)
    assert 100 < len(left) < 1_000
    assert left == events[-len(left) :]


def test_who_moves_the_file_gets_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    path.rename(tmp_path / "moved")
    log.put(Left(1.0, 1))
    log.close()
    assert _events_in(path) == [Left(1.0, 1)]
    assert (tmp_path / "moved").read_bytes() == b""


def test_two_servers_share_a_file(tmp_path: Path) -> None:
    """When one of them rotates it, the other follows: lines stay whole, and all are there."""
    path = tmp_path / "events.jsonl"
    logs = [EventLog(path, 10_000, kept=20) for _ in range(2)]
    for number in range(500):
        for base, log in enumerate(logs):
            log.put(Left(1.0, 1_000 * base + number))
    for log in logs:
        log.close()
    numbers = [event.client for event in _all_in(path) if isinstance(event, Left)]
    assert len(_parts(path)) > 3
    for base in (0, 1_000):
        own = {each for each in numbers if base <= each < base + 1_000}
        assert own == set(range(base, base + 500))


@needs_posix
def test_what_a_link_leads_to_is_rotated(tmp_path: Path) -> None:
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.touch()
    link.symlink_to(target)
    _write(link, _numbered(range(200)), most_bytes=5_000)
    assert link.is_symlink()
    assert (tmp_path / "target.jsonl.1").is_file()
    assert _all_in(target) == _numbered(range(200))


# Disks


@needs_posix
def test_a_full_disk_is_told_once_and_delays_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rallypoint.server"):
        log = EventLog(Path("/dev/full"))
        for event in _numbered(range(1_000)):
            log.put(event)
        log.close()
    assert len(caplog.records) == 1
    assert "/dev/full: No space left on device" in caplog.text


@needs_posix
def test_a_disk_that_has_room_again_is_told_how_many_are_lost(tmp_path: Path) -> None:
    """In the file and in the log, without another event. For a while, the files of a process may not grow."""
    path = tmp_path / "events.jsonl"
    command = [sys.executable, "-c", _FULL_FOR_A_WHILE, str(path)]
    log = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stderr
    *written, lost, last = [from_line(line) for line in path.read_bytes().splitlines()]  # no line is torn
    assert written == _numbered(range(len(written)))
    assert isinstance(lost, Lost)
    assert (lost.count, last) == (1_000 - len(written), Left(1.0, 1_000))
    assert [line.split(str(path))[0] for line in log.splitlines()] == [
        "cannot write events to ",
        "events are written to ",
    ]
    assert f"again; {lost.count} events lost" in log


_FULL_FOR_A_WHILE = """
import resource, sys
from pathlib import Path
from rallypoint.store.rollcall.events import Left
from rallypoint.store.server.events import EventLog

path = Path(sys.argv[1])
log = EventLog(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, resource.RLIM_INFINITY))
for number in range(1_000):
    log.put(Left(1.0, number))
while path.read_bytes().count(b"\\n") + log._lost < 1_000:
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
while b'"lost"' not in path.read_bytes():
    pass
log.put(Left(1.0, 1_000))
log.close()
"""


def test_events_that_find_no_memory_are_counted_and_the_next_ones_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object) -> str:
        failed.set()
        raise MemoryError

    failed = threading.Event()
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    with monkeypatch.context() as starved:
        starved.setattr("rallypoint.store.rollcall.events.to_line", run_out)
        log.put(Left(1.0, 1))
        assert failed.wait(60)
    log.put(Left(1.0, 2))
    log.close()
    left, lost = _events_in(path)
    assert (left, isinstance(lost, Lost) and lost.count) == (Left(1.0, 2), 1)


@pytest.mark.parametrize("name", ["nowhere/events.jsonl", ".", pytest.param("pipe", marks=needs_posix)])
def test_what_cannot_be_written_is_told_at_once(name: str, tmp_path: Path) -> None:
    if name == "pipe":  # nobody reads it
        os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match="cannot write events to") as caught:
        EventLog(tmp_path / name)
    assert "name a file" in caught.value.hint
    assert not any(thread.name == "rallypoint-events" for thread in threading.enumerate())


@needs_posix
def test_a_pipe_gets_events_and_is_never_rotated(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(end, "rb") as reader:
        _write(path, _numbered(range(10)), most_bytes=100)
        lines = reader.read().splitlines()
    assert [from_line(line) for line in lines] == _numbered(range(10))
    assert [part.name for part in tmp_path.iterdir()] == ["pipe"]


@needs_posix
def test_a_reader_that_hangs_delays_neither_putting_nor_closing_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe that is full, as a disk that does not answer; more events than may be pending are dropped."""
    monkeypatch.setattr(eventlog, "MOST_PENDING", 5_000)
    monkeypatch.setattr(eventlog, "_CLOSE_SECONDS", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        _fill(path)
        log = EventLog(path)
        for number in range(20_000):
            log.put(Connected(1.0, number, "10.0.0.1:1"))
        assert log._pending.qsize() <= 5_000
        log.close()
        assert "the last events are lost" in caplog.text
        data = b""
        while log._writer.is_alive():  # what it still holds, so that no thread is left
            data += reader.read() or b""
        data += reader.read() or b""
    events = [from_line(line) for line in data.splitlines() if line]
    lost = sum(event.count for event in events if isinstance(event, Lost))
    written = sum(isinstance(event, Connected) for event in events)
    assert written + lost == 20_000, "however many are told by the file, and however many when it goes on"
    assert 1 < written <= 5_001, "it holds one, and so many are pending"


def _fill(pipe: Path) -> None:
    """Let a pipe take nothing more, until somebody reads it."""
    end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        for piece in (b"\n" * 4096, b"\n"):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(end, piece)
    finally:
        os.close(end)
