"""What this torch has and can do, found by trying it: a version number does not tell how it was built.

`ask` runs `main` in another process, since torch takes seconds to import, and may hang or crash. That prints
one line of JSON for each part as soon as the part is known, so nothing that was found before is lost. The
module itself imports no torch.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rallypoint.exits import exit_text

# Without the folder it happens to stand in, which may hold a torch of its own: the sources, say.
_PROGRAM: Final = """
import sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
from rallypoint.pytorch.asking import main
main()
"""


@dataclass(frozen=True)
class Answers:
    """What `main` found, by part; and how the process ended, if it did not end well."""

    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0

    def error_of(self, part: str) -> str:
        """Why there is no answer to a part; empty if there is one."""
        if part not in self.parts:
            return self.problem or "it was not asked"
        return str(self.parts[part].get("error", ""))


def ask(parts: Sequence[str], environ: Mapping[str, str], seconds: float) -> Answers:
    """Ask for some parts, in this order; what is not there after `seconds` is given up."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *parts],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    atexit.register(process.kill)  # the caller may have given up waiting when this process ends
    try:
        output, log = process.communicate(timeout=seconds)
        problem = _problem(process.returncode, log)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        problem = f"it is not done after {seconds:g} s"
    except BaseException:
        process.kill()
        process.communicate()
        raise
    finally:
        atexit.unregister(process.kill)
    return Answers(_read(output), problem, time.monotonic() - begun)


def _problem(code: int, log: str) -> str:
    if code == 0:
        return ""
    lines = [line for line in log.splitlines() if line.strip()]
    return f"{exit_text(code)}: {lines[-1].strip()}" if lines else exit_text(code)


def _read(output: str) -> dict[str, dict[str, Any]]:
    """The lines that are ours; libraries print to standard output, too."""
    found: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        try:
            content = json.loads(line)
            found[content.pop("part")] = content
        except (ValueError, TypeError, AttributeError, KeyError):
            continue
    return found


# The other process ------------------------------------------------------------------------------------------

_SECONDS: Final = 5.0
_ROUND_TRIPS: Final = 100

Facts = dict[str, Any]


def main() -> None:
    """The parts that the arguments name; `host:port` behind `store=` is of a store that is up."""
    for word in sys.argv[1:]:
        part, _, argument = word.partition("=")
        try:
            facts = _PARTS[part](argument)
        except Exception as error:  # torch raises what it likes; all of it is an answer
            facts = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        sys.stdout.write(json.dumps({"part": part, **facts}) + "\n")
        sys.stdout.flush()


def _examine_torch(_: str) -> Facts:
    import torch
    import torch.distributed as dist

    distributed = dist.is_available()
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    has = {name: getattr(dist, f"is_{name}_available", lambda: False) for name in names}
    return {
        "version": torch.__version__,
        "path": str(torch.__file__),
        "cuda": torch.version.cuda or "",
        "hip": getattr(torch.version, "hip", None) or "",
        "distributed": distributed,
        "backends": [name for name in names if distributed and has[name]()],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if distributed and has["nccl"]() else "",
    }


def _examine_devices(_: str) -> Facts:
    import torch

    cuda = torch.cuda
    found = [_describe_device(cuda, index) for index in range(cuda.device_count())]
    return {"devices": found, "kernels": cuda.get_arch_list() if found else []}


def _describe_device(cuda: Any, index: int) -> Facts:
    about = cuda.get_device_properties(index)
    free, total = cuda.mem_get_info(index)
    return {"name": about.name, "capability": [about.major, about.minor], "bytes": total, "free": free}


def _examine_store(place: str) -> Facts:
    """Whether torch's own client reaches a store, as it is made by default, and how quick it is."""
    import torch.distributed as dist

    from rallypoint.pytorch.substitution import find_fault

    host, _, port = place.rpartition(":")
    fault = find_fault(host, int(port))
    if fault is not None:
        return {"fault": fault.name}
    store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=_SECONDS))
    begun = time.perf_counter()
    for _ in range(_ROUND_TRIPS):
        store.add("examination", 1)
    return {"fault": "", "round_trip": (time.perf_counter() - begun) / _ROUND_TRIPS}


def _reduce(backend: str, device: str) -> Facts:
    """One rank by itself: the backend finds an interface and a device, or says why not."""
    import torch
    import torch.distributed as dist

    begun = time.perf_counter()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Neither needs a port. On Windows torch has no HashStore.
        has_hash = hasattr(dist, "HashStore")
        store = dist.HashStore() if has_hash else dist.FileStore(str(Path(folder, "store")), 1)
        patience = timedelta(seconds=_SECONDS)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=patience)
        try:
            value = torch.ones(1, device=device)
            dist.all_reduce(value)
            if value.item() != 1.0:
                raise RuntimeError(f"the sum of one 1 is {value.item()}")
        finally:
            dist.destroy_process_group()
    return {"seconds": time.perf_counter() - begun}


def _examine_plugin(_: str) -> Facts:
    """Whether torchrun knows our rendezvous backend, and can load it."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    import rallypoint.pytorch.plugin  # noqa: F401 - torchrun swallows what goes wrong here

    return {"backends": sorted(getattr(rendezvous_handler_registry, "_registry", ()))}


_PARTS: Final[dict[str, Callable[[str], Facts]]] = {
    "torch": _examine_torch,
    "devices": _examine_devices,
    "store": _examine_store,
    "gloo": lambda _: _reduce("gloo", "cpu"),
    "nccl": lambda _: _reduce("nccl", "cuda"),
    "plugin": _examine_plugin,
}
