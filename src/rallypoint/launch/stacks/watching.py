"""Watching the ranks of one machine: whether to, how their processes are told, and where it is said."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from rallypoint.client.look import look
from rallypoint.errors import NotOursError, RallypointError
from rallypoint.launch import reports
from rallypoint.launch.endpoint import Endpoint, StoreView, parse_endpoint
from rallypoint.launch.environment import inject
from rallypoint.launch.handover import read_handover
from rallypoint.launch.stacks.asking import forget_all
from rallypoint.launch.stacks.channel import StoreChannel
from rallypoint.launch.stacks.flight_recorder import with_pipes
from rallypoint.launch.stacks.sampler import Sampler
from rallypoint.launch.stacks.switch import stack_signals, stall_seconds
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.rollcall.question import Question
from rallypoint.store.server.process.hosting import host_server

_PROBE_SECONDS = 5.0

Say = Callable[[list[str]], None]


def answering(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for ranks that are to answer this process; as it is, if they are not to be asked."""
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
        sampler = Sampler(
            folder, self._signals, self._seconds, lambda _: StoreChannel(place, view), self._say
        )
        self._round.callback(sampler.stop)

    def stop(self) -> None:
        """The round is over: its ranks are no more."""
        self._round.close()

    def close(self) -> None:
        self.stop()
        self._folder.close()


@contextmanager
def _changed(environ: Mapping[str, str]) -> Iterator[None]:
    """The environment of this process is that one, until the block is left."""
    names = [name for name, value in environ.items() if os.environ.get(name) != value]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update((name, environ[name]) for name in names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def watching(folder: Path, environ: Mapping[str, str], say: Say) -> Iterator[None]:
    """Watch the ranks that a command starts, as they report themselves."""
    signals = stack_signals(environ)
    if not signals:
        yield
        return
    found = reports.Reports(folder)
    sampler = Sampler(folder, signals, stall_seconds(environ), partial(_channel, found), say, environ)
    try:
        yield
    finally:
        sampler.stop()


def _channel(found: reports.Reports, is_stalled: bool) -> StoreChannel | None:
    """The way to the job's store; if that is torch's, to a server for `rallypoint stacks`, once it stalls."""
    store = found.store()
    if not store:
        return None
    place = parse_endpoint(store)
    server = None
    try:
        try:
            look(*place, Question(), Deadline(_PROBE_SECONDS))
        except NotOursError:
            if not is_stalled:
                return None
            server = host_server("localhost", 0)
            place = Endpoint(*server.address)
        return StoreChannel(place, StoreView(place), server)
    except RallypointError:
        return None
