"""The extension for relays: many clients' requests over one connection, each carried out once.

A relay finds out whether a server has the extension by an ordinary CHECK of `ANNOUNCED`, a key that no client
can have, since clients put a slash in front of theirs: torch's server answers that it is not there. The relay
then opens a SESSION, which outlives its connection, and sends BATCHes of requests. The answers are a stream
of frames.

    BATCH      number u64, taken u64, then requests, each as a blob
    frame      as a blob: number u64, taken u64, then items
    item       tag u64, status u8, content as a blob

Each side numbers its batches or frames from 1. `taken` acknowledges: it is the number of the last one that
the sender has received. Each side keeps what is not acknowledged, and sends it again when the session is
taken up on a new connection. Requests are numbered from 0 throughout the session; that number is their tag.

A BEAT is answered among the frames: by an empty blob, or by a note, a frame of number 0 that says why the
store cannot go on now.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from rallypoint.codec import from_text, to_text
from rallypoint.errors import ProtocolError
from rallypoint.store.wire.encoding import (
    blob,
    blobs,
    counted_request,
    pack_u64,
    request,
    unpack_i64,
    unpack_u64,
)
from rallypoint.store.wire.opcodes import STOP_WAITING, Op

ANNOUNCED: Final = b"rallypoint/sessions/3"
"""The key that a server with sessions reports as present. Such a server also answers a SNAPSHOT."""

ASK: Final = counted_request(Op.CHECK, [ANNOUNCED])

NAMES_ANNOUNCED: Final = b"rallypoint/names/1"
"""The key that a server with several named stores reports as present: ENTER chooses one."""

ASK_FOR_NAMES: Final = counted_request(Op.CHECK, [NAMES_ANNOUNCED])

TOKEN_BYTES: Final = 16


class Status(IntEnum):
    """What has become of an item's request."""

    DONE = 0
    """The content is the reply, as a client would get it.

    Of ARRIVE: how many are released, as an i64. Of a wait: STOP_WAITING, and behind it as a u64 the last
    batch that had been taken when it ended, or 0 if that is not known.
    """
    REFUSED = 1
    """It was not carried out, and the client that sent it must be disconnected. The content says why."""
    CALLED = 2
    """A push has ended a wait: one of the clients that share it may pop. The content is as of DONE."""
    UNCHANGED = 3
    """The value is the one that was sent last for this key."""
    REPORT = 4
    """Answers no request, and has the tag UNASKED: it asks the relay for a report, by a RELAY_REPORT."""
    PIECE = 5
    """It was carried out, and the content is a piece of the reply. More pieces follow, the last one with
    another status. The first piece is sent at once, and is empty."""


class Answer(IntEnum):
    """The answer to a SESSION."""

    NEW = 0
    TAKEN_UP = 1
    UNKNOWN = 2
    """There was such a session, but it has ended: what was under way is lost."""


class Welcome(NamedTuple):
    """The answer to a SESSION, with what the server allows."""

    answer: int
    keeps_ms: int
    """How long the server keeps the session without a connection."""
    taken: int
    """The last batch that it has received."""
    most_bytes: int
    """The longest BATCH that it takes."""


# Longer answers are sent in pieces, as long as the other side has not taken less than so much of all frames.
# So a short answer waits for a few pieces at most.
LONG = 4096
PIECE_BYTES = 1 << 16
MOST_UNTAKEN = 1 << 18

UNASKED: Final = (1 << 64) - 1
"""The tag of an item that answers no request."""

MOST_ARRIVALS: Final = 1 << 24
"""In one ARRIVE."""

# Values that both sides remember after they have been read.
REMEMBERED = 64
REMEMBERED_BYTES = 16 << 20
WORTH_REMEMBERING = 256

_SESSION: Final = Struct("<QQQ")
_WELCOME: Final = Struct("<BQQQ")
_HEAD: Final = Struct("<QQ")
_ITEM: Final = Struct("<QBQ")
_PAIR: Final = Struct("<QQ")
_ARRIVE: Final = Struct("<qQ")

WELCOME_BYTES: Final = _WELCOME.size
BATCH_OVERHEAD: Final = 1 + 8 + _HEAD.size + 8
"""How much longer than its only request a BATCH is."""

pack_pair = _PAIR.pack
unpack_pair = _PAIR.unpack
arrive_tail = _ARRIVE.pack


