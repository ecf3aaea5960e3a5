"""A worker: a process that serves some clients of a server, as a relay within it.

It accepts on the server's own port, and asks the server's first process, the *head*, for its clients. What
only the head can answer goes there as it is: a SNAPSHOT, over a connection of its own, and the sessions of
relays, so that these survive when a worker ends. A connection to the head is one half of a socket pair, whose
other half is handed over: the head has no address, and nobody else can reach it. A worker does not outlive
its head.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

from rallypoint.errors import ProtocolError
from rallypoint.store.core.context import Close, Pause
from rallypoint.store.core.snapshots import SnapshotCallback
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.relay.core.relay_client import RelayClient
from rallypoint.store.relay.outgoing import Control, Message, Stream
from rallypoint.store.relay.reaching import Place, StoreAddress
from rallypoint.store.relay.relay import Relay, new_token
from rallypoint.store.rollcall.identity import WORKER, Identity, Role, hello_key
from rallypoint.store.rollcall.question import Question
from rallypoint.store.server.loops.listening import Arrival
from rallypoint.store.server.loops.loop import Callback, Loop
from rallypoint.store.server.loops.pump import Pump, about_this_process
from rallypoint.store.server.process.child import run
from rallypoint.store.server.process.line import Order
from rallypoint.store.wire.encoding import EMPTY_BLOB, VALIDATE, request, unpack_u64
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op

_MOST_UNSENT: Final = 4 << 20
"""A relay of which so much waits to be taken by the head is not read until it is."""
_DIAL_SECONDS: Final = 0.1
_HELLO: Final = request(Op.DELETE_KEY, b"/" + hello_key(Identity(role=Role.TOOL)).encode())
_HELLO_ANSWER_BYTES: Final = 8


def main() -> None:
    """Be a worker."""
    run(_build)


def _build(order: Order, loop: Loop, listeners: list[socket.socket]) -> Pump[Any]:
    control = listeners.pop()
    return Worker(loop, order["number"], order["head"], control, listeners, Limits(**order["limits"]))


class _Client(RelayClient):
    """A client of a worker; the relay behind it, if it is one, has its session with the head."""

    __slots__ = ("_core", "_stream")

    def __init__(self, core: WorkerCore, peer: str) -> None:
        super().__init__(core, core.combiner, core.request_table, peer)
        self._core = core
        self._stream: Stream | None = None

    def snapshot(self, question: bytes) -> bytes | None:
        """What the head knows, which is all."""
        Question.from_json(question)  # or it breaks a rule
        self._begin_snapshot()
        self._core.worker.request_from_head(question, self._take_snapshot)
        return None if self._is_paused else b""

    # A relay's session

    def open_session(self, token: bytes, tail: bytes) -> bytes:
        if self._stream is not None:
            raise ProtocolError("a second SESSION on one connection")
        self.check_free()
        self.has_session()
        self._stream = self._core.worker.dial(
            self.peer, on_data=self._on_answer, on_closed=self._on_lost, on_room=self._on_room
        )
        return self._pass_on(VALIDATE + request(Op.SESSION, token, tail=tail))

    def batch(self, payload: bytes) -> bytes:
        return self._pass_on(request(Op.BATCH, payload))

    def present(self) -> bytes:
        return self._pass_on(request(Op.PRESENT))

    def bye(self) -> bytes:
        return self._pass_on(request(Op.BYE))

    def beat(self) -> bytes:
        return EMPTY_BLOB if self._stream is None else self._pass_on(request(Op.BEAT))

    def _pass_on(self, data: bytes) -> bytes:
        if self._stream is None:
            raise ProtocolError("a request of a session, on a connection that has none")
        self._stream.send(data)
        if self._stream.unsent_bytes > _MOST_UNSENT:
            self._core.outbox.others.append(Pause(self))
        return b""

    def _on_answer(self, data: bytes) -> None:
        """The head has answered."""
        self._send(data)
        self._core.worker.deliver()

    def _on_room(self) -> None:
        """The head has taken all."""
        self._core.outbox.others.append(Pause(self, is_over=True))
        self._core.worker.deliver()

    def _on_lost(self, why: str) -> None:
        self._core.outbox.others.append(Close(self, ProtocolError(f"its session is gone: {why}")))
        self._core.worker.deliver()

    def close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()


class WorkerCore(RelayCore):
    """The clients of a worker, and what it knows."""

    kind = "worker"

    __slots__ = ("worker",)

    worker: Worker

    def _make(self, peer: str) -> RelayClient:
        return _Client(self, peer)

    def close(self, client: RelayClient) -> None:
        super().close(client)
        assert isinstance(client, _Client)
        client.close_stream()


class _HeadSnapshot:
    """A request for a snapshot to the head, and the callers that share it."""

    def __init__(self, worker: Worker, question: bytes) -> None:
        self._worker = worker
        self._question = question
        self._heard = bytearray()
        self.delivers: list[SnapshotCallback] = []
        self.later: list[SnapshotCallback] = []
        """Callers of the same request since: they need a newer snapshot."""
        self._stream = worker.dial(worker.name, on_data=self._on_data, on_closed=self._on_closed)
        self._stream.send(VALIDATE + _HELLO + request(Op.SNAPSHOT, question))

    def _on_data(self, data: bytes) -> None:
        self._heard += data
        start = _HELLO_ANSWER_BYTES + 8
        if len(self._heard) >= start:
            end = start + unpack_u64(self._heard, _HELLO_ANSWER_BYTES)[0]
            if len(self._heard) >= end:
                self._stream.close()
                self._end(bytes(self._heard[start:end]))

    def _on_closed(self, _: str) -> None:
        self._end(b"")

    def _end(self, snapshot: bytes) -> None:
        self._worker.end_request(self._question, self.later)
        for deliver in self.delivers:
            deliver(snapshot)
        self._worker.deliver()


class Worker(Relay):
    """Serves clients on listening sockets, which it owns from now on, by asking the head."""

    def __init__(
        self,
        loop: Loop,
        number: int,
        head: int,
        control: socket.socket,
        listeners: Sequence[socket.socket],
        limits: Limits,
    ) -> None:
        """`head` is the number of its process."""
        core = WorkerCore(new_token(), limits, loop.turn, about_this_process(loop))
        core.worker = self
        upstream = StoreAddress([Place("process", head, [])], knows_sessions=True)
        super().__init__(loop, upstream, listeners, core=core)
        self.name = f"{WORKER}{number}:{core.about.pid}"
        """As the head knows it."""
        self._requests: dict[bytes, _HeadSnapshot] = {}
        self._reported_clients = 0
        self._has_dialled = False
        self._control = Control(loop, control, on_message=self._on_message, on_end=loop.stop)

    def start(self, on_tick: Callback = lambda: None) -> None:
        super().start(on_tick)
        self._control.send({"ready": True})

    def close(self) -> None:
        super().close()
        self._control.close()

    # The head

    def dial(
        self,
        peer: str,
        *,
        on_data: Callable[[bytes], None],
        on_closed: Callable[[str], None],
        on_room: Callable[[], None] = lambda: None,
    ) -> Stream:
        """A connection to the head, which knows it by this name."""
        ours, theirs = socket.socketpair()
        self._control.send({"peer": peer}, theirs)
        return Stream(self.loop, ours, on_data=on_data, on_closed=on_closed, on_room=on_room)

    def request_from_head(self, question: bytes, deliver: SnapshotCallback) -> None:
        """Deliver the head's snapshot; nothing if it has none. Equal questions share a request."""
        pending = self._requests.get(question)
        if pending is not None:
            pending.later.append(deliver)
        else:
            pending = self._requests[question] = _HeadSnapshot(self, question)
            pending.delivers.append(deliver)

    def end_request(self, question: bytes, later: Sequence[SnapshotCallback]) -> None:
        """The head has answered, or is gone; send what has been requested since."""
        del self._requests[question]
        if later and not self._closed:
            pending = self._requests[question] = _HeadSnapshot(self, question)
            pending.delivers.extend(later)

    def _on_message(self, message: Message, _: socket.socket | None) -> None:
        self._relay.clients.elsewhere = message["elsewhere"]

    def _welcome(self, arrivals: list[Arrival]) -> None:
        super()._welcome(arrivals)
        if not self._reported_clients:
            self._report_clients()

    def _tick(self) -> None:
        super()._tick()
        self._report_clients()

    def _report_clients(self) -> None:
        count = len(self._relay.clients)
        if count != self._reported_clients:
            self._reported_clients = count
            self._control.send({"clients": count})

    def _dial(self) -> None:
        self.loop.later(_DIAL_SECONDS if self._has_dialled else 0, self._connect)
        self._has_dialled = True

    def _connect(self) -> None:
        if self._connection is None and not self._closed:
            connection = self.dial(self.name, on_data=self._on_data, on_closed=self._on_closed)
            connection.send(VALIDATE)
            self._on_won(connection, self._upstream.name)

    def _go_down(self, why: str) -> None:
        """The head is gone, and this worker is about to end; or the session is, which is told then."""
