"""The relay's half of its session upstream: every request answered once, over connections that may break.

`connected` and `receive` take what happens, and return what to send. `relay` has the theory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from rallypoint.errors import ProtocolError, SessionLostError
from rallypoint.store.relay.core.combining import Combiner
from rallypoint.store.wire.encoding import request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from rallypoint.store.wire.sessions import (
    BATCH_OVERHEAD,
    MOST_UNTAKEN,
    WELCOME_BYTES,
    Answer,
    FrameReader,
    Note,
    ResendBuffer,
    Status,
    batch,
    parse_head,
    parse_items,
    parse_note,
    parse_welcome,
    session_request,
)

_BATCH_BYTES = 1 << 20
_BATCHES_AT_ONCE: Final = 4
_UNACKNOWLEDGED_BYTES = 1 << 16
_TICKS = 10
BEAT: Final = request(Op.BEAT)
_PRESENT: Final = request(Op.PRESENT)
BYE: Final = request(Op.BYE)
"""What ends a session for good."""

BEAT_SECONDS: Final = 0.5
_MOST_SILENT: Final = 3
"""So many beats without an answer: the other side is gone. It answers within milliseconds, if it is there."""


class _State(Enum):
    DOWN = 0
    GREETING = 1
    UP = 2


class Upstream:
    """One session upstream, for the requests of one combiner."""

    __slots__ = (
        *("_acknowledged", "_combiner", "_greeting", "_is_known", "_keep_ms", "_kept", "_note", "_reader"),
        *("_on_report_asked", "_silent", "_state", "_taken", "_ticks", "_token", "_unacknowledged_bytes"),
        *("batches", "frames", "keeps_seconds", "most_bytes"),
    )

    def __init__(
        self, combiner: Combiner, token: bytes, limits: Limits, on_report_asked: Callable[[], None]
    ) -> None:
        """`on_report_asked` is called when the other side wants to know what this relay knows."""
        self._on_report_asked = on_report_asked
        self._combiner = combiner
        self._token = token
        self._keep_ms = int(limits.session_seconds * 1000)
        self.keeps_seconds = limits.session_seconds
        """How long it may be without a connection, as the other side grants it."""
        self.most_bytes = _BATCH_BYTES
        self._state = _State.DOWN
        self._is_known = False
        self._greeting = bytearray()
        self._reader = FrameReader()
        self._taken = 0  # the last frame that has come
        self._acknowledged = 0  # the last frame of which the other side knows that it has come
        self._unacknowledged_bytes = 0  # of those since
        self._ticks = 0  # since when it does not know of one
        self._silent = 0  # how often `beat` was called since something came
        self._note = Note()
        self._kept = ResendBuffer()
        self.batches = 0
        """How many have been sent; repetitions do not count."""
        self.frames = 0
        """How many have come."""

    @property
    def is_up(self) -> bool:
        return self._state is _State.UP

    @property
    def has_batch(self) -> bool:
        """Whether there is something to send now."""
        return self._state is _State.UP and self._combiner.has_batch

    @property
    def has_acknowledged_all(self) -> bool:
        """Whether the other side knows of every frame that has come."""
        return self._acknowledged == self._taken

    def connected(self) -> bytes:
        """There is a new connection, and who is at its other end has answered: what to send."""
        self._state = _State.GREETING
        self._silent = 0
        self._note = Note()
        self._greeting = bytearray()
        self._reader = FrameReader()
        return session_request(self._token, self._keep_ms, self._taken, known=self._is_known)

    def lost(self) -> None:
        """The connection is gone."""
        self._state = _State.DOWN

    def receive(self, data: bytes) -> bytes:
        """Take what has come; return what to send.

        ProtocolError: the connection is to be closed. SessionLostError: and there is no use in another.
        """
        if self._state is _State.GREETING:
            self._greeting += data
            if len(self._greeting) < WELCOME_BYTES:
                return b""
            opening = self._welcome()
            data = bytes(self._greeting[WELCOME_BYTES:])
            self._take_frames(data)
            self._silent = 0
            return opening + self.flush()
        self._take_frames(data)
        return self.flush()

    def flush(self) -> bytes:
        """Batches that need not wait: nothing may come back for one that is full of waits.

        Some at a time, as clients want to be served as well: it is due again while there is one left.
        """
        batches: list[bytes] = []
        while self.has_batch and len(batches) < _BATCHES_AT_ONCE:
            batches.append(self._next_batch())
        if self._unacknowledged_bytes >= MOST_UNTAKEN // 2:
            batches.append(self._acknowledge())
        return b"".join(batches)

    def tick(self) -> bytes:
        """Once a second: tell what has come, if no batch has for a while; the other side keeps it so long."""
        if self._state is not _State.UP or self.has_acknowledged_all:
            self._ticks = 0
            return b""
        self._ticks += 1
        if self._ticks < _TICKS and self._unacknowledged_bytes < _UNACKNOWLEDGED_BYTES:
            return b""
        return self._acknowledge()

    def beat(self, *, is_read: bool = False) -> bytes:
        """Every BEAT_SECONDS, if at all: ask for a sign of life, unless something has come meanwhile.

        `is_read`: the other side has taken bytes that had to wait. What is long takes its time, and a beat
        comes behind it.

        ProtocolError if nothing has come for too long: the connection is to be closed. It goes by calls, and
        not by a clock: if this process itself was stopped, the other side is not to blame.
        """
        if self._state is _State.DOWN:
            return b""
        self._silent = 1 if is_read else self._silent + 1
        if self._silent > _MOST_SILENT:
            silence = f"no sign of life for {_MOST_SILENT * BEAT_SECONDS:g} s"
            raise ProtocolError(self._note.trouble or silence)
        # A SESSION is a question as well. A leader answers it when its record is committed, a beat at once.
        return BEAT if self._silent > 1 and self._state is _State.UP else b""

    def _acknowledge(self) -> bytes:
        """An empty batch, which tells what has come."""
        self._combiner.begin_batch(self._kept.number + 1)
        return self._send(())

    def _welcome(self) -> bytes:
        welcome = parse_welcome(self._greeting)
        if welcome.answer == Answer.UNKNOWN:
            raise SessionLostError(
                "the store has given our session up, has lost its log if it keeps one, or has started anew"
            )
        if welcome.answer not in (Answer.NEW, Answer.TAKEN_UP):
            raise ProtocolError(f"a SESSION was answered with {welcome.answer}")
        self._is_known = True
        self._state = _State.UP
        self.keeps_seconds = welcome.keeps_ms / 1000
        self.most_bytes = welcome.most_bytes
        if not self._kept.reaches_back_to(welcome.taken):
            raise SessionLostError(f"the store has taken batch {welcome.taken} of {self._kept.number}")
        self._kept.let_go(welcome.taken)
        self._acknowledged = self._taken
        opening = self._kept.all()
        # Who has left meanwhile is to be uncounted before the rest counts again.
        while self._combiner.has_unsent:
            opening.append(self._next_batch())
        return b"".join([*opening, _PRESENT])

    def _take_frames(self, data: bytes) -> None:
        silent, self._silent = self._silent, 0
        for payload in self._reader.feed(data):
            if note := parse_note(payload):
                self._note, self._silent = note, silent
                continue
            self._silent = 0
            number, taken = parse_head(payload)
            if number != self._taken + 1:
                raise SessionLostError(f"frame {number} of a session comes after frame {self._taken}")
            self._taken = number
            self._unacknowledged_bytes += len(payload)
            self.frames += 1
            try:
                self._kept.let_go(taken)
                for tag, status, content in parse_items(payload):
                    if status is Status.REPORT:
                        self._on_report_asked()
                    else:
                        self._combiner.receive(tag, status, content)
            except ProtocolError as error:  # what is behind it in the frame would not come again
                raise SessionLostError(error.message) from error

    def _next_batch(self) -> bytes:
        longest = self.most_bytes - BATCH_OVERHEAD
        requests = self._combiner.take_batch(self._kept.number + 1, min(_BATCH_BYTES, longest), longest)
        return self._send(requests)

    def _send(self, requests: list[bytes] | tuple[()]) -> bytes:
        self.batches += 1
        data = batch(self._kept.number + 1, self._taken, requests)
        self._acknowledged = self._taken
        self._ticks = self._unacknowledged_bytes = 0
        self._kept.add(data)
        return data

    def check_invariants(self) -> None:
        self._kept.check_invariants()
        assert self._acknowledged <= self._taken
        self._combiner.check_invariants()
