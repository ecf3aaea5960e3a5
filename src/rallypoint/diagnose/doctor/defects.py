"""Known defects of torch's store and of torchrun: which builds have them, and how to avoid them. Pure.

The doctor tells them before they show. A defect that a check finds by trying has no row here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

Version = tuple[int, ...]

_NEWEST: Final[Version] = (1 << 30,)


@dataclass(frozen=True)
class Defect:
    """A defect of some versions of torch: from `since` on, and before `until`."""

    what: str
    do: str
    since: Version = ()
    until: Version = _NEWEST
    system: str = ""
    """The value of `platform.system()`; empty for all."""


DEFECTS: Final = (
    Defect(
        "On Windows, a TCPStore of torch 1.13 to 2.1 that meets a socket error says only "
        "\"unmatched '}' in format string\".",
        "Use a newer torch: 2.3, or a later one with `rallypoint run` (from 2.4 on it asks for libuv).",
        since=(1, 13),
        until=(2, 2),
        system="Windows",
    ),
    Defect(
        "TCPStore does not work in the Windows build of torch 2.2.0: it fails with 'Unknown error'.",
        "Use a newer torch: `pip install --upgrade torch`.",
        since=(2, 2),
        until=(2, 2, 1),
        system="Windows",
    ),
    Defect(
        "torchrun's agents wait 300 s for each other at the end of a job, whatever you set. They report an "
        "error if the machines finish further apart, or if the machine that holds the store leaves first.",
        "Ignore the message if the ranks ended well.",
        since=(1, 9),
    ),
    Defect(
        "Since torch 2.6, ranks that torchrun restarts share the store with the previous attempt and read "
        "its keys (addresses and NCCL ids of dead ranks), so --max-restarts often fails.",
        "Give each attempt a store of its own: `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ...`.",
        since=(2, 6),
    ),
    Defect(
        "With torchrun's c10d backend, the agent of rank 0 writes MASTER_ADDR only in its first round. A "
        "machine that joins later waits for it until it times out, and the job fails.",
        "Use Rallypoint's rendezvous on all machines: `--rdzv-backend=rallypoint`, or `rallypoint run` "
        "instead of torchrun.",
    ),
)


def defects_of(version: str, system: str) -> Iterator[Defect]:
    """The defects of a version of torch, such as `2.6.0+cu124`, on a system."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(map(int, found[0].split("."))) if found else ()
    for defect in DEFECTS:
        if defect.system in ("", system) and defect.since <= numbers < defect.until:
            yield defect
