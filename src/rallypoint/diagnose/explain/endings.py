"""How the processes of a log ended: what launchers, the system and the runtime say of it. Pure.

Jobs live on after much that looks bad: a module that is missing and not needed, an error that was caught and
printed. So a log shows a bad end only if a launcher, the system or the runtime says so; if a logger calls
something known an error; or if the log ends with it, since then nothing shows that the job went on.

What is said weighs, too. Exceptions are caught; but a process that is gone stays so, whatever others write
after it: the server in front of a dead engine still tells its health, and ranks make their last steps. So
only a new start outlives that, or a launcher's word that all went well.

torchrun's table names the rank that it saw failing first. torchrun looks at its ranks now and then, and
several may have failed by then. So the table is proof only if the others still ran and torchrun had to end
them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from rallypoint.diagnose.explain.denials import without_denials
from rallypoint.diagnose.explain.life import ANYBODY, Life, Who
from rallypoint.diagnose.explain.local_ranks import LocalRanks
from rallypoint.diagnose.explain.prefixes import MILD, SERIOUS, Line
from rallypoint.diagnose.explain.signs import IS_READY
from rallypoint.diagnose.explain.stamps import read_stamp
from rallypoint.diagnose.explain.suspects import is_loud
from rallypoint.diagnose.explain.tracebacks import Raised
from rallypoint.exits import exit_text, hint_for, signal_name

MARKS: Final = (
    *("failed (exitcode:", "Root Cause (first observed failure)", "death signal, shutting down"),
    *("terminated with signal", "terminated with exit code", "died with <Signals", "exits with return code"),
    *("ended with exit code", "ended by SIG", "Fatal Python error", "terminate called", "core dumped"),
    *("segmentation fault", "Segfault encountered", "Killed process", "exited with exit code"),
    *("*** JOB", "*** STEP"),
    # mpirun, its daemons, Slurm
    *("exited on signal", "terminated normally, but", "returned a non-zero exit code", "Job step aborted"),
    *("exited with non-zero status", "MPI_ERRORS_ARE_FATAL", "ORTE has lost", "ORTE was unable", "oom-kill"),
    *("oom_kill event", "Abort(1) on node", "=1 for a complete stack trace"),
    # pdsh, accelerate, Ray
    *("ssh exited with", "non-zero exit status", "A worker died or was killed"),
    # containers
    *("command terminated with", "exited with code", "OOMKilled", "CrashLoopBackOff", "low on resource"),
    *("DUE TO TIME LIMIT", "job killed"),
    # programs that somebody has told to end
    *("SIGTERM received", "SIGINT received", "received SIGTERM", "received SIGINT", "received signal=SIG"),
    "shutdown triggered",
    # vLLM and SGLang, of the part that does the work: the server may still tell that it is well
    *("EngineDeadError", "EngineCore encountered a fatal error", "Engine core proc", "(engine dead)"),
    *("MQLLMEngine is already dead", "Engine background task failed", "Background loop has errored"),
    *("Scheduler hit an exception", "SIGQUIT received", "Received sigquit from a child", "Shard 0 crashed"),
    # text-generation-inference, Triton, gunicorn
    *("signaled to shutdown with signal", "Signal (11) received", "was sent SIG", "was sent code"),
    # supervisord, Jupyter, the C library
    *("entered FATAL state", "; not expected)", "restarting kernel", "free(): invalid", "double free or"),
    # an editor's console, the one of Windows, and what Windows calls a crash
    *(
        "Exception Code: 0xC0",
        "finished with exit code",
        "退出代码",
        "Press any key to continue",
        "请按任意键继续",
    ),
)
"""A line with one of these says that a process ended badly, or that a launcher gave up."""
TOLD_TO_END: Final = "death signal"
"""torchrun, when somebody has told it to end: that is no failure of a job that is over."""
_BACKTRACE_MARK: Final = "frame #"
_GAVE_UP: Final = "Killing subprocess"
"""DeepSpeed, of the processes that it ends since one has failed."""
_STARTED: Final = ("Application startup complete", "Running on local URL", "Running on http", "Service at")
_IGNORES: Final = "Ignoring this choice"
"""torch, of a kernel that it has tried: it takes another one."""
_RVC_IS_DONE: Final = "Training is done. The program is closed"
_SHUTS: Final = "Shutting down"
_DEATHS: Final = (
    *("died", "crashed", "has terminated", "is dead", "was killed", "were killed", "been killed"),
    *("was aborted", "were aborted", "been aborted", "unexpectedly", "marked dead"),
)
_SHELLS: Final = (
    *("已杀死", "已终止", "段错误", "Getötet", "Speicherzugriffsfehler", "Tué", "Processus arrêté"),
    *("Erreur de segmentation", "Matado", "Violación de segmento", "Убито", "Ошибка сегментирования"),
    *("強制終了", "죽었음"),
)
"""What shells say of a process that was killed, or has crashed, in other languages."""
SELECTED: Final = (
    *(*MARKS, *_DEATHS, *_SHELLS, *_STARTED, _SHUTS, _IGNORES, _RVC_IS_DONE, _GAVE_UP, _BACKTRACE_MARK),
    *("Failures:", "Terminated", "^C", "restarted"),
)
"""Every line that matters here has one of these."""


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for any of some texts, with any number in the place of one."""
    return "|".join(re.sub(r"\d+", r"\\d+", re.escape(text)) for text in texts)


