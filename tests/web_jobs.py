"""Jobs on a `rallypoint serve` with its page: torch ranks, or connections. Each comes when it is told to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from processes import end
from rallypoint.rollcall.identity import Identity, Role
from rallypoint.stores.client.connecting import connect
from rallypoint.stores.client.connection import Connection
from rallypoint.stores.client.deadline import Deadline
from rallypoint.wire.encoding import counted_request, request
from rallypoint.wire.opcodes import Op
from raw import until

SECONDS = 180.0

RANK = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=120))
dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), flush=True)
sys.stdin.readline()
dist.destroy_process_group()
"""


@dataclass
class RunningJob:
    """A server with its page, and the ranks that have been started so far."""

    store: str
    url: str
    size: int
    ranks: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    _connections: dict[int, Connection] = field(default_factory=dict)

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            names = {"RANK": rank, "WORLD_SIZE": self.size, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
            self.ranks[rank] = subprocess.Popen(
                [sys.executable, "-c", RANK, self.store.rpartition(":")[2]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **{name: str(value) for name, value in names.items()}},
            )

    def await_sums(self) -> None:
        """Wait until all ranks have computed something together."""
        for process in self.ranks.values():
            assert process.stdout is not None
            assert process.stdout.readline() == f"sum {float(self.size)}\n"

    def finish(self, *ranks: int) -> None:
        """Let some ranks end."""
        for rank in ranks:
            self.ranks[rank].communicate("\n", timeout=SECONDS)

    def end(self) -> None:
        for process in self.ranks.values():
            end(process)


LAST_KEY = b"/0//cpu//0/%d"
"""What all others wait for, as with gloo."""


class ConnectedJob(RunningJob):
    """Ranks that are only connections: all wait for a key of the last one."""

    def start(self, *ranks: int) -> None:
        host, _, port = self.store.rpartition(":")
        key = LAST_KEY % (self.size - 1)
        for rank in ranks:
            who = Identity("node-a", 1000 + rank, rank, rank, self.size, Role.RANK)
            connection = connect(host, int(port), Deadline(SECONDS), who)
            is_last = rank == self.size - 1
            connection.send(
                request(Op.SET, key, b"") if is_last else counted_request(Op.WAIT, [key]), Deadline(SECONDS)
            )
            self._connections[rank] = connection

    def await_sums(self) -> None:
        for rank in range(self.size - 1):
            assert self._connections[rank].read(1, Deadline(SECONDS)) == b"\0"

    def finish(self, *ranks: int) -> None:
        for rank in ranks:
            self._connections.pop(rank).close()

    def end(self) -> None:
        self.finish(*self._connections)


@contextmanager
def running_job(size: int, log: IO[str], kind: type[RunningJob] = RunningJob) -> Iterator[RunningJob]:
    """A server with its page, and no rank yet; all of it is ended when the block is left."""
    place = ["--host", "127.0.0.1", "--port", "0", "--web", "0"]
    command = [sys.executable, "-m", "rallypoint", "serve", *place]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        store = process.stdout.readline().split()[-2]
        job = kind(store, _url_in(Path(log.name)), size)
        try:
            yield job
        finally:
            job.end()
    finally:
        process.terminate()  # not killed at once: it has a page to end
        process.communicate(timeout=SECONDS)


def _url_in(log: Path) -> str:
    found: list[str] = []

    def is_told() -> bool:
        found[:] = re.findall(r"http://\S+", log.read_text())
        return bool(found)

    until(is_told, "the server says where its page is")
    return found[0]
