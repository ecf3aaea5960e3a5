"""Demanding clients: they are served round-robin, for a moment in each turn of the loop.

Clients that do not read their replies, or have very many requests under way, are parked: not served until
that is over.

The core identifies them: it stops in the middle of what a client has sent, and leaves the rest for later.
From then on this client is read only when it is its turn here, until it has asked for little for a while. All
others are served at once, and never wait for longer than that moment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Final, Generic

from rallypoint.store.core.clients import ClientT
from rallypoint.store.machine.addresses import has_left
from rallypoint.store.server.loops.link import Link
from rallypoint.store.server.loops.loop import Callback, Loop, Sliced

_MEMORY: Final = 5.0
"""For how many seconds a client counts as demanding after its last demand."""


class Reason(Enum):
    """Why a client is not served."""

    UNREAD = "it does not read"
    UNDER_WAY = "the core wants a pause"


class Backlog(Generic[ClientT]):
    """The demanding clients of one pump."""

    def __init__(self, loop: Loop, watch: Callable[[Link[ClientT]], None]) -> None:
        """`watch` is called to read from a client again, with its `reader`."""
        self._loop = loop
        self._watch = watch
        self._since: dict[Link[ClientT], float] = {}  # the last demand of each
        # Who is served next, and whether requests are left: else the client is read.
        self._queue: OrderedDict[Link[ClientT], bool] = OrderedDict()
        self._work = Sliced(loop, self._serve_next)
        self._is_held = False
        self._parked: dict[Link[ClientT], set[Reason]] = {}
        self._unread: dict[Link[ClientT], tuple[int, float]] = {}  # unread bytes, and since when that many
        self._left: set[Link[ClientT]] = set()  # parked clients that have requests left

    def reader(self, link: Link[ClientT]) -> Callback | None:
        """What to call when a client is readable; None: do not read it now."""
        if link in self._parked or link in self._queue:
            return None
        return link.on_readable if link not in self._since else partial(self._enqueue, link, has_rest=False)

    def postpone(self, link: Link[ClientT]) -> None:
        """A client has requests left."""
        self._since[link] = self._loop.turn.now
        if link in self._parked:
            self._left.add(link)
        else:
            self._enqueue(link, has_rest=True)

    def park(self, link: Link[ClientT], reason: Reason) -> None:
        """Do not serve a client, until it is unparked for the same reason."""
        self._parked.setdefault(link, set()).add(reason)
        if self._queue.pop(link, None) is not None:
            self._left.add(link)
        self._loop.watch_readable(link.sock, None)

    def unpark(self, link: Link[ClientT], reason: Reason) -> None:
        reasons = self._parked.get(link)
        if reasons is None:
            return
        reasons.discard(reason)
        if reasons:
            return
        del self._parked[link]
        self._unread.pop(link, None)
        if link in self._left:
            self._left.remove(link)
            self._enqueue(link, has_rest=True)
        else:
            self._watch(link)

    def deaf(self, seconds: float) -> list[Link[ClientT]]:
        """Clients that have closed their end, and have read nothing for this long."""
        now, found = self._loop.turn.now, []
        for link in self._parked:
            if link.unsent is not None:
                unread = len(link.unsent) + link.client.notice_bytes
                before, since = self._unread.get(link, (-1, now))
                if unread != before:
                    self._unread[link] = unread, now
                elif now - since >= seconds and has_left(link.sock):
                    found.append(link)
        return found

    def forget(self, link: Link[ClientT]) -> None:
        """Drop a client that has gone, or is not served any more."""
        self._since.pop(link, None)
        self._queue.pop(link, None)
        self._parked.pop(link, None)
        self._left.discard(link)
        self._unread.pop(link, None)

    def forgive(self) -> None:
        """Serve clients normally again that have asked for little for a while."""
        before = self._loop.turn.now - _MEMORY
        for link, since in list(self._since.items()):
            if since < before and link not in self._queue and link not in self._parked:
                del self._since[link]
                self._watch(link)

    def hold(self, is_held: bool) -> None:
        """Serve none of these clients while `is_held`."""
        self._is_held = is_held
        if self._queue and not is_held:
            self._work.go_on()

    def _enqueue(self, link: Link[ClientT], *, has_rest: bool) -> None:
        self._queue[link] = has_rest
        self._loop.watch_readable(link.sock, None)
        self._work.go_on()

    def _serve_next(self) -> bool:
        if self._queue and not self._is_held:
            link, has_rest = self._queue.popitem(last=False)
            link.on_readable(b"" if has_rest else None)
            self._watch(link)
        return bool(self._queue) and not self._is_held