_SAID_OF: Final = (
    "process|workers?|runner|kernel|engine|server|scheduler|trainers?|shard|child|backend|container|program"
    "|node"
)
_ENDED_BADLY: Final = re.compile(
    _any_of(MARKS)
    + rf"|^(?:\S+: \S+ \d+: +\d+ )?(?:killed|terminated|{'|'.join(_SHELLS)})(?: {{2}}|$|\()"
    # over what was left of a line that counted
    + r"|^(?-i:Killed)(?:[a-z]{1,20} .{0,80}\d ?/ ?\d|.{0,80}(?:%\||it/s))"
    + r"|\^C$|\bkernel [\da-f-]{36} restarted$|\brank \d+ (?:crashed|(?:has )?died(?!,))\b"
    + rf"|\b(?:{_SAID_OF})\b(?: [^\s.:]+){{0,5}} (?:(?:has |have )?died|crashed|has terminated|is dead"
    r"|(?:was|were|been) (?:killed|aborted|marked dead)|(?:exited|terminated|ended) unexpectedly)\b",
    re.IGNORECASE,
)
_TOLD: Final = re.compile(
    rf"{TOLD_TO_END}|^Signal \((?:1|2|15)\) received|was sent SIG(?:TERM|INT|HUP)|^Terminated$|\^C$"
    r"|^Press any key|^请按任意键"
    r"|(?i:SIG(?:TERM|INT) received|received (?:signal=)?SIG(?:TERM|INT)|shutdown triggered)"
)
"""Somebody has told it to end, or nobody knows: its end may be a good one."""
IN_A_SCRIPT: Final = re.compile(r"(?!(?:/\S*/)?(?:ba)?sh: )\S[^:]{0,200}: line \d+: ")
"""What a shell says of a line of a script, and not of a single command: the script may go on."""
CANCELLED: Final = re.compile(r"CANCELLED AT|DUE TO TIME LIMIT|job killed: walltime")
"""A scheduler has ended it for good: of a job that is over, it only took what was left."""
_WAITED: Final = re.compile(r"(?i)\btim(?:ed |e|ing )out\b")
"""A job that is over waits for nobody."""
_BACKTRACE: Final = re.compile(rf"Exception raised from |{_BACKTRACE_MARK}\d")
_SHUTS_DOWN: Final = re.compile(rf"(?:INFO: +)?{_SHUTS}(?: FastAPI HTTP server\.?)?$")
_ENGINE_GONE: Final = re.compile(r"\bEngineDeadError\b|^Engine core proc ")
_LEFT: Final = re.compile(r"^Engine core proc \S{1,80} died unexpectedly, shutting down client")
"""vLLM, also at the end of a script: its engine may be gone before its client."""
_COMPILER_FAILED: Final = re.compile(
    r"\bCalledProcessError: Command '\['[^']{0,200}\b(?:[gt]?cc|[gc]\+\+|clang|nvcc|cl|ninja)(?:\.exe)?'"
    r".{0,4000} returned non-zero"
)
"""A program can do without what it was to compile, and says so by its next steps."""
_CODE: Final = re.compile(
    r"(?:return code =|exit code:?|exitcode:|exited with code|exit status|non-zero status|退出代码)"
    r" *'?(?P<code>-?\d+)|(?:on signal|with signal|Signals\.SIG\w+:|^signal) *\(?(?P<signal>\d+)",
    re.IGNORECASE,
)
_SENT: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL")
"""Signals that come from outside; launchers end the other processes with these."""
_RVC_ENDS: Final = (2333333, -21)
"""What RVC ends with, when it is done and in other cases; Linux makes 149 of it, which is no signal's."""
_ASKED: Final = (-1, -2, -15)
"""The codes of processes that were asked to end."""
LAST_LINES: Final = 12
"""How many lines count as the end of a log: other ranks may speak for a moment longer."""

