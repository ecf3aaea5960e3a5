"""Starts servers and relays of ours, each a process of its own, as a launcher does; led by orders.

`serve`, `renew` and `stop` are the orders that every host of servers obeys: a server that is renewed is
empty, on the port that it had.
"""

from __future__ import annotations

from rallypoint.bench.faults import BenchError
from rallypoint.bench.sockets import HOST
from rallypoint.bench.workers import Message, Orders, end_with_parent, obey
from rallypoint.relay.hosting import host_relay
from rallypoint.server.loops.backend import Choice
from rallypoint.server.process.hosting import HostedServer, host_server


class Host:
    """The servers by their processes."""

    def __init__(self) -> None:
        self._servers: dict[int, HostedServer] = {}

    def serve(self, backend: str) -> Message:
        """A new server."""
        return self._keep(self._server(0, backend))

    def relay(self, upstream: int) -> Message:
        """A new relay for the server on that port."""
        return self._keep(host_relay((HOST, upstream), backend=Choice.LIBUV))

    def renew(self, pid: int) -> Message:
        """The server again, on its port, with nothing in it."""
        old = self._servers.pop(pid)
        old.release()
        return self._keep(self._server(old.port, old.backend))

    def stop(self, pid: int) -> Message:
        """End a server or relay."""
        self._servers.pop(pid).release()
        return {}

    def _server(self, port: int, backend: str) -> HostedServer:
        server = host_server(HOST, port, backend=Choice(backend))
        if server.backend != backend:
            server.release()
            raise BenchError(f"asked for {backend}, and got {server.backend}")
        return server

    def _keep(self, server: HostedServer) -> Message:
        self._servers[server.pid] = server
        return {"pid": server.pid, "port": server.port}


def main() -> None:
    """Carry out orders."""
    end_with_parent()
    host = Host()
    obey({"serve": host.serve, "relay": host.relay, "renew": host.renew, "stop": host.stop}, Orders())


if __name__ == "__main__":
    main()
