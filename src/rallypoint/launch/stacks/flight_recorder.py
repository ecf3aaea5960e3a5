"""Asking torch's Flight Recorder for the last collectives of the ranks of this machine, where it is on.

torch looks at a pipe for each rank, if a variable names it, and dumps what it has recorded when something is
written there. The place of the dump is the user's, or torch's own: it is left as it is. Found out with torch
2.11: the dump is there within a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from rallypoint.errors import UsageError
from rallypoint.launch.stacks.activity import Recorded
from rallypoint.launch.stacks.flight_dumps import MOST_BYTES, last_calls, read_dump

PIPES: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_SIZES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PLACES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_NAMES: Final = ("comm_lib_trace_rank_", "nccl_trace_rank_")
_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 0.05


def with_pipes(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment in which torch can be asked, if its recorder is on and nobody else asks."""
    is_on = hasattr(os, "mkfifo") and any(environ.get(name, "0").strip() not in ("", "0") for name in _SIZES)
    return {PIPES: str(folder / "flight-"), **environ} if is_on else dict(environ)


def read_recorders(ranks: Iterable[int], environ: Mapping[str, str]) -> dict[int, tuple[Recorded, ...]]:
    """The last collectives by rank, of those whose recorder answers."""
    asked = [rank for rank in ranks if _request(rank, environ)]
    # The clock of files is coarse. A dump of a moment before would be as good.
    began = time.time() - 1.0
    deadline = time.monotonic() + _SECONDS
    found: dict[int, tuple[Recorded, ...]] = {}
    while asked and time.monotonic() < deadline:
        for rank in list(asked):
            path = _fresh_dump(rank, environ, began)
            if path is not None and (calls := _read(rank, path)) is not None:
                found[rank] = calls
                asked.remove(rank)
        time.sleep(_LOOK_SECONDS)
    return found


def _request(rank: int, environ: Mapping[str, str]) -> bool:
    if not (stem := environ.get(PIPES)):
        return False
    try:
        pipe = os.open(f"{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        with open(pipe, "wb", buffering=0) as file:
            file.write(b"1\n")
    except OSError:  # there is none, or nobody reads it
        return False
    return True


def _fresh_dump(rank: int, environ: Mapping[str, str], since: float) -> Path | None:
    for stem in _stems(environ):
        path = Path(f"{stem}{rank}")
        try:
            if path.stat().st_mtime >= since:
                return path
        except OSError:
            continue
    return None


def _stems(environ: Mapping[str, str]) -> Iterator[str]:
    yield from (environ[name] for name in _PLACES if environ.get(name))
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for name in _NAMES:
        yield os.path.join(cache, "torch", name)
        yield os.path.join("/tmp", name)  # noqa: S108 - where older torches write it


def _read(rank: int, path: Path) -> tuple[Recorded, ...] | None:
    """None while it is being written."""
    try:
        with path.open("rb") as file:
            return last_calls(read_dump(rank, file.read(MOST_BYTES)))
    except (OSError, UsageError):
        return None
