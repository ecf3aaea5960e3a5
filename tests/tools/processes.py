"""Servers and other processes for tests: started, awaited without sleeping, and always ended."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from rallypoint.launch.handover import Handover

BACKENDS = ("libuv", "legacy")


@dataclass
class Server:
    """A running `rallypoint serve`, or `rallypoint relay`."""

    process: subprocess.Popen[str]
    host: str
    port: int
    backend: str
    log: IO[str]
    """What it writes to standard error, as a file."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def read_log(self) -> str:
        """What it has logged. By its name: the open file shares its position with the one who writes."""
        return Path(self.log.name).read_text()


def hand_over(monkeypatch: pytest.MonkeyPatch, folder: Path, signals: Sequence[int] = ()) -> None:
    """Give this process what a launcher hands to its processes."""
    for name, value in Handover(folder, tuple(signals)).variables().items():
        monkeypatch.setenv(name, value)


@contextmanager
def serving(
    backend: str,
    log: IO[str] | None = None,
    options: Sequence[str] = (),
    host: str = "127.0.0.1",
    *,
    prelude: str = "",
) -> Iterator[Server]:
    """`rallypoint serve` on a free port; ended when the block is left.

    It logs to a file of its own, if none is given. `prelude` is Python that the process runs first.
    """
    command = ["serve", "--host", host, "--port", "0", "--backend", backend, *options]
    with _running(command, host, log, prelude) as server:
        yield server


@contextmanager
def relaying(
    upstream: str, log: IO[str] | None = None, options: Sequence[str] = (), *, prelude: str = ""
) -> Iterator[Server]:
    """`rallypoint relay` on a free port of loopback; ended when the block is left."""
    with _running(["relay", "--upstream", upstream, *options], "127.0.0.1", log, prelude) as server:
        yield server


@contextmanager
def _running(command: Sequence[str], host: str, log: IO[str] | None, prelude: str) -> Iterator[Server]:
    with ExitStack() as stack:
        if log is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            log = stack.enter_context(Path(folder, "log").open("w"))
        program = ["-m", "rallypoint"]
        if prelude:
            program = ["-c", f"import sys\n{prelude}\nfrom rallypoint.cli.main import main\nsys.exit(main())"]
        process = subprocess.Popen(
            [sys.executable, *program, *command], stdout=subprocess.PIPE, stderr=log, text=True
        )
        stack.callback(end, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("rallypoint: serving on "), line
        place, _, kind = line.removeprefix("rallypoint: serving on ").strip().rpartition(" ")
        yield Server(process, host, int(place.rpartition(":")[2]), kind.strip("()"), log)


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback, whatever Python was built with."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def is_wine() -> bool:
    """Whether this is Wine, which is not all that Windows is."""
    return sys.platform == "win32" and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")


tells_connections = pytest.mark.skipif(is_wine(), reason="Wine tells no connections of a process")
sends_signals = pytest.mark.skipif(
    sys.platform == "win32", reason="windows/test_console.py has the signals of Windows"
)


def pause(process: subprocess.Popen[Any]) -> None:
    """Stop a process, and wait until it is: its threads work on for a moment behind the signal."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that this test started, and close its pipes."""
    if process.poll() is None:
        process.kill()
    process.communicate()


@contextmanager
def torch_serving(use_libuv: bool) -> Iterator[int]:
    """torch's own server, on an IPv4 loopback port: so the hosts file answers its reverse look-ups."""
    if use_libuv and sys.platform == "win32":
        pytest.skip("torch for Windows has no libuv server")
    import torch.distributed as dist  # late: it takes seconds, and most servers here are ours

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        probe.listen(4096)
        port = probe.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=probe.detach(),
            use_libuv=use_libuv,
        )
        yield port
        del store
