"""Processes that are led by orders and answer them: a line of JSON each way, over standard input and output.

A worker ends when its standard input does, so none outlives the command.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rallypoint.bench.results import BenchError, percentile

Message = dict[str, Any]

ORDERS = 0
"""The descriptor that a worker reads its orders from."""

_PR_SET_PDEATHSIG = 1

ANSWER_GRACE_S = 15.0
"""How much longer than the worker's own limit its answer may take: it says more about what went wrong."""


class Worker:
    """The process, seen from outside: `python -m module`."""

    def __init__(self, module: str, name: str) -> None:
        self.name = name
        self._said = b""
        self._log = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 - closed by stop()
        # A session of its own keeps a Ctrl-C of the terminal from the worker: this program stops it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        assert self._process.stdout
        self.output = self._process.stdout.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def order(self, **message: object) -> None:
        """Tell it what to do next."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: the answer that is missing tells

    def ask(self, limit_s: float, /, **message: object) -> Message:
        """Tell it what to do, and await the answer."""
        self.order(**message)
        return gather([self], limit_s)[0]

    def read(self) -> Message | None:
        """Its answer, if that is complete. The caller knows that there is something to read."""
        piece = os.read(self.output, 1 << 20)
        if not piece:
            raise BenchError(f"{self.name} ended early; {self.last_words()}")
        self._said += piece
        if not piece.endswith(b"\n"):
            return None
        said, self._said = self._said, b""
        try:
            answer: Message = json.loads(said)
        except ValueError:
            raise BenchError(f"{self.name} said {said[:200]!r}, which is no answer") from None
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    def last_words(self) -> str:
        """The end of what it has logged."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "its log ends: " + " | ".join(lines[-5:]) if lines else "its log is empty"

    def kill(self) -> None:
        """Let it do nothing more: an answer that comes late would be taken for that to the next order."""
        self._process.kill()

    def stop(self) -> None:
        """End the process; nothing is left of it afterwards."""
        assert self._process.stdin
        assert self._process.stdout
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()
            except OSError:
                pass  # an order that was not read
        self._log.close()


def start(resources: ExitStack, module: str, name: str) -> Worker:
    """Start a worker that these resources stop in the end, whatever happens."""
    with uninterrupted():
        worker = Worker(module, name)
        resources.callback(worker.stop)
    return worker


def ask_all(workers: Sequence[Worker], limit_s: float, /, **message: object) -> list[Message]:
    """The same order to all; their answers."""
    return ask_each(workers, limit_s, [message] * len(workers))


def ask_each(workers: Sequence[Worker], limit_s: float, messages: Sequence[Message]) -> list[Message]:
    """An order for each; their answers."""
    for worker, message in zip(workers, messages, strict=True):
        worker.order(**message)
    return gather(workers, limit_s)


def gather(workers: Sequence[Worker], limit_s: float) -> list[Message]:
    """The answers of all workers; the first of them that fails, or does not answer in time, is a fault."""
    deadline = time.monotonic() + limit_s + ANSWER_GRACE_S
    answers: dict[int, Message] = {}
    by_output = {worker.output: worker for worker in workers}
    poll = select.poll()
    for output in by_output:
        poll.register(output, select.POLLIN)
    while len(answers) < len(by_output):
        events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            late = [worker for output, worker in by_output.items() if output not in answers]
            for worker in late:
                worker.kill()
            raise BenchError(f"no answer within {limit_s:g} s from {', '.join(each.name for each in late)}")
        for output, _ in events:
            said = by_output[output].read()
            if said is not None:
                answers[output] = said
    return [answers[output] for output in by_output]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off an interruption that comes meanwhile: it must not fall between a start and the note to stop."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            raise KeyboardInterrupt(came[0])


# The worker itself


def answer(message: Message) -> None:
    """Answer an order."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends, however that ends, and however busy it is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Orders:
    """The orders on standard input. Nothing is read ahead, so that it can be asked whether one waits."""

    def __init__(self) -> None:
        self._said = b""

    @property
    def are_waiting(self) -> bool:
        """Whether there is another order, or the end of them."""
        return b"\n" in self._said or bool(select.select([ORDERS], [], [], 0)[0])

    def take(self) -> Message | None:
        """The next order; None if there are no more."""
        while b"\n" not in self._said:
            piece = os.read(ORDERS, 1 << 20)
            if not piece:
                return None
            self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        order: Message = json.loads(line)
        return order


def obey(worker: object, orders: Orders) -> None:
    """Carry out orders until there are no more: each is the name of a method, with its arguments.

    An exception is the answer, and not the end.
    """
    while (order := orders.take()) is not None:
        try:
            answer(getattr(worker, order.pop("do"))(**order))
        except (BenchError, OSError) as error:
            answer({"error": str(error)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


# What a process of a load says of itself


@dataclass(frozen=True)
class Load:
    """How many operations, from when to when, at which cost to itself, and how long they took."""

    operations: int
    start: float
    end: float
    cpu: float
    share: float
    """How much of one core the busiest process took: near 1, it may have been the bottleneck."""
    p50: float | None = None
    p99: float | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def message(self) -> Message:
        """For the answer of a worker."""
        return asdict(self)


def together(loads: Sequence[Load]) -> Load:
    """What several processes did at the same time."""
    return Load(
        sum(load.operations for load in loads),
        min(load.start for load in loads),
        max(load.end for load in loads),
        sum(load.cpu for load in loads),
        max(load.share for load in loads),
        max((load.p50 for load in loads if load.p50 is not None), default=None),
        max((load.p99 for load in loads if load.p99 is not None), default=None),
    )


class Stopwatch:
    """The time and the CPU time of this process, from its making on."""

    def __init__(self) -> None:
        self._cpu, self._start = time.process_time(), time.monotonic()

    def stop(self, operations: int, taken: Iterable[float] = ()) -> Load:
        """What was done meanwhile; `taken` are the times of single operations, if they were timed."""
        end, cpu = time.monotonic(), time.process_time() - self._cpu
        ordered = sorted(taken)
        p50, p99 = (percentile(ordered, 0.5), percentile(ordered, 0.99)) if ordered else (None, None)
        return Load(operations, self._start, end, cpu, cpu / (end - self._start), p50, p99)
