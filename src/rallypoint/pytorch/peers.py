"""torch's own servers, as `rallypoint bench` measures them: each in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import logging
import socket
from functools import partial

import torch.distributed as dist

from rallypoint.store.server.process.binding import BACKLOG

HOST = "127.0.0.1"

logger = logging.getLogger("rallypoint.bench")


def ask_no_name_server() -> None:
    """Let the hosts file alone answer all look-ups of this process.

    torch's server looks up the name of every client that it accepts, and torch's client that of the server
    before it connects: of ::ffff:127.0.0.1, since its socket is an IPv6 one, and no hosts file has that.
    When 64 clients ask a name server at once, it may drop a few questions, which are asked again after five
    seconds. That would be all that is measured then, whichever server it is.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)  # of glibc alone
    if configure is None or configure(b"hosts", b"files") != 0:
        logger.warning(
            "torch's look-ups of names go to a name server here, and their time is measured as well"
        )


def listening_socket(port: int) -> socket.socket:
    """An IPv4 loopback socket, with as long a backlog as the kernel grants.

    torch looks up the name of every client it accepts. On this socket that name is always that of
    127.0.0.1, which the hosts file has, so nothing stalls. torch's own socket would be a dual-stack one,
    whose clients are ::ffff:127.0.0.1: that may take seconds each, and comparing with it would flatter
    Rallypoint.
    """
    return socket.create_server((HOST, port), backlog=BACKLOG)


class TorchServer:
    """torch's server, and the client that comes with it; carries out the orders of a target."""

    def __init__(self, *_: object) -> None:
        gc.freeze()  # keeps collections from touching, and so copying, what this fork shares with others

    def serve(self, use_libuv: bool, as_is: bool = False, port: int = 0) -> int:
        """Make a server: its port. `as_is`: on a socket of torch's own, with look-ups by the name server."""
        if not as_is:
            ask_no_name_server()
        make = partial(dist.TCPStore, HOST, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
        if as_is:
            self._store = make(port=port)
        else:
            listener = listening_socket(port)
            self._store = make(port=listener.getsockname()[1], master_listen_fd=listener.detach())
        return int(self._store.port)
