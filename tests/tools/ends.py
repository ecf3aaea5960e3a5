"""The ends of connections, moved by hand: clients of a server or relay, and relays as the tests play them.

What goes over the wire is written and read in here from docs/reference/sessions.md, apart from the package,
so that a mistake in one does not hide in the other.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from typing import Any, NamedTuple

from rallypoint.errors import ProtocolError
from rallypoint.store.core.clients import Client
from rallypoint.store.core.context import Close, DriverTask, Enter, GoOn, Other, Pause
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.turn import Turn
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.wire.encoding import VALIDATE
from rallypoint.store.wire.limits import Limits

TOKEN = bytes(range(16))
PRESENT = b"\x22"
BYE = b"\x23"
BEAT = b"\x2a"
SIGN_OF_LIFE = bytes(8)

DONE, REFUSED, CALLED, UNCHANGED, _, PIECE = range(6)

Item = tuple[int, int, bytes]
"""Tag, status and content."""


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def i64(number: int) -> bytes:
    return struct.pack("<q", number)


def blob(content: bytes) -> bytes:
    return u64(len(content)) + content


def session(token: bytes = TOKEN, *, keep: int = 60_000, taken: int = 0, known: bool = False) -> bytes:
    return b"\x20" + blob(token) + u64(keep) + u64(taken) + u64(known)


def batch(number: int, taken: int, *requests: bytes) -> bytes:
    return b"\x21" + blob(u64(number) + u64(taken) + b"".join(map(blob, requests)))


def arrive(key: bytes, size: int, count: int) -> bytes:
    return b"\x24" + blob(key) + i64(size) + u64(count)


def leave(tag: int, count: int = 1) -> bytes:
    return b"\x25" + u64(tag) + u64(count)


def wait_in_turn(*keys: bytes) -> bytes:
    return b"\x26" + u64(len(keys)) + b"".join(map(blob, keys))


def recall(key: bytes) -> bytes:
    return b"\x27" + blob(key)


def pop_called(key: bytes, tag: int) -> bytes:
    return b"\x28" + blob(key) + u64(tag)


def end_of_wait(taken: int) -> bytes:
    return b"\x00" + u64(taken)


def frame(number: int, taken: int, *items: Item) -> bytes:
    parts = [u64(tag) + bytes([status]) + blob(content) for tag, status, content in items]
    return blob(u64(number) + u64(taken) + b"".join(parts))


def note(trouble: str = "", advice: str = "") -> bytes:
    return blob(bytes(16) + json.dumps([trouble, advice], separators=(",", ":")).encode())


def welcome(answer: int = 0, taken: int = 0, most_bytes: int = 1 << 20, keeps: int = 60_000) -> bytes:
    return bytes([answer]) + u64(keeps) + u64(taken) + u64(most_bytes)


class Frame(NamedTuple):
    number: int
    taken: int
    items: list[Item]


class Welcome(NamedTuple):
    answer: int
    keeps_ms: int
    taken: int
    most_bytes: int


def read_frames(data: bytes) -> list[Frame]:
    """Whole frames; anything else fails."""
    found = []
    position = 0
    while position < len(data):
        length, number, taken = struct.unpack_from("<QQQ", data, position)
        end = position + 8 + length
        position += 24
        items: list[Item] = []
        while position < end:
            tag, status, size = struct.unpack_from("<QBQ", data, position)
            position += 17 + size
            items.append((tag, status, data[position - size : position]))
        assert position == end <= len(data)
        found.append(Frame(number, taken, items))
    return found


class Batch(NamedTuple):
    number: int
    taken: int
    requests: list[bytes]


def read_upstream(data: bytes) -> list[Batch | bytes]:
    """What a relay has sent: batches, and PRESENTs as they are."""
    found: list[Batch | bytes] = []
    position = 0
    while position < len(data):
        if data[position : position + 1] != b"\x21":
            found.append(data[position : position + 1])
            position += 1
            continue
        length, number, taken = struct.unpack_from("<QQQ", data, position + 1)
        end = position + 9 + length
        position += 25
        requests = []
        while position < end:
            (size,) = struct.unpack_from("<Q", data, position)
            position += 8 + size
            requests.append(data[position - size : position])
        assert position == end <= len(data)
        found.append(Batch(number, taken, requests))
    return found


def serve(core: ServerCore[Any], client: Client, data: bytes) -> bytes:
    """All replies of a core that has no other client at work; it may stop and go on as often as it likes."""
    replies = client.receive(data)
    while (on := GoOn(client)) in core.outbox.others:
        core.outbox.others.remove(on)
        replies += client.receive(b"")
    return replies


class End:
    """A client's end of a connection. What it is sent is kept until `take`."""

    def __init__(self, desk: Desk, connection: Client) -> None:
        self.desk = desk
        self.connection = connection
        self.error: ProtocolError | None = None
        """Why it was closed, or is as soon as it is owed nothing, if there is a reason."""
        self.is_ending = False
        """Whether nothing more is read from it, as it has ended or broken a rule."""
        self._unread: deque[bytes | None] = deque()
        self._got = b""

    def send(self, data: bytes) -> None:
        self.receive(data)
        self.desk.settle()

    def receive(self, data: bytes | None) -> None:
        """The server reads this, or None for the end, as soon as it may."""
        may_read = not self.has_work and not self.desk.is_paused(self.connection)
        self._unread.append(data)
        if may_read:
            self.go_on()

    @property
    def has_work(self) -> bool:
        """Whether it has sent something that is not read yet, or not carried out."""
        return not self.is_ending and (self.connection.has_rest or bool(self._unread))

    def go_on(self) -> None:
        """The server goes on with what it has read before; if that was all, it reads the next piece."""
        if self.is_ending:
            return
        data = self._unread.popleft() if self._unread and not self.connection.has_rest else b""
        if data is None:
            self.end()
            return
        try:
            self._got += self.connection.receive(data)
        except ProtocolError as error:
            self.be_refused(error)

    def be_refused(self, error: ProtocolError) -> None:
        """It is closed, but not before the replies to what it had asked before."""
        self._got += error.replies
        self.error = error
        self.end()

    def end(self) -> None:
        """Close, but not before all that it is owed is there."""
        self.is_ending = True
        if self.connection.is_owed:
            self.desk.front.end(self.connection)
        else:
            self.be_closed(self.error)

    def ask(self, data: bytes) -> bytes:
        self.send(data)
        return self.take()

    def take(self) -> bytes:
        got, self._got = self._got, b""
        return got

    def notice(self) -> None:
        notices = [self._got, self.connection.take_notice()]
        while self.connection.notice_bytes:
            notices.append(self.connection.take_notice())
        self._got = b"".join(notices)
        if self.is_ending and not self.connection.is_owed:
            self.be_closed(self.error)

    def be_closed(self, error: ProtocolError | None) -> None:
        self.error = error
        self.is_ending = True
        self.desk.ends.pop(self.connection, None)
        self.desk.front.close(self.connection)

    def close(self) -> None:
        self.be_closed(None)
        self.desk.settle()


