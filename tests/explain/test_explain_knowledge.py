"""The knowledge base of `rallypoint explain`: what an entry may contain, and that its own lines find it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from known_errors_page import page
from rallypoint.explain.events import Entry
from rallypoint.explain.knowledge import ROLES, fill, knowledge
from rallypoint.explain.quick import fixed_texts

pytestmark = pytest.mark.windows

_KNOWN = knowledge()
_IDS = [entry.id for entry in _KNOWN.entries]
_SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+|reproduced with torch \d+\.\d+\.\d+")
_FACT = re.compile(r"\{(\w+)(\|[^{}|]*)?\}")
_PART = re.compile(r"\[[^\[\]]*\{\w+\}[^\[\]]*\]")

each_entry = pytest.mark.parametrize("entry", _KNOWN.entries, ids=_IDS)


def _found(text: str, *speakers: str, heard: frozenset[str] = frozenset()) -> str | None:
    match = _KNOWN.match(text, frozenset(speakers), heard)
    return match.entry.id if match is not None else None


# Every entry ------------------------------------------------------------------------------------------------


@each_entry
def test_an_entry_is_the_first_that_its_example_finds(entry: Entry) -> None:
    assert _found(entry.example, heard=entry.heard) == entry.id


@each_entry
def test_lines_that_resemble_an_entry_do_not_find_it(entry: Entry) -> None:
    assert all(_found(line, heard=entry.heard) != entry.id for line in entry.unlike)


@each_entry
def test_an_entry_gives_short_advice_with_sources(entry: Entry) -> None:
    assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", entry.id)
    assert _IDS.count(entry.id) == 1
    assert entry.role in ROLES
    assert not entry.title.endswith(".")
    assert 0 < len(entry.why) <= 240
    assert 1 <= len(entry.do) <= 3
    assert entry.sources
    assert all(map(_SOURCE.fullmatch, entry.sources))


@each_entry
def test_a_step_is_short_for_every_launcher(entry: Entry) -> None:
    steps = [step for launcher in ("", *_KNOWN.launchers) for step in _KNOWN.steps(entry, {}, launcher)]
    assert all(0 < len(step) <= 200 and not step.startswith("@") for step in steps)


@each_entry
def test_an_entry_asks_only_for_facts_that_its_patterns_capture(entry: Entry) -> None:
    texts = " ".join((entry.title, entry.why, *entry.do))
    captured = [set(pattern.groupindex) for pattern in entry.patterns]
    assert {name for name, _ in _FACT.findall(texts)} <= set().union(*captured)
    needed = {name for name, default in _FACT.findall(_PART.sub("", texts)) if not default}
    assert needed <= set.intersection(*captured)


def test_every_pattern_has_a_fixed_text_and_bounded_gaps() -> None:
    for pattern in (*_KNOWN.patterns, *_KNOWN.speaker_patterns):
        assert min(map(len, fixed_texts(pattern) or [b""])) >= 2, pattern.pattern
        assert not re.search(r"(?<!\\)\.[*+](?!-|\)?$)", pattern.pattern), pattern.pattern


def test_there_are_few_entries() -> None:
    assert len(_KNOWN.entries) <= 130


def test_the_page_of_the_documentation_has_every_entry() -> None:
    """`python tests/tools/known_errors_page.py docs/known-errors.md` writes it."""
    path = Path(__file__).parents[2] / "docs" / "known-errors.md"
    assert path.read_text(encoding="utf-8") == page(_KNOWN)


# Who speaks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "speaker"),
    [
        ("misc/socket.cc:49 NCCL WARN socketProgress: Connection closed", "nccl"),
        ("third_party/gloo/gloo/transport/tcp/pair.cc:799", "gloo"),
        ("[W socket.cpp:663] [c10d] The client socket has failed to connect", "store"),
        ("/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", "dataloader"),
        ("[ERROR] device npu:3 failed", "npu"),
        ("torch.distributed.elastic.multiprocessing.api", "torchrun"),
        ("[launch.py:347:sigkill_handler] exits with return code = 1", "deepspeed"),
        ("subprocess of accelerate/commands/launch.py", "accelerate"),
        ("prterun noticed that process rank 1 exited", "mpi"),
        ("ray.exceptions.RayTaskError(ValueError): ray::train()", "ray"),
        ("(EngineCore_0 pid=12) ERROR", "vllm"),
        ("slurmstepd: error: *** STEP 1.0 ON node-a CANCELLED", "slurm"),
        ("0/3 nodes are available: 3 Insufficient cpu", "kubernetes"),
    ],
)
def test_a_text_shows_its_speakers(text: str, speaker: str) -> None:
    assert speaker in _KNOWN.speakers(text)


def test_ordinary_text_has_no_speaker() -> None:
    assert _KNOWN.speakers("epoch 3 step 100 loss 0.53, checkpoint saved") == frozenset()


# Mistakes that must not come back ---------------------------------------------------------------------------


def test_truncated_messages_of_other_libraries_are_not_nccl() -> None:
    text = "Message truncated : received 1024 bytes instead of 256"
    assert _found(text) is None
    assert _found(text, "nccl") == "collectives-differ"


def test_a_bus_error_is_shared_memory_only_where_the_log_shows_some() -> None:
    text = "failed (exitcode: -7) local_rank: 1 (pid: 901) of binary: /usr/bin/python"
    assert _found(text) == "segmentation-fault"
    assert _found(text, heard=frozenset({"dataloader"})) == "bus-error-of-a-loader"


@pytest.mark.parametrize("accelerator", ["npu", "xpu", "mps"])
def test_a_build_for_another_accelerator_is_not_called_a_build_for_the_cpu(accelerator: str) -> None:
    text = "AssertionError: Torch not compiled with CUDA enabled"
    assert _found(text) == "torch-without-cuda"
    assert _found(text, heard=frozenset({accelerator})) == "cuda-on-another-accelerator"


def test_only_the_kernel_or_the_scheduler_says_that_memory_ran_out() -> None:
    assert _found("failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: python") == "killed"
    assert _found("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.") == "out-of-memory"


def test_an_entry_that_needs_the_rest_of_the_log_can_be_asked_for_early() -> None:
    match = _KNOWN.match("RuntimeError: Gloo connectFullMesh failed with [pair.cc:152]", heard=None)
    assert match is not None
    assert match.entry.heard == {"restart"}


# The texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "facts", "filled"),
    [
        ("port[ {port}] on[ {host}, {port}].", {"port": "1"}, "port 1 on."),
        ("port[ {port}] on[ {host}, {port}].", {"port": "1", "host": "a"}, "port 1 on a, 1."),
        ("[::]:{port}, [x] and []", {"port": "1"}, "[::]:1, [x] and []"),
        ("{port}", {"port": "{host}[{x}]"}, "{host}[{x}]"),
        ("nc -vz {host|HOST} {port|PORT}", {"host": "a"}, "nc -vz a PORT"),
    ],
)
def test_facts_fill_texts(text: str, facts: dict[str, str], filled: str) -> None:
    assert fill(text, facts) == filled


def test_a_pattern_captures_facts() -> None:
    match = _KNOWN.match("accelerate: Tried to launch distributed communication on port `29500`, but")
    assert match is not None
    assert fill(match.entry.title, match.facts) == "The store's port 29500 is already in use"


def test_a_remedy_depends_on_the_launcher() -> None:
    (entry,) = [each for each in _KNOWN.entries if each.id == "out-of-memory"]
    assert "--mem" in _KNOWN.steps(entry, {}, "slurm")[0]
    assert "resources.limits.memory" in _KNOWN.steps(entry, {}, "kubernetes")[0]
    assert _KNOWN.steps(entry, {}, "torchrun") == _KNOWN.steps(entry, {})
