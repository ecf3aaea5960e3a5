"""Python's tracebacks in a log: blocks of lines of one writer, with an exception at their end. Pure.

Lines of several ranks may be mixed, so each writer has a state of its own. Of a chain ("During handling of
the above exception, another exception occurred") the first exception is nearest to the cause: those after it
are marked, so that none of them is taken for a failure of its own. Some exceptions only hand on another one,
whose traceback is part of their message: these are wrappers, and the innermost exception is the cause.

Logs are cut, so a traceback may have no head, and an exception may stand alone. rich draws its tracebacks in
a box. What Python says in a destructor ("Exception ignored in") ends nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Final

BEGIN: Final = "Traceback (most recent call last)"
IGNORED: Final = ("Exception ignored in", "--- Logging error ---")
"""Python goes on after what follows these lines."""
_CALLED: Final = ("Error in call to target", "Error locating target")
"""Hydra, of what it was to make: the exception is in the next line, as Python shows an object."""
MARKS: Final = (BEGIN, 'File "', *IGNORED, *_CALLED, "what():", "panicked at ")
"""A line with one of these opens something; a frame does so without a head, too."""
_HANDLING: Final = "During handling of the above exception, another exception occurred"
_CHAINED: Final = (
    _HANDLING,
    "The above exception was the direct cause of the following exception",
)
_FRAME: Final = re.compile(r'\s*File ["“](?P<file>[^"”]+)["”], line (?P<line>\d+)(?:, in (?P<function>.+)|$)')
# rich: `│ /home/user/train.py:8 in train                 │`; the rest of the box is source code and values.
_BOX: Final = re.compile(r"\s*[│╭╰┃┏┗]")
_BOX_CODE: Final = re.compile(r"\s*[│┃]\s*❱\s*\d+(?P<code>.*)$")
_BOX_RULES: Final = "│┃ "
_MARKS_OF_CODE: Final = re.compile(r"[\s~^]+$")
_BOX_FRAME: Final = re.compile(r"\s*[│┃] (?P<file>[^\s:]\S*?):(?P<line>\d+) in (?P<function>\S+)")
# A class, perhaps with its module, and a message. `INFO: x` or `Epoch: 3`, of another writer, is none.
_EXCEPTION: Final = re.compile(
    r"(?P<kind>[A-Za-z_][\w.]*(?:\([A-Z]\w*\))?)(?: {0,8}:(?: (?P<message>.*))?)?$"
)
# One that stands alone must look more like one: `ValueError: text`, `torch.cuda.OutOfMemoryError: text`.
_ALONE: Final = re.compile(
    r"(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:\([A-Z]\w*\))?|Exception): ?"
    r"(?! ?-?\d*\.\d+(?:e[+-]?\d+)?%?$)(?P<message>.*)$"  # a fraction is a metric's
)
# The last line of a message that shows where a kernel could not be compiled: `TypeError("text")`.
_SHOWN: Final = re.compile(
    r"(?P<kind>[A-Z]\w*(?:Error|Exception)(?:Impl)?)\((?:(?P<quote>[\"'])(?P<message>.*)(?P=quote),?)?\)$"
)
# wandb, of a run of a sweep.
_ERRORED: Final = re.compile(
    r"Run \w+ errored: (?P<kind>[A-Z]\w*(?:Error|Exception))"
    r"\((?:(?P<quote>[\"'])(?P<message>.*)(?P=quote),?)?\)$"
)
_SHOWS: Final = "CompilationError"
_FLAT: Final = re.compile(r"(?:\\n|\s)(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): ")
# Errors of argparse, and C++'s last words, are exceptions in all but name.
_USAGE: Final = re.compile(
    r"(?P<kind>\S{1,200}: error): (?P<message>(?:unrecognized arguments|argument |ambiguous option"
    r"|the following arguments are required|one of the arguments|invalid choice|too few arguments).*)"
)
_THROWN: Final = re.compile(r"\s*what\(\): +(?P<message>.*)")
_THROWS: Final = re.compile(r"terminate called after throwing an instance of '(?P<kind>[^']+)'")
_CXX: Final = "C++ exception"
# Rust's, with its message in the line or, today, in the next one.
_PANICKED: Final = re.compile(
    r"thread '(?P<thread>[^']{0,80})'(?: \(\d+\))? panicked at (?:'(?P<message>.*)', )?"
    r"(?P<file>[^\s:]+):(?P<line>\d+):\d+:?$"
)
_PANIC: Final = "Rust panic"
_ENDS_OF_NAMES: Final = ("Error", "error", "Exception", "Timeout", "timeout")
_CAPITALS: Final = re.compile(r"[^A-Z]*[A-Z][^a-z]*[a-z][^A-Z]*[A-Z]")
_LIBRARIES: Final = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|<frozen |[/\\]bin[/\\]"
)
_PACKAGE: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\](?P<name>[A-Za-z]\w*)[/\\]")
# The outermost frames of threads, of a queue's feeder, and of what is done at the exit.
_ASIDE: Final = ("_bootstrap_inner", "_feed", "_serve", "_exit_function", "_run_finalizers", "_exitfunc")
_TRACKER: Final = re.compile(r"multiprocessing[/\\]resource_tracker\.py$")
"""A process that Python starts by itself, and that nobody needs."""
_DESTRUCTOR: Final = "__del__"
_BAD_REQUESTS: Final = "httptools.parser.errors."
"""uvicorn, of what is no HTTP: whoever finds the port may send that."""
CLIENT_LOST: Final = "_call_connection_lost"
"""asyncio, of a client that is gone: no server ends by that."""
_PLAIN: Final = (
    *("AttributeError", "NameError", "TypeError", "KeyError", "IndexError", "ZeroDivisionError"),
    *("UnboundLocalError", "AssertionError", "FileNotFoundError"),
)
# They say that something inside failed. What, is said by another exception, or by a process that is gone.
_WRAPPERS: Final = re.compile(
    r"(?:RayActorError|ActorDiedError|ActorUnavailableError|RayTaskError|WorkerCrashedError|NodeDiedError"
    r"|OwnerDiedError|LocalRayletDiedError|TuneError|TrainingFailedError|ProcessRaisedException"
    r"|ProcessExitedException|CheckpointException|BackendCompilerFailed|CalledProcessError|ChildFailedError"
    r"|SignalException|EngineDeadError|AsyncEngineDeadError|BrokenProcessPool)\b"
    r"|Exception: $|\w+: Caught \w+ in "
    r"|\w+: (?:Engine core|WorkerProc|Engine process) (?:initialization )?failed"
    r"|\w+: Error building extension|\w+: .{0,200}(?:exited with non-zero|returned non-zero exit) status"
    r"|\w+: .{0,200}\b(?i:see|check|look at)\b.{0,60}\b(?:root cause|stack ?trace|traceback|above)\b"
    r"|\w+: (?:The )?\w+(?: \w+){0,2}(?<! assertion) (?:has )?(?:failed|crashed|died)\.?$"
    r"|\w+: .{0,200}\b(?:exception|following errors?|traceback):$"
    r"|\w+: process \d+ (?:terminated|exited) with |UnexpectedStatusException"
    r"|Exception: [\"']?\w+(?:Error|Exception)\("
    r"|\w+: .{0,200}\bExecuteUserScriptError"
    r"|CompilationError: at \d+:\d+:$"
    r"|RuntimeError: Worker failed with error|\w+: DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly"
)
# They follow when another process is gone, or when this one was told to end.
_FOLLOWERS: Final = (
    *("BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError"),
    *("CommClosedError", "EOFError", "KeyboardInterrupt", "SystemExit", "CancelledError", "SignalException"),
)
_LACKS: Final = ("ModuleNotFoundError", "ImportError")
_NEEDS: Final = re.compile(
    r"(?i)\b(?:pip|please|conda) install\b|\bnot installed\b|\b(?:needs?|requires?|missing|depends on)\b"
)
"""What is raised in place of a module that could not be imported, since it is needed."""
_CLOSED: Final = re.compile(
    r"(?i)\bconnection (?:was |has been |is )?(?:closed|lost)\b(?: unexpectedly)?\.?$"
)
_TRUNCATED: Final = "pickle data was truncated"
# The message has no end here: the next line has the point.
_INDENTED: Final = re.compile(r"(?:\t| {2,})\S")
_OPEN: Final = re.compile(r"[^.:]*(?:\.\w[^.:]*)*:$|\d+ validation errors? for [\w.]+$")
_WAITED: Final = ("Empty", "TimeoutError")
_MOST_LINES: Final = 400
_FOREIGN_LINES: Final = 50
_FOREIGN_LINES_HEADLESS: Final = 8
_IGNORED_LINES: Final = 4
_AFTER_LINES: Final = 60  # torch's messages may hold a backtrace of C++


@dataclass(frozen=True)
class Frame:
    """A frame of a traceback."""

    file: str
    line: int
    function: str

    @property
    def is_of_library(self) -> bool:
        """Whether it is the code of an installed package."""
        return _LIBRARIES.search(self.file) is not None

    def __str__(self) -> str:
        where = f"{self.file}, line {self.line}"
        return f"{where}, in {self.function}" if self.function else where


@dataclass(frozen=True)
class Raised:
    """The exception at the end of a traceback."""

    kind: str
    message: str
    place: Frame | None
    """The innermost frame outside of libraries; if there is none, the innermost one."""
    chained: bool
    """Whether it is the consequence of an exception before it."""
    instead: bool = False
    """Whether it was raised by what was to stand in for a module that could not be imported."""
    ignored: bool = False
    """Whether Python has ignored it: it was raised in a destructor, or since a server's client is gone."""
    warned: bool = False
    """Whether a logger has only warned of it."""
    aside: bool = False
    """Whether it was raised beside the program itself: in a thread, in a task, at the exit."""
    alone: bool = False
    """Whether it ended a process that Python's multiprocessing has started, and not the program."""
    library: str = ""
    """The package that has raised it, if it was not the program itself."""
    stood: Frame | None = field(default=None, compare=False)
    """The innermost frame."""
    code: str = field(default="", compare=False)
    """The line of source code in which it was raised."""
    within: str = field(default="", compare=False)
    """The class of the wrapper that has brought it."""
    more: str = field(default="", compare=False)
    """The lines that follow in its message."""

    @property
    def name(self) -> str:
        """The class without its module."""
        return self.kind.rpartition(".")[2]

    @property
    def is_plain(self) -> bool:
        """Whether errors of this kind mostly come from the script itself."""
        return self.kind in _PLAIN

    @property
    def is_wrapper(self) -> bool:
        """Whether it only says that something inside failed."""
        return _WRAPPERS.match(f"{self.name}: {self.message}") is not None

    @property
    def is_follower(self) -> bool:
        """Whether it mostly follows from the end of another process."""
        closed = _CLOSED.search(self.message) is not None
        return self.name in _FOLLOWERS or self.message == _TRUNCATED or closed

    @property
    def is_lack(self) -> bool:
        """Whether a module could not be imported, which a program may not need."""
        return self.name in _LACKS

    def goes_on_in(self, text: str) -> bool:
        """Whether its message goes on in the next line, and says what it is about only there."""
        if not self.message:
            return _INDENTED.match(text) is not None
        return bool(text) and _OPEN.match(self.message) is not None

    @property
    def only_waited(self) -> bool:
        """Whether it says no more than that nothing came in time: what it became says why."""
        return self.name in _WAITED and not self.message


