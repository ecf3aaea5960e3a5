"""Real jobs of four ranks that hang in many ways: the launcher names the odd rank and its line, in time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from jobs import SECONDS, Job, free_port, job
from namespaces import Machine, two_machines
from rallypoint.launch.stacks.progress import PATIENCE
from rallypoint.watch.web.serving import watch_store
from web_browser import browsing, looking
from web_stores import page_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it asks as Linux does")

STALL = 8.0
STALL_AFTER = f"--stall-after={STALL}"
LATE = 5.0
"""How long after the stall time it may be said."""

SCRIPT = r"""
import os, re, signal, sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
import rallypoint

how, fifo, mark = sys.argv[1:]
dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("TIMEOUT", "1800"))))
group = dist.new_group(timeout=timedelta(seconds=4)) if how == "group" else None
odd = dist.get_rank() == dist.get_world_size() - 1
lock = threading.Lock()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return open(fifo).read()  # loader's child

def hold():
    with lock:
        time.sleep(1000)  # lock's holder

def load_batch():
    open(mark, "w").close()
    if how in ("sleep", "group"):
        time.sleep(1000)  # sleep
    if how == "fifo":
        open(fifo).read()  # fifo
    if how == "input":
        os.dup2(os.open(fifo, os.O_RDWR), 0)
        input()  # input
    if how == "python":
        while True: pass  # python
    if how == "gil":
        re.match("(a+)+$", "a" * 60 + "b")  # gil
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)  # stop
    if how == "collective":
        dist.broadcast(torch.ones(4), 0)  # collective
    if how == "order":
        dist.barrier()  # order
    if how == "lock":
        threading.Thread(target=hold, daemon=True).start()
        while not lock.locked(): time.sleep(0.01)
        lock.acquire()  # lock
    if how == "loader":
        next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))  # loader
    if how == "kill":
        time.sleep(STALL)  # kill
        os.kill(os.getpid(), signal.SIGKILL)

def train():
    for number in range(1 << 62):
        rallypoint.step(number)
        if odd and number == 200:
            load_batch()
        dist.all_reduce(torch.ones(4), group=group)  # all wait

train()
""".replace("STALL", str(STALL))


def line_of(mark: str) -> int:
    [number] = [at for at, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith(f"# {mark}")]
    return number


def begin(
    running: Job,
    folder: Path,
    how: str,
    *options: str,
    machine: Machine | None = None,
    timeout: float = 1800,
    ranks: int = 4,
) -> Path:
    """Start the job; the file that is there once the last rank hangs."""
    fifo, mark, script = folder / "fifo", folder / "mark", folder / "train.py"
    script.write_text(SCRIPT)
    if not fifo.exists():
        os.mkfifo(fifo)
    running.start(
        script,
        [f"--nproc-per-node={ranks}", *options],
        command=("-m", "rallypoint", "run"),
        prefix=machine.prefix if machine else (),
        environ={
            "TIMEOUT": str(timeout),
            **({"GLOO_SOCKET_IFNAME": machine.interface} if machine else {"TMPDIR": str(folder)}),
        },
        arguments=[how, str(fifo), str(mark)],
    )
    return mark


def hang(folder: Path, how: str, *options: str, words: str = "", **others: Any) -> tuple[float, str]:
    """Start the job, and wait until the launcher says so: how many seconds after the hang began, and its log.

    The words are those of the line in which the last rank hangs, unless others are given.
    """
    with job(folder) as running:
        mark = begin(running, folder, how, *options, **others)
        running.await_text("ranks have joined")
        running.await_text(words or f"(train.py:{line_of(how)}) <- train (train.py:")
        return time.time() - mark.stat().st_mtime, running.log()


WAYS = {
    "sleep": "sleep()",
    "fifo": "open() of ",
    "input": "read() of standard input",
    "python": "runs, at ",
    "collective": "broadcast <- ",
    "order": "barrier <- ",
    "lock": "  another thread of rank 3: hold (train.py:",
    "loader": "__getitem__ (train.py:",
}
"""What is said besides the line."""


def test_a_rank_that_holds_the_interpreter_lock_is_named_with_its_line(tmp_path: Path) -> None:
    seconds, log = hang(tmp_path, "gil", f"--stall-after={STALL / PATIENCE}", ranks=2)
    assert seconds >= STALL, log
    assert re.search(r"1 of 2 ranks waits in all_reduce .*; rank 1 on \S+ is elsewhere:\n", log)


@pytest.mark.slow
@pytest.mark.parametrize("how", [*WAYS, "gil"])
def test_the_odd_rank_is_named_with_its_line(tmp_path: Path, how: str) -> None:
    # A rank that computes is given three times as long.
    seconds = STALL / PATIENCE if how in ("python", "gil") else STALL
    seconds, log = hang(tmp_path, how, f"--stall-after={seconds}")
    assert STALL <= seconds <= STALL + LATE, (seconds, log)
    assert f"3 of 4 ranks wait in all_reduce (train.py:{line_of('all wait')}, step 200), for " in log
    assert re.search(r"; rank 3 on \S+ is elsewhere:\n", log)
    assert WAYS.get(how, "") in log
    assert log.count("is elsewhere") == 1


SLOW = r"""
import hashlib, sys, time
import torch, torch.distributed as dist

