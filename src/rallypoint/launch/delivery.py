"""Who is sent a signal that reaches a launcher: whoever it is meant for, and who has not got it yet."""

from __future__ import annotations

import signal
import subprocess

from rallypoint.launch.command import Deliver
from rallypoint.launch.lost_agent import signal_ranks

_FOR_RANKS = ("SIGUSR1", "SIGUSR2")


def to_agent(folder: str, *, everybody_hears: bool) -> Deliver:
    """torchrun's agent, or its ranks themselves where torchrun passes nothing on; they report to `folder`.

    `everybody_hears`: whoever signals this process signals all processes of the job. Then only SIGTERM is
    passed on, in case that it was meant for this process alone: the agent does not mind to hear it again.
    """

    def deliver(agent: subprocess.Popen[bytes], number: int) -> None:
        name = signal.Signals(number).name
        if name == "SIGTERM" or not (everybody_hears or name in _FOR_RANKS):
            agent.send_signal(number)
        elif not everybody_hears:
            signal_ranks(folder, number)

    return deliver


def to_rank(*, everybody_hears: bool) -> Deliver:
    """The one rank that this launcher has; nobody, if the rank hears by itself: a signal counts once."""

    def deliver(rank: subprocess.Popen[bytes], number: int) -> None:
        if not everybody_hears:
            rank.send_signal(number)

    return deliver
