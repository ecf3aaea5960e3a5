"""What `rallypoint run` does if torchrun's agent is killed: it ends the ranks, which would run on unseen."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from rallypoint.launch.blame import signal_name
from rallypoint.launch.command import Ended
from rallypoint.launch.reports import VARIABLE, LostServer

if TYPE_CHECKING:
    import psutil

_GRACE_SECONDS = 2.0  # for ranks that want to end in order


def lost_agent(ended: Ended) -> LostServer:
    """An agent that a signal has ended, for the report."""
    name = f"torchrun's agent (process {ended.pid} on {socket.gethostname()})"
    return LostServer(name, f"has ended by signal {signal_name(-ended.code)}", time.time())


def end_ranks(folder: str) -> None:
    """Tell the ranks that report to a folder to end, and kill those that run 2 seconds later.

    Not what they have started in sessions of their own: torchrun leaves that alone, too.
    """
    if sys.platform == "win32":  # there is no group of processes to end
        return
    import psutil  # late: hardly any job needs it

    ranks = _find_ranks(folder)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            try:
                os.killpg(rank.pid, number)
            except OSError:
                pass  # it has just ended
        _, ranks = psutil.wait_procs(ranks, _GRACE_SECONDS)


def _find_ranks(folder: str) -> list[psutil.Process]:
    """The processes that the agent has started: the eldest of each rank, as its children inherit RANK."""
    import psutil

    eldest: dict[str, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            rank = environ.get("RANK", "") if environ.get(VARIABLE) == folder else ""
            if rank and (rank not in eldest or process.create_time() < eldest[rank].create_time()):
                eldest[rank] = process
        except psutil.Error:  # it has ended, or is another user's
            continue
    return list(eldest.values())
