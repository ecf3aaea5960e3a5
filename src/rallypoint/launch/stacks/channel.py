"""The sampler's way to the job's store."""

from __future__ import annotations

from typing import Final

from rallypoint.client.look import look
from rallypoint.client.tcp import TCPStore
from rallypoint.launch.endpoint import Endpoint, StoreView
from rallypoint.launch.stacks.grouping import Work, work_of
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.question import STALL, STALL_BYTES, Question
from rallypoint.store.server.process.hosting import HostedServer
from rallypoint.text import printable_lines

_SECONDS: Final = 5.0


class StoreChannel:
    """The store of a job, which is one of Rallypoint's.

    `place` is where the ranks of this machine find it, which may be a relay; `view`, where it is looked at.
    A `server` that was started for this ends with it. Each method may raise RallypointError.
    """

    def __init__(self, place: Endpoint, view: StoreView, server: HostedServer | None = None) -> None:
        self._view = view
        self._server = server
        self._store = TCPStore(*place, timeout=_SECONDS, role=Role.AGENT)

    @property
    def address(self) -> str:
        """Where others can look at it."""
        return self._view.address

    def tell(self, text: str) -> None:
        """Have this machine's activity sent to clients that look at the store."""
        self._store.tell(text)

    def work(self) -> Work:
        """What the ranks of all machines do."""
        view = self._view
        return work_of(look(*view.place, Question(), Deadline(_SECONDS), view.name))

    def announce(self, text: str) -> bool:
        """Write the report of a stall; False if another launcher has written one."""
        return self._store.compare_set(STALL, "", text) == text.encode()

    def announced(self) -> str:
        """The report of the stall; empty if the job makes progress."""
        if not self._store.check([STALL]):
            return ""
        # Anybody may have written it.
        return printable_lines(bytes(self._store.get(STALL))[:STALL_BYTES].decode(errors="replace"))

    def withdraw(self) -> None:
        """Remove the report: the job makes progress again."""
        self._store.delete_key(STALL)

    def close(self) -> None:
        self._store.close()
        if self._server is not None:
            self._server.release()
