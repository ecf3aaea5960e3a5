"""What schedulers tell of a job, what becomes of it beside other sources, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.launch.config import settle
from rallypoint.launch.handover import Handover
from rallypoint.launch.options import Settings
from rallypoint.launch.schedulers import (
    SCHEDULERS,
    Placement,
    count_at,
    find_placement,
    first_host,
    idle_machines,
    iter_hosts,
    port_of,
)

FILES = {
    "/proc/self/status": "Name:\tpython\nPPid:\t12\n",
    "/proc/12/cmdline": "sh\0-c\0rallypoint run --tasks hydra_pmi_proxy\0",
    "/proc/12/status": "Name:\tsh\nPPid:\t11\n",
    "/proc/11/cmdline": "/usr/bin/hydra_pmi_proxy\0--control-port\0node7:38003\0--rmk\0user\0",
    "/nodes": "node-a\nnode-a\nnode-b\nnode-b\n",
    "/ranks": "batch1\nnode-a\nnode-a\nnode-b\nnode-b\n",
}

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[02-03]",
    "SLURM_JOB_NODELIST": "gpu[01-03]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
"""Of the last of four tasks, in a step on two of the three machines of a job."""

LAUNCHER = {
    **SLURM,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "8",
}
"""Of the second of two tasks, each on a machine of its own."""

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1057161217",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "JSM_NAMESPACE_ID": "0",
    "LSB_JOBID": "99",
    "LSB_DJOB_RANKFILE": "/ranks",
}
LSF = {"LSB_JOBID": "99", "LSB_MCPU_HOSTS": "node-a 8 node-b 8"}
PBS = {"PBS_JOBID": "99.head", "PBS_NODEFILE": "/nodes"}
ENV = {"MASTER_ADDR": "train-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"}
LWS = {"LWS_LEADER_ADDRESS": "train-0.train.ml", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}


def placed(variables: Mapping[str, str]) -> Placement:
    found = find_placement(variables, lambda path: FILES.get(path, ""))
    assert found is not None
    return found


def told(variables: Mapping[str, str]) -> dict[str, object]:
    """What a scheduler tells, without what it does not."""
    found = placed(variables)
    facts = {name: each for name, each in vars(found).items() if name != "scheduler" and each is not None}
    return {name: each.value for name, each in facts.items()}


# Lists ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("a[1-2],b3", ["a1", "a2", "b3"]),
        ("b3,a[1-2]-ib.example.org", ["b3", "a1-ib.example.org", "a2-ib.example.org"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("", []),
        ("gpu[1-2", []),
        ("gpu[x]", []),
    ],
)
def test_lists_of_machines(text: str, hosts: list[str]) -> None:
    assert list(iter_hosts(text)) == hosts
    assert first_host(text) == (hosts[0] if hosts else None)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_counts_of_a_list_are_those_it_was_made_of(pairs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in pairs)
    counts = [count for count, times in pairs for _ in range(times)]
    assert [count_at(text, place) for place in range(len(counts) + 1)] == [*counts, None]


# What each tells --------------------------------------------------------------------------------------------

RANKS = {"rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "nnodes": 2, "node_rank": 1}

HYDRA_JOB = {"run_id": "node7:38003", "port": port_of("node7:38003")}


@pytest.mark.parametrize(
    ("variables", "facts"),
    [
        (SLURM, {**RANKS, "first_host": "gpu02", "run_id": "4711.0", "port": port_of("4711.0")}),
        (OPEN_MPI, {**RANKS, "run_id": "1057161217", "port": port_of("1057161217")}),
        (HYDRA, {**RANKS, **HYDRA_JOB}),
        ({**HYDRA, **PBS}, {**RANKS, **HYDRA_JOB, "first_host": "node-a"}),
        (JSRUN, {**RANKS, "first_host": "node-a", "run_id": "99.0", "port": 10099}),
        (LSF, {"nnodes": 2, "first_host": "node-a", "run_id": "99", "port": 10099}),
        (PBS, {"nnodes": 2, "first_host": "node-a", "run_id": "99.head", "port": 10099}),
        (LWS, {"nnodes": 2, "node_rank": 1, "first_host": "train-0.train.ml", "run_id": "train-0.train.ml"}),
        (ENV, {"nnodes": 2, "node_rank": 1, "first_host": "train-0", "port": 23456}),
        ({"JOB_COMPLETION_INDEX": "5"}, {"node_rank": 5}),
    ],
    ids=[
        "Slurm",
        "Open MPI",
        "Hydra",
        "Hydra in PBS",
        "jsrun",
        "LSF",
        "PBS",
        "LeaderWorkerSet",
        "env://",
        "Kubernetes",
    ],
)
def test_what_a_scheduler_tells(variables: Mapping[str, str], facts: Mapping[str, object]) -> None:
    assert told(variables) == facts


def test_where_the_processes_above_are_not_seen_the_job_is_that_of_the_scheduler() -> None:
    for read in (str, lambda _: "PPid:\t1\n"):
        in_job, alone = find_placement({**HYDRA, **PBS}, read), find_placement(HYDRA, read)
        assert in_job is not None
        assert alone is not None
        assert in_job.run_id is not None
        assert (in_job.run_id.value, alone.run_id) == ("99.head", None)


def test_who_started_a_process_goes_before_the_scheduler_around_it() -> None:
    assert placed({**SLURM, **OPEN_MPI}).scheduler.name == "Open MPI"
    assert told({**SLURM, **OPEN_MPI})["first_host"] == "gpu01"


def test_ranks_are_counted_by_torch_where_no_gpus_or_some_of_them_are_meant() -> None:
    assert "nproc_per_node" not in told({**LAUNCHER, "SLURM_GPUS_ON_NODE": "0"})
    assert "nproc_per_node" not in told({**LAUNCHER, "CUDA_VISIBLE_DEVICES": "0,1"})
    assert told({**LAUNCHER, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})["nproc_per_node"] == 8


def test_no_scheduler_no_placement() -> None:
    assert find_placement({"HOME": "/", "RANK": "1", "SLURM_JOB_ID": "1"}, str) is None


def test_the_shells_of_slurm_are_no_steps() -> None:
    shell = {**SLURM, "SLURM_STEP_ID": "4294967290"}
    assert find_placement(shell, str) is None
    idle = idle_machines(shell)
    assert idle is not None
    assert idle.value == 3
    assert idle_machines(SLURM) is None


def test_a_launcher_within_a_rank_is_not_placed_again() -> None:
    taken = Handover(scheduled=placed(SLURM).mark).variables()
    assert find_placement({**SLURM, **taken}, str) is None
    # A rank may submit the next job, which inherits its environment.
    assert placed({**SLURM, **taken, "SLURM_JOB_ID": "4712"}).mark == "4712.0"


def test_jobs_and_steps_do_not_meet() -> None:
    names = [f"{job}.{step}" for job in range(4000, 4500) for step in range(2)]
    assert len({port_of(name) for name in names}) == len(names)
    again = told({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert again["run_id"] == "4711.0.1"


@given(st.text())
def test_every_name_has_a_port(name: str) -> None:
    assert 10_000 <= port_of(name) < 28_000


def test_every_row_reads_whatever_is_set() -> None:
    for row in SCHEDULERS:
        nonsense = dict.fromkeys([*row.marks, *(name for names in row.job for name in names)], "%")
        found = find_placement(nonsense, lambda _: "")
        assert found is not None
        assert found.rank is None


# Beside other sources ---------------------------------------------------------------------------------------


def settled(
    folder: Path,
    variables: Mapping[str, str],
    arguments: Mapping[str, str | bool] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    return settle(arguments or {}, environ or {}, folder, placed(variables))


def shown(settings: Settings) -> dict[str, tuple[str, str]]:
    return {name: (each.text, each.source) for name, each in settings.everything().items() if each.is_set}


def test_slurm_says_all_that_a_job_needs(tmp_path: Path) -> None:
    settings = settled(tmp_path, LAUNCHER)
    assert shown(settings) == {
        "nnodes": ("2", "Slurm (SLURM_STEP_NUM_NODES)"),
        "nproc_per_node": ("8", "Slurm (SLURM_GPUS_ON_NODE)"),
        "node_rank": ("1", "Slurm (SLURM_NODEID)"),
        "rdzv_endpoint": (f"gpu02:{port_of('4711.0')}", "Slurm (SLURM_STEP_NODELIST)"),
        "master_addr": ("gpu02", "Slurm (SLURM_STEP_NODELIST)"),
        "master_port": (str(port_of("4711.0")), "Slurm (SLURM_JOB_ID)"),
        "rdzv_id": ("4711.0", "Slurm (SLURM_JOB_ID)"),
    }
    assert settings.warnings == ()


def test_every_other_source_goes_before_the_scheduler(tmp_path: Path) -> None:
    (tmp_path / "rallypoint.toml").write_text("[run]\nnnodes = 2\nrdzv-id = 'mine'\nnproc-per-node = 4\n")
    found = shown(settled(tmp_path, LAUNCHER, {"master_port": "7"}, {"PET_NODE_RANK": "0"}))
    assert found["rdzv_endpoint"] == ("gpu02:7", "command line (--master-port)")
    assert found["node_rank"] == ("0", "environment (PET_NODE_RANK)")
    assert found["rdzv_id"][0] == "mine"
    assert found["nproc_per_node"][0] == "4"


def test_another_port_does_not_lift_the_schedulers_address_over_an_endpoint(tmp_path: Path) -> None:
    environ = {"PET_RDZV_ENDPOINT": "head:8"}
    assert settled(tmp_path, LAUNCHER, {"master_port": "7"}, environ).rdzv_endpoint.text == "head:8"


def test_where_another_source_says_something_else_both_are_named(tmp_path: Path) -> None:
    settings = settled(tmp_path, LAUNCHER, {"nnodes": "4", "nproc_per_node": "2"}, {"PET_NODE_RANK": "0"})
    assert settings.warnings == (
        "nnodes is 4 by command line (--nnodes); Slurm says 2 (SLURM_STEP_NUM_NODES)",
        "nproc_per_node is 2 by command line (--nproc-per-node); Slurm says 8 (SLURM_GPUS_ON_NODE)",
        "node_rank is 0 by environment (PET_NODE_RANK); Slurm says 1 (SLURM_NODEID)",
    )


@pytest.mark.parametrize("arguments", [{"nnodes": "1:4"}, {"nproc_per_node": "gpu"}, {"nnodes": "2"}])
def test_what_goes_together_is_no_disagreement(tmp_path: Path, arguments: dict[str, str | bool]) -> None:
    assert settled(tmp_path, LAUNCHER, arguments).warnings == ()


def test_machines_of_another_number_do_not_ask_for_the_ranks_of_the_scheduler(tmp_path: Path) -> None:
    for size in ("1", "4", "1:4"):
        found = settled(tmp_path, LAUNCHER, {"nnodes": size})
        assert found.node_rank.value is None, size
        assert (found.rdzv_endpoint.value is None) == (size == "1")


def test_some_of_the_machines_of_the_scheduler_may_be_spares(tmp_path: Path) -> None:
    by_conf = {"rdzv_conf": "spares=1"}
    for arguments in ({"spares": "1"}, {"spares": "1", "nnodes": "1"}, by_conf):
        found = settled(tmp_path, LAUNCHER, arguments)
        assert (found.nnodes.text, found.node_rank.value, found.warnings) == ("1", None, ())
        assert str(found.rdzv_endpoint.value).startswith("gpu02:")


def test_who_counts_the_spares_twice_is_told_what_the_scheduler_says(tmp_path: Path) -> None:
    assert settled(tmp_path, LAUNCHER, {"spares": "1", "nnodes": "2"}).warnings == (
        "nnodes is 2 by command line (--nnodes), and spares is 1 by command line (--spares); "
        "Slurm says 2 (SLURM_STEP_NUM_NODES)",
    )


def test_standalone_is_for_this_machine_whatever_a_scheduler_says(tmp_path: Path) -> None:
    found = settled(tmp_path, LAUNCHER, {"standalone": True})
    assert (found.nnodes.text, found.rdzv_endpoint.value, found.warnings) == ("1", None, ())


def test_pods_of_a_job_have_their_number_from_the_manifest(tmp_path: Path) -> None:
    pod = {"JOB_COMPLETION_INDEX": "2"}
    assert settled(tmp_path, pod).node_rank.value is None  # pods that have nothing to do with each other
    environ = {"PET_NNODES": "3", "PET_RDZV_ENDPOINT": "train-0.train"}
    found = shown(settled(tmp_path, pod, environ=environ))
    assert found["node_rank"] == ("2", "Kubernetes (JOB_COMPLETION_INDEX)")
    assert found["rdzv_endpoint"][0] == "train-0.train:29400"
    fewer = settled(tmp_path, pod, environ={**environ, "PET_NNODES": "2"})
    assert fewer.node_rank.value is None  # one that the job does not have


def test_a_port_by_lws_is_that_of_every_job(tmp_path: Path) -> None:
    assert settled(tmp_path, LWS).rdzv_endpoint.text == "train-0.train.ml:29500"


def test_pods_with_torchs_own_variables_are_machines(tmp_path: Path) -> None:
    found = shown(settled(tmp_path, {**ENV, "JOB_COMPLETION_INDEX": "1"}))
    assert found["nnodes"] == ("2", "env:// (WORLD_SIZE)")
    assert found["node_rank"] == ("1", "env:// (RANK)")
    assert found["rdzv_endpoint"] == ("train-0:23456", "env:// (MASTER_ADDR)")
    without_port = {name: each for name, each in ENV.items() if name != "MASTER_PORT"}
    assert settled(tmp_path, without_port).rdzv_endpoint.text == "train-0:29500"
    alone = settled(tmp_path, {**ENV, "WORLD_SIZE": "1", "RANK": "0"})
    assert (alone.nnodes.text, alone.rdzv_endpoint.value) == ("1", None)
    with pytest.raises(UsageError, match=r"env:// \(MASTER_PORT\)"):
        settled(tmp_path, {**ENV, "MASTER_PORT": "99999"})


@pytest.mark.parametrize("name", ["LOCAL_RANK", "TORCHELASTIC_RUN_ID", "PET_NNODES"])
def test_torchs_variables_of_another_launcher_are_not_about_machines(name: str) -> None:
    assert find_placement({**ENV, name: "0"}, str) is None
    assert find_placement({**ENV, name: ""}, str) is not None


def test_who_does_not_tell_the_first_machine_is_asked_for_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"by Open MPI .OMPI_COMM_WORLD_LOCAL_SIZE., but nothing says where"):
        settled(tmp_path, OPEN_MPI)
    assert settled(tmp_path, OPEN_MPI, {"master_addr": "node-a"}).rdzv_endpoint.text == "node-a:29500"
