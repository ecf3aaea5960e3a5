"""Launchers of others behind `rallypoint run --`, on a torch that would refuse: all their ranks get help.

Their packages are not in the extras: tests of those that are not installed are skipped.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from jobs import free_port, job
from rallypoint.diagnose.verify import trainings
from rallypoint.launch.environment import put_on_path

SIMULATION = Path(trainings.__file__).parent / "simulation"
SECONDS = 280.0  # some of them import for a minute on a busy machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 20)]

MEET = """
def meet(rank=-1, size=-1):
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    os.write(1, f"done {dist.get_rank()} sum {total.item()}\\n".encode())  # one write each
    dist.destroy_process_group()
"""

LIGHTNING = """
import os, torch, torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, _):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        total = torch.ones(1)
        dist.all_reduce(total)
        os.write(1, f"done {dist.get_rank()} sum {total.item()}\\n".encode())

if __name__ == "__main__":
    no = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    data = torch.utils.data.DataLoader(torch.rand(8, 2), batch_size=2)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=1, **dict.fromkeys(no, False))
    trainer.fit(Model(), data)
"""

RAY = """
import ray

@ray.remote
def train(rank):
    meet(rank, 2)

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    ray.get([train.remote(rank) for rank in range(2)])
"""

SPAWN = """
import torch.multiprocessing as processes

if __name__ == "__main__":
    processes.spawn(meet, (2,), nprocs=2)
"""

OPEN_MPI = """
import os

meet(int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"]))
"""


def _train(folder: Path, script: str, command: Sequence[str] = (), variables: Mapping[str, str] = {}) -> str:
    """What two ranks print that a command starts: `{script}` and `{port}` are put in."""
    path = folder / "train.py"
    path.write_text(script)
    port = str(free_port())
    words = [word.format(script=path, port=port) for word in command or (sys.executable, "{script}")]
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RALLYPOINT_SIMULATE": "no-libuv",
        **variables,
    }
    known = put_on_path({**os.environ, **environ}, SIMULATION)
    with job(folder) as running:
        running.start("", ["--", *words], known, command=("-m", "rallypoint", "run"))
        assert running.wait(SECONDS) == [0], running.logs()
        text = running.log()
    assert all(f"done {rank} sum 2.0\n" in text for rank in (0, 1)), text
    return text


def _needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package} beside torch==2.13.0")


def test_processes_that_a_script_starts_itself(tmp_path: Path) -> None:
    """They are told their ranks as arguments: RANK is not set."""
    assert "2 of 2 ranks have joined" in _train(tmp_path, MEET + SPAWN)


def test_deepspeed(tmp_path: Path) -> None:
    _needs("deepspeed")
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_gpus=2",
        "--master_port={port}",
        "{script}",
    ]
    log = _train(tmp_path, MEET + "meet()", command, {"DS_ACCELERATOR": "cpu"})
    assert "2 of 2 ranks have joined" in log


def test_lightning(tmp_path: Path) -> None:
    _needs("lightning")
    assert "2 of 2 ranks have joined" in _train(tmp_path, LIGHTNING)


def test_ray(tmp_path: Path) -> None:
    _needs("ray")
    with TemporaryDirectory(dir="/tmp", prefix="ray") as short:  # the names of its sockets have to be
        log = _train(tmp_path, MEET + RAY, variables={"RAY_TMPDIR": short, "RAY_AUTH_MODE": "disabled"})
    assert "2 of 2 ranks have joined" in log


def test_open_mpi(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun: it is in Debian's openmpi-bin")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "{script}"]
    assert "2 of 2 ranks have joined" in _train(tmp_path, MEET + OPEN_MPI, command)