how = sys.argv[1]
dist.init_process_group("gloo")
store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

def prepare():
    if how == "key":
        time.sleep(1000)
    if how == "compute":
        end = time.monotonic() + 8
        while time.monotonic() < end:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
    if how == "late":
        time.sleep(5)

if how == "key":
    if rank == 0:
        prepare()
        store.set("go", "")
    store.get("go")
elif rank == 0:
    prepare()
dist.barrier()
"""


def begin_slow(running: Job, folder: Path, how: str, stall_after: int) -> subprocess.Popen[str]:
    script = folder / "slow.py"
    script.write_text(SLOW)
    options = ["--nproc-per-node=2", f"--stall-after={stall_after}"]
    return running.start(script, options, command=("-m", "rallypoint", "run"), arguments=[how])


@pytest.mark.slow
def test_a_rank_that_waits_for_a_key_is_waiting_and_the_one_that_is_to_write_it_is_odd(
    tmp_path: Path,
) -> None:
    with job(tmp_path) as running:
        begin_slow(running, tmp_path, "key", 4)
        running.await_text("see `rallypoint stacks")
        log = running.log()
    assert re.search(
        r"1 of 2 ranks waits in store\.wait\(\) for `default_pg/0//go` .*; rank 0 on \S+ is elsewhere:\n", log
    )
    assert "prepare (slow.py:" in log


@pytest.mark.slow
@pytest.mark.parametrize(("how", "stall_after"), [("compute", 4), ("late", 6)])
def test_a_job_in_which_a_rank_makes_progress_does_not_stand_still(
    tmp_path: Path, how: str, stall_after: int
) -> None:
    with job(tmp_path) as running:
        assert begin_slow(running, tmp_path, how, stall_after).wait(SECONDS) == 0
        log = running.log()
    assert "ranks have joined" in log
    assert "see `rallypoint stacks" not in log


@pytest.mark.slow
def test_a_time_out_that_is_about_to_strike_is_told(tmp_path: Path) -> None:
    seconds, log = hang(tmp_path, "sleep", timeout=16)
    assert seconds < 16
    told = "rallypoint: a time-out of 16 s is about to strike: 3 of 4 ranks wait in all_reduce (train.py:"
    assert told in log


@pytest.mark.slow
def test_a_time_out_that_nobody_knew_leaves_time_for_a_look(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        begin(running, tmp_path, "group", "--no-explain")
        assert running.wait() == [1]
        log = running.log()
    assert "rallypoint: a time-out has struck rank" in log
    assert re.search(r"3 of 4 ranks wait in all_reduce .*; rank 3 on \S+ is elsewhere:\n", log)
    report = log.partition("before that, the job stood still:")[2]
    assert f"load_batch (train.py:{line_of('sleep')}) <- train (train.py:" in report
    assert log.count("[rank0]: Traceback") == 1, "it is not ended before it has said why"


SPAWN = """
import sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
import rallypoint