def parse_arrive(tail: bytes) -> tuple[int, int]:
    """The size of the barrier, and how many arrive."""
    size, count = _ARRIVE.unpack(tail)
    if not 0 < count <= MOST_ARRIVALS:
        raise ProtocolError(f"ARRIVE of {count:,}")
    return size, count


def session_request(token: bytes, keep_ms: int, taken: int, *, known: bool) -> bytes:
    """Open a session, or take it up; `known`: the server must know it."""
    return request(Op.SESSION, token, tail=_SESSION.pack(keep_ms, taken, known))


def parse_session(tail: bytes) -> tuple[int, int, bool]:
    """How many milliseconds to keep it, the last frame taken, and whether it must be known."""
    keep_ms, taken, known = _SESSION.unpack(tail)
    return keep_ms, taken, bool(known)


def pack_welcome(welcome: Welcome) -> bytes:
    return _WELCOME.pack(*welcome)


def parse_welcome(data: bytes | bytearray) -> Welcome:
    return Welcome(*_WELCOME.unpack_from(data))


def batch(number: int, taken: int, requests: Sequence[bytes]) -> bytes:
    payload = _HEAD.pack(number, taken) + blobs(requests)
    return b"%c%b" % (Op.BATCH, blob(payload))


def parse_head(payload: bytes) -> tuple[int, int]:
    """The number of a batch or a frame, and the last one that its sender has received."""
    if len(payload) < _HEAD.size:
        raise ProtocolError(f"a batch or frame of {len(payload)} bytes has no room for its number")
    number, taken = _HEAD.unpack_from(payload)
    return number, taken


class Note(NamedTuple):
    """The answer to a BEAT of a store that does not know whether it leads. It is no sign of life."""

    trouble: str = ""
    """What keeps it from going on; empty if it does not know that either."""
    advice: str = ""


def pack_note(note: Note) -> bytes:
    return blob(_HEAD.pack(0, 0) + to_text(note).encode())


def parse_note(payload: bytes) -> Note | None:
    """None if it is a frame."""
    if parse_head(payload)[0]:
        return None
    try:
        return from_text(Note, payload[_HEAD.size :])
    except ValueError as error:
        raise ProtocolError(f"a note of the store cannot be read: {error}") from None


def parse_requests(payload: bytes) -> Iterator[tuple[int, int]]:
    """The requests of a batch, one by one: where each begins and ends."""
    position, end = _HEAD.size, len(payload)
    while position < end:
        start = position + 8
        if start > end:
            raise ProtocolError("a batch ends within a length")
        position = start + unpack_u64(payload, position)[0]
        if position > end:
            raise ProtocolError("a batch ends within a request")
        yield start, position


def end_of_wait(taken: int) -> bytes:
    """The answer to a wait that ended after `taken` batches had been received."""
    return STOP_WAITING + pack_u64(taken)


def parse_end_of_wait(content: bytes) -> int:
    """How many batches had been received when the wait ended."""
    if len(content) != 9:
        raise ProtocolError(f"a wait was answered with {len(content)} bytes")
    return int(unpack_u64(content, 1)[0])


def parse_count(content: bytes) -> int:
    """How many were released, or have left."""
    count = parse_sum(content)
    if count < 0:
        raise ProtocolError(f"an answer says that {count} were released, or have left")
    return count


def parse_sum(content: bytes) -> int:
    """The answer to an ADD."""
    if len(content) != 8:
        raise ProtocolError(f"an answer that is a number has {len(content)} bytes")
    return int(unpack_i64(content)[0])


def item(tag: int, status: Status, content: bytes) -> bytes:
    return _ITEM.pack(tag, status, len(content)) + content


def frame(number: int, taken: int, items: Sequence[bytes]) -> bytes:
    content = b"".join(items)
    return b"%b%b%b" % (pack_u64(_HEAD.size + len(content)), _HEAD.pack(number, taken), content)


def parse_items(payload: bytes) -> Iterator[tuple[int, Status, bytes]]:
    """The items of a frame: tag, status and content."""
    position, end = _HEAD.size, len(payload)
    while position < end:
        start = position + _ITEM.size
        if start > end:
            raise ProtocolError("a frame ends within an item")
        tag, status, length = _ITEM.unpack_from(payload, position)
        position = start + length
        if position > end or status not in _STATUSES:
            raise ProtocolError("a frame has an item that cannot be")
        yield tag, _STATUSES[status], payload[start:position]


_STATUSES: Final = {int(status): status for status in Status}


