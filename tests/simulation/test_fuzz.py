"""A short run of the fuzzer on each target, and that its streams are what they claim to be."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fuzz as fuzz_command
from fuzz_cores import Step
from fuzz_live import AT_ONCE, BACKENDS, SECONDS, TARGETS, Server, fuzz, make_stream, serving
from fuzz_scripts import from_text, to_text
from processes import pause
from rallypoint.build import in_use
from rallypoint.errors import ProtocolError
from rallypoint.store.core.store import Core
from rallypoint.store.wire.encoding import VALIDATE, pack_i64, request
from rallypoint.store.wire.opcodes import Op

SEED = 20


@pytest.mark.parametrize("streams", [500, pytest.param(5_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", TARGETS)
def test_a_server_survives_random_and_mutated_streams(target: str, streams: int) -> None:
    summary = fuzz(target, streams, SEED)
    assert summary.streams == streams
    assert summary.closed_by_server > streams // 4
    assert summary.witness_checks >= streams // AT_ONCE // 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no workers on Windows")
def test_a_server_with_workers_survives_them_too() -> None:
    summary = fuzz("workers", 2_000, SEED)
    assert summary.closed_by_server > 500
    assert summary.witness_checks >= 10


def run_fuzz(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, fuzz_command.__file__, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True)


def test_guided_streams_break_no_rule_and_a_run_goes_on_where_it_has_stopped(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    for streams, targets in ((240, ["store", "relay", "upstream", "texts"]), (200, ["store"])):
        options = ["--jobs", 2, "--seed", SEED, "--state", tmp_path, "--target", *targets]
        done = run_fuzz("--streams", streams, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        told.append(json.loads(done.stdout))
    first, second = told
    assert first["streams"] in range(240, 244)
    before = first["targets"]["store"]["streams"]
    assert second["targets"]["store"]["streams"] == 200
    assert second["streams"] == first["streams"] + 200 - before
    if in_use() != "compiled":  # nobody sees the branches of compiled code
        assert all(second["targets"][name]["kept"] > 3 for name in ("store", "relay", "upstream", "texts"))
        assert second["branches"] > second["all_branches"] / 3


def test_a_stream_that_breaks_a_rule_can_be_replayed(tmp_path: Path) -> None:
    script = [Step("send", 0, request(Op.SET, b"/k", b"v")), Step("no-such-verb", 0)]
    path = tmp_path / "script"
    path.write_text(to_text("store", script))
    assert from_text(path.read_text()) == ("store", script)
    done = run_fuzz("--replay", path)
    assert done.returncode == 1
    assert "AttributeError" in done.stdout


def test_a_stream_is_given_by_seed_and_number() -> None:
    assert make_stream(1, 7) == make_stream(1, 7)
    assert make_stream(1, 7).pieces != make_stream(1, 8).pieces
    assert make_stream(1, 7).pieces != make_stream(2, 7).pieces


def test_streams_are_of_all_kinds_and_fit_for_their_purpose() -> None:
    """Mutations must not all be refused at the first byte: that would test nothing behind it."""
    kinds: Counter[str] = Counter()
    ends: Counter[tuple[str, bool]] = Counter()
    answered = 0
    for number in range(600):
        stream = make_stream(SEED, number)
        kinds[stream.kind] += 1
        connection = Core().open("client")
        try:
            answered += bool(connection.receive(b"".join(stream.pieces)))
            ends[stream.kind, True] += 1
        except ProtocolError as error:
            answered += bool(error.replies)
            ends[stream.kind, False] += 1
    assert set(kinds) == {"noise", "mutated", "valid", "broken off", "deaf", "session"}
    assert ends["valid", False] == 0
    for kind in ("mutated", "session"):
        assert min(ends[kind, True], ends[kind, False]) > 0.2 * kinds[kind]
    assert answered > 200


def connect(server: Server) -> socket.socket:
    """A client that has shaken hands; every wait of it has a deadline."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
    sock.sendall(VALIDATE)
    assert ping(sock)
    return sock


def ping(sock: socket.socket) -> bool:
    sock.sendall(request(Op.PING, tail=b"ping"))
    return sock.recv(4) == b"ping"


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no way to hold a process up")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_client_that_resets_right_behind_a_request_is_forgotten(backend: str) -> None:
    """The server finds both at once, and must not take the request alone for all there is."""
    barrier = request(Op.BARRIER, b"barrier", tail=pack_i64(2))
    with serving(backend) as server, closing(connect(server)) as other:
        files = server.open_files
        dead = connect(server)
        dead.sendall(barrier)
        assert ping(dead)
        pause(server.process)
        dead.sendall(request(Op.SET, b"last", b"words"))
        dead.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        dead.close()
        server.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + SECONDS
        while server.open_files > files:
            assert ping(other)
            assert time.monotonic() < deadline, "the server keeps the socket of a client that is gone"
        other.sendall(barrier)
        assert ping(other), "who is gone was counted at the barrier"
