"""Several machines: ranks within one, and what the machines were told differently."""

from __future__ import annotations

import pytest

from explaining import log_of_text, traceback
from rallypoint.diagnose.explain import explain
from rallypoint.diagnose.explain.words import as_json, as_text, describe_writers

pytestmark = pytest.mark.windows

_TEE = traceback("ValueError: the learning rate is a banana", "[default3]:")
_ROW = "Root Cause (first observed failure):\n[0]:\n  host      : b\n  rank      : 7 (local_rank: 3)\n=====\n"
_OTHER = (
    "Root Cause (first observed failure):\n[0]:\n  host      : a\n  rank      : 1 (local_rank: 1)\n=====\n"
)
_TIMEOUT = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"


@pytest.mark.parametrize(
    ("also", "who"),
    [
        ("", "local rank 3"),
        ("[default1]:[rank5]: x\n" + traceback("KeyError: 1", "[default1]:[rank5]: "), "rank 7"),
        (_ROW, "rank 7"),
        (_ROW + _OTHER, "local rank 3"),  # of which machine?
        ("  global_ranks=[4, 5, 6, 7]\n", "rank 7"),
        ("  group_world_size=1\n", "rank 3"),
        ("  group_world_size=12\n", "local rank 3"),
        ("GROUP_RANK=1\nLOCAL_WORLD_SIZE=4\n", "rank 7"),
    ],
)
def test_a_rank_within_a_machine_is_translated_or_said_to_be_one(also: str, who: str) -> None:
    report = explain([log_of_text(also + _TEE)])
    everything = [each.incident for each in (report.verdict, *report.other_tries) if each is not None]
    (banana,) = [each for each in (*everything, *report.others) if "banana" in each.headline]
    assert describe_writers(banana) == who


def test_a_rank_within_a_machine_is_no_rank_in_json() -> None:
    told = as_json(explain([log_of_text(_TEE)]))["verdict"]
    assert (told["ranks"], told["local_ranks"]) == ([], [3])
    report = explain([log_of_text("[default2]:some disk failure\n[default2]:an unknown failure\n")])
    assert "(local rank 2, log, line 1)" in as_text(report)


def _cause_of(*texts: str) -> str | None:
    report = explain([log_of_text(text, f"{index}.log") for index, text in enumerate(texts)])
    cause = report.verdict.incident.cause if report.verdict is not None else None
    return cause.id if cause is not None else None


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["+ torchrun --rdzv-id=7 train.py\n", "+ torchrun --rdzv_id 8 train.py\n"], "run-ids-differ"),
        (["+ torchrun --rdzv-id=7 train.py\n", "+ torchrun --rdzv_id 7 train.py\n"], "rendezvous-timeout"),
        (["PING n0 (10.0.0.5) 56(84) bytes\n", "n0 resolves to 10.0.0.7\n"], "name-differs"),
        (["PING n0 (10.0.0.5): 56 data bytes\n", "n0 resolves to 10.0.0.7\n"], "name-differs"),
        (["PING n0 (10.0.0.5) 56(84) bytes\n", "n1 resolves to 10.0.0.7\n"], "rendezvous-timeout"),
        # a machine that takes its own name for loopback can still be reached
        (["n0 resolves to 127.0.1.1\n", "n0 resolves to 10.0.0.7\n"], "rendezvous-timeout"),
    ],
)
def test_what_the_machines_were_told_differently_is_the_cause(lines: list[str], cause: str) -> None:
    logs = [line + traceback(_TIMEOUT.strip()) for line in lines]
    assert _cause_of(*logs) == cause
    assert _cause_of("".join(lines) + _TIMEOUT) == cause
    assert _cause_of(*(f"{line}step 1 loss 0.5\nstep 2 loss 0.5\n" for line in lines)) is None


def test_a_machine_that_was_started_again_does_not_disagree_with_itself() -> None:
    lines = [f"[pod/a/x] + torchrun --rdzv-id={number} train.py\n" for number in (7, 8)]
    assert _cause_of("".join(lines) + _TIMEOUT) == "rendezvous-timeout"
