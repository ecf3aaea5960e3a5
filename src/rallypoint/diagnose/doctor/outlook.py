"""What will work on this machine and what will not, from all that was found. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from rallypoint.diagnose.findings import Finding, State, worst


class Prospect(str, Enum):
    """Whether it will work."""

    YES = "yes"
    WITH_HELP = "with Rallypoint"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Outlook:
    """One way to start a job, or one backend; and what stands in its way, or helps."""

    name: str
    prospect: Prospect
    why: str

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "prospect": self.prospect.value, "why": self.why}


_YES: Final = (Prospect.YES, "")

NO_GPU: Final = "there is no GPU for it"
"""How the finding about an NCCL that could not be tried ends."""


def look_ahead(findings: Sequence[Finding], packages: Mapping[str, str]) -> list[Outlook]:
    """What to expect of each way. `packages` has the versions of those that are installed."""
    torch = _without_torch(findings)
    place = _failure_of(findings, "endpoint", "store", "port")
    plain = torch or _failure_of(findings, "variables") or place
    plain = plain or _needs_store(findings, "rallypoint run -- python train.py, or USE_LIBUV=0")
    launched = torch or place or _needs_store(findings, "rallypoint run train.py, or -- torchrun")
    wrapped = torch or place or _needs_store(findings, "rallypoint run -- accelerate launch train.py")
    if "accelerate" not in packages:
        wrapped = (Prospect.NO, "accelerate is not installed: pip install accelerate")
    return [
        Outlook("plain (env://, tcp://)", *(plain or _YES)),
        Outlook("torchrun", *(launched or _YES)),
        Outlook("accelerate", *(wrapped or _YES)),
        Outlook("file init", *(torch or _by(findings, "file-init"))),
        Outlook("gloo", *(torch or _by(findings, "gloo"))),
        Outlook("NCCL", *(torch or _nccl(findings))),
    ]


_Judgement = tuple[Prospect, str]


def _without_torch(findings: Sequence[Finding]) -> _Judgement | None:
    found = worst(findings, "torch")
    if found is None or found.state is State.UNKNOWN:
        return Prospect.UNKNOWN, "torch gave no answer"
    return (Prospect.NO, f"torch: {found.found}") if found.state is not State.OK else None


def _failure_of(findings: Sequence[Finding], *names: str) -> _Judgement | None:
    """The first of these that would make a job fail."""
    for name in names:
        found = worst(findings, name)
        if found is not None and found.state is State.FAILURE:
            return Prospect.NO, f"{name}: {found.found}"
    return None


def _needs_store(findings: Sequence[Finding], command: str) -> _Judgement | None:
    """What needs a TCPStore needs sockets, and a torch whose store works."""
    loopback, libuv = worst(findings, "loopback"), worst(findings, "libuv")
    if loopback is not None and loopback.state is State.FAILURE:
        return Prospect.NO, loopback.found
    if libuv is None or libuv.state is State.UNKNOWN:
        return Prospect.UNKNOWN, libuv.found if libuv else "torch's store was not tried"
    if libuv.state is not State.OK:
        return Prospect.WITH_HELP, command
    return None


def _by(findings: Sequence[Finding], name: str) -> _Judgement:
    found = worst(findings, name)
    if found is None or found.state is State.UNKNOWN:
        return Prospect.UNKNOWN, found.found if found else "it was not tried"
    return _YES if found.state in (State.OK, State.NOTE) else (Prospect.NO, found.found)


def _nccl(findings: Sequence[Finding]) -> _Judgement:
    found = worst(findings, "nccl")
    if found is None:
        return Prospect.NO, "this torch was built without it"
    if found.found.endswith(NO_GPU):
        return Prospect.NO, NO_GPU
    return _by(findings, "nccl")
