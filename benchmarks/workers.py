"""Processes that are led by orders and answer them: a line of JSON each way, over standard input and output.

A worker ends when its standard input does, so none outlives whoever started it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servers import ServerError, cpu_seconds, resident_bytes

Message = dict[str, Any]

ANSWER_GRACE_S = 15.0
"""How much longer than the worker's own limit its answer may take: it says more about what went wrong."""


class Worker:
    """The process, seen from outside."""

    def __init__(self, script: str, name: str) -> None:
        self.name = name
        self._said = b""
        self._log = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 - closed by stop()
        # A session of its own keeps a Ctrl-C of the terminal from the worker: this program stops it.
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        assert self._process.stdout
        self.output = self._process.stdout.fileno()

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far."""
        return cpu_seconds(self._process.pid)

    def resident_bytes(self) -> int:
        """The memory that it holds."""
        return resident_bytes(self._process.pid)

    def order(self, **message: object) -> None:
        """Tell it what to do next."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: the answer that is missing tells

    def read(self) -> Message | None:
        """Its answer, if that is complete; for whoever knows that there is something to read."""
        piece = os.read(self.output, 1 << 20)
        if not piece:
            raise ServerError(f"{self.name} ended early; {self.last_words()}")
        self._said += piece
        if not piece.endswith(b"\n"):
            return None
        said, self._said = self._said, b""
        answer: Message = json.loads(said)
        if "error" in answer:
            raise ServerError(f"{self.name}: {answer['error']}")
        return answer

    def last_words(self) -> str:
        """The end of what it has logged."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "its log ends: " + " | ".join(lines[-5:]) if lines else "its log is empty"

    def stop(self) -> None:
        """End the process; nothing is left of it afterwards."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()
            except OSError:
                pass  # an order that was not read
        self._log.close()


def gather(workers: Sequence[Worker], what: str, limit_s: float) -> list[Message]:
    """The answers of all workers; the first of them that fails, or does not answer in time, is a fault."""
    deadline = time.monotonic() + limit_s + ANSWER_GRACE_S
    answers: dict[int, Message] = {}
    by_output = {worker.output: worker for worker in workers}
    with select.epoll() as poll:
        for output in by_output:
            poll.register(output, select.EPOLLIN)
        while len(answers) < len(by_output):
            events = poll.poll(max(0.0, deadline - time.monotonic()))
            if not events:
                late = ", ".join(by_output[output].name for output in by_output if output not in answers)
                raise ServerError(f"{what}: no answer within {limit_s:g} s from {late}")
            for output, _ in events:
                answer = by_output[output].read()
                if answer is not None:
                    answers[output] = answer
    return [answers[output] for output in by_output]


def answer(message: Message) -> None:
    """Answer an order; for the worker itself."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
