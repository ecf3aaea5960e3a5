"""The training examples: each is run as its docstring says, on the CPU, and has to learn something.

The sharded optimizers also have to get what one rank gets. Two ranks really run for that, and meet at a
Rallypoint server. Other numbers of ranks, and backends without a reduce-scatter, are threads that share a
blackboard. What all ranks would get wrong together is tested on its own: the arithmetic of AdamW, and
Newton-Schulz.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from torch.optim.adamw import adamw

from jobs import SECONDS, Job, job
from processes import serving

_EXAMPLES = Path(__file__).parents[2] / "examples"
_SHARDED = _EXAMPLES / "train_sharded_optimizers.py"
_MEETING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1", "COLUMNS": "120"}


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """The examples on the CPU, on one thread each; with no other launcher's variables."""
    for name in _MEETING:
        monkeypatch.delenv(name, raising=False)
    with job(tmp_path) as running:
        yield running


def _start(
    running: Job, script: str, *arguments: object, launcher: Sequence[str] = (), **additions: str
) -> subprocess.Popen[str]:
    environ = {**_ON_CPU, **additions}
    return running.start(_EXAMPLES / script, [], environ, launcher, arguments=[*map(str, arguments)])


def _finish(running: Job, number: int = 0, code: int = 0) -> str:
    """What one wrote, once it has ended with this exit code."""
    assert running.agents[number].wait(SECONDS) == code, running.logs()
    output = running.log(number)
    assert "\x1b" not in output
    return output


def _run(running: Job, script: str, *launcher: str, **additions: str) -> str:
    _start(running, script, launcher=launcher, **additions)
    return _finish(running)


def _assert_learns(output: str, ranks: int) -> None:
    """The example says how many ranks it had, and that the loss fell, to a tenth at most."""
    assert re.search(rf"^{ranks} ranks", output, flags=re.MULTILINE), output
    losses = re.search(r"^loss (\d+\.\d+) -> (\d+\.\d+) in 60 steps$", output, flags=re.MULTILINE)
    assert losses, output
    assert float(losses[2]) < float(losses[1]) / 10


@contextmanager
def _loaded(name: str) -> Iterator[ModuleType]:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks for its module there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


@pytest.fixture(scope="module")
def sharded() -> Iterator[ModuleType]:
    with _loaded("train_sharded_optimizers") as module:
        yield module


# --- File, torchrun, accelerate ---------------------------------------------------------------------------


@pytest.mark.slow
def test_file_init_starts_its_ranks_itself(running: Job) -> None:
    _assert_learns(_run(running, "train_file_init.py"), ranks=2)


@pytest.mark.slow
def test_file_init_by_hand(running: Job, tmp_path: Path) -> None:
    for rank in range(2):
        place = f"file://{tmp_path}/meeting"
        _start(running, "train_file_init.py", "--rank", rank, "--world-size", 2, "--init", place)
    _assert_learns(_finish(running), ranks=2)
    assert "loss" not in _finish(running, 1)


@pytest.mark.slow
def test_torchrun(running: Job) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    _assert_learns(_run(running, "train_torchrun.py", *launcher), ranks=2)


def test_torchrun_example_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with _loaded("train_torchrun") as example, pytest.raises(SystemExit, match="start it with `torchrun "):
        example.main()


