"""What torch's answers come to; and how it is asked: in a process that may crash or hang."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rallypoint.diagnose.doctor import network, torch
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.doctor.torch import DEFECTS, defects_of
from rallypoint.diagnose.findings import NO_GPU, Finding, Fix, State
from rallypoint.errors import BindError
from rallypoint.pytorch import asking
from rallypoint.pytorch.asking import Answers, ask
from rallypoint.store.machine.interfaces import Interface

F, W, OK, UNKNOWN = State.FAILURE, State.WARNING, State.OK, State.UNKNOWN
GIB = 1 << 30

TORCH = {
    "version": "2.13.0",
    "path": "/x",
    "cuda": "12.8",
    "hip": "",
    "distributed": True,
    "backends": ["gloo", "nccl"],
    "nccl": "2.27.5",
}
GPU = {"name": "H200", "capability": [9, 0], "bytes": 140 * GIB, "free": 139 * GIB}
GOOD: dict[str, dict[str, Any]] = {
    "torch": TORCH,
    "devices": {"devices": [GPU], "kernels": ["sm_80", "sm_90", "compute_90"]},
    "gloo": {"seconds": 0.0146},
    "plugin": {"backends": ["c10d", "rallypoint"]},
    "store": {"fault": "", "round_trip": 16e-6},
    "nccl": {"seconds": 1.25},
}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(network, "interfaces", lambda: [Interface("eth7", True, ("10.0.0.7",))])


def judged(parts: Mapping[str, Mapping[str, Any]], problem: str = "") -> dict[str, Finding]:
    """The findings by name, without those about defects that all torch of a version has."""
    found = [each for each in torch.judge_torch(Answers(parts, problem, 3.7)) if each.name != "known-defects"]
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def with_part(part: str, **facts: Any) -> dict[str, dict[str, Any]]:
    return {**GOOD, part: {**GOOD[part], **facts}}


def first_parts(count: int) -> dict[str, dict[str, Any]]:
    """What is known when the process ends in the part behind these."""
    return dict(list(GOOD.items())[:count])


# What the answers come to ----------------------------------------------------------------------------------


def test_a_torch_that_has_everything() -> None:
    found = judged(GOOD)
    assert {name: (each.state, each.found) for name, each in found.items()} == {
        "torch": (OK, "2.13.0, CUDA 12.8; gloo, nccl; examined in 3.7 s"),
        "devices": (OK, "0: H200, sm_90, 139.0 of 140.0 GiB free"),
        "libuv": (OK, "torch's TCPStore has it; torch's client asks our server in 16.0 us"),
        "gloo": (OK, "one rank by itself reduces, in 14.6 ms"),
        "nccl": (OK, "NCCL 2.27.5: one rank by itself reduces, in 1.25 s"),
        "torchrun-plug-in": (OK, "registered, and loads: --rdzv-backend=rallypoint"),
    }


def test_builds() -> None:
    for facts, text in (
        ({"cuda": ""}, "2.13.0, CPU only; gloo, nccl;"),
        ({"cuda": "", "hip": "6.4"}, "2.13.0, ROCm 6.4; gloo, nccl;"),
        ({"backends": []}, "2.13.0, CUDA 12.8; no backend;"),
    ):
        assert judged(with_part("torch", **facts))["torch"].found.startswith(text)


def test_a_torch_that_cannot_be_imported() -> None:
    no_library = {"torch": {"error": "ImportError: no libcudart"}}
    for parts, problem, why in (
        ({}, "exit code -11", "exit code -11"),
        ({}, "", "it was not asked"),
        (no_library, "", "ImportError: no libcudart"),
    ):
        found = judged(parts, problem)
        assert list(found) == ["torch"]
        assert (found["torch"].state, found["torch"].found) == (F, f"it cannot be imported: {why}")
        assert "import torch" in found["torch"].hint


def test_a_torch_without_distributed() -> None:
    found = judged(with_part("torch", distributed=False, backends=[]))
    assert set(found) == {"torch", "devices"}
    assert found["torch"].state is F
    assert found["torch"].found.endswith("built without torch.distributed")


USE_ETHERNET = Fix("env", "GLOO_SOCKET_IFNAME", "eth7")
USE_PYTHON = Fix("run", "client", "python")
WITHOUT_STORE = {part: facts for part, facts in GOOD.items() if part != "store"}
WITHOUT_GPU = {**GOOD, "devices": {"devices": [], "kernels": []}, "nccl": {"error": "no GPU"}}
HELP, PLUGIN = "rallypoint run --client=python train.py", "torchrun-plug-in"


def broken(part: str, error: str) -> dict[str, dict[str, Any]]:
    return {**GOOD, part: {"error": error}}


def test_one_part_of_torch() -> None:
    one_rank = "one rank by itself fails"
    unusable = "torch's client cannot use a store on loopback: no"
    for parts, name, state, text, hint, fix in (
        (with_part("store", fault="NO_LIBUV"), "libuv", W, "USE_LIBUV=0", "rallypoint run -- torchrun", None),
        (with_part("store", fault="BROKEN"), "libuv", F, "does not work at all", HELP, USE_PYTHON),
        (broken("store", "no"), "libuv", F, unusable, HELP, None),
        (WITHOUT_STORE, "libuv", UNKNOWN, "torch's store was not tried: it was not asked", "", None),
        (broken("gloo", "no"), "gloo", F, f"{one_rank}: no", "export GLOO_SOCKET_IFNAME=eth7", USE_ETHERNET),
        (with_part("torch", backends=[]), "gloo", W, "this torch was built without it", "install", None),
        (WITHOUT_GPU, "nccl", OK, f"NCCL 2.27.5 is there; {NO_GPU}", "", None),
        (WITHOUT_GPU, "devices", OK, "no GPU that this torch can use: ranks compute on the CPU", "", None),
        (broken("nccl", "no"), "nccl", F, f"{one_rank}: no", "NCCL_DEBUG=INFO shows more", None),
        (with_part("plugin", backends=["c10d"]), PLUGIN, W, "torchrun does not know", "pip", None),
        (broken("plugin", "x"), PLUGIN, F, "it cannot be loaded: x", "--force-reinstall", None),
        (broken("devices", "no"), "devices", F, "torch cannot ask for them: no", "nvidia-smi", None),
    ):
        found = judged(parts)[name]
        assert (found.state, found.fix, bool(found.hint)) == (state, fix, bool(hint)), name
        assert text in found.found
        assert hint in found.hint
    assert "nccl" not in judged(with_part("torch", backends=[])), "what was not built is not told"


def test_gloo_that_fails_without_an_interface_to_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", list)
    found = judged(broken("gloo", "x"))["gloo"]
    assert (found.state, found.fix, found.hint) == (F, None, "")


@pytest.mark.parametrize("problem", ["exit code -11", "it is not done after 59 s"])
def test_a_process_that_ends_in_the_middle_blames_the_part_that_it_ended_in(problem: str) -> None:
    names = {
        "devices": "devices",
        "gloo": "gloo",
        "plugin": "torchrun-plug-in",
        "store": "libuv",
        "nccl": "nccl",
    }
    for count, part in enumerate(GOOD):
        if not count:
            continue  # without the first part, torch itself is to blame
        found = judged(first_parts(count), problem)
        assert found["torch"].state is OK
        assert problem in found[names[part]].found
        failed = [name for name, finding in found.items() if finding.state is F]
        assert failed == [names[part]], "what was never tried has not failed"


def test_without_an_answer_about_devices_nobody_knows_whether_nccl_has_one() -> None:
    found = judged(first_parts(1), "exit code -11")["nccl"]
    assert found.state is not OK
    assert NO_GPU not in found.found


def test_code_for_a_gpu() -> None:
    for major, minor, kernels, good in (
        (9, 0, ["sm_90"], True),
        (8, 9, ["sm_80"], True),
        (8, 0, ["sm_86"], False),
        (12, 0, ["sm_80", "sm_90"], False),
        (12, 0, ["sm_90", "compute_90"], True),
        (12, 1, ["sm_120"], True),
        (7, 5, ["compute_80"], False),
        (9, 0, ["sm_90a"], True),
        (10, 3, ["sm_100f"], True),
        (9, 4, ["gfx942"], True),
        (9, 0, [], True),
        (9, 0, ["sm_x"], False),
    ):
        found = torch.judge_device(1, {**GPU, "capability": [major, minor]}, kernels)
        assert found.state is (OK if good else F), (major, minor, kernels)
        assert found.found.startswith(f"1: H200, sm_{major}{minor}, ")
        if not good:
            assert f"this torch has code for {', '.join(kernels)} only" in found.found
            assert f"--cuda-arch {major}.{minor}" in found.hint


def test_every_gpu_is_told() -> None:
    for free, state in ((70 * GIB, OK), (70 * GIB - 1, W)):
        assert torch.judge_device(0, {**GPU, "free": free}, ["sm_90"]).state is state
    parts = with_part("devices", devices=[GPU, {**GPU, "capability": [12, 0]}], kernels=["sm_90"])
    found = [each for each in torch.judge_torch(Answers(parts)) if each.name == "devices"]
    assert [(each.found[0], each.state) for each in found] == [("0", OK), ("1", F)]


@pytest.mark.parametrize(
    ("version", "system", "starts"),
    [
        ("1.8.1", "Linux", ["With torchrun's c10d"]),
        ("1.13", "Linux", ["torchrun's agents", "With torchrun's c10d"]),
        ("1.13", "Windows", ["On Windows", "torchrun's agents", "With torchrun's c10d"]),
        ("2.1.2+cpu", "Windows", ["On Windows", "torchrun's agents", "With torchrun's c10d"]),
        ("2.2.0", "Windows", ["TCPStore does not work", "torchrun's agents", "With torchrun's c10d"]),
        ("2.2", "Windows", ["TCPStore does not work", "torchrun's agents", "With torchrun's c10d"]),
        ("2.2.1", "Windows", ["torchrun's agents", "With torchrun's c10d"]),
        ("2.6.0a0+git1", "Linux", ["torchrun's agents", "Since torch 2.6", "With torchrun's c10d"]),
        ("of my own", "Linux", ["With torchrun's c10d"]),
    ],
)
def test_defects_of_a_version(version: str, system: str, starts: list[str]) -> None:
    found = list(defects_of(version, system))
    assert len(found) == len(starts)
    assert all(defect.what.startswith(start) for defect, start in zip(found, starts, strict=True))


def test_defects_are_told_as_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    found = [each for each in torch.judge_torch(Answers(GOOD)) if each.name == "known-defects"]
    everywhere = [each for each in DEFECTS if not each.system]
    assert [(each.state, each.found, each.hint) for each in found] == [
        (State.NOTE, each.what, each.do) for each in everywhere
    ]


# Asking ----------------------------------------------------------------------------------------------------

SAYS = 'import sys; sys.stdout.write(\'{"part": "torch", "version": "1"}\\n\'); sys.stdout.flush();'


def ask_program(monkeypatch: pytest.MonkeyPatch, program: str, seconds: float = 30.0) -> Answers:
    monkeypatch.setattr(asking, "_PROGRAM", program)
    return ask(("torch",), {}, seconds)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (SAYS, ""),
        (SAYS + "sys.exit(3)", "exit code 3"),
        (SAYS + "sys.exit('  it broke\\n\\n')", "exit code 1: it broke"),
        (SAYS + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit code -11"),
    ],
)
def test_what_was_said_before_a_crash_counts(
    program: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ask_program(monkeypatch, program)
    assert answers.parts == {"torch": {"version": "1"}}
    assert answers.problem == problem
    assert answers.error_of("torch") == ""
    assert answers.error_of("gloo") == (problem or "it was not asked")
    assert answers.seconds > 0


def test_what_was_said_before_it_hangs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ask_program(monkeypatch, SAYS + "import threading; threading.Event().wait()", 1.0)
    assert answers.parts == {"torch": {"version": "1"}}
    assert answers.problem == "it is not done after 1 s"


def test_lines_of_others_are_not_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = "print('hello'); print(3); print('[]'); print('{}'); print('\"x\"'); print('{\"part\": []}');"
    answers = ask_program(monkeypatch, noise + SAYS + "sys.stderr.write('log')")
    assert answers.parts == {"torch": {"version": "1"}}


def test_a_torch_in_the_folder_is_not_the_one_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    program = asking._PROGRAM.replace("from rallypoint.pytorch.asking import main\nmain()", "import json")
    assert program != asking._PROGRAM
    assert ask_program(monkeypatch, program).problem == ""


@pytest.mark.slow
def test_this_torch_says_all_that_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, with variables of a rank around it, which are not its business.

    What comes of it without them is in test_doctor_command.py.
    """
    answers = torch.ask_torch({**os.environ, "RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere"})
    assert answers.problem == ""
    assert list(answers.parts) == ["torch", "devices", "gloo", "plugin", "store", "nccl"]
    assert answers.parts["torch"]["version"].startswith("2.13.0")
    assert answers.parts["store"]["fault"] == ""
    assert "rallypoint" in answers.parts["plugin"]["backends"]
    assert not answers.error_of("gloo")


def test_without_sockets_torch_is_asked_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BindError("no sockets here")

    asked: list[list[str]] = []

    def note(parts: list[str], environ: Mapping[str, str], seconds: float) -> Answers:
        asked.append(parts)
        assert "RANK" not in environ
        assert seconds < torch.SECONDS
        return Answers(problem="made up")

    monkeypatch.setattr(torch, "open_store", refuse)
    monkeypatch.setattr(torch, "ask", note)
    [found] = torch.check_torch(Situation({"RANK": "0"}, None, Path()))
    assert asked == [["torch", "devices", "gloo", "plugin", "nccl"]]
    assert found.found == "it cannot be imported: made up"
