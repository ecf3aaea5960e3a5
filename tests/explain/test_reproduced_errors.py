"""What torch really prints when a job fails, and what `explain` makes of it.

The failures are brought about in reproducing.py, or by a real launcher; no log here is written by hand.
All logs of a case are read together, as `rallypoint explain rank-*.log` would.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rallypoint.diagnose.verify import SIMULATION
from rallypoint.explain import Explanation, Source, explain
from rallypoint.explain.events import Event
from rallypoint.explain.report import as_text

_TOOLS = Path(__file__).parents[1] / "tools"
_SECONDS = 240
_ECHOED = "rank_raises"
_IMPORT_MUCH = ("ddp_models_differ", "ddp_unused_parameters", "no_libuv")
"""Cases that import most of torch once more, which takes seconds."""

VERDICTS = {
    "port_in_use": "port-in-use",
    "port_out_of_range": "port-invalid",
    "wrong_port": "ranks-missing",
    "nobody_listens": "connect-timeout",
    "ranks_missing": "ranks-missing",
    "not_a_store": "not-a-store",
    "store_killed": "store-gone",
    "missing_key": "store-wait-timeout",
    "name_not_resolved": "name-not-resolved",
    "gloo_interface_missing": "gloo-no-device",
    "monitored_barrier": "gloo-timeout",
    "variable_missing": "variable-missing",
    "no_rendezvous_handler": "rendezvous-unknown",
    "unknown_backend": "backend-missing",
    "nccl_not_built_in": "nccl-not-built-in",
    "too_many_open_files": "too-many-open-files",
    "ddp_models_differ": "ddp-models-differ",
    "ddp_unused_parameters": "ddp-unused-parameters",
    "no_libuv": "no-libuv",
    "rank_raises": "ValueError: the learning rate is a banana",
    "rank_killed": "gloo-peer-gone",
    "rank_late": "gloo-timeout",
    "tensor_too_large": "cpu-allocation-failed",
    "dataloader_worker_killed": "dataloader-worker-ended",
}
"""The entry that explains a case, or how the exception begins if there is none."""


@dataclass(frozen=True)
class Reproduction:
    """A case that has been run: where its logs are, and what it told of itself."""

    folder: Path
    facts: dict[str, str]
    impossible: str


@pytest.fixture(scope="module")
def reproductions(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Reproduction]:
    """All cases that tests of this run ask for, at once: most of them spend their time waiting."""
    asked = {_case_of(item) for item in request.session.items} | {_ECHOED}
    names = [name for name in VERDICTS if name in asked]
    folder = tmp_path_factory.mktemp("reproductions")
    command = [sys.executable, str(_TOOLS / "reproducing.py"), str(folder), *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_SECONDS, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        each["case"]: Reproduction(folder / each["case"], each.get("facts", {}), each.get("impossible", ""))
        for each in told
    }


def _case_of(item: pytest.Item) -> object:
    callspec: Any = getattr(item, "callspec", None)
    return callspec.params.get("case") if callspec is not None else None


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.slow] * (each in _IMPORT_MUCH)) for each in VERDICTS]
)
def test_what_torch_says_is_explained(case: str, reproductions: dict[str, Reproduction]) -> None:
    reproduction = reproductions[case]
    if reproduction.impossible:
        pytest.skip(reproduction.impossible)
    logs = sorted(reproduction.folder.glob("rank-*.log"))
    report = _explained(logs)
    assert report.verdict is not None
    assert _name(report.verdict.event).startswith(VERDICTS[case]), _texts(logs)
    told = _facts(report.verdict.event)
    assert {name: reproduction.facts.get(name, fact) for name, fact in told.items()} == told


def test_the_echo_of_a_failure_is_told_as_one(reproductions: dict[str, Reproduction]) -> None:
    logs = sorted(reproductions[_ECHOED].folder.glob("rank-*.log"))
    report = _explained(logs)
    assert [_name(told) for told in report.consequences] == ["gloo-peer-gone"]


# With launchers --------------------------------------------------------------------------------------------

_INIT = "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
_KILLED = _INIT + "if dist.get_rank() == 1: os.kill(os.getpid(), {signal})\ndist.barrier()\n"
_RAISES = (
    _INIT + "if dist.get_rank() == 1: raise ValueError('the learning rate is a banana')\ndist.barrier()\n"
)
_FAILS_ONCE = """
import os, signal, torch, torch.distributed as dist
from datetime import timedelta
tries, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if (tries, rank) == ("1", "0"):
    signal.pause()  # late: so the others find what it wrote the first time
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
dist.all_reduce(torch.ones(1))
if (tries, rank) == ("0", "1"):
    raise SystemExit(3)
