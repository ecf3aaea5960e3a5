"""Finds the processes of this machine that are connected to a port, and their ranks: a program.

A server runs it in a process of its own, since looking at all sockets of a busy machine takes up to a second.
It prints a line of JSON per process: `[pid, rank, local_rank, world_size, [[address, port], ...]]`. These are
the addresses of the client's ends, written as the server's `accept` gives them; -1 means not known.

Both ends of a connection within this machine (this network namespace) are in the system's tables, so the
client is the process that holds the other end of one of the port's connections. Processes of other users and
of other pid namespaces cannot be looked into and are left out.

An environment is what a process was started with: a rank that a script has set later is not seen. And it is
inherited by the children of a rank and by their children. So RANK is not believed if a client

- has it from another client, or from a process that runs the same program (Python, as a rule): it may have a
  rank of its own, as those of `mp.spawn` do. A shell around a rank does no harm;
- has it from the same process as another client, unless that is its own child;
- has a child that was given the same rank by other variables, or a rank of a job of another size: it is a
  launcher, and the variable, which some clusters set, means its machine.

That leaves a launcher with such a variable that has not started its ranks yet: here, it looks like a rank.

A server process that a rank hosts has the rank's variables as well, but is no client. A relay that a rank
hosts is one: the caller knows which connections are relays, and takes no rank from here for them.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import psutil

from rallypoint.store.rollcall.identity import identity_of

Address = tuple[str, int]


class Connection(NamedTuple):
    """An established connection: its two ends, and the process that holds the local one, if it is known."""

    local: Address
    remote: Address
    pid: int | None = None


class Variables(NamedTuple):
    """The rank that the environment of a process names; -1: unknown."""

    rank: int = -1
    local_rank: int = -1
    world_size: int = -1


_NOT_TOLD: Final = Variables()


def main() -> None:
    """Print the processes that are connected to the ports which the arguments name."""
    sys.stdout.writelines(
        json.dumps(each) + "\n" for each in connected_processes(set(map(int, sys.argv[1:])))
    )


def connected_processes(ports: Collection[int]) -> list[tuple[int, int, int, int, list[Address]]]:
    """The processes that are connected to some ports, each with its rank and the addresses of its ends."""
    parents = {each.pid: each.info["ppid"] for each in psutil.process_iter(["ppid"])}
    addresses: dict[int, list[Address]] = defaultdict(list)
    for address, pid in clients_of(_established(), ports).items():
        addresses[_opener(address, pid, parents)].append(address)
    ranks = [pid for pid in addresses if _variables_of(pid) != _NOT_TOLD]
    family = Family(parents, _variables_of, _program_of)
    sure = {pid for pid in ranks if family.believes(pid, ranks)}
    return [
        (pid, *(_variables_of(pid) if pid in sure else _NOT_TOLD), ends) for pid, ends in addresses.items()
    ]


# Connections ----------------------------------------------------------------------------------------------


def clients_of(connections: Collection[Connection], ports: Collection[int]) -> dict[Address, int]:
    """The clients of some ports on this machine: the address that `accept` gives, and the process."""
    named = {
        (_plain(each.remote), _plain(each.local)): each.remote
        for each in connections
        if each.local[1] in ports
    }
    found: dict[Address, int] = {}
    for each in connections:
        address = named.get((_plain(each.local), _plain(each.remote)))
        if address is not None and each.pid is not None:
            found[address] = min(each.pid, found.get(address, each.pid))
    return found


def _plain(address: Address) -> Address:
    """An IPv4 address in its own form, also on an IPv6 socket: the two ends may differ in that."""
    return address[0].removeprefix("::ffff:"), address[1]


def _established() -> list[Connection]:
    try:
        return _of_clients(psutil.net_connections("tcp"))
    except psutil.AccessDenied:  # macOS shows the whole table to root alone, but each user its own processes
        return [each for pid in psutil.pids() for each in _connections_of(pid)]


def _of_clients(connections: Iterable[Any], pid: int | None = None) -> list[Connection]:
    """The established connections; `pid` is the process of those that name none."""
    return [
        Connection(each.laddr, each.raddr, getattr(each, "pid", pid))
        for each in connections
        if each.status == psutil.CONN_ESTABLISHED and each.laddr and each.raddr
    ]


def _opener(address: Address, pid: int, parents: Mapping[int, int]) -> int:
    """The process that has opened a connection, where the system may name a fork of it."""
    parent = parents.get(pid, 0)
    if (
        _program_of(parent) == _program_of(pid)
        and _variables_of(parent) == _variables_of(pid)
        and _plain(address) in _ends_of(parent)
    ):
        return _opener(address, parent, parents)
    return pid


# Processes ------------------------------------------------------------------------------------------------


@cache
def _connections_of(pid: int) -> list[Connection]:
    try:
        return _of_clients(psutil.Process(pid).net_connections("tcp"), pid)
    except (psutil.Error, OSError):  # it has ended, or is another user's
        return []


def _ends_of(pid: int) -> set[Address]:
    return {_plain(each.local) for each in _connections_of(pid)}


@cache
def _program_of(pid: int) -> str:
    try:
        return psutil.Process(pid).exe()
    except (psutil.Error, OSError):
        return f"unknown program of {pid}"


@cache
def _variables_of(pid: int) -> Variables:
    """What the environment of a process names. Without a rank, the other variables mean nothing."""
    try:
        who = identity_of(psutil.Process(pid).environ(), "", pid)
    except (psutil.Error, OSError):
        return _NOT_TOLD
    return Variables(who.rank, who.local_rank, who.world_size) if who.rank >= 0 else _NOT_TOLD


class Family:
    """All processes: their parents, their variables and their programs."""

    def __init__(
        self,
        parents: Mapping[int, int],
        variables_of: Callable[[int], Variables],
        program_of: Callable[[int], str],
    ) -> None:
        self._parents = parents
        self._variables_of = variables_of
        self._program_of = program_of
        self._children: dict[int, list[int]] = defaultdict(list)
        for pid, parent in parents.items():
            self._children[parent].append(pid)

    def believes(self, pid: int, clients: Collection[int]) -> bool:
        """Whether a client with a rank is the rank that its variables name: see the top of this file."""
        own, program = self._variables_of(pid), self._program_of(pid)
        elders = self._elders(pid, own)
        return not (
            any(elder in clients or self._program_of(elder) == program for elder in elders)
            or any(relative in clients for relative in self._relatives(pid, elders, own))
            or any(_shows_launcher(own, self._variables_of(child)) for child in self._children[pid])
        )

    def _elders(self, pid: int, own: Variables) -> list[int]:
        """Its ancestors, as long as they have the same variables."""
        line = [pid]
        # A pid may be given anew while all this is read, so a line might lead back to itself.
        while (pid := self._parents.get(pid, 0)) not in line and self._variables_of(pid) == own:
            line.append(pid)
        return line[1:]

    def _relatives(self, pid: int, elders: Iterable[int], own: Variables) -> Iterator[int]:
        """Processes that have inherited the variables from its elders, but not through it."""
        seen = {pid, *elders}
        open_ends = [*elders]
        while open_ends:
            for child in self._children[open_ends.pop()]:
                if child not in seen and self._variables_of(child) == own:
                    seen.add(child)
                    open_ends.append(child)
                    yield child


def _shows_launcher(own: Variables, given: Variables) -> bool:
    """Whether the variables that a process has given to a child show that its own ones name no rank."""
    return given not in (_NOT_TOLD, own) and (given.rank == own.rank or given.world_size != own.world_size)
