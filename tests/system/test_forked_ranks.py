"""Jobs whose ranks are forked from a template: what torchrun's users can observe is the same."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")

_SECONDS = 180

_FACTS = """
import json, os, sys
loaded = [each in sys.modules for each in ("torch", "torch.distributed")]
import signal, torch
ours = ("RALLYPOINT_", "PYTHONPATH", "TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")
facts = {
    "environ": {name: value for name, value in os.environ.items() if not name.startswith(ours)},
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "file": __file__, "path": sys.path[0],
    "session": os.getsid(0) == os.getpid(), "threads": torch.get_num_threads(),
    "signals": {each: str(signal.getsignal(each)) for each in signal.valid_signals() if each < 32},
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.write_through],
    "cuda": torch.cuda._initialized, "generators": torch.initial_seed() > 2**32,
}
rank = os.environ["RANK"]
print("to stdout of", rank)
print("to stderr of", rank, file=sys.stderr)
with open(f"{sys.argv[1]}/facts-{rank}", "w") as file:
    json.dump([facts, loaded, os.getppid(), torch.initial_seed()], file)
"""


def _torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]


def _run(start: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "rallypoint", "run", f"--start={start}", *words]


def _start(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=folder,
        env={**os.environ, **variables},
        check=False,
    )


def test_ranks_see_and_leave_what_they_do_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "facts.py").write_text(_FACTS)
    seen, logs, loaded = [], [], []
    for number, start in enumerate(("torchrun", "fork", "spawn")):
        out = tmp_path / f"out-{number}"
        out.mkdir()
        words = ["--nproc-per-node=2", "--redirects=3", f"--log-dir={out}/logs", "facts.py", str(out)]
        command = _torchrun(*words) if start == "torchrun" else _run(start, *words)
        done = _start(command, tmp_path)
        assert done.returncode == 0, done.stderr
        texts = [(out / f"facts-{rank}").read_text().replace(str(out), "OUT") for rank in range(2)]
        ranks = [json.loads(text) for text in texts]
        seen.append([facts for facts, *_ in ranks])
        loaded.append(ranks[0][1])
        assert ranks[0][2] == ranks[1][2]  # one parent, the agent
        assert ranks[0][3] != ranks[1][3]  # seeds of torch
        files = sorted(each for each in (out / "logs").rglob("*") if each.is_file())
        logs.append([(each.name, each.read_text()) for each in files])
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    assert logs[1] == logs[0] == logs[2]
    assert loaded == [[False, False], [True, True], [False, False]]


_ENDS = {
    "exit code": "import sys; sys.exit(7 if RANK == 1 else 0)",
    "exception": "if RANK == 1: raise ValueError('a wrong value')",
    "killed": "import signal; os.kill(os.getpid(), signal.SIGKILL if RANK == 1 else 0)",
    "recorded": "from torch.distributed.elastic.multiprocessing.errors import record\n"
    "@record\ndef main():\n    if RANK == 1: raise KeyError('recorded')\nmain()",
}


@pytest.mark.slow
@pytest.mark.parametrize("end", _ENDS)
def test_a_failed_rank_is_reported_as_if_it_had_been_spawned(tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(f"import os; RANK = int(os.environ['RANK'])\n{_ENDS[end]}\n")
    reports = []
    for start in ("fork", "spawn"):
        done = _start(_run(start, "--nproc-per-node=2", "train.py"), tmp_path)
        assert done.returncode == 1
        ours = done.stderr[done.stderr.index("rallypoint: ") :]
        reports.append(
            re.sub(
                r"(pid:?|process|torchelastic_\S*|report-\w+) *\d*|[0-9.]+ s\b|/\S*/|\d\d:\d\d\S*", "", ours
            )
        )
    assert reports[0] == reports[1]
    assert "rank 1" in reports[0]


_RESTARTED = """
import os, signal, sys
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
was_there = "yaml" in sys.modules
import torch.distributed as dist, yaml
dist.init_process_group("gloo")
if rank == 0:
    print("attempt", attempt, "yaml", was_there, flush=True)
