"""Load generators in processes of their own, led by words over a pipe."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from load import ANSWER_LIMIT_S, Crowd, Load, RoundRobin
from servers import ServerError

if TYPE_CHECKING:
    Pipe = Connection[object, object]

GO = "go"
END = "end"


class Generator:
    """The process, seen from outside. Each word to it gets one answer: what it did, or nothing."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        # A forked child would hold this process's sockets open: no server could see them close.
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=answer, args=(work, far_end, arguments), daemon=True)
        # A Ctrl-C of the terminal reaches the child too, which inherits that it is to ignore it: ending the
        # child is up to this side.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        far_end.close()

    def say(self, word: str) -> None:
        """Tell it what to do next."""
        try:
            self._pipe.send(word)
        except OSError:
            pass  # it has ended, and left the reason in the pipe: hear() says it

    def hear(self) -> Load | None:
        """Its answer."""
        try:
            if not self._pipe.poll(ANSWER_LIMIT_S + 10):
                raise ServerError("a load generator got no answer in time")
            said = self._pipe.recv()
        except (EOFError, OSError):
            raise ServerError("a load generator ended early") from None
        if isinstance(said, str):
            raise ServerError(said)
        assert said is None or isinstance(said, Load)
        return said

    def hear_load(self) -> Load:
        """Its answer to a word that makes it work."""
        load = self.hear()
        assert load is not None
        return load

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def answer(work: Callable[..., None], pipe: Pipe, arguments: tuple[object, ...]) -> None:
    """The process, seen from inside: work, and say what went wrong if anything did."""
    try:
        work(pipe, *arguments)
    except EOFError:
        pass  # the other side has ended
    except (ServerError, OSError) as error:
        pipe.send(str(error))


def keep_busy(pipe: Pipe, port: int, count: int, request: bytes, reply: bytes) -> None:
    """Keep these clients busy from each GO to the next word, and then tell what they did."""
    clients = RoundRobin(port, count, request, reply)
    pipe.send(None)
    while True:
        assert pipe.recv() == GO
        load = clients.run(pipe.poll)
        pipe.recv()
        pipe.send(load)


def arrive(pipe: Pipe, port: int, count: int) -> None:
    """Connect a crowd at each GO and tell how long it took; let it leave at each END."""
    crowd = Crowd(port, count)
    while True:
        crowd.gather()
        pipe.send(None)
        assert pipe.recv() == GO
        pipe.send(crowd.arrive())
        assert pipe.recv() == END
        crowd.close()
