"""torch's own build for Windows, which has no libuv: jobs come up on it by every route.

One rank computes. Two ranks meet, count each other, and set and get through the store: collectives of two
ranks time out under Wine, on torch's own store as well. An import of torch takes many seconds there, so there
are few processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest

from processes import free_port
from rallypoint.explain import explain
from rallypoint.explain.reading import Opener
from rallypoint.explain.report import as_text
from raw import until
from windows.test_launching import PACKAGES, SOURCE, portable, run_to_files

pytestmark = [pytest.mark.windows, pytest.mark.timeout(900)]

_SECONDS = 400
_RALLYPOINT = ("-m", "rallypoint")
# By itself it prints tracebacks about signals that Windows lacks, which takes half a minute under Wine.
_TORCHRUN = ("-m", "torch.distributed.run", "--signals-to-handle=SIGTERM,SIGINT")
_ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")

_MEET = """
import time
from datetime import timedelta
import torch.distributed as dist

store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=200)))
store.set(f"rank{rank}", f"hello from {rank}")
heard = [store.get(f"rank{other}").decode() for other in range(world)]
store.add("done", 1)
while store.add("done", 0) < world:  # rank 0 may hold the server
    time.sleep(0.05)
print(f"{rank} of {world}: {' and '.join(heard)}", flush=True)
"""
_MET = ["0 of 2: hello from 0 and hello from 1", "1 of 2: hello from 0 and hello from 1"]

_COMPUTE = """
import os, pathlib, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def compute(route, **options):
    dist.init_process_group("gloo", **options)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"{route}: {dist.get_world_size()} rank, sum {total.item():g}", flush=True)
    dist.destroy_process_group()

