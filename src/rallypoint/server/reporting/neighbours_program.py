"""Which process of this machine is behind which connection to a port, and its rank: a program (Linux).

    python -I -S neighbours.py PORT...

It prints a line per connection, `ADDRESS PORT PID RANK LOCAL_RANK WORLD_SIZE`, and `END` behind the last.
Address and port are those of the client, written as the server's `accept` gives them; what is not known
is -1. Looking into all open files of all processes takes too long for a server's loop, so a server runs this
file by its path. For the same reason it imports nothing of Rallypoint, and no more than it has to.

Both ends of a connection within this machine (this network namespace) are in the kernel's tables: a client
is whoever holds the other end of a connection that one of the ports has. Where several processes hold it,
after a fork, the lowest pid counts: as a rule the one that opened it. Processes of other users, and of other
pid namespaces, cannot be looked into and are left out.

An environment is what a process was started with: a rank that a script has set later is not seen. And it is
inherited, by children of a rank and by what they start. So RANK is believed, or not told at all. It is not
believed of a client

- that has it from another client, or from a process that runs the same program (Python, as a rule): it may
  have a rank of its own, as those of `mp.spawn` do. A shell around a rank does no harm;
- that has it from the same process as another client, unless that is a child of its own;
- with a child that was given the same rank by other variables, or a rank of a job of another size: it is a
  launcher, and the variable, which some clusters set, means its machine.

That leaves a launcher with such a variable that has not started its ranks yet: here, it looks like a rank.

A server process that a rank hosts has the rank's variables as well; it is nobody's client. A relay that a
rank hosts is one: whoever asks knows which connections are relays, and takes no rank from here for them.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # to import typing would take longer than to start the interpreter
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping
    from typing import Final

    Variables = tuple[int, int, int]
    """RANK, LOCAL_RANK, WORLD_SIZE; -1: not known."""

END: Final = "end"

_NAMES: Final = (b"RANK", b"LOCAL_RANK", b"WORLD_SIZE")
_NOT_TOLD: Final = (-1, -1, -1)
_MOST_DIGITS: Final = 9
_ENVIRON_BYTES: Final = 1 << 20

_ESTABLISHED: Final = "01"
_PORT_DIGITS: Final = 4
# The tables show an address as words of the machine's own byte order.
_MAPPED: Final = "0000000000000000" + ("FFFF0000" if sys.byteorder == "little" else "0000FFFF")


# Connections ----------------------------------------------------------------------------------------------


def connections(tables: Iterable[Iterable[str]], ports: Iterable[int]) -> dict[str, tuple[str, int]]:
    """The clients of the ports on this machine: the link of an open file, and how the server calls it.

    `tables` are the lines of /proc/net/tcp and tcp6.
    """
    wanted = {f"{port:0{_PORT_DIGITS}X}" for port in ports}
    clients: dict[tuple[str, str], str] = {}  # from and to: the inode of the client's end
    servers: dict[tuple[str, str], str] = {}  # from and to: the client, as the server's end shows it
    for lines in tables:
        for local, remote, inode in _established(lines):
            if remote[-_PORT_DIGITS:] in wanted:
                clients[_plain(local), _plain(remote)] = inode
            if local[-_PORT_DIGITS:] in wanted:
                servers[_plain(remote), _plain(local)] = remote
    texts: dict[str, str] = {}
    found = {}
    for ends in clients.keys() & servers.keys():
        address, _, port = servers[ends].partition(":")
        if address not in texts:
            texts[address] = _text_of(address)
        found[f"socket:[{clients[ends]}]"] = texts[address], int(port, 16)
    return found


def _established(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Local end, remote end and inode of each connection that is open."""
    for line in lines:
        columns = line.split(None, 10)
        if len(columns) > 9 and columns[3] == _ESTABLISHED:
            yield columns[1], columns[2], columns[9]


def _plain(end: str) -> str:
    """IPv4 as such, also where a socket is of IPv6: the two ends of a connection may differ in that."""
    return end.removeprefix(_MAPPED)


def _text_of(address: str) -> str:
    words = (int(address[start : start + 8], 16) for start in range(0, len(address), 8))
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    if len(raw) == 4 or address.startswith(_MAPPED):
        return ("::ffff:" if len(raw) > 4 else "") + ".".join(map(str, raw[-4:]))
    from socket import AF_INET6, inet_ntop  # late: it takes as long as to start the interpreter

    return inet_ntop(AF_INET6, raw)


def _tables() -> Iterator[Iterable[str]]:
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii") as table:
                yield table
        except FileNotFoundError:  # a system without IPv6
            continue


# Processes ------------------------------------------------------------------------------------------------


