"""The file of a file store: a log of changes, the state that they add up to, and the store's members.

A header line, with the number of the format and a name that no other file has, is followed by records: a
length, a checksum, and a body, which is a kind, its writer, and either a request in the wire format or a
member. The holder of the lock applies the records that are new to it, acts, and appends its own changes.
A record that a killed writer did not finish can only be the last; it counts as not written, and is cut off.

The file only grows: it is removed with its last member, not compacted.

A file may stay behind when its run crashes, and would feed the next run old values. Nothing in it tells
runs apart for certain, so a newcomer is refused when the members it would join cannot be waiting for it:
because none of them lives, or because their world is complete. Whether a process lives can be told only on
its own machine, between two boots and in one namespace of process numbers; elsewhere it is taken to live.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import Final
from zlib import crc32

from rallypoint.client.filelock import open_locked, remove_locked
from rallypoint.client.local import CHANGES
from rallypoint.codec import from_text, to_text
from rallypoint.errors import AccessError, ProtocolError, RallypointError, StaleFileError, StoreTimeoutError
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.engine import Engine
from rallypoint.store.server.guard.other_users import USERS_VARIABLE, access_of_environment
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.requests import WholeRequests
from rallypoint.text import shown

_NAME: Final = b"rallypoint file store "
_FORMAT: Final = _NAME + b"1 "
_HEADER_BYTES: Final = len(_FORMAT) + 33  # and 32 digits and the end of the line

MEMBER_BYTES: Final = 16
CALL_BYTES: Final = 8
_NO_CALL: Final = bytes(CALL_BYTES)

_FRAME: Final = Struct("<QI")
_BODY: Final = Struct(f"<B{MEMBER_BYTES + CALL_BYTES}s")

# The disk is the limit; and a record must have the same result for all processes that replay it.
_ENDLESS: Final = 1 << 62
_LIMITS: Final = Limits(
    key_bytes=_ENDLESS,
    value_bytes=_ENDLESS,
    keys_per_request=_ENDLESS,
    request_bytes=_ENDLESS,
    stored_bytes=_ENDLESS,
    stored_entries=_ENDLESS,
)

_REQUESTS: Final = WholeRequests(_LIMITS, CHANGES)

_HINT: Final = "delete the file, or use another path for each run"

_PROC = Path("/proc")
_ENDED = "ZX"  # states of processes that are only kept for their parents
_MEMBERS_SHOWN = 8
_TEXT_SHOWN = 80


class _Kind(IntEnum):
    CHANGE = 0
    JOIN = 1
    LEAVE = 2


class FileLog:
    """The file at a path, for the threads of one process.

    `engine` and `members` are what its records add up to. Outside of `locked`, only `locked`, `path` and
    `size_on_disk` may be used.
    """

    engine: Engine[bytes]
    members: dict[bytes, Member]
    length: int
    """Of the records that have been applied, and of the header."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._header = b""  # of the file that was first opened: no other will do
        self._descriptor = -1
        self._forget_all()

    @contextmanager
    def locked(self, deadline: Deadline, *, create: bool = False) -> Iterator[Engine[bytes]]:
        """Hold the file alone, and the engine with all of its records. The deadline is for the lock.

        Raises StaleFileError if the file is not, or no longer, this store's.
        """
        if self._owner != os.getpid():
            self._forget_all()  # a fork: a thread of the parent may have been at work on it
        if not self._mutex.acquire(timeout=min(deadline.remaining, threading.TIMEOUT_MAX)):
            raise StoreTimeoutError(f"another thread kept the file {self.path} locked")
        try:
            with open_locked(self.path, deadline, create=create) as self._descriptor:
                self._check_owner()
                self._catch_up(create)
                yield self.engine
        except (ProtocolError, StoreTimeoutError):
            raise  # the engine, or the lock, refused: nothing was changed
        except OSError as error:
            self._forget_records()
            if isinstance(error, FileNotFoundError) and not create:
                raise self._unusable("it was removed") from None
            raise RallypointError(
                f"cannot use the file {self.path} as a store: {error.strerror}",
                hint="name a file in a folder that exists, can be written to, and can lock files",
            ) from error
        except BaseException:
            self._forget_records()  # they may be half applied
            raise
        finally:
            self._mutex.release()

    def size_on_disk(self) -> int:
        """The length of the file, looked up without the lock; -1 if there is none."""
        try:
            return os.stat(self.path).st_size
        except OSError:
            return -1

    def write_change(self, who: bytes, request: bytes) -> None:
        """Append a change that has been made to the engine."""
        self._append(_Kind.CHANGE, who, request)

    def join(self, member_id: bytes, member: Member) -> None:
        self._append(_Kind.JOIN, member_id + _NO_CALL, to_text(member).encode())
        self.members[member_id] = member

    def leave(self, member_id: bytes) -> None:
        self._append(_Kind.LEAVE, member_id + _NO_CALL, b"")
        self.members[member_id].left = True

    def remove(self) -> None:
        remove_locked(self.path, self._descriptor)

    def belongs_to_others(self, reason: str) -> StaleFileError:
        """The error for a file that this process may not join."""
        written = datetime.fromtimestamp(os.fstat(self._descriptor).st_mtime).astimezone()
        members = describe(self.members.values())
        return StaleFileError(
            f"the file {self.path} belongs to another run: {reason}; last written "
            f"{written:%Y-%m-%d %H:%M:%S %z}; members: {members}",
            hint=_HINT,
        )

    # Catching up

    def _forget_all(self) -> None:
        self._owner = os.getpid()
        self._mutex = threading.Lock()
        self._forget_records()

    def _forget_records(self) -> None:
        self.engine, self.members, self.length = Engine(_LIMITS), {}, _HEADER_BYTES

    def _catch_up(self, create: bool) -> None:
        self._check_header(create)
        length = os.fstat(self._descriptor).st_size
        if length == self.length:
            return
        if length < self.length:
            raise self._damaged(length - self.length, "it has become shorter")
        data = _read(self._descriptor, self.length, length - self.length)
        self.length += self._replay(data)
        if self.length < length:
            os.ftruncate(self._descriptor, self.length)

    def _check_owner(self) -> None:
        """AccessError if another user may have put the file here, for this job to obey what is in it.

        The rule is that of Linux's setting fs.protected_regular, which not every machine has.
        """
        folder = os.stat(os.path.dirname(self.path))
        user = os.fstat(self._descriptor).st_uid
        if folder.st_mode & stat.S_IWOTH and user != folder.st_uid and access_of_environment().refuses(user):
            raise AccessError(
                f"the file {self.path} belongs to another user, uid {user}, in a folder that every user can "
                "write to: whoever owns the file controls the job",
                hint=f"use a folder of your own; or trust that user with {USERS_VARIABLE}={user}",
            )

    def _check_header(self, create: bool) -> None:
        header = _read(self._descriptor, 0, _HEADER_BYTES)
        if not header and create:
            header = _FORMAT + uuid.uuid4().hex.encode() + b"\n"
            _write(self._descriptor, 0, header)
        if not header.startswith(_FORMAT) or len(header) < _HEADER_BYTES:
            kind = "another version's" if header.startswith(_NAME) else "something else"
            raise self._unusable(f"it is {kind}, beginning with {header[:32]!r}; nothing in it was changed")
        if header != (self._header or header):
            raise self._unusable("another run has taken its place")
        self._header = header

    def _unusable(self, reason: str) -> StaleFileError:
        return StaleFileError(f"the file {self.path} is not that of this store: {reason}", hint=_HINT)

    def _replay(self, data: bytes) -> int:
        """Apply records; return where the first one that is not whole begins."""
        position = 0
        while position + _FRAME.size <= len(data):
            length, checksum = _FRAME.unpack_from(data, position)
            start = position + _FRAME.size
            end = start + length
            if end > len(data):
                break
            body = data[start:end]
            if crc32(body) != checksum or length < _BODY.size:
                if end == len(data):
                    break
                raise self._damaged(position, "its checksum is wrong")
            try:
                self._apply(body)
            except RallypointError as error:
                raise self._damaged(position, error.message) from error
            position = end
        return position

    def _apply(self, body: bytes) -> None:
        kind, who = _BODY.unpack_from(body)
        content, member = body[_BODY.size :], who[:MEMBER_BYTES]
        if kind == _Kind.CHANGE:
            op, blobs, tail = _REQUESTS.read(content, 0, len(content))
            CHANGES[op](self.engine, who, blobs, tail)
        elif kind == _Kind.JOIN:
            self.members[member] = Member.from_json(content)
        elif kind == _Kind.LEAVE and member in self.members:
            self.members[member].left = True
        else:
            raise ProtocolError(f"a record of kind {kind}")

    def _damaged(self, position: int, reason: str) -> RallypointError:
        return RallypointError(
            f"the file {self.path} is damaged at byte {self.length + position}: {reason}", hint=_HINT
        )

    def _append(self, kind: _Kind, who: bytes, content: bytes) -> None:
        start = _BODY.pack(kind, who)
        frame = _FRAME.pack(len(start) + len(content), crc32(content, crc32(start)))
        record = b"".join((frame, start, content))
        _write(self._descriptor, self.length, record)
        self.length += len(record)