dist.barrier()
"""
_SPAWNS = "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=1)\n"
_SPAWNS_LAMBDA = "import torch.multiprocessing as mp\nif __name__ == '__main__': mp.spawn(lambda _: 0)\n"
_WAITS = "import signal\nprint('ready', flush=True)\nsignal.pause()\n"

_TORCHRUN = ("-m", "torch.distributed.run")
_MACHINES = (*_TORCHRUN, "--nnodes=2", "--rdzv-backend=c10d")
_TWO = (*_TORCHRUN, "--standalone", "--nproc-per-node=2")
_ACCELERATE = (*("-m", "accelerate.commands.launch", "--multi_gpu"), *("--num_processes", "2"))
_NO_LIBUV = {"PYTHONPATH": str(SIMULATION), "RALLYPOINT_SIMULATE": "no-libuv"}


@dataclass(frozen=True)
class Launch:
    """A command that fails: its options, its script, and what explains it."""

    verdict: str
    script: str
    options: Sequence[str] = _TWO
    environ: Mapping[str, str] | None = None
    consequences: Sequence[str] = ()
    became: str = ""
    """The exception in whose chain the cause stands."""


LAUNCHES = {
    "raises": Launch("ValueError: the learning rate is a banana", _RAISES, consequences=("child-failed",)),
    "killed": Launch("killed", _KILLED.format(signal=9), consequences=("gloo-peer-gone", "child-failed")),
    "crashed": Launch("segmentation-fault", _KILLED.format(signal=11)),
    "torchrun without libuv": Launch(
        "no-libuv", _INIT, environ=_NO_LIBUV, became="RendezvousConnectionError"
    ),
    "accelerate without libuv": Launch("no-libuv", _INIT, _ACCELERATE, _NO_LIBUV),
    "backend": Launch("rendezvous-unknown", _INIT, (*_TORCHRUN, "--rdzv-backend=moon")),
    "machine": Launch(
        "rendezvous-timeout",
        _INIT,
        (*_MACHINES, "--rdzv-endpoint=localhost:0", "--rdzv-conf=join_timeout=2"),
    ),
    "restart": Launch(
        "restart-reads-old-keys",
        _FAILS_ONCE,
        (*_TORCHRUN, "--standalone", "--max-restarts=1", "--nproc-per-node=4"),
        {"LOGLEVEL": "INFO"},
    ),
    "spawn without a guard": Launch(
        "RuntimeError: An attempt has been made to start a new process before the", _SPAWNS, ()
    ),
    "spawn with a lambda": Launch("spawn-cannot-pickle", _SPAWNS_LAMBDA, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_what_a_launcher_says_is_explained(name: str, tmp_path: Path) -> None:
    launch = LAUNCHES[name]
    with _started(launch, tmp_path) as process:
        output = process.communicate(timeout=_SECONDS)[0]
    report = explain([Source("job.log", [output.encode()])])
    assert process.returncode != 0
    assert (_verdict(report) or "").startswith(launch.verdict), output
    assert set(launch.consequences) <= {_name(told) for told in report.consequences}
    assert f"which became {launch.became}" in as_text(report) or not launch.became


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--master-port={port}", "--rdzv-endpoint=localhost:{port}"])
def test_a_port_that_torchrun_cannot_have(option: str, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        options = (*_TORCHRUN, option.format(port=port))
        with _started(Launch("", _INIT, options), tmp_path) as process:
            output = process.communicate(timeout=_SECONDS)[0]
    report = explain([Source("job.log", [output.encode()])])
    assert _verdict(report) == "port-in-use", output
    assert report.verdict is not None
    assert _facts(report.verdict.event)["port"] == str(port)


@pytest.mark.slow
def test_a_launcher_that_is_told_to_end(tmp_path: Path) -> None:
    with _started(Launch("", _WAITS, (*_TORCHRUN, "--standalone")), tmp_path) as process:
        assert process.stdout is not None
        assert any("ready" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=_SECONDS)[0]
    report = explain([Source("job.log", [output.encode()])])
    assert _verdict(report) == "told-to-end", output
    assert report.verdict is not None
    assert _facts(report.verdict.event)["signal"] == "15"


@contextmanager
def _started(launch: Launch, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, in a session of its own, with all that it starts; nothing of it is left."""
    script = folder / "train.py"
    script.write_text(launch.script)
    with subprocess.Popen(
        [sys.executable, *launch.options, str(script)],
        env={**os.environ, **(launch.environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _verdict(report: Explanation) -> str | None:
    return _name(report.verdict.event) if report.verdict is not None else None


def _name(event: Event) -> str:
    return event.match.entry.id if event.match is not None else event.headline


def _facts(event: Event) -> Mapping[str, str]:
    return event.match.facts if event.match is not None else {}


def _explained(logs: Sequence[Path]) -> Explanation:
    return explain([Source(path.name, [path.read_bytes()]) for path in logs])


def _texts(logs: Sequence[Path]) -> str:
    return "".join(f"{path.name}:\n{path.read_text()}\n" for path in logs)
