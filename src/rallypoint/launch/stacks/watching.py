"""Watch the ranks of this machine: a thread of the launcher samples them and reports to the job's store.

`answering` makes the environment in which ranks answer; `watching`, and `RankWatch` for torchrun's agent,
start the thread. It takes a sample every few seconds, reports it to the store, and keeps it for the report of
a failure. When ranks have waited for others for as long as is allowed, it takes a few more samples in a row.
If the ranks have not moved, it combines the reports of all machines and writes the result into the store,
once; the launcher that has rank 0 prints it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from rallypoint.client.snapshots import fetch_snapshot
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import NotOursError, RallypointError
from rallypoint.launch import reports
from rallypoint.launch.endpoint import Endpoint, StoreView, parse_endpoint
from rallypoint.launch.environment import inject
from rallypoint.launch.handover import read_handover
from rallypoint.launch.stacks import stack_signals, stall_seconds
from rallypoint.launch.stacks.activity import MachineActivity, pack
from rallypoint.launch.stacks.flight_recorder import read_recorders, with_pipes
from rallypoint.launch.stacks.progress import JobActivity, activity_of, put_together
from rallypoint.launch.stacks.sampling import RankSampler, forget_all
from rallypoint.launch.stacks.system import gpus_of
from rallypoint.launch.stacks.words import stall_lines
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.identity import Role
from rallypoint.store.rollcall.question import STALL, STALL_BYTES, Question
from rallypoint.store.server.process.hosting import HostedServer, host_server
from rallypoint.text import duration, printable_lines

logger = logging.getLogger("rallypoint.stacks")

_STORE_SECONDS: Final = 5.0
_STOP_SECONDS: Final = 2.0
_CLOSER_SAMPLES: Final = 3
_CLOSER_SECONDS: Final = 0.1
_ALARM_SECONDS: Final = 0.1
"""The time between two checks for an alarm."""
_SETTLING_SECONDS: Final = 0.2
"""From the first rank that fails to those that fail with it."""

Say = Callable[[list[str]], None]


class StoreChannel:
    """The store of a job, which is one of Rallypoint's.

    `place` is where the ranks of this machine find it, which may be a relay; `view`, where snapshots are
    requested. A `server` that was started for this ends with it. Each method may raise RallypointError.
    """

    def __init__(self, place: Endpoint, view: StoreView, server: HostedServer | None = None) -> None:
        self._view = view
        self._server = server
        self._store = TCPStore(*place, timeout=_STORE_SECONDS, role=Role.AGENT)

    @property
    def address(self) -> str:
        """Where `rallypoint stacks` can read it."""
        return self._view.address

    def report(self, text: str) -> None:
        """Have this machine's activity sent to clients that request a snapshot of the store."""
        self._store.report(text)

    def activity(self) -> JobActivity:
        """What the ranks of all machines do."""
        view = self._view
        return activity_of(fetch_snapshot(*view.place, Question(), Deadline(_STORE_SECONDS), view.name))

    def announce(self, text: str) -> bool:
        """Write the report of a stall; False if another launcher has written one."""
        return self._store.compare_set(STALL, "", text) == text.encode()

    def announced(self) -> str:
        """The report of the stall; empty if the job makes progress."""
        if not self._store.check([STALL]):
            return ""
        # Anybody may have written it.
        return printable_lines(bytes(self._store.get(STALL))[:STALL_BYTES].decode(errors="replace"))

    def withdraw(self) -> None:
        """Remove the report: the job makes progress again."""
        self._store.delete_key(STALL)

    def close(self) -> None:
        self._store.close()
        if self._server is not None:
            self._server.release()


