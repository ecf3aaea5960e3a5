"""What the GPUs of processes do, as NVIDIA's own tool tells; nothing where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from typing import Final

from rallypoint.launch.stacks.bounded import output_of

_SECONDS: Final = 3.0


def gpus_of(pids: Collection[int]) -> dict[int, str]:
    """By process: `GPU 3 at 100 %`."""
    if not pids or shutil.which("nvidia-smi") is None:
        return {}
    busy = {}
    for uuid, index, share in _rows("--query-gpu=uuid,index,utilization.gpu", 3):
        busy[uuid] = f"GPU {index} at {share} %"
    users = _rows("--query-compute-apps=pid,gpu_uuid", 2)
    return {
        int(pid): busy[uuid] for pid, uuid in users if pid.isdigit() and int(pid) in pids and uuid in busy
    }


def _rows(query: str, width: int) -> Iterator[list[str]]:
    for line in output_of(["nvidia-smi", query, "--format=csv,noheader,nounits"], _SECONDS).splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == width:
            yield words
