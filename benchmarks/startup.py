"""`python -m benchmarks.startup`: how soon ranks train after a start, and after one of them is killed.

Each route starts the same script. Its ranks report to this process, over a Unix socket, that their first
all_reduce is done. A start is timed from the command to the last rank's report, a restart from the order to
one rank to kill itself to the last report of the next attempt. The routes take turns, so that what else runs
on the machine disturbs all of them alike. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import psutil

_SCRIPT: Final = """\
import os, signal, socket
{imports}
import torch
import torch.distributed as dist

local_rank = int(os.environ.get("LOCAL_RANK", "0"))
if "{backend}" == "nccl":
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
dist.init_process_group("{backend}")
ones = torch.ones(1, device="cuda" if "{backend}" == "nccl" else "cpu")
dist.all_reduce(ones)
ones.item()
parent = socket.socket(socket.AF_UNIX)
parent.connect("{address}")
parent.sendall(b"%d\\n" % dist.get_rank())
if parent.recv(1) == b"k":
    os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""
_LIMIT_SECONDS: Final = 30.0
_TRAINING_SECONDS: Final = 2.0
"""How long ranks are up before one is killed."""


class Timing(NamedTuple):
    """One run of one route. None: it did not get there in time."""

    start: float | None
    restart: float | None
    megabytes: float
    """The proportional share of memory (PSS) of all processes, once all ranks are up."""


def routes(ranks: int, restarts: bool) -> dict[str, Sequence[Sequence[str]]]:
    """The commands that each way to start the script takes, without the script."""
    python, number = sys.executable, f"--nproc-per-node={ranks}"
    again = ["--max-restarts=3"] if restarts else []
    run = [python, "-m", "rallypoint", "run", number, *again]
    found: dict[str, Sequence[Sequence[str]]] = {
        "torchrun": [[python, "-m", "torch.distributed.run", "--standalone", number, *again]],
        "rallypoint run": [run],
        "rallypoint run --start=spawn": [[*run, "--start=spawn"]],
    }
    if not restarts:  # nobody starts them again
        found["by hand"] = [[sys.executable, "-u"]] * ranks
    return found


def measure(commands: Sequence[Sequence[str]], script: Path, ranks: int, restarts: bool) -> Timing:
    """Start a job, await all ranks, kill one if it is to be restarted, and end the job."""
    with _listening(script.with_suffix(".socket")) as listener:
        begin = time.monotonic()
        with _job(commands, script) as processes:
            clients = _await_reports(listener, ranks, processes)
            start = time.monotonic() - begin if clients is not None else None
            megabytes = _proportional_memory(processes)
            restart = None
            if clients is not None and restarts:
                time.sleep(_TRAINING_SECONDS)
                begin = time.monotonic()
                clients[ranks - 1].sendall(b"k")
                again = _await_reports(listener, ranks, processes)
                restart = time.monotonic() - begin if again is not None else None
                _close(clients)
                clients = again
            if clients is not None:
                _close(clients)
                for each in processes:
                    each.wait(_LIMIT_SECONDS)
    return Timing(start, restart, megabytes)


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(4096)
        try:
            yield listener
        finally:
            path.unlink()


@contextmanager
def _job(commands: Sequence[Sequence[str]], script: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of a job; at the end, those that are left are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    with script.with_suffix(".log").open("wb") as log:
        for rank, command in enumerate(commands):
            processes.append(
                subprocess.Popen(
                    [*command, str(script)],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=os.environ | _variables(rank, len(commands), port),
                )
            )
    try:
        yield processes
    finally:
        for each in _trees(processes):
            try:
                each.kill()
            except psutil.NoSuchProcess:
                pass
        for process in processes:
            process.wait()


def _variables(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """What somebody who starts ranks by hand sets; nothing for one command, which is a launcher."""
    if ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",  # as torchrun sets it
    }


def _await_reports(
    listener: socket.socket, ranks: int, processes: Sequence[subprocess.Popen[bytes]]
) -> dict[int, socket.socket] | None:
    """The connections of all ranks; None if they do not report within the limit, or the job has ended."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    clients: dict[int, socket.socket] = {}
    while len(clients) < ranks:
        if select.select([listener], [], [], 1.0)[0]:
            client, _ = listener.accept()
            clients[int(client.makefile("rb").readline())] = client
        elif time.monotonic() > deadline or any(each.poll() is not None for each in processes):
            _close(clients)
            return None
    return clients


def _close(clients: Mapping[int, socket.socket]) -> None:
    """Let ranks go on."""
    for each in clients.values():
        each.close()


def _trees(processes: Sequence[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    found = []
    for each in processes:
        try:
            process = psutil.Process(each.pid)
            found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            pass
    return found


def _proportional_memory(processes: Sequence[subprocess.Popen[bytes]]) -> float:
    total = 0
    for each in _trees(processes):
        try:
            total += each.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return total / 1e6


def _line(name: str, timings: Sequence[Timing]) -> str:
    """The median, the range, and how many runs got there."""
    text = f"{name:30}"
    for values in ([each.start for each in timings], [each.restart for each in timings]):
        known = sorted(each for each in values if each is not None)
        reached = f"{statistics.median(known):6.2f} ({known[0]:.2f} to {known[-1]:.2f})" if known else "never"
        text += f" {reached:>24} {len(known)}/{len(values)}"
    return f"{text} {statistics.median(each.megabytes for each in timings):8.0f}"


def main() -> None:
    """Measure and print; the table is on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--import", dest="modules", default="", help="what the script imports besides torch")
    parser.add_argument("--restarts", action="store_true", help="kill a rank, and time the next attempt")
    parser.add_argument("--json", type=Path, help="also write all timings to this file")
    wish = parser.parse_args()
    timings: dict[str, list[Timing]] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        imports = f"import {wish.modules}" if wish.modules else ""
        address = script.with_suffix(".socket")
        script.write_text(_SCRIPT.format(imports=imports, backend=wish.backend, address=address))
        for number in range(wish.rounds):
            for name, commands in routes(wish.ranks, wish.restarts).items():
                found = measure(commands, script, wish.ranks, wish.restarts)
                timings.setdefault(name, []).append(found)
                print(f"round {number + 1}: {name}: {found}", file=sys.stderr)
    print(f"{'':30} {'start (s)':>28} {'restart (s)':>28} {'PSS (MB)':>8}")
    for name, runs in timings.items():
        print(_line(name, runs))
    if wish.json:
        wish.json.write_text(json.dumps(timings, indent=1))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