class Desk:
    """A server or a relay, and the ends of all its clients: the pump of a ServerCore, without any socket."""

    def __init__(self, front: ServerCore[Any]) -> None:
        self.front = front
        self.ends: dict[Client, End] = {}
        self.wanted: list[Other] = []
        self._paused: set[Client] = set()
        self.have_paused_together = False
        """Whether several clients were paused at a time: who of them goes on first is left to chance."""
        self._is_crowded = False
        self._left: deque[Client] = deque()  # those that are to be gone on with, or read

    def open(self, count: int = 1) -> list[End]:
        opened = []
        for _ in range(count):
            end = End(self, self.front.open(f"client {len(self.ends)}"))
            self.ends[end.connection] = end
            assert end.ask(VALIDATE) == b""
            opened.append(end)
        return opened

    def settle(self) -> None:
        self.empty_outbox()
        self.front.check_invariants()

    def empty_outbox(self) -> None:
        outbox = self.front.outbox
        while outbox.woken or outbox.others or (self._left and not self._is_crowded):
            for client in outbox.take_woken():
                if client in self.ends:
                    self.ends[client].notice()
            if not outbox.woken:
                for other in outbox.take_others():
                    self.do(other)
            if self._left and not self._is_crowded and not outbox.woken and not outbox.others:
                self._go_on(self._left.popleft())

    def _go_on(self, client: Client) -> None:
        end = self.ends.get(client)
        if end is not None and client not in self._paused and not end.is_ending:
            end.go_on()
            if end.has_work and not client.has_rest:
                self._left.append(client)

    @property
    def has_paused(self) -> bool:
        """Whether a client is paused."""
        return any(client in self.ends for client in self._paused)

    def is_paused(self, client: Client) -> bool:
        """Whether the core wants a client neither read nor gone on with, also if that was just said."""
        said = [each for each in self.front.outbox.others if isinstance(each, Pause)]
        of_client = [each.is_over for each in said if each.client is client]
        return not of_client[-1] if of_client else client in self._paused

    def wants_another(self, client: Client) -> bool:
        """Whether a client has just said that it means another store."""
        return any(isinstance(each, Enter) and each.client is client for each in self.front.outbox.others)

    def do(self, other: Other) -> None:
        """What the core wants; all but clients to be closed or gone on with is kept for the test."""
        if isinstance(other, Close):
            self._close(other)
        elif isinstance(other, GoOn):
            self._left.append(other.client)
        elif isinstance(other, Pause):
            if not other.is_over:
                self._paused.add(other.client)
                self.have_paused_together |= len(self._paused) > 1
                return
            self._paused.remove(other.client)
            if other.client in self.ends and self.ends[other.client].has_work:
                self._left.append(other.client)
        elif isinstance(other, Enter):
            if other.client in self.ends:
                self.ends[other.client].be_refused(
                    ProtocolError(f"there is no store named {other.name!r} here")
                )
        elif other is DriverTask.CROWDED or other is DriverTask.ROOM:
            self._is_crowded = other is DriverTask.CROWDED
        elif other is DriverTask.LIGHTEN:
            self.front.lighten()
        elif other is DriverTask.REST:
            if self.front.go_on():
                self.front.outbox.others.append(other)
        else:
            self.wanted.append(other)

    def _close(self, close: Close[Any]) -> None:
        end = self.ends.get(close.client)
        if end is not None and close.at_once:
            end.be_closed(close.error)
        elif end is not None and not end.is_ending:
            end.be_refused(close.error)

    def take(self) -> list[Other]:
        """What the core has wanted besides since it was last asked."""
        wanted, self.wanted = self.wanted, []
        return wanted

    def pass_time(self, now: float) -> None:
        self.front.turn.now = now
        for client, _ in self.front.overdue():
            self.ends[client].close()
        self.settle()


