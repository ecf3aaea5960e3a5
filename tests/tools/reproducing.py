"""Real failures of real torch, each in processes of its own: what test_reproduced_errors.py reads.

    python tests/tools/reproducing.py FOLDER CASE...

One process imports torch, which takes seconds, and forks the rest, which takes milliseconds. Each case has a
leader, that sets the stage (a port that is held, a name server that says nothing), and ranks, whose output
goes to FOLDER/CASE/rank-N.log. All cases run at the same time, since most of them only wait for a time-out.
When a case is over, a line on standard output tells the facts that an explanation of its log should tell.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import failing_scripts
from joining import LONG, LOOPBACK, SHORT, init, init_by_file
from rallypoint.pytorch.peers import ask_no_name_server
from staging import (
    Case,
    ImpossibleError,
    Rank,
    Stage,
    bind,
    cases_in,
    enter_namespaces,
    fork,
    listen,
    listen_below,
    mount_over,
    run,
    start,
    wait_for,
)

_ELSEWHERE = "10.9.9.9"
_EPHEMERAL = 32_768
_NOBODY = 65_534
_CHECK = 5, 3_891_110_078_061_282_660
"""A request that asks for more keys than there can be."""


# The store's port ------------------------------------------------------------------------------------------


def port_in_use(folder: Path) -> Stage:
    held = listen_below(_EPHEMERAL)
    port = held.getsockname()[1]
    return Stage([lambda: init(0, 2, port)], {"port": str(port)}, [held])


def port_in_ephemeral_range(folder: Path) -> Stage:
    held = listen()
    port = held.getsockname()[1]
    if port < _EPHEMERAL:
        raise ImpossibleError(f"the system gives ports below {_EPHEMERAL} to connections")
    return Stage([lambda: init(0, 2, port)], {"port": str(port)}, [held])


def port_not_permitted(folder: Path) -> Stage:
    first = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if first <= 1:
        raise ImpossibleError("every port may be used here")
    port = first - 1

    def bind_as_nobody() -> None:
        if os.geteuid() == 0:
            os.setuid(_NOBODY)
        init(0, 1, port)

    return Stage([bind_as_nobody], {"port": str(port)})


def port_out_of_range(folder: Path) -> Stage:
    return Stage([lambda: init(0, 1, 70_000)], {"port": "70000"})


def port_is_text(folder: Path) -> Stage:
    return Stage([lambda: dist.TCPStore(LOOPBACK, "29500", 1, True)])


def port_not_a_number(folder: Path) -> Stage:
    return Stage([lambda: init(0, 1, "banana")], {"value": "banana"})


def wrong_port(folder: Path) -> Stage:
    """A port that is bound, but not listened on: it refuses, and nobody else can have it."""
    held = bind()
    port = held.getsockname()[1]
    ranks: list[Rank] = [lambda: init(0, 2, 0), lambda: init(1, 2, port)]
    return Stage(ranks, {"host": LOOPBACK, "port": str(port)}, [held])


def nobody_listens(folder: Path) -> Stage:
    held = bind()
    port = held.getsockname()[1]
    return Stage([lambda: init(1, 2, port)], {"host": LOOPBACK, "port": str(port)}, [held])


def ranks_missing(folder: Path) -> Stage:
    return Stage([lambda: init(0, 3, 0)], {"joined": "1", "expected": "3"})


def not_a_store(folder: Path) -> Stage:
    """Something listens on the port, and answers in a language of its own."""
    held = listen()
    port = held.getsockname()[1]
    threading.Thread(target=_answer_all, args=(held,), daemon=True).start()
    return Stage([lambda: init(1, 2, port)], {"host": LOOPBACK, "port": str(port)}, [held])


def foreign_bytes(folder: Path) -> Stage:
    """On the connection of a rank, which loses the store by that: a stranger's own would harm nobody."""

    def speak_another_language() -> None:
        store = dist.TCPStore(LOOPBACK, 0, 1, True, timeout=SHORT)
        _connection_to(store.port).sendall(struct.pack("<BQ", *_CHECK))
        store.get("never")

    return Stage([speak_another_language], {"keys": str(_CHECK[-1])})