class StallWatch:
    """The thread. `say` prints lines; `connect` makes the channel, given whether the job stands still."""

    def __init__(
        self,
        folder: Path,
        signals: Sequence[int],
        stall_seconds: float,
        connect: Callable[[bool], StoreChannel | None],
        say: Say,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`environ` is that of the ranks."""
        self._environ = environ
        self._folder = folder
        self._ranks = RankSampler(folder, signals, stall_seconds)
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
        """Stop sampling. A sample that is being taken has no effect any more."""
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)
        self._leave_channel()

    def _run(self) -> None:
        pause = self._ranks.pace.every
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
                self._ranks.release_failed()

    def _pause(self, seconds: float) -> str | None:
        """Wait until the next sample is due; the reason if it is due early."""
        end = time.monotonic() + seconds
        while not self._stopped.wait(min(max(end - time.monotonic(), 0.0), _ALARM_SECONDS)):
            alarm = self._ranks.alarm()
            if alarm is not None and not self._stopped.wait(_SETTLING_SECONDS):
                return self._ranks.alarm() or alarm
            self._ranks.update_timeouts()
            end = min(end, time.monotonic() + self._ranks.pace.every)
            if time.monotonic() >= end:
                break
        return None

    def _turn(self, alarm: str | None) -> float:
        """Take a sample, and report what it shows; how long to wait before the next one."""
        machine = self._ranks.sample(is_brief=alarm is not None)
        if not machine.ranks:
            return self._ranks.pace.every
        reason, own = alarm or "", put_together([machine])
        if alarm and any(each.doing.waits for each in own.groups):
            self._is_alarmed = True
        elif not self._may_be_stalled(own):
            self._is_gathered = self._is_alarmed = False
        elif not self._is_gathered and alarm is None:
            machine = self._sample_again(machine)
            pace, own = self._ranks.pace, put_together([machine])
            if own.waiting_seconds >= pace.before_timeout:
                reason = f"a time-out of {duration(pace.timeout)} is about to strike"
        if not self._stopped.is_set():
            reports.ACTIVITY.leave(machine, self._folder)
            self._report(machine, own, reason)
        return self._next_pause(machine)

    def _next_pause(self, machine: MachineActivity) -> float:
        """The next sample is due as soon as the time of a rank that stands still is over."""
        pace = self._ranks.pace
        left = [most - each.still_seconds for each in machine.ranks for most in (pace.waiting, pace.stall)]
        left += [pace.stall - each.idle_seconds for each in machine.ranks if each.idle_seconds >= 0]
        return min([pace.every, *(each + _CLOSER_SECONDS for each in left if each > 0)])

    def _leave_channel(self) -> None:
        channel, self._channel, self._has_announced = self._channel, None, False
        if channel is not None:
            channel.close()

    def _may_be_stalled(self, own: JobActivity) -> bool:
        """Whether no rank of this machine makes progress; if so, the other machines are checked as well."""
        return self._is_urgent(own) or own.idle_seconds >= self._ranks.pace.stall

    def _is_urgent(self, own: JobActivity) -> bool:
        """Whether a rank has waited for so long that the others do not matter."""
        pace = self._ranks.pace
        # After an alarm, they stand still until they move.
        return own.waiting_seconds >= (pace.every if self._is_alarmed else pace.urgent)

    def _sample_again(self, machine: MachineActivity) -> MachineActivity:
        """Take a few samples in a row: they show a rank that trains at more than one place.

        If it is a stall, collect what takes long, once.
        """
        for _ in range(_CLOSER_SAMPLES):
            if self._stopped.wait(_CLOSER_SECONDS):
                break
            machine = self._ranks.sample()
            if not self._may_be_stalled(put_together([machine])):
                return machine
        gpus = gpus_of({each.pid for each in machine.ranks})
        recorded = read_recorders((each.rank for each in machine.ranks), self._environ)
        self._is_gathered = True
        ranks = []
        for each in machine.ranks:
            facts = replace(each.facts, gpu=gpus.get(each.pid, ""))
            ranks.append(replace(each, facts=facts, recorded=recorded.get(each.rank, ())))
        return replace(machine, ranks=tuple(ranks))

    def _report(self, machine: MachineActivity, own: JobActivity, reason: str) -> None:
        """Report to the store; if it is a stall, write once what all machines do."""
        stall = self._ranks.pace.stall
        is_stalled = self._is_alarmed or self._is_urgent(own)
        has_first = any(each.rank == 0 for each in machine.ranks)
        if self._channel is None:
            self._channel = self._connect(is_stalled or own.is_stalled(stall))
        channel = self._channel
        if channel is None:
            is_stalled = is_stalled or own.is_stalled(stall)
            self._say_stall((self._said or _text(own, reason)) if is_stalled else "", says=has_first)
            return
        channel.report(pack(machine))
        living = (each for each in machine.ranks if not each.ended)
        # One launcher reads all, and only if its own ranks may be stuck: the snapshot of a large job is long.
        if has_first and all(max(each.idle_seconds, each.still_seconds) >= stall for each in living):
            is_stalled = is_stalled or _activity_of_all(channel, own).is_stalled(stall)
        if is_stalled and not self._has_announced and not channel.announced():
            self._has_announced = channel.announce(_text(_activity_of_all(channel, own), reason))
        elif self._has_announced and not is_stalled:
            channel.withdraw()
            self._has_announced = False
        if has_first or is_stalled or self._said:
            self._say_stall(channel.announced(), says=has_first)

    def _say_stall(self, text: str, *, says: bool) -> None:
        """Keep it for the report of a failure. Print it once, and once that it is over: that takes a second
        sample, as ranks that are being ended move as well.
        """
        if text == self._said or self._stopped.is_set():
            self._may_be_over = False
            return
        if not text and not self._may_be_over:
            self._may_be_over = True
            return
        self._said, self._may_be_over = text, False
        reports.STALL.leave(text, self._folder)
        lines = text.splitlines() if text else ["the ranks go on"]
        if text and self._channel is not None:
            lines.append(f"see `rallypoint stacks {self._channel.address}`")
        if says:
            self._say(lines)


def _activity_of_all(channel: StoreChannel, own: JobActivity) -> JobActivity:
    """What all machines report; only `own` where a snapshot does not show that, as behind a relay."""
    found = channel.activity()
    return found if found.main is not None else own


def _text(activity: JobActivity, reason: str) -> str:
    text = "\n".join(stall_lines(activity))
    return f"{reason}: {text}" if reason else text


# The ranks of an agent, and of a command -------------------------------------------------------------------


def answering(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which ranks answer this process; unchanged if stacks are switched off."""
    signals, given = stack_signals(environ), read_handover(environ)
    if not signals or given.reports is None:
        return dict(environ)
    return inject({**with_pipes(environ, given.reports), **given._replace(signals=signals).variables()})


class RankWatch:
    """torchrun's agent: its ranks are watched, round by round, unless its own launcher does.

    They have the environment of this process, so that is changed while a round goes on.
    """

    def __init__(self, say: Say, *, is_wanted: bool) -> None:
        self._say = say
        self._signals = stack_signals() if is_wanted and not read_handover(os.environ).signals else ()
        self._seconds = stall_seconds()
        self._folder = ExitStack()
        self._round = ExitStack()

    def start(self, place: Endpoint, view: StoreView) -> None:
        """Watch the ranks of a round. They find the store at `place`, which may be a relay."""
        if not self._signals:
            return
        given = read_handover(os.environ)
        folder = given.reports
        if folder is None:  # a torchrun of the user's own
            try:
                folder = self._folder.enter_context(reports.new_folder())
            except OSError as error:
                self._signals = ()
                self._say([f"what the ranks do is not looked at: no temporary folder ({error.strerror})"])
                return
        forget_all(folder)  # of the round before
        ours = given._replace(reports=folder).variables()
        self._round.enter_context(_changed(answering({**os.environ, **ours})))
        watch = StallWatch(
            folder, self._signals, self._seconds, lambda _: StoreChannel(place, view), self._say
        )
        self._round.callback(watch.stop)

    def stop(self) -> None:
        """The round is over: its ranks are no more."""
        self._round.close()

    def close(self) -> None:
        self.stop()
        self._folder.close()


@contextmanager
def _changed(environ: Mapping[str, str]) -> Iterator[None]:
    """The environment of this process is that one, until the block is left."""
    changed = {name: value for name, value in environ.items() if os.environ.get(name) != value}
    before = {name: os.environ[name] for name in changed if name in os.environ}
    os.environ.update(changed)
    try:
        yield
    finally:
        os.environ.update(before)
        for name in changed.keys() - before.keys():
            os.environ.pop(name, None)


@contextmanager
def watching(folder: Path, environ: Mapping[str, str], say: Say) -> Iterator[None]:
    """Watch the ranks that a command starts, as they report themselves."""
    signals = stack_signals(environ)
    if not signals:
        yield
        return
    connect = partial(_channel, reports.Reports(folder))
    watch = StallWatch(folder, signals, stall_seconds(environ), connect, say, environ)
    try:
        yield
    finally:
        watch.stop()


def _channel(found: reports.Reports, is_stalled: bool) -> StoreChannel | None:
    """The way to the job's store; if that is torch's, to a server for `rallypoint stacks`, once it stalls."""
    store = found.store()
    if not store:
        return None
    place = parse_endpoint(store)
    server = None
    try:
        try:
            fetch_snapshot(*place, Question(), Deadline(_STORE_SECONDS))
        except NotOursError:
            if not is_stalled:
                return None
            server = host_server("localhost", 0)
            place = Endpoint(*server.address)
        return StoreChannel(place, StoreView(place), server)
    except RallypointError:
        return None
