"""How processes of a job fail; which rank or server failed first, and which only followed from that. Pure.

When a rank or the store dies, the others lose their connections to it and fail as well, often with longer
messages. The first cause is the earliest failure that is not of that kind. Each machine finds its own in this
way, and the rendezvous the first of all machines, by the same order (`launch.rendezvous.roster.Ending`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rallypoint.codec import from_text, to_text
from rallypoint.exits import ENDED_BY_CONSOLE, exit_text, hint_for, signal_name
from rallypoint.frames import Stack
from rallypoint.store.rollcall.identity import Identity
from rallypoint.text import LONGEST_SENTENCE, shown

if TYPE_CHECKING:
    from rallypoint.explain.events import Event
    from rallypoint.launch.rendezvous.roster import Ending

_LINES_SENT, _FRAMES_SENT, _MESSAGE_SENT = 12, 8, 2000

_FOLLOWS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|should dump"
    r"|[Ff]ailed to recv, got 0 bytes|recvValue failed|sendBytes failed|[Rr]emote process exited"
    r"|ncclRemoteError|Application timeout caused pair closure|Stop_waiting response is expected"
    r"|closed the connection|was lost: the server closed it"
)
_FOLLOWERS = ("RendezvousClosedError",)
_TIMEOUT = re.compile(r"tim(?:ed|e|ing)[ -]?out", re.IGNORECASE)


@dataclass(frozen=True)
class RankIdentity(Identity):
    """The identity of a process, with what else the launcher's variables say; -1 where they say nothing."""

    local_world_size: int = -1
    tries: int = 0
    """How often the job had been started again when this process was started."""
    store: str = ""
    """Where the store is that it has reached, HOST:PORT; empty: not told."""
    timeout_seconds: float = 0.0
    """The time-out of its process group; 0: not known."""


@dataclass(frozen=True)
class Failure:
    """An exception that ended a process."""

    who: RankIdentity
    time: float
    kind: str
    message: str
    traceback: str
    stack: Stack = ()
    """Where it was raised, the innermost frame first."""
    program: str = ""
    """The file name of a script or program that is no rank; empty for a rank, and for torchrun's agent."""

    @property
    def is_timeout(self) -> bool:
        """Whether the process had waited for too long."""
        return bool(_TIMEOUT.search(f"{self.kind} {self.message}"))

    @property
    def follows(self) -> bool:
        """Whether it only follows from another rank's failure: a connection to it was lost."""
        return self.kind in _FOLLOWERS or bool(_FOLLOWS.search(self.message))

    @property
    def name(self) -> str:
        """The process that failed."""
        name = f"rank {self.who.rank}" if self.who.rank >= 0 else shown(self.program) or "the launcher"
        return f"{name} (process {self.who.pid} on {shown(self.who.host)})"

    @property
    def headline(self) -> str:
        """The exception, in a line."""
        lines = self.message.strip().splitlines()
        return shown(f"{self.kind}: {lines[0]}" if lines else self.kind, LONGEST_SENTENCE)


@dataclass(frozen=True)
class Exit:
    """How a rank ended, as its agent saw it; a negative code is a signal's number."""

    rank: int
    pid: int
    code: int
    time: float
    local_rank: int = -1
    host: str = ""


@dataclass(frozen=True)
class LostServer:
    """A server that the job needs, and that is gone although nobody has told it to end."""

    server: str
    """Which server, on which machine."""
    how: str
    """What happened to it: `has ended by signal SIGKILL`."""
    time: float


