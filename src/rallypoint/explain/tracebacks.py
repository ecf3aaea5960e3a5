"""Reads exceptions from the lines of one process: Python's tracebacks and those of other runtimes. Pure.

A traceback is a block of frames, and a header that names the exception ends it. The header's message may go
on in further lines. One of those may open the traceback of another exception, which is then the earlier one.
Logs are cut, so frames may come without a beginning, and a header may stand alone. What other runtimes write
when they fail is a table of headers, `_HEADS`. Lines of other writers are skipped, up to a limit.
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
_MOST_FLAT: Final = 32_000
_MOST_FOREIGN: Final = 50
_MOST_FOREIGN_HEADLESS: Final = 8
_PATIENCE: Final = 20
"""Lines after a message in which another exception may refer to its own."""


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
# An exception group draws a line down its side, and a rule before each of the exceptions in it.
_GROUP: Final = re.compile(r"\s*\+ Exception Group Traceback")
_GROUP_SIDE: Final = re.compile(r"\s*\| ?")
_GROUP_RULE: Final = re.compile(r"\s*\+(?:-\+)?-{10,}(?: (?P<number>\d+|\.\.\.) -{10,})?$")
# A header after frames is any class; one that stands alone must have a name that tells.
_NAMED: Final = re.compile(
    r"\s*(?P<type>[A-Za-z_][\w.<>]*(?:\(\w+\))?)(?:(?P<colon> ?:)(?: (?P<message>.*))?)?$"
)
_MODULES: Final = r"(?:[A-Za-z_][\w<>]*\.)*"
_ALONE: Final = re.compile(
    rf"\s*(?P<type>{_MODULES}(?:_?[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout|Fault|Traceback|Group)"
    r"|Exception|(?:(?<=exc\.)|(?<=errors\.)|(?<=exceptions\.))[A-Z]\w+)(?:\(\w+\))?)"
    r"(?P<colon>:)(?: (?P<message>.*))?$"
)
_SHOWN: Final = re.compile(
    rf"(?P<type>{_MODULES}[A-Z]\w*(?:Error|Exception))\((?P<quote>[\"'])(?P<message>.*)(?P=quote),?\)$"
)
_NUMBER: Final = re.compile(r"\s*[-+]?[\d.]+(?:e[-+]?\d+)?%?\s*$")
_TWO_CAPITALS: Final = re.compile(r"[^A-Z]*[A-Z][^a-z]*[a-z][^A-Z]*[A-Z]")
# What shows that a traceback is a part of the message before it.
_ORIGINAL: Final = re.compile(r"(?i).*\boriginal traceback |.*call last\):? \(RANK \d+\)")
_REMOTE: Final = re.compile(r"\s*ray::.+\(pid=")
_PROMPT: Final = re.compile(r"(?:\([\w.-]+\) ?)?\[?[\w.-]+@[\w.-]+[: ][^$#]*[$#] |\$ |>>> ")
_NATIVE_FRAME: Final = re.compile(
    r"\s*(?:frame #\d+: |@ +0x|#\d+ +0x|\[ *\d+\] [/\w(]|\d+:? +(?:\S+ +)?0x[0-9a-f]+ |Binary file "
    r"|<no Python frame>|Extension modules: |stack backtrace:|note: run with `RUST_BACKTRACE|={4} backtrace)"
)
_THREAD: Final = re.compile(
    r"\s*(?P<current>Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"
)
_DUMPED: Final = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')


@dataclass(frozen=True)
class _Style:
    """How a block shows its frames, and the line of code of a frame."""

    frame: re.Pattern[str]
    code: re.Pattern[str] = re.compile(r"(?P<line>)\s*(?P<code>.*)")


_PYTHON: Final = _Style(
    re.compile(r'\s*File ["“](?P<file>[^"”]+)["”], line (?P<line>\d+)(?:, in (?P<function>.+))?\s*$')
)
_BOX: Final = _Style(
    re.compile(r"\s*(?P<file>[^\s:]+|[A-Za-z]:[^\s:]+):(?P<line>\d+) in (?P<function>\S+)\s*$"),
    re.compile(r"\s*[❱>] *(?P<line>\d+)(?P<code>.*)$"),
)
_NOTEBOOK: Final = _Style(
    re.compile(
        r"(?:File )?(?P<file>(?:Cell |Input )In ?\[\d+\]|(?:[~/<]|[A-Za-z]:\\)\S*?|[\w./-]+\.py)"
        r"(?:(?::|, line )(?P<line>\d+))?(?:,? in (?P<function>[^(]+)(?:\(.*)?)?$"
    ),
    re.compile(r"-+> *(?P<line>\d+) (?P<code>.*)$"),
)
_BEGINS: Final = (
    (re.compile(r"\s*[╭┏+][─━-].*Traceback"), _BOX),
    (re.compile(r"\w+ {2,}Traceback"), _NOTEBOOK),
)
_BOX_LINE: Final = re.compile(r"\s*[│╭╰├┃┏┗]")
_BOX_SIDES: Final = "│┃| "


@dataclass(frozen=True)
class _Head:
    """How something other than Python's traceback says that a program fails."""

    mark: str
    """Every line of the kind has it; it is found faster than the pattern."""
    pattern: re.Pattern[str]
    awaits: re.Pattern[str] | None = None
    """The line with the message, where it follows."""
    native: bool = True
    crash: bool = False
    """The end of a process, which a native exception before it explains."""


