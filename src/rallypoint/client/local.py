"""Stores whose engine lives in this process: what requests do to it, and waiting; and `HashStore`, in memory.

A subclass gives access to the engine, alone and up to date (`_at_once`, `_until`), and records changes
(`_record`): in memory it wakes others, in a file it writes them down. An operation is a function of the
engine that looks, decides and acts under the store's lock; one that has to wait returns None until it is
done.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from rallypoint.client.base import (
    DEFAULT_TIMEOUT,
    Store,
    Timeout,
    as_keys,
    closed_error,
    keys_missing,
    to_i64,
    to_text,
)
from rallypoint.errors import QueueEmptyError, RallypointError, StoreTimeoutError
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.engine import Engine
from rallypoint.store.wire.encoding import unpack_i64
from rallypoint.store.wire.opcodes import Op

_Result = TypeVar("_Result")

_NOBODY = b""

Change = Callable[[Engine[bytes], bytes, Sequence[bytes], bytes], Any]  # each has the result of its operation
CHANGES: Final[dict[Op, Change]] = {
    Op.SET: lambda engine, _, blobs, __: engine.set(*blobs),
    Op.COMPARE_SET: lambda engine, _, blobs, __: bytes(engine.compare_set(*blobs)[0]),
    Op.ADD: lambda engine, _, blobs, tail: engine.add(blobs[0], unpack_i64(tail)[0])[0],
    Op.DELETE_KEY: lambda engine, _, blobs, __: engine.delete(blobs[0]),
    Op.APPEND: lambda engine, _, blobs, __: engine.append(*blobs),
    Op.MULTI_SET: lambda engine, _, blobs, __: engine.multi_set(blobs),
    Op.QUEUE_PUSH: lambda engine, _, blobs, __: engine.push(*blobs),
    Op.QUEUE_POP: lambda engine, who, blobs, _: engine.pop(who, blobs[0]),
    Op.BARRIER: lambda engine, who, blobs, tail: engine.barrier(who, blobs[0], unpack_i64(tail)[0]),
    Op.CANCEL_WAIT: lambda engine, who, _, __: engine.withdraw(who),
}
"""What each request does to the engine, by its writer, its blobs and its tail."""

_MAY_CHANGE_NOTHING: Final = (Op.COMPARE_SET, Op.DELETE_KEY)

_READS: Final[dict[Op, Callable[[Engine[bytes], Sequence[bytes]], Any]]] = {
    Op.CHECK: lambda engine, blobs: not engine.missing(blobs),
    Op.GETNUMKEYS: lambda engine, _: engine.num_keys(),
    Op.LIST_KEYS: lambda engine, _: list(engine.keys()),
    Op.QUEUE_LEN: lambda engine, blobs: engine.queue_length(*blobs),
}
"""What requests that change nothing find in the engine, by their blobs."""


class LocalStore(Store):
    """The operations of `Store` over an engine, whose members are tokens: one for each call that waits."""

    _closed = False

    # For subclasses

    @abstractmethod
    def _at_once(self, act: Callable[[Engine[bytes]], _Result]) -> _Result:
        """Call `act` once with the engine, under the store's lock, even when closed; return its result."""

    @abstractmethod
    def _until(
        self, attempt: Callable[[Engine[bytes]], _Result | None], deadline: Deadline
    ) -> _Result | None:
        """Call `attempt` like `_at_once` until it returns a result; None at the deadline.

        Raises RallypointError when the store is closed meanwhile.
        """

    @abstractmethod
    def _record(
        self, op: Op, contents: Sequence[bytes], *, tail: bytes = b"", member: bytes = _NOBODY
    ) -> None:
        """Note that the engine was changed as this request says. Called under the lock, after the change."""

    def _new_member(self) -> bytes:
        return os.urandom(16)

    def _name(self, key: str) -> bytes:
        return key.encode(errors="surrogateescape")

    def _call(self, op: Op, *blobs: bytes, tail: bytes = b"") -> Any:
        read = _READS.get(op)
        if read is not None:
            return self._act(lambda engine: read(engine, blobs))
        return self._act(lambda engine: self._apply(engine, op, blobs, tail))

    # Waiting

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = [self._name(key) for key in as_keys(keys)]
        missing: list[bytes] = []

        def attempt(engine: Engine[bytes]) -> list[bytes] | None:
            missing[:] = [name for name in names if engine.get(name) is None]
            return None if missing else [bytes(engine.get(name) or b"") for name in names]

        deadline = Deadline(self._timeout)
        values = self._until(attempt, deadline)
        if values is None:
            raise self._missing_error(missing, len(keys), deadline)
        return values

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        names = [self._name(key) for key in as_keys(keys)]
        missing: list[bytes] = []

        def attempt(engine: Engine[bytes]) -> bool | None:
            missing[:] = engine.missing(names)
            return None if missing else True

        deadline = Deadline(self._seconds(timeout))
        if self._until(attempt, deadline) is None:
            raise self._missing_error(missing, len(keys), deadline)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        name, member = self._name(key), self._new_member()
        deadline = Deadline(self._seconds(timeout))

        def released(engine: Engine[bytes]) -> bool | None:
            return None if member in _present(engine, name, world_size) else True

        self._act(lambda engine: self._arrive(engine, member, name, world_size))
        try:
            if self._until(released, deadline):
                return
        except BaseException:
            with suppress(RallypointError):  # the error under way says more
                self._at_once(lambda engine: self._withdraw(engine, member))
            raise
        if present := self._at_once(lambda engine: self._leave_barrier(engine, member, name, world_size)):
            raise StoreTimeoutError(
                f"{present} of {world_size} members came to the barrier {key!r} of {self!r} "
                f"within {deadline.seconds:g} s",
                hint="one of them is late or gone, or names another key or size",
                keys=(key,),
            )

    def _arrive(self, engine: Engine[bytes], member: bytes, name: bytes, world_size: int) -> None:
        self._apply(engine, Op.BARRIER, [name], to_i64(world_size, "the barrier's size"), member)

    def _withdraw(self, engine: Engine[bytes], member: bytes) -> None:
        self._apply(engine, Op.CANCEL_WAIT, [], member=member)

    def _leave_barrier(self, engine: Engine[bytes], member: bytes, name: bytes, world_size: int) -> int:
        """How many were there when `member` gave up; 0 if it has been released at the last moment."""
        present = _present(engine, name, world_size)
        if member not in present:
            return 0
        self._withdraw(engine, member)
        return len(present)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = self._name(key)

        def attempt(engine: Engine[bytes]) -> bytes | None:
            _, value = engine.pop(_NOBODY, name)
            if value is not None:
                self._record(Op.QUEUE_POP, [name])
            return value

        deadline = Deadline(self._timeout)
        value = self._until(attempt, deadline) if block else self._act(attempt)
        if value is not None:
            return value
        if block:
            raise self._missing_error([name], 1, deadline)
        raise QueueEmptyError(f"the queue {key!r} of {self!r} is empty")

    # Acting on the engine

    def _act(self, act: Callable[[Engine[bytes]], _Result]) -> _Result:
        self._check_open()
        return self._at_once(act)

    def _apply(
        self,
        engine: Engine[bytes],
        op: Op,
        contents: Sequence[bytes],
        tail: bytes = b"",
        member: bytes = _NOBODY,
    ) -> Any:
        """Do to the engine what a request says, record the request if it changed something; the result."""
        before = engine.get(contents[0]) if op in _MAY_CHANGE_NOTHING else None
        result = CHANGES[op](engine, member, contents, tail)
        if op not in _MAY_CHANGE_NOTHING or engine.get(contents[0]) is not before:
            self._record(op, contents, tail=tail, member=member)
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error(self)

    def _missing_error(self, missing: Sequence[bytes], count: int, deadline: Deadline) -> StoreTimeoutError:
        return keys_missing(repr(self), [to_text(name) for name in missing], count, deadline.seconds)


