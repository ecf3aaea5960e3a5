"""Reports what a launcher waits for: one line after 10, 30 and 60 seconds, then every minute.

A thread of its own prints the lines, because a call that connects or waits may block for a long time. The
launcher reads the latest state from its folder of reports: for the line on a terminal, and for Ctrl-C.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import psutil

from rallypoint.errors import RallypointError
from rallypoint.launch import reports
from rallypoint.launch.endpoint import Endpoint
from rallypoint.store.connect.connecting import SILENT, UNRESOLVED, Attempts, connect
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import is_this_machine
from rallypoint.store.rollcall.identity import Role
from rallypoint.text import LONGEST_SENTENCE, shown

logger = logging.getLogger("rallypoint.meeting")

_UPDATE_SECONDS = 2.0
"""Between two states that are written down for the launcher, unless they take others' time."""
_START_SECONDS = 9.0  # importing torch may take longer; then the first line comes after a second

_CONNECTING = {
    UNRESOLVED: "cannot resolve {host}. Check the spelling or /etc/hosts",
    errno.ECONNREFUSED: "cannot connect to {place}: connection refused. Is a launcher running there, on this "
    "port?",
    errno.ETIMEDOUT: "no answer from {place}. A firewall?",
    SILENT: "{place} accepts connections but does not answer. Is it a Rallypoint launcher?",
}


def next_report(elapsed: float) -> float:
    """After how many seconds the next line is due."""
    return next((each for each in (10.0, 30.0) if each > elapsed), 60.0 * (elapsed // 60 + 1))


def connecting_state(attempts: Sequence[Attempts], seconds_left: float) -> str:
    """Why no store has answered yet."""
    if len(attempts) == 1:
        [each] = attempts
        meaning = _CONNECTING.get(each.code, "cannot connect to {place}: {reason}")
        text = meaning.format(host=each.host, place=each.place, reason=each.reason)
    else:
        listed = ", ".join(f"{each.place} ({each.reason})" for each in attempts)
        text = f"no store answers at {listed}. Does `rallypoint serve --engine` run there?"
    return f"{text} ({seconds_left:.0f} s left)"


class Waiting:
    """A block that waits; `describe` says what for. Errors of Rallypoint say so themselves."""

    def __init__(
        self, describe: Callable[[], str], *, at_start: bool = True, update_seconds: float = _UPDATE_SECONDS
    ) -> None:
        """`at_start`: whether this process has been silent since it began."""
        age = time.time() - psutil.Process().create_time() if at_start else 0.0
        self._began = time.monotonic() - min(max(age, 0.0), _START_SECONDS)
        self._describe = describe
        self._update_seconds = max(update_seconds, _UPDATE_SECONDS)
        self._state = "waiting"
        self._has_launcher = reports.folder_of(os.environ) is not None
        self._stopped = threading.Event()
        self._reporting = threading.Lock()

    def __enter__(self) -> None:
        threading.Thread(target=self._run, name="rallypoint waiting", daemon=True).start()

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        with self._reporting:
            self._stopped.set()
            if kind is None:
                reports.WAITING.leave("")
            elif kind.__name__ in ("KeyboardInterrupt", "SignalException") and not self._has_launcher:
                self._print()

    def _run(self) -> None:
        reported = ""
        due = next_report(self._elapsed)
        while not self._stopped.wait(min(self._update_seconds, max(due - self._elapsed, 0.0))):
            is_due = self._elapsed >= due
            if is_due:
                due = next_report(self._elapsed)
            try:
                state = shown(self._describe(), LONGEST_SENTENCE)
            except RallypointError:
                continue  # the call that waits raises the error
            with self._reporting:
                if self._stopped.is_set():
                    return
                self._state = state
                reports.WAITING.leave(state)
                if is_due and state != reported:  # a state without a deadline stays as it is
                    reported = state
                    self._print()

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _print(self) -> None:
        if self._has_launcher:
            reports.erase_live_line()
        logger.warning("rallypoint: %s", self._state)


def await_host(endpoint: Endpoint, deadline: Deadline, hosts: bool | None = None) -> bool:
    """Whether this machine holds the endpoint, as soon as that is certain; `hosts`: what the user says.

    It does not when something answers there. Until then it is asked again and again whose the name is: in
    Kubernetes a pod is up some seconds before its name is in the cluster's DNS, and the name of a pod that
    was replaced leads to the old address for a while. ConnectError when neither is so by the deadline.
    """
    if hosts or (hosts is None and is_this_machine(endpoint.host)):
        return True

    def check(addresses: Sequence[str]) -> None:
        if hosts is None and any(map(is_this_machine, addresses)):
            raise _IsHere

    attempts = Attempts(*endpoint)
    try:
        with Waiting(lambda: connecting_state([attempts], deadline.remaining)):
            connect(*endpoint, deadline, who_am_i(Role.AGENT), attempts=attempts, after_try=check).close()
    except _IsHere:
        return True
    return False


class _IsHere(Exception):  # noqa: N818 - it ends the tries, and is no error
    """The name has turned out to be this machine's."""
