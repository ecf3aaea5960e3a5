"""The manifests and the image in examples/kubernetes: their fields, what the pods start, and that it runs.

None of this is a cluster. The variables are those that the controllers set, by their sources.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import SECONDS, free_port, job
from pods import two_pods
from processes import end, serving
from rallypoint.launch.config import settle, split_arguments
from rallypoint.launch.schedulers import find_placement
from rallypoint.store.server.guard.secret import make_secret
from raw import until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"


@dataclass(frozen=True)
class Controller:
    """What one of them makes of its manifest: two pods, and the variables of both and of each."""

    file: str
    pods: tuple[str, str]
    endpoint: str
    both: Mapping[str, str]
    each: tuple[Mapping[str, str], Mapping[str, str]]


def _numbered(*names: str) -> tuple[dict[str, str], dict[str, str]]:
    return dict.fromkeys(names, "0"), dict.fromkeys(names, "1")


def _master(prefix: str, host: str, port: str) -> dict[str, str]:
    return {f"{prefix}MASTER_ADDR": host, f"{prefix}MASTER_PORT": port}


_PET = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}

CONTROLLERS = (
    Controller(
        "job.yml", ("train-0", "train-1"), "train-0.train:29400", {}, _numbered("JOB_COMPLETION_INDEX")
    ),
    Controller(
        "pytorchjob.yml",
        ("train-master-0", "train-worker-0"),
        "train-master-0:23456",
        {
            **_PET,
            **_master("PET_", "train-master-0", "23456"),
            **_master("", "train-master-0", "23456"),
            "WORLD_SIZE": "2",
        },
        _numbered("RANK", "PET_NODE_RANK"),
    ),
    Controller(
        "trainjob.yml",
        ("train-node-0-0", "train-node-0-1"),
        "train-node-0-0.train:29500",
        {**_PET, **_master("PET_", "train-node-0-0.train", "29500")},
        _numbered("PET_NODE_RANK", "JOB_COMPLETION_INDEX"),
    ),
    Controller(
        "leaderworkerset.yml",
        ("train-0", "train-0-1"),
        "train-0.train.default:29500",
        {"LWS_LEADER_ADDRESS": "train-0.train.default", "LWS_GROUP_SIZE": "2"},
        _numbered("LWS_WORKER_INDEX"),
    ),
)

by_controller = pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda each: each.file)


def documents(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


def pod_specs(content: object) -> Iterator[dict[str, Any]]:
    """All that is the spec of a pod, wherever it stands."""
    if isinstance(content, dict):
        if "containers" in content:
            yield content
        for each in content.values():
            yield from pod_specs(each)
    elif isinstance(content, list):
        for each in content:
            yield from pod_specs(each)


def command_of(controller: Controller) -> list[str]:
    """What the container starts."""
    for document in documents(controller.file):
        if document["kind"] == "TrainJob":  # it goes before that of its runtime
            trainer = document["spec"]["trainer"]
            return [*trainer["command"], *trainer["args"]]
    (container,) = next(pod_specs(documents(controller.file)))["containers"]
    return [*container["command"], *container["args"]]


def variables_of(controller: Controller, number: int) -> dict[str, str]:
    return {**controller.both, **controller.each[number]}


# Fields -----------------------------------------------------------------------------------------------------

Shape = Any
"""The fields that may be there, each with its shape; a list of one shape; a type; dict: any fields."""

_SECURITY = {
    "runAsNonRoot": bool,
    "runAsUser": int,
    "runAsGroup": int,
    "fsGroup": int,
    "seccompProfile": {"type": str},
}
_PROBE = {
    "exec": {"command": [str]},
    "tcpSocket": {"port": (int, str)},
    "httpGet": {"path": str, "port": (int, str)},
    "periodSeconds": int,
    "timeoutSeconds": int,
}
_CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [{"name": str, "value": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}],
    "ports": [{"name": str, "containerPort": int}],
    "resources": {"requests": dict, "limits": dict},
    "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [str]}},
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
    "readinessProbe": _PROBE,
    "livenessProbe": _PROBE,
}
_VOLUME = {
    "name": str,
    "secret": {"secretName": str, "defaultMode": int, "items": [{"key": str, "path": str}]},
    "emptyDir": {"medium": str, "sizeLimit": str},
}
_POD = {
    "metadata": {"labels": dict},
    "spec": {
        "subdomain": str,
        "restartPolicy": str,
        "terminationGracePeriodSeconds": int,
        "securityContext": _SECURITY,
        "containers": [_CONTAINER],
        "volumes": [_VOLUME],
    },
}
_REPLICAS = {"replicas": int, "restartPolicy": str, "template": _POD}
_SPECS: Mapping[tuple[str, str], Shape] = {
    ("v1", "Service"): {
        "clusterIP": str,
        "publishNotReadyAddresses": bool,
        "selector": dict,
        "ports": [{"name": str, "port": int}],
    },
    ("batch/v1", "Job"): {
        "completionMode": str,
        "completions": int,
        "parallelism": int,
        "backoffLimit": int,
        "template": _POD,
    },
    ("apps/v1", "Deployment"): {"replicas": int, "selector": {"matchLabels": dict}, "template": _POD},
    ("kubeflow.org/v1", "PyTorchJob"): {
        "nprocPerNode": str,
        "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int},
        "pytorchReplicaSpecs": {"Master": _REPLICAS, "Worker": _REPLICAS},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "mlPolicy": {"numNodes": int, "torch": dict},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {"name": str, "template": {"metadata": {"labels": dict}, "spec": {"template": _POD}}}
                ]
            }
        },
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
        "trainer": {"numNodes": int, "command": [str], "args": [str]},
    },
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "replicas": int,
        "leaderWorkerTemplate": {"size": int, "restartPolicy": str, "workerTemplate": _POD},
    },
}


def check(content: object, shape: Shape, path: str) -> None:
    """Fail at a field that does not exist there, or has another type."""
    if isinstance(shape, dict):
        assert isinstance(content, dict), path
        for name, each in content.items():
            assert name in shape, f"{path}.{name}"
            check(each, shape[name], f"{path}.{name}")
    elif isinstance(shape, list):
        assert isinstance(content, list), path
        for number, each in enumerate(content):
            check(each, shape[0], f"{path}.{number}")
    else:
        assert isinstance(content, shape), f"{path} is {content!r}"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("*.yml")))
def test_every_field_exists(file: str) -> None:
    for document in documents(file):
        kind = document["apiVersion"], document["kind"]
        shape = {"apiVersion": str, "kind": str, "metadata": {"name": str, "labels": dict}}
        check(document, {**shape, "spec": _SPECS[kind]}, file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["job.yml", "page.yml", "pytorchjob.yml", "trainjob.yml", "leaderworkerset.yml"]
)
def test_the_schemas_of_kubernetes(file: str) -> None:
    """What is Kubernetes' own, and every pod in it, by the schemas of the API."""
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate has the schemas"
    )
    for document in documents(file):
        if document["apiVersion"] in ("v1", "batch/v1", "apps/v1"):
            schemas.validate(document, "1.28", strict=True)
        for spec in pod_specs(document):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
            schemas.validate(pod, "1.28", strict=True)


