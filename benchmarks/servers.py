"""The servers under measurement, each a process of its own, and what the system knows about them."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

HOST = "127.0.0.1"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 5.0
SPARE_FILES = 8
"""What a server may open for itself on the way, besides connections."""

TORCH = "torch"
TORCH_SERVER = str(Path(__file__).with_name("torch_server.py"))

COMMANDS: dict[str, list[str]] = {
    TORCH: [TORCH_SERVER, "libuv"],
    "torch-legacy": [TORCH_SERVER, "legacy"],
    "libuv": ["-m", "rallypoint", "serve", "--host", HOST, "--port", "0", "--backend", "libuv"],
    "legacy": ["-m", "rallypoint", "serve", "--host", HOST, "--port", "0", "--backend", "legacy"],
}
"""How to start each server that can be measured: the arguments of the Python interpreter."""


class ServerError(RuntimeError):
    """A server died, gave a wrong answer, or gave none in time."""


def dropped_connects() -> int:
    """How many connects this system has dropped so far because a backlog was full; they try again later."""
    names, values = Path("/proc/net/netstat").read_text().splitlines()[:2]
    return int(dict(zip(names.split(), values.split(), strict=True))["ListenOverflows"])


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    spent = 0
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            with open(f"{task.path}/schedstat") as text:
                spent += int(text.read().split()[0])
    except OSError:  # a system without schedstat: coarser, but there
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return spent / 1e9


def resident_bytes(pid: int) -> int:
    """The memory that a process holds."""
    return int(psutil.Process(pid).memory_info().rss)


class Server:
    """One running server: one of the commands, unless it gets one of its own."""

    def __init__(self, name: str, command: list[str] | None = None) -> None:
        self.name = name
        self.port = 0
        self._log = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 - closed by stop()
        # A session of its own keeps a Ctrl-C of the terminal from the server: this program stops it.
        self._process = subprocess.Popen(
            [sys.executable, *(command or COMMANDS[name])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def await_ready(self) -> None:
        """Wait for the line that says which port it serves."""
        line = self._first_line(time.monotonic() + START_LIMIT_S)
        found = re.search(rf"{re.escape(HOST)}:(\d+)", line)
        if found is None:
            raise ServerError(f"{self.name} did not start: it said {line!r}; {self.last_words()}")
        self.port = int(found[1])

    def check_alive(self) -> None:
        """Raise if the process has ended."""
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"{self.name} died with status {status}; {self.last_words()}")

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far."""
        return cpu_seconds(self.pid)

    def resident_bytes(self) -> int:
        """The memory that it holds."""
        return resident_bytes(self.pid)

    def open_files(self) -> int:
        """How many file descriptors it holds."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def await_open_files(self, at_most: int, limit_s: float = 60.0) -> None:
        """Wait until it has noticed that clients left: until it holds hardly more descriptors than this."""
        deadline = time.monotonic() + limit_s
        while self.open_files() > at_most + SPARE_FILES:
            self.check_alive()
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} kept the connections of clients that had left")
            time.sleep(0.02)

    def stop(self) -> None:
        """End the process, kindly first; nothing is left of it afterwards."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.close()
            self._process.terminate()
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass  # killed below
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._log.close()

    def _first_line(self, deadline: float) -> str:
        assert self._process.stdout
        output = self._process.stdout.fileno()
        said = b""
        while b"\n" not in said:
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                break
            piece = os.read(output, 4096)
            if not piece:
                break
            said += piece
        return said.decode(errors="replace").strip()

    def last_words(self) -> str:
        """The end of what it has logged."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "its log ends: " + " | ".join(lines[-5:]) if lines else "its log is empty"
