"""Machines for tests: network namespaces with a cable between them, where the rights allow that."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Where a process runs: what stands in front of its command, and the address of the machine."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Two network namespaces, joined by a veth pair; or this machine, twice."""
    name = f"rp{os.getpid() % 100_000}"
    network = f"10.231.{os.getpid() % 256}"
    machines = [
        Machine(("ip", "netns", "exec", f"{name}{side}"), f"{network}.{number}", f"{name}{side}")
        for number, side in ((1, "a"), (2, "b"))
    ]
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", f"{name}a"]).returncode:
        yield [Machine((), "127.0.0.1", "lo")] * 2
        return
    try:
        ip("netns", "add", f"{name}b")
        ends = [("name", machine.interface, "netns", machine.interface) for machine in machines]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for machine in machines:
            for words in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{machine.address}/24", "dev", machine.interface),
                ("link", "set", machine.interface, "up"),
            ):
                ip("-n", machine.interface, *words)
        yield machines
    finally:
        for machine in machines:
            subprocess.run(["ip", "netns", "del", machine.interface], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
