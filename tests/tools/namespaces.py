"""Machines for tests: network namespaces with a cable between them, where the rights allow that."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from turns import NETWORK, in_turns


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
            _bring_up(machine.interface, machine.interface, f"{machine.address}/24")
        yield machines
    finally:
        for machine in machines:
            subprocess.run(["ip", "netns", "del", machine.interface], capture_output=True)


@contextmanager
def machines_on_switch(count: int) -> Iterator[tuple[str, list[Machine]]]:
    """Network namespaces, joined by a bridge, and the address by which all of them reach this machine.

    Where that address is not needed, `two_machines` and `wired` do: they leave this machine's network alone.
    The test is skipped where the rights do not allow that.
    """
    with in_turns(NETWORK), _switch(count) as found:
        yield found


@contextmanager
def _switch(count: int) -> Iterator[tuple[str, list[Machine]]]:
    switch = f"rs{os.getpid() % 100_000}"
    network = f"10.232.{os.getpid() % 256}"
    machines = [
        Machine(("ip", "netns", "exec", name), f"{network}.{number + 1}", name)
        for number, name in enumerate(f"{switch}{letter}" for letter in "abcdefgh"[:count])
    ]
    if (
        shutil.which("ip") is None
        or subprocess.run(["ip", "link", "add", switch, "type", "bridge"]).returncode
    ):
        pytest.skip("it needs ip, of iproute2, and root")
    try:
        ip("addr", "add", f"{network}.254/24", "dev", switch)
        ip("link", "set", switch, "up")
        for machine in machines:
            name, port = machine.interface, f"{machine.interface}p"
            ip("netns", "add", name)
            ip("link", "add", port, "type", "veth", "peer", "name", name, "netns", name)
            ip("link", "set", port, "master", switch, "up")
            _bring_up(name, name, f"{machine.address}/24")
        yield f"{network}.254", machines
    finally:
        for machine in machines:
            subprocess.run(["ip", "link", "del", f"{machine.interface}p"], capture_output=True)
            subprocess.run(["ip", "netns", "del", machine.interface], capture_output=True)
        subprocess.run(["ip", "link", "del", switch], capture_output=True)


def plug(machine: Machine, *, in_: bool) -> None:
    """Pull the cable of a machine on a switch out, or put it in again."""
    ip("link", "set", f"{machine.interface}p", "up" if in_ else "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@dataclass(frozen=True)
class Wiring:
    """How a machine is on its networks, and which names it knows."""

    host: str
    """Its host name."""
    addresses: tuple[str, ...]
    """Its addresses on the cable, with the lengths of their networks."""
    names: str
    """Its hosts file, but for localhost."""
    elsewhere: tuple[str, ...] = ()
    """Its addresses on another interface, which leads nowhere."""


_SET_HOST_NAME = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
_LOOPBACK = "127.0.0.1 localhost\n::1 localhost\n"


@contextmanager
def wired(*wirings: Wiring) -> Iterator[list[Machine]]:
    """Two network namespaces, joined by a veth pair, with host names and hosts files of their own.

    The test is skipped where the rights do not allow that.
    """
    name = f"rw{os.getpid() % 100_000}"
    spaces = [f"{name}{side}" for side in "ab"]
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", spaces[0]]).returncode:
        pytest.skip("it needs ip, of iproute2, and root")
    files = [Path("/etc/netns") / space for space in spaces]
    try:
        ip("netns", "add", spaces[1])
        for space, file, wiring in zip(spaces, files, wirings, strict=True):
            file.mkdir(parents=True)
            (file / "hosts").write_text(_LOOPBACK + wiring.names)
            if wiring.elsewhere:  # before the cable, so that it comes first in every list
                ip("-n", space, "link", "add", "storage", "type", "bridge")
                _bring_up(space, "storage", *wiring.elsewhere)
        ends = [("name", "cable", "netns", space) for space in spaces]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for space, wiring in zip(spaces, wirings, strict=True):
            _bring_up(space, "cable", *wiring.addresses)
        yield [_in_space(space, wiring) for space, wiring in zip(spaces, wirings, strict=True)]
    finally:
        for space, file in zip(spaces, files, strict=True):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(file, ignore_errors=True)


def _bring_up(space: str, interface: str, *addresses: str) -> None:
    ip("-n", space, "link", "set", "lo", "up")
    for address in addresses:
        no_wait = ("nodad",) if ":" in address else ()
        ip("-n", space, "addr", "add", address, "dev", interface, *no_wait)
    ip("-n", space, "link", "set", interface, "up")


def _in_space(space: str, wiring: Wiring) -> Machine:
    enter = ("ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", _SET_HOST_NAME, wiring.host)
    return Machine(enter, wiring.addresses[0].partition("/")[0], "cable")
