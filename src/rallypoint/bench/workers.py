"""Processes that carry out orders over a pipe; and what a process of a load reports of itself.

A worker is an object in a process of its own: an order names a method, with its arguments. The system ends a
worker when the process that started it ends, so none outlives the command. A process that needs torch is a
fork of a server that has imported it once (`preload`), which takes milliseconds instead of seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from operator import methodcaller
from pkgutil import resolve_name
from typing import Any, Final

from rallypoint.bench.results import BenchError, percentile

ANSWER_GRACE_S: Final = 15.0
"""How much longer than the worker's own limit its answer may take: it says more about what went wrong."""

_PR_SET_PDEATHSIG: Final = 1


class Worker:
    """A worker, as seen by the process that started it; `kind` is its class, as `module:name`."""

    def __init__(self, kind: str, name: str, preload: str = "") -> None:
        self.name = name
        self.line, theirs = Pipe()
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed by stop()
        context: Any = get_context("forkserver" if preload else "spawn")
        if preload:
            context.set_forkserver_preload([preload])
        self._process = context.Process(target=_live, args=(kind, theirs, self._log.name))
        # A Ctrl-C of the terminal is for this process alone, which then stops its workers.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        self.pid: int = self._process.pid

    def order(self, **message: object) -> None:
        """Tell it what to do next: the method `do`, with its arguments."""
        with suppress(OSError):  # it has ended: the missing answer will be noticed
            self.line.send(message)

    def ask(self, limit_s: float, /, **message: object) -> Any:
        """Tell it what to do, and await the answer."""
        return ask_each([self], limit_s, [message])[0]

    def hear(self) -> Any:
        """Await its next answer; BenchError if it has failed or ended."""
        try:
            answer = self.line.recv()
        except (EOFError, OSError):
            raise BenchError(f"{self.name} ended early; {self.last_words()}") from None
        if isinstance(answer, BenchError):
            raise BenchError(f"{self.name}: {answer}")
        return answer

    def last_words(self) -> str:
        """The end of its log."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "its log ends: " + " | ".join(lines[-5:]) if lines else "its log is empty"

    def kill(self) -> None:
        """Stop it at once: a late answer would be taken for the answer to the next order."""
        self._process.kill()

    def stop(self) -> None:
        """End the process; nothing is left of it afterwards."""
        self.kill()
        self._process.join()
        self.line.close()
        self._log.close()


def start(resources: ExitStack, kind: str, name: str, preload: str = "") -> Worker:
    """Start a worker that these resources stop in the end."""
    worker = Worker(kind, name, preload)
    resources.callback(worker.stop)
    return worker


def ask_all(workers: Sequence[Worker], limit_s: float, /, **message: object) -> list[Any]:
    """The same order to all; their answers."""
    return ask_each(workers, limit_s, [message] * len(workers))


def ask_each(workers: Sequence[Worker], limit_s: float, orders: Iterable[dict[str, Any]]) -> list[Any]:
    """An order of its own to each worker; their answers. The first that fails, or is late, is a fault."""
    for worker, order in zip(workers, orders, strict=True):
        worker.order(**order)
    deadline = time.monotonic() + limit_s + ANSWER_GRACE_S
    late = {worker.line: worker for worker in workers}
    answers = {}
    while late:
        ready = wait(list(late), max(0.0, deadline - time.monotonic()))
        if not ready:
            for worker in late.values():
                worker.kill()
            names = ", ".join(worker.name for worker in late.values())
            raise BenchError(f"no answer within {limit_s:g} s from {names}")
        for line in [line for line in late if line in ready]:
            answers[line] = late.pop(line).hear()
    return [answers[worker.line] for worker in workers]


# The worker itself


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends, however that ends, and however busy it is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _live(kind: str, line: Connection, log: str) -> None:
    """Carry out orders until there are no more. An exception is an answer, and not the end."""
    end_with_parent()
    with open(log, "ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    worker = resolve_name(kind)(line)
    with suppress(EOFError):
        while True:
            order = line.recv()
            line.send(outcome(methodcaller(order.pop("do"), **order), worker))


def outcome(work: Callable[..., object], *arguments: Any) -> object:
    """The result of some work, or its exception in words."""
    try:
        return work(*arguments)
    except (BenchError, OSError) as error:
        return BenchError(str(error))
    except Exception as error:
        return BenchError(f"{type(error).__name__}: {error}")


# What a process of a load reports of itself


@dataclass(frozen=True)
class Load:
    """How many operations, from when to when, at which cost to the load, and how long they took."""

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


def together(loads: Sequence[Load], taken: Iterable[float]) -> Load:
    """The loads of several processes as one; `taken` are the times of single operations."""
    ordered = sorted(taken)
    return Load(
        sum(load.operations for load in loads),
        min(load.start for load in loads),
        max(load.end for load in loads),
        sum(load.cpu for load in loads),
        max(load.share for load in loads),
        *((percentile(ordered, 0.5), percentile(ordered, 0.99)) if ordered else ()),
    )


class Stopwatch:
    """The time and the CPU time of this process since the stopwatch was made."""

    def __init__(self) -> None:
        self._cpu, self._start = time.process_time(), time.monotonic()

    def stop(self, operations: int, taken: Iterable[float] = ()) -> Load:
        """The load since the start; `taken` are the times of single operations, if they were timed."""
        end, cpu = time.monotonic(), time.process_time() - self._cpu
        return together([Load(operations, self._start, end, cpu, cpu / (end - self._start))], taken)
