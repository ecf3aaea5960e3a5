"""Jobs of two machines with two ranks each on a real Slurm: they come up, fail, come again, are cancelled."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters import Slurm, SlurmJob, slurm_cluster
from jobs import TRAIN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
RUN = f"{sys.executable} -m rallypoint run"

STYLES = {
    "launchers": ("--nodes=2 --ntasks-per-node=1 --gpus-per-node=2", RUN),
    "tasks": ("--nodes=2 --ntasks-per-node=2", f"{RUN} --tasks"),
}
"""One task per machine, which starts a rank for each GPU; or one task per rank."""

JOIN = f"""{TRAIN}
import signal
local = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
say("rank", rank, "of", world, "on", os.uname().nodename, *local, "sum", total.item())
"""

DONE = """
dist.barrier()
dist.destroy_process_group()
say("done", rank)
"""

EVERYWHERE = [
    "rank 0 of 4 on gpu01 0 2 0 sum 6.0",
    "rank 1 of 4 on gpu01 1 2 0 sum 6.0",
    "rank 2 of 4 on gpu02 0 2 1 sum 6.0",
    "rank 3 of 4 on gpu02 1 2 1 sum 6.0",
]

CLUSTERS = {"linuxproc": ("linuxproc", 2), "cgroup": ("cgroup", 2), "three machines": ("linuxproc", 3)}
"""How Slurm finds the processes of a job, and the number of machines."""

on_every_slurm = pytest.mark.parametrize("slurm", ["linuxproc", "cgroup"], indirect=True)


@pytest.fixture(scope="module", params=["linuxproc"])
def slurm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), *CLUSTERS[request.param]) as cluster:
        yield cluster


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> tuple[str, str]:
    return STYLES[request.param]


def script(slurm: Slurm, text: str) -> Path:
    path = slurm.folder / f"script-{len(list(slurm.folder.glob('script-*')))}.py"
    path.write_text(text)
    return path


def ranks_in(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("rank ") and " sum " in line)


@pytest.mark.parametrize("example", ["job.sh", "tasks.sh"])
def test_the_examples_need_nothing_but_srun(slurm: Slurm, example: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOIN + DONE)
    command = tmp_path / "rallypoint"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m rallypoint "$@"\n')
    command.chmod(0o755)
    tasks = 1 if example == "job.sh" else 2
    size = [f"--ntasks-per-node={tasks}", "--gpus-per-node=2", "--cpus-per-task=1"]  # the machines are small
    job = slurm.submit_file(
        EXAMPLES / example, *size, f"--chdir={tmp_path}", path=f"{tmp_path}:{os.environ['PATH']}"
    )
    job.await_text("done", 4)
    assert job.await_state("COMPLETED", "FAILED") == "COMPLETED"
    assert ranks_in(job.log) == EVERYWHERE
    assert "4 of 4 ranks have joined" in job.log
    slurm.await_no_processes()


def test_a_rank_that_fails_ends_the_job_and_is_named_everywhere(slurm: Slurm, style: tuple[str, str]) -> None:
    options, run = style
    # torchrun's agents of other machines learn of it by their ranks; tasks tell each other.
    then = "time.sleep(600)\n" if "--tasks" in run else "dist.all_reduce(total)\n"
    fails = JOIN + "if rank == 3: raise ValueError('banana')\n" + then
    done = slurm.run("srun", *options.split(), *run.split(), str(script(slurm, fails)))
    assert done.returncode == 1, done.stdout
    launchers = 2 if "--tasks" not in run else 4
    assert done.stdout.count(" on gpu02) failed first: ValueError: banana") == launchers, done.stdout
    slurm.await_no_processes()


REQUEUED = (
    JOIN
    + """
heard = []
for name in ("SIGUSR1", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda number, _: heard.append(number))
if "SLURM_RESTART_COUNT" not in os.environ:
    say("waits", rank)
    while signal.SIGTERM not in heard:
        if signal.SIGUSR1 in heard:
            heard.remove(signal.SIGUSR1)
            say("heard SIGUSR1", rank)
        time.sleep(0.05)
    group = dist.new_group()  # the store is still there
    dist.barrier(group)
    time.sleep(1)  # as long as it takes to save something
    say(f"saved {rank}, heard SIGTERM", "once" if heard.count(signal.SIGTERM) == 1 else "often")
    os._exit(0)