def _present(engine: Engine[bytes], name: bytes, world_size: int) -> list[bytes]:
    return engine.barriers.arrived(name, world_size)


class HashStore(LocalStore):
    """A store that threads of one process share, through the same object or through clones."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        # Clones share the engine, and its lock, which tells of each change.
        self._engine: Engine[bytes] = Engine()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return "HashStore()"

    def clone(self) -> HashStore:
        """Another object for the same keys; they live as long as one of the two."""
        self._check_open()
        twin = HashStore(self._timeout)
        twin._engine, twin._changed = self._engine, self._changed
        return twin

    def close(self) -> None:
        """End this object; calls that wait in it raise. Its clones are not affected."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _at_once(self, act: Callable[[Engine[bytes]], _Result]) -> _Result:
        with self._changed:
            return act(self._engine)

    def _until(
        self, attempt: Callable[[Engine[bytes]], _Result | None], deadline: Deadline
    ) -> _Result | None:
        with self._changed:
            while True:
                self._check_open()
                result = attempt(self._engine)
                if result is not None or deadline.passed:
                    return result
                self._changed.wait(min(deadline.remaining, threading.TIMEOUT_MAX))

    def _record(self, op: Op, contents: Sequence[bytes], *, tail: bytes = b"", member: bytes = b"") -> None:
        del op, contents, tail, member  # the engine is all there is
        self._changed.notify_all()