@dataclass(frozen=True)
class FailureSummary:
    """Which rank failed first and how, and its own traceback."""

    headline: str
    time: float
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

    @property
    def follows(self) -> bool:
        """Whether it is the consequence of a failure that nobody has reported."""
        return self.cause is not None and self.cause.follows

    @property
    def event(self) -> Event:
        """The failure as `rallypoint.explain` takes it."""
        from rallypoint.explain.events import Process  # late: a job that succeeds does not need them
        from rallypoint.explain.reported import ended, failed, lost

        if (cause := self.cause) is not None:
            rank = cause.who.rank if cause.who.rank >= 0 else None
            process = Process(rank, None, cause.who.host, cause.who.pid)
            failure = failed(process, cause.kind, cause.message, cause.traceback, cause.time)
            return replace(failure, first=True)
        if self.exit is not None:
            process = Process(self.exit.rank, None, self.exit.host or None, self.exit.pid)
            return replace(ended(process, self.exit.code, self.exit.time), first=True)
        return replace(lost(self.headline, self.time), first=True)

    def frames(self) -> list[str]:
        """The lines of the traceback, without the exception, which the headline has."""
        if self.cause is None:
            return []
        message = self.cause.message.strip().splitlines()
        if self.cause.who.rank < 0:  # the launcher's own traceback would only show torchrun's insides
            return message[1:]
        end = f"{self.cause.kind}: {message[0]}" if message else self.cause.kind
        lines = self.cause.traceback.splitlines()
        return [line for line in lines if line[:1] == " " or not line.endswith(end[:LONGEST_SENTENCE])]

    def brief(self) -> FailureSummary:
        """The part that is sent to other machines: its length is bounded."""
        if (cause := self.cause) is None:
            return self
        lines = [line[:LONGEST_SENTENCE] for line in cause.traceback.splitlines()[-_LINES_SENT:]]
        message, stack = cause.message[:_MESSAGE_SENT], cause.stack[:_FRAMES_SENT]
        cause = replace(cause, message=message, traceback="\n".join(lines), stack=stack)
        return replace(self, cause=cause)

    def followers(self, failures: Sequence[Failure]) -> list[str]:
        """The failures of this machine that followed from it."""
        others = [each for each in _of_last_try(failures) if self.cause is None or each.who != self.cause.who]
        return [f"{each.name}: {shown(each.kind)}" for each in others]


def find_blame(
    failures: Sequence[Failure], exits: Sequence[Exit], lost: Sequence[LostServer] = ()
) -> FailureSummary | None:
    """The first cause; None if no process has reported a failure. All come in the order of time."""
    told = _of_last_try(failures)
    ranks = {failure.who.rank for failure in told}
    crashes = [each for each in exits if each.rank not in ranks and _is_crash(each)]
    found = [*map(_of_exception, told), *map(_of_crash, crashes), *map(_of_server, lost)]
    return min(found, key=lambda each: (each.follows, each.time), default=None)


def _of_last_try(failures: Sequence[Failure]) -> list[Failure]:
    """The failures of the last try, and those of the launcher, which does not count tries."""
    last_try = max((each.who.tries for each in failures), default=0)
    return [each for each in failures if each.who.tries == last_try or each.who.rank < 0]


def to_ending(first: FailureSummary, clock_ahead: float) -> Ending:
    """What this machine, whose clock is ahead of the keeper's, tells the others of its first failure."""
    from rallypoint.launch.rendezvous.roster import Ending  # late: ranks that report need none of it

    brief = first.brief()
    return Ending(brief.headline, first.time - clock_ahead, first.follows, to_text(brief))


def read_summary(text: str) -> FailureSummary:
    """A failure as its machine has sent it; of a machine that was lost, another one sends a line of text."""
    try:
        return from_text(FailureSummary, text)
    except ValueError:
        return FailureSummary(text, 0.0)


def _of_exception(cause: Failure) -> FailureSummary:
    when = " failed first, as it lost another process" if cause.follows else " failed first"
    how = when if cause.who.rank >= 0 else ""
    return FailureSummary(f"{cause.name}{how}: {cause.headline}", cause.time, cause=cause)


def _of_crash(crash: Exit) -> FailureSummary:
    how = f"ended by {signal_name(-crash.code)}" if crash.code < 0 else f"ended with {exit_text(crash.code)}"
    hint = hint_for(how) or "it left no traceback: see what it printed above"
    on = f" on {shown(crash.host)}" if crash.host else ""
    # torchrun notes whole seconds: in the same second, an exception is the likelier cause.
    time = int(crash.time) + 1.0
    return FailureSummary(f"rank {crash.rank} (process {crash.pid}{on}) {how}", time, hint=hint, exit=crash)


def _of_server(lost: LostServer) -> FailureSummary:
    return FailureSummary(f"{lost.server} {lost.how}", lost.time, hint=hint_for(lost.how))


def _is_crash(each: Exit) -> bool:
    """Whether a rank without a report ended by itself, and not because it was told to."""
    return each.code not in (0, -signal.SIGTERM, ENDED_BY_CONSOLE)
