"""The quick way through a log drops no line that matches, at its first sight, and most of the others."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.explain import quick
from rallypoint.explain.quick import BLOCK_BYTES, LONGEST_LINE, TRIES, Sieve, blocks, fixed_texts

pytestmark = pytest.mark.windows

_PATTERNS = [
    r"EADDRINUSE on port \d+",
    r"(?i)timed? out after (?P<seconds>[\d.]+)",
    r"Connection (?:reset|closed) by peer",
    r"\b\w*(?:Error|Exception)\b",
    r"^Traceback \(most recent call last\):",
    r"exit(?:ed with)? code:? -?[1-9]\d*",
    r"(?=.*CUDA).*out of memory",
    r"(?:NaN|nan) found|x{3}yes",
    r"größe ist falsch",
    r'  File "(?P<file>[^"]+)", line 7',
]


def _sieve(*patterns: str) -> Sieve:
    return Sieve(map(re.compile, patterns or _PATTERNS))


def _seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


# Fixed texts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("EADDRINUSE", {b"eaddrinuse"}),
        ("(?i)Timed Out", {b"timed out"}),
        (r"errno: 98.*port \d+", {b"errno: 98"}),
        ("(?:first|second) things", {b" things"}),
        ("first|second", {b"first", b"second"}),
        ("a(?P<x>long text)?b", None),
        ("(?:long text)+", {b"long text"}),
        ("(?:long text)*", None),
        ("x{5}yes, it is", {b"yes, it is"}),
        ("ab", None),
        ("1234567", None),
        ("long|a", None),
        ("(?=ahead)text", {b"text"}),
        ("wörter", {b"rter"}),
        ("出错了", {"出错了".encode()}),
    ],
)
def test_fixed_texts(pattern: str, texts: set[bytes] | None) -> None:
    assert fixed_texts(re.compile(pattern)) == texts


def test_a_pattern_without_a_fixed_text_names_no_line() -> None:
    assert _sieve(r"\d+").wanted(b"1\n2") == []


# The sieve -------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_line_that_matches_is_wanted_at_its_first_sight(data: st.DataObject) -> None:
    pattern = re.compile(data.draw(st.sampled_from(_PATTERNS)))
    text = data.draw(st.from_regex(pattern)).replace("\n", " ")
    line = text.encode(errors="replace")
    before = data.draw(st.lists(st.sampled_from([b"step 1", b"loss 0.5\r", b"\x1b[1mError\x1b[0m", b""])))
    if pattern.search(line.decode()):
        assert len(before) in _sieve().wanted(b"\n".join([*before, line, b"step 2"]))


@given(st.lists(st.binary(max_size=80)))
def test_any_bytes_can_be_sieved(lines: list[bytes]) -> None:
    sieve, block = _sieve(), b"\n".join(lines)
    wanted = sieve.wanted(block)
    assert wanted == sorted(set(wanted))
    assert all(0 <= number <= block.count(b"\n") for number in wanted)


def test_ordinary_lines_are_dropped() -> None:
    sieve, block = _sieve(), b"step 12 loss 0.25\n 45%|###  | 4/9\r 46%|###  | 5/9\nStarting the training\n"
    assert sieve.wanted(block) == []
    assert sieve.wanted(block + b"Connection reset by peer\n" + block) == [3]


@pytest.mark.parametrize(
    "line",
    [
        b"CONNECTION RESET BY PEER",
        b"Connection re\x1b[1mset by\x1b]8;;x\x07 peer",
        b"\x1b[12 \x1b7Connection\x1b[0m closed by peer",
        b"Connection   closed by peer",
        b"1%|\r2%|\rConnection closed by peer\r3%|\r",
        b"step 1 " * 100 + b"Connection closed by peer",
    ],
)
def test_how_a_text_may_be_written(line: bytes) -> None:
    assert _sieve().wanted(b"a\n" + line + b"\r\nb") == [1]


def test_lines_that_differ_in_numbers_are_dropped_once_some_were_tried_in_vain() -> None:
    sieve, block = _sieve(), b"error_rate_error: 0.25\n" * TRIES
    assert len(sieve.wanted(block)) == TRIES
    assert sieve.wanted(block) == []


def test_a_form_that_mattered_is_never_dropped() -> None:
    sieve, block = _sieve(), b"[rank3]: FooError: 12\n" * TRIES
    sieve.wanted(block)
    sieve.keep(b"[rank0]: FooError: 7")
    assert len(sieve.wanted(block)) == TRIES


def test_no_line_is_dropped_whose_numbers_decide() -> None:
    sieve = _sieve()
    for _ in range(TRIES + 1):
        assert sieve.wanted(b"job-0 exited with code 0") == [0]


def test_the_parts_of_a_line_that_matter() -> None:
    raw = b"1%|\r" * 1000 + b"Connection closed by peer\r" + b"2%|\r" * 1000 + b"100%| done\r"
    assert _sieve().parts(raw) == [b"Connection closed by peer", b"100%| done"]
    assert _sieve().parts(b"step 1\r") == [b"step 1"]


def test_forms_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "_MOST_FORMS", 10)
    sieve = _sieve()
    for letter in "abcdefghijklmnopqrst":
        assert sieve.wanted(f"{letter}\n".encode()) == []
    assert len(sieve._tries) <= 12


# Blocks ----------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20)))
def test_blocks_lose_nothing(chunks: list[bytes]) -> None:
    assert b"".join(blocks(chunks)) == b"".join(chunks)


def test_a_line_that_does_not_end_is_cut() -> None:
    found = list(blocks([*[b"x" * BLOCK_BYTES] * 5, b"x\nnext\n"]))
    assert sum(map(len, found)) < LONGEST_LINE + 100
    assert found[-1].endswith(b"next\n")


def test_a_progress_bar_that_does_not_end_its_line_is_read() -> None:
    found = list(blocks([b"\r 50%" * BLOCK_BYTES, b"\rTraceback\n"]))
    assert found[-1].endswith(b"Traceback\n")
    assert sum(map(len, found)) == 5 * BLOCK_BYTES + 11
    assert all(len(block) <= 2 * BLOCK_BYTES for block in found)


# Speed: the bounds are several times what it takes, for slow machines ---------------------------------------


def _read(sieve: Sieve, chunks: Iterable[bytes]) -> int:
    return sum(len(sieve.wanted(block)) for block in blocks(chunks))


def test_a_text_in_every_line_costs_little() -> None:
    chunk = b"".join(b"step %d error_rate: 0.%d Error: 0.03\n" % (n, n * 7) for n in range(25_000))
    sieve = _sieve()
    assert _seconds(lambda: _read(sieve, [chunk] * 10)) < 2
    assert _read(sieve, [chunk]) == 0


def test_a_line_of_a_hundred_megabytes_costs_little() -> None:
    chunks = [b"abc Error " * 100_000] * 100
    assert _seconds(lambda: _read(_sieve(), chunks)) < 1
    assert _seconds(lambda: _sieve().wanted(b"".join(chunks))) < 3
