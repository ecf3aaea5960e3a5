"""The first steps of a process that does nothing but serve a store: its log, its limits."""

from __future__ import annotations

import gc
import logging
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

from rallypoint.errors import UsageError
from rallypoint.server.machine.memory import memory_bytes
from rallypoint.text import printable_lines
from rallypoint.wire.limits import Limits

_LINE_CHARACTERS = 3_000


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # not subscriptable before Python 3.11


class DroppingHandler(_StreamHandler):
    """Logs to standard error, but drops lines that nobody reads: a server must not stand still for its log.

    A pipe that can be written takes at least 4,096 bytes at once, so lines are cut to less than that. What
    clients have sent may be part of a line: a terminal obeys nothing in it.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_room():
            self._dropped += 1
            return
        if self._dropped:
            record.msg = f"({self._dropped} lines were lost, as nobody read them) {record.msg}"
            self._dropped = 0
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = printable_lines(super().format(record)[: 2 * _LINE_CHARACTERS])
        return text if len(text) <= _LINE_CHARACTERS else text[:_LINE_CHARACTERS] + " …"

    def _has_room(self) -> bool:
        if sys.stderr is None:
            return False
        if sys.platform == "win32":  # only sockets can be asked there
            return True
        try:
            return bool(select.select([], [sys.stderr], [], 0)[1])
        except (OSError, ValueError):
            return False


LIMITS_VARIABLE = "RALLYPOINT_LIMITS"

ANSWER_MARK = "rallypoint answers: "
"""Stands before the one line by which a hosted process answers its parent."""

EVENTS_VARIABLE = "RALLYPOINT_EVENTS"
"""The file to which store servers write their events that are no command of their own."""

# A collection looks at every object. Connections come and go without leaving cycles, so a storm of
# them should not set off one collection after the other, as the default of 700 would.
_COLLECT_AFTER = 100_000


def settle_in(log_level: int) -> None:
    """Make this process fit for many connections, and log to standard error without ever waiting for it."""
    logging.basicConfig(handlers=[DroppingHandler()], level=log_level, format="rallypoint: %(message)s")
    _raise_file_limit()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def limits_of_environment() -> Limits:
    """The limits for this machine, as the variable RALLYPOINT_LIMITS changes them.

    That has NAME=VALUE pairs, with commas between them.
    """
    memory = memory_bytes()
    limits = Limits() if memory is None else Limits(held_bytes=max(memory // 4, 1))
    try:
        return limits.override(filter(None, os.environ.get(LIMITS_VARIABLE, "").split(",")))
    except UsageError as error:
        raise UsageError(f"the variable {LIMITS_VARIABLE}: {error.message}", hint=error.hint) from None


def _raise_file_limit() -> None:
    if sys.platform == "win32":
        return
    import resource

    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (most, 10_240):  # macOS says "unlimited", but allows no more than this
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, soft), most))
        except (OSError, ValueError):
            continue
        return
