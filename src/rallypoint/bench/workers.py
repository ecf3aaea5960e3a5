"""Objects in processes of their own, which carry out orders; and what a process of a load reports of itself.

The system ends a worker when the process that started it ends, so none outlives the command. One that needs
torch is a fork of a server that has imported it once (`preload`): that takes milliseconds and not seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pkgutil import resolve_name
from typing import Any, Final

from rallypoint.bench.results import BenchError

_PR_SET_PDEATHSIG: Final = 1

_worker: Any = None
"""In the process of a worker: the object."""


class LoadProcess:
    """A process that generates load. `kind` is the class that runs in it, as `module:name`."""

    def __init__(self, resources: ExitStack, kind: str, preload: str = "") -> None:
        """Start it; the resources end it."""
        context: Any = get_context("forkserver" if preload else "spawn")
        if preload:
            context.set_forkserver_preload([preload])
        self._pool = ProcessPoolExecutor(1, context, _begin, (kind,))
        # A Ctrl-C of the terminal is for this process alone, which then ends its workers.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        started = self._pool.submit(os.getpid)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self.pid = started.result()
        resources.callback(self.end)

    def order(self, do: str, /, **arguments: object) -> Future[Any]:
        """Call its method `do`; returns the future of the outcome."""
        return self._pool.submit(_call, do, arguments)

    def ask(self, limit_s: float, do: str, /, **arguments: object) -> Any:
        """Call its method `do`, and wait for the outcome."""
        return outcomes([self.order(do, **arguments)], limit_s)[0]

    def end(self) -> None:
        """End the process, whatever it does; nothing is left of it afterwards."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._pool.shutdown()


def outcomes(orders: Sequence[Future[Any]], limit_s: float) -> list[Any]:
    """Await what several workers were ordered to do. The first that fails, or is late, is a fault."""
    done, late = wait(orders, limit_s, FIRST_EXCEPTION)
    found = {order: order.result() for order in done}
    if late:
        raise BenchError(f"{len(late)} of {len(orders)} processes gave no answer within {limit_s:g} s")
    return [found[order] for order in orders]


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends, however that ends, and however busy it is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _begin(kind: str) -> None:
    """In the worker's process: make the object that carries out orders; standard output is not for it."""
    global _worker
    end_with_parent()
    parent = parent_process()
    if parent and not parent.is_alive():
        os._exit(1)  # it ended before that took effect
    os.dup2(2, 1)
    _worker = resolve_name(kind)()


def _call(do: str, arguments: dict[str, Any]) -> Any:
    try:
        return getattr(_worker, do)(**arguments)
    except BlockingIOError as error:  # the kernel's time-out
        raise BenchError("a client got no answer in time") from error


@dataclass
class Load:
    """What clients do, from the moment when this is made until `stop`."""

    operations: int = 0
    start: float = field(default_factory=time.monotonic)
    end: float = 0.0
    cpu: float = field(default_factory=time.process_time)
    share: float = 0.0
    """How much of one core the busiest process took: near 1, it may have been the bottleneck."""
    taken: list[float] = field(default_factory=list)
    """Seconds of single operations."""
    counted: list[int] = field(default_factory=list)
    """By rank, the reply to an ADD of 1; `seen`: to an ADD of 0 after that."""
    seen: list[int] = field(default_factory=list)

    def stop(self, operations: int) -> None:
        """All is done."""
        self.operations, self.end = operations, time.monotonic()
        self.share = (time.process_time() - self.cpu) / self.seconds

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def percentile(self, share: float) -> float:
        """How many seconds that share of the operations took at most."""
        ordered = sorted(self.taken)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def together(loads: Sequence[Load]) -> Load:
    """The loads of several processes as one."""
    return Load(
        sum(load.operations for load in loads),
        min(load.start for load in loads),
        max(load.end for load in loads),
        share=max(load.share for load in loads),
        taken=[seconds for load in loads for seconds in load.taken],
        counted=[number for load in loads for number in load.counted],
        seen=[number for load in loads for number in load.seen],
    )
