"""torch: what it was built with, whether its store and its backends work, and what is known to be wrong.

torch itself is asked in another process, once; from its answers come several findings.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

from rallypoint.diagnose.doctor.interfaces import use_interface
from rallypoint.diagnose.doctor.outlook import NO_GPU
from rallypoint.diagnose.doctor.shell import apply
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.doctor.stores import open_store
from rallypoint.diagnose.explain.knowledge import causes, fill
from rallypoint.diagnose.findings import Finding, Fix, failure, note, ok, unknown, warning
from rallypoint.errors import RallypointError
from rallypoint.launch.environment import without_rank
from rallypoint.pytorch.asking import Answers, ask
from rallypoint.text import fine_duration

SECONDS: Final = 60.0
_PARTS: Final = ("torch", "devices", "gloo", "plugin", "store", "nccl")

_PROBED: Final = ("reverse-lookup-stalls", "no-libuv")
"""Defects that another check finds by trying."""

_SYSTEMS: Final = {"Linux": "linux", "Windows": "windows", "Darwin": "macos"}

_WITHOUT_LIBUV: Final = "this torch was built without libuv: USE_LIBUV=0 helps env:// and tcp:// alone"


def check_torch(situation: Situation) -> Iterator[Finding]:
    """Ask it, and tell what it says."""
    if find_spec("torch") is None:
        yield warning(
            "torch",
            f"not installed for {sys.executable}; stores work without it, jobs do not",
            "pip install torch",
        )
        return
    yield from judge(ask_torch(situation.environ))


def ask_torch(environ: Mapping[str, str]) -> Answers:
    """All that torch is asked; with a store of ours for its client, where one can be had."""
    calm = {**without_rank(environ), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        with open_store("127.0.0.1") as store:
            place = f"store=127.0.0.1:{store.port}"
            return ask([place if part == "store" else part for part in _PARTS], calm, SECONDS - 1)
    except (RallypointError, OSError):  # no socket: the check of loopback says why
        return ask([part for part in _PARTS if part != "store"], calm, SECONDS - 1)


def judge(answers: Answers) -> Iterator[Finding]:
    """What torch's answers come to."""
    problem = answers.error_of("torch")
    if problem:
        yield failure(
            "torch", f"it cannot be imported: {problem}", "python -c 'import torch' shows all of it"
        )
        return
    torch = answers.parts["torch"]
    yield _judge_build(torch, answers.seconds)
    yield from _judge_defects(torch["version"])
    for part, (name, judge_part) in _JUDGES.items():
        if part == "devices" or torch["distributed"]:
            untried = _never_reached(answers, part, name)
            yield from [untried] if untried is not None else judge_part(torch, answers)


def _judge_build(torch: Mapping[str, Any], seconds: float) -> Finding:
    runs_on = (
        f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU only"
    )
    if not torch["distributed"]:
        return failure(
            "torch",
            f"{torch['version']}, {runs_on}, built without torch.distributed",
            "install another build of torch; this one cannot take part in any job",
        )
    backends = ", ".join(torch["backends"]) or "no backend"
    return ok("torch", f"{torch['version']}, {runs_on}; {backends}; examined in {seconds:.1f} s")


def _judge_defects(version: str) -> Iterator[Finding]:
    """What torch of this version is known to do on this platform, before it does it."""
    system = _SYSTEMS.get(platform.system(), "")
    for cause in causes():
        if cause.defect and cause.id not in _PROBED and cause.concerns(version, system):
            yield note("known-defects", cause.defect, fill(cause.do[0], {}))


def _never_reached(answers: Answers, part: str, name: str) -> Finding | None:
    """The finding about a part, if torch's process had ended in one before it: that one is to blame."""
    missing = [each for each in _PARTS if each not in answers.parts]
    if not answers.problem or part not in missing[1:]:
        return None
    return unknown(name, f"it was not tried, since torch's process ended before: {answers.problem}")


def _judge_devices(_: Mapping[str, Any], answers: Answers) -> Iterator[Finding]:
    problem = answers.error_of("devices")
    if problem:
        yield failure(
            "devices", f"torch cannot ask for them: {problem}", "nvidia-smi shows whether the driver works"
        )
        return
    found = answers.parts["devices"]
    if not found["devices"]:
        yield ok("devices", "no GPU that this torch can use: ranks compute on the CPU")
    for number, device in enumerate(found["devices"]):
        yield judge_device(number, device, found["kernels"])


