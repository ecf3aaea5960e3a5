"""A core is a function of its inputs: the same list of them, with the same times, gives the same outputs.

The store that outlives its machine is built on this: its log holds inputs, and a standby replays them.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ends import batch, session, u64
from rallypoint.errors import ProtocolError
from rallypoint.store.core import sessions
from rallypoint.store.core.clients import Client
from rallypoint.store.core.looks import LookStep
from rallypoint.store.core.outbox import Close, CoreFault, DriverTask, GoOn
from rallypoint.store.core.server_core import ServerCore
from rallypoint.store.core.store import Core
from rallypoint.store.core.turn import Durations, Turn
from rallypoint.store.relay.core.relay import RelayCore
from rallypoint.store.wire import parser
from rallypoint.store.wire.encoding import VALIDATE, counted_request, pack_i64, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op

LIMITS = Limits(key_bytes=64, value_bytes=512, handshake_seconds=2.0, session_seconds=1.0, held_bytes=20_000)


@dataclass(frozen=True)
class Input:
    """One line of the record."""

    kind: str
    client: int = 0
    data: bytes = b""
    seconds: float = 0.0


class Replay:
    """Drives a core by a record, and writes down all that comes out of it."""

    def __init__(self, front: ServerCore[Any]) -> None:
        self._front = front
        self._clients: dict[int, Client] = {}
        self._left: list[Client] = []  # those that have requests left
        self.outputs: list[object] = []

    def run(self, inputs: list[Input]) -> list[object]:
        for each in inputs:
            getattr(self, f"_{each.kind}")(each)
            self._empty_outbox()
        self._front.check_invariants()
        return self.outputs

    def _open(self, each: Input) -> None:
        client = self._front.open(f"peer {each.client}")
        self._clients[client.id] = client
        self._feed(client, VALIDATE + each.data)

    def _receive(self, each: Input) -> None:
        if client := self._pick(each):
            self._feed(client, each.data)

    def _go_on(self, _: Input) -> None:
        """Goes on with what was put off, in its order."""
        left, self._left = self._left, []
        for client in left:
            if client.id in self._clients:
                self._feed(client, b"")
        self.outputs.append(self._front.go_on())

    def _unread(self, each: Input) -> None:
        if client := self._pick(each):
            client.leave_unread(int(1_000 * each.seconds))

    def _end(self, each: Input) -> None:
        if client := self._pick(each):
            self._front.end(client)

    def _close(self, each: Input) -> None:
        if client := self._pick(each):
            self._drop(client, "closed")

    def _time(self, each: Input) -> None:
        self._front.turn.now += each.seconds
        for client, why in self._front.overdue():
            self._drop(client, why)
        turns = Durations()
        turns.add(each.seconds)
        self._front.end_second(turns)

    def _snapshot(self, _: Input) -> None:
        """Goes on with what those asked for who look, as far as it goes without waiting."""
        while (step := self._front.looks.step()) not in (LookStep.DONE, LookStep.IDLE):
            if isinstance(step, Client):
                step.received, step.sent = 7 * step.id, 11 * step.id
            self._front.processes_found()

    def _pick(self, each: Input) -> Client | None:
        here = list(self._clients.values())
        return here[each.client % len(here)] if here else None

    def _feed(self, client: Client, data: bytes) -> None:
        try:
            self.outputs.append((client.id, client.receive(data)))
        except ProtocolError as error:
            self.outputs.append((client.id, error.replies, error.message))
            self._drop(client, error.message)

    def _drop(self, client: Client, why: str) -> None:
        client.why = why
        self.outputs.append((client.id, "dropped", why))
        del self._clients[client.id]
        self._front.close(client)

    def _empty_outbox(self) -> None:
        outbox = self._front.outbox
        while outbox.woken or outbox.others:
            for client in outbox.take_woken():
                if client.id in self._clients:
                    self.outputs.append((client.id, "notice", client.take_notice()))
            for other in outbox.take_others():
                assert not isinstance(other, CoreFault), other
                if isinstance(other, GoOn):
                    self._left.append(other.client)
                    self.outputs.append((other.client.id, "left"))
                elif other is DriverTask.LIGHTEN:
                    self._front.lighten()
                elif not isinstance(other, Close):
                    self.outputs.append(other)
                elif other.client.id in self._clients:
                    self._drop(other.client, other.error.message)


keys = st.sampled_from(
    [b"/a", b"/b", b"/c", b"/rallypoint/roll", b"/rallypoint/stall", b"/default_pg/0//cpu//0/1"]
)
values = st.sampled_from([b"", b"v", b"12", b"x" * 300])
tokens = st.sampled_from([bytes(16), bytes(range(16))])
REQUESTS = st.one_of(
    st.builds(lambda key, value: request(Op.SET, key, value), keys, values),
    st.builds(lambda key: request(Op.GET, key), keys),
    st.builds(lambda key, amount: request(Op.ADD, key, tail=pack_i64(amount)), keys, st.integers(-3, 3)),
    st.builds(lambda key, old, new: request(Op.COMPARE_SET, key, old, new), keys, values, values),
    st.builds(lambda key: request(Op.DELETE_KEY, key), keys),
    st.builds(lambda key, value: request(Op.QUEUE_PUSH, key, value), keys, values),
    st.builds(lambda key: request(Op.QUEUE_POP, key), keys),
    st.builds(lambda some: counted_request(Op.WAIT, some), st.lists(keys, min_size=1, max_size=3)),
    st.builds(lambda key, size: request(Op.BARRIER, key, tail=pack_i64(size)), keys, st.integers(1, 3)),
    st.sampled_from([request(Op.CANCEL_WAIT), request(Op.LIST_KEYS), b"\x30" + u64(0), b"\xff"]),
    st.just(request(Op.DELETE_KEY, b'/rallypoint/hello/1/{"rank":3,"role":"rank","world_size":4}')),
    st.builds(lambda text: request(Op.TELL, text), st.sampled_from([b"", b"told", b'"' * 900, b"\xff"])),
    st.builds(lambda token, taken: session(token, taken=taken), tokens, st.integers(0, 1)),
)
BATCHES = st.builds(
    lambda number, requests: batch(number, 0, *requests), st.integers(1, 2), st.lists(REQUESTS, max_size=3)
)
DATA = st.lists(st.one_of(REQUESTS, BATCHES, st.just(b"\x22")), max_size=5).map(b"".join)
INPUTS = st.lists(
    st.one_of(
        st.builds(Input, st.just("open"), data=DATA),
        st.builds(Input, st.just("receive"), st.integers(0, 5), DATA),
        st.builds(  # a request in pieces
            lambda client, data, cut: Input("receive", client, data[:cut]),
            st.integers(0, 5),
            DATA,
            st.integers(0, 20),
        ),
        st.builds(Input, st.sampled_from(["end", "close", "snapshot", "go_on"]), st.integers(0, 5)),
        st.builds(Input, st.sampled_from(["time", "unread"]), st.integers(0, 5), seconds=st.floats(0.0, 3.0)),
    ),
    max_size=40,
)


def replay(kind: str, inputs: list[Input]) -> list[object]:
    turn = Turn(100.0, wall_ahead=1e9)
    if kind == "relay":
        return Replay(RelayCore(bytes(16), LIMITS, turn)).run(inputs)
    return Replay(Core(LIMITS, turn, wants_events=True, owner_key=b"/c")).run(inputs)


@pytest.mark.parametrize("kind", ["server", "relay"])
@settings(deadline=None, max_examples=150)
@given(inputs=INPUTS)
def test_the_same_inputs_give_the_same_outputs(kind: str, inputs: list[Input]) -> None:
    """Also where a client is put off after a few requests, and the one that holds the most is closed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "STEPS_AT_ONCE", 1)
        patch.setattr(parser, "STEPS_AT_ONCE", 1)
        patch.setattr(parser, "BYTES_AT_ONCE", 40)
        assert replay(kind, inputs) == replay(kind, inputs)


