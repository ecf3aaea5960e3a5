"""The prefixes of launchers and loggers, which tell the writer of a line, its time and its severity. Pure.

Prefixes nest: `[default3]:[rank3]:[E1115 14:36:19.1 ProcessGroupNCCL.cpp:616] [Rank 3] text`. So they are
taken off one after the other, each by a rule, until no rule fits. To teach it a new launcher, add a rule; its
groups (rank, local, host, pid, level, clock, year, month, day, zone) say what the prefix tells. A rule must
not take off text that is no prefix: `node-a: ` and `3: ` count as prefixes only for names that have been seen
before something that can only follow a prefix.

Healthy jobs warn of what fails for a while: a name that is not known yet, a port that is tried before its
server listens. The words are those of a failure. What tells the two apart is the logger's level, or what the
line says has been done about it. NCCL's WARN is not a warning: it is how NCCL says that something failed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from rallypoint.diagnose.explain.stamps import MONTHS, Stamp, read_stamp

MILD: Final = "mild"
SERIOUS: Final = "serious"

Process = tuple[int | None, int | None]
"""A rank in the whole job, or one within a machine; or neither."""
NOBODY: Final[Process] = (None, None)
_MOST_PREFIXES: Final = 8
_MOST_NAMES: Final = 100_000

_CLOCK: Final = r"(?P<clock>[012]\d:[0-5]\d:[0-6]\d(?:[.,]\d{1,6})?)\d*"
_DATE: Final = r"(?P<year>[12]\d{3})-(?P<month>[01]\d)-(?P<day>[0-3]\d)"
_MONTH: Final = rf"(?P<month>{'|'.join(MONTHS)})"
_ZONE: Final = r"(?P<zone>Z|[+-]\d\d:?\d\d)?"
_GLOG: Final = rf"(?P<month>[01]?\d)(?P<day>[0-3]\d) {_CLOCK}"
_LETTER: Final = "(?P<level>[IWEFCDV])"
_LEVEL: Final = r"(?P<level>DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL)"
_NAME: Final = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"


@dataclass(frozen=True)
class Line:
    """A line without its prefixes, and what they tell; None for what they do not tell."""

    text: str
    rank: int | None = None
    local: int | None = None
    """The rank within its machine, which a launcher told."""
    host: str | None = None
    pid: int | None = None
    """The process that logged it."""
    stamp: Stamp | None = None
    record: bool = False
    """Whether a logger's message begins here; if not, the line may belong to the one before."""
    level: str = ""
    """The logger's word or letter for how serious it is: `W`, `ERROR`."""
    marked: bool = False
    """Whether torch has put the rank before it, as it does with exceptions that nobody has caught."""
    logged: bool = False
    """Whether one of torch's Python loggers wrote it: an exception there was caught."""

    @cached_property
    def handled(self) -> bool:
        """Whether the text says that something was done about it."""
        return _HANDLED.search(self.text) is not None

    @cached_property
    def severity(self) -> str:
        """mild, serious, or empty if neither the text nor the level tells."""
        if self.handled or _MILD.match(self.text):
            return MILD
        if _SERIOUS.match(self.text):
            return SERIOUS
        return "" if not self.level else MILD if self.level in _MILD_LEVELS else SERIOUS

    @property
    def writer(self) -> tuple[int | None, int | None, str | None, int | None]:
        """The writer. Lines of several writers may be mixed; those of one are in order."""
        return (*self.process, self.host, self.pid)

    @property
    def process(self) -> Process:
        """The rank in the whole job, else the one within its machine: one of the two."""
        return (self.rank, None if self.rank is not None else self.local)

    @property
    def anonymous(self) -> bool:
        return not any(each is not None for each in self.writer)


@dataclass(frozen=True)
class _Rule:
    pattern: re.Pattern[str]
    record: bool = False
    weak_rank: bool = False
    """The rank is the launcher's number for a process; one that the process itself gives is better."""
    marks: bool = False
    """torch puts it before what nobody has caught."""
    logs: bool = False
    """torch's Python loggers put it before what they say."""


_Prefix = tuple[_Rule, re.Match[str]]


def _rule(
    pattern: str, *, record: bool = False, weak_rank: bool = False, marks: bool = False, logs: bool = False
) -> _Rule:
    return _Rule(re.compile(pattern), record, weak_rank, marks, logs)


