"""Starts our servers, and redis servers, each a process of its own; led by orders.

`serve`, `renew` and `stop` are the orders that every host of servers obeys: a server that is renewed is
empty, on the port that it had.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from typing import Final

from rallypoint.bench.clients import HOST, connect
from rallypoint.bench.dialects import REDIS
from rallypoint.bench.machine import most_connections
from rallypoint.bench.results import BenchError
from rallypoint.bench.workers import Message, Orders, end_with_parent, obey
from rallypoint.server.loops.backend import Choice
from rallypoint.server.process.hosting import HostedServer, host_server

REDIS_PROGRAM: Final = "redis-server"
_START_LIMIT_S: Final = 10.0


class RedisServer:
    """A redis server with nothing kept on disk. One loop without threads for I/O, as it comes."""

    backend = "redis"

    def __init__(self, port: int) -> None:
        self.port = port or _free_port()
        settings = {
            "bind": HOST,
            "port": str(self.port),
            "save": "",
            "appendonly": "no",
            "protected-mode": "no",
            "tcp-backlog": "65535",
            "maxclients": str(most_connections()),
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [REDIS_PROGRAM, *words], stdout=log, stderr=log, cwd="/", preexec_fn=end_with_parent
            )
            if not self._is_ready():
                self.release()
                log.seek(0)
                said = log.read().decode(errors="replace")[-500:]
                raise BenchError(f"{REDIS_PROGRAM} did not start on port {self.port}: {said}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def release(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                connect(self.port, REDIS).close()
                return True
            except ConnectionRefusedError:
                time.sleep(0.002)
        return False


def _free_port() -> int:
    """A port that nobody listens on: redis takes no socket that is bound already."""
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


class ServerHost:
    """The servers by their processes."""

    def __init__(self) -> None:
        self._servers: dict[int, HostedServer | RedisServer] = {}

    def serve(self, backend: str, port: int = 0) -> Message:
        """A new server: redis, or ours on that backend."""
        if backend == RedisServer.backend:
            return self._keep(RedisServer(port))
        server = host_server(HOST, port, backend=Choice(backend))
        if server.backend != backend:
            server.release()
            raise BenchError(f"asked for {backend}, and got {server.backend}")
        return self._keep(server)

    def renew(self, pid: int) -> Message:
        """The server again, on its port, with nothing in it."""
        old = self._servers.pop(pid)
        old.release()
        return self.serve(old.backend, old.port)

    def stop(self, pid: int) -> Message:
        """End a server."""
        self._servers.pop(pid).release()
        return {}

    def _keep(self, server: HostedServer | RedisServer) -> Message:
        self._servers[server.pid] = server
        return {"pid": server.pid, "port": server.port}


if __name__ == "__main__":
    end_with_parent()
    obey(ServerHost(), Orders())
