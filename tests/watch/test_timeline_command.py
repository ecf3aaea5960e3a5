"""`rallypoint timeline`, as a command, on files; and on those of a real server and a real job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from command_line import Outcome, invoke
from processes import Server, end, serving
from rallypoint.store.rollcall.events import Event, Stopped
from startups import BEGIN, START, arrival, key_of, open_wait, straggler, write_events

_SECONDS = 180


def timeline(*options: str | Path) -> Outcome:
    return invoke("timeline", *map(str, options))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_events(tmp_path / "events.jsonl", straggler(8, last=5, late=41.2))


def test_who_never_came_is_a_finding(tmp_path: Path) -> None:
    events: list[Event] = [START, *arrival(0, 0.0, size=2), open_wait(0, 0.5, key_of(1)), Stopped(BEGIN + 60)]
    run = timeline(write_events(tmp_path / "events.jsonl", events))
    assert (run.exit_code, run.stderr) == (1, "")
    assert run.stdout.startswith("rank 1 never came; 1 rank waited for it, 59.5 s in sum, and still did")


def test_runs(tmp_path: Path) -> None:
    runs = [*straggler(4, last=1, late=5.0), *straggler(4, last=2, late=6.0)]
    path = write_events(tmp_path / "events.jsonl", runs)
    assert timeline(path).stdout.startswith("rank 2")
    assert "this is number 2; --run shows another" in timeline(path).stdout
    assert timeline(path, "--run", "1").stdout.startswith("rank 1")


def test_garbage_is_told(file: Path) -> None:
    file.write_bytes(b"garbage\n" + file.read_bytes() + b'{"time":1790000000.0,"ev')
    run = timeline(file)
    assert (run.exit_code, run.stderr) == (0, "")
    headline = "rank 5 on node-0001 came 41.2 s after the first; 7 ranks waited for it, 288 s in sum"
    assert run.stdout.splitlines()[0] == headline
    assert f"note: 2 lines of {file} cannot be read, and were passed over" in run.stdout


def test_files_of_several_servers_are_one_job(tmp_path: Path) -> None:
    """Ranks 0 to 3 at one relay, 4 to 7 at another."""
    first = straggler(4, last=1, late=0.5)
    second = [START, *[event for rank in range(4, 8) for event in arrival(rank, 0.1 * rank, "node-b")]]
    second += arrival(8, 33.0, "node-b")
    paths = [write_events(tmp_path / "a", first), write_events(tmp_path / "b", second)]
    run = timeline(*paths)
    assert run.stdout.startswith("rank 8 on node-b came 33.0 s after the first")
    assert "9 ranks on 2 machines" in run.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["{file}", "--run", "7"], "there is no run 7"),
        (["{file}", "--plot", "out.gif"], "out.gif is no SVG, PNG or PDF"),
        (["{file}", "--plot", "nowhere/out.svg"], "there is no folder nowhere"),
        ([], "required: FILE"),
    ],
)
def test_wrong_usage(options: Sequence[str], message: str, file: Path) -> None:
    run = timeline(*[each.format(file=file) for each in options])
    assert (run.exit_code, run.stdout) == (2, "")
    assert message in run.said


# With a server


@contextmanager
def _rank(code: str, rank: int, size: int, server: Server) -> Iterator[subprocess.Popen[str]]:
    environ = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": server.host,
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is to start no store of its own
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdout=server.log, stderr=server.log, text=True
    )
    try:
        yield process
    finally:
        end(process)


def _wait_for_waits(path: Path, count: int) -> None:
    """Until so many are known to have been waiting for a second."""
    deadline = time.monotonic() + _SECONDS
    while path.read_text().count('"event":"waiting"') < count:
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.05)


_CLIENT = """
import os
import rallypoint

rank = os.environ["RANK"]
with rallypoint.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) as store:
    store.set(f"here/{rank}", b"1")
    store.wait([f"here/{each}" for each in range(int(os.environ["WORLD_SIZE"]))])
"""

_TRAIN = """
import os
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
dist.destroy_process_group()
"""


def _run_job(path: Path, code: str, size: int, held_back: int, log: IO[str]) -> None:
    """A server and its ranks, of which one is started only when all others wait."""
    with serving("libuv", log, ["--events", str(path)]) as server, ExitStack() as stack:
        others = [rank for rank in range(size) if rank != held_back]
        ranks = [stack.enter_context(_rank(code, rank, size, server)) for rank in others]
        _wait_for_waits(path, size - 1)
        ranks.append(stack.enter_context(_rank(code, held_back, size, server)))
        assert [each.wait(_SECONDS) for each in ranks] == [0] * size
        server.process.terminate()
        server.process.wait(_SECONDS)


@pytest.mark.parametrize(
    ("code", "size", "last"),
    [
        pytest.param(_CLIENT, 3, 1, id="client"),
        pytest.param(_TRAIN, 4, 3, id="torch", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_held_back_is_named(tmp_path: Path, code: str, size: int, last: int) -> None:
    path = tmp_path / "events.jsonl"
    with (tmp_path / "log").open("w+") as log:
        _run_job(path, code, size, last, log)
    told = json.loads(timeline(path, "--json", "--plot", tmp_path / "out.svg").stdout)
    assert told["is_over"]
    assert told["straggling"]["members"] == [f"rank {last}"]
    assert told["straggling"]["waiters"] == size - 1
    assert told["straggling"]["is_for_them"]
    assert told["straggling"]["seconds"] > 1
    svg = (tmp_path / "out.svg").read_text()
    assert f"<!-- rank {last} -->" in svg or f"<!-- rank {last} on " in svg
    assert "<!-- came -->" in svg