# By their first character, since most rules begin with a bracket.
_BRACKETED: Final = (
    # torch, in front of what its Python loggers say: an exception there was caught
    _rule(rf"\[rank(?P<rank>\d+)\]:(?={_LETTER}\d{{4}} )"),
    # torch, in front of each line of a traceback: the rank in the whole job
    _rule(r"\[rank(?P<rank>\d+)\]: ?", marks=True),
    # torchrun's and accelerate's tee: the role and the rank within the machine
    _rule(r"\[[A-Za-z_](?:[\w-]*(?:[^\W\d]|-))?(?P<local>\d+)(?:\|\d+)?\]:"),
    # ProcessGroupNCCL, Lightning
    _rule(r"\[(?:PG [^\[\]]*?)?(?i:rank)[ :=_]{0,2}(?P<rank>\d+)\]:? ?"),
    # torch's C++ logging, of today and of before 2.2
    _rule(rf"\[{_LETTER}{_GLOG} (?:\d+ )?[\w./\\-]+:\d+\] ?(?:\[c10d[^\]]*\] ?)?", record=True),
    _rule(rf"\[{_LETTER} [\w./\\-]+\.\w+:\d+\] ?(?:\[c10d[^\]]*\] ?)?", record=True),
    # torchrun before 2.2, DeepSpeed, NCCL: a date in brackets
    _rule(
        rf"\[{_DATE}[ T]{_CLOCK}{_ZONE}\] ?"
        r"(?:(?!(?:\w+\.)*[A-Z]|warning\b|error\b)[\w.]+: )?"  # a logger, and no exception
        rf"(?:\[{_LEVEL}\] ?)?"
        r"(?:\[[\w./-]+\.py:\d+(?::\w+)?\] ?)?(?:\[Rank (?P<rank>\d+)\] ?)?",
        record=True,
    ),
    _rule(rf"\[(?:(?P<month>[01]\d)-(?P<day>[0-3]\d) )?{_CLOCK}\] ?", record=True),
    # Celery; what its tasks print is a WARNING there, whatever it says
    _rule(rf"\[{_DATE} {_CLOCK}: (?:{_LEVEL}/MainProcess|[A-Z]+/[\w-]+)\] ", record=True),
    # UCX: its name is kept, which says what failed
    _rule(rf"\[\d{{10}}\.\d+\] \[(?P<host>{_NAME}):(?P<pid>\d+):\d+\] +[\w.]+:\d+ +(?=UCX )", record=True),
    # Ray's C++, SGLang (with its kinds of parallel ranks), NeMo; Slurm's daemons behind their time
    _rule(rf"\[{_DATE} {_CLOCK} {_LETTER} \d+ \d+\] (?:\(\w+\) )?[\w./-]+:\d+: ?", record=True),
    _rule(rf"\[{_DATE} {_CLOCK}(?: [A-Z]{{2}}\d+){{1,4}}\] ?(?:{_LEVEL}[: ] ?)?", record=True),
    _rule(rf"\[NeMo {_LETTER} {_DATE} {_CLOCK} [\w.]+:\d+\] ?", record=True),
    _rule(r"\[\d+\.(?:\d{1,3}|batch|extern)\] "),
    # Open MPI; a logger's name before a time
    _rule(rf"\[(?P<host>{_NAME}):(?P<pid>\d+)\] ", record=True),
    _rule(r"\[\w+\] (?=[12]\d{3}-[01]\d-[0-3]\d )"),
    # the kernel's: dmesg -T, and dmesg
    _rule(
        rf"\[[A-Z][a-z]{{2}} {_MONTH} +(?P<day>\d+) {_CLOCK} (?P<year>\d{{4}})\] ?",
        record=True,
    ),
    _rule(r"\[ *\d+\.\d{6}\] ?(?:\[T?\d+\] ?)?", record=True),
    _rule(r"\[pod/(?P<host>[^/\]\s]+)/[^\]\s]+\] ?"),
    _rule(r"\[\d+,(?P<rank>\d+)\]<(?:stdout|stderr|stddiag)>: ?", weak_rank=True),
)
_PLAIN: Final = (
    # torch's Python logging, and glog as it is
    _rule(
        rf"{_LETTER}{_GLOG} +(?:(?P<pid>\d+) )?[^\s\]]+:\d+\] ?(?:\[\d+/\d+(?:_\d+)?\] ?)*",
        record=True,
        logs=True,
    ),
    # TensorFlow and XLA: many an E of theirs is none, and some a W is one
    _rule(rf"{_DATE} {_CLOCK}: (?:(?P<level>F)|[IWE]) +(?:\d+ )?[\w./-]+\.\w+:\d+\] "),
    # Google Cloud's word for the stream, before nanoseconds: all that goes to standard error is an ERROR
    # there, and loses its indents. Other lines keep the word: it may be the service's own.
    _rule(
        r"(?:DEFAULT|INFO|ERROR) (?=[12]\d{3}-[01]\d-[0-3]\dT[\d:]{8}\.\d{9}Z "
        r"(?:\[| *File \"|Traceback |[\w.]*(?:Error|Exception)\b))"
    ),
    # containers' logs, line by line; then Python's logging, with its usual fields behind the time
    _rule(
        rf"(?:\d{{10,19}}[ \t]+)?{_DATE}T{_CLOCK}(?P<zone>Z|[+-]\d\d:?\d\d)[ \t](?:(?:stdout|stderr) [FP] )?"
    ),
    _rule(
        rf"{_DATE}[ T]{_CLOCK}{_ZONE}[ \t]*(?:[-|:,\[\]][ \t]*)?(?:[\w.]+[ \t]*[-|:][ \t]*)?"
        rf"{_LEVEL}(?:[ \t]*[-|:\]])?[ \t]*"
        # the place: Ray's, loguru's, or the name of a logger
        r"(?:[\w./-]+\.\w+:\d+ -- |[\w.<>]+:[\w.<>]+:\d+ - |[\w.]+ [-|] )?",
        record=True,
    ),
    # vLLM, of today and of before 0.8
    _rule(
        rf"{_LEVEL} (?P<month>[01]\d)-(?P<day>[0-3]\d) {_CLOCK} (?:\[[\w./-]+:\d+\]|[\w./-]+:\d+\]) ?",
        record=True,
    ),
    # log4j, mmengine, and a date without its year
    _rule(
        rf"(?:\d\d/)?(?P<month>[01]\d)[/-](?P<day>[0-3]\d) {_CLOCK},?(?: - [\w.]+ -)? {_LEVEL} +"
        r"(?:- |[\w$.]+: )?",
        record=True,
    ),
    _rule(rf"{_DATE}[ T]{_CLOCK}{_ZONE}(?: ?[-|:])? ?"),
    _rule(
        rf"(?P<month>[01]\d)/(?P<day>[0-3]\d)/(?P<year>[12]\d{{3}}) {_CLOCK}"
        rf"(?: - {_LEVEL} - (?:[\w.]+ - )?| )",
        record=True,
    ),
    _rule(rf"{_LEVEL}:[\w.]+:", record=True),
    # NCCL: the last number is the device, which need not be the rank
    _rule(rf"(?P<host>{_NAME}):(?P<pid>\d+):\d+ \[-?\d+\] ", record=True),
    # torch_xla's launcher
    _rule(r"(?P<host>\d+(?:\.\d+){3}) \[(?P<rank>\d+)\] ", weak_rank=True),
    # Ray and vLLM: the kind of process, and which one; Ray's own processes
    _rule(r"\((?:[\w.:-]+ )?(?:rank=(?P<rank>\d+) )?pid=(?P<pid>\d+)(?:, ip=(?P<host>[\w.:]+))?\) ?"),
    _rule(r"\((?:raylet|autoscaler|gcs_server)(?: [^()]{0,40}?)?(?:, ip=(?P<host>[\w.:]+))?\) "),
    # what the terminal shows of Ctrl-C, and blanks before a time or a rank
    _rule(
        r"\^C(?=\S)"
        r"|[ \t]+(?=\[?[12]\d{3}-[01]\d-[0-3]\d[ T][012]\d:|\[rank\d+\]: |[012]\d:[0-5]\d:[0-6]\d {2})"
    ),
    _rule(rf"{_CLOCK}(?:-\d+)? {{1,4}}{_LEVEL}:? +", record=True),
    _rule(rf"{_CLOCK} {{2}}"),
    _rule(rf"(?P<host>{_NAME}[-_]\d+) +\| "),
    _rule(
        rf"{_MONTH} +(?P<day>[0-3]?\d) {_CLOCK} (?P<host>{_NAME})"
        r" (?:kernel: |[\w./-]+\[\d+\]: )",
        record=True,
    ),
    # Slurm's daemons with their thread
    _rule(rf"{_MONTH} +(?P<day>[0-3]?\d) {_CLOCK} \d+ slurmstepd +0x[\da-f]+: (?=error: )", record=True),
    # our own: rallypoint run, at the end of a failed job
    _rule(
        r"(?:rallypoint: )?(?:on another machine: )?rank (?P<rank>\d+)"
        r" \(process (?P<pid>\d+) on (?P<host>\S+)\) (?P<level>failed)(?: first)?: ",
        record=True,
    ),
)
# srun -l and pdsh: `3: text`, `node-a: text`; docker compose: `server  | text`; quoted: `> text`.
_LABEL: Final = _rule(
    rf"(?: *(?P<rank>\d{{1,6}})|(?P<host>[a-z]{_NAME}|\d+(?:\.\d+){{3}})): |[a-z][\w.-]{{0,62}} +\| |[>│] ",
    weak_rank=True,
)
_AFTER_LABEL: Final = re.compile(
    r"Traceback \(most recent call last\):|  File \"|ssh: |bash: |thread '.{0,80} panicked "
)
# Ray says the same of many processes once.
_REPEATED: Final = re.compile(r" \[repeated \d+x across cluster\].{0,200}$")


