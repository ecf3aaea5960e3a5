"""What the processes of a job report to their launcher: small files, in a folder that it names.

Reports of which there is one are rows of a table below (`Report`); these there are several of:

    joined-<rank>-<pid>.json     a rank has reached the store
    failed-<rank>-<pid>.json     an exception has ended a process: when, and its traceback
    exits-<pid>.json             torchrun's agent: which of its ranks ended how
    stack-<rank>-<pid>-<file>.txt, step-<rank>-<pid>    a rank's answers; see `launch/stacks`
    ending-<rank>-<pid>          empty; a rank that has failed waits for a last sample of the others
    owner                        empty; the launcher has it locked as long as it lives

Files, because they need no server: they also tell of a rank that fails before there is one. Imports no torch.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from rallypoint.client.filelock import open_locked
from rallypoint.codec import from_text, to_text
from rallypoint.frames import MOST_FRAMES, Frame
from rallypoint.launch.blame import Exit, Failure, FailureSummary, LostServer, RankIdentity
from rallypoint.launch.handover import read_handover
from rallypoint.launch.stacks.activity import MachineActivity
from rallypoint.store.connect.connection import who_am_i
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.machine.addresses import is_loopback, split_address
from rallypoint.text import LONGEST_SENTENCE, ranks_text, shown

_T = TypeVar("_T")

_AGENT = "rallypoint.pytorch.agent"
"""The program of torchrun's agents that `rallypoint run` has started, which then speaks for them."""

_TRACEBACK_LINES = 60
ENDING = "ending-"
_ENDING_SECONDS = 2.0
_ENDING_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class JoinProgress:
    """Ranks that have joined, of how many (0: not known yet): of the whole job, or of one machine."""

    joined: int
    expected: int
    absent: str = ""
    """The missing ranks, with their machines, in words; empty: not known."""
    whole: bool = True
    store: str = ""
    """Where the job's store is, HOST:PORT, for `rallypoint status`; empty: not known."""

    @property
    def complete(self) -> bool:
        return 0 < self.expected <= self.joined

    @property
    def text(self) -> str:
        if not self.expected:
            return "no rank has joined yet"
        whose = "" if self.whole else " of this machine"
        text = f"{self.joined} of {self.expected} ranks{whose} have joined"
        return f"{text}; {shown(self.absent, LONGEST_SENTENCE)}" if self.absent else text


@dataclass(frozen=True)
class Report(Generic[_T]):
    """A report of which there is one: its file, what it says, and what counts while there is none."""

    name: str
    kind: type[_T]
    otherwise: _T

    def leave(self, content: _T, folder: Path | None = None) -> None:
        """Write it into this process's folder for reports, or another."""
        _leave(self.name, content, folder)


ROLL: Final[Report[JoinProgress | None]] = Report("roll", JoinProgress, None)
"""The whole job, seen from its first machine: which ranks have joined."""
WAITING: Final = Report("waiting", str, "")
"""What the agent waits for before its ranks start."""
LOST: Final[Report[tuple[LostServer, ...]]] = Report("lost", tuple[LostServer, ...], ())
"""The servers of the job that are gone, in the order of time."""
ATTEMPT: Final = Report("attempt", int, 0)
"""The number of the attempt that runs."""
FIRST: Final[Report[FailureSummary | None]] = Report("first", FailureSummary, None)
"""The first failure of the whole job, as all machines know it."""
ACTIVITY: Final[Report[MachineActivity | None]] = Report("activity", MachineActivity, None)
"""What the ranks of this machine did at the last sample."""
STALL: Final = Report("stall", str, "")
"""What the ranks of the job do while it stands still."""


def folder_of(environ: Mapping[str, str]) -> Path | None:
    """The folder for reports; None if no launcher asked for them."""
    return read_handover(environ).reports


def _identity() -> RankIdentity:
    tries = max(_number("TORCHELASTIC_RESTART_COUNT"), 0)
    return RankIdentity(**vars(who_am_i()), local_world_size=_number("LOCAL_WORLD_SIZE"), tries=tries)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else -1


