"""The byte pump: it drives a core with sockets. `store/core/server_core.py` says what a driver does.

The loop only reports when a socket is ready. The rest is here and in `link`: one read per event, one write
per read, bounded buffers for clients that do not read, and no name look-up anywhere.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Generic

import rallypoint
from rallypoint.compiling import mypyc_attr
from rallypoint.errors import AccessError, LimitError, ProtocolError
from rallypoint.store.core.clients import Client, ClientT
from rallypoint.store.core.context import About, Close, CoreFault, DriverTask, Enter, GoOn, Other, Pause
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.snapshots import SnapshotStep
from rallypoint.store.machine.addresses import is_within_machine
from rallypoint.store.machine.socket_owner import Owner
from rallypoint.store.server.events import Events, RelayEvents, StallReports
from rallypoint.store.server.guard.other_users import ClientGuard, access_of_environment
from rallypoint.store.server.loops.backlog import Backlog, Reason
from rallypoint.store.server.loops.link import Link, Socket
from rallypoint.store.server.loops.listening import Arrival, Listening
from rallypoint.store.server.loops.loop import SLICE, Callback, Loop, Sliced
from rallypoint.store.server.neighbours import ProcessNames

if TYPE_CHECKING:
    from rallypoint.store.server.loops.guarded import Door

logger = logging.getLogger("rallypoint.server")

TICK_SECONDS = 1.0
"""How often deadlines are checked, a paused accept is tried again, and vanished clients are looked for."""

_SNAPSHOT_PAUSE: Final = 0.01


def about_this_process(loop: Loop) -> About:
    return About(rallypoint.__version__, socket.gethostname(), os.getpid(), loop.name)


def stop_on_signals(stop: Callback) -> None:
    """Call `stop` on SIGINT, SIGTERM and Ctrl-Break. For the main thread."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop()

    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGBREAK", signal.SIGTERM)):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)


def _is_from_here(sock: Socket, address: Any) -> bool:
    try:
        return is_within_machine(sock.getsockname(), address)
    except OSError:  # it is reset
        return False


