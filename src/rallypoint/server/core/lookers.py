"""Clients that may only look: they have a token, may ask who is here, and nothing else. Pure."""

from __future__ import annotations

from typing import Final, Protocol

from rallypoint.errors import AccessError
from rallypoint.rollcall.identity import Role, is_hello, parse_hello
from rallypoint.rollcall.question import Question
from rallypoint.wire.encoding import pack_i64
from rallypoint.wire.handlers import Deliver
from rallypoint.wire.limits import Limits
from rallypoint.wire.opcodes import READY, SHAPES, Op
from rallypoint.wire.parser import Forms, RequestParser
from rallypoint.wire.sessions import ANNOUNCED


class LookingClient(Protocol):
    """What is asked of the client itself."""

    def validate(self) -> None: ...
    def hold(self, count: int, is_cut: bool, /) -> None: ...
    def postpone(self) -> None: ...
    def greet(self, hello: bytes, /) -> None: ...
    def enter(self, name: bytes, /) -> bytes | None: ...
    def look(self, question: bytes, /) -> bytes | None: ...


class Looker:
    """Takes the requests of such a client. They are not counted."""

    is_unfinished = False

    def __init__(self, client: LookingClient, limits: Limits) -> None:
        self._client = client
        self._parser = RequestParser(self, Forms(limits, _DELIVERIES))
        self.receive = self._parser.feed
        self.validate = client.validate
        self.hold = client.hold
        self.postpone = client.postpone

    @property
    def rest(self) -> bytes:
        return self._parser.rest

    def get(self, _: bytes, /) -> bytes:
        raise _refusal(Op.GET)

    def go_on(self) -> bytes:
        return b""  # nothing that it may ask takes longer

    def carry(self, op: Op, blobs: list[bytes], tail: bytes) -> bytes | None:
        """Answer what it may ask."""
        if op is Op.PING:
            return tail
        if op is Op.LOOK:
            if Question.from_json(blobs[0]).value is not None:
                raise AccessError("a look at a value, with a token that may only see who is here")
            return self._client.look(blobs[0]) or b""
        if op is Op.ENTER:
            return self._client.enter(blobs[0])
        if op is Op.CHECK and blobs == [ANNOUNCED]:
            return READY
        if op is Op.DELETE_KEY and is_hello(blobs[0]):
            who = parse_hello(blobs[0])
            if who is not None and who.role is Role.TOOL:  # or it would count as a rank
                self._client.greet(blobs[0])
            return pack_i64(0)
        raise _refusal(op)


def _refusal(op: Op) -> AccessError:
    return AccessError(f"{op.name} with a token that may only look")


def _to_carry(op: Op) -> Deliver[Looker]:
    return lambda looker, blobs, tail: looker.carry(op, blobs, tail)


_DELIVERIES: Final[dict[Op, Deliver[Looker]]] = {op: _to_carry(op) for op in SHAPES if op is not Op.VALIDATE}
