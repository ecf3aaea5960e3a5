"""Reads exceptions from the lines of one process: Python's tracebacks and those of other runtimes. Pure.

A traceback is a block of frames, and a header that names the exception ends it. The header's message may go on in
further lines, and one of those may open the traceback of another exception, which is then the earlier one.
Logs are cut, so frames may come without a beginning, and a header may stand alone. What other runtimes write when
they fail is a table of headers, `_HEADS`. Other writers' lines in between are skipped, up to a limit.
"""

from __future__ import annotations

import builtins
import enum
import re
from dataclasses import dataclass, field, replace
from typing import Final

from rallypoint.explain.events import Frame, Raised

MOST_FRAMES: Final = 200
MOST_TEXT: Final = 2_000
MOST_MORE: Final = 12
_MOST_FOREIGN: Final = 50
_MOST_FOREIGN_HEADLESS: Final = 8
"""Lines of other writers after which a block has no header."""
_PATIENCE: Final = 20
"""Lines after a message in which its exception may still be linked to another one."""
_USAGE_LINES: Final = 100
_MOST_FLAT: Final = 32_000


class Part(enum.Enum):
    """What a line is to an exception."""

    NONE = "none"
    FRAME = "frame"
    HEADER = "header"
    MORE = "more"


_BEGIN: Final = re.compile(r"(?i)traceback \(most recent call last\)")
_END_OF_STRING: Final = re.compile(r"""["']\s*[,}\])].*$""")
_LINK: Final = re.compile(
    r"\s*(?:(?P<handling>During handling of the above exception, another exception occurred)"
    r"|The above exception was the direct cause of the following exception)"
)
_MARKERS: Final = re.compile(
    r"\s*(?:[~^][~^\s]*|\[Previous line repeated \d+ more times?\]|\.\.\.<\d+ lines>\.\.\.)$"
)

# An exception group draws a line down its side, and a rule before each of the exceptions in it.
_GROUP: Final = re.compile(r"\s*\+ Exception Group Traceback")
_GROUP_SIDE: Final = re.compile(r"\s*\| ?")
_GROUP_RULE: Final = re.compile(r"\s*\+(?:-\+)?-{10,}(?: (?P<number>\d+|\.\.\.) -{10,})?$")

_TYPE: Final = r"(?:[A-Za-z_][\w<>]*\.)*"
_ALONE: Final = re.compile(
    rf"\s*(?P<type>{_TYPE}(?:_?[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout|Fault|Traceback|ExceptionGroup)"
    r"|Exception|(?<=errors\.)[A-Z]\w+|(?<=exceptions\.)[A-Z]\w+)(?:\(\w+\))?):(?: (?P<message>.*))?$"
)
"""A header that needs no frames before it: its name tells."""
_SHOWN: Final = re.compile(
    rf"(?P<type>{_TYPE}[A-Z]\w*(?:Error|Exception))\((?P<quote>[\"'])(?P<message>.*)(?P=quote),?\)$"
)
_NAMED: Final = re.compile(
    r"\s*(?P<type>[A-Za-z_][\w.<>]*(?:\(\w+\))?)(?:(?P<colon> ?:)(?: (?P<message>.*))?)?$"
)
"""A header after frames."""
_NUMBER: Final = re.compile(r"\s*[-+]?[\d.]+(?:e[-+]?\d+)?%?\s*$")
_TWO_CAPITALS: Final = re.compile(r"[^A-Z]*[A-Z][^a-z]*[a-z][^A-Z]*[A-Z]")
_WITHIN: Final = re.compile(r"(?i)\boriginal $")
_OF_RANK: Final = re.compile(r":? \(RANK \d+\)")
_REMOTE: Final = re.compile(r"\s*ray::.+\(pid=")
_PROMPT: Final = re.compile(r"(?:\([\w.-]+\) ?)?\[?[\w.-]+@[\w.-]+[: ][^$#]*[$#] |\$ |>>> |❯ ")
_NATIVE_FRAME: Final = re.compile(
    r"\s*(?:frame #\d+: |@ +0x|#\d+ +0x|\[ *\d+\] [/\w(]|\d+:? +(?:\S+ +)?0x[0-9a-f]+ |Binary file |<no Python frame>"
    r"|Extension modules: |stack backtrace:|note: run with `RUST_BACKTRACE|={4} backtrace)"
)
_THREAD: Final = re.compile(
    r"\s*(?P<current>Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"
)
_DUMPED: Final = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_USAGE: Final = re.compile(r"\s{0,2}[Uu]sage: ")
_USAGE_ERROR: Final = re.compile(r"(?:\S{1,200}: error|Error): .")


