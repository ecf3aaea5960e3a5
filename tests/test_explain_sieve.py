"""The quick way through a log finds what looking at every line finds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explaining import CAUSES, traceback
from rallypoint.diagnose.explain import explain, words
from rallypoint.diagnose.explain.evidence import Evidence
from rallypoint.diagnose.explain.first_cause import find_first_cause
from rallypoint.diagnose.explain.knowledge import Cause, causes
from rallypoint.diagnose.explain.scanning import Log, decode, scan
from rallypoint.diagnose.explain.sieve import (
    BLOCK_BYTES,
    LONGEST_LINE,
    Sieve,
    blocks,
    reduce,
    required_literals,
)

pytestmark = pytest.mark.windows

# Literals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("EADDRINUSE", {b"eaddrinuse"}),
        ("(?i)Timed Out", {b"timedout"}),
        (r"errno: 98.*port \d+", {b"errno:"}),
        ("(?:first|second) things", {b"things"}),
        ("first|second", {b"first", b"second"}),
        ("a(?P<x>long text)?b", set()),
        ("(?:long text)+", {b"longtext"}),
        ("(?:long text)*", set()),
        ("[abcd]efg", set()),
        ("x{5}yes, it is", {b"yes,itis"}),
        ("abc", set()),
        ("1234567", set()),
        ("long|a", set()),
        ("(?=ahead)text", {b"text"}),
        ("wörter", {b"rter"}),
        ("[Ee]xit ?(?:code|status)", {b"xitcode", b"xitstatus"}),
        ("line [0-9]+: +(?P<x>[0-9.]+) Killed", {b"line:killed"}),
    ],
)
def test_required_literals(pattern: str, literals: set[bytes]) -> None:
    assert required_literals(re.compile(pattern)) == literals


# Blocks ----------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20)))
def test_blocks_lose_nothing(chunks: list[bytes]) -> None:
    assert b"".join(blocks(chunks)) == b"".join(chunks)


def test_a_line_that_does_not_end_is_cut() -> None:
    endless = [b"x" * BLOCK_BYTES] * 5
    found = list(blocks([*endless, b"x\nnext\n"]))
    assert sum(map(len, found)) < LONGEST_LINE + 100
    assert found[-1].endswith(b"next\n")


def test_a_progress_bar_that_does_not_end_its_line_is_read() -> None:
    found = list(blocks([b"\r 50%" * BLOCK_BYTES, b"\rTraceback\n"]))
    assert found[-1].endswith(b"Traceback\n")
    assert all(len(block) < 6 * BLOCK_BYTES for block in found)


# The sieve -------------------------------------------------------------------------------------------------


class _Open(Sieve):
    """Lets everything through."""

    def select(self, block: bytes) -> Iterator[int]:
        return iter(range(block.count(b"\n") + 1))


def _outcome(log: Sequence[bytes], known: Sequence[Cause], open_sieve: bool) -> object:
    evidence = Evidence(known)
    sieve = _Open([]) if open_sieve else Sieve(evidence.texts(), evidence.texts_to_try())
    scan(Log("log", log), evidence, sieve, lambda _: None)
    return words.as_json(find_first_cause(evidence))


_NOISE = [
    "",
    "step 12 loss 0.25",
    "[rank3]: 2026-11-15 14:36:19,123 - INFO - step 12 loss 1.5e-05",
    " 45%|####      | 45/100 [00:12<00:15]\r 46%|####      | 46/100",
    "\x1b[32mINFO\x1b[0m fine",
    "RuntimeWarning: fine",
    "Starting the training",
    "Reading the settings",
]
_LINES = [
    traceback("ValueError: the learning rate is a banana", "[rank1]: "),
    traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"),
    "[W1115 14:36:19.123 socket.cpp:601] [c10d] EADDRINUSE on port 29500",
    "EADDR\x1b[1mINUSE on port 40000",
    "EADDR\x1b]8;;x\x07INUSE",
    "During handling of the above exception, another exception occurred:",
    "[rank0]: RuntimeError: Connection closed by peer",
    "ncclInternalError: Internal check failed",
    "a stale id",
    "(errno: 97 - Address family not supported by protocol)",
    "E1115 14:36:20.123000 12345 torch/x/api.py:869] failed (exitcode: 1) local_rank: 1 (pid: 7) of binary",
    "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-15_14:41:26\n  rank      : 1 (x)\n",
    "it is fatal",
    "step 7 error_rate 0.25",
    "[rank1]: sample 3 failed",
    "[rank2]: FooError: sample 3",
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(_NOISE + _LINES), max_size=12), st.integers(1, 200))
def test_the_sieve_loses_nothing(lines: list[str], size: int) -> None:
    """For all cuts between chunks, and all lines before."""
    content = "\n".join(lines).encode()
    chunks = [content[begin : begin + size] for begin in range(0, len(content), size)]
    assert _outcome(chunks, CAUSES, open_sieve=False) == _outcome([content], CAUSES, open_sieve=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=80), st.sampled_from([line.encode() for line in _LINES]))))
def test_any_bytes_can_be_explained(parts: list[bytes]) -> None:
    report = explain([Log("log", parts)], CAUSES)
    assert all(line.isprintable() for line in words.as_text(report).splitlines())
    json.dumps(words.as_json(report))


def test_the_sieve_keeps_ordinary_lines_out() -> None:
    sieve = Sieve(Evidence(CAUSES).texts())
    block = "\n".join(_NOISE).encode()
    assert [*sieve.select(block)] == []
    assert [*sieve.select(block + b"\nEADDRINUSE\n" + block)] == [len(_NOISE)]
    assert [*sieve.select(block)] == []
    # One text that is in every step would let all of a log through.
    steps = b"step 120 loss 0.53 lr 1e-4\n{'loss': 0.51, 'epoch': 0.2}\n 12%|# | 3/90 [00:01<00:30, 2.1it/s]"
    assert [*Sieve(Evidence(causes()).texts()).select(steps)] == []


def test_of_lines_that_differ_in_numbers_a_few_are_looked_at_unless_one_matters() -> None:
    evidence = Evidence(causes())
    sieve = Sieve(evidence.texts(), evidence.texts_to_try())
    steps = [f"{sha256(b'%d' % number).hexdigest()} train error: 0.{number}" for number in range(100)]
    raised = [f"[rank{number}]: FooError: {number}" for number in range(100)]
    block = "\n".join([*steps, *raised]).encode()
    looked_at = []
    for index in sieve.select(block):
        looked_at.append(index)
        if index >= len(steps):
            sieve.keep(raised[index - len(steps)].encode())
    assert looked_at == [*range(5), *range(100, 200)]
    assert [*sieve.select(block)] == [*range(100, 200)]


def test_what_machines_differ_in_is_found_behind_many_that_agree() -> None:
    late = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"
    logs = [
        Log(f"node-{at}.log", [f"  run_id           : {4711 + at // 7}\n{late}".encode()]) for at in range(8)
    ]
    verdict = explain(logs).verdict
    assert verdict is not None
    assert verdict.incident.cause is not None
    assert verdict.incident.cause.id == "run-ids-differ"


def test_a_line_whose_numbers_decide_is_always_looked_at() -> None:
    log = "\n".join([*["job-0 exited with code 0"] * 100, "job-7 exited with code 9"]).encode()
    verdict = explain([Log("log", [log])]).verdict
    assert verdict is not None
    assert verdict.incident.first.line == 101


def test_forms_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.diagnose.explain.sieve._MOST_FORMS", 10)
    sieve = Sieve([b"text"])
    for letter in "abcdefghijklmnopqrst":
        assert [*sieve.select(f"{letter}\n".encode())] == []
    assert len(sieve._clean) <= 11


@pytest.mark.parametrize(
    "line", [b"\x1b EADDRINUSE", b"\x1b[1 mEADDRINUSE", b"\x1b[12 \x1b7EADDR\x1b[0mINUSE"]
)
def test_an_escape_ends_where_it_ends_in_the_line(line: bytes) -> None:
    """Not where it would end once spaces and digits are gone."""
    assert "EADDRINUSE" in decode(line)
    assert [*Sieve([reduce(b"EADDRINUSE")]).select(line)] == [0]


@cache
def _sieve_of_all() -> Sieve:
    evidence = Evidence(causes())
    return Sieve([*evidence.texts(), *evidence.texts_to_try()])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_match_of_the_knowledge_base_gets_through(data: st.DataObject) -> None:
    """Also those that no sample shows: what a pattern matches, the sieve lets through."""
    sieve = _sieve_of_all()
    pattern = data.draw(st.sampled_from([pattern for cause in causes() for pattern in cause.patterns]))
    text = data.draw(st.from_regex(re.compile(pattern.pattern, pattern.flags & ~re.UNICODE | re.ASCII)))
    line = text.replace("\n", " ").encode(errors="replace")
    if pattern.search(decode(line)):
        assert [*sieve.select(line)] == [0]
