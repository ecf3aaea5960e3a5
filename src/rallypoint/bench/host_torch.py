"""Starts torch's own servers, and ranks with torch's own clients, each a process of its own; led by orders.

It imports torch once, which takes seconds, and forks for each of them, which takes milliseconds. So it has to
be a single thread: what another one holds locked would stay locked in a fork for ever.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final

from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Line, Peer, end_with_parent, obey, outcome, own_line
from rallypoint.launch.switches import CLIENT_VARIABLE, PATCH_VARIABLE, ClientChoice, Patch
from rallypoint.store.server.loops.backend import VARIABLE as LIBUV_VARIABLE

if TYPE_CHECKING:
    from rallypoint.pytorch.peers import Timing

ANSWER_LIMIT_S: Final = 60.0
"""How long a server may take to come up; torch's own socket may mean look-ups that take seconds."""

# torch's own server and client, whatever the user has asked for elsewhere. And no threads of NumPy's, which
# comes with torch.
_ENVIRONMENT: Final = {
    PATCH_VARIABLE: Patch.NEVER.value,
    CLIENT_VARIABLE: ClientChoice.TORCH.value,
    "OPENBLAS_NUM_THREADS": "1",
}
_FORKING: Final = get_context("fork")


class Fork(Peer):
    """A forked process, seen from here. It stays until it is ended: an earlier end is a failure."""

    def __init__(self, name: str, work: Callable[..., object], *arguments: Any) -> None:
        self.name = name
        self.line, theirs = _FORKING.Pipe()
        self._process = _FORKING.Process(target=_live, args=(theirs, work, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0
        self.sentinel = self._process.sentinel

    def last_words(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return f"with exit code {code}" if code >= 0 else f"by signal {-code}"

    def end(self) -> None:
        """End the process; nothing is left of it afterwards."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.line.close()


def _live(line: Line, work: Callable[..., object], arguments: Sequence[Any]) -> None:
    """A fork from beginning to end: its last message is the outcome of its work."""
    end_with_parent()
    line.send(outcome(work, line, *arguments))
    signal.pause()


def hear_all(forks: Sequence[Fork], deadline: float) -> list[Any]:
    """The next message of each; BenchError if one of them fails, or says nothing in time.

    They are heard in turn. Until the first one speaks, the words of the others do not wake this process: the
    first may be measuring. But the end of any of them is noticed at once.
    """
    heard = []
    by_sentinel = {fork.sentinel: fork for fork in forks}
    for fork in forks:
        ready = wait([fork.line, *by_sentinel], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise BenchError(f"the time is up, and nothing was heard of {fork.name}")
        for ended in by_sentinel.keys() & ready:
            while True:  # its last words, and then its end, which raises
                by_sentinel[ended].hear()
        heard.append(fork.hear())
    return heard


class TorchForks:
    """Carries out the orders."""

    def __init__(self) -> None:
        self._servers: dict[int, Fork] = {}

    def serve(self, backend: str, as_is: bool) -> tuple[int, int]:
        """Start a server of torch's: its process and port. `as_is`: on the socket that it makes itself."""
        use_libuv = {"libuv": True, "legacy": False}[backend]
        server = Fork(f"torch's {backend} server", be_server, use_libuv, as_is)
        self._servers[server.pid] = server
        return server.pid, self._hear(server)

    def renew(self, pid: int) -> int:
        """Let a server drop its store, and make another on the same port, which is the answer."""
        server = self._servers[pid]
        with suppress(OSError):  # it has ended: the answer that is missing tells
            server.line.send("renew")
        return self._hear(server)

    def stop(self, pid: int) -> None:
        """End a server."""
        self._servers.pop(pid).end()

    def tutorial(self, target: str, ranks: int, barriers: int, limit_s: float) -> dict[str, Any]:
        """The seconds that rank 0 needs for its store and for barriers; see `time_rank`."""
        from rallypoint.pytorch.peers import Timing, listening_socket

        with ExitStack() as resources:
            listener = resources.enter_context(listening_socket(0))
            # One system call opens a gate for all ranks, so they go on at the same time. At a gate that they
            # pass again, a quick rank could take the place of a slow one.
            gates = [os.eventfd(0, os.EFD_SEMAPHORE) for _ in range(barriers + 2)]
            for gate in gates:
                resources.callback(os.close, gate)
            forks = []
            for rank in range(ranks):
                timing = Timing(target, ranks, barriers, limit_s)
                forks.append(Fork(f"rank {rank}", be_rank, gates, rank, timing, listener))
                resources.callback(forks[-1].end)
            listener.close()  # it is rank 0's
            deadline = time.monotonic() + limit_s
            for gate in gates:
                hear_all(forks, deadline)
                os.eventfd_write(gate, ranks)
            times: dict[str, Any] = hear_all(forks, deadline)[0]
            return times

    def _hear(self, server: Fork) -> int:
        """Its port. One that fails is ended: later answers of it would be taken for those to others."""
        try:
            return int(hear_all([server], time.monotonic() + ANSWER_LIMIT_S)[0])
        except BenchError:
            self.stop(server.pid)
            raise


def be_server(line: Line, use_libuv: bool, as_is: bool) -> None:
    """In a fork: serve, and make the server anew with every message."""
    from rallypoint.pytorch.peers import ask_no_name_server, make_server, make_server_again

    if not as_is:
        ask_no_name_server()
    store = make_server(0, use_libuv, as_is)
    port = store.port
    while True:
        line.send(port)
        line.recv()
        del store  # the server ends with it
        store = make_server_again(port, use_libuv, as_is)


def be_rank(
    line: Line, gates: Sequence[int], rank: int, timing: Timing, listener: socket.socket
) -> dict[str, Any]:
    """In a fork: take part as a rank, in step with the others; how long it took."""
    from rallypoint.pytorch.peers import time_rank

    ahead = iter(gates)

    def line_up() -> None:
        line.send("ready")
        os.eventfd_read(next(ahead))

    return time_rank(rank, timing, listener, line_up)


def main() -> None:
    """Import torch with all that forks need, and carry out orders."""
    os.environ.update(_ENVIRONMENT)
    os.environ.pop(LIBUV_VARIABLE, None)
    for module in ("peers", "schemes", "substitution"):
        import_module(f"rallypoint.pytorch.{module}")
    gc.freeze()  # keeps collections from touching, and so copying, what forks share
    obey(TorchForks(), own_line())


if __name__ == "__main__":
    main()
