"""A core is a function of its inputs: the same list of them, with the same times, gives the same outputs.

The store that outlives its machine is built on this: its log holds inputs, and a standby replays them.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from random import Random

import pytest
from hypothesis import strategies as st

from ends import Desk, batch, blob, session, u64
from fuzz_cores import STAGES, Script, Stage, Step, play
from fuzz_scripts import make_script
from rallypoint.store.core import sessions
from rallypoint.store.core.context import Other
from rallypoint.store.core.store import Core
from rallypoint.store.core.turn import Turn
from rallypoint.store.wire import parser
from rallypoint.store.wire.encoding import counted_request, pack_i64, request
from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.opcodes import Op
from test_core import CANCEL_WAIT, add, barrier

LIMITS = Limits(key_bytes=64, value_bytes=512, handshake_seconds=2.0, session_seconds=1.0, held_bytes=20_000)


keys = st.sampled_from(
    [b"/a", b"/b", b"/c", b"/rallypoint/roll", b"/rallypoint/stall", b"/default_pg/0//cpu//0/1"]
)
values = st.sampled_from([b"", b"v", b"12", b"x" * 300])
pairs = st.lists(st.tuples(keys, values), max_size=2)
tokens = st.sampled_from([bytes(16), bytes(range(16))])
REQUESTS = st.one_of(
    st.builds(request, st.sampled_from([Op.SET, Op.APPEND, Op.QUEUE_PUSH]), keys, values),
    st.builds(request, st.sampled_from([Op.GET, Op.DELETE_KEY, Op.QUEUE_POP, Op.QUEUE_LEN]), keys),
    st.builds(request, st.just(Op.COMPARE_SET), keys, values, values),
    st.builds(add, keys, st.integers(-3, 3)),
    st.builds(barrier, keys, st.integers(1, 3)),
    st.builds(
        counted_request, st.sampled_from([Op.WAIT, Op.CHECK, Op.MULTI_GET]), st.lists(keys, max_size=3)
    ),
    pairs.map(lambda drawn: counted_request(Op.MULTI_SET, [*chain(*drawn)], blobs_each=2)),
    st.sampled_from([CANCEL_WAIT, request(Op.GETNUMKEYS), request(Op.LIST_KEYS), b"\x30" + u64(0), b"\xff"]),
    st.just(request(Op.DELETE_KEY, b'/rallypoint/hello/1/{"rank":3,"role":"rank","world_size":4}')),
    st.builds(request, st.just(Op.REPORT), st.sampled_from([b"", b"told", b'"' * 900, b"\xff"])),
    st.builds(lambda token, taken: session(token, taken=taken), tokens, st.integers(0, 1)),
)
BATCHES = st.builds(
    lambda number, requests: batch(number, 0, *requests), st.integers(1, 2), st.lists(REQUESTS, max_size=3)
)
DATA = st.lists(st.one_of(REQUESTS, BATCHES, st.just(b"\x22")), max_size=5).map(b"".join)


class Recorder(Desk):
    """Keeps all that the core wants of its driver, events included."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk.front)
        self.recorded: list[Other] = []

    def take(self) -> list[Other]:
        others = super().take()
        self.recorded += others
        return others


def replay(stage: Stage, script: Script) -> list[object]:
    """All that comes out of a core that is driven by a script."""
    stage.desk = recorder = Recorder(stage.desk)
    return [*stage.run(script, with_look=True), *recorder.recorded]


@pytest.mark.parametrize("kind", STAGES)
def test_the_same_inputs_give_the_same_outputs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a client is put off after a few requests, and the one that holds the most is closed."""
    monkeypatch.setattr(sessions, "STEPS_AT_ONCE", 1)
    monkeypatch.setattr(parser, "STEPS_AT_ONCE", 1)
    monkeypatch.setattr(parser, "BYTES_AT_ONCE", 40)
    random, scripts = Random(7), list[Script]()
    for _ in range(300):
        scripts.append(make_script(random, kind, scripts))
        assert replay(STAGES[kind](None), scripts[-1]) == replay(STAGES[kind](None), scripts[-1])


@pytest.mark.parametrize("kind", STAGES)
def test_any_history_is_the_same_in_pieces(kind: str) -> None:
    random, scripts = Random(8), list[Script]()
    for _ in range(300):
        scripts.append(make_script(random, kind, scripts))
        play(kind, scripts[-1])


IN_ANOTHER_PROCESS = """
import sys
sys.path[:0] = sys.argv[1:]
from test_replay import HISTORY, crowded, replay
print(*map(repr, replay(crowded(), HISTORY)), sep="\\n")
"""
HISTORY = [
    Step("send", 20, request(Op.SET, b"/a", b"1") + counted_request(Op.WAIT, [b"/b"])),
    Step("batch", 21, blob(counted_request(Op.WAIT, [b"/b"]))),
    *(Step("send", n, request(Op.DELETE_KEY, b'/rallypoint/hello/1/{"rank":%d}' % n)) for n in range(20)),
    *(Step("send", number, request(Op.BARRIER, b"/x", tail=pack_i64(18))) for number in range(2, 20)),
    Step("send", 2, request(Op.REPORT, b'ranks "0" to 3')),
    Step("send", 22, request(Op.SNAPSHOT, b'{"keys":9}')),
    Step("time", 3),
    Step("time", 3),
    Step("send", 3, request(Op.SET, b"/b", b"")),
    Step("close", 4),
]


def crowded() -> Stage:
    """A store for many clients."""
    return Stage(Core(LIMITS, Turn(100.0), wants_events=True, owner_key=b"/c"), None)


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
    assert told.count("b'\\x00')") >= 18, "all are released"
    assert '"keys":[{"key":"a"' in told
    assert '"told":"ranks' in told