# What the fields say ----------------------------------------------------------------------------------------


@by_controller
def test_a_pod_has_what_a_training_needs(controller: Controller) -> None:
    for spec in pod_specs(documents(controller.file)):
        assert spec["terminationGracePeriodSeconds"] > 30, "torchrun gives its ranks 30 seconds"
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
        (container,) = spec["containers"]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        volumes = {each["name"]: each for each in spec["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        (variable,) = (each for each in container["env"] if each["name"] == "RALLYPOINT_SECRET_FILE")
        folder, _, name = variable["value"].rpartition("/")
        secret = mounts[folder]["secret"]
        assert [each["path"] for each in secret["items"]] == [name]
        assert secret["defaultMode"] == 0o400


@by_controller
def test_each_pod_knows_its_part(controller: Controller, tmp_path: Path) -> None:
    for number in (0, 1):
        variables = variables_of(controller, number)
        program, command, *words = command_of(controller)
        assert (program, command) == ("rallypoint", "run")
        order = split_arguments(words)
        placement = find_placement(variables, lambda _: "")
        settings = settle(order.options, variables, tmp_path, placement)
        assert settings.nnodes.text == "2"
        assert settings.node_rank.value == number
        assert settings.rdzv_endpoint.text == controller.endpoint
        assert order.target is not None
        assert order.target.words == ("train.py",)


def test_the_service_of_the_job_names_its_pods() -> None:
    service, workload = documents("job.yml")
    template = workload["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == template["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": workload["metadata"]["name"]}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)


# The page ---------------------------------------------------------------------------------------------------


def test_the_page_is_ready_while_the_store_answers() -> None:
    """The command and the probe of page.yml, with other ports."""
    (spec,) = pod_specs(documents("page.yml"))
    (container,) = spec["containers"]
    port = free_port()
    environ = {**os.environ, "RALLYPOINT_WEB_TOKEN": "a-token-of-the-test"}
    path = container["readinessProbe"]["httpGet"]["path"]

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}{path}", timeout=SECONDS) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False

    with serving("legacy", sys.stderr) as server:
        started = " ".join([*container["command"], *container["args"]])
        here = started.replace("8080", str(port)).replace("train-0.train:29400", f"localhost:{server.port}")
        command = [sys.executable, "-m", *here.split()]
        page = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        try:
            assert page.stdout is not None
            assert "page on" in page.stdout.readline()
            assert is_ready()
            server.process.kill()
            # What the page has just seen counts for a second.
            until(lambda: not is_ready(), "the page is not ready any more")
        finally:
            end(page)


# The image --------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_not_roots_and_has_all_that_it_copies() -> None:
    found = instructions()
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "CMD"}
    assert {word for word, _ in found} <= known
    assert [rest for word, rest in found if word == "USER"] == ["1000:1000"]
    assert not [rest for word, rest in found if re.search(r"://|index-url", rest)]
    for word, rest in found:
        if word == "COPY":
            for name in shlex.split(rest)[:-1]:
                assert (ROOT / name).exists(), name
    users = [
        spec["securityContext"]["runAsUser"]
        for each in CONTROLLERS
        for spec in pod_specs(documents(each.file))
    ]
    assert set(users) == {1000}


# Running ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@by_controller
def test_the_pods_train(controller: Controller, tmp_path: Path) -> None:
    """The container's command in two pods, whose names come when both are up."""
    secret = tmp_path / "secret"
    secret.write_text(make_secret())
    secret.chmod(0o400)
    host = controller.endpoint.rpartition(":")[0]
    script = ROOT / "examples" / "train_torchrun.py"
    with two_pods(tmp_path, controller.pods) as pods, job(tmp_path) as running:
        for number, pod in enumerate(pods):
            variables = variables_of(controller, number)
            program, command, *options, _ = command_of(controller)
            # A pod of this machine has a GPU less, and all of its cores.
            environ = {**variables, "PET_NPROC_PER_NODE": "1", "RALLYPOINT_SECRET_FILE": str(secret)}
            running.start(script, options, environ, ("-m", program, command), pod.prefix)
        for pod in pods:
            pod.learns(host, pods[0].address)
        assert running.wait() == [0, 0], running.logs()
        assert "2 ranks, gloo, cpu" in running.log(0), running.logs()


@pytest.mark.slow
def test_pods_that_have_only_the_variables_of_torch_train_together(tmp_path: Path) -> None:
    both = {**_master("", "localhost", str(free_port())), "WORLD_SIZE": "2"}
    with job(tmp_path) as running:
        for rank in range(2):
            running.start(
                ROOT / "examples" / "train_torchrun.py",
                ["--nproc-per-node=1"],
                {**both, "RANK": str(rank)},
                ("-m", "rallypoint", "run"),
            )
        assert running.wait() == [0, 0], running.logs()
        assert "2 ranks, gloo, cpu" in running.log(0), running.logs()
