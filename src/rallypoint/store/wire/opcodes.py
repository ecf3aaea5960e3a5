"""The operations of the protocol and the shape of their requests, as data.

A request is an opcode byte followed by up to three parts, each of which may be absent:

    [count u64]  [blob]*  [tail]

A blob is a u64 length and that many bytes: a key or a value. A counted request repeats its blobs
`count` times. The tail is one integer of fixed size. All integers are little-endian. There is no error
reply: a client that breaks the protocol is disconnected.

From 32 on, the operations are Rallypoint's own: between a relay and a server (or another relay), see
`sessions`; ENTER, by which anyone may say which of several stores is meant; LOOK, by which anyone may ask
what a server or relay knows; and TELL, by which a client says what is told of it to whoever looks. They are
unknown to torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MAGIC: Final = 0x3C85F7CE
"""What VALIDATE carries: the first request of every connection."""

STOP_WAITING: Final = b"\x00"
"""The reply of a WAIT or a BARRIER that is over."""

WAIT_CANCELED: Final = b"\x01"
"""The reply of a CANCEL_WAIT."""

READY: Final = b"\x00"
NOT_READY: Final = b"\x01"

TLS_BYTE: Final = 0x16
"""The first byte of a connection that begins with TLS; see `preface`."""
NO_TLS: Final = b"\x15\x03\x03\x00\x02\x02\x31"
"""The answer of a server without a secret to TLS: an alert, `access_denied`."""
LOCKED: Final = b"\x15TLS"
"""The answer of a server with a secret to a client of another machine that begins without TLS. It is as long
as what a client reads first, the answer to its PING."""


ACTIVITY_BYTES: Final = 65_536
"""How long the text of a TELL may be, which is ASCII."""


class Op(IntEnum):
    """Opcodes, named as in torch."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18

    # Of a relay's connection.
    SESSION = 32
    BATCH = 33
    PRESENT = 34
    BYE = 35
    # Of the requests within a batch, beside most of torch's.
    ARRIVE = 36
    LEAVE = 37
    WAIT_IN_TURN = 38
    RECALL = 39
    POP_CALLED = 40
    TOLD = 41
    # Of a relay's connection again.
    BEAT = 42

    LOOK = 48
    ENTER = 49
    TELL = 50


@dataclass(frozen=True)
class Shape:
    """What follows an opcode: which blobs, how often, and the size of the tail.

    A blob is a key (`K`; `H` where it may be a hello, see `rollcall.identity`), a value (`V`), the token of
    a session (`T`), a whole batch (`B`), what a relay tells of itself (`R`), a question (`Q`), the name of
    a store (`N`) or what a client tells of its activity (`A`).
    """

    blobs: str = ""
    counted: bool = False
    tail: int = 0


SHAPES: Final[dict[Op, Shape]] = {
    Op.VALIDATE: Shape(tail=4),
    Op.SET: Shape("KV"),
    Op.COMPARE_SET: Shape("KVV"),
    Op.GET: Shape("K"),
    Op.ADD: Shape("K", tail=8),
    Op.CHECK: Shape("K", counted=True),
    Op.WAIT: Shape("K", counted=True),
    Op.GETNUMKEYS: Shape(),
    Op.DELETE_KEY: Shape("H"),
    Op.APPEND: Shape("KV"),
    Op.MULTI_GET: Shape("K", counted=True),
    Op.MULTI_SET: Shape("KV", counted=True),
    Op.CANCEL_WAIT: Shape(),
    Op.PING: Shape(tail=4),
    Op.QUEUE_PUSH: Shape("KV"),
    Op.QUEUE_POP: Shape("K"),
    Op.QUEUE_LEN: Shape("K"),
    Op.LIST_KEYS: Shape(),
    Op.BARRIER: Shape("K", tail=8),
    Op.SESSION: Shape("T", tail=24),
    Op.BATCH: Shape("B"),
    Op.PRESENT: Shape(),
    Op.BYE: Shape(),
    Op.ARRIVE: Shape("K", tail=16),
    Op.LEAVE: Shape(tail=16),
    Op.WAIT_IN_TURN: Shape("K", counted=True),
    Op.RECALL: Shape("K"),
    Op.POP_CALLED: Shape("K", tail=8),
    Op.TOLD: Shape("R"),
    Op.BEAT: Shape(),
    Op.LOOK: Shape("Q"),
    Op.ENTER: Shape("N"),
    Op.TELL: Shape("A"),
}