def work(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    rallypoint.step(41)
    if rank == 1:
        time.sleep(1000)  # sleep
    dist.all_reduce(torch.ones(4))

if __name__ == "__main__":
    mp.spawn(work, (int(sys.argv[1]),), nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank", [{}, {"RANK": "0", "WORLD_SIZE": "1"}], ids=["without RANK", "with another's"]
)
def test_ranks_that_were_spawned_and_get_their_number_as_an_argument(
    tmp_path: Path, rank: dict[str, str]
) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(SPAWN)
    with job(tmp_path) as running:
        command = ("-m", "rallypoint", "run", f"--stall-after={STALL}", "--", sys.executable)
        running.start(script, [], command=command, arguments=[str(free_port())], environ=rank)
        running.await_text("is elsewhere")
        running.await_text("sleep()")
        log = running.log()
    assert re.search(r"1 of 2 ranks waits in all_reduce \(spawns.py:\d+, step 41\), for .*; rank 1 on ", log)
    assert "  work (spawns.py:10)" in log
    assert log.count("is elsewhere") == 1


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    seconds, log = hang(tmp_path, "stop", STALL_AFTER, words="is stopped (by SIGSTOP, or Ctrl-Z)")
    assert STALL <= seconds <= STALL + LATE, (seconds, log)
    assert re.search(r"3 of 4 ranks wait in all_reduce .*; rank 3 on \S+ does not answer:\n", log)
    assert re.search(r"; last seen .* ago in load_batch", log)


@pytest.mark.slow
def test_under_a_torchrun_of_the_users_own_the_report_names_where_to_look(tmp_path: Path) -> None:
    """The store is torch's, which nobody can look at."""
    with job(tmp_path) as running:
        fifo, mark, script = tmp_path / "fifo", tmp_path / "mark", tmp_path / "train.py"
        script.write_text(SCRIPT)
        running.start(
            Path(sys.executable),
            [STALL_AFTER, "--"],
            command=("-m", "rallypoint", "run"),
            environ={"TMPDIR": str(tmp_path)},
            arguments=[
                *("-m", "torch.distributed.run", f"--master-port={free_port()}"),
                *("--nproc-per-node=2", str(script)),
                *("sleep", str(fifo), str(mark)),
            ],
        )
        running.await_text("see `rallypoint stacks ")
        [store] = re.findall(r"rallypoint stacks ([^\s`]+)`", running.log())
        looked = subprocess.run(
            [sys.executable, "-m", "rallypoint", "stacks", store], capture_output=True, text=True
        )
    assert (looked.returncode, looked.stderr) == (1, "")
    assert looked.stdout.count("is elsewhere") == 1
    assert "load_batch (train.py:" in looked.stdout


@pytest.mark.slow
def test_a_rank_that_is_killed_was_last_seen_at_its_line(tmp_path: Path) -> None:
    words = f"rank 3 was last seen in load_batch (train.py:{line_of('kill')})"
    seconds, _ = hang(tmp_path, "kill", "--no-explain", STALL_AFTER, words=words)
    assert STALL <= seconds <= STALL + LATE


@pytest.mark.slow
def test_the_page_names_the_odd_rank_and_its_line(tmp_path: Path) -> None:
    with browsing() as browser, job(tmp_path) as running:
        begin(running, tmp_path, "sleep", STALL_AFTER)
        running.await_text("see `rallypoint stacks ")
        [(host, port)] = re.findall(r"rallypoint stacks ([^\s`]+):(\d+)`", running.log())
        place = f"load_batch (train.py:{line_of('sleep')}) <- train (train.py:"
        with page_of(watch_store((host, int(port)))) as url, looking(browser, url) as look:
            expect(look.page.locator("#stall-text")).to_contain_text("3 of 4 ranks wait in all_reduce")
            expect(look.page.locator("#stall-text")).to_contain_text(place)
            rows = look.page.locator("#work-list > li")
            expect(rows).to_have_count(2)
            expect(rows.first).to_contain_text(re.compile(r"rank 3 on \S+ is elsewhere, in"))
            expect(rows.first).to_contain_text(place)
            expect(rows.last).to_contain_text("3 of 4 ranks wait for others in")
            rows.first.locator("button").click()
            frame = look.page.locator("#details-stacks .frames > li").first
            expect(frame).to_contain_text("load_batch")
            expect(frame).to_contain_text(f"train.py:{line_of('sleep')}")


def begin_on_both(running: Job, folder: Path, how: str, machines: list[Machine]) -> Path:
    place = f"--rdzv-endpoint={machines[0].address}:{free_port()}"
    for number, machine in enumerate(machines):
        options = ["--nnodes=2", place, f"--node-rank={number}", "--insecure", STALL_AFTER]
        mark = begin(running, folder, how, *options, machine=machine, ranks=2)
    return mark


@pytest.mark.slow
def test_a_time_out_strikes_on_one_machine_and_the_odd_rank_is_on_another(tmp_path: Path) -> None:
    with two_machines() as machines, job(tmp_path) as running:
        begin_on_both(running, tmp_path, "group", machines)
        running.wait()
        log = running.log()
    report = log.partition("before that, the job stood still:")[2]
    assert re.search(
        r"a time-out has struck ranks? .*: 3 of 4 ranks wait in all_reduce .*; rank 3 on \S+ ", report
    )
    assert f"load_batch (train.py:{line_of('sleep')}) <- train (train.py:" in report


@pytest.mark.slow
def test_two_machines_with_relays_and_the_stacks_of_both(tmp_path: Path) -> None:
    with two_machines() as machines, job(tmp_path) as running:
        mark = begin_on_both(running, tmp_path, "fifo", machines)
        running.await_text("open() of ")
        seconds = time.time() - mark.stat().st_mtime
        log = running.log()
        assert STALL <= seconds <= STALL + LATE, (seconds, log)
        assert "3 of 4 ranks wait in all_reduce" in log
        assert "elsewhere" not in running.log(1)
        [store] = set(re.findall(r"rallypoint stacks ([^\s`]+)", log))
        command = [*machines[0].prefix, sys.executable, "-m", "rallypoint", "stacks", store, "--json"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert asked.returncode == 1, asked.stderr
        told = json.loads(asked.stdout)
        assert [each["ranks"] for each in told["groups"]] == [[3], [0, 1, 2]]
        assert told["stall"]