# A progress bar does not end its line: the next message stands right behind it.
_BAR: Final = re.compile(
    r"[^|]{0,200}?\d{1,3}%\|[^|]*\|[^\[]{0,80}\[[^\]]{0,200}(?:it/s|s/it)[^\]]{0,200}\](?=\S)"
)


_MILD_LEVELS: Final = ("D", "V", "I", "W", "DEBUG", "INFO", "NOTICE", "WARN", "WARNING")
# A logger that writes JSON, or `level=info msg=...`.
_FIELD: Final = r"\{.{0,300}?\"(?i:level|levelname|severity|lvl)\": ?\"|.{0,80}?\blevel=\"?"
# Python's warnings, pip's and Hugging Face's loggers, NCCL's.
_MILD: Final = re.compile(
    r"(?:\S+:\d+: )?(?:\w*Warning|warning): "
    r"|(?:[\w.-]{1,40}: )?\[?(?:DEBUG|INFO|NOTICE|WARN|WARNING)\b[\]:| ]"
    r"|ERROR: pip's dependency resolver does not "  # it has installed all the same
    r"|(?:\S+ )?NCCL (?:INFO|TRACE)\b"
    rf"|(?:{_FIELD})(?i:debug|info|notice|warn(?:ing)?)\b"
)
_SERIOUS: Final = re.compile(
    r"(?:\[[\w. -]{1,30}\] ?){1,3}\[(?:CRITICAL|FATAL)\]|\[?(?:ERROR|CRITICAL|FATAL)\b[\]:| ]"
    rf"|(?:{_FIELD})(?i:error|critical|fatal|panic)\b"
)
# It has been dealt with, also if its level is an error's.
_HANDLED: Final = re.compile(
    r"(?i)\b(?:retrying|will retry|ignor(?:ed|ing)(?! explicit argument)|falling back|fall back to"
    r"|skipp(?:ed|ing)|continuing|trying (?:again|another|the next|next|port \d)"
    r"|starting (?:fresh|from scratch)|(?<=[,;] )(?:using \w|will (?:use|dispatch))"
    r"|metrics will not be exported)\b"
)