"""
    + DONE
)


@on_every_slurm
def test_a_job_hears_signals_and_comes_up_again_when_it_is_requeued(
    slurm: Slurm, style: tuple[str, str]
) -> None:
    options, run = style
    job = slurm.submit(f"exec srun {run} {script(slurm, REQUEUED)}", *options.split(), "--requeue")
    job.await_text("waits", 4)
    assert slurm.run("scancel", "--signal=USR1", job.id).returncode == 0
    job.await_text("heard SIGUSR1", 4)
    assert slurm.run("scontrol", "requeue", job.id).returncode == 0
    job.await_text("saved", 4)
    job.await_text("done", 4)
    assert job.await_state("COMPLETED", "FAILED") == "COMPLETED"
    for rank in range(4):
        assert job.log.count(f"heard SIGUSR1 {rank}\n") == 1, job.log
    assert ranks_in(job.log) == sorted(2 * EVERYWHERE)
    slurm.await_no_processes()


@on_every_slurm
def test_the_time_limit_is_heard_before_and_when_it_comes(slurm: Slurm) -> None:
    path = script(slurm, REQUEUED)
    jobs: dict[str, SlurmJob] = {}
    for style, (options, run) in STYLES.items():
        command = f"trap : TERM\nsrun {run} {path}\necho srun $?"
        jobs[style] = slurm.submit(command, *options.split(), "--time=60", "--signal=USR1@1200")
        jobs[style].await_text("waits", 4)
    for job in jobs.values():
        job.limit_time(15)
    for job in jobs.values():
        job.await_text("heard SIGUSR1", 4)
        job.limit_time(1)
    for style, job in jobs.items():
        job.await_text("saved", 4)
        assert job.await_state("TIMEOUT", "COMPLETED", "FAILED") == "TIMEOUT"
        job.await_text("srun 0" if style == "tasks" else "srun 143")
        for rank in range(4):
            assert job.log.count(f"heard SIGUSR1 {rank}\n") == 1, job.log
            if slurm.proctrack == "cgroup":
                assert f"saved {rank}, heard SIGTERM once" in job.log
    slurm.await_no_processes()


@on_every_slurm
def test_a_job_that_is_cancelled_leaves_nothing_behind(slurm: Slurm, style: tuple[str, str]) -> None:
    options, run = style
    waits = JOIN + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('up', rank)\ntime.sleep(600)\n"
    job = slurm.submit(f"srun {run} {script(slurm, waits)}", *options.split())
    job.await_text("up", 4)
    assert slurm.run("scancel", job.id).returncode == 0
    assert job.await_state("CANCELLED", "COMPLETED", "FAILED") == "CANCELLED"
    slurm.await_no_processes()


def test_two_steps_of_a_job_do_not_meet(slurm: Slurm) -> None:
    path = script(slurm, JOIN + DONE)
    step = f"srun --overlap --nodes=2 --ntasks=2 {RUN} --nproc-per-node=1 {path}"
    job = slurm.submit(f"{step} & {step} & wait", "--nodes=2", "--ntasks-per-node=1")
    job.await_text("done", 4)
    assert job.await_state("COMPLETED", "FAILED") == "COMPLETED"
    assert job.log.count("rank 0 of 2 on gpu01 0 1 0 sum 1.0") == 2, job.log


def test_eight_launchers_on_a_machine_start_nothing(slurm: Slurm) -> None:
    done = slurm.run("srun", "--nodes=1", "--ntasks-per-node=8", *RUN.split(), str(script(slurm, JOIN)))
    assert done.returncode == 2
    assert "Slurm has started 8 tasks on this machine (SLURM_STEP_TASKS_PER_NODE)" in done.stdout
    assert "rank " not in done.stdout


def test_without_srun_the_other_machines_are_not_used_which_is_said(slurm: Slurm) -> None:
    job = slurm.submit(f"{RUN} --show-config --nproc-per-node=1", "--nodes=2")
    assert job.await_state("COMPLETED", "FAILED") == "COMPLETED"
    assert "warning: Slurm has 2 machines for this job (SLURM_JOB_NUM_NODES), but srun has not" in job.log


def test_where_values_come_from_is_shown(slurm: Slurm) -> None:
    done = slurm.run(
        "srun", "--nodes=2", "--ntasks=2", "--label", *RUN.split(), "--show-config", "--nnodes=4"
    )
    assert "nnodes is 4 by command line (--nnodes); Slurm says 2 (SLURM_STEP_NUM_NODES)" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("0: rdzv_endpoint")]
    assert rows[0][3:] == ["Slurm", "(SLURM_STEP_NODELIST)"], done.stdout
    assert rows[0][2].startswith("gpu01:")


SAVED = (
    JOIN
    + """
while True:
    may_end = torch.tensor([float(os.path.exists("go"))])
    dist.all_reduce(may_end)
    if may_end.item() == world:
        break
    time.sleep(0.1)
"""
    + DONE
    + "if rank == 0: open('finished', 'w').close()\n"
)


@pytest.mark.parametrize("slurm", ["three machines"], indirect=True)
def test_a_job_that_a_spare_has_saved_may_end_well(slurm: Slurm) -> None:
    """As in the guide: srun ends with the code of the launcher that was lost, and the script decides."""
    run = f"{RUN} --spares=1 --nproc-per-node=1"
    srun = f"srun --no-kill --kill-on-bad-exit=0 {run} {script(slurm, SAVED)}"
    end = "code=$?; echo srun $code; [ -e finished ] && exit 0; exit $code"
    job = slurm.submit(f"{srun}; {end}", "--nodes=3", "--ntasks-per-node=1", "--no-kill")
    job.await_text(" sum ", 2)
    [first] = [line for line in ranks_in(job.log) if line.startswith("rank 1 ")]
    lost = first.partition(" on gpu0")[2][0]
    [launcher] = [
        each
        for each in slurm.processes()
        if each.cmdline()[1:4] == ["-m", "rallypoint", "run"]
        and each.environ()["SLURMD_NODENAME"] == f"gpu0{lost}"
    ]
    launcher.kill()
    job.await_text("rank 1 of 2", 2)
    (slurm.folder / "go").touch()
    assert job.await_state("COMPLETED", "FAILED") == "COMPLETED", job.log
    assert "srun 137" in job.log
    slurm.await_no_processes()
