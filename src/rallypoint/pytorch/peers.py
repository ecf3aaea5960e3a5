"""torch's own servers, as `rallypoint bench` measures them: each in a process of its own.

Those processes have torch's own client as well, whatever the user has asked for elsewhere. And no threads of
NumPy's, which comes with torch: a process with threads should not fork.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket

os.environ.update(RALLYPOINT_PATCH="never", RALLYPOINT_CLIENT="torch", OPENBLAS_NUM_THREADS="1")
os.environ.pop("USE_LIBUV", None)

import torch.distributed as dist

from rallypoint.store.server.process.binding import BACKLOG

HOST = "127.0.0.1"


def ask_no_name_server() -> None:
    """Let the hosts file alone answer all look-ups of this process; only glibc has a way to say so.

    torch's server looks up the name of every client that it accepts, and torch's client that of the server
    before it connects. When 64 clients ask a name server at once, it may drop a few questions, which are
    asked again after five seconds. That would be all that is measured then, whichever server it is.
    """
    getattr(ctypes.CDLL(None), "__nss_configure_lookup")(b"hosts", b"files")


def listening_socket(port: int) -> socket.socket:
    """An IPv4 loopback socket, with as long a backlog as the kernel grants.

    torch's own socket would be a dual-stack one, whose clients are ::ffff:127.0.0.1: looking that up may take
    seconds each, so a comparison with it would flatter Rallypoint.
    """
    return socket.create_server((HOST, port), backlog=BACKLOG)


class TorchServer:
    """torch's server, and the client that comes with it; carries out the orders of a target."""

    def __init__(self) -> None:
        gc.freeze()  # keeps collections from touching, and so copying, what this fork shares with others

    def serve(self, use_libuv: bool, port: int = 0) -> int:
        """Make a server; its port."""
        ask_no_name_server()
        listener = listening_socket(port)
        return self.make(use_libuv, listener.getsockname()[1], master_listen_fd=listener.detach())

    def make(self, use_libuv: bool, port: int, **options: int) -> int:
        self._store = dist.TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, use_libuv=use_libuv, **options
        )
        return int(self._store.port)