_HEADINGS: Final = re.compile(r"(?:Other )?Failures:$|(?P<root>Root Cause \(first observed failure\):)")
_ROW: Final = re.compile(r"\[\d+\]:$")
_FIELD: Final = re.compile(r" *(?P<name>time|host|rank|exitcode|error_file|traceback) *: (?P<value>.*)")
_TIME: Final = re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)_(?P<clock>\d\d:\d\d:\d\d)")
_RANK: Final = re.compile(r"(?P<rank>\d+)(?: \(local_rank: (?P<local>\d+)\))?")
_TRY_FAILED: Final = re.compile(
    r"failed \(exitcode: -?\d+\) local_rank: (?P<rank>\d+) \(pid: \d+\) of binary"
)
_MOST_LINES: Final = 100
_MOST_AGENTS: Final = 100_000
_INDENT: Final = "  "
_FAR: Final = 1_000
"""So many lines nobody writes who was ended."""


@dataclass
class Ending:
    """Whether one log shows a bad end, read line by line."""

    shown: bool = False
    """Whether a line says that a process ended badly."""
    last: int = -LAST_LINES - 1
    """The last line that speaks of a failure."""
    outlived: int = 0
    """The last line that speaks of one after which the job went on, before it failed for good."""
    _fatal: int = 0
    """The last line that no process can have outlived."""
    _final: int = 0
    """The last line after which there is nothing but a new start."""
    _started: bool = False
    """Whether a server was ready after that."""
    _hard: int = 0
    """The last line that speaks of a failure of the program itself: not of a thread, nor in plain words."""
    _loud: bool = False
    """Whether plain words have stated an error, and not only had the words of one."""
    _followed: int = 0
    """The first line with what mostly follows from an end: of another process, or of all, as it was told."""
    _aside: int = 0
    """The last line with an exception of a thread, of a task, or at the exit."""
    _failed: dict[Who, int] = field(default_factory=dict)
    """For each process that a launcher or a logger has named, its last line with an exception."""
    _told: bool = False
    """Whether the first line with what mostly follows from an end is one that tells it to end."""
    _orphaned: bool = False
    """Whether a process that the program has started could not reach it any more."""
    _left: int = 0
    """The only line that speaks of a failure, if it says that vLLM's engine has left its client."""
    _rvc_is_done: bool = False
    """Whether RVC has said that its training is done."""
    _shut: int = 0
    """The first line in which a server ends, before anything has failed."""
    _crashed: bool = False
    """Whether anything but the engine behind a server has failed."""

    def take(self, line: Line, number: int, raised: Raised | None, roles: Collection[str]) -> bool:
        """Read a line, with the exception that it names and the roles of the known causes in it.

        Returns whether it says that a process ended badly.
        """
        code = code_of(line.text)
        self._rvc_is_done = self._rvc_is_done or _RVC_IS_DONE in line.text
        if self._rvc_is_done and code in _RVC_ENDS:
            return False
        known = any(role != "notice" for role in roles)
        ended = bool(_ENDED_BADLY.search(line.text)) and code != 0
        ended = ended and bool(_ENDED_BADLY.search(without_denials(line.text)))  # rarely, since it is slow
        gave_up = line.text.startswith(_GAVE_UP)
        told = _TOLD.search(line.text) is not None or (ended and code is not None and code in _ASKED)
        self.shown = self.shown or (known and line.severity == SERIOUS) or ended or gave_up
        spoken = (raised is not None and not raised.warned) or (known and line.severity != MILD)
        if spoken or ended or gave_up or (number <= self.last + LAST_LINES and _BACKTRACE.match(line.text)):
            self._left = number if self.last < 0 and _LEFT.match(line.text) else 0
            self._crashed = self._crashed or _ENGINE_GONE.search(line.text) is None
            self.last = number
            aside = raised is not None and raised.aside
            plain = raised is None and not (ended or gave_up) and line.severity != SERIOUS
            self._loud = self._loud or (plain and is_loud(line.text))
            self._aside = number if aside else self._aside
            cancelled = CANCELLED.search(line.text) is not None
            follows = _is_follower(raised, roles) and not (ended or gave_up or _WAITED.search(line.text))
            if told or cancelled or follows or self._told:
                self._told = told if not self._followed else self._told
                self._orphaned = self._orphaned or (follows and raised is not None and raised.alone)
                self._followed = self._followed or (0 if plain or aside else number)
            else:
                self._hard = self._hard if plain or aside else number
        elif self.last < 0 and _SHUTS_DOWN.match(line.text):
            self._shut = self._shut or number
        if line.marked and (raised is not None or (known and line.severity == SERIOUS)):
            self._fatal = number
        alone = raised is not None and raised.alone and not raised.is_follower
        caught = raised is not None and _COMPILER_FAILED.search(line.text) is not None  # perhaps
        gone = (ended and not told and not caught and not _TRY_FAILED.search(line.text)) or alone
        if line.severity != MILD and gone and not self._told:
            self._final, self._started = number, False
        elif self._final and IS_READY.search(line.text):
            self._started = True
        who = (line.process, line.pid)
        if raised is not None and who != ANYBODY and len(self._failed) < _MOST_AGENTS:
            self._failed[who] = number
        if line.logged and line.text.startswith(_IGNORES):
            self._failed.pop(who, None)
        return ended

    def look_back(self, life: Life, before: int, number: int) -> None:
        """What the lines between two failures show, of which the later one has this number."""
        failed = {who: line for who, line in self._failed.items() if line < number}
        fatal = 0 < self._fatal < number and not life.teed
        final = 0 < self._final < number and not self._started
        if not fatal and not final and _went_on(life, before, failed):
            self.outlived = before

    def _went_by(self, life: Life) -> bool:
        """Whether what was said in plain words, or happened beside the program, had no consequence."""
        if self._aside:
            return life.shows_after(self.last) or life.is_over_before(self._aside)
        if self._loud:
            return life.began_after(self.last)
        return life.is_first_after(self.last)

    @property
    def is_fatal(self) -> bool:
        """Whether torch has put a rank before an exception: that process has ended."""
        return self._fatal > 0

    @property
    def was_told(self) -> bool:
        """Whether somebody has told the program to end."""
        return self._told

    def was_told_before(self, line: int) -> bool:
        """Whether somebody had told the program to end before a line."""
        return self._told and line > self._followed

    def is_bad(self, lines: int) -> bool:
        """Whether a log with this number of lines shows a bad end."""
        return self.shown or lines - self.last <= LAST_LINES

    def was_outlived(self, life: Life, tries: int) -> bool:
        """Whether the job went on after all that was bad: in a later try, or since it was caught.

        A process that has failed has to go on itself: others may not have missed it yet.
        """
        shut = self._shut and not (self._crashed or self._fatal) and life.is_shut_for_good(self._shut)
        if shut or (self._left and life.has_answered_before(self._left)):
            return True
        over = bool(self._followed and not self._hard) and (
            life.is_over_before(self._followed)
            or (self._told and life.is_shut_by(self._followed))
            or (self._orphaned and life.is_done_before(self._followed))
        )
        if self._final and not over and not self._is_started_anew(life):
            return False
        if tries > 0:
            return life.went_on_after(self.last) or life.began_again_after(self.last)
        if self._fatal and not life.teed:
            return False
        if not self._hard and not self._followed:
            return self._went_by(life)
        return over or self._is_far_behind(life) or _went_on(life, self.last, self._failed)

    def _is_started_anew(self, life: Life) -> bool:
        """Whether what was gone for good has been started again, and works."""
        if self._started or self._is_far_behind(life):
            return life.works_after(self.last)
        return life.began_again_after(self._final)

    def _is_far_behind(self, life: Life) -> bool:
        """Whether steps are made long after all that was bad."""
        return life.last - self.last > _FAR and life.works_after(self.last)