@dataclass(frozen=True)
class _Style:
    """How a block shows its frames, and the line of code of a frame."""

    frame: re.Pattern[str]
    code: re.Pattern[str] | None = None
    side: str = ""
    """Characters that a box has at the ends of its lines."""


_PYTHON: Final = _Style(
    re.compile(r'\s*File ["“](?P<file>[^"”]+)["”], line (?P<line>\d+)(?:, in (?P<function>.+))?\s*$')
)
_BOX: Final = _Style(
    re.compile(r"\s*(?P<file>[^\s:]+|[A-Za-z]:[^\s:]+):(?P<line>\d+) in (?P<function>\S+)\s*$"),
    re.compile(r"\s*[❱>] *(?P<line>\d+)(?P<code>.*)$"),
    "│┃| ",
)
_CELLS: Final = _Style(
    re.compile(
        r"(?:File )?(?P<file>(?:Cell |Input )In ?\[\d+\]|(?:[~/<]|[A-Za-z]:\\)\S*?|[\w./-]+\.py)"
        r"(?:(?::|, line )(?P<line>\d+))?(?:,? in (?P<function>[^(]+)(?:\(.*)?)?$"
    ),
    re.compile(r"-+> *(?P<line>\d+) (?P<code>.*)$"),
)
_BOX_LINE: Final = re.compile(r"\s*[│╭╰├┃┏┗]")
_BOX_BEGIN: Final = re.compile(r"\s*[╭┏+][─━-].*Traceback")
_CELLS_BEGIN: Final = re.compile(r"\w+ {2,}Traceback")


@dataclass(frozen=True)
class _Head:
    """How a runtime other than Python's says that it fails."""

    pattern: re.Pattern[str]
    type: str = ""
    awaits: re.Pattern[str] | None = None
    """The line with the message, where it follows."""
    crash: bool = False
    """The end of a process, which a native exception before it explains."""


_WHAT: Final = re.compile(r"\s*what\(\): +(?P<message>.+)")
_HEADS: Final = (
    _Head(
        re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'(?P<message>)"),
        awaits=_WHAT,
    ),
    _Head(re.compile(r"(?P<message>terminate called (?:without an active exception|recursively))")),
    _Head(
        re.compile(
            r"libc\+\+abi(?:\.dylib)?: terminat\w+ (?:due to|with) uncaught exception of type "
            r"(?P<type>\S+?)(?:: (?P<message>.*))?$"
        )
    ),
    _Head(_WHAT),
    _Head(
        re.compile(
            r"thread '[^']{0,80}'(?: \(\d+\))? panicked at "
            r"(?:'(?P<message>.*)', )?(?P<file>[^\s:]+):(?P<line>\d+):\d+:?$"
        ),
        "Rust panic",
        re.compile(r"\s*(?P<message>\S.*)"),
    ),
    _Head(re.compile(r"(?P<message>Fatal Python error: .+)"), crash=True),
    _Head(re.compile(r"(?P<message>\*\*\* SIG[A-Z]+ .*received by PID \d+.*)"), crash=True),
    _Head(
        re.compile(r"(?:\[\S+\] )?(?P<message>\*\*\* Process received signal \*\*\*)"),
        awaits=re.compile(r"(?:\[\S+\] )?(?P<message>Signal: .+)"),
        crash=True,
    ),
    _Head(re.compile(r"(?:\[\S+\] )?(?P<message>Caught signal \d+ \(.+)"), crash=True),
    _Head(re.compile(r"=+\d+=+\s*(?P<message>ERROR: \w+Sanitizer: .+)"), crash=True),
)
_ARGUMENTS: Final = re.compile(
    r"\S{1,200}: error: (?:unrecognized arguments|argument |ambiguous option|the following arguments are required"
    r"|one of the arguments |too few arguments)"
)


@dataclass
class _Said:
    """An exception whose header has been read."""

    type: str
    message: str
    line: int
    frames: list[Frame] = field(default_factory=list)
    earlier: Raised | None = None
    handling: bool = False
    outer: _Said | None = None
    """The exception in whose message this one stands."""
    native: bool = False
    crash: bool = False
    awaits: re.Pattern[str] | None = None
    record: bool = False
    colon: bool = True
    more: list[str] = field(default_factory=list)
    gap: bool = False
    over: bool = False
    """The message has ended, but another exception may refer to this one."""

    @property
    def is_open(self) -> bool:
        """Whether the next line has the point."""
        last = self.more[-1].strip() if self.more else self.message.strip()
        return last.endswith((":", '"""')) if last else self.colon

    def raised(self) -> Raised:
        """With the exceptions in whose messages it stands."""
        made = Raised(
            self.type,
            self.message.strip(),
            self.line,
            tuple(self.more),
            tuple(self.frames),
            self.earlier,
            self.handling,
            self.native,
        )
        if self.outer is None:
            return made
        return replace(self.outer, earlier=made, handling=False).raised()


