"""Real failures of real torch, each in processes of its own: what test_reproduced_errors.py reads.

    python tests/tools/reproducing.py FOLDER CASE...

One process imports torch, which takes seconds, and forks the rest, which takes milliseconds. Each case has a
leader, that sets the stage (a port that is held, say), and ranks, whose output goes to
FOLDER/CASE/rank-N.log. All cases run at the same time, since most of them only wait for a time-out. Linux
ends a child with its parent, so nothing outlives this program. When a case is over, a line on standard output
tells the facts that an explanation of its log should tell.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn import Linear, Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from rallypoint.diagnose.verify import SIMULATION
from rallypoint.pytorch.peers import ask_no_name_server

_LOOPBACK = "127.0.0.1"
_SHORT = timedelta(seconds=1)
_LONG = timedelta(seconds=20)
_DEADLINE_SECONDS = 120
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1

Rank = Callable[[], object]


class ImpossibleError(Exception):
    """The case cannot be brought about here."""


@dataclass
class Stage:
    """The ranks of a case, and what an explanation should tell of it."""

    ranks: list[Rank]
    facts: dict[str, str] = field(default_factory=dict)
    held: list[socket.socket] = field(default_factory=list)
    """What has to stay open until the ranks have ended."""


Case = Callable[[Path], Stage]
"""Sets the stage, in a folder of its own; ImpossibleError if it cannot."""


def _bound() -> socket.socket:
    """A port that is nobody else's, and refuses connections."""
    held = socket.socket()
    held.bind(("", 0))
    return held


def _listening() -> socket.socket:
    """A port that is taken."""
    held = _bound()
    held.listen()
    return held


def _variables(rank: int, world_size: int, port: int, host: str) -> dict[str, str]:
    """What a launcher tells a rank."""
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), **place}


def _init(rank: int, world_size: int, port: int, host: str = _LOOPBACK) -> None:
    """By env://, with little patience."""
    os.environ.update(_variables(rank, world_size, port, host))
    dist.init_process_group("gloo", timeout=_SHORT)


def _init_by_file(folder: Path, rank: int, size: int, timeout: timedelta, backend: str = "gloo") -> None:
    """By file://, which needs no port."""
    url = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size, timeout=timeout)


# The store and its port ------------------------------------------------------------------------------------


def port_in_use(folder: Path) -> Stage:
    held = _listening()
    port = held.getsockname()[1]
    return Stage([lambda: _init(0, 2, port)], {"port": str(port)}, [held])


def port_out_of_range(folder: Path) -> Stage:
    return Stage([lambda: _init(0, 1, 70_000)], {"port": "70000"})


def wrong_port(folder: Path) -> Stage:
    """A port that is bound, but not listened on: it refuses, and nobody else can have it."""
    held = _bound()
    port = held.getsockname()[1]
    ranks: list[Rank] = [lambda: _init(0, 2, 0), lambda: _init(1, 2, port)]
    return Stage(ranks, {"host": _LOOPBACK, "port": str(port)}, [held])


def nobody_listens(folder: Path) -> Stage:
    held = _bound()
    port = held.getsockname()[1]
    return Stage([lambda: _init(1, 2, port)], {"host": _LOOPBACK, "port": str(port)}, [held])


def ranks_missing(folder: Path) -> Stage:
    return Stage([lambda: _init(0, 3, 0)], {"joined": "1", "expected": "3"})


def not_a_store(folder: Path) -> Stage:
    """Something listens on the port, and answers in a language of its own."""
    held = _listening()
    port = held.getsockname()[1]
    threading.Thread(target=_answer_all, args=(held,), daemon=True).start()
    return Stage([lambda: _init(1, 2, port)], {"host": _LOOPBACK, "port": str(port)}, [held])


def store_killed(folder: Path) -> Stage:
    reading, writing = os.pipe()

    def hold_store() -> None:
        store = dist.TCPStore(_LOOPBACK, 0, None, True, timeout=_LONG)
        os.write(writing, struct.pack("<H", store.port))
        store.wait(["come"])
        os.kill(os.getpid(), signal.SIGKILL)

    def use_store() -> None:
        (port,) = struct.unpack("<H", os.read(reading, 2))
        store = dist.TCPStore(_LOOPBACK, port, None, False, timeout=_LONG)
        store.set("come", "")
        store.get("never")

    return Stage([hold_store, use_store])


def name_not_resolved(folder: Path) -> Stage:
    host = "no-such-host.invalid"
    return Stage([lambda: _init(1, 2, 1, host)], {"host": host, "port": "1"})


def missing_key(folder: Path) -> Stage:
    def wait_for_key() -> None:
        dist.TCPStore(_LOOPBACK, 0, 1, True, timeout=_SHORT).get("checkpoint")

    return Stage([wait_for_key], {"keys": "/checkpoint", "time": "1000ms"})