@pytest.mark.slow
def test_accelerate(running: Job, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    # `--cpu` would start one process, whatever their number is to be. HF_HOME: no config of the user's.
    launcher = (
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=2",
        "--main_process_port=0",
    )
    _assert_learns(_run(running, "train_accelerate.py", *launcher, HF_HOME=str(tmp_path)), ranks=2)


def test_accelerate_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with _loaded("train_accelerate") as example, pytest.raises(SystemExit, match="pip install accelerate"):
        example.main()


# --- Eight ranks, started by hand -------------------------------------------------------------------------


@pytest.mark.slow
def test_eight_ranks_meet(running: Job) -> None:
    output = _run(running, "eight_ranks.py")
    assert "ok: 8 of 8 ranks met" in output
    assert re.search(r"store server on 127\.0\.0\.1:\d+, backend \w+, process \d+", output)
    rows = re.findall(r"^ +(\d) +\d+(?: +\d+\.\d{3}){5} *$", output, flags=re.MULTILINE)
    assert rows == [str(rank) for rank in range(8)]


@pytest.mark.skipif(sys.platform == "win32", reason="a process group is interrupted otherwise there")
def test_ctrl_c_ends_eight_ranks_and_their_server(running: Job) -> None:
    demo = _start(running, "eight_ranks.py")
    running.await_text("\n")
    server = psutil.Process(int(running.log().splitlines()[0].rpartition(" ")[2]))
    os.killpg(demo.pid, signal.SIGINT)
    _finish(running, code=130)
    assert not server.is_running()


# --- Sharded optimizers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(sharded: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of one rank, without a launcher."""
    report = tmp_path_factory.mktemp("sharded") / "one.json"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in _MEETING:
            patch.delenv(name, raising=False)
        patch.setattr(sys, "argv", [str(_SHARDED), "--device", "cpu", "--json", str(report)])
        assert sharded.main() == 0
    torch.set_num_threads(threads)
    return report


def _meet(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher with a store of its own puts into the environment of a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: rank 0 must not start one
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def test_one_rank_learns(one_rank: Path) -> None:
    report = json.loads(one_rank.read_text())
    assert (report["world_size"], report["device"], report["backend"]) == (1, "cpu", "none")
    assert report["peak_memory_bytes"] is None
    assert report["steps_per_second"] > 0
    assert len(report["losses"]) == 30
    assert report["losses"][0] > 3  # 27 letters, none of them likelier: 3.3
    assert report["losses"][-1] < 1.5


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one(running: Job, one_rank: Path, tmp_path: Path) -> None:
    report_file = tmp_path / "two.json"
    with (tmp_path / "server.log").open("w+") as log, serving("legacy", log) as server:
        for rank in range(2):
            options = ("--json", report_file, "--compare", one_rank)
            _start(running, _SHARDED.name, *options, **_meet(rank, 2, server.port))
        assert running.wait() == [0, 0], running.logs()
    output = running.log()
    assert re.search(r"^losses match one\.json: largest difference \d", output, flags=re.MULTILINE), output
    report, alone = json.loads(report_file.read_text()), json.loads(one_rank.read_text())
    assert (report["world_size"], report["backend"]) == (2, "gloo")
    [whole] = alone["optimizer_state_bytes"]
    assert report["optimizer_state_bytes"] == [pytest.approx(whole / 2, rel=0.01)] * 2


def test_compare(sharded: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert sharded.compare([2.0, 1.0], [2.0, 1.00001], "a.json")
    assert not sharded.compare([2.0, 1.0], [2.0, 1.001], "b.json")
    assert not sharded.compare([2.0, 1.0], [2.0], "c.json")
    assert not sharded.compare([2.0, float("nan")], [2.0, 1.0], "d.json")
    assert not sharded.compare([2.0, 1.0], [2.0, float("nan")], "e.json")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "losses match a.json: largest difference 1.0e-05, tolerance 1e-04"
    assert lines[1] == "losses differ from b.json: largest difference 1.0e-03, tolerance 1e-04"
    assert lines[2] == "losses differ from c.json: 2 steps here, 1 there"


@pytest.mark.parametrize("shape", [(4, 16, 64), (4, 64, 16)])
def test_orthogonalize(sharded: ModuleType, shape: tuple[int, int, int]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    result = sharded.orthogonalize(stack)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(stack, full_matrices=False)
    core = left.mT @ result @ right.mT
    between = core - torch.diag_embed(core.diagonal(dim1=-2, dim2=-1))
    assert between.abs().max() < 1e-4  # the singular vectors are those that it had
    assert not sharded.orthogonalize(torch.zeros(shape)).any()


def test_adamw_is_that_of_torch(sharded: ModuleType) -> None:
    """Of its functions: the class would import the compiler, which takes seconds."""
    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (7,))]
    theirs = [parameter.detach().clone() for parameter in ours]
    averages, squares = ([torch.zeros_like(each) for each in theirs] for _ in range(2))
    counts = [torch.tensor(0.0) for _ in theirs]
    settings = {"amsgrad": False, "maximize": False, "foreach": False, "eps": 1e-8}
    alone = sharded.Ranks(0, 1, torch.device("cpu"), "none", scatters=False)
    optimizer = sharded.ShardedAdamW(ours, alone, rate=0.1)
    for _ in range(5):
        sum((parameter**3).sum() for parameter in ours).backward()
        optimizer.step()
        gradients = [3 * each**2 for each in theirs]
        options = {**settings, "beta1": 0.9, "beta2": 0.95, "lr": 0.1, "weight_decay": 0.01}
        adamw(theirs, gradients, averages, squares, [], counts, **options)
        torch.testing.assert_close([each.detach() for each in ours], theirs)


class _Blackboard:
    """Collectives between threads, under the names that `torch.distributed` has for them."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=10)
        self._board: list[torch.Tensor] = [torch.empty(0)] * world_size
        self._thread = threading.local()

    def join(self, rank: int) -> None:
        """This thread is that rank."""
        self._thread.rank = rank

    def _exchange(self, own: torch.Tensor) -> list[torch.Tensor]:
        self._board[self._thread.rank] = own.clone()
        self._barrier.wait()  # all have written
        everything = list(self._board)
        self._barrier.wait()  # all have read
        return everything

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor]) -> None:
        output.copy_(torch.stack(self._exchange(torch.stack(parts))).sum(0)[self._thread.rank])

    def all_gather(self, parts: list[torch.Tensor], own: torch.Tensor) -> None:
        for part, theirs in zip(parts, self._exchange(own), strict=True):
            part.copy_(theirs)


_STEPS = 4
_SHAPES = (
    (6, 4),
    (6, 4),
    (4, 6),
    (6, 4),
    (5,),
    (4, 3),
)  # three matrices alike, one alone; 17 numbers for AdamW


def _train(sharded: ModuleType, ranks: Any, gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The parameters, after both optimizers took steps by these gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in _SHAPES]
    optimizers = (sharded.ShardedMuon(parameters[:4], ranks), sharded.ShardedAdamW(parameters[4:], ranks))
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad += gradient
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.fixture(params=[True, False], ids=["reduce-scatter", "all-reduce"])
def run_threads(
    request: pytest.FixtureRequest, sharded: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[list[torch.Tensor]]]:
    """Call a function for each rank, in threads; what they got. With a reduce-scatter, and without."""

    def run_threads(world_size: int, work: Callable[[Any], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        blackboard = _Blackboard(world_size)
        monkeypatch.setattr(sharded, "dist", blackboard)

        def run(rank: int) -> list[torch.Tensor]:
            blackboard.join(rank)
            return work(sharded.Ranks(rank, world_size, torch.device("cpu"), "gloo", request.param))

        with ThreadPoolExecutor(world_size) as threads:
            return list(threads.map(run, range(world_size)))

    return run_threads


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_any_number_of_ranks_gets_what_one_gets(
    sharded: ModuleType, run_threads: Callable[..., list[list[torch.Tensor]]], world_size: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    stacks = [
        [torch.randn(world_size, *shape, generator=generator) for shape in _SHAPES] for _ in range(_STEPS)
    ]
    alone = sharded.Ranks(0, 1, torch.device("cpu"), "none", scatters=False)
    expected = _train(sharded, alone, [[stack.mean(0) for stack in step] for step in stacks])
    for result in run_threads(
        world_size,
        lambda ranks: _train(sharded, ranks, [[stack[ranks.rank] for stack in step] for step in stacks]),
    ):
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_gradients_are_averaged(run_threads: Callable[..., list[list[torch.Tensor]]]) -> None:
    """On its own, because neither optimizer would notice a sum: both make little of a gradient's length."""
    parts = run_threads(2, lambda ranks: [ranks.reduce_scatter(torch.arange(4.0) * (1 + ranks.rank))])
    assert torch.cat([part for [part] in parts]).tolist() == [0.0, 1.5, 3.0, 4.5]