def _read(descriptor: int, position: int, count: int) -> bytes:
    os.lseek(descriptor, position, os.SEEK_SET)
    parts: list[bytes] = []
    while count and (part := os.read(descriptor, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write(descriptor: int, position: int, data: bytes) -> None:
    os.lseek(descriptor, position, os.SEEK_SET)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@dataclass
class Member:
    """A process that has opened the store, told apart from all others that ever had its number."""

    host: str
    boot: str  # of the host, and the namespace of its process numbers; empty where Linux is not there to tell
    pid: int
    started: int  # on Linux in clock ticks after the boot, elsewhere in milliseconds; 0 if it is not told
    world_size: int | None = None
    """As the process named it."""
    left: bool = False

    @classmethod
    def current(cls, world_size: int | None) -> Member:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot(), pid, _start_of(pid) or 0, world_size)

    def is_dead(self) -> bool:
        """Whether it is known to have ended."""
        if (self.host, self.boot) != (socket.gethostname(), _boot()):
            return False
        started = _start_of(self.pid)
        return started is None or (started != 0 and started != self.started)

    @property
    def is_gone(self) -> bool:
        return self.left or self.is_dead()

    @classmethod
    def from_json(cls, text: bytes) -> Member:
        """Raises RallypointError if that is no member."""
        try:
            return from_text(cls, text)
        except ValueError as error:
            raise RallypointError(f"{text[:_TEXT_SHOWN]!r} describes no member of a file store") from error

    def __str__(self) -> str:
        state = "has left" if self.left else "dead" if self.is_dead() else "alive, as far as is known"
        return f"process {self.pid} on {shown(self.host)} ({state})"


def refusal(members: Collection[Member], world_size: int | None) -> str | None:
    """Why a newcomer with this world size may not join these members; None if it may."""
    if not members:
        return None
    if all(member.is_gone for member in members):
        return "its run has crashed, as those of its members that have not left are dead"
    known = next((member.world_size for member in members if member.world_size is not None), None)
    size = known if known is not None else world_size
    if size is not None and len(members) >= size:
        left = sum(member.left for member in members)
        places = f"all {size} places of its world are taken"
        return f"its run is over or ending: {places}, and {left} have left again" if left else places
    if world_size not in (None, size):
        return f"its world has {size} members, not {world_size}"
    return None


def describe(members: Collection[Member]) -> str:
    """The members and their state, in one line."""
    named = [str(member) for member in list(members)[:_MEMBERS_SHOWN]]
    more = len(members) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _start_of(pid: int) -> int | None:
    """When a process started; 0 if that is not told, and None if it has ended."""
    return _start_on_linux(pid) if sys.platform == "linux" else _start_elsewhere(pid)


def _start_on_linux(pid: int) -> int | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0 if _exists(pid) else None
    # The name stands before these, in brackets, and may itself hold brackets and spaces.
    columns = text.rpartition(")")[2].split()
    return None if columns[0] in _ENDED else int(columns[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _start_elsewhere(pid: int) -> int | None:
    import psutil  # late: Linux does without

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:  # another user's
        return 0


@lru_cache(maxsize=1)
def _boot() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""