def report_joined(store: str = "", rank: int = -1, world_size: int = -1, seconds: float = 0.0) -> None:
    """Report that this process has reached the store, if it is a rank and a launcher asked for reports.

    The rank is that of its variables, unless one is given; `seconds` is the time-out of its group.
    """
    who = _identity()
    if 0 <= rank != who.rank:
        who = replace(who, rank=rank, world_size=world_size, local_rank=-1, local_world_size=-1)
    is_here = is_loopback(split_address(store)[0])
    if who.local_world_size < 0 and is_here:  # not all launchers say it, but all ranks are here
        who = replace(who, local_world_size=who.world_size)
    if who.rank >= 0:
        _leave(f"joined-{who.rank}-{who.pid}", replace(who, store=store, timeout_seconds=seconds))


def report_exits(exits: Sequence[Exit], folder: Path | None = None) -> None:
    """Report how ranks of this machine have ended."""
    _leave(f"exits-{os.getpid()}", tuple(exits), folder)


def exits_of(failures: Mapping[int, Any]) -> list[Exit]:
    """From torchrun's own records of ranks that have failed."""
    host = socket.gethostname()
    return [
        Exit(int(rank), each.pid, each.exitcode, float(each.timestamp), each.local_rank, host)
        for rank, each in failures.items()
    ]


def erase_live_line() -> None:
    """Erase the line of a terminal in which the launcher counts ranks: this process prints something now."""
    if os.isatty(2):
        os.write(2, f"\r{' ' * (shutil.get_terminal_size().columns - 1)}\r".encode())


def begin_attempt(number: int) -> None:
    """Report that the ranks of an attempt, counted from 0, start now; forget those of the attempt before."""
    folder = folder_of(os.environ)
    if folder is None:
        return
    for kind in ("joined", "roll", "failed", "exits", "lost"):
        for path in folder.glob(f"{kind}*.json"):
            path.unlink(missing_ok=True)
    ATTEMPT.leave(number)


WITHOUT_STORE = (
    "ranks that do not need it go on; one that does fails, and then the job ends, or starts again with a new "
    "store if --max-restarts allows that"
)
"""What becomes of a job whose store is gone."""


def lost_server(what: str, pid: int, places: str, how: str) -> LostServer:
    """A server process of this machine that has just ended, where it served, and how it ended."""
    name = f"{what} (process {pid} on {socket.gethostname()}, at {places})"
    return LostServer(name, f"has ended {how}", time.time())


def report_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> bool:
    """Report an exception that ends this process.

    True if it need not be printed here: it is torchrun's agent's, for which the launcher speaks.
    """
    who = _identity()
    quiet = _is_agent()
    if kind.__name__ == "ChildFailedError":  # torchrun's agent reports on its ranks
        report_exits(exits_of(error.failures))  # type: ignore[attr-defined]
        return quiet
    if kind.__name__ in ("KeyboardInterrupt", "SignalException"):  # it was told to end
        return quiet
    lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()[-_TRACEBACK_LINES:]
    is_agent = quiet or "torch.distributed.launcher.api" in sys.modules
    program = "" if who.rank >= 0 or is_agent else Path(sys.argv[0]).name
    failure = Failure(who, time.time(), kind.__name__, str(error), "\n".join(lines), _stack(trace), program)
    _leave(f"failed-{who.rank}-{who.pid}", failure)
    if who.rank >= 0 and (failure.is_timeout or failure.follows):
        _await_look(who)
    return quiet


def _is_agent() -> bool:
    program = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(program, "name", "") == _AGENT


def _stack(trace: TracebackType | None) -> tuple[Frame, ...]:
    frames = [
        Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
    ]
    return tuple(reversed(frames[-MOST_FRAMES:]))


def _await_look(who: RankIdentity) -> None:
    """Have this process end only after a look at all ranks, if its launcher takes one (`RankSampler.alarm`).

    It waits after its error has been printed. Whoever ends it meanwhile loses nothing.
    """
    given = read_handover(os.environ)
    if given.reports is None or not given.signals:
        return
    mark = given.reports / f"{ENDING}{who.rank}-{who.pid}"
    try:
        mark.touch()
    except OSError:
        return
    atexit.register(_await_removal, mark)


def _await_removal(mark: Path) -> None:
    deadline = Deadline(_ENDING_SECONDS)
    while mark.exists() and not deadline.passed:
        time.sleep(_ENDING_LOOK_SECONDS)