def judge_device(number: int, device: Mapping[str, Any], kernels: list[str]) -> Finding:
    """Whether this torch has code for a GPU, and whether there is memory left on it."""
    major, minor = device["capability"]
    what = (
        f"{number}: {device['name']}, sm_{major}{minor}, "
        f"{device['free'] / (1 << 30):.1f} of {device['bytes'] / (1 << 30):.1f} GiB free"
    )
    if kernels and not _has_code_for(major, minor, kernels):
        return failure(
            "devices",
            f"{what}; this torch has code for {', '.join(kernels)} only",
            f"install a build that has it, or: rallypoint torch plan pytorch --cuda-arch {major}.{minor}",
        )
    if device["free"] < device["bytes"] / 2:
        return warning("devices", f"{what}: others use most of it", "nvidia-smi shows who")
    return ok("devices", what)


def _has_code_for(major: int, minor: int, kernels: list[str]) -> bool:
    """Code runs on the same major and a higher minor; what is kept as PTX, on everything later."""
    for kernel in kernels:
        kind, _, number = kernel.partition("_")
        digits = number.rstrip("af")
        if kind in ("sm", "compute") and digits.isdigit():
            has = (int(digits[:-1]), int(digits[-1]))
            if has <= (major, minor) and (kind == "compute" or has[0] == major):
                return True
        elif kind not in ("sm", "compute"):  # ROCm's names: the build knows
            return True
    return False


def _judge_store(_: Mapping[str, Any], answers: Answers) -> Iterator[Finding]:
    problem, facts = answers.error_of("store"), answers.parts.get("store", {})
    if not facts and not answers.problem:
        yield unknown("libuv", f"torch's store was not tried: {problem}")
    elif problem:
        what = f"torch's client cannot use a store on loopback: {problem}"
        yield failure("libuv", what, "rallypoint run --client=python train.py, or file://")
    elif facts["fault"] == "NO_LIBUV":
        yield warning("libuv", _WITHOUT_LIBUV, "rallypoint run train.py, or rallypoint run -- torchrun ...")
    elif facts["fault"]:
        yield failure(
            "libuv",
            "torch's TCPStore does not work at all on this build",
            "rallypoint run --client=python train.py, or file://",
            Fix("run", "client", "python"),
        )
    else:
        trip = fine_duration(facts["round_trip"])
        yield ok("libuv", f"torch's TCPStore has it; torch's client asks our server in {trip}")


def _judge_gloo(torch: Mapping[str, Any], answers: Answers) -> Iterator[Finding]:
    problem = answers.error_of("gloo")
    if "gloo" not in torch["backends"]:
        yield warning("gloo", "this torch was built without it", "install another build of torch")
    elif problem:
        fix = use_interface()
        yield failure("gloo", f"one rank by itself fails: {problem}", apply(fix) if fix else "", fix)
    else:
        yield ok("gloo", f"one rank by itself reduces, in {fine_duration(answers.parts['gloo']['seconds'])}")


def _judge_nccl(torch: Mapping[str, Any], answers: Answers) -> Iterator[Finding]:
    if "nccl" not in torch["backends"]:
        return
    problem = answers.error_of("nccl")
    what = f"NCCL {torch['nccl']}"
    if not answers.parts.get("devices", {}).get("devices"):
        yield ok("nccl", f"{what} is there; {NO_GPU}")
    elif problem:
        yield failure("nccl", f"{what}: one rank by itself fails: {problem}", "NCCL_DEBUG=INFO shows more")
    else:
        yield ok(
            "nccl",
            f"{what}: one rank by itself reduces, in {fine_duration(answers.parts['nccl']['seconds'])}",
        )


def _judge_plugin(_: Mapping[str, Any], answers: Answers) -> Iterator[Finding]:
    problem = answers.error_of("plugin")
    if problem:
        remedy = "pip install --force-reinstall rallypoint"
        yield failure("torchrun-plug-in", f"it cannot be loaded: {problem}", remedy)
    elif "rallypoint" not in answers.parts["plugin"]["backends"]:
        yield warning(
            "torchrun-plug-in",
            "it loads, but torchrun does not know it: torch is before 2.6, or Rallypoint is only on the path",
            "pip install rallypoint; or rallypoint run, which does without",
        )
    else:
        yield ok("torchrun-plug-in", "registered, and loads: --rdzv-backend=rallypoint")


_JUDGES: Final[Mapping[str, tuple[str, Callable[[Mapping[str, Any], Answers], Iterator[Finding]]]]] = {
    "devices": ("devices", _judge_devices),
    "store": ("libuv", _judge_store),
    "gloo": ("gloo", _judge_gloo),
    "nccl": ("nccl", _judge_nccl),
    "plugin": ("torchrun-plug-in", _judge_plugin),
}
"""What is said of each part, and under which name, in the order in which it is told."""