class Traceback:
    """The traceback that one writer is writing, if it is writing one (else it is `idle`)."""

    def __init__(self) -> None:
        self.frame = False
        """Whether the last line was one of the frames, or the head of a traceback."""
        self.warned = False
        """Whether it belongs to a warning."""
        self.warned_of_lack = False
        """Whether it belongs to a warning of something that is not there."""
        self._body = False
        self._headless = False
        self._indent = 0
        self._lines = 0
        self._foreign = 0
        self._after = 0
        self._ignoring = 0
        self._chained = False
        self._handling = False
        """Whether the traceback being read is of what handled the exception before it."""
        self._lacked = False
        """Whether the exception before it is a module that could not be imported."""
        self._thrown = _CXX
        self._called = False
        """Whether Hydra could not make something, and says next why."""
        self._panicked: re.Match[str] | None = None
        self.head = 0
        """The number of the line that announces it."""
        self.aside = False
        """Whether it was raised in a thread, in a task, or at the exit."""
        self.alone = False
        """Whether it has ended a process of multiprocessing."""
        self._ignored = False
        """Whether nobody waits for what has raised it."""
        self._place: Frame | None = None
        self._own_place: Frame | None = None
        self._code = ""
        self._wrapper: Raised | None = None
        """The exception before, if it is a wrapper: what it has brought follows without frames."""

    @property
    def idle(self) -> bool:
        return not self._body and not self._after and not self._ignoring

    @property
    def chained(self) -> bool:
        """Whether the traceback being read follows from the exception before it."""
        return self._chained

    def take(self, text: str) -> Raised | None:
        """Read the next line of this writer; return the exception if the line names it."""
        if BEGIN in text and (flat := _flat(text)) is not None:
            self._body, self._after, self.frame = False, _AFTER_LINES, False
            return flat
        headless = None if self._body else _FRAME.match(text)
        self.frame = BEGIN in text or headless is not None
        if self.frame:
            self._begin(text)
            if headless is not None:
                self._headless = True
                self._take_frame(headless)
            return None
        if text.startswith(IGNORED):
            self._ignoring, self.frame = _IGNORED_LINES, True
            return None
        raised = self._take_body(text) if self._body else self._take_alone(text)
        if raised is None or not self._ignoring:
            self._ignoring = max(self._ignoring - (not self._body), 0)
            return raised
        self._ignoring = self._after = 0
        return replace(raised, ignored=True)

    def _take_alone(self, text: str) -> Raised | None:
        """A line outside of frames: an exception that stands alone, or more of the one before."""
        if self._after:
            self._after -= 1
            if text.startswith(_CHAINED):
                self._chained, self._after, self.frame = True, _AFTER_LINES, True
                self._handling = text.startswith(_HANDLING)
        if _BOX.match(text):
            self.frame = True  # source code, in a box whose head was cut off
            return None
        if (found := self._panicked) is not None:
            self._panicked, self._after = None, _AFTER_LINES
            return _panic(found, text.strip())
        if found := _PANICKED.match(text):
            if found["message"]:
                return _panic(found, found["message"])
            self._panicked, self._after = found, max(self._after, 1)
            return None
        if found := _THROWS.match(text):
            self._thrown, self._after = found["kind"], max(self._after, 1)
            return None
        if found := _THROWN.match(text):
            raised = Raised(self._thrown, found["message"], None, chained=False)
            self._thrown, self._after = _CXX, _AFTER_LINES
            return raised
        found = _ALONE.match(text) or _USAGE.match(text) or _ERRORED.match(text)
        if text.startswith(_CALLED):
            self._called, self._after = True, max(self._after, 2)
            return None
        shows = self._called or (self._wrapper is not None and self._wrapper.name == _SHOWS)
        self._called = False
        if found is None and self._after and shows:
            found = _SHOWN.match(text)
        if found is None:
            return None
        raised = Raised(found["kind"], found["message"] or "", None, chained=False)
        if self._after and self._wrapper is not None:
            place, library = self._wrapper.place, self._wrapper.library
            raised = replace(raised, place=place, library=library, within=self._wrapper.kind)
        self._after, self._chained, self._wrapper = _AFTER_LINES, False, None
        return raised

    def _is_of_a_client(self, kind: str) -> bool:
        """Whether it is about one client of a server, which goes on."""
        lost = self._place is not None and self._place.function == CLIENT_LOST
        return lost or kind.startswith(_BAD_REQUESTS)

    def _begin(self, text: str) -> None:
        if not self._after:
            self._chained = False
        # Some print a traceback as part of a message, further in.
        self._indent = len(text) - len(text.lstrip()) if text.lstrip().startswith(BEGIN) else 0
        self._body, self._after, self._headless = True, 0, False
        self._lines = self._foreign = 0
        self._place, self._own_place, self._code = None, None, ""
        self._ignored = False

    def _take_body(self, text: str) -> Raised | None:
        self._lines += 1
        most_foreign = _FOREIGN_LINES_HEADLESS if self._headless else _FOREIGN_LINES
        if self._lines > _MOST_LINES or self._foreign > most_foreign:
            self._body = False
            return None
        if not text[: self._indent].strip():
            text = text[self._indent :]
        frame = _FRAME.match(text) or _BOX_FRAME.match(text)
        if frame:
            self._take_frame(frame)
        self.frame = frame is not None or text[:1] in ("", " ", "\t") or _BOX.match(text) is not None
        if self.frame and frame is None:
            self._take_code(text)
        return None if self.frame else self._take_end(text)

    def _take_code(self, text: str) -> None:
        """The first line of code of a frame; in a box, the one with a mark."""
        if _BOX.match(text):
            found = _BOX_CODE.match(text)
            self._code = found["code"].strip(_BOX_RULES) if found else self._code
        elif not self._code and not _MARKS_OF_CODE.match(text):
            self._code = text.strip()

    def _take_frame(self, frame: re.Match[str]) -> None:
        place = Frame(frame["file"], int(frame["line"]), frame["function"] or "")
        if self._place is None:
            self.aside = self.aside or place.function in _ASIDE
            tracker = place.function == "main" and _TRACKER.search(place.file) is not None
            noise = tracker or place.function == _DESTRUCTOR
            self._ignored = noise and not self._headless
        self._place, self._code = place, ""
        if not place.is_of_library:
            self._own_place = place

    def _take_end(self, text: str) -> Raised | None:
        found = _EXCEPTION.match(text)
        if found is None or not _is_class(found["kind"]):
            if self._code or self._place is None:
                self._foreign += 1  # another writer's line that does not say whose it is
            else:
                self._code = text.strip()  # of a frame: what gathers logs may cut the indents off
            return None
        place = self._own_place or self._place
        lacks = found["kind"] in _LACKS
        told = _NEEDS.search(found["message"] or "") is not None
        instead = self._chained and self._handling and self._lacked and not (lacks or told)
        self._lacked = found["kind"] == _LACKS[0] and not self._chained
        raised = Raised(
            found["kind"],
            found["message"] or "",
            place,
            self._chained and not instead,
            instead,
            ignored=self._ignored or self._is_of_a_client(found["kind"]),
            warned=self.warned or (self.warned_of_lack and lacks),
            aside=self.aside,
            alone=self.alone,
            library=_package_of(self._place),
            stood=self._place,
            code=self._code,
        )
        self._body, self._after, self._chained = False, _AFTER_LINES, False
        self._wrapper = raised if raised.is_wrapper else None
        return raised


def _panic(found: re.Match[str], message: str) -> Raised:
    """A server outlives the panics of its other threads."""
    place = Frame(found["file"], int(found["line"]), "")
    return Raised(_PANIC, message, place, chained=False, aside=found["thread"] != "main")


def _flat(text: str) -> Raised | None:
    """The last exception of a traceback that stands in one line, as JSON and some services have it."""
    rest = text.partition(BEGIN)[2]
    found = list(_FLAT.finditer(rest)) if 'File "' in rest or 'File \\"' in rest else []
    if not found:
        return None
    message = rest[found[-1].end() :].partition("\\n")[0]
    return Raised(found[-1]["kind"], message.strip(), None, chained=False)


def _package_of(place: Frame | None) -> str:
    found = _PACKAGE.search(place.file) if place is not None else None
    return found["name"] if found is not None else ""


def _is_class(kind: str) -> bool:
    """Whether a name looks like that of an exception: `KeyError`, `queue.Empty`, `StopIteration`."""
    _, dot, name = kind.rpartition(".")
    is_of_module = bool(dot) and "A" <= name[:1] <= "Z"
    return kind.endswith(_ENDS_OF_NAMES) or is_of_module or _CAPITALS.match(name) is not None
