"""Which rank or server of a job failed first, and which failures only followed from that. Pure.

When a rank or the store dies, the others lose their connections to it and fail as well, often with longer
messages. The first cause is the earliest failure that is not of that kind.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.exits import ENDED_BY_CONSOLE, exit_text, hint_for, signal_name
from rallypoint.launch.reports import Exit, Failure, LostServer
from rallypoint.text import shown


@dataclass(frozen=True)
class FailureSummary:
    """Which rank failed first and how, its own traceback, and which ranks only followed."""

    headline: str
    detail: str
    followers: tuple[str, ...]
    cause: Failure | None = None
    """The failure that came first; None if that process ended without a report."""
    hint: str = ""
    """Why a process may have ended without a traceback."""
    exit: Exit | None = None
    """How the rank ended that came first, if it left no report."""

    @property
    def rank(self) -> int:
        """The rank that came first; -1 if it was a server or a launcher."""
        if self.exit is not None:
            return self.exit.rank
        return self.cause.who.rank if self.cause is not None else -1

    @property
    def is_timeout(self) -> bool:
        """Whether the rank that came first had waited for too long."""
        return self.cause is not None and self.cause.is_timeout


def find_blame(
    failures: Sequence[Failure], exits: Sequence[Exit], lost: Sequence[LostServer] = ()
) -> FailureSummary | None:
    """The first cause; None if no process has reported a failure. All come in the order of time."""
    last_try = max((failure.who.tries for failure in failures), default=0)
    # The launcher itself does not count tries.
    told = [failure for failure in failures if failure.who.tries == last_try or failure.who.rank < 0]
    silent = [each for each in exits if each.rank not in {failure.who.rank for failure in told}]
    crash = next((each for each in silent if _is_crash(each)), None)
    cause = next((failure for failure in told if not failure.follows), None)
    # torchrun notes whole seconds: in the same second, an exception is the likelier cause.
    if crash is not None and (cause is None or crash.time < int(cause.time)):
        return _of_crash(crash, told)
    if lost and (cause is None or lost[0].time < cause.time):
        return _of_server(lost[0], told)
    cause = cause or (told[0] if told else None)
    return _of_exception(cause, told) if cause is not None else None


def _of_exception(cause: Failure, told: Sequence[Failure]) -> FailureSummary:
    if cause.who.rank < 0:  # the launcher's own traceback would only show torchrun's insides
        headline, detail = f"{cause.name}: {cause.headline}", cause.message
    else:
        headline, detail = f"{cause.name} failed first: {cause.headline}", cause.traceback
    return FailureSummary(headline, detail, _followers(told, cause), cause)


def _of_crash(crash: Exit, told: Sequence[Failure]) -> FailureSummary:
    how = f"ended by {signal_name(-crash.code)}" if crash.code < 0 else f"ended with {exit_text(crash.code)}"
    hint = hint_for(how) or "it left no traceback: see what it printed above"
    headline = f"rank {crash.rank} (process {crash.pid}) {how}"
    return FailureSummary(headline, "", _followers(told, None), hint=hint, exit=crash)


def _of_server(lost: LostServer, told: Sequence[Failure]) -> FailureSummary:
    headline = f"{lost.server} {lost.how}"
    return FailureSummary(headline, "", _followers(told, None), hint=hint_for(lost.how))


def _is_crash(each: Exit) -> bool:
    """Whether a rank without a report ended by itself, and not because it was told to."""
    return each.code not in (0, -signal.SIGTERM, ENDED_BY_CONSOLE)


def _followers(told: Sequence[Failure], cause: Failure | None) -> tuple[str, ...]:
    return tuple(f"{failure.name}: {shown(failure.kind)}" for failure in told if failure is not cause)
