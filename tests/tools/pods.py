"""Pods for tests: machines with host names and hosts files of their own, where the rights allow that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from namespaces import Machine, two_machines


@dataclass(frozen=True)
class Pod:
    """A machine whose hosts file can be changed at any time."""

    name: str
    prefix: tuple[str, ...]
    address: str
    hosts: Path

    def learns(self, name: str, address: str) -> None:
        """From now on, the name is known in this pod; in the place of what it was before."""
        kept = [line for line in self.hosts.read_text().splitlines() if name not in line.split()]
        self.hosts.write_text("\n".join([*kept, f"{address} {name}", ""]))  # the file that is mounted


@contextmanager
def two_pods(folder: Path, names: Sequence[str] = ("job-0", "job-1")) -> Iterator[list[Pod]]:
    """Two machines as Kubernetes sets up pods: each knows its own host name, and no other's.

    The test is skipped where the rights do not allow that.
    """
    with two_machines() as machines:
        if not machines[0].prefix:
            pytest.skip("it needs ip, of iproute2, and root")
        yield [_make_pod(*each, folder) for each in zip(machines, names, strict=True)]


def _make_pod(machine: Machine, name: str, folder: Path) -> Pod:
    hosts = folder / f"hosts-{name}"
    hosts.write_text(f"127.0.0.1 localhost\n{machine.address} {name}\n")
    enter = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
    prefix = (*machine.prefix, "unshare", "--mount", "--uts", "sh", "-c", enter, name, str(hosts))
    return Pod(name, prefix, machine.address, hosts)
