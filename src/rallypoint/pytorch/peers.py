"""Processes with torch in them, for measurements: `python -m rallypoint.pytorch.peers`, led by orders.

A line of JSON each on standard input, and one on standard output as the answer, {"error": …} for a fault:

    {"do": "serve", "backend": "libuv", "as_is": false}    {"pid": …, "port": …}
    {"do": "renew", "pid": …}                              {"port": …}
    {"do": "stop", "pid": …}                               {}
    {"do": "tutorial", "target": "torch-libuv", "ranks": 64, "barriers": 5, "limit_s": 120}
                                                           {"init": seconds, "barrier": [seconds, …]}

`serve` starts torch's own server, alone in a process; `renew` puts an empty one in its place, as a launcher
does that starts its job again. For `tutorial` see there.

It imports torch once, which takes seconds, and forks for each order. It ends, with all that it has started,
when its standard input closes. torch is imported by `main`, and not before: the environment that it finds
decides how many threads it brings, and whether Rallypoint takes its place.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from functools import partial
from importlib import import_module
from typing import Any, BinaryIO

from rallypoint.launch.switches import CLIENT_VARIABLE, PATCH_VARIABLE, ClientChoice, Patch
from rallypoint.pytorch.forks import Channel, Fork, ForkError, Forks, Message, ask_no_name_server
from rallypoint.server.loops.backend import VARIABLE as LIBUV_VARIABLE
from rallypoint.server.process.binding import BACKLOG

HOST = "127.0.0.1"

ANSWER_SECONDS = 60.0
"""How long a server may take to come up; torch's own socket may mean look-ups that take seconds."""

_BIND_SECONDS = 30.0
_PAUSE_SECONDS = 0.02

# torch's own server and client, whatever the user has asked for elsewhere. And no threads of NumPy's, which
# comes with torch: a process with more than one should not fork.
_ENVIRONMENT = {
    PATCH_VARIABLE: Patch.NEVER.value,
    CLIENT_VARIABLE: ClientChoice.TORCH.value,
    "OPENBLAS_NUM_THREADS": "1",
}


class Peers:
    """Carries out orders."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._servers: dict[int, Fork] = {}

    def carry_out(self, text: bytes) -> Message:
        """The answer to an order, which is the name of a method; a fault is an answer as well."""
        try:
            order = json.loads(text)
            answer: Message = getattr(self, order.pop("do"))(**order)
        except ForkError as error:
            return {"error": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return answer

    def serve(self, backend: str, as_is: bool = False) -> Message:
        """Start a server of torch's."""
        use_libuv = {"libuv": True, "legacy": False}[backend]
        server = self._forks.fork(f"torch's {backend} server", lambda line: be_server(line, use_libuv, as_is))
        self._servers[server.pid] = server
        return {"pid": server.pid, **self._hear(server)}

    def renew(self, pid: int) -> Message:
        """Let a server drop its store, and make another on the same port."""
        server = self._servers[pid]
        server.say({"do": "renew"})
        return self._hear(server)

    def stop(self, pid: int) -> Message:
        """End a server."""
        self._forks.end([self._servers.pop(pid)])
        return {}

    def tutorial(self, target: str, ranks: int, barriers: int, limit_s: float) -> Message:
        """Time what the tutorial times."""
        from rallypoint.pytorch import tutorial

        timing = tutorial.Timing(tutorial.TARGETS[target], ranks, barriers, limit_s)
        return tutorial.run(self._forks, timing, listening_socket(0))

    def _hear(self, server: Fork) -> Message:
        """Its answer. One that fails is ended: later answers of it would be taken for those to others."""
        try:
            return self._forks.hear_all([server], time.monotonic() + ANSWER_SECONDS)[0]
        except ForkError:
            self.stop(server.pid)
            raise


def be_server(line: Channel, use_libuv: bool, as_is: bool) -> None:
    """What the process of a server does."""
    if not as_is:
        ask_no_name_server()
    store = make_server(0, use_libuv, as_is)
    port: int = store.port
    line.say({"port": port})
    while line.hear() is not None:
        del store  # the server ends with it
        store = make_server_again(port, use_libuv, as_is)
        line.say({"port": port})


def listening_socket(port: int) -> socket.socket:
    """An IPv4 loopback socket, with as long a backlog as the kernel grants.

    torch looks up the name of every client it accepts. On this socket that name is always that of
    127.0.0.1, which the hosts file has, so nothing stalls. torch's own socket would be a dual-stack one,
    whose clients are ::ffff:127.0.0.1: that may take seconds each, and comparing with it would flatter
    Rallypoint.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def make_server(port: int, use_libuv: bool, as_is: bool) -> Any:
    """torch's server, and the client that comes with it; on a socket of torch's own, if `as_is`."""
    from torch.distributed import TCPStore

    make = partial(TCPStore, HOST, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    if as_is:
        return make(port=port)
    listener = listening_socket(port)
    return make(port=listener.getsockname()[1], master_listen_fd=listener.detach())


def make_server_again(port: int, use_libuv: bool, as_is: bool) -> Any:
    """A server on a port that one has just left; the last error, if the port stays taken."""
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return make_server(port, use_libuv, as_is)
        except (OSError, RuntimeError):  # of our socket, and of torch's
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_SECONDS)


def take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Orders and answers for this process alone; whatever else is printed goes to standard error."""
    orders, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(orders, "rb"), os.fdopen(answers, "wb")


def import_torch() -> None:
    """Import it with all that forks need, and keep collections from touching, and so copying, any of it."""
    os.environ.update(_ENVIRONMENT)
    os.environ.pop(LIBUV_VARIABLE, None)
    import_module("rallypoint.pytorch.tutorial")
    gc.freeze()


def main() -> None:
    """Carry out orders until there are no more."""
    orders, answers = take_streams()
    import_torch()
    with Forks(orders.fileno(), [answers.fileno()]) as forks:
        peers = Peers(forks)
        for order in orders:
            answers.write(json.dumps(peers.carry_out(order)).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
