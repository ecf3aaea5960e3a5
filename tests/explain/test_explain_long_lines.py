"""Lines that are made to be slow: what a line costs grows with its length, and not with its square.

Times are those that this thread has worked: other processes of the machine hardly change them. A pattern
whose time grows with the square of the length takes several times as long as is allowed here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from rallypoint.explain import Source, explain
from rallypoint.explain.knowledge import knowledge

pytestmark = pytest.mark.windows

LENGTH = 4096
ORDINARY = 200_000
LINES = 6
FILLERS = ("1", "a", "1 ", "a.", "/", "1:", "Error", ".so", "a=[", "1%|", "- ")


def seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def filled(text: str) -> str:
    return (text * LENGTH)[:LENGTH]


def literals(pattern: str) -> list[str]:
    """The fixed texts of a pattern, and all of them as one."""
    plain = re.sub(r"\(\?P<\w+>|\(\?[:!<=]+|\{[\d,]+\}|\\[a-zA-Z]\+?", "1", pattern)
    found = re.findall(r"[A-Za-z0-9:,=\[\] ()'/._-]{4,}", plain)
    return [*found, "".join(found)]


def test_no_line_keeps_a_known_cause_busy() -> None:
    for pattern in {*knowledge().patterns, *knowledge().speaker_patterns}:
        for text in (*FILLERS, *literals(pattern.pattern)):
            line = filled(text) + "\0"
            tries = (seconds(lambda: pattern.search(line)) for _ in range(3))  # noqa: B023
            assert any(took < 0.05 for took in tries), (pattern.pattern, text)


def test_what_matters_is_found_among_many_parts_of_a_line() -> None:
    log = Source("log", [b"1\r" * 100_000 + b"EADDRINUSE on port 29500\r" + b"1\r" * 100_000 + b"\n"])
    began = time.thread_time()
    report = explain([log])
    assert time.thread_time() - began < 2
    assert report.verdict is not None
    assert report.verdict.event.text == "EADDRINUSE on port 29500"


@pytest.mark.parametrize(
    "line",
    [
        *map(filled, FILLERS),
        "[a" + "1" * LENGTH,
        "loss 1 error" + " " * LENGTH + "x",
        "1%|" + "a|[" + "it/s" * LENGTH,
        "_" + filled("AaError") + "_",
        "│ ❱ 1 a" + " " * LENGTH + "a",
    ],
    ids=lambda line: line[:12],
)
def test_a_long_line_in_parts_is_explained_soon(line: str) -> None:
    """One line of 24 KB, in parts as a progress bar writes them, where each part is looked at.

    Twice the length may take twice as long, on any machine. With a square in it, it takes four times as long.
    """

    def work(length: int) -> None:
        known = "1 of 2 machines connected within 5 s: node-a"
        parts = "\r".join([line[: length - len(known) - 1] + " " + known] * LINES)
        explain([Source("log", [b"Traceback (most recent call last):\n", parts.encode(), b"\n"])])

    def growth() -> float:
        return seconds(lambda: work(LENGTH)) / seconds(lambda: work(LENGTH // 2))

    assert any(growth() < 2.6 for _ in range(5))


def test_ordinary_lines_are_not_read_one_by_one() -> None:
    """500 MB of them take about 4 s; 50 times as much if each was read."""
    lines = "".join(
        f"step {step} loss {1 / (step + 1):.4f} tokens/s {step % 977}\n" for step in range(ORDINARY)
    )
    assert seconds(lambda: explain([Source("x", [lines.encode()])])) < 2


def test_many_different_failures_take_no_square_of_their_number() -> None:
    names = ["".join(chr(97 + number // 26**place % 26) for place in range(4)) for number in range(3000)]
    lines = "".join(f"Error: {name} could not be read\n" for name in names)
    assert seconds(lambda: explain([Source("x", [lines.encode()])])) < 12
