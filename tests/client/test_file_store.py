"""What is particular to `FileStore`: many real processes, the life of its file, and damage to it."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from rallypoint.client import filelock, filelog
from rallypoint.client.file import FileStore
from rallypoint.client.filelock import open_locked, remove_locked
from rallypoint.client.filelog import Member, refusal
from rallypoint.errors import RallypointError, StaleFileError, StoreTimeoutError, UsageError
from rallypoint.store.connect.deadline import Deadline
from store_contract import PATIENCE, SHORT, times_out, together

pytestmark = pytest.mark.windows

_MEMBER: Final = """
import sys
from rallypoint.client.file import FileStore
store = FileStore(sys.argv[1], int(sys.argv[2]), 20)
print("joined", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Peer:
    """Another process that has the store open, and evaluates what it is told."""

    def __init__(self, path: Path, world_size: int = -1, program: str = _MEMBER) -> None:
        command = [sys.executable, "-c", program, str(path), str(world_size)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, expression: str) -> None:
        self._input.write(expression + "\n")
        self._input.flush()

    def answer(self) -> str:
        return self._output.readline().strip()

    def ask(self, expression: str) -> str:
        self.tell(expression)
        return self.answer()

    def finish(self) -> int:
        """Let it come to its end, and return its exit status."""
        self._input.close()
        return self._process.wait(PATIENCE)

    def die(self) -> None:
        """Kill it, as a crash would, without a chance to clean up."""
        self._process.kill()
        self._process.wait(PATIENCE)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(PATIENCE)
        self._output.close()
        try:
            self._input.close()
        except BrokenPipeError:
            pass  # it died before it had read all


@contextmanager
def peers(count: int, path: Path, world_size: int = -1) -> Iterator[list[Peer]]:
    """So many other processes that have joined."""
    with ExitStack() as cleanup:
        started = [Peer(path, world_size) for _ in range(count)]
        for peer in started:
            cleanup.callback(peer.end)
        for peer in started:
            assert peer.answer() == "joined"
        yield started


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def refused(path: Path, world_size: int | None = None) -> StaleFileError:
    """The error with which a newcomer is refused, which must leave the file as it is."""
    before = path.read_bytes()
    with pytest.raises(StaleFileError) as caught:
        FileStore(path, world_size)
    assert path.read_bytes() == before
    assert "delete the file" in caught.value.hint
    return caught.value


# Many processes


def test_many_processes_lose_nothing_and_leave_nothing(path: Path) -> None:
    with peers(8, path, world_size=8) as members:
        for member in members:
            member.tell("[store.barrier('start', 8)] + [store.add('n', 1) for _ in range(200)]")
        for member in members:
            assert member.answer().startswith("[None, ")
        assert {member.ask("store.add('n', 0)") for member in members} == {"1600"}
        assert [member.finish() for member in members] == [0] * 8
    assert not path.exists()


def test_a_process_killed_at_a_barrier_is_not_counted(path: Path) -> None:
    with peers(1, path) as [peer], FileStore(path, timeout=PATIENCE) as store:
        peer.tell("store.barrier('barrier', 2)")
        store._until(lambda engine: engine.barriers.arrived(b"barrier", 2) or None, Deadline(PATIENCE))
        peer.die()
        times_out(lambda: store.barrier("barrier", 2, SHORT))
        with FileStore(path, timeout=PATIENCE) as other:
            together(lambda: store.barrier("barrier", 2), lambda: other.barrier("barrier", 2))


# The life of the file


def test_the_last_one_who_leaves_removes_the_file(path: Path) -> None:
    first, second = FileStore(path, -1), FileStore(path)
    third = second.clone()
    first.close()
    first.close()
    second.close()
    assert path.exists()
    third.set("key", "value")
    del third
    gc.collect()
    assert not path.exists()


def test_the_last_one_alive_removes_the_file(path: Path) -> None:
    with FileStore(path), peers(1, path) as [peer]:
        peer.die()
    assert not path.exists()
    path.touch()  # an empty file is as good as none
    with FileStore(path) as store:
        assert store.path == str(path)
        store.set("key", "value")


_FORKING: Final = """
import os, sys
from rallypoint.client.file import FileStore
store = FileStore(sys.argv[1], 1, 20)
clone = store.clone()
child = os.fork()
if child == 0:
    store.set("from the child", "value")
    clone.close()
    sys.exit(0)  # with all that is done when an interpreter exits
assert os.waitpid(child, 0)[1] == 0
print(os.path.exists(sys.argv[1]), store.get("from the child"), clone.add("n", 1), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_uses_the_store_but_does_not_leave_it(path: Path) -> None:
    parent = Peer(path, program=_FORKING)
    try:
        assert parent.answer() == "True b'value' 1"
        assert parent.finish() == 0
    finally:
        parent.end()
    assert not path.exists()


def test_a_file_that_was_removed_or_replaced_is_noticed(path: Path) -> None:
    with FileStore(path) as store:
        path.unlink()
        with pytest.raises(StaleFileError, match="removed"):
            store.set("key", "value")
        with FileStore(path) as other:
            other.set("key", "other")
            with pytest.raises(StaleFileError, match="another run has taken its place"):
                store.get("key")
            store.close()
            assert other.get("key") == b"other"


# Who is refused


def test_a_full_world_is_refused(path: Path) -> None:
    with FileStore(path, 2), FileStore(path):
        message = refused(path).message
        assert "all 2 places" in message
        assert f"process {os.getpid()} on " in message
        assert "alive" in message
        assert "last written 20" in message
        assert "places" in refused(path, 2).message


def test_a_world_that_is_ending_is_refused(path: Path) -> None:
    with FileStore(path, 2), FileStore(path, 2) as leaving:
        leaving.close()
        message = refused(path, 2).message
        assert "over or ending" in message
        assert "1 have left" in message
        assert "has left" in message
    with FileStore(path, 3):
        assert "3 members, not 2" in refused(path, 2).message


def test_a_crashed_run_is_refused(path: Path) -> None:
    with peers(2, path) as [first, second]:
        first.die()
        with FileStore(path):
            pass  # one is alive, so the run may go on
        second.die()
        message = refused(path).message
        assert "crashed" in message
        assert f"process {first.pid} on " in message
        assert f"process {second.pid} on " in message
        assert "(dead)" in message
        assert "has left" in message
    path.unlink()
    FileStore(path).close()


@pytest.mark.parametrize("content", [b"\x08\x00\x00key", b"#!/bin/sh\n" * 100, b"r", b"rallypoint file stor"])
def test_a_file_of_something_else_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert "something else" in refused(path).message
    path.write_bytes(b"rallypoint file store 2 " + b"0" * 100)
    assert "another version" in refused(path).message


def test_what_cannot_be_a_store(tmp_path: Path) -> None:
    with pytest.raises(RallypointError, match="cannot use the file"):
        FileStore(tmp_path)
    with pytest.raises(RallypointError, match=r"cannot use the file .*store as a store: .+") as caught:
        FileStore(tmp_path / "no folder" / "store")
    assert "folder that exists" in caught.value.hint
    with pytest.raises(UsageError, match="world size"):
        FileStore(tmp_path / "store", 0)
    assert not (tmp_path / "store").exists()


def test_who_lives_can_be_told_only_on_this_machine() -> None:
    here = Member.current(None)
    assert not here.is_dead()
    assert refusal([here], None) is None
    another = replace(here, started=here.started - 1)  # had the same number, and has ended
    assert another.is_dead() == bool(here.started)
    elsewhere = [replace(another, host="elsewhere"), replace(another, boot="earlier")]
    assert not any(member.is_dead() for member in elsewhere)
    assert refusal([another, elsewhere[0]], None) is None
    assert refusal([another, replace(elsewhere[0], left=True)], None) is not None


# Races


def test_who_waits_for_a_removed_file_gets_a_new_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused_the_lock = threading.Event()
    original = filelock._try_lock

    def try_lock(descriptor: int) -> bool:
        got_it = original(descriptor)
        if not got_it:
            refused_the_lock.set()
        return got_it

    monkeypatch.setattr(filelock, "_try_lock", try_lock)

    def come() -> int:
        with FileStore(path, timeout=PATIENCE) as store:
            return store.add("n", 1)

    def remove() -> int:
        with open_locked(str(path), Deadline(PATIENCE), create=False) as descriptor:
            holding.set()
            assert refused_the_lock.wait(PATIENCE)
            remove_locked(str(path), descriptor)
        return 0

    holding = threading.Event()
    store = FileStore(path)
    store.add("n", 41)
    assert together(remove, lambda: come() if holding.wait(PATIENCE) else -1) == [0, 1]
    store.close()


def test_a_lock_has_a_deadline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.client.file._GRACE", 0.0)
    with FileStore(path, timeout=SHORT) as store:
        with open_locked(str(path), Deadline(PATIENCE), create=False):
            with pytest.raises(StoreTimeoutError, match="locked by others"):
                store.set("key", "value")
            with pytest.raises(StoreTimeoutError, match="locked by others"):
                FileStore(path, timeout=SHORT)
        store.set("key", "value")


# Damage


def record_of(path: Path, change: Callable[[], object]) -> bytes:
    """The bytes that a change appends to the file."""
    before = len(path.read_bytes())
    change()
    return path.read_bytes()[before:]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_record_that_was_not_finished_is_cut_off(path: Path) -> None:
    with FileStore(path) as store:
        record = record_of(path, lambda: store.add("n", 1))
        whole = path.read_bytes()
        for length in range(1, len(record)):
            append(path, record[:length])
            assert store.get("n") == b"1"
            assert path.read_bytes() == whole
        append(path, record[:-1])
        with FileStore(path) as other:
            assert other.add("n", 1) == 2
        append(path, record[:-1] + bytes([record[-1] ^ 1]))  # whole, but its checksum is wrong
        assert store.add("n", 1) == 3


def test_damage_in_the_middle_is_an_error(path: Path) -> None:
    with FileStore(path) as store:
        record = record_of(path, lambda: store.set("key", "value"))
        data = path.read_bytes()
        path.write_bytes(data[:-1] + b"X" + record)
        with pytest.raises(RallypointError, match=f"damaged at byte {len(data) - len(record)}"):
            FileStore(path)
        path.write_bytes(data[:-1])
        with pytest.raises(RallypointError, match="shorter"):
            store.get("key")
        path.write_bytes(data)
        assert store.get("key") == b"value"


def test_a_full_disk_loses_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(descriptor: int, position: int, data: bytes) -> None:
        original(descriptor, position, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with FileStore(path) as store:
        store.add("n", 1)
        original = filelog._write
        with monkeypatch.context() as patch:
            patch.setattr(filelog, "_write", write_half)
            with pytest.raises(RallypointError, match="No space left"):
                store.add("n", 1)
        assert store.get("n") == b"1"
        assert store.add("n", 1) == 2


def test_what_changes_nothing_is_not_written(path: Path) -> None:
    def ask() -> None:
        assert store.compare_set("key", "else", "new") == b"value"
        assert not store.delete_key("missing")
        assert store.queue_len("queue") == 0
        times_out(lambda: store.wait(["missing"], SHORT))

    with FileStore(path) as store:
        store.set("key", "value")
        assert record_of(path, ask) == b""
