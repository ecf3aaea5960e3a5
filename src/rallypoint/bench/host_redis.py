"""Starts redis servers, each on a free port, with nothing kept on disk; led by orders, as `host_ours` is."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time

from rallypoint.bench.dialects import REDIS
from rallypoint.bench.faults import BenchError
from rallypoint.bench.machine import most_connections
from rallypoint.bench.sockets import HOST, connect
from rallypoint.bench.workers import Message, Orders, end_with_parent, obey

PROGRAM = "redis-server"
_START_LIMIT_S = 10.0


def free_port() -> int:
    """A port that nobody listens on: redis takes no socket that is bound already."""
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


class Host:
    """The servers by their processes."""

    def __init__(self) -> None:
        self._servers: dict[int, tuple[subprocess.Popen[bytes], int]] = {}

    def serve(self) -> Message:
        """A new server."""
        return self._start(free_port())

    def renew(self, pid: int) -> Message:
        """The server again, on its port, with nothing in it."""
        _, port = self._servers[pid]
        self.stop(pid)
        return self._start(port)

    def stop(self, pid: int) -> Message:
        """End a server."""
        process, _ = self._servers.pop(pid)
        process.kill()
        process.wait()
        return {}

    def _start(self, port: int) -> Message:
        # One loop without threads for I/O, as it comes; its log is nobody's business unless it ends early.
        log = tempfile.TemporaryFile()  # noqa: SIM115 - the child has it
        settings = {
            "bind": HOST,
            "port": str(port),
            "save": "",
            "appendonly": "no",
            "protected-mode": "no",
            "tcp-backlog": "65535",
            "maxclients": str(most_connections()),
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        process = subprocess.Popen(
            [PROGRAM, *words], stdout=log, stderr=log, cwd="/", preexec_fn=end_with_parent
        )
        try:
            self._await_ready(process, port)
        except BenchError as error:
            process.kill()
            process.wait()
            log.seek(0)
            raise BenchError(f"{error}: {log.read().decode(errors='replace')[-500:]}") from error
        finally:
            log.close()
        self._servers[process.pid] = (process, port)
        return {"pid": process.pid, "port": port}

    @staticmethod
    def _await_ready(process: subprocess.Popen[bytes], port: int) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                connect(port, REDIS).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.002)
        raise BenchError(f"{PROGRAM} did not start on port {port}")


def main() -> None:
    """Carry out orders."""
    end_with_parent()
    host = Host()
    obey({"serve": host.serve, "renew": host.renew, "stop": host.stop}, Orders())


if __name__ == "__main__":
    main()
