"""torch: what it was built with, whether its store and its backends work, and its known defects.

torch is asked once, in a process of its own; several findings come from its answers.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from rallypoint.diagnose.doctor.network import use_interface
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.doctor.stores import open_store
from rallypoint.diagnose.findings import NO_GPU, Finding, Fix, failure, named, note, ok, unknown, warning
from rallypoint.errors import RallypointError
from rallypoint.launch.environment import without_rank
from rallypoint.pytorch.asking import Answers, ask
from rallypoint.text import fine_duration

SECONDS: Final = 60.0
_PARTS: Final = ("torch", "devices", "gloo", "plugin", "store", "nccl")

_USE_PYTHON_CLIENT: Final = "rallypoint run --client=python train.py, or file://"


def check_torch(situation: Situation) -> Iterator[Finding]:
    if find_spec("torch") is None:
        what = f"not installed for {sys.executable}; stores work without it, jobs do not"
        yield failure(what, "pip install torch")
        return
    yield from judge_torch(ask_torch(situation.environ))


def ask_torch(environ: Mapping[str, str]) -> Answers:
    """torch's answers about all parts. Its client tries a store of ours, if one can be opened."""
    calm = {**without_rank(environ), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        with open_store("127.0.0.1") as store:
            place = f"store=127.0.0.1:{store.port}"
            return ask([place if part == "store" else part for part in _PARTS], calm, SECONDS - 1)
    except (RallypointError, OSError):  # no socket: the check of loopback says why
        return ask([part for part in _PARTS if part != "store"], calm, SECONDS - 1)


def judge_torch(answers: Answers) -> Iterator[Finding]:
    """Findings from torch's answers."""
    problem = answers.error_of("torch")
    if problem:
        found = failure(f"it cannot be imported: {problem}", "python -c 'import torch' shows all of it")
        yield from named("torch", [found])
        return
    torch = answers.parts["torch"]
    yield from named("torch", [_judge_build(torch, answers.seconds)])
    defects = defects_of(torch["version"], platform.system())
    yield from named("known-defects", (note(each.what, each.do) for each in defects))
    missing = [part for part in _PARTS if part not in answers.parts]
    for part, (name, judge) in _JUDGES.items():
        if part != "devices" and not torch["distributed"]:
            continue
        if answers.problem and part in missing[1:]:  # in the first of these, torch's process ended
            found = unknown(f"it was not tried, since torch's process ended before: {answers.problem}")
            yield from named(name, [found])
        else:
            yield from named(name, judge(torch, answers))


def _judge_build(torch: Mapping[str, Any], seconds: float) -> Finding:
    runs_on = (
        f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU only"
    )
    what = f"{torch['version']}, {runs_on}"
    if not torch["distributed"]:
        remedy = "install another build of torch; this one cannot take part in any job"
        return failure(f"{what}, built without torch.distributed", remedy)
    return ok(f"{what}; {', '.join(torch['backends']) or 'no backend'}; examined in {seconds:.1f} s")


def _judge_devices(_: Mapping[str, Any], answers: Answers) -> Iterator[Finding]:
    if problem := answers.error_of("devices"):
        yield failure(f"torch cannot ask for them: {problem}", "nvidia-smi shows whether the driver works")
        return
    found = answers.parts["devices"]
    if not found["devices"]:
        yield ok("no GPU that this torch can use: ranks compute on the CPU")
    for number, device in enumerate(found["devices"]):
        yield judge_device(number, device, found["kernels"])


def judge_device(number: int, device: Mapping[str, Any], kernels: list[str]) -> Finding:
    """Whether this torch has code for a GPU, and whether the GPU has memory left."""
    major, minor = device["capability"]
    free, whole = device["free"] / (1 << 30), device["bytes"] / (1 << 30)
    what = f"{number}: {device['name']}, sm_{major}{minor}, {free:.1f} of {whole:.1f} GiB free"
    if kernels and not any(_runs_on(kernel, (major, minor)) for kernel in kernels):
        build = f"install a build that has it, or: rallypoint torch plan pytorch --cuda-arch {major}.{minor}"
        return failure(f"{what}; this torch has code for {', '.join(kernels)} only", build)
    if free < whole / 2:
        return warning(f"{what}: others use most of it", "nvidia-smi shows the processes")
    return ok(what)


def _runs_on(kernel: str, capability: tuple[int, int]) -> bool:
    """`sm_86` runs on its own major, from its minor on; PTX (`compute_86`) runs on everything later."""
    kind, _, number = kernel.partition("_")
    if kind not in ("sm", "compute"):  # ROCm's names: the build knows
        return True
    digits = number.rstrip("af")
    if not digits.isdigit():
        return False
    has = (int(digits[:-1]), int(digits[-1]))
    return has <= capability and (kind == "compute" or has[0] == capability[0])


def _judge_store(_: Mapping[str, Any], answers: Answers) -> Iterator[Finding]:
    problem, facts = answers.error_of("store"), answers.parts.get("store", {})
    if not facts and not answers.problem:
        yield unknown(f"torch's store was not tried: {problem}")
    elif problem:
        yield failure(f"torch's client cannot use a store on loopback: {problem}", _USE_PYTHON_CLIENT)
    elif facts["fault"] == "NO_LIBUV":
        what = "this torch was built without libuv: USE_LIBUV=0 helps env:// and tcp:// alone"
        yield warning(what, "rallypoint run train.py, or rallypoint run -- torchrun ...")
    elif facts["fault"]:
        what = "torch's TCPStore does not work at all on this build"
        yield failure(what, _USE_PYTHON_CLIENT, Fix("run", "client", "python"))
    else:
        trip = fine_duration(facts["round_trip"])
        yield ok(f"torch's TCPStore has it; torch's client asks our server in {trip}")


def _judge_gloo(torch: Mapping[str, Any], answers: Answers) -> Iterator[Finding]:
    if "gloo" not in torch["backends"]:
        yield warning("this torch was built without it", "install another build of torch")
    elif problem := answers.error_of("gloo"):
        fix = use_interface()
        yield failure(f"one rank by itself fails: {problem}", fix.command if fix else "", fix)
    else:
        yield ok(f"one rank by itself reduces, in {fine_duration(answers.parts['gloo']['seconds'])}")


def _judge_nccl(torch: Mapping[str, Any], answers: Answers) -> Iterator[Finding]:
    if "nccl" not in torch["backends"]:
        return
    what = f"NCCL {torch['nccl']}"
    if not answers.parts.get("devices", {}).get("devices"):
        yield ok(f"{what} is there; {NO_GPU}")
    elif problem := answers.error_of("nccl"):
        yield failure(f"{what}: one rank by itself fails: {problem}", "NCCL_DEBUG=INFO shows more")
    else:
        yield ok(f"{what}: one rank by itself reduces, in {fine_duration(answers.parts['nccl']['seconds'])}")


def _judge_plugin(_: Mapping[str, Any], answers: Answers) -> Iterator[Finding]:
    if problem := answers.error_of("plugin"):
        yield failure(
            f"it cannot be loaded: {problem}", "pip install --force-reinstall . in a clone of Rallypoint"
        )
    elif "rallypoint" not in answers.parts["plugin"]["backends"]:
        yield warning(
            "it loads, but torchrun does not know it: torch is before 2.6, or Rallypoint is only on the path",
            "pip install . in a clone of Rallypoint; or rallypoint run, which does without",
        )
    else:
        yield ok("registered, and loads: --rdzv-backend=rallypoint")


_JUDGES: Final[Mapping[str, tuple[str, Callable[[Mapping[str, Any], Answers], Iterator[Finding]]]]] = {
    "devices": ("devices", _judge_devices),
    "store": ("libuv", _judge_store),
    "gloo": ("gloo", _judge_gloo),
    "nccl": ("nccl", _judge_nccl),
    "plugin": ("torchrun-plug-in", _judge_plugin),
}
"""For each part, the name of its findings and the judge; in the order of the report."""


# Known defects ----------------------------------------------------------------------------------------------
# Of torch's store and of torchrun: which builds have them, and how to avoid them. A defect that a check finds
# by trying has no row here.

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
