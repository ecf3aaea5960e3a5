"""Jobs of two machines on networks as they are: a firewall, several interfaces, names that mislead, a NAT.

The machines are network namespaces with a cable between them, and host names and hosts files of their own.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import DONE, TRAIN, Job, free_port, job
from namespaces import Machine, Wiring, wired
from rallypoint.errors import BindError
from rallypoint.store.machine.interfaces import (
    GLOO_INTERFACE,
    NCCL_INTERFACE,
    Interface,
    interfaces_to_name,
)
from rallypoint.store.server.process.binding import listen_within

needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="it needs nft, of nftables")

_RUN = ("-m", "rallypoint", "run")
_NAMES = "10.77.0.1 node-a\n10.77.0.2 node-b\n"
_A = Wiring("node-a", ("10.77.0.1/24",), _NAMES)
_B = Wiring("node-b", ("10.77.0.2/24",), _NAMES)
_SIX = "fd77::1 node-a\nfd77::2 node-b\n"


def _debian(wiring: Wiring, own: str = "127.0.1.1") -> Wiring:
    """As Debian's installer leaves the hosts file: the own name is a loopback address."""
    others = "".join(line for line in wiring.names.splitlines(True) if wiring.host not in line)
    return replace(wiring, names=f"{own} {wiring.host}\n{others}")


def _on_storage(wiring: Wiring) -> Wiring:
    """With a network that leads nowhere, and whose address is that of the own name."""
    address = wiring.addresses[0].replace("10.77.", "10.88.")
    return replace(_debian(wiring, address.partition("/")[0]), elsewhere=(address,))


def _v6(wiring: Wiring, *more: str) -> Wiring:
    address = wiring.addresses[0].replace("10.77.0.", "fd77::").replace("/24", "/64")
    return replace(wiring, addresses=(*more, address), names=_SIX)


def _in(machine: Machine, *words: str, text: str = "") -> str:
    command = [*machine.prefix, *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _run(
    running: Job,
    machines: Sequence[Machine],
    endpoint: str,
    options: Sequence[Sequence[str]] = ((), ()),
    more: str = "",
) -> None:
    """A job with a rank on each machine, which has to end well."""
    for machine, own in zip(machines, options, strict=True):
        words = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint}", *own]
        running.start(TRAIN + more + DONE, words, command=_RUN, prefix=machine.prefix)
    assert running.wait() == [0, 0], running.logs()
    for number in (0, 1):
        assert re.search(r"^done \d of 2 sum 1.0", running.log(number), re.MULTILINE), running.logs()


_NETWORKS = {
    "names as they should be": (_A, _B, "node-a", ""),
    "the own name is loopback": (_debian(_A), _debian(_B), "node-a", "127.0.1.1"),
    "the own name is on another network": (_on_storage(_A), _on_storage(_B), "10.77.0.1", "10.88.0."),
    "one machine alone is like that": (_A, _debian(_B), "node-a", "127.0.1.1"),
    "no name is known": (replace(_A, names=""), replace(_B, names=""), "10.77.0.1", "127.0.0.1"),
    "IPv6 alone": (_v6(_A), _v6(_B), "node-a", ""),
    "IPv6 alone, and the own name is loopback": (
        _debian(_v6(_A)),
        _debian(_v6(_B)),
        "[fd77::1]",
        "127.0.1.1",
    ),
    "both, by the name": (_v6(_A, "10.77.0.1/24"), _v6(_B, "10.77.0.2/24"), "node-a", ""),
}
"""The machines, the endpoint, and where gloo would listen; nothing: where it should."""


_NAMES_THEM = """
import os
from rallypoint.launch.environment import name_interfaces
print(name_interfaces(os.environ, "10.77.0.1"))
"""