_WHAT: Final = re.compile(r"\s*what\(\): +(?P<message>.+)")
_SIGNAL: Final = re.compile(r"(?:\[\S+\] )?(?P<message>Signal: .+)")
_HEADS: Final = (
    _Head(
        "terminate called after",
        re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'"),
        _WHAT,
    ),
    _Head(
        "terminate called",
        re.compile(r"(?P<message>terminate called (?:without an active exception|recursively))"),
    ),
    _Head(
        "libc++abi",
        re.compile(r"libc\+\+abi.* uncaught exception of type (?P<type>\S+?)(?:: (?P<message>.*))?$"),
    ),
    _Head("what():", _WHAT),
    _Head(
        "panicked at",
        re.compile(
            r"thread '.{0,80}' (?:\(\d+\) )?(?P<type>panicked) at (?P<file>[^\s:']+):(?P<line>\d+):\d+:$"
        ),
        re.compile(r"\s*(?P<message>\S.*)"),
    ),
    _Head(
        "panicked at",
        re.compile(
            r"thread '.{0,80}' (?P<type>panicked) at '(?P<message>.*)', (?P<file>[^\s:]+):(?P<line>\d+):\d+$"
        ),
    ),
    _Head("Fatal Python error: ", re.compile(r"(?P<message>Fatal Python error: .+)"), crash=True),
    _Head("*** SIG", re.compile(r"(?P<message>\*\*\* SIG[A-Z]+ .*received by PID \d+.*)"), crash=True),
    _Head(
        "*** Process received signal",
        re.compile(r".*(?P<message>\*\*\* Process received signal \*\*\*)"),
        _SIGNAL,
        crash=True,
    ),
    _Head("Caught signal ", re.compile(r"(?:\[\S+\] )?(?P<message>Caught signal \d+ \(.+)"), crash=True),
    _Head("Sanitizer: ", re.compile(r"=+\d+=+\s*(?P<message>ERROR: \w+Sanitizer: .+)"), crash=True),
    _Head(
        ": error: ",
        re.compile(
            r"(?P<message>\S{1,200}(?:\.py: error: |: error: (?:unrecognized arguments|argument "
            r"|ambiguous option|the following arguments are required|one of the arguments )).*)"
        ),
        native=False,
    ),
)