def _answer_all(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        connection.recv(64)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        connection.close()


# Ranks that fail -------------------------------------------------------------------------------------------


def _one_rank_fails(folder: Path, fail: Rank) -> Stage:
    def work(rank: int) -> None:
        _init_by_file(folder, rank, 2, _LONG)
        dist.barrier()  # so that both have come
        if rank == 1:
            fail()
        dist.barrier()

    return Stage([lambda: work(0), lambda: work(1)])


def rank_raises(folder: Path) -> Stage:
    def fail() -> None:
        raise ValueError("the learning rate is a banana")

    return _one_rank_fails(folder, fail)


def rank_killed(folder: Path) -> Stage:
    return _one_rank_fails(folder, lambda: os.kill(os.getpid(), signal.SIGKILL))


def rank_late(folder: Path) -> Stage:
    reading, writing = os.pipe()

    def reduce() -> None:
        _init_by_file(folder, 0, 2, _SHORT)
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            os.write(writing, b"x")

    def come_late() -> None:
        _init_by_file(folder, 1, 2, _SHORT)
        os.read(reading, 1)  # until the other one has given up

    return Stage([reduce, come_late], {"ms": "1000"})


def monitored_barrier(folder: Path) -> Stage:
    def work(rank: int) -> None:
        _init_by_file(folder, rank, 3, _LONG)
        if rank == 2:
            dist.barrier()  # which the others never call
        dist.monitored_barrier(timeout=_SHORT)

    return Stage([lambda: work(0), lambda: work(1), lambda: work(2)], {"ranks": "2", "ms": "1000"})


# Scripts, settings and machines that are wrong -------------------------------------------------------------


def variable_missing(folder: Path) -> Stage:
    return Stage([lambda: dist.init_process_group("gloo")], {"name": "RANK"})


def no_rendezvous_handler(folder: Path) -> Stage:
    return Stage([lambda: dist.init_process_group("gloo", init_method="moon://")], {"scheme": "moon"})


def unknown_backend(folder: Path) -> Stage:
    return Stage([lambda: _init_by_file(folder, 0, 1, _LONG, "semaphore")], {"backend": "semaphore"})


def nccl_not_built_in(folder: Path) -> Stage:
    if dist.is_nccl_available():
        raise ImpossibleError("this torch has NCCL")
    return Stage([lambda: _init_by_file(folder, 0, 1, _LONG, "nccl")])


def gloo_interface_missing(folder: Path) -> Stage:
    def choose_interface() -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "moon0"
        _init_by_file(folder, 0, 1, _LONG)

    return Stage([choose_interface], {"interface": "moon0"})


def too_many_open_files(folder: Path) -> Stage:
    """All files that the rank may open are in use: then torch can open none, however many it would take."""
    held = _listening()

    def connect_without_files() -> None:
        free = os.dup(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 8, free + 8))
        with suppress(OSError):
            while True:
                os.dup(1)
        dist.TCPStore(_LOOPBACK, held.getsockname()[1], None, False, timeout=_SHORT)

    return Stage([connect_without_files], held=[held])


def tensor_too_large(folder: Path) -> Stage:
    return Stage([lambda: torch.empty(1 << 50, dtype=torch.uint8)], {"bytes": str(1 << 50)})


def dataloader_worker_killed(folder: Path) -> Stage:
    class Deadly(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    return Stage([lambda: list(DataLoader(Deadly(), num_workers=1))])


def ddp_models_differ(folder: Path) -> Stage:
    def wrap(rank: int) -> None:
        _init_by_file(folder, rank, 2, _LONG)
        DistributedDataParallel(Linear(2 + rank, 3))

    return Stage([lambda: wrap(0), lambda: wrap(1)], {"index": "0", "sizes": "[3, 3]"})


def ddp_unused_parameters(folder: Path) -> Stage:
    class Wasteful(Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = Linear(2, 2), Linear(2, 2)

        def forward(self, batch: Any) -> Any:
            return self.used(batch)

    def train() -> None:
        _init_by_file(folder, 0, 1, _LONG)
        model = DistributedDataParallel(Wasteful())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    return Stage([train])


def no_libuv(folder: Path) -> Stage:
    """A whole process: it is the import of torch that is changed."""
    script = "import torch.distributed as dist; dist.init_process_group('gloo')"
    simulation = {"PYTHONPATH": str(SIMULATION), "RALLYPOINT_SIMULATE": "no-libuv"}
    environ = {**os.environ, **simulation, **_variables(0, 1, 0, _LOOPBACK)}
    return Stage([lambda: os.execve(sys.executable, [sys.executable, "-c", script], environ)])


# All of them ------------------------------------------------------------------------------------------------


CASES: Mapping[str, Case] = {
    name: each
    for name, each in vars(sys.modules[__name__]).items()
    if not name.startswith("_") and getattr(each, "__annotations__", {}).get("return") == "Stage"
}


def main(folder: Path, names: list[str]) -> None:
    """Run the cases, all at once; a line for each that is over."""
    leaders = {_fork(partial(_lead, folder / name, CASES[name])): name for name in names}
    while leaders:
        pid, status = os.wait()
        name = leaders.pop(pid)
        if status != 0:
            sys.exit(f"the leader of {name} ended with status {status}")
        told = json.loads((folder / name / "outcome.json").read_text())
        print(json.dumps({"case": name, **told}), flush=True)


def _lead(folder: Path, case: Case) -> None:
    folder.mkdir()
    told: dict[str, Any]
    try:
        stage = case(folder)
    except ImpossibleError as reason:
        told = {"impossible": str(reason)}
    else:
        logs = (folder / f"rank-{number}.log" for number in range(len(stage.ranks)))
        pids = [_fork(partial(_act, rank, log)) for rank, log in zip(stage.ranks, logs, strict=True)]
        for pid in pids:
            os.waitpid(pid, 0)
        told = {"facts": stage.facts}
    (folder / "outcome.json").write_text(json.dumps(told))


def _act(rank: Rank, log: Path) -> None:
    """What a rank does; its log is to have nothing of a name server that is slow today."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    ask_no_name_server()
    rank()


def _fork(work: Rank) -> int:
    """A process that does this, and ends with its parent, or after a while."""
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _live(parent, work)
    return pid


def _live(parent: int, work: Rank) -> NoReturn:
    code = 1
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.alarm(_DEADLINE_SECONDS)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