def test_the_interface_is_named_where_gloo_would_take_another() -> None:
    with wired(_on_storage(_A), _B) as machines:
        told = _in(machines[0], sys.executable, "-c", _NAMES_THEM)
    assert told.startswith("GLOO_SOCKET_IFNAME=cable, by which this machine reaches the others: ")
    assert "gloo would listen at 10.88.0.1" in told


@pytest.mark.slow
@pytest.mark.parametrize("network", _NETWORKS)
def test_a_job_on_a_network(network: str, tmp_path: Path) -> None:
    *wirings, endpoint, wrong = _NETWORKS[network]
    with wired(*wirings) as machines, job(tmp_path) as running:
        _run(running, machines, f"{endpoint}:{free_port()}")
        told = [line for line in running.logs().splitlines() if "GLOO_SOCKET_IFNAME=cable" in line]
        assert bool(told) == bool(wrong), running.logs()
        assert all(f"gloo would listen at {wrong}" in line for line in told), told


_LO = Interface("lo", True, ("127.0.0.1", "::1"))
_ETH = Interface("eth0", True, ("10.0.0.1", "fd00::1"))
_STORAGE = Interface("eth1", True, ("10.8.0.1",))
_DOCKER = Interface("docker0", True, ("172.17.0.1",))
_BRIDGE = Interface("virbr0", True, ("192.168.122.1",))
_DOWN = Interface("virbr1", False, ("192.168.123.1",))
_GLOO, _NCCL = {GLOO_INTERFACE: "eth0"}, {NCCL_INTERFACE: "=eth0"}


@pytest.mark.parametrize(
    ("address", "gloo", "found", "needed"),
    [
        ("10.0.0.1", "10.0.0.1", [_LO, _ETH], {}),
        ("10.0.0.1", "fd00::1", [_LO, _ETH, _STORAGE], {}),
        ("10.0.0.1", "127.0.1.1", [_LO, _ETH], _GLOO),
        ("fd00::1", "127.0.1.1", [_LO, _ETH], _GLOO),
        ("10.0.0.1", "10.8.0.1", [_LO, _STORAGE, _ETH], _GLOO),
        ("10.0.0.1", "10.0.0.1", [_LO, _DOCKER, _ETH], {}),  # NCCL leaves that out by itself
        ("10.0.0.1", "10.0.0.1", [_LO, _DOWN, _BRIDGE, _ETH], _NCCL),
        ("10.0.0.1", "127.0.1.1", [_LO, _BRIDGE, _ETH], {**_GLOO, **_NCCL}),
        ("10.0.0.1", "10.0.0.1", [_LO, _ETH, _BRIDGE], {}),
        ("127.0.0.1", "10.0.0.1", [_LO, _ETH], {}),  # all machines of the job are this one
        ("10.9.9.9", "127.0.1.1", [_LO, _ETH], {}),
        ("", "127.0.1.1", [], {}),
    ],
)
def test_which_interface_has_to_be_named(
    address: str, gloo: str, found: list[Interface], needed: dict[str, str]
) -> None:
    assert interfaces_to_name(address, gloo, found, {}) == needed
    assert interfaces_to_name(address, gloo, found, {GLOO_INTERFACE: "x", NCCL_INTERFACE: "y"}) == {}


def test_a_port_of_a_range() -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(taken) for taken in _two_in_a_row())
        ports = range(first.getsockname()[1], second.getsockname()[1] + 1)
        with pytest.raises(BindError, match=f"all ports from {ports[0]} to {ports[-1]} are in use") as caught:
            listen_within("127.0.0.1", ports)
        assert "--port-range" in caught.value.hint
        second.close()
        listeners = [stack.enter_context(each) for each in listen_within("127.0.0.1", ports)]
        assert {each.getsockname()[1] for each in listeners} == {ports[-1]}


def _two_in_a_row() -> tuple[socket.socket, socket.socket]:
    while True:
        first = socket.create_server(("127.0.0.1", 0))
        try:
            return first, socket.create_server(("127.0.0.1", first.getsockname()[1] + 1))
        except (OSError, OverflowError):  # that one is taken
            first.close()


