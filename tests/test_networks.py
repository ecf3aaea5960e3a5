"""Jobs of two machines on networks as they are: a firewall, several interfaces, names that mislead, a NAT.

The machines are network namespaces with a cable between them, and host names and hosts files of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import DONE, TRAIN, Job, free_port, job
from namespaces import Machine, Wiring, wired

_RUN = ("-m", "rallypoint", "run")
_NAMES = "10.77.0.1 node-a\n10.77.0.2 node-b\n"
_A = Wiring("node-a", ("10.77.0.1/24",), _NAMES)
_B = Wiring("node-b", ("10.77.0.2/24",), _NAMES)
_SIX = "fd77::1 node-a\nfd77::2 node-b\n"


def _debian(wiring: Wiring) -> Wiring:
    """As Debian's installer leaves the hosts file: the own name is a loopback address."""
    others = "".join(line for line in wiring.names.splitlines(True) if wiring.host not in line)
    return replace(wiring, names=f"127.0.1.1 {wiring.host}\n{others}")


def _on_storage(wiring: Wiring) -> Wiring:
    """With a network that leads nowhere, and whose address is that of the own name."""
    address = wiring.addresses[0].replace("10.77.", "10.88.")
    own = f"{address.partition('/')[0]} {wiring.host}\n"
    return replace(_debian(wiring), names=own + _debian(wiring).names, elsewhere=(address,))


def _v6(wiring: Wiring, *more: str) -> Wiring:
    address = wiring.addresses[0].replace("10.77.0.", "fd77::").replace("/24", "/64")
    return replace(wiring, addresses=(*more, address), names=_SIX)


def _run(
    running: Job, machines: Sequence[Machine], endpoint: str, options: Sequence[Sequence[str]] = ((), ())
) -> None:
    """A job with a rank on each machine, which has to end well."""
    for machine, own in zip(machines, options, strict=True):
        words = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint}", *own]
        running.start(TRAIN + DONE, words, command=_RUN, prefix=machine.prefix)
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


@pytest.mark.slow
@pytest.mark.parametrize("network", _NETWORKS)
def test_a_job_on_a_network(network: str, tmp_path: Path) -> None:
    *wirings, endpoint, wrong = _NETWORKS[network]
    with wired(*wirings) as machines, job(tmp_path) as running:
        _run(running, machines, f"{endpoint}:{free_port()}")
        told = [line for line in running.logs().splitlines() if "GLOO_SOCKET_IFNAME=cable" in line]
        assert bool(told) == bool(wrong), running.logs()
        assert all(f"gloo would listen at {wrong}" in line for line in told), told
