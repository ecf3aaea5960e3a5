"""What launchers, libraries and the system say of a failure, each with the cause that is named for it."""

from __future__ import annotations

import pytest

from rallypoint.diagnose.explain import Explanation, Log, explain

_ENDED = (
    "[2024-06-18 08:31:09,982] [ERROR] [launch.py:321:sigkill_handler] ['a.py'] exits with return code = "
)
_RAISED = """\
{0}Traceback (most recent call last):
{0}  File "train.py", line 3, in main
{0}ValueError: banana
"""
_VLLM = "ERROR 06-16 10:11:12 [core.py:238] "
_RAY = "(RayTrainWorker pid=711, ip=10.0.0.2) "
_WARN = "n1:1:2 [0] misc/socket.cc:484 NCCL WARN "
_NCCL = "RuntimeError: NCCL error in: ../x.cpp:1, unhandled system error, NCCL version 2.14.3\n"
_GLOO = "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/uv/device.cc:155] "
_SENT = 'INFO: 10.0.0.3 - "POST /v1 HTTP/1.1" 200 OK\n'


def _explained(text: str) -> Explanation:
    return explain([Log("job.log", iter([text.encode()]))])


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{_ENDED}-7", "shared-memory-full"),
        (f"{_ENDED}-6", "aborted"),
        (f"{_ENDED}1", "child-failed"),
        (f"{_ENDED}2", "child-failed"),
        ("root@n2: Permission denied (publickey,password).", "ssh-no-key"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu-memory-error"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "illegal-memory-access"),
        ("RuntimeError: CUDA error: device-side assert triggered", "device-assert"),
        ("RuntimeError: CUDA error: initialization error", "cuda-not-initialised"),
        ("RuntimeError: CUDA error: invalid argument", "cuda-invalid-argument"),
        ("RuntimeError: cudaGetDeviceCount(). Error 802: system not yet initialized", "fabric-manager"),
        (f"{_WARN}Connect to 10.0.0.2<40001> failed : Connection refused\n{_NCCL}", "nccl-refused"),
        (f"{_WARN}Call to posix_fallocate failed : No space left on device\n{_NCCL}", "shared-memory-full"),
        (
            f"{_NCCL}Last error:\nsocketStartConnect: Connect to 10.0.0.2<40001> failed : Connection refused",
            "nccl-refused",
        ),
        (f"{_WARN}Cuda failure 'peer access is not supported between these two devices'", "peer-access"),
        ("ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress", "nccl-heartbeat"),
        ("RuntimeError: Detected mismatch between collectives on ranks.", "collectives-differ"),
        ("train.py: error: unrecognized arguments: --local-rank=0", "local-rank-argument"),
        ("slurmstepd: error: execve(): torchrun: No such file or directory", "launcher-not-found"),
        ("ProcessExitedException: process 0 terminated with exit code 3221225477", "windows-crash"),
        ("!!!!!!! Segfault encountered !!!!!!!", "segmentation-fault"),
        (f"{_GLOO}ret == 0. makeUVDevice failed", "gloo-no-device"),
        ("RuntimeError: makeDeviceForHostname(): unsupported gloo device", "gloo-no-device"),
    ],
)
def test_words_that_are_common_are_known(text: str, cause: str) -> None:
    verdict = _explained(text + "\n").verdict
    assert verdict is not None
    assert verdict.incident.cause is not None
    assert verdict.incident.cause.id == cause


@pytest.mark.parametrize("prefix", ["", "n2: ", "3: ", _RAY, _VLLM, "   2024-06-16 10:11:12,123 - ERROR - "])
def test_an_exception_is_read_behind_every_prefix(prefix: str) -> None:
    wrapped = "RuntimeError: Engine core initialization failed. See root cause above.\n"
    seen = "n2: starts\n3: starts\n" if prefix in ("n2: ", "3: ") else ""
    verdict = _explained(seen + _RAISED.format(prefix) + wrapped).verdict
    assert verdict is not None
    assert verdict.incident.headline == "ValueError: banana"


@pytest.mark.parametrize(
    ("text", "is_bad"),
    [
        ("loading the model\ninitializing ddp\n", True),  # it stops in the middle of its start
        (_RAISED.format("") + _SENT * 20, False),  # it was caught by a server that goes on
        (
            "loss: 0.3\nloss: 0.2\nException ignored in: <function X.__del__>\n"
            + _RAISED.format("")
            + "done\n",
            False,
        ),
    ],
)
def test_a_job_that_went_on_is_told_from_one_that_did_not(text: str, is_bad: bool) -> None:
    assert _explained(text).found is is_bad
