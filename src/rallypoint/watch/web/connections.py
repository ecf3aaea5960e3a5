"""The page's HTTP connections: how slow a client may be, and which connection goes if there are too many.

uvicorn alone would wait for ever for the rest of a request. A connection is waiting while none of its
requests is being answered. If it waits for too long, it is closed. If there are too many connections, of one
address or of all, the oldest that waits is closed for the new one. So connections on which nothing is asked
keep nobody from the page.

Nor do requests that take long to answer: `Room` admits fewer of them than there may be connections.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS: Final = 512
MOST_PER_ADDRESS: Final = 128
"""All who come by one proxy have one address."""
_REQUEST_SECONDS: Final = 10.0


class HttpConnection(Protocol):
    """What counts of a connection."""

    address: str
    since: float
    """When it was opened."""

    @property
    def is_waiting(self) -> bool:
        """Whether no request of it is being answered."""


ConnectionT = TypeVar("ConnectionT", bound=HttpConnection)


def one_too_many(connections: Iterable[ConnectionT], new: ConnectionT) -> ConnectionT | None:
    """The connection to close, now that there is a new one, which is among them; None: there is room."""
    everybody = list(connections)
    neighbours = [each for each in everybody if each.address == new.address]
    crowd = neighbours if len(neighbours) > MOST_PER_ADDRESS else everybody
    if len(crowd) <= MOST_CONNECTIONS and crowd is everybody:
        return None
    waiting = [each for each in crowd if each.is_waiting]
    return min(waiting, key=lambda each: each.since, default=new)


class Room:
    """How many requests of a kind may be answered at a time, in total and for one address."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._taken: Counter[str] = Counter()

    @contextmanager
    def place(self, address: str) -> Iterator[bool]:
        """A place for one request until the block is left; False if none is free."""
        if self._taken.total() >= self._most or self._taken[address] >= self._most_per_address:
            yield False
            return
        self._taken[address] += 1
        try:
            yield True
        finally:
            self._taken[address] -= 1
            self._taken += Counter()  # drops addresses without requests


class PageProtocol(H11Protocol):
    """One connection, as uvicorn serves it, but with these bounds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.since = time.monotonic()  # the time of uvloop stands still while it accepts
        self.is_leaving = False
        self._seen: tuple[object, int] = (None, 0)
        self._next_look = self.loop.call_later(_REQUEST_SECONDS, self._look)
        everybody = (
            each for each in self.connections if isinstance(each, PageProtocol) and not each.is_leaving
        )
        leaving = one_too_many(everybody, self)
        if leaving is not None:
            leaving.is_leaving = True  # it is among the connections until the loop's next turn
            leaving.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> None:
        """Close it, if since the last look no request has come, and the client has read nothing more."""
        seen = (self.cycle, self.transport.get_write_buffer_size())
        if self.is_waiting and seen == self._seen:
            self.transport.abort()  # to close it would be to wait until the client reads
            return
        self._seen = seen
        self._next_look = self.loop.call_later(_REQUEST_SECONDS, self._look)