@dataclass
class _Exception:
    """An exception, as far as it has been read."""

    type: str = ""
    message: str = ""
    line: int = 0
    record: bool = False
    frames: list[Frame] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    earlier: Raised | None = None
    handling: bool = False
    native: bool = False
    outer: _Exception | None = None
    """The exception in whose message this one stands."""
    # While its header has not been read:
    style: _Style = _PYTHON
    base: int = 0
    """How far the header is indented."""
    foreign: int = 0
    """How many more lines of other writers may come before the header."""
    # After it:
    head: _Head | None = None
    waits: bool = False
    """Whether the line with the message is to follow."""
    colon: bool = True
    gap: bool = False
    over: bool = False
    """The message has ended, but another exception may refer to this one."""

    @property
    def is_crash(self) -> bool:
        return self.head is not None and self.head.crash

    @property
    def is_open(self) -> bool:
        """Whether the next line has the point."""
        last = self.more[-1].strip() if self.more else self.message.strip()
        return not self.over and (last.endswith((":", '"""')) if last else self.colon)

    def raised(self) -> Raised:
        """With the exceptions in whose messages it stands."""
        made = Raised(
            *(self.type, self.message.strip(), self.line, tuple(self.more), tuple(self.frames)),
            *(self.earlier, self.handling, self.native),
        )
        return replace(self.outer, earlier=made, handling=False).raised() if self.outer else made

    def add(self, found: re.Match[str]) -> None:
        """Add a frame."""
        self.frames.append(_frame(found))
        self.base = max(_indent(found[0]) - 2, 0)
        if len(self.frames) > MOST_FRAMES:
            del self.frames[MOST_FRAMES // 2]

    def add_code(self, text: str) -> None:
        """Give the last frame its line of code: the first one, or the one with a mark."""
        found = self.style.code.match(text)
        if found and self.frames and not (last := self.frames[-1]).source:
            line = last.line or int(found["line"] or 0)
            self.frames[-1] = replace(last, source=found["code"].strip(_BOX_SIDES), line=line)

    def is_code(self, text: str) -> bool:
        """Whether a line belongs to the last frame. A log that has lost its indents has the code next."""
        lacks = bool(self.frames) and self.style is _PYTHON and not self.frames[-1].source
        return text[0] in " -\t" if self.style is _NOTEBOOK else _indent(text) > self.base or lacks

    def header(self, text: str) -> re.Match[str] | None:
        """The name of an exception, no further in than the traceback itself."""
        found = _ALONE.match(text)
        if found or (self.style is not _BOX and _indent(text) > self.base):
            return found
        found = _NAMED.match(text)
        return found if found and _is_class(found["type"]) else None


class Reader:
    """The exceptions of one process."""

    def __init__(self) -> None:
        self.done: list[Raised] = []
        """Complete exceptions, each with its chain. The caller takes them out."""
        self._block: _Exception | None = None
        """The one whose frames are being read."""
        self._held: _Exception | None = None
        """The one whose header was the last."""
        self._link: re.Match[str] | None = None
        self._dump: list[Frame] | None = None
        """Frames of a thread that faulthandler shows."""
        self._group = False
        self._first_of_group = False
        self._quiet = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is pending: the next line matters only if it begins something."""
        return self._block is None and self._held is None and self._dump is None

    def close(self) -> None:
        """Complete what is pending: the log ends here."""
        self._drop_block()
        self._release()
        self._dump, self._group = None, False

    def take(self, text: str, number: int, *, record: bool = False) -> Part:
        """Read the next line."""
        if "\\n" in text and self._take_flat(text[:_MOST_FLAT], number):
            return Part.HEADER
        text = self._without_side(text[:MOST_TEXT].rstrip())
        part = (
            self._take_mark(text)
            or self._take_begin(text, number, record)
            or self._take_dump(text)
            or (self._take_block(text, number, record) if self._block else self._take_headless(text, record))
            or self._take_awaited(text)
            or self._take_head(text, number, record)
            or self._take_more(text, record)
        )
        blank = self._held is not None and self._held.gap
        self._quiet = self._quiet + 1 if part is Part.NONE or blank else 0
        if self._quiet > _PATIENCE:
            self._release()
        return part

    def _take_flat(self, text: str, number: int) -> bool:
        """A traceback in one line, as JSON and some services have it."""
        found, inner = _BEGIN.search(text), Reader()
        if found is not None:
            *lines, last = text[found.start() :].replace('\\"', '"').split("\\n")
            for line in (*lines, _END_OF_STRING.sub("", last)):
                inner.take(line, number)
            inner.close()
        self.done += inner.done
        return bool(inner.done)

    def _without_side(self, text: str) -> str:
        """A line of an exception group, without what the group draws before it."""
        side = _GROUP_SIDE.match(text) if self._group else None
        self._group = self._group and (not text or side is not None or _GROUP_RULE.match(text) is not None)
        return text[side.end() :] if side else text

    def _take_mark(self, text: str) -> Part | None:
        """A line that says how the exceptions before and after it belong together."""
        rule = _GROUP_RULE.match(text) if self._group else None
        if rule:
            self._first_of_group = rule["number"] == "1"
        if (rule and not rule["number"]) or text.strip() == '"""':
            self._fold()
        if self._held and (link := _LINK.match(text)):
            self._link = link
            return Part.MORE
        return Part.FRAME if rule else None

    def _take_begin(self, text: str, number: int, record: bool) -> Part | None:
        """The first line of a traceback, perhaps after the header of the exception that it is a part of."""
        found = _BEGIN.search(text) if "(most recent call last)" in text else None
        if found is None:
            return None
        before = text[: found.start()]
        if head := _ALONE.match(before.rstrip()):
            self._say(_Exception(head["type"], "", number, record))
        elif self._block and not self._block.frames:
            return Part.FRAME  # two processes have begun at once
        self._group = self._group or _GROUP.match(text) is not None
        style = next((style for pattern, style in _BEGINS if pattern.match(text)), _PYTHON)
        base = 0 if before.strip() else len(before)
        block = _Exception(record=record, style=style, base=base, foreign=_MOST_FOREIGN)
        self._open(block, self._first_of_group or _ORIGINAL.match(text) is not None)
        return Part.FRAME

    def _take_dump(self, text: str) -> Part | None:
        """The threads that faulthandler shows. Those of a process that goes on are nobody's."""
        if thread := _THREAD.match(text):
            frames = self._held.frames if self._held and self._held.is_crash else []
            if thread["current"].startswith("Current"):
                frames.clear()
            self._dump = [] if frames else frames
        elif self._dump is not None and (found := _DUMPED.match(text)):
            self._dump.insert(0, _frame(found))
            del self._dump[:-MOST_FRAMES]
        elif text and not _NATIVE_FRAME.match(text):
            self._dump = None
        return None if self._dump is None else Part.FRAME

    def _take_block(self, text: str, number: int, record: bool) -> Part | None:
        """A line between the beginning of a traceback and its header."""
        block = self._block
        if block is None or not text:
            return Part.FRAME
        boxed = block.style is _BOX and bool(_BOX_LINE.match(text) or text.lstrip()[0] == "|")
        body = text.strip(_BOX_SIDES) if boxed else text
        own = block.record or not record
        if own and (found := block.style.frame.match(body) or _PYTHON.frame.match(body)):
            block.add(found)
            return Part.FRAME
        if not boxed and (head := block.header(body) if own else _ALONE.match(body)):
            self._release()
            self._block, self._held = None, block
            block.type, block.message, block.line = head["type"], head["message"] or "", number
            block.record, block.colon = record, head["colon"] is not None
            return Part.HEADER
        if own and (boxed or block.is_code(body)):
            block.add_code(body)
            return Part.FRAME
        block.foreign -= 1
        if block.foreign < 0:
            self._drop_block()
        return None

    def _take_headless(self, text: str, record: bool) -> Part | None:
        """A frame without the beginning of a traceback."""
        style = _BOX if _BOX_LINE.match(text) else _PYTHON
        found = style.frame.match(text.strip(_BOX_SIDES) if style is _BOX else text)
        if found is None:
            return None
        last = (self._held.message, *self._held.more)[-1] if self._held else ""
        block = _Exception(record=record, style=style, foreign=_MOST_FOREIGN_HEADLESS)
        self._open(block, _REMOTE.match(last) is not None)
        block.add(found)
        return Part.FRAME

    def _take_awaited(self, text: str) -> Part | None:
        """The message that follows the header."""
        held = self._held
        if held is None or not held.waits or not held.head or not held.head.awaits:
            return None
        found = held.head.awaits.match(text)
        if found is not None:
            held.message, held.waits = found["message"], False
        return Part.MORE if found else None

    def _take_head(self, text: str, number: int, record: bool) -> Part | None:
        """A header without frames before it."""
        for head in _HEADS:
            if head.mark in text and (found := head.pattern.match(text)):
                self._take_native(head, found.groupdict(), number)
                return Part.HEADER
        named = _alone(text)
        if named is None:
            return None
        said = _Exception(*named, number, record)
        self._adopt(said, within=False)
        self._say(said)
        return Part.HEADER

    def _take_native(self, head: _Head, found: dict[str, str | None], number: int) -> None:
        said = _Exception(found.get("type") or "", found.get("message") or "", number)
        said.head, said.native, said.waits = head, head.native, head.awaits is not None
        if found.get("file"):
            said.frames.append(Frame(found["file"] or "", int(found["line"] or 0), ""))
        held = self._held
        if held and held.head and not held.is_crash:
            if held.waits and held.type == said.type:
                return  # several processes say it, one after the other
            if head.crash:
                said.earlier, self._held = held.raised(), None
            elif head.pattern is _WHAT:
                said.type = held.type
        self._say(said)

    def _take_more(self, text: str, record: bool) -> Part:
        """A further line of the message, or none."""
        held = self._held
        if held is None or held.over:
            return Part.NONE
        held.gap = held.gap or not text
        if not text or _NATIVE_FRAME.match(text):
            return Part.MORE
        foreign = record and not (held.record and (held.is_open or text[0] in " \t"))
        ended = (held.gap and not held.is_open) or len(held.more) >= MOST_MORE
        held.over = foreign or ended or _PROMPT.match(text) is not None
        if held.over:
            return Part.NONE
        held.more.append(text)
        held.gap = False
        return Part.MORE

    def _adopt(self, new: _Exception, within: bool) -> None:
        """Chain the held exception to the one that begins, if the log says that they belong together."""
        held, self._held = self._held, None
        if held and self._link:
            new.earlier, new.handling = replace(held, outer=None).raised(), bool(self._link["handling"])
            new.outer = held.outer
        elif held and (within or held.is_open):
            new.outer = held
        elif held:
            self.done.append(held.raised())
        self._link = None

    def _open(self, block: _Exception, within: bool) -> None:
        self._drop_block()
        self._adopt(block, within)
        self._block, self._first_of_group, self._dump = block, False, None

    def _say(self, said: _Exception) -> None:
        self._release()
        self._held = said

    def _fold(self) -> None:
        """End the messages in which the held exception stands."""
        while self._held and (outer := self._held.outer):
            earlier = replace(self._held, outer=None).raised()
            self._held = replace(outer, earlier=earlier, handling=False, over=True)

    def _release(self) -> None:
        if self._held:
            self.done.append(self._held.raised())
        self._held, self._link = None, None

    def _drop_block(self) -> None:
        """Give up frames that have no header. What was chained to them stays."""
        block, self._block = self._block, None
        if block and block.earlier:
            self.done.append(block.earlier)
        if block and block.outer:
            self.done.append(block.outer.raised())


def _frame(found: re.Match[str]) -> Frame:
    return Frame(found["file"], int(found["line"] or 0), (found["function"] or "").strip())


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _alone(text: str) -> tuple[str, str] | None:
    """The type and the message of an exception's header that stands alone."""
    found = (_ALONE.match(text) if text[:1] not in " \t" else None) or _SHOWN.match(text)
    if found is None:
        return (text, "") if _is_builtin(text) else None
    message = found["message"] or ""
    is_metric = _NUMBER.match(message) is not None and not _is_builtin(found["type"])
    return None if is_metric else (found["type"], message)


def _is_builtin(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, Warning)


def _is_class(name: str) -> bool:
    """Whether a name looks like that of an exception: `KeyError`, `queue.Empty`, `socket.timeout`."""
    dotted, last = "." in name, name.rpartition(".")[2]
    if name.endswith(("Error", "Exception")) or _TWO_CAPITALS.match(last) or _is_builtin(name):
        return True
    return dotted and (last[0:1].isupper() or last.endswith(("error", "timeout")))