def _connection_to(port: int) -> socket.socket:
    """That which torch has made in this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
            address = connection.getpeername()
        except OSError:
            continue  # it is no connection
        if connection.family in (socket.AF_INET, socket.AF_INET6) and address[1] == port:
            return connection
    raise LookupError(port)


def store_killed(folder: Path) -> Stage:
    reading, writing = os.pipe()

    def hold_store() -> None:
        store = dist.TCPStore(LOOPBACK, 0, None, True, timeout=LONG)
        os.write(writing, struct.pack("<H", store.port))
        store.wait(["come"])
        os.kill(os.getpid(), signal.SIGKILL)

    def use_store() -> None:
        (port,) = struct.unpack("<H", os.read(reading, 2))
        store = dist.TCPStore(LOOPBACK, port, None, False, timeout=LONG)
        store.set("come", "")
        store.get("never")

    return Stage([hold_store, use_store])


# Names -----------------------------------------------------------------------------------------------------


def name_not_resolved(folder: Path) -> Stage:
    host = "no-such-host.invalid"
    return Stage([lambda: init(1, 2, 1, host)], {"host": host, "port": "1"})


def name_server_silent(folder: Path) -> Stage:
    host = "node-a.cluster"
    silent = _silence_name_server(folder)
    return Stage([lambda: init(1, 2, 1, host)], {"host": host}, [silent], asks_names=True)


def reverse_lookup_stalls(folder: Path) -> Stage:
    silent = _silence_name_server(folder)
    return Stage([lambda: init(0, 1, 0)], held=[silent], asks_names=True)


def name_late(folder: Path) -> Stage:
    """A name that nobody knows when a rank first asks for it, as of a pod that has just begun: no failure."""
    enter_namespaces()
    hosts = folder / "hosts"
    _mount_etc(folder, {"hosts": "127.0.0.1 localhost\n", "nsswitch.conf": "hosts: files\n"})
    reading, writing = os.pipe()

    def serve() -> None:
        store = dist.TCPStore(LOOPBACK, 0, None, True, timeout=LONG)
        os.write(writing, struct.pack("<H", store.port))
        asked = folder / "rank-1.log"
        while not (asked.exists() and "cannot be retrieved" in asked.read_text()):
            time.sleep(0.05)
        with hosts.open("a") as file:
            file.write("127.0.0.1 late-pod\n")
        store.wait(["come"])

    def come() -> None:
        (port,) = struct.unpack("<H", os.read(reading, 2))
        dist.TCPStore("late-pod", port, None, False, timeout=LONG).set("come", "")

    return Stage([serve, come])


def network_unreachable(folder: Path) -> Stage:
    enter_namespaces()
    return Stage([lambda: init(1, 2, 1, _ELSEWHERE)], {"host": _ELSEWHERE, "port": "1"})


def no_route_to_host(folder: Path) -> Stage:
    enter_namespaces()
    if shutil.which("ip") is None:
        raise ImpossibleError("there is no ip command")
    if subprocess.run(["ip", "route", "add", "unreachable", _ELSEWHERE]).returncode != 0:
        raise ImpossibleError("a route cannot be made here")
    return Stage([lambda: init(1, 2, 1, _ELSEWHERE)], {"host": _ELSEWHERE, "port": "1"})


def _mount_etc(folder: Path, contents: Mapping[str, str]) -> None:
    for name, content in contents.items():
        (folder / name).write_text(content)
        mount_over(folder / name, Path("/etc") / name)


def _silence_name_server(folder: Path) -> socket.socket:
    """A name server that hears the question and says nothing; and a hosts file that does not know 127.0.0.1.

    In a network and a file system of this case's own, so that the rest of the machine goes on resolving.
    """
    enter_namespaces()
    contents = {
        "resolv.conf": "nameserver 127.0.0.9\noptions timeout:2 attempts:1\n",
        "hosts": "127.0.0.2 localhost\n",
        "nsswitch.conf": "hosts: files dns\n",
    }
    _mount_etc(folder, contents)
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.9", 53))
    return silent


# Keys and files --------------------------------------------------------------------------------------------


def missing_key(folder: Path) -> Stage:
    def wait_for_key() -> None:
        dist.TCPStore(LOOPBACK, 0, 1, True, timeout=SHORT).get("checkpoint")

    return Stage([wait_for_key], {"keys": "/checkpoint", "time": "1000ms"})


def gloo_rank_missing(folder: Path) -> Stage:
    """The store is there, and rank 1 comes; but it never says where gloo can reach it."""
    reading, writing = os.pipe()

    def come() -> None:
        store = dist.TCPStore(LOOPBACK, 0, None, True, timeout=SHORT)
        os.write(writing, b"x")
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=SHORT)

    return Stage([come, lambda: os.read(reading, 1)], {"rank": "1"})


def missing_rank_of_file(folder: Path) -> Stage:
    return Stage([lambda: init_by_file(folder, 0, 2, SHORT)])


def stale_file(folder: Path) -> Stage:
    """Two ranks of a run of three came and died; the two of the next run use the same file."""
    path = str(folder / "store")

    def come(rank: int, world_size: int) -> None:
        store = dist.FileStore(path, -1)
        store.set_timeout(LONG)
        _shorten_waits()
        soon = timedelta(milliseconds=1)
        distributed_c10d._store_based_barrier(rank, store, "default_pg", world_size, soon, soon)

    def come_again() -> None:
        for rank in range(2):
            run(partial(come, rank, 3), folder / f"earlier-{rank}.log")
        come(0, 2)

    return Stage([come_again], {"joined": "3", "expected": "2"})


# Ranks that fail -------------------------------------------------------------------------------------------


def _one_rank_fails(folder: Path, fail: Rank) -> Stage:
    def work(rank: int) -> None:
        init_by_file(folder, rank, 2, LONG)
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
        init_by_file(folder, 0, 2, SHORT)
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            os.write(writing, b"x")

    def come_late() -> None:
        init_by_file(folder, 1, 2, SHORT)
        os.read(reading, 1)  # until the other one has given up

    return Stage([reduce, come_late], {"ms": "1000"})


def monitored_barrier(folder: Path) -> Stage:
    def work(rank: int) -> None:
        init_by_file(folder, rank, 3, LONG)
        if rank == 2:
            dist.barrier()  # which the others never call
        dist.monitored_barrier(timeout=SHORT)

    return Stage([lambda: work(0), lambda: work(1), lambda: work(2)], {"ranks": "2", "ms": "1000"})


def _shorten_waits() -> None:
    """torch looks at its barrier after ten seconds for the first time: here, after a fiftieth of that."""
    distributed_c10d.timedelta = lambda seconds: timedelta(seconds=seconds / 50)


def _answer_all(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        connection.recv(64)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        connection.close()


# All of them ------------------------------------------------------------------------------------------------


CASES: Mapping[str, Case] = cases_in(sys.modules[__name__]) | cases_in(failing_scripts)


def main(folder: Path, names: list[str]) -> None:
    """Run the cases, all at once; a line for each that is over."""
    leaders = {fork(partial(_lead, folder / name, CASES[name])): name for name in names}
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
        pids = [
            start(_actor(stage, rank), folder / f"rank-{number}.log")
            for number, rank in enumerate(stage.ranks)
        ]
        told = {"facts": stage.facts, "codes": [wait_for(pid) for pid in pids]}
    (folder / "outcome.json").write_text(json.dumps(told))


def _actor(stage: Stage, rank: Rank) -> Rank:
    """What a rank does. A name server that is slow today is to be in no log but the one that is about it."""

    def act() -> None:
        if not stage.asks_names:
            ask_no_name_server()
        rank()

    return act


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
