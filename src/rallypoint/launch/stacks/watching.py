"""Watching the ranks of one machine: whether to, how their processes are told, and where it is said."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rallypoint.errors import NotOursError, RallypointError
from rallypoint.launch import reports
from rallypoint.launch.endpoint import Endpoint, parse_endpoint
from rallypoint.launch.environment import inject
from rallypoint.launch.stacks.asking import forget_all
from rallypoint.launch.stacks.channel import StoreChannel
from rallypoint.launch.stacks.flight import with_pipes
from rallypoint.launch.stacks.sampler import Sampler
from rallypoint.launch.stacks.switch import SIGNALS_VARIABLE, stack_signals, stall_seconds
from rallypoint.rollcall.question import Question
from rallypoint.stores.client.deadline import Deadline
from rallypoint.stores.client.look import look

_PROBE_SECONDS = 5.0

Say = Callable[[list[str]], None]


def answering(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for ranks that are to answer this process; as it is, if they are not to be asked."""
    signals, folder = stack_signals(environ), reports.folder_of(environ)
    if not signals or folder is None:
        return dict(environ)
    return inject({**with_pipes(environ, folder), SIGNALS_VARIABLE: ",".join(map(str, signals))})


class RankWatch:
    """torchrun's agent: its ranks are watched, round by round, unless its own launcher does."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._sampler: Sampler | None = None
        self._held = ExitStack()
        self._is_wanted = bool(stack_signals()) and SIGNALS_VARIABLE not in os.environ
        self._seconds = stall_seconds()
        if self._is_wanted:
            if reports.folder_of(os.environ) is None:  # a torchrun of the user's own
                os.environ[reports.VARIABLE] = str(self._held.enter_context(reports.new_folder()))
            os.environ.update(answering(os.environ))

    def start(self, place: Endpoint, head: Endpoint) -> None:
        """Watch the ranks of a round. They find the store at `place`, which may be a relay of `head`."""
        folder = reports.folder_of(os.environ)
        if self._is_wanted and folder is not None:
            self._sampler = Sampler(
                folder, stack_signals(), self._seconds, lambda: StoreChannel(place, head), self._say
            )

    def stop(self) -> None:
        """The round is over: its ranks are no more."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
            folder = reports.folder_of(os.environ)
            if folder is not None:
                forget_all(folder)

    def close(self) -> None:
        self.stop()
        self._held.close()


@contextmanager
def watching(folder: Path, environ: Mapping[str, str], say: Say) -> Iterator[None]:
    """Watch the ranks that a command starts, as they report themselves."""
    signals = stack_signals(environ)
    if not signals:
        yield
        return
    found = reports.Reports(folder)
    sampler = Sampler(folder, signals, stall_seconds(environ), lambda: _channel(found.store()), say, environ)
    try:
        yield
    finally:
        sampler.stop()


def _channel(store: str) -> StoreChannel | None:
    """The way to a store, if it is one of Rallypoint's."""
    if not store:
        return None
    place = parse_endpoint(store)
    try:
        look(*place, Question(), Deadline(_PROBE_SECONDS))
        return StoreChannel(place, place)
    except (NotOursError, RallypointError):
        return None
