"""The operations of the protocol, as one table: their requests' shapes, and what else is known of them.

A request is an opcode byte followed by up to three parts, each of which may be absent:

    [count u64]  [blob]*  [tail]

A blob is a u64 length and that many bytes: a key or a value. A counted request repeats its blobs
`count` times. The tail is one integer of fixed size. All integers are little-endian. There is no error
reply: a client that breaks the protocol is disconnected.

From 32 on, the operations are Rallypoint's own: between a relay and a server (or another relay), see
`sessions`; ENTER, which chooses one of several stores; SNAPSHOT, which requests a snapshot of a server or
relay; and REPORT, by which a client reports its activity for snapshots. torch does not know them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, IntEnum, auto
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
"""How long the text of a REPORT may be, which is ASCII."""


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
    RELAY_REPORT = 41
    # Of a relay's connection again.
    BEAT = 42

    SNAPSHOT = 48
    ENTER = 49
    REPORT = 50


class Trait(Flag):
    """Properties of an operation, besides its shape."""

    CLIENT = auto()
    """One of torch's: any client may send it after the handshake."""
    SESSION = auto()
    """A relay sends it on a connection that carries a session."""
    READ = auto()
    """It changes nothing. (A WAIT for keys that are there changes nothing either.)"""
    BATCH = auto()
    """A relay may put it into a batch."""
    SHARE = auto()
    """A relay may answer several equal requests with one reply."""
    REPEAT = auto()
    """All ranks may send it byte for byte alike, and the parser may know it by its bytes. Such a request is
    cheap, and so is its reply: at most a byte for each wait of the client's own that it ends."""
    PROGRESS = auto()
    """It shows that the job makes progress. Reads and waits do not: they may be repeated for ever; nor do ADD
    and COMPARE_SET, which launchers use as heartbeats."""


_NONE = Trait(0)
_CLIENT, _SESSION, _READ, _BATCH, _SHARE, _REPEAT, _PROGRESS = Trait


@dataclass(frozen=True)
class Operation:
    """What follows an opcode (which blobs, how often, the size of the tail), and the operation's traits.

    A blob is a key (`K`; `H` where it may be a hello, see `rollcall.identity`), a value (`V`), the token of
    a session (`T`), a whole batch (`B`), a relay's report (`R`), a question (`Q`), the name of a store (`N`)
    or a client's report of its activity (`A`).
    """

    blobs: str = ""
    traits: Trait = _NONE
    counted: bool = False
    tail: int = 0


OPERATIONS: Final[dict[Op, Operation]] = {
    Op.VALIDATE: Operation(tail=4),
    Op.SET: Operation("KV", _CLIENT | _BATCH | _SHARE | _REPEAT | _PROGRESS),
    Op.COMPARE_SET: Operation("KVV", _CLIENT | _BATCH),
    Op.GET: Operation("K", _CLIENT | _BATCH | _READ | _SHARE),
    Op.ADD: Operation("K", _CLIENT | _BATCH | _REPEAT, tail=8),
    Op.CHECK: Operation("K", _CLIENT | _BATCH | _READ | _SHARE | _REPEAT, counted=True),
    Op.WAIT: Operation("K", _CLIENT | _BATCH | _REPEAT, counted=True),
    Op.GETNUMKEYS: Operation("", _CLIENT | _BATCH | _READ | _SHARE),
    Op.DELETE_KEY: Operation("H", _CLIENT | _BATCH),
    Op.APPEND: Operation("KV", _CLIENT | _BATCH | _PROGRESS),
    Op.MULTI_GET: Operation("K", _CLIENT | _BATCH | _READ | _SHARE, counted=True),
    Op.MULTI_SET: Operation("KV", _CLIENT | _BATCH | _PROGRESS, counted=True),
    Op.CANCEL_WAIT: Operation("", _CLIENT | _REPEAT),
    Op.PING: Operation("", _CLIENT | _READ | _REPEAT, tail=4),
    Op.QUEUE_PUSH: Operation("KV", _CLIENT | _BATCH | _PROGRESS),
    Op.QUEUE_POP: Operation("K", _CLIENT | _BATCH | _PROGRESS),
    Op.QUEUE_LEN: Operation("K", _CLIENT | _BATCH | _READ | _SHARE),
    Op.LIST_KEYS: Operation("", _CLIENT | _BATCH | _READ | _SHARE),
    Op.BARRIER: Operation("K", _CLIENT | _REPEAT | _PROGRESS, tail=8),
    Op.SESSION: Operation("T", _SESSION, tail=24),
    Op.BATCH: Operation("B", _SESSION),
    Op.PRESENT: Operation("", _SESSION),
    Op.BYE: Operation("", _SESSION),
    Op.BEAT: Operation("", _SESSION),
    Op.ARRIVE: Operation("K", _BATCH | _PROGRESS, tail=16),
    Op.LEAVE: Operation("", _BATCH, tail=16),
    Op.WAIT_IN_TURN: Operation("K", _BATCH, counted=True),
    Op.RECALL: Operation("K", _BATCH),
    Op.POP_CALLED: Operation("K", _BATCH | _PROGRESS, tail=8),
    Op.RELAY_REPORT: Operation("R", _BATCH),
    Op.SNAPSHOT: Operation("Q"),
    Op.ENTER: Operation("N"),
    Op.REPORT: Operation("A"),
}
"""Every operation. A new one is a row here, and a method of each handler that serves it, in its table."""


def _with(trait: Trait) -> frozenset[Op]:
    return frozenset(op for op, row in OPERATIONS.items() if trait in row.traits)


CLIENT_OPS: Final = _with(Trait.CLIENT)
SESSION_OPS: Final = _with(Trait.SESSION)
READ_OPS: Final = _with(Trait.READ)
BATCH_OPS: Final = _with(Trait.BATCH)
SHARE_OPS: Final = _with(Trait.SHARE)
REPEAT_OPS: Final = _with(Trait.REPEAT)
PROGRESS_OPS: Final = _with(Trait.PROGRESS)
LOGGED_OPS: Final = (CLIENT_OPS | SESSION_OPS) - {Op.BEAT}
"""What the log of a replicated store records. A BEAT asks the leader itself, and changes nothing."""