class Prefixes:
    """The prefixes of one log: it learns which labels stand before lines."""

    def __init__(self) -> None:
        self._labels: set[str] = set()

    def split(self, raw: str) -> Line:
        """A line, without its prefixes."""
        bar = _BAR.match(raw) if "%|" in raw else None
        text = raw[bar.end() :] if bar else raw
        line, strong = Line(_REPEATED.sub("", text) if "[repeated " in text else text), False
        for _ in range(_MOST_PREFIXES):
            prefix = _find_prefix(line.text) or (None if line.record else self._find_label(line.text))
            if prefix is None:
                break
            rule, found = prefix
            line = _take(line, rule, found, strong=strong)
            strong = strong or (not rule.weak_rank and found.groupdict().get("rank") is not None)
        return line

    def _find_label(self, text: str) -> _Prefix | None:
        found = _LABEL.pattern.match(text)
        if found is None:
            return None
        if found[0] not in self._labels:
            rest = text[found.end() :]
            if not (_AFTER_LABEL.match(rest) or _find_prefix(rest)) or len(self._labels) >= _MOST_NAMES:
                return None
            self._labels.add(found[0])
        return _LABEL, found


def _find_prefix(text: str) -> _Prefix | None:
    for rule in _BRACKETED if text.startswith("[") else _PLAIN:
        found = rule.pattern.match(text)
        if found is not None:
            return rule, found
    return None


def _take(line: Line, rule: _Rule, found: re.Match[str], *, strong: bool) -> Line:
    """The line with one prefix less. The outermost time counts: it is of one clock for all lines of a log."""
    groups = found.groupdict()
    rank = line.rank
    if groups.get("rank") is not None and (rank is None or not (rule.weak_rank or strong)):
        rank = int(groups["rank"])
    return replace(
        line,
        text=line.text[found.end() :],
        rank=rank,
        local=line.local if line.local is not None else _number(groups.get("local")),
        host=line.host or groups.get("host"),
        pid=line.pid if line.pid is not None else _number(groups.get("pid")),
        stamp=line.stamp or read_stamp(found),
        record=line.record or rule.record,
        # Who hands on what a rank has written does not know how serious that is.
        level="" if rule.marks else groups.get("level") or line.level,
        marked=line.marked or rule.marks,
        logged=line.logged or rule.logs,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text else None
