"""torch's own TCPStore server, alone in a process; it ends when its standard input closes.

Usage: torch_server.py libuv|legacy. It prints one line once it listens, in the words of `rallypoint serve`.
"""

from __future__ import annotations

import socket
import sys

from torch.distributed import TCPStore

HOST = "127.0.0.1"


def listening_socket() -> socket.socket:
    """An IPv4 loopback socket, with as long a backlog as the kernel grants.

    torch looks up the name of every client it accepts. On this socket that name is always that of
    127.0.0.1, which the hosts file has, so no resolver is asked and nothing stalls. torch's own socket would
    be a dual-stack one, whose clients are ::ffff:127.0.0.1: that may take seconds each, and comparing with
    it would flatter Rallypoint.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOST, 0))
    listener.listen(65535)
    return listener


def main() -> None:
    """Serve until standard input closes."""
    backend = sys.argv[1]
    listener = listening_socket()
    port = listener.getsockname()[1]
    store = TCPStore(
        HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=backend == "libuv",
    )
    print(f"torch: serving on {HOST}:{port} ({backend})", flush=True)
    sys.stdin.read()
    del store


if __name__ == "__main__":
    main()