folder = os.environ["RALLYPOINT_JOB"].partition("reports=")[2].partition(";")[0]
if attempt == 0:
    while os.path.exists(f"{folder}/modules.txt"):  # until the agent has taken it
        dist.barrier()
    if rank == 1:
        signal.sigtimedwait([], 3)  # for the template
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def test_the_template_imports_for_the_next_attempt_what_ranks_had_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_RESTARTED)
    done = _start(_run("fork", "--max-restarts=1", "--nproc-per-node=2", "train.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "attempt 0 yaml False\nattempt 1 yaml True\n", done.stderr


@pytest.mark.parametrize("variables", [{"RALLYPOINT_START": "fork"}, {}])
def test_under_a_plain_torchrun_ranks_are_forked_if_asked_for(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text("import os, sys; os.write(1, b'%d\\n' % ('torch' in sys.modules))")
    options = ["--rdzv-backend=rallypoint", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"]
    conf = ["--rdzv-conf=start=fork"] if not variables else []
    command = [sys.executable, "-m", "torch.distributed.run", *options, *conf, "train.py"]
    done = _start(command, tmp_path, **variables)
    assert done.stdout == "1\n1\n", done.stderr


@pytest.mark.parametrize(
    ("script", "options", "reason"),
    [
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            [],
            "thread",
        ),
    ],
)
def test_a_module_that_makes_forks_unsafe_is_not_preloaded(
    tmp_path: Path, script: str, options: list[str], reason: str
) -> None:
    (tmp_path / "poison.py").write_text(script)
    (tmp_path / "train.py").write_text("import sys; print('poison' in sys.modules, 'torch' in sys.modules)")
    command = _run("fork", "--preload=poison", "--nproc-per-node=1", "train.py")
    done = _start(command, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout == "False True\n", done.stderr
    assert "rallypoint: poison is not preloaded: " in done.stderr
    assert reason in done.stderr


_LONG = """
import os, sys, time
import torch, torch.distributed as dist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
for _ in range(20 if attempt else 200):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
dist.destroy_process_group()
"""

_VICTIMS = {
    "rank": "train.py",
    "template": "rallypoint: template",
    "waiting": "rallypoint: a rank that waits",
    "agent": "rallypoint.pytorch.agent",
    "store": "a server process of rallypoint",
    "launcher": "rallypoint run",
}


def _find(launcher: psutil.Process, victim: str) -> psutil.Process | None:
    everyone = [launcher, *launcher.children(recursive=True)]
    if victim == "launcher":
        return launcher
    for each in everyone[1:]:
        with suppress(psutil.Error):
            words = " ".join(each.cmdline())
            if words.startswith(_VICTIMS[victim]) or (
                _VICTIMS[victim] in words and ("agent" not in words or victim == "agent")
            ):
                return each
    return None


@pytest.mark.slow
@pytest.mark.parametrize("victim", _VICTIMS)
@pytest.mark.parametrize("moment", [0.5, 2.0, 3.0, 4.0, 6.0])
def test_nothing_hangs_and_nothing_is_left_whatever_is_killed(
    tmp_path: Path, victim: str, moment: float
) -> None:
    (tmp_path / "train.py").write_text(_LONG)
    mark = secrets.token_hex(8)
    command = _run("fork", "--max-restarts=2", "--nproc-per-node=2", "train.py")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            env={**os.environ, "TEST_MARK": mark},
            start_new_session=True,
        )
    launcher = psutil.Process(process.pid)
    deadline = time.monotonic() + moment * 4
    with suppress(psutil.Error):
        time.sleep(moment)
        while (found := _find(launcher, victim)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if found is not None:
            found.kill()
    code = process.wait(_SECONDS)
    text = (tmp_path / "log").read_text()
    assert (code == 0) or victim in ("agent", "store", "launcher") or "attempt" in text, (code, text)
    gone = time.monotonic() + 30
    while (left := _marked(mark)) and time.monotonic() < gone:
        time.sleep(0.1)
    assert not left, (left, text)


_LATE = """
import os, pathlib, time
import torch, torch.distributed as dist
pathlib.Path("up-" + os.environ["RANK"]).touch()
while not pathlib.Path("go").exists():
    time.sleep(0.02)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("done", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("start", "restarts"), [("fork", 1), ("spawn", 0)])
def test_ranks_that_connect_after_their_store_has_died(tmp_path: Path, start: str, restarts: int) -> None:
    """torch's client would try for half an hour."""
    (tmp_path / "train.py").write_text(_LATE)
    command = _run(start, f"--max-restarts={restarts}", "--nproc-per-node=2", "train.py")
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
    deadline = time.monotonic() + _SECONDS
    try:
        while not all((tmp_path / f"up-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        store = next(
            each
            for each in psutil.Process(process.pid).children(recursive=True)
            if _VICTIMS["store"] in " ".join(each.cmdline()) and each.net_connections()
        )
        store.kill()
        while "has ended by signal SIGKILL" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        (tmp_path / "go").touch()
        code = process.wait(_SECONDS)
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    assert (code, text.count("done")) == ((0, 2) if restarts else (1, 0)), text
    if restarts:
        assert "a rank cannot connect to the job's store, which has ended" in text
        assert "attempt 2 of at most" in text
    else:
        assert f"the job's store (process {store.pid}" in text.rpartition("rallypoint: ")[2]


def _marked(mark: str) -> list[str]:
    """Processes of a job that still run."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get("TEST_MARK") == mark and each.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{each.pid}: {' '.join(each.cmdline())}")
    return found