def _is_follower(raised: Raised | None, roles: Collection[str]) -> bool:
    """Whether what was said mostly follows from the end of another process."""
    known = {role for role in roles if role != "notice"}
    return known == {"symptom"} if known else raised is not None and raised.is_follower


def _went_on(life: Life, last: int, failed: Mapping[Who, int]) -> bool:
    return life.went_on_after(last) and all(life.went_on_after(line, who) for who, line in failed.items())


def code_of(text: str) -> int | None:
    """The exit code that a line tells, as Python gives it: a signal is a negative one."""
    found = _CODE.search(text)
    if found is None:
        return None
    code = -int(found["signal"]) if found["signal"] else int(found["code"])
    if code < -255:
        return code + 2**32  # a status of Windows
    return 128 - code if 128 < code < 160 else code  # as a shell tells a signal


def describe_ending(text: str) -> tuple[str, str]:
    """How a process ended, by a line that says so, and the role of that. A crash means more than a code."""
    code = code_of(text)
    if code is None:
        return "", "wrapper"
    ending = signal_name(-code) if code < 0 else exit_text(code)
    crashed = bool(hint_for(ending)) and ending not in _SENT
    return ending, "symptom" if crashed else "wrapper"


@dataclass
class Table:
    """torchrun's table of failures in one log, read line by line."""

    roots: set[int] = field(default_factory=set)
    """Ranks that torchrun says failed first."""
    others_failed: bool = False
    """Whether another rank had failed by itself as well before torchrun looked."""
    local_ranks: LocalRanks = field(default_factory=LocalRanks)
    _row: Line | None = None
    _root: bool = False
    _left: int = 0
    _traceback: bool = False

    @property
    def idle(self) -> bool:
        return self._left == 0

    def take(self, line: Line) -> Line:
        """Read a line; return it with the rank, the host and the time of its row."""
        self.local_ranks.take(line)
        heading = _HEADINGS.match(line.text)
        if heading:
            self._left, self._root, self._row = _MOST_LINES, heading["root"] is not None, None
            return line
        if not self._left:
            return line
        self._left = 0 if line.text.startswith("=====") else self._left - 1
        if _ROW.match(line.text):
            self._row, self._traceback = line, False
        elif self._row is not None:
            return self._take_field(line, self._row)
        return line

    def _take_field(self, line: Line, row: Line) -> Line:
        if self._traceback and line.text.startswith(_INDENT):
            text = line.text[len(_INDENT) :]
            return replace(line, text=text, rank=row.rank, host=row.host, stamp=row.stamp)
        found = _FIELD.match(line.text)
        if found is None:
            self._traceback = False
            return line
        name, value = found["name"], found["value"].strip()
        self._row = row = self._updated(row, name, value)
        self._traceback = name == "traceback"
        text = value if name == "traceback" else f"{name}: {value}"
        return replace(line, text=text, rank=row.rank, host=row.host, stamp=row.stamp, record=True)

    def _updated(self, row: Line, name: str, value: str) -> Line:
        if name == "time" and (time := _TIME.match(value)):
            return replace(row, stamp=read_stamp(time))
        if name == "host":
            return replace(row, host=value)
        if name == "rank" and (rank := _RANK.match(value)):
            number = int(rank["rank"])
            if self._root and len(self.roots) < _MOST_AGENTS:
                self.roots.add(number)
            if rank["local"]:
                self.local_ranks.note(row.host, number, int(rank["local"]))
            return replace(row, rank=number)
        if name == "exitcode" and not self._root and not value.startswith("-15 "):
            self.others_failed = True
        return row


@dataclass
class Tries:
    """How often the job of one log was started: torchrun's agents say when a try has failed."""

    count: int = 0
    """Tries that have failed so far."""
    _by_agent: dict[tuple[str | None, int | None], int] = field(default_factory=dict)

    def take(self, line: Line) -> Line:
        """Read a line; if it says that a try has failed, return it with the local rank that failed."""
        found = _TRY_FAILED.search(line.text)
        if found is None:
            return line
        agent = (line.host, line.pid)
        if agent in self._by_agent or len(self._by_agent) < _MOST_AGENTS:
            self._by_agent[agent] = self._by_agent.get(agent, 0) + 1
            self.count = max(self.count, self._by_agent[agent])
        return line if line.rank is not None else replace(line, local=int(found["rank"]))