# A firewall -----------------------------------------------------------------------------------------------

_PORT, _OWN_PORTS, _GLOO_PORTS = 29400, "29600-29609", "50000-50999"

_FIREWALL = f"""
table inet wall {{
    counter refused {{ }}
    chain input {{
        type filter hook input priority 0; policy drop;
        iif lo accept
        ct state established,related accept
        meta l4proto {{ icmp, ipv6-icmp }} accept
        tcp dport {{ {_PORT}, {_GLOO_PORTS} }} accept
        counter name refused drop
    }}
}}
"""

_FAILS_ONCE = (
    TRAIN
    + """
import socket
def can_reach(port):
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], port), 2).close()
    except OSError as error:
        return type(error).__name__
    return "open"
say("rank", rank, "master", can_reach(int(os.environ["MASTER_PORT"])))
if rank == 1 and tries == 0:
    os._exit(3)
"""
    + DONE
)


@needs_nft
@pytest.mark.slow
def test_a_firewall_that_lets_one_port_through_and_those_of_gloo(tmp_path: Path) -> None:
    """In two rounds. gloo listens where the system takes ports for clients: that range is narrowed down."""
    with wired(_A, _B) as machines, job(tmp_path) as running:
        for machine in machines:
            _in(machine, "nft", "-f", "-", text=_FIREWALL)
            _in(machine, "sysctl", "-w", f"net.ipv4.ip_local_port_range={_GLOO_PORTS.replace('-', ' ')}")
        for machine in machines:
            options = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=node-a:{_PORT}"]
            options += ["--max-restarts=1", f"--port-range={_OWN_PORTS}"]
            running.start(_FAILS_ONCE, options, command=_RUN, prefix=machine.prefix)
        assert running.wait() == [0, 0], running.logs()
        assert running.log(0).count("rank 0 master open") == 2, "it is there, in both rounds"
        assert running.log(1).count("rank 1 master TimeoutError") == 2, "and the other machine needs it not"
        assert "done 1 of 2 sum 1.0" in running.log(1), running.logs()
        refused = _in(machines[0], "nft", "list", "counter", "inet", "wall", "refused")
        assert int(re.findall(r"packets (\d+)", refused)[0]) > 0, refused


@pytest.mark.slow
def test_ranks_without_relays_need_a_port_of_the_range(tmp_path: Path) -> None:
    with wired(_A, _B) as machines, job(tmp_path) as running:
        own = ["--relay=off", f"--port-range={_OWN_PORTS}"]
        _run(
            running,
            machines,
            f"node-a:{_PORT}",
            [own, own],
            "say(os.environ['MASTER_PORT'], 'is the port')\n",
        )
        ports = set(re.findall(r"^(\d+) is the port", running.logs(), re.MULTILINE))
        assert len(ports) == 1
        assert int(ports.pop()) in range(29600, 29610)


# A NAT ----------------------------------------------------------------------------------------------------

_NAT = """
table ip nat {{
    chain output {{
        type nat hook output priority -100;
        ip daddr 10.99.0.1 tcp dport {0} dnat to 10.77.0.1:{0}
    }}
}}
"""


@needs_nft
@pytest.mark.slow
def test_an_endpoint_that_is_no_address_of_any_machine(tmp_path: Path) -> None:
    """As that of a NAT, or of a service: one machine has to be told that it leads there."""
    with wired(_A, _B) as machines, job(tmp_path) as running:
        _in(machines[1], "nft", "-f", "-", text=_NAT.format(_PORT))
        _in(machines[1], "ip", "route", "add", "10.99.0.1", "via", "10.77.0.1")
        hosts = (["--rdzv-conf=is_host=1"], ["--rdzv-conf=is_host=0"])
        _run(running, machines, f"10.99.0.1:{_PORT}", hosts)