def owners(links: Iterable[str], last: int) -> dict[str, int]:
    """The process that holds each of the open files; the process `last` is looked into last."""
    missing = set(links)
    found: dict[str, int] = {}
    for pid in sorted(_pids(), key=lambda pid: (pid == last, pid)):
        if not missing:
            break
        held = missing.intersection(_open_files(pid))
        missing -= held
        found.update(dict.fromkeys(held, pid))
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _open_files(pid: int) -> Iterator[str]:
    try:
        folder = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it has ended, or is another user's
        return
    try:
        for name in os.listdir(folder):
            try:
                yield os.readlink(name, dir_fd=folder)
            except OSError:  # closed meanwhile
                continue
    except OSError:
        return
    finally:
        os.close(folder)


def variables_in(environ: bytes) -> Variables:
    """What the environment of a process says of its rank; without a rank, nothing."""
    rank, local_rank, world_size = (_number_in(environ, name) for name in _NAMES)
    return (rank, local_rank, world_size) if rank >= 0 else _NOT_TOLD


def _number_in(environ: bytes, name: bytes) -> int:
    """The first variable of a name counts, as it does for the process itself."""
    _, found, rest = (b"\0" + environ).partition(b"\0" + name + b"=")
    value, whole, _ = rest.partition(b"\0")
    return int(value) if found and whole and value.isdigit() and len(value) <= _MOST_DIGITS else -1


def _variables_of(pid: int) -> Variables:
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            return variables_in(file.read(_ENVIRON_BYTES) or b"")
    except OSError:
        return _NOT_TOLD


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return int((file.read(4096) or b"").rpartition(b")")[2].split(None, 2)[1])
    except (OSError, ValueError, IndexError):
        return 0


def _program_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


# Belief ---------------------------------------------------------------------------------------------------


class Family:
    """All processes: who has started whom, with which variables, running what."""

    def __init__(
        self,
        parents: Mapping[int, int],
        variables_of: Callable[[int], Variables],
        program_of: Callable[[int], str],
    ) -> None:
        self._parents = parents
        self._variables_of = variables_of
        self._program_of = program_of
        self._children: dict[int, list[int]] = {}
        for pid, parent in parents.items():
            self._children.setdefault(parent, []).append(pid)

    def believes(self, pid: int, clients: Container[int]) -> bool:
        """Whether a client with a rank is the rank that its variables name: see above."""
        own, program = self._variables_of(pid), self._program_of(pid)
        elders = self._elders(pid, own)
        return not (
            any(elder in clients or self._program_of(elder) == program for elder in elders)
            or any(relative in clients for relative in self._relatives(pid, elders, own))
            or any(_shows_launcher(own, self._variables_of(child)) for child in self._children.get(pid, ()))
        )

    def _elders(self, pid: int, own: Variables) -> list[int]:
        """Its parent, its parent's parent and so on, as far as they have the same variables."""
        line = [pid]
        # A pid may be given anew while all this is read, so a line might lead back to itself.
        while (pid := self._parents.get(pid, 0)) not in line and self._variables_of(pid) == own:
            line.append(pid)
        return line[1:]

    def _relatives(self, pid: int, elders: list[int], own: Variables) -> Iterator[int]:
        """Those who have the variables from its elders, but not through it."""
        seen = {pid, *elders}
        open_ends = [*elders]
        while open_ends:
            for child in self._children.get(open_ends.pop(), ()):
                if child not in seen and self._variables_of(child) == own:
                    seen.add(child)
                    open_ends.append(child)
                    yield child


def _shows_launcher(own: Variables, given: Variables) -> bool:
    """Whether the variables that a process has given to a child show that its own ones name no rank."""
    return given not in (_NOT_TOLD, own) and (given[0] == own[0] or given[2] != own[2])


# The program ----------------------------------------------------------------------------------------------


def _once(look_up: Callable[[int], Variables]) -> Callable[[int], Variables]:
    """Look up each process once."""
    known: dict[int, Variables] = {}

    def find(pid: int) -> Variables:
        if pid not in known:
            known[pid] = look_up(pid)
        return known[pid]

    return find


def look(ports: Iterable[int]) -> Iterator[str]:
    """The lines to print."""
    found = connections(_tables(), ports)
    processes = owners(found, last=os.getppid())  # which is the server: its own ends are not looked for
    variables_of = _once(_variables_of)
    ranks = {pid: own for pid in set(processes.values()) if (own := variables_of(pid)) != _NOT_TOLD}
    parents = {pid: _parent_of(pid) for pid in _pids()} if ranks else {}
    family = Family(parents, variables_of, _program_of)
    sure = {pid for pid in ranks if family.believes(pid, ranks)}
    for link, pid in processes.items():
        address, port = found[link]
        rank, local_rank, world_size = ranks[pid] if pid in sure else _NOT_TOLD
        yield f"{address} {port} {pid} {rank} {local_rank} {world_size}\n"
    yield f"{END}\n"


def main() -> None:
    _let_go()
    sys.stdout.writelines(look(map(int, sys.argv[1:])))


def _let_go() -> None:
    """Close what the server has left open: a port that it listens on must not outlive it here."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:  # the folder itself, which was open while it was listed
                pass


if __name__ == "__main__":
    main()
