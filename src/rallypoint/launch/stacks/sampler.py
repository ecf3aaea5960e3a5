"""Looking at the ranks of this machine every few seconds: a thread of the launcher.

It tells the store what they do, and keeps it for the report of a failure. When ranks have waited for others
for as long as is allowed, it looks closer for a moment. If they have not moved, it puts together what all
machines tell, and writes that into the store, once; the launcher that has rank 0 says it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rallypoint.errors import RallypointError
from rallypoint.launch import reports
from rallypoint.launch.stacks.activity import MachineActivity, pack
from rallypoint.launch.stacks.channel import StoreChannel
from rallypoint.launch.stacks.flight_recorder import ask_recorders
from rallypoint.launch.stacks.gpus import gpus_of
from rallypoint.launch.stacks.grouping import Work, put_together
from rallypoint.launch.stacks.looking import Looker
from rallypoint.launch.stacks.words import stall_lines
from rallypoint.text import duration

logger = logging.getLogger("rallypoint.launch.stacks")

_STOP_SECONDS: Final = 2.0
_CLOSER_LOOKS: Final = 3
_CLOSER_SECONDS: Final = 0.1
_ALARM_SECONDS: Final = 0.1
"""How often it is looked for an alarm."""
_SETTLING_SECONDS: Final = 0.2
"""From the first rank that fails to those that fail with it."""


class Sampler:
    """The thread. `say` prints lines; `connect` makes the channel, given whether the job stands still."""

    def __init__(
        self,
        folder: Path,
        signals: Sequence[int],
        stall_seconds: float,
        connect: Callable[[bool], StoreChannel | None],
        say: Callable[[list[str]], None],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`environ` is that of the ranks."""
        self._environ = environ
        self._folder = folder
        self._looker = Looker(folder, signals, stall_seconds)
        self._connect = connect
        self._channel: StoreChannel | None = None
        self._say = say
        self._said = ""
        self._may_be_over = False
        self._is_alarmed = False
        self._is_gathered = False
        self._has_announced = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rallypoint stacks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more. What is under way has no effect any more."""
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)
        self._leave_channel()

    def _run(self) -> None:
        pause = self._looker.pace.every
        while True:
            alarm = self._pause(pause)
            if self._stopped.is_set():
                return
            try:
                pause = self._turn(alarm)
            except RallypointError:
                self._leave_channel()  # the store is away, or gone: others report that
            except Exception:  # the job goes on without being watched
                logger.warning("what the ranks do is not looked at any more", exc_info=True)
                return
            finally:
                self._looker.let_end()

    def _pause(self, seconds: float) -> str | None:
        """Wait for the next look; why it comes earlier, if it does."""
        end = time.monotonic() + seconds
        while not self._stopped.wait(min(max(end - time.monotonic(), 0.0), _ALARM_SECONDS)):
            alarm = self._looker.alarm()
            if alarm is not None and not self._stopped.wait(_SETTLING_SECONDS):
                return self._looker.alarm() or alarm
            self._looker.learn()
            end = min(end, time.monotonic() + self._looker.pace.every)
            if time.monotonic() >= end:
                break
        return None

    def _turn(self, alarm: str | None) -> float:
        """Look once, and say what there is to say; how long to wait before the next time."""
        machine = self._looker.look(is_brief=alarm is not None)
        if not machine.ranks:
            return self._looker.pace.every
        reason = alarm or ""
        if alarm and any(each.doing.waits for each in put_together([machine]).groups):
            self._is_alarmed = True
        elif not self._may_be_stalled(machine):
            self._is_gathered = self._is_alarmed = False
        elif not self._is_gathered and alarm is None:
            machine = self._look_closer(machine)
            pace = self._looker.pace
            if put_together([machine]).waiting_seconds >= pace.before_timeout:
                reason = f"a time-out of {duration(pace.timeout)} is about to strike"
        if not self._stopped.is_set():
            reports.report_activity(self._folder, machine)
            self._share(machine, reason)
        return self._next_pause(machine)

    def _next_pause(self, machine: MachineActivity) -> float:
        """The next look comes when the time of a rank is over that stands still, and not a while later."""
        pace = self._looker.pace
        left = [most - each.still_seconds for each in machine.ranks for most in (pace.waiting, pace.stall)]
        left += [pace.stall - each.idle_seconds for each in machine.ranks if each.idle_seconds >= 0]
        return min([pace.every, *(each + _CLOSER_SECONDS for each in left if each > 0)])

    def _leave_channel(self) -> None:
        channel, self._channel, self._has_announced = self._channel, None, False
        if channel is not None:
            channel.close()

    # Looking ------------------------------------------------------------------------------------------------

    def _may_be_stalled(self, machine: MachineActivity) -> bool:
        """Whether no rank of this machine makes progress; what those of others do is asked then."""
        return self._is_urgent(machine) or put_together([machine]).idle_seconds >= self._looker.pace.stall

    def _is_urgent(self, machine: MachineActivity) -> bool:
        """Whether a rank has waited for so long that the others do not matter."""
        pace = self._looker.pace
        # After an alarm, they stand still until they move.
        return put_together([machine]).waiting_seconds >= (pace.every if self._is_alarmed else pace.urgent)

    def _look_closer(self, machine: MachineActivity) -> MachineActivity:
        """A few looks in a row: a rank that trains is seen at more than one place then.

        If it is a stall, what takes long is asked, once.
        """
        for _ in range(_CLOSER_LOOKS):
            if self._stopped.wait(_CLOSER_SECONDS):
                break
            machine = self._looker.look()
            if not self._may_be_stalled(machine):
                return machine
        gpus = gpus_of({each.pid for each in machine.ranks})
        recorded = ask_recorders((each.rank for each in machine.ranks), self._environ)
        ranks = (
            replace(
                each,
                facts=replace(each.facts, gpu=gpus.get(each.pid, "")),
                recorded=recorded.get(each.rank, ()),
            )
            for each in machine.ranks
        )
        self._is_gathered = True
        return replace(machine, ranks=tuple(ranks))

    # Telling ------------------------------------------------------------------------------------------------

    def _share(self, machine: MachineActivity, reason: str) -> None:
        """Tell the store, and say once what all machines do if it is a stall."""
        stall, own = self._looker.pace.stall, put_together([machine])
        is_stalled = self._is_alarmed or self._is_urgent(machine)
        has_first = any(each.rank == 0 for each in machine.ranks)
        if self._channel is None:
            self._channel = self._connect(is_stalled or own.is_stalled(stall))
        channel = self._channel
        if channel is None:
            is_stalled = is_stalled or own.is_stalled(stall)
            self._tell((self._said or _text(own, reason)) if is_stalled else "", says=has_first)
            return
        channel.tell(pack(machine))
        living = (each for each in machine.ranks if not each.ended)
        # One launcher asks, and only if its own ranks may be stuck: to look at a large job takes long.
        if has_first and all(max(each.idle_seconds, each.still_seconds) >= stall for each in living):
            is_stalled = is_stalled or _work(channel, own).is_stalled(stall)
        if is_stalled and not self._has_announced and not channel.announced():
            self._has_announced = channel.announce(_text(_work(channel, own), reason))
        elif self._has_announced and not is_stalled:
            channel.withdraw()
            self._has_announced = False
        if has_first or is_stalled or self._said:
            self._tell(channel.announced(), says=has_first)

    def _tell(self, text: str, *, says: bool) -> None:
        """Keep it for the report of a failure. Say it once, and once that it is over: that takes a second
        look, as ranks that are being ended move as well.
        """
        if text == self._said or self._stopped.is_set():
            self._may_be_over = False
            return
        if not text and not self._may_be_over:
            self._may_be_over = True
            return
        self._said, self._may_be_over = text, False
        reports.report_stall(self._folder, text)
        lines = text.splitlines() if text else ["the ranks go on"]
        if text and self._channel is not None:
            lines.append(f"see `rallypoint stacks {self._channel.address}`")
        if says:
            self._say(lines)


def _work(channel: StoreChannel, own: Work) -> Work:
    """What all machines tell; a look may not show that, as behind a relay."""
    work = channel.work()
    return work if work.main is not None else own


def _text(work: Work, reason: str) -> str:
    lines = stall_lines(work)
    return "\n".join([f"{reason}: {lines[0]}", *lines[1:]] if reason else lines)
