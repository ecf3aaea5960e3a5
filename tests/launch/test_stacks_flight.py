"""Dumps of torch's Flight Recorder: where ranks part, and pickles that may do nothing."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.errors import UsageError
from rallypoint.launch.stacks.flight_recorder import as_lines, compare, read_dump

_FRAMES = [
    {"name": "all_reduce", "filename": "/venv/lib/python3.11/site-packages/torch/x.py", "line": 9},
    {"name": "step", "filename": "train.py", "line": 88},
]


def _entry(number: int, name: str = "nccl:all_reduce", size: int = 4, done: bool = True) -> dict[str, Any]:
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[size, 2]],
        "input_dtypes": ["Float"],
        "state": "completed" if done else "started",
        "time_created_ns": number,
        "is_p2p": False,
        "frames": _FRAMES,
    }


def _dump(*entries: dict[str, Any], ranks: str = "[0, 1, 2]") -> bytes:
    return pickle.dumps(
        {"version": "2.10", "entries": list(entries), "pg_config": {"0": {"ranks": ranks}}}, 2
    )


def _told(*dumps: bytes) -> list[str]:
    read = [read_dump(rank, data) for rank, data in enumerate(dumps)]
    return as_lines(read, compare(read))


def test_the_first_collective_that_differs_is_named_with_its_ranks() -> None:
    same = _entry(7)
    other = _dump(same, _entry(8, "nccl:broadcast"))
    told = _told(_dump(_entry(6), same, _entry(8)), other, _dump(same, _entry(8), _entry(9)))
    assert told[:4] == [
        "Flight Recorder: dumps of ranks 0 to 2",
        "  group 0 default_pg, collective 8: the ranks call different ones",
        "    rank 1: nccl:broadcast of [4, 2] Float, at train.py, line 88, in step",
        "    ranks 0 and 2: nccl:all_reduce of [4, 2] Float, at train.py, line 88, in step",
    ]
    sizes = _told(_dump(same), _dump(_entry(7, size=5)), _dump(same))
    assert "    rank 1: nccl:all_reduce of [5, 2] Float, at train.py, line 88, in step" in sizes
    uneven = [_dump(_entry(7, "nccl:all_to_all", size)) for size in (1, 2, 3)]
    assert _told(*uneven)[-1] == "  all of them have called the same collectives, and all have ended"


def test_a_rank_that_has_not_come_so_far_is_named() -> None:
    told = _told(_dump(_entry(7), _entry(8, done=False)), _dump(_entry(7)), _dump())
    assert "    ranks 1 and 2: not reached" not in told, "rank 2 has not even reached 7"
    assert "    rank 2: not reached" in told
    told = _told(_dump(_entry(7), _entry(8, done=False)), _dump(_entry(7)))
    assert told[1] == "  there is no dump of rank 2, which may be the one that differs"
    assert "    rank 1: not reached" in told
    told = _told(*[_dump(_entry(7), _entry(8, done=False))] * 3)
    assert "collective 8: all ranks have reached it, and it has not ended" in told[1]


def test_groups_of_different_ranks_are_not_compared_though_their_name_is_the_same() -> None:
    pairs = [("[0, 1]", 4), ("[0, 1]", 4), ("[2, 3]", 9), ("[2, 3]", 9)]
    assert "all have ended" in _told(*(_dump(_entry(7, size=size), ranks=each) for each, size in pairs))[-1]


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": [_Evil()]}),
        b"\x80\x02cos\nmkdir\nX\x04\x00\x00\x00evil\x85R.",
        b"(X\x04\x00\x00\x00evilios\nmkdir\n.",
        b"\x80\x02\x82\x01.",
        *(b"", b"\x80\x02", b"{", b"[]", b"{}", pickle.dumps(7), _dump(_entry(1))[:-9]),
    ],
)
def test_what_is_no_dump_or_wants_to_run_something_is_refused(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="the dump of rank 3 cannot be read"):
        read_dump(3, data)
    assert list(tmp_path.iterdir()) == []


def test_nothing_in_a_dump_is_obeyed_or_endless() -> None:
    odd = {
        **_entry(7),
        "profiling_name": "\x1b[2J" * 999,
        "input_sizes": [[10**5000, "x"] * 999, 7],
        "frames": 3,
    }
    odd |= {"process_group": ("\x1b]0;x\x07" * 999,), "time_created_ns": "x", "input_dtypes": None}
    told = "\n".join(_told(_dump(odd), _dump(_entry(7))))
    assert "\x1b" not in told
    assert len(told) < 3000


_RECORD = """
import os, pickle, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch, torch.distributed as dist
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
dist.barrier()
from torch._C._distributed_c10d import _dump_fr_trace
dump = _dump_fr_trace()
while not all(each["retired"] or each["state"] == "completed" for each in pickle.loads(dump)["entries"]):
    dump = _dump_fr_trace()  # a thread of gloo's notes that they are over
open(sys.argv[1], "wb").write(dump)
"""


@pytest.mark.slow
def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    done = subprocess.run(
        [sys.executable, "-c", _RECORD, str(path)], timeout=120, capture_output=True, text=True
    )
    if "cannot import name" in done.stderr:
        pytest.skip("this torch records no collectives of gloo")
    dump = read_dump(0, path.read_bytes())
    calls = dump.groups["0 default_pg"].values()
    assert [(each.operation, each.sizes, each.kinds) for each in calls] == [
        ("gloo:all_reduce", ((4,),), ("Float",)),
        ("gloo:barrier", (), ()),
    ]
    assert compare([dump]) == []
