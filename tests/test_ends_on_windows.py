"""How torchrun's agent ends ranks on Windows, told by values: the system itself is in tests/windows."""

from __future__ import annotations

import io
import signal

from rallypoint.pytorch.agent import _close_rank


class _Rank:
    """What torchrun has of a rank: its process, and the files with what it prints."""

    def __init__(self) -> None:
        self.ends = 0
        self.proc = self
        self._stdout = io.StringIO()
        self._stderr = None

    def terminate(self) -> None:
        self.ends += 1


def test_a_rank_has_time_after_ctrl_c_and_is_then_ended() -> None:
    rank = _Rank()
    _close_rank(rank, signal.SIGINT)
    assert (rank.ends, rank._stdout.closed) == (0, False)
    _close_rank(rank, 0)  # CTRL_C_EVENT, by which torchrun would end it
    assert (rank.ends, rank._stdout.closed) == (1, True)
