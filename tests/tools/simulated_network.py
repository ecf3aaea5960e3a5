"""The network of a simulation: connections that deliver in pieces and break, and who sits at their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Union

from rallypoint.errors import ProtocolError, SessionLostError
from rallypoint.store.core.clients import Client
from rallypoint.store.core.context import Close, DriverTask, GoOn, Other
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.sessions import Session
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.wire.encoding import VALIDATE
from simulated_ranks import FailedError, Rank

if TYPE_CHECKING:
    from simulated_nodes import Cluster
    from simulation import Simulation

Task = Callable[[], None]
Place = Union["Node", "Cluster"]
"""Where clients connect to: a server, a relay, or several servers of which one leads."""


class Pipe:
    """One direction of a connection: bytes that are under way."""

    __slots__ = ("_deliver", "_is_queued", "_net", "_slowness", "data", "is_cut", "on_end")

    def __init__(self, net: Simulation, deliver: Callable[[bytes], None]) -> None:
        self._net = net
        self._deliver = deliver
        self._is_queued = False
        self._slowness = net.rng.choice(net.slownesses)
        self.data = bytearray()
        self.is_cut = False
        """Whether what is written from now on is lost."""
        self.on_end: Task | None = None
        """What to do when all has been delivered: the writer has closed its side."""

    def write(self, data: bytes) -> None:
        if data and not self.is_cut:
            self.data += data
            self._queue()

    def end(self, on_end: Task) -> None:
        self.is_cut = True
        self.on_end = on_end
        self._queue()

    def _queue(self) -> None:
        if self._is_queued:
            return
        self._is_queued = True
        net = self._net
        net.moving += 1
        if net.rng.random() < self._slowness:
            net.after(net.rng.randint(1, net.slow_steps), self._move)
        else:
            net.ready.append(self._move)

    def _move(self) -> None:
        self._is_queued = False
        self._net.moving -= 1
        data, rng = self.data, self._net.rng
        if data:
            count = len(data) if rng.random() < 0.6 else rng.randint(1, len(data))
            chunk = bytes(data[:count])
            del data[:count]
            if data or self.on_end is not None:
                self._queue()
            self._deliver(chunk)
        elif self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end()


class Link:
    """One connection, with an end at a server or relay and one at who opened it."""

    __slots__ = ("connection", "down", "endpoint", "excuse", "is_broken", "is_silent", "net", "server", "up")

    def __init__(self, net: Simulation, server: Node, endpoint: Relay | Rank) -> None:
        self.net = net
        self.server = server
        self.endpoint = endpoint
        self.connection: Client | None = None  # None: the server's end is closed
        self.excuse: str | None = None
        self.is_broken = False
        self.is_silent = False
        self.up = Pipe(net, lambda data: server.receive(self, data))
        self.down = Pipe(net, lambda data: endpoint.receive(self, data))

    def send(self, data: bytes) -> None:
        self.up.write(data)

    def abandon(self) -> None:
        """Who opened it is gone: what is under way may be lost, and the server notices sometime."""
        self._cut(self.up)
        if not self.is_silent:
            self.net.broken += 1
        self.is_silent = False
        self.net.after(self.net.some_time(), self._drop_at_server)

    def swallow(self) -> None:
        """From now on nothing gets through, in either direction, and nobody is told."""
        self.is_broken = self.is_silent = True
        self.net.broken += 1
        for pipe in (self.up, self.down):
            pipe.is_cut = True
            pipe.data.clear()

    def break_(self) -> None:
        """Both directions break at some point, and each end notices by itself."""
        if self.is_broken:
            return
        self.is_broken = True
        self._cut(self.down)
        self.abandon()
        self.net.broken += 1
        self.net.after(self.net.some_time(), self._drop_at_client)

    def close_at_server(self, excuse: str | None) -> None:
        """The server has closed it; what it has sent before may still be read."""
        self.connection = None
        if self.excuse is None:
            self.excuse = excuse
        if not self.down.is_cut:
            self.down.end(lambda: self.endpoint.lose(self))

    def _cut(self, pipe: Pipe) -> None:
        if not pipe.is_cut:
            pipe.is_cut = True
            if self.net.rng.random() < 0.5:
                del pipe.data[self.net.rng.randint(0, len(pipe.data)) :]

    def _drop_at_server(self) -> None:
        self.net.broken -= 1
        self.up.data.clear()
        self.server.drop(self)

    def _drop_at_client(self) -> None:
        self.net.broken -= 1
        self.down.data.clear()
        self.endpoint.lose(self)


class Node:
    """A server or a relay, as its clients see it: the pump of a ServerCore."""

    def __init__(self, net: Simulation, name: str, front: ServerCore[Any]) -> None:
        self.net = net
        self.name = name
        self.front = front
        self.links: dict[Client, Link] = {}
        self.children: list[Relay] = []
        self._heard: Link | None = None  # the connection that has sent something last

    @property
    def sessions(self) -> Iterable[Session]:
        return self.front.sessions

    @property
    def now(self) -> float:
        return self.net.now

    def find(self) -> Node | None:
        return self

    def check_invariants(self) -> None:
        self.front.check_invariants()

    def accept(self, link: Link, peer: str) -> None:
        self.front.turn.now = self.now
        link.connection = self.front.open(peer)
        self.links[link.connection] = link

    def receive(self, link: Link, data: bytes) -> None:
        if link.connection is None:
            return
        self._heard = link
        try:
            link.down.write(link.connection.receive(data))
        except ProtocolError as error:
            link.down.write(error.replies)
            self._close(link.connection, error, None)
        self.settle()

    def drop(self, link: Link) -> None:
        """The connection is seen to be gone."""
        connection = link.connection
        if connection is None:
            return
        if self.net.rng.random() < 0.2:
            self.front.turn.now = self.now
            self.front.end(connection)  # an orderly end comes first
            self.settle()
        if link.connection is not None:
            link.connection = None
            del self.links[connection]
            self.front.close(connection)
            self.settle()

    def settle(self) -> None:
        """Send the notices and close the doomed, as a pump does after each event."""
        outbox = self.front.outbox
        while outbox.woken or outbox.others:
            for client in outbox.take_woken():
                link = self.links.get(client)
                if link is not None:
                    link.down.write(client.take_notice())
                    if client.notice_bytes:
                        outbox.woken.append(client)
            if outbox.woken:
                continue
            for other in outbox.take_others():
                self.do(other)

    def do(self, other: Other) -> None:
        """What the core wants besides."""
        if isinstance(other, Close) and other.client in self.links:
            self._close(other.client, other.error, None)
        elif isinstance(other, GoOn) and other.client in self.links:
            self._later(partial(self._go_on, self.links[other.client]))
        elif other is DriverTask.LIGHTEN:
            self.front.lighten()
        elif other is DriverTask.REST:
            self._later(self._go_on_with_rest)

    def _later(self, task: Task) -> None:
        """Others have their turn before it."""
        self.net.moving += 1
        self.net.after(self.net.rng.randint(1, 3), task)

    def _go_on(self, link: Link) -> None:
        self.net.moving -= 1
        self.front.turn.now = self.now
        self.receive(link, b"")

    def _go_on_with_rest(self) -> None:
        self.net.moving -= 1
        self.front.turn.now = self.now
        if self.front.go_on():
            self._later(self._go_on_with_rest)
        self.settle()

    def _close(self, client: Client, error: ProtocolError, excuse: str | None) -> None:
        link = self.links.pop(client)
        relay = link.endpoint
        if isinstance(relay, Relay) and relay.uplink is link and excuse is None:
            if not self._may_be_displaced(link, relay):
                raise FailedError(f"{self.name} closes the connection of {relay.name}: {error.message}")
            self.net.counts["displaced late"] += 1
        self.front.close(client)
        link.close_at_server(excuse)

    def _may_be_displaced(self, link: Link, relay: Relay) -> bool:
        """A SESSION that was long under way, on a connection that is gone, may displace the present one."""
        return self._heard is not None and self._heard is not link and self._heard.endpoint is relay

    def close_all(self, excuse: str) -> None:
        for client in list(self.links):
            self._close(client, ProtocolError(excuse), excuse)

    def pass_time(self) -> None:
        before = [session.token for session in self.front.sessions]
        self.front.turn.now = self.now
        for client, why in self.front.overdue():
            self._close(client, ProtocolError(why), why)
        after = {session.token for session in self.front.sessions}
        for token in before:
            if token not in after:
                self._excuse(token)
        self.settle()

    def _excuse(self, token: bytes) -> None:
        for child in self.children:
            if child.token == token:
                child.may_lose_session = True


class Relay(Node):
    """A relay: a Node that is a client of another one, too."""

    def __init__(self, net: Simulation, name: str, parent: Place) -> None:
        self.parent = parent
        self.uplink: Link | None = None
        self.token = b""
        self.may_lose_session = False
        self._is_due = False
        self.relay = RelayCore(self._new_token(net))
        super().__init__(net, name, self.relay)
        parent.children.append(self)

    def _new_token(self, net: Simulation) -> bytes:
        self.token = net.tokens.to_bytes(16, "big")
        net.tokens += 1
        return self.token

    def do(self, other: Other) -> None:
        if other is DriverTask.FLUSH:
            self._be_due()
        else:
            super().do(other)

    @property
    def is_at_rest(self) -> bool:
        return not self._is_due and self.relay.upstream.is_up

    def connect(self) -> None:
        if self.uplink is not None:
            return
        server = self.parent.find()
        if server is None:
            self.net.after(self.net.some_time() + 1, self.connect)
            return
        self.net.counts["connects"] += 1
        self.uplink = Link(self.net, server, self)
        server.accept(self.uplink, self.name)
        self.uplink.send(VALIDATE + self.relay.connect())

    def receive(self, link: Link, data: bytes) -> None:
        """From a client, or from upstream."""
        if link.endpoint is not self:
            super().receive(link, data)
            return
        if link is not self.uplink:
            return
        try:
            link.send(self.relay.receive_upstream(data))
        except SessionLostError as error:
            if not self.may_lose_session:
                raise FailedError(f"{self.name} has lost its session: {error.message}") from error
            self._reset()
        self.settle()

    def lose(self, link: Link) -> None:
        if link is self.uplink:
            self.uplink = None
            self.relay.lose_upstream()
            self.net.after(self.net.some_time(), self.connect)

    def beat(self) -> None:
        """Ask for a sign of life, and give up a connection that has been silent for too long."""
        link = self.uplink
        if link is not None:
            try:
                link.send(self.relay.upstream.beat())
            except ProtocolError:
                self.net.counts["given up"] += 1
                link.abandon()
                self.lose(link)

    def tick(self) -> None:
        if self.uplink is not None:
            self.uplink.send(self.relay.upstream.tick())

    def _be_due(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.net.ready.append(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        data = self.relay.flush()
        if data:
            assert self.uplink is not None
            self.uplink.send(data)

    def _reset(self) -> None:
        """Its session is lost, and so are all its clients."""
        self.net.counts["resets"] += 1
        self.may_lose_session = False
        if self.uplink is not None:
            self.uplink.abandon()
            self.uplink = None
        self.close_all("its relay has lost its session")
        self.settle()
        self.relay.reset(self._new_token(self.net))
        self._leave_children()
        self.net.after(self.net.some_time(), self.connect)

    def restart(self) -> None:
        """It is killed, and another takes its place."""
        self.net.counts["kills"] += 1
        links, self.links = list(self.links.values()), {}
        for link in links:
            link.connection = None
            if isinstance(link.endpoint, Relay):
                link.break_()
            else:
                link.close_at_server("its relay was killed")
        if self.uplink is not None:
            self.uplink.abandon()
            self.uplink = None
        self.may_lose_session = False
        self.front = self.relay = RelayCore(self._new_token(self.net))
        self._leave_children()
        self.net.after(self.net.some_time(), self.connect)

    def _leave_children(self) -> None:
        for child in self.children:
            child.may_lose_session = True