@dataclass
class _Block:
    """Frames whose header has not been read."""

    style: _Style = _PYTHON
    headless: bool = False
    record: bool = False
    earlier: Raised | None = None
    handling: bool = False
    outer: _Said | None = None
    frames: list[Frame] = field(default_factory=list)
    base: int = 0
    """How far the header is indented."""
    foreign: int = 0

    def add(self, found: re.Match[str]) -> None:
        self.frames.append(_frame(found))
        self.base = max(len(_indent(found[0])) - 2, 0)
        if len(self.frames) > MOST_FRAMES:
            del self.frames[MOST_FRAMES // 2]

    def add_code(self, text: str) -> None:
        """Give the last frame its line of code: the first one, or the one with a mark."""
        if not self.frames:
            return
        last = self.frames[-1]
        if self.style.code is None:
            if not last.source:
                self.frames[-1] = replace(last, source=text.strip())
        elif found := self.style.code.match(text):
            self.frames[-1] = replace(
                last, source=found["code"].strip("│┃ "), line=last.line or int(found["line"])
            )

    @property
    def lacks_code(self) -> bool:
        """Whether a line that is not indented may be code: the log has lost the indents."""
        return bool(self.frames) and self.style is _PYTHON and not self.frames[-1].source


class Reader:
    """The exceptions of one process."""

    def __init__(self) -> None:
        self.done: list[Raised] = []
        """Complete exceptions, each with its chain. The caller takes them out."""
        self._block: _Block | None = None
        self._held: _Said | None = None
        self._link: re.Match[str] | None = None
        self._dump: list[Frame] | None = None
        """Frames of a thread, the innermost first in the log."""
        self._group = False
        self._leaf = 0
        """The number in its group of the exception that follows a rule."""
        self._usage = 0
        self._quiet = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is pending: the next line matters only if it begins something."""
        return self._block is None and self._held is None and self._dump is None and not self._usage

    def close(self) -> None:
        """Complete what is pending: the log ends here."""
        self._drop_block()
        self._release()
        self._dump, self._usage, self._group = None, 0, False

    def take(self, text: str, number: int, *, record: bool = False) -> Part:
        """Read the next line."""
        if "\\n" in text and self._take_flat(text[:_MOST_FLAT], number):
            return Part.HEADER
        text = text[:MOST_TEXT].rstrip()
        text = self._without_side(text)
        for step in (self._take_mark, self._take_begin, self._take_dump, self._take_block, self._take_head):
            if (part := step(text, number, record)) is not None:
                self._quiet = 0
                return part
        part = self._take_more(text, record)
        self._wait(part)
        return part

    def _take_flat(self, text: str, number: int) -> bool:
        """A traceback in one line, as JSON and some services have it."""
        found, inner = _BEGIN.search(text), Reader()
        if found is None:
            return False
        lines = text[found.start() :].replace('\\"', '"').split("\\n")
        for line in (*lines[:-1], _END_OF_STRING.sub("", lines[-1])):
            inner.take(line, number)
        inner.close()
        self.done += inner.done
        return bool(inner.done)

    def _without_side(self, text: str) -> str:
        """A line of an exception group, without what the group draws before it."""
        if not self._group or not text:
            return text
        if side := _GROUP_SIDE.match(text):
            return text[side.end() :]
        self._group = _GROUP_RULE.match(text) is not None
        return text

    def _take_mark(self, text: str, number: int, record: bool) -> Part | None:
        """A line that says how the exceptions before and after it belong together."""
        if self._group and (rule := _GROUP_RULE.match(text)):
            self._leaf = int(rule["number"]) if (rule["number"] or "").isdigit() else 0
            if not rule["number"]:
                self._fold()
            return Part.FRAME
        if self._held and text.strip() == '"""' and self._held.outer:
            self._fold()
            return Part.MORE
        if self._held and (link := _LINK.match(text)):
            self._link = link
            return Part.MORE
        return None

    def _take_begin(self, text: str, number: int, record: bool) -> Part | None:
        """The first line of a traceback, perhaps after the header of the exception that it is a part of."""
        found = _BEGIN.search(text)
        if found is None:
            return None
        before = text[: found.start()]
        if head := _ALONE.match(before.rstrip()):
            self._say(_Said(head["type"], "", number, record=record))
        elif self._block and not self._block.frames:
            return Part.FRAME  # two processes have begun at once
        self._group = self._group or _GROUP.match(text) is not None
        style = _BOX if _BOX_BEGIN.match(text) else _CELLS if _CELLS_BEGIN.match(text) else _PYTHON
        within = bool(_WITHIN.search(before) or _OF_RANK.match(text, found.end())) or self._leaf == 1
        self._open(_Block(style, record=record, base=0 if before.strip() else len(before)), within)
        return Part.FRAME

    def _take_dump(self, text: str, number: int, record: bool) -> Part | None:
        """The threads that faulthandler shows. Those of a process that goes on are nobody's."""
        if thread := _THREAD.match(text):
            frames = self._held.frames if self._held and self._held.crash else []
            if thread["current"].startswith("Current"):
                frames.clear()
            self._dump = [] if frames else frames
            return Part.FRAME
        if self._dump is None:
            return None
        if found := _DUMPED.match(text):
            self._dump.insert(0, _frame(found))
            del self._dump[:-MOST_FRAMES]
        elif text and not _NATIVE_FRAME.match(text):
            self._dump = None
            return None
        return Part.FRAME

    def _take_block(self, text: str, number: int, record: bool) -> Part | None:
        """A line of the block, or a frame that begins one without a header."""
        block = self._block
        if block is None:
            return self._take_headless(text, record)
        if not text:
            return Part.FRAME
        boxed = block.style is _BOX and (_BOX_LINE.match(text) is not None or text.lstrip()[:1] == "|")
        body = text.strip(_BOX.side) if boxed else text
        is_foreign = record and not block.record
        if not is_foreign and (found := block.style.frame.match(body) or _PYTHON.frame.match(body)):
            block.add(found)
            return Part.FRAME
        if not boxed and (head := _header(body, block)) and (not is_foreign or _ALONE.match(body)):
            self._block = None
            self._say(_from_block(block, head, number, record))
            return Part.HEADER
        if not is_foreign and (boxed or _is_code(body, block)):
            block.add_code(body)
            return Part.FRAME
        block.foreign += 1
        if block.foreign > (_MOST_FOREIGN_HEADLESS if block.headless else _MOST_FOREIGN):
            self._drop_block()
        return None

    def _take_headless(self, text: str, record: bool) -> Part | None:
        boxed = _BOX_LINE.match(text) is not None
        style = _BOX if boxed else _PYTHON
        found = style.frame.match(text.strip(_BOX.side) if boxed else text)
        if found is None:
            return None
        remote = (
            self._held is not None and _REMOTE.match((self._held.message, *self._held.more)[-1]) is not None
        )
        block = _Block(style, headless=True, record=record)
        self._open(block, remote)
        block.add(found)
        return Part.FRAME

    def _take_head(self, text: str, number: int, record: bool) -> Part | None:
        """A header without frames before it."""
        held = self._held
        if held and held.awaits and (found := held.awaits.match(text)):
            held.message, held.awaits = found["message"], None
            return Part.MORE
        for head in _HEADS:
            if found := head.pattern.match(text):
                self._take_native(head, found.groupdict(), number, record)
                return Part.HEADER
        if (usage := self._take_usage(text, number)) is not None:
            return usage
        named = _alone(text)
        if named is None:
            return None
        said = _Said(named[0], named[1], number, record=record)
        self._adopt(said, within=False)
        self._say(said)
        return Part.HEADER

    def _take_native(self, head: _Head, found: dict[str, str | None], number: int, record: bool) -> None:
        held, type_ = self._held, found.get("type") or head.type
        if held and held.native and not held.crash:
            if held.awaits and held.type == type_:
                return  # of several processes, one after the other
            type_ = held.type if head.pattern is _WHAT else type_
        said = _Said(type_, found.get("message") or "", number, native=True, crash=head.crash, record=record)
        said.awaits = None if found.get("message") and not head.crash else head.awaits
        if found.get("file"):
            said.frames.append(Frame(found["file"] or "", int(found["line"] or 0), ""))
        if held and head.crash and held.native and not held.crash:
            said.earlier, self._held = held.raised(), None
        self._say(said)

    def _take_usage(self, text: str, number: int) -> Part | None:
        """How argparse and click end a program."""
        if _ARGUMENTS.match(text) or (self._usage and _USAGE_ERROR.match(text)):
            self._usage = 0
            self._say(_Said("", text, number))
            return Part.HEADER
        if _USAGE.match(text):
            self._usage = _USAGE_LINES
        elif not self._usage:
            return None
        self._usage -= 1
        return Part.FRAME if not text or text[0] == " " or _USAGE.match(text) else None

    def _take_more(self, text: str, record: bool) -> Part:
        """A further line of the message, or none."""
        held = self._held
        if held is None or held.over:
            return Part.NONE
        if _NATIVE_FRAME.match(text):
            return Part.MORE
        if not text:
            held.gap = True
            return Part.MORE
        continued = not record or (held.record and (held.is_open or text[0] in " \t"))
        held.over = (
            not continued
            or (held.gap and not held.is_open)
            or _PROMPT.match(text) is not None
            or len(held.more) >= MOST_MORE
        )
        if held.over:
            return Part.NONE
        held.more.append(text)
        held.gap = False
        return Part.MORE

    def _wait(self, part: Part) -> None:
        """Complete an exception to which no other one refers in time."""
        self._quiet = 0 if part is Part.MORE and self._held and not self._held.gap else self._quiet + 1
        if self._quiet > _PATIENCE:
            self._release()

    def _adopt(self, into: _Block | _Said, within: bool) -> None:
        """Chain the held exception to the one that begins, if the log says that they belong together."""
        held, self._held = self._held, None
        if held is None:
            return
        if self._link:
            into.earlier, into.handling = replace(held, outer=None).raised(), bool(self._link["handling"])
            into.outer = held.outer
        elif within or (held.is_open and not held.over):
            into.outer = held
        else:
            self.done.append(held.raised())
        self._link = None

    def _open(self, block: _Block, within: bool) -> None:
        self._drop_block()
        self._adopt(block, within)
        self._block, self._leaf, self._dump = block, 0, None

    def _say(self, said: _Said) -> None:
        self._release()
        self._held = said

    def _fold(self) -> None:
        """End the messages in which the held exception stands."""
        while self._held and (outer := self._held.outer):
            self._held = replace(outer, earlier=replace(self._held, outer=None).raised(), handling=False)
        if self._held:
            self._held.over = True

    def _release(self) -> None:
        if self._held is not None:
            self.done.append(self._held.raised())
        self._held, self._link = None, None

    def _drop_block(self) -> None:
        """Give up frames that have no header. What was chained to them stays."""
        block, self._block = self._block, None
        if block is not None and block.earlier is not None:
            self.done.append(block.earlier)
        if block is not None and block.outer is not None:
            self.done.append(block.outer.raised())


def _frame(found: re.Match[str]) -> Frame:
    return Frame(found["file"], int(found["line"] or 0), (found["function"] or "").strip())


def _indent(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _is_code(text: str, block: _Block) -> bool:
    """Whether a line belongs to the last frame: code, markers below it, or the code around it."""
    if block.style is _CELLS:
        return text[0] in " -\t"
    return len(_indent(text)) > block.base or _MARKERS.match(text) is not None or block.lacks_code


def _header(text: str, block: _Block) -> re.Match[str] | None:
    """A header of the block: an exception's name, no further in than the block itself."""
    if found := _ALONE.match(text):
        return found
    if block.style is not _BOX and len(_indent(text)) > block.base:
        return None
    found = _NAMED.match(text)
    return found if found and _is_class(found["type"]) else None


def _from_block(block: _Block, head: re.Match[str], number: int, record: bool) -> _Said:
    return _Said(
        head["type"],
        head["message"] or "",
        number,
        block.frames,
        block.earlier,
        block.handling,
        block.outer,
        record=record,
        colon=head.groupdict().get("colon", ":") is not None,
    )


def _alone(text: str) -> tuple[str, str] | None:
    """The type and the message of an exception's header that stands alone."""
    found = _ALONE.match(text) if text[:1] not in " \t" else None
    found = found or _SHOWN.match(text)
    if found is not None:
        message = found["message"] or ""
        is_metric = _NUMBER.match(message) is not None and not _is_builtin(found["type"])
        return None if is_metric else (found["type"], message)
    return (text, "") if _is_builtin(text) else None


def _is_builtin(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, Warning)


def _is_class(name: str) -> bool:
    """Whether a name looks like that of an exception: `KeyError`, `queue.Empty`, `StopIteration`."""
    _, dot, last = name.rpartition(".")
    lower = ("error", "timeout", "Error", "Exception")
    return (
        name.endswith(lower if dot else lower[2:])
        or (bool(dot) and last[:1].isupper())
        or _TWO_CAPITALS.match(last) is not None
        or _is_builtin(name)
    )