class Played:
    """A relay's side of a session, as the test plays it; it has one connection at a time."""

    def __init__(self, desk: Desk, token: bytes = TOKEN, *, is_present: bool = True) -> None:
        self.desk = desk
        self.token = token
        self.number = 0
        self.taken = 0
        self._pieces: dict[int, bytes] = {}
        self.end: End
        assert self.open(known=False).answer == 0
        if is_present:
            assert self.present() == []

    def open(self, *, known: bool = True, taken: int | None = None, keep: int = 60_000) -> Welcome:
        """Open the session, or take it up; what comes with the welcome is for `items`."""
        (self.end,) = self.desk.open()
        taken = self.taken if taken is None else taken
        data = self.end.ask(session(self.token, keep=keep, taken=taken, known=known))
        self._unread = data[25:]
        return Welcome(*struct.unpack("<BQQQ", data[:25]))

    def frames(self) -> list[Frame]:
        """The frames that have come since."""
        data, self._unread = self._unread + self.end.take(), b""
        found = read_frames(data)
        for each in found:
            assert each.number == self.taken + 1
            self.taken = each.number
        return found

    def items(self) -> list[Item]:
        """The answers that have come whole."""
        found = []
        for tag, status, content in [item for each in self.frames() for item in each.items]:
            content = self._pieces.pop(tag, b"") + content
            if status == PIECE:
                self._pieces[tag] = content
            else:
                found.append((tag, status, content))
        return found

    def send(self, *requests: bytes) -> list[Item]:
        self.number += 1
        self.end.send(batch(self.number, self.taken, *requests))
        return self.items()

    def present(self) -> list[Item]:
        self.end.send(PRESENT)
        return self.items()

    def lose(self) -> None:
        self.end.close()

    def come_back(self) -> list[Item]:
        assert self.open().answer == 1
        return self.present()