@mypyc_attr(allow_interpreted_subclasses=True)
class Pump(Generic[ClientT]):
    """Serves the clients of a core on listening sockets, which it owns from now on."""

    def __init__(
        self,
        loop: Loop,
        core: ServerCore[ClientT],
        listeners: Sequence[socket.socket],
        events: Events | None = None,
    ) -> None:
        assert core.turn is loop.turn, "the loop tells the core the time"
        self.loop = loop
        self.core = core
        self.unanswered: set[Link[ClientT]] = set()
        self._links: dict[Client, Link[ClientT]] = {}
        # Without listeners, clients come from another pump, which has checked them.
        self._guard = ClientGuard(access_of_environment()) if listeners else None
        self._listening = Listening(loop, listeners, self._links, self._welcome)
        self._names = ProcessNames(loop, core, listeners)
        self._events = events or Events()
        self._relay_events = RelayEvents(core, self._events)
        self._stalls = StallReports(core, self._events)
        self._backlog = Backlog(loop, self.watch)
        self.door: Door | None = None
        """What new clients have to pass; None: all are let in."""
        self._delivering = False
        self._holding = False
        self._snapshots = Sliced(loop, self._step_snapshots)
        self._rest = Sliced(loop, self._go_on)
        self._leaving: deque[Link[ClientT]] = deque()  # their clients have ended, and are owed nothing
        self._closed = False
        self._tasks: dict[DriverTask, Callback] = {
            DriverTask.SNAPSHOTS: self._snapshots.go_on,
            DriverTask.PROCESSES: self._names.find,
            DriverTask.ABANDONED: loop.stop,
            DriverTask.HOLD: partial(self._hold_readers, True),
            DriverTask.READ_ON: partial(self._hold_readers, False),
            DriverTask.CROWDED: partial(self._backlog.hold, True),
            DriverTask.ROOM: partial(self._backlog.hold, False),
            DriverTask.LIGHTEN: self._lighten,
            DriverTask.REST: self._rest.go_on,
            # After everything that is readable now: the requests in it go along.
            DriverTask.FLUSH: partial(loop.later, 0, self._flush),
        }
        self._set_clock()

    def serve(self, on_ready: Callback = lambda: None, on_tick: Callback = lambda: None) -> None:
        """Accept and serve until the loop's `stop`, SIGINT, SIGTERM or Ctrl-Break; then close every socket.

        `on_ready` is called when accepting. For the main thread of a process, as signals are.
        """
        try:
            stop_on_signals(self._stop)
            self.start(on_tick)
            on_ready()
            self.loop.run()
        finally:
            self.drop_together()
            self.close()
            self.loop.close()

    def start(self, on_tick: Callback = lambda: None) -> None:
        """Accept, and serve whenever the loop runs; call `on_tick` about every second."""

        def tick() -> None:
            if not self._closed:
                self.loop.later(TICK_SECONDS, tick)
                self._tick()
                on_tick()

        if self.core.journal is not None:
            about = self.core.about
            self.core.journal.started(self.core.kind, about.host, about.pid, about.version, about.backend)
        self.deliver()
        self._listening.start()
        self.loop.later(TICK_SECONDS, tick)

    def close(self) -> None:
        """Close every socket."""
        self._closed = True
        self.drop_all()
        self._names.close()
        self._listening.close()
        if self._guard is not None:
            self._guard.close()
        if self.core.journal is not None:
            self.core.journal.stopped()
        self.deliver()
        self._events.close()

    @property
    def has_clients(self) -> bool:
        """Whether a client is connected, or may be back in a moment."""
        return self.core.has_clients

    @property
    def connections(self) -> int:
        """The number of clients' sockets."""
        return len(self._links)

    def drop_all(self) -> None:
        """Close the connections of all clients at once."""
        for link in list(self._links.values()):
            self.drop(link)

    def drop_together(self) -> None:
        """Close all connections at the end, on several cores where the loop can.

        Does nothing if the loop cannot, or if events must report each client: `drop_all` then does it.
        """
        if self.loop.sending is None or self.core.journal is not None:
            return
        self.loop.sending.flush()  # which may close some
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            link.expect_no_room()
            self.loop.watch_readable(link.sock, None)
            link.client.read_no_more()  # which frees it
            link.close()

    def _stop(self) -> None:
        self.loop.stop()

    # Once a second

    def _tick(self) -> None:
        self._set_clock()
        self._drop_broken()
        for client, why in self.core.overdue():
            if client in self._links:  # or an earlier one has taken it along
                self.note_error(client, why)
                self.drop(self._links[client])
        self._listening.resume()
        self.loop.restore()
        self._backlog.forgive()
        seconds = self.core.limits.handshake_seconds
        for link in self._backlog.deaf(seconds):
            why = f"it has ended, but did not read its last replies within {seconds:g} s"
            self.note_error(link.client, f"{why}, the limit handshake_seconds")
            self.drop(link)
        self.core.end_second(self.loop.turns.copy())
        self._stalls.tick()
        self._relay_events.tick()
        self.deliver()

    def _set_clock(self) -> None:
        """Follow the time of day, which may be set while a server runs."""
        self.loop.turn.wall_ahead = time.time() - time.monotonic()

    def _drop_broken(self) -> None:
        """Drop clients that reset right after a request.

        Where the loop reports an error only once, it may have done so with that request. A failed answer
        would have shown the error, but these clients got none.
        """
        unanswered = list(self.unanswered)
        self.unanswered.clear()
        if self.loop.tells_errors_once:
            for link in unanswered:
                if link.has_error:
                    self.drop(link)

    # What the core wants

    def deliver(self) -> None:
        """Empty the outbox of the core.

        A failing send closes its connection, which may add to the outbox: the outer call empties that, too.
        """
        if self._delivering:
            return
        self._delivering = True
        try:
            outbox = self.core.outbox
            while outbox.woken or outbox.others:
                self._notify(outbox.take_woken())
                for other in outbox.take_others():
                    self._do(other)
        finally:
            self._delivering = False

    def _notify(self, woken: Iterable[ClientT]) -> None:
        """A barrier wakes all clients at once: this is a hot path, too."""
        links = self._links
        for client in woken:
            link = links.get(client)
            if link is None:  # an earlier one has taken it along
                continue
            try:
                notice = client.take_notice()
            except Exception:
                link.fail()
                continue
            if notice:
                link.send(notice)
                if client not in links:  # its connection is broken
                    continue
            if client.notice_bytes:
                link.expect_room()
            elif link.ending:
                link.flush()
                if link.unsent is None and not client.is_owed:
                    self.drop(link)

    def _do(self, other: Other) -> None:
        if isinstance(other, DriverTask):
            self._tasks[other]()
        elif isinstance(other, Close):
            self._close_client(other)
        elif isinstance(other, GoOn):
            link = self._links.get(other.client)
            if link is not None and not link.ending:
                self._backlog.postpone(link)
        elif isinstance(other, Pause):
            link = self._links.get(other.client)
            if link is not None and other.is_over:
                self._backlog.unpark(link, Reason.UNDER_WAY)
            elif link is not None:
                self._backlog.park(link, Reason.UNDER_WAY)
        elif isinstance(other, Enter):
            link = self._links.get(other.client)
            if link is not None:
                self._enter(link, other.name)
        elif isinstance(other, CoreFault):
            logger.error("what this server knows could not be put together", exc_info=other.error)
        else:
            self._events.put(other)

    def _close_client(self, close: Close[Any]) -> None:
        link = self._links.get(close.client)
        if link is not None and close.at_once:
            link.client.why = why = close.error.message
            self.loop.warn_of_memory("closed %s: %s", link.client.peer, why)
            self.core.note_error(link.client.peer, why)
            self.drop(link)
        elif link is not None and not link.ending:
            self.refuse(link, close.error)

    def _step_snapshots(self) -> bool:
        """Go on with snapshots: return whether there is more to do at once."""
        if self._closed:
            return False
        step = self.core.snapshots.step()
        if isinstance(step, Client) and step in self._links:
            self._links[step].count_bytes()
        self.deliver()
        if step is SnapshotStep.IDLE:
            self.loop.later(_SNAPSHOT_PAUSE, self._snapshots.go_on)
        return step is not SnapshotStep.DONE and step is not SnapshotStep.IDLE

    def _go_on(self) -> bool:
        """Do a little of the work that no client waits for: return whether there is more."""
        if self._closed:
            return False
        if self._leaving:
            self.drop(self._leaving.popleft())
            return True
        has_more = self.core.go_on()
        self.deliver()
        return has_more

    def _lighten(self) -> None:
        """Act on the limit held_bytes, which is exceeded."""
        self.core.lighten()

    def _flush(self) -> None:
        """Pass on the clients' requests, where the core has others carry them out."""

    def _hold_readers(self, hold: bool) -> None:
        """Read nothing from the clients while there is no room: what they send stays with them."""
        self._holding = hold
        for link in self._links.values():
            self.watch(link)

    def park(self, link: Link[ClientT]) -> None:
        """Neither read from a client that does not read, nor go on with its requests."""
        self._backlog.park(link, Reason.UNREAD)

    def unpark(self, link: Link[ClientT]) -> None:
        """Serve a parked client that reads again."""
        self._backlog.unpark(link, Reason.UNREAD)

    def watch(self, link: Link[ClientT]) -> None:
        """Read what comes from a client, unless there is a reason not to."""
        if not link.ending and link.client in self._links:
            self.loop.watch_readable(link.sock, None if self._holding else self._backlog.reader(link))

    # Clients

    def _welcome(self, arrivals: list[Arrival]) -> None:
        """Take in new clients. Asking the system about all at once takes a fraction of the time."""
        guard = self._guard
        assert guard is not None, "it has listeners"
        for (sock, address), owner in zip(arrivals, guard.owners(arrivals), strict=True):
            self._take_in(guard, sock, address, owner)

    def _take_in(self, guard: ClientGuard, sock: Socket, address: Any, user: Owner) -> None:
        peer = f"{address[0]}:{address[1]}"
        try:
            if self.loop.capacity is not None and self.connections >= self.loop.capacity:
                raise LimitError(f"this system's select() watches no more than {self.loop.capacity} clients")
            guard.check(sock, user)
            client = self.core.open(peer)
        except (LimitError, AccessError) as error:
            hint = f". hint: {error.hint}" if error.hint else ""
            logger.warning("refused %s: %s%s", peer, error.message, hint, extra={"peer": peer})
            self.core.note_error(peer, f"refused: {error.message}")
            sock.close()
            return
        if self.door is None:
            link = Link(self, sock, client)
        else:
            is_here = isinstance(user, int) or _is_from_here(sock, address)
            link = self.door.link(self, sock, client, is_here=is_here)
        self._links[client] = link
        self.watch(link)

    def admit(self, link: Link[ClientT], data: bytes) -> None:
        """Serve a local client that speaks no TLS, and has sent this."""
        plain = self._links[link.client] = Link(self, link.sock, link.client)
        self.watch(plain)
        plain.on_readable(data)

    def note_error(self, client: ClientT, reason: str) -> None:
        """Record why a client is about to be closed."""
        client.why = reason
        logger.warning("closed %s: %s", client.peer, reason, extra={"peer": client.peer})
        self.core.note_error(client.peer, reason)

    def end(self, link: Link[ClientT]) -> None:
        """Close a client that has ended, when all is sent, or the time for that is over."""
        link.flush()
        is_owed = link.unsent is not None or link.client.is_owed
        is_late = time.monotonic() > self.loop.turn.now + SLICE
        if link.client not in self._links or not (is_owed or is_late):
            self.drop(link)
        elif not link.ending:
            link.ending = True
            self._backlog.forget(link)
            self.loop.watch_readable(link.sock, None)
            if is_owed:
                self.core.end(link.client)
                self.deliver()
            else:  # many are leaving at once: others need not wait for that
                self._leaving.append(link)
                self._rest.go_on()

    def refuse(self, link: Link[ClientT], error: ProtocolError) -> None:
        """Close because of a violation, but first send the replies to the requests before it."""
        self.note_error(link.client, error.message)
        if error.replies:
            link.send(error.replies)
        self.end(link)
        self.deliver()

    def drop(self, link: Link[ClientT]) -> None:
        """Close at once, whatever is unsent."""
        link.flush()
        if self._links.get(link.client) is not link:  # it is closed already
            return
        link.expect_no_room()
        if not self._closed:  # then nobody will ask for the counts
            link.count_bytes()
        self.let_go(link)
        link.close()
        self.deliver()

    def let_go(self, link: Link[ClientT]) -> None:
        """Forget a client, and leave its socket open. Call `Link.flush` before."""
        self.loop.watch_readable(link.sock, None)
        del self._links[link.client]
        self._backlog.forget(link)
        self.unanswered.discard(link)
        self.core.close(link.client)

    def take_over(self, link: Link[ClientT], client: ClientT, data: bytes) -> None:
        """Serve the client of a link that another pump has let go, and the bytes that it has sent."""
        link.move(self, client)
        self._links[client] = link
        self.watch(link)
        link.rest_if_full()
        link.on_readable(data)

    def _enter(self, link: Link[ClientT], name: bytes) -> None:
        """Refuse a client that names a store: there is only one here."""
        wanted = name.decode(errors="replace")
        self.refuse(
            link,
            ProtocolError(f"it wants the store named {wanted!r}, but there is only one here, without a name"),
        )