def spawned(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    compute("spawn")

if __name__ == "__main__":
    place = f"127.0.0.1:{sys.argv[1]}"
    compute("tcp", init_method=f"tcp://{place}", rank=0, world_size=1)
    compute("file", init_method=pathlib.Path("meeting ä").absolute().as_uri(), rank=0, world_size=1)
    if "RANK" in os.environ:
        compute("env")
    mp.spawn(spawned, (), 1)
"""

_CRASH = """
import faulthandler, os, time
if os.environ["RANK"] == "1":
    faulthandler._read_null()
time.sleep(600)
"""

_WAIT = """
import os, pathlib, time
pathlib.Path("rank" + os.environ["RANK"]).write_text(f"{os.getpid()} {os.getppid()}")
time.sleep(600)
"""

_STORE = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=True)
store.set("key", "value")
print(store.get("key"))
"""


def _run(
    *arguments: str | Path, folder: Path, script: str, python: Path | str = sys.executable, **variables: str
) -> CompletedProcess[str]:
    """Run Python with some arguments and a script behind them; the script's folder is where it stands."""
    (folder / "job.py").write_text(script, encoding="utf-8")
    command = [str(python), *map(str, arguments)]
    return run_to_files(command, _SECONDS, {"HF_HOME": str(folder), **variables}, folder)


def _lines(done: CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split("\n"))


def test_torchrun_alone_fails_and_explain_has_the_commands_that_help(tmp_path: Path) -> None:
    failed = _run(*_TORCHRUN, "--nproc-per-node=1", "job.py", folder=tmp_path, script=_MEET)
    assert failed.returncode == 1
    assert "use_libuv was requested but PyTorch was built without libuv support" in failed.stderr
    log = tmp_path / "failed.log"
    log.write_text(failed.stderr, encoding="utf-8")
    told = as_text(explain([Opener().open(log)]))
    assert "`python -m rallypoint enable`" in told


def test_a_command_behind_run_computes_by_env_tcp_file_and_spawn(tmp_path: Path) -> None:
    port = str(free_port())
    of_env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = (*_RALLYPOINT, "run", "--", sys.executable, "job.py", port)
    done = _run(*command, folder=tmp_path, script=_COMPUTE, USE_LIBUV="1", **of_env)
    routes = ("env", "file", "spawn", "tcp")
    assert _lines(done) == [f"{route}: 1 rank, sum 1" for route in routes], done.stderr
    assert "has ended" not in done.stderr, "a store that was closed is not lost"


@pytest.mark.parametrize(
    "launcher",
    [
        (*_RALLYPOINT, "run", "--nproc-per-node=2"),
        (*_RALLYPOINT, "run", "--", sys.executable, *_TORCHRUN, "--nproc-per-node=2"),
        (*_RALLYPOINT, "run", "--", sys.executable, *_ACCELERATE, "--main_process_port=0"),
        (*_TORCHRUN, "--rdzv-backend=rallypoint", "--nproc-per-node=2"),
    ],
    ids=["rallypoint-run", "torchrun", "accelerate", "torchrun-rallypoint"],
)
def test_two_ranks_meet(launcher: tuple[str, ...], tmp_path: Path) -> None:
    met = _run(*launcher, "job.py", folder=tmp_path, script=_MEET)
    assert _lines(met) == _MET, met.stderr
    assert "has ended" not in met.stderr, "a store that was closed is not lost"
    if launcher[-2:] == ("run", "--nproc-per-node=2"):
        assert "Traceback" not in met.stderr, "torchrun by itself tells of signals that Windows lacks"


def test_a_rank_that_crashes_is_told_in_words_and_the_others_end(tmp_path: Path) -> None:
    done = _run(*(*_RALLYPOINT, "run", "--nproc-per-node=2", "job.py"), folder=tmp_path, script=_CRASH)
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "exit code 3221225477 (0xC0000005, access violation)" in done.stderr
    assert "hint: it crashed in native code" in done.stderr


def test_ranks_do_not_outlive_an_agent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(_WAIT)
    command = [sys.executable, *_RALLYPOINT, "run", "--nproc-per-node=2", "job.py"]
    with (tmp_path / "output").open("wb") as output:
        launcher = subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        ranks = [tmp_path / "rank0", tmp_path / "rank1"]
        until(lambda: all(rank.exists() and rank.read_text() for rank in ranks), "the ranks run", _SECONDS)
        pids = [rank.read_text().split() for rank in ranks]
        processes = [psutil.Process(int(pid)) for pid, _ in pids]
        psutil.Process(int(pids[0][1])).kill()
        gone, left = psutil.wait_procs(processes, 60)
        assert (len(gone), left) == (2, [])
        assert launcher.wait(60) == 1 or launcher.returncode == 15
        assert "torchrun's agent" in (tmp_path / "output").read_text()
    finally:
        launcher.kill()
        launcher.wait(20)


def test_a_portable_python_is_helped_by_run_and_by_enable(tmp_path: Path) -> None:
    """It ignores PYTHONPATH: torch itself loads Rallypoint there."""
    python = portable(tmp_path / "Meine Anwendung ä" / "python_embeded", SOURCE, PACKAGES)
    helped = _run(*_RALLYPOINT, "run", "--", python, "job.py", folder=tmp_path, script=_STORE)
    assert _lines(helped) == ["b'value'"], helped.stderr
    enabled = _run(*_RALLYPOINT, "enable", folder=tmp_path, script=_STORE, python=python)
    assert enabled.returncode == 0, enabled.stderr
    met = _run(*_TORCHRUN, "--nproc-per-node=1", "job.py", folder=tmp_path, script=_MEET, python=python)
    assert _lines(met) == ["0 of 1: hello from 0"], met.stderr


def test_doctor_finds_no_fault_but_the_missing_libuv(tmp_path: Path) -> None:
    done = _run(*_RALLYPOINT, "doctor", "--json", folder=tmp_path, script="")
    assert done.returncode == 0, done.stdout
    states = {each["name"]: each["state"] for each in json.loads(done.stdout)["findings"]}
    if states["torch"] == "unknown":
        pytest.skip("torch gave no answer within doctor's time: this machine is too busy")
    alarms = {name: state for name, state in states.items() if state in ("warning", "failure")}
    assert alarms == {"libuv": "warning"}, done.stdout
    assert (states["gloo"], states["torchrun-plug-in"]) == ("ok", "ok")