class Wire:
    """A relay's connection to its upstream: nothing moves on it but by `push` and `pull`, or `run`."""

    def __init__(self, relay: Desk, upstream: Desk) -> None:
        assert isinstance(relay.front, RelayCore)
        self.relay = relay
        self.core = relay.front
        self.upstream = upstream
        self.end: End
        self.up = b""
        self.connect()

    def connect(self) -> None:
        (self.end,) = _unvalidated(self.upstream)
        self.up = VALIDATE + self.core.connect()

    def flush(self) -> None:
        self.up += self.core.flush()

    def push(self, count: int | None = None) -> None:
        """Let so many bytes come to the upstream, or all."""
        self.flush()
        count = len(self.up) if count is None else count
        data, self.up = self.up[:count], self.up[count:]
        if data:
            self.end.send(data)

    def pull(self, count: int | None = None) -> int:
        """Let so many bytes of what the upstream has sent come to the relay, or all; the rest is lost."""
        data = self.end.take()[:count]
        if data:
            self.up += self.core.receive_upstream(data)
        self.relay.settle()
        return len(data)

    def run(self) -> None:
        """Until nothing moves."""
        while True:
            self.push()
            if not self.pull() and not self.up:
                return

    def lose(self) -> None:
        """The connection breaks, and what is under way is lost; both ends notice."""
        self.core.lose_upstream()
        self.end.close()


def _unvalidated(desk: Desk) -> list[End]:
    end = End(desk, desk.front.open("relay"))
    desk.ends[end.connection] = end
    return [end]


def relay_on(
    upstream: Desk, number: int = 1, limits: Limits | None = None, turn: Turn | None = None
) -> tuple[Desk, Wire]:
    """A relay that has been welcomed by its upstream."""
    relay = Desk(RelayCore(number.to_bytes(16, "big"), limits, turn))
    wire = Wire(relay, upstream)
    wire.run()
    return relay, wire


class ByHand:
    """A relay whose upstream the test plays: what it sends is read, and answered as the test likes."""

    def __init__(self, limits: Limits | None = None, most_bytes: int = 1 << 20) -> None:
        self.core = RelayCore(TOKEN, limits)
        self.desk = Desk(self.core)
        self.number = 0
        self.core.connect()
        self.most_bytes = most_bytes
        assert self.core.receive_upstream(welcome(most_bytes=most_bytes)) == PRESENT

    def asked(self) -> list[bytes]:
        """The requests of the batch that the relay sends now; none, if it sends none."""
        sent = read_upstream(self.core.flush())
        self.desk.settle()  # what no batch has room for is refused
        assert len(sent) <= 1
        return [request for each in sent if isinstance(each, Batch) for request in each.requests]

    def answer(self, *items: Item, taken: int = 0) -> list[bytes]:
        """Answer with one frame; return the requests of the batch that the relay sends upon that."""
        self.number += 1
        sent = read_upstream(self.core.receive_upstream(frame(self.number, taken, *items)))
        self.desk.settle()
        assert len(sent) <= 1
        return [request for each in sent if isinstance(each, Batch) for request in each.requests]