class ResendBuffer:
    """The batches or frames that one side has sent and the other has not acknowledged, to be sent again."""

    __slots__ = ("_sent", "bytes", "number")

    def __init__(self) -> None:
        self._sent: deque[tuple[int, bytes]] = deque()
        self.number = 0
        """The number of the last one that was sent."""
        self.bytes = 0

    def add(self, data: bytes) -> None:
        """Keep the next one."""
        self.number += 1
        self._sent.append((self.number, data))
        self.bytes += len(data)

    def let_go(self, taken: int) -> None:
        """Drop all up to this one, which the other side has received. An old number changes nothing."""
        if taken > self.number:
            raise ProtocolError(f"the other side has taken number {taken}, but there were {self.number}")
        while self._sent and self._sent[0][0] <= taken:
            self.bytes -= len(self._sent.popleft()[1])

    def reaches_back_to(self, taken: int) -> bool:
        """Whether all after this one can be sent again."""
        return self.number - len(self._sent) <= taken <= self.number

    def all(self) -> list[bytes]:
        return [data for _, data in self._sent]

    def state(self) -> list[object]:
        """All of it, as plain data."""
        return [self.number, self.all()]

    @classmethod
    def of(cls, number: int, sent: Sequence[bytes]) -> ResendBuffer:
        """The buffer of a `state`."""
        kept = cls()
        kept.number = number - len(sent)
        for data in sent:
            kept.add(data)
        return kept

    def check_invariants(self) -> None:
        assert self.bytes == sum(len(data) for _, data in self._sent)
        numbers = [number for number, _ in self._sent]
        assert numbers == list(range(self.number + 1 - len(numbers), self.number + 1))


class _Unsent(NamedTuple):
    """What is left of an answer."""

    tag: int
    status: Status
    key: bytes | None
    head: bytes
    body: bytes | bytearray
    start: int
    stop: int
    """Where in `body` it begins and ends: a value that is appended to meanwhile only grows."""


class LongAnswers:
    """Long answers that are not completely sent, in their order.

    They are sent in pieces, so that short ones need not wait for them.
    """

    __slots__ = ("_keys", "_unsent", "bytes")

    def __init__(self) -> None:
        self._unsent: deque[_Unsent] = deque()
        self._keys: Counter[bytes | None] = Counter()
        self.bytes = 0
        """How much is left to be sent."""

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def has(self, key: bytes) -> bool:
        """Whether an answer to a read of this key is among them."""
        return key in self._keys

    def add(
        self, tag: int, status: Status, head: bytes, body: bytes | bytearray, key: bytes | None = None
    ) -> None:
        """Add an answer of two parts, so that a value need not be copied. `key`: the answer is its value."""
        self._unsent.append(_Unsent(tag, status, key, head, body, 0, len(body)))
        self._keys[key] += 1
        self.bytes += len(head) + len(body)

    def take_piece(self) -> bytes:
        """The next item to be sent."""
        tag, status, key, head, body, start, stop = self._unsent.popleft()
        end = min(start + PIECE_BYTES, stop)
        piece = head + body[start:end]
        self.bytes -= len(piece)
        if end < stop:
            self._unsent.appendleft(_Unsent(tag, status, key, b"", body, end, stop))
            return item(tag, Status.PIECE, piece)
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]
        return item(tag, status, piece)

    def state(self) -> list[object]:
        """All of them, as plain data."""
        return [
            [each.tag, int(each.status), each.head, bytes(each.body[each.start : each.stop]), each.key]
            for each in self._unsent
        ]

    def check_invariants(self) -> None:
        assert self.bytes == sum(len(each.head) + each.stop - each.start for each in self._unsent)
        assert self._keys == Counter(each.key for each in self._unsent)


class FrameReader:
    """Takes a stream of blobs in any pieces; returns the whole ones, except empty ones (signs of life)."""

    __slots__ = ("_kept", "_need")

    def __init__(self) -> None:
        self._kept = bytearray()
        self._need = 8

    def feed(self, data: bytes) -> list[bytes]:
        kept = self._kept
        kept += data
        found: list[bytes] = []
        position = 0
        while len(kept) - position >= self._need:
            if self._need == 8:
                self._need = 8 + int(unpack_u64(kept, position)[0])
                if self._need == 8:
                    position += 8
                continue
            found.append(bytes(kept[position + 8 : position + self._need]))
            position += self._need
            self._need = 8
        del kept[:position]
        return found