IN_ANOTHER_PROCESS = """
import sys
sys.path[:0] = sys.argv[1:]
from test_replay import HISTORY, replay
print(*map(repr, replay("server", HISTORY)), sep="\\n")
"""
HISTORY = [
    Input("open", data=request(Op.SET, b"/a", b"1") + counted_request(Op.WAIT, [b"/b"])),
    Input("open", data=session() + b"\x22" + batch(1, 0, counted_request(Op.WAIT, [b"/b"]))),
    *(Input("open", data=request(Op.DELETE_KEY, b'/rallypoint/hello/1/{"rank":%d}' % n)) for n in range(20)),
    *(Input("receive", number, request(Op.BARRIER, b"/x", tail=pack_i64(18))) for number in range(2, 20)),
    Input("receive", 2, request(Op.TELL, b'ranks "0" to 3')),
    Input("open", data=b"\x30" + u64(len(b'{"keys":9}')) + b'{"keys":9}'),
    Input("snapshot"),
    Input("time", seconds=1.5),
    Input("snapshot"),
    Input("receive", 3, request(Op.SET, b"/b", b"")),
    Input("close", 4),
]


def test_another_process_gives_the_same_outputs() -> None:
    """Hashes and addresses differ from process to process; nothing may depend on them."""
    outputs = set()
    for seed in ("0", "1", "2"):
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, *sys.path]
        done = subprocess.run(
            command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    (told,) = outputs
    assert told.count("notice") >= 18
    assert '"keys":[{"key":"a"' in told
    assert '"told":"ranks' in told
