"""Connections for the threads of one store: each call has one to itself while it lasts.

So a wait in one thread does not hold up another. Calls at the same time need a connection each. A fork
starts with none: two processes on one connection would read each other's answers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rallypoint.errors import ConnectError, RallypointError, StoreTimeoutError
from rallypoint.store.connect.connection import Connection
from rallypoint.store.connect.deadline import Deadline

Late = StoreTimeoutError | ConnectError


class ConnectionPool:
    """Lends connections, which `connect` makes, and takes back those that are in step."""

    def __init__(self, connect: Callable[[Deadline], Connection]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._owner = os.getpid()
        self._closed = False
        self.explain: Callable[[Late, Deadline], Late] = lambda late, _: late
        """The error of a call whose deadline has passed, with more about the cause."""

    @contextmanager
    def lend(self, deadline: Deadline) -> Iterator[Connection]:
        """A connection for the time of one call."""
        try:
            connection = self._take() or self._connect(deadline)
        except ConnectError as late:
            raise self.explain(late, deadline) from None
        try:
            yield connection
        except StoreTimeoutError as late:
            raise self.explain(late, deadline) from None
        finally:
            self._give_back(connection)

    def close(self) -> None:
        """Close the idle connections now, and the others when they come back."""
        if self._owner != os.getpid():
            self._forget_the_parents()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> Connection | None:
        if self._owner != os.getpid():
            self._forget_the_parents()
        while True:
            with self._lock:
                if self._closed:
                    raise RallypointError("this store is closed", hint="make a new one, or close it later")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.is_stale:
                return connection
            connection.close()

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if connection.in_step and not self._closed and self._owner == os.getpid():
                self._idle.append(connection)
                return
        connection.close()

    def _forget_the_parents(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()  # a thread of the parent may have held it
        for connection in self._idle:
            connection.close()  # only our copy of the descriptor
        self._idle = []