def _leave(name: str, report: object, folder: Path | None = None) -> None:
    """Write a report. This raises no error: the folder may be on another machine, or gone, or full."""
    folder = folder or folder_of(os.environ)
    if folder is None:
        return
    draft = folder / f"{name}.draft"
    with suppress(OSError):
        draft.write_text(to_text(report))
        draft.replace(folder / f"{name}.json")  # whole, or not there


# The launcher's side ----------------------------------------------------------------------------------------

_PREFIX = "rallypoint-"
_OWNER = "owner"


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder for the reports of one job, which is removed at the end.

    If this process is killed, the folder stays, and the next call of this user removes it. A lock tells that
    its owner is gone, and not a process number: other containers may share the folder for temporary files.
    """
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name, ExitStack() as held:
        draft = Path(name, f"{_OWNER}.draft")
        # There may be no locks here, and Windows renames no open file: this folder would stay.
        with suppress(OSError):
            held.enter_context(open_locked(str(draft), Deadline(0.0), create=True))
            draft.rename(draft.with_name(_OWNER))  # locked before anybody can find it
        yield Path(name)


def _remove_abandoned() -> None:
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(OSError):  # its launcher lives and has the lock, or the folder is gone by now
            if sys.platform == "win32" or owner.parent.lstat().st_uid == os.getuid():
                with open_locked(str(owner), Deadline(0.0), create=False):
                    shutil.rmtree(owner.parent, ignore_errors=True)


class Reports:
    """What the processes of one job have reported, in a folder."""

    def __init__(self, folder: Path, *, of_task: bool = False) -> None:
        """`of_task`: only one rank reports here, whatever its machine has besides."""
        self._folder = folder
        self.of_task = of_task

    def read(self, report: Report[_T]) -> _T:
        return next(self._read(report.name, report.kind), report.otherwise)

    def roll(self) -> JoinProgress:
        """Of the whole job where its first machine is this one; else of the ranks on this machine."""
        if (roll := self.read(ROLL)) is not None:
            return roll
        if self.of_task:
            return JoinProgress(0, 0)
        joined = self.joined()
        tries = max((each.tries for each in joined), default=0)
        return _roll_of_machine([each for each in joined if each.tries == tries])

    def joined(self) -> list[RankIdentity]:
        """The ranks of this machine that have reached the store."""
        return list(self._read("joined-*", RankIdentity))

    def count_joined(self) -> int:
        """How many reports there are of ranks that have joined; this is quick."""
        try:
            return sum(name.startswith("joined-") for name in os.listdir(self._folder))
        except OSError:
            return 0

    def failures(self) -> list[Failure]:
        """Exceptions that ended a process of this machine, in the order of time."""
        return sorted(self._read("failed-*", Failure), key=lambda failure: failure.time)

    def store(self) -> str:
        """Where the job's store is, as a rank of this machine has found it; nothing: not known."""
        return next((each.store for each in self.joined() if each.store), "")

    def exits(self) -> list[Exit]:
        """How ranks of the last try ended, as torchrun's agent on this machine saw it."""
        found = [each for some in self._read("exits-*", tuple[Exit, ...]) for each in some]
        return sorted(found, key=lambda each: each.time)

    def _read(self, pattern: str, kind: type[_T]) -> Iterator[_T]:
        """The reports of a kind, by their names without the ending."""
        for path in sorted(self._folder.glob(f"{pattern}.json")):
            try:
                yield from_text(kind, path.read_text())
            except (OSError, ValueError):
                continue  # gone, or from a process that could not write it


def _roll_of_machine(joined: Sequence[RankIdentity]) -> JoinProgress:
    ranks = {each.rank for each in joined}
    expected = max((each.local_world_size for each in joined), default=0)
    whole = all(each.world_size == each.local_world_size for each in joined)
    firsts = {each.rank - each.local_rank for each in joined if each.local_rank >= 0}
    absent = ""
    if len(firsts) == 1:  # else it is not known how the ranks of this machine are numbered
        missing = sorted({first + number for first in firsts for number in range(expected)} - ranks)
        absent = f"missing: {ranks_text(missing)} on {shown(joined[0].host)}" if missing else ""
    store = next((each.store for each in joined if each.store and whole), "")
    return JoinProgress(len(ranks), max(expected, 0), absent, whole, store)
