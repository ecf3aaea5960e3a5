"""The ranks of torchrun's agent, as `rallypoint run` reaches them by itself.

If the agent is killed, it ends them, as they would run on unseen, and tells the other machines. And it sends
them the signals that torchrun does not pass on.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rallypoint.client.prefix import PrefixStore
from rallypoint.client.tcp import TCPStore
from rallypoint.codec import from_text, to_text
from rallypoint.errors import RallypointError
from rallypoint.exits import exit_text, signal_name
from rallypoint.launch.blame import LostServer
from rallypoint.launch.command import Ended
from rallypoint.launch.handover import read_handover
from rallypoint.launch.rendezvous.register import Register
from rallypoint.launch.rendezvous.roster import Ending, Member, RosterRequest, Size
from rallypoint.store.rollcall.identity import Role

if TYPE_CHECKING:
    import psutil

_FILE: Final = "member.json"
_POST_SECONDS: Final = 3.0
_LAST_VISIT: Final = 1 << 31  # however often the agent has come
_GRACE_SECONDS: Final = 2.0  # for ranks that want to end in order


def end_orphans(ended: Ended, folder: str) -> list[LostServer]:
    """End the ranks that an agent has left behind, and name the agent, for the report; [] if it left none.

    The ranks report to `folder`. Not what they have started in sessions of their own: torchrun leaves that
    alone, too.
    """
    if ended.code == 0 or (ended.code > 0 and sys.platform != "win32"):
        return []  # it has ended by itself, and then its ranks have ended before it
    ranks = _find_ranks(folder)
    if ended.code > 0 and not ranks:  # Windows: an exit code does not tell who has ended a process
        return []
    _end(ranks)
    name = f"torchrun's agent (process {ended.pid} on {socket.gethostname()})"
    by_signal = f"by signal {signal_name(-ended.code)}"
    how = by_signal if ended.code < 0 else f"with {exit_text(ended.code)} before its ranks"
    return [LostServer(name, f"has ended {how}", time.time())]


def signal_ranks(folder: str, number: int) -> None:
    """Send a signal to the ranks that report to a folder."""
    import psutil

    for rank in _find_ranks(folder):
        with suppress(psutil.Error):  # it has just ended
            rank.send_signal(number)


def _end(ranks: Sequence[psutil.Process]) -> None:
    """Tell ranks to end, and kill those that run 2 seconds later; on Windows, end them and their children."""
    import psutil  # late: hardly any job needs it

    if sys.platform == "win32":
        for process in [each for rank in ranks for each in (rank, *_children(rank))]:
            with suppress(psutil.Error):  # it has just ended
                process.kill()
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            with suppress(OSError):  # it has just ended
                os.killpg(rank.pid, number)
        _, ranks = psutil.wait_procs(ranks, _GRACE_SECONDS)


def _children(rank: psutil.Process) -> list[psutil.Process]:
    import psutil

    try:
        return rank.children(recursive=True)
    except psutil.Error:
        return []  # it has just ended


def _find_ranks(folder: str) -> list[psutil.Process]:
    """The processes that the agent has started: the eldest of each rank, as its children inherit RANK."""
    import psutil

    eldest: dict[str, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            rank = environ.get("RANK", "") if str(read_handover(environ).reports) == folder else ""
            if rank and (rank not in eldest or process.create_time() < eldest[rank].create_time()):
                eldest[rank] = process
        except psutil.Error:  # it has ended, or is another user's
            continue
    return list(eldest.values())


@dataclass(frozen=True)
class DeathNotice:
    """What an agent leaves to its launcher: how to report at the meeting place that it was killed.

    A launcher sees at once that its agent was killed. The other machines would miss it after some seconds
    without a sign of life.
    """

    host: str
    port: int
    prefix: str
    member: Member
    size: Size

    def leave_to(self, folder: Path) -> None:
        (folder / _FILE).write_text(to_text(self), encoding="utf-8")


def post_death_notice(folder: Path, how: str) -> None:
    """Report how the agent of this folder has ended. Does nothing if it had not joined a rendezvous."""
    try:
        left = from_text(DeathNotice, (folder / _FILE).read_text(encoding="utf-8"))
        with TCPStore(left.host, left.port, timeout=_POST_SECONDS, role=Role.AGENT) as store:
            register = Register(PrefixStore(left.prefix, store), left.member.id, left.size)
            leave = replace(left.member, visit=_LAST_VISIT)
            ending = Ending(f"torchrun's agent on {left.member} has ended {how}", time.time())
            register.post(RosterRequest(leave=leave, lost=True, ending=ending))
    except (OSError, ValueError, RallypointError):
        pass  # then it is missed, after a while
