"""Reads exceptions from the lines of one process: Python's tracebacks and those of other runtimes. Pure.

A traceback is a block of frames, and a header that names the exception ends it. The header's message may go
on in further lines. One of those may open the traceback of another exception, which is then the earlier one.
Logs are cut, so frames may come without a beginning, and a header may stand alone. All headers, also those
of other runtimes, are in tracebacks.toml. Lines of other writers are skipped, up to a limit.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from typing import Final

from rallypoint.explain.events import Raised
from rallypoint.explain.lines import compiled, load
from rallypoint.frames import QuotedFrame

_MOST_NESTED: Final = 20
MOST_FRAMES: Final = 200
MOST_TEXT: Final = 2_000
MOST_MORE: Final = 12
_MOST_FOREIGN: Final = 50
_PATIENCE: Final = 20
"""Lines after a message in which another exception may refer to its own."""


class Part(enum.Enum):
    """What a line is to an exception."""

    NONE = "none"
    FRAME = "frame"
    HEADER = "header"
    MORE = "more"


# Frames, bare or in the box that rich draws.
_BEGIN: Final = re.compile(r"(?i)traceback \(most recent call last\)")
_FRAME: Final = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<function>.+))?\s*$')
_BOX: Final = re.compile(r"\s*[│╭╰├┃┏┗]")
_BOX_SIDES: Final = "│┃ "
_BOX_FRAME: Final = re.compile(r"(?P<file>(?:[A-Za-z]:)?[^\s:]+):(?P<line>\d+) in (?P<function>\S+)$")
_BOX_CODE: Final = re.compile(r"[❱>] *\d+(?P<code>.*)$")
_THREAD: Final = re.compile(r"\s*(?:(?P<current>Current t)|T)hread 0x[0-9a-f]+ .*\(most recent call first\):")

# Headers, and whether one is the end of its process.
_TABLE: Final = "tracebacks.toml"
_HEADERS: Final = {name: compiled(row["pattern"], _TABLE) for name, row in load(_TABLE)["header"].items()}
_AFTER_FRAMES, _ALONE, _BUILTIN = (_HEADERS[name] for name in ("after_frames", "alone", "builtin"))
_NATIVE: Final = [(compiled(row["pattern"], _TABLE), "crash" in row) for row in load(_TABLE)["failure"]]
_NATIVE_FRAME: Final = compiled(load(_TABLE)["frames"], _TABLE)

# How exceptions belong together. A group draws a line down its side, and a rule before each of its members.
_LINK: Final = re.compile(
    r"\s*(?:(?P<handling>During handling of the above exception, another exception occurred)"
    r"|The above exception was the direct cause of the following exception)"
)
_ORIGINAL: Final = re.compile(r"(?i).*\boriginal traceback |.*call last\):? \(RANK \d+\)")
_REMOTE: Final = re.compile(r"\s*ray::.+\(pid=")
_SIDE: Final = re.compile(r"^\s*(?:\| ?|\+-[-+ \d.]+$)")
_END: Final = re.compile(r'\s*(?:"""|\+-{20,})$')


@dataclass
class _Exception:
    """An exception, as far as it has been read."""

    record: bool = False
    type: str = ""
    message: str = ""
    line: int = 0
    frames: list[QuotedFrame] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    earlier: Raised | None = None
    handling: bool = False
    native: bool = False
    crash: bool = False
    outer: _Exception | None = None
    """The exception in whose message this one stands."""
    depth: int = 0
    boxed: bool = False
    base: int = 0
    """How far its header is indented."""
    foreign: int = 0
    """Lines of other writers before the header."""
    colon: bool = True
    over: bool = False
    """The message has ended, but another exception may refer to this one."""

    @property
    def last(self) -> str:
        return [self.message, *self.more][-1].strip()

    @property
    def is_open(self) -> bool:
        """Whether the next line has the point."""
        return not self.over and (self.last.endswith((":", '"""')) if self.last else self.colon)

    def alone(self) -> Raised:
        """Without the exceptions in whose messages it stands. Its message may begin below the header."""
        said = [self.message, *self.more]
        below = self.more and not self.message and (self.native or (self.colon and not self.earlier))
        message, *more = said[1:] if below else said
        return Raised(
            *(self.type, message.strip(), self.line, tuple(more), tuple(self.frames)),
            *(self.earlier, self.handling, self.native),
        )

    def folded(self) -> _Exception:
        """The outermost exception in whose message it stands, with those within it; or itself."""
        if self.outer is None:
            return self
        return replace(self.outer, earlier=self.alone(), handling=False, over=True).folded()

    def add(self, found: re.Match[str]) -> None:
        """Add a frame."""
        self.frames.append(_frame(found))
        self.base = max(_indent(found[0]) - 2, 0)
        del self.frames[MOST_FRAMES // 2 : -MOST_FRAMES // 2]

    def add_code(self, text: str) -> None:
        """Give the last frame its line of code: the first one, or in a box the one with a mark."""
        code = _BOX_CODE.sub(r"\g<code>", text) if self.boxed else text
        if self.frames and not self.frames[-1].source and (code != text or not self.boxed):
            self.frames[-1] = replace(self.frames[-1], source=code.strip(_BOX_SIDES))

    def name(self, header: re.Match[str], number: int) -> _Exception:
        """Read its header."""
        told = {"type": "", "message": "", "colon": ":", **header.groupdict(default="")}
        self.type, self.message, self.line = told["type"], told["message"], number
        self.colon = bool(told["colon"])
        if "file" in told:
            self.add(header)
        return self


class Reader:
    """The exceptions of one process. Frames without a header yet are a block; what a header named is held."""

    def __init__(self) -> None:
        self.done: list[Raised] = []
        """Complete exceptions, each with its chain. The caller removes them."""
        self._block: _Exception | None = None
        self._held: _Exception | None = None
        self._link: re.Match[str] | None = None
        self._dump: list[QuotedFrame] | None = None
        """Frames of a thread that faulthandler shows."""
        self._quiet = 0
        """How many lines in a row were no part of an exception."""

    @property
    def idle(self) -> bool:
        """Whether nothing is pending: the next line matters only if it begins something."""
        return self._block is None and self._held is None and self._dump is None

    def close(self) -> None:
        """Complete what is pending: the log ends here."""
        self._drop_block()
        self._hold(None)

    def read(self, text: str, number: int, *, record: bool = False) -> Part:
        """Read the next line."""
        text = text[:MOST_TEXT].rstrip()
        if self._held and _END.match(text):
            self._held = self._held.folded()
        text = _SIDE.sub("", text)
        part = (
            self._read_link(text)
            or self._read_begin(text, number, record)
            or self._read_dump(text)
            or self._read_frame(text, record)
            or self._read_block(text, number, record)
            or self._read_native(text, number)
            or self._read_header(text, number)
            or self._read_more(text, record)
        )
        self._quiet = self._quiet + 1 if part is Part.NONE or not text else 0
        if self._quiet > _PATIENCE:
            self._hold(None)
        return part

    def _read_link(self, text: str) -> Part | None:
        """A line that says how the exceptions before and after it belong together."""
        link = _LINK.match(text) if self._held else None
        self._link = link or self._link
        return Part.MORE if link else None

    def _read_begin(self, text: str, number: int, record: bool) -> Part | None:
        """The first line of a traceback, perhaps after the header of the exception that it is a part of."""
        found = _BEGIN.search(text)
        if found is None:
            return None
        if head := _ALONE.match(text[: found.start()].strip()):
            self._hold(_Exception().name(head, number))
        block = _Exception(record, boxed=_BOX.match(text) is not None)
        self._open(block, within=_ORIGINAL.match(text) is not None)
        return Part.FRAME

    def _read_dump(self, text: str) -> Part | None:
        """The threads that faulthandler shows; only the current one of a process that crashed matters."""
        if thread := _THREAD.match(text):
            crash = self._held if self._held and self._held.crash and thread["current"] else None
            self._dump = crash.frames if crash else []
        elif self._dump is not None and (found := _FRAME.match(text)):
            self._dump.insert(0, _frame(found))
        elif text and not _NATIVE_FRAME.match(text):
            self._dump = None
        return None if self._dump is None else Part.FRAME

    def _read_frame(self, text: str, record: bool) -> Part | None:
        """A frame; without the beginning of a traceback it begins one."""
        boxed = _BOX.match(text) is not None
        found = _BOX_FRAME.match(text.strip(_BOX_SIDES)) if boxed else _FRAME.match(text)
        if found is None or (self._block and record and not self._block.record):
            return None
        block = self._block or _Exception(record, boxed=boxed)
        if self._block is None:
            self._open(block, within=self._held is not None and _REMOTE.match(self._held.last) is not None)
        block.add(found)
        return Part.FRAME

    def _read_block(self, text: str, number: int, record: bool) -> Part | None:
        """Another line between the beginning of a traceback and its header, or the header."""
        block = self._block
        if block is None or not text:
            return Part.FRAME if block else None
        own = block.record or not record
        in_box = block.boxed and _BOX.match(text) is not None
        deeper = in_box or (not block.boxed and _indent(text) > block.base)
        head = None if in_box else _ALONE.match(text.lstrip())
        if head := head or (_AFTER_FRAMES.match(text.lstrip()) if own and not deeper else None):
            self._block = None
            self._hold(block.name(head, number))
            return Part.HEADER
        lacks_code = block.frames and not block.frames[-1].source  # next, if the log has lost its indents
        if own and (deeper or lacks_code):
            block.add_code(text.strip(_BOX_SIDES))
            return Part.FRAME
        block.foreign += 1
        if block.foreign > _MOST_FOREIGN:
            self._drop_block()
        return None

    def _read_native(self, text: str, number: int) -> Part | None:
        """What another runtime says when it fails."""
        tried = ((pattern.match(text), crash) for pattern, crash in _NATIVE)
        header, crash = next((each for each in tried if each[0]), (None, False))
        if header is None:
            return None
        said = _Exception(native=True, crash=crash).name(header, number)
        held = self._held if self._held and self._held.native and not self._held.crash else None
        if held and not held.message and said.type in ("", held.type) and not crash:
            held.message = said.message  # several processes may begin at once
            return Part.HEADER
        if held and crash:
            said.earlier, self._held = held.alone(), None
        self._hold(said)
        return Part.HEADER

    def _read_header(self, text: str, number: int) -> Part | None:
        """A header without frames before it."""
        head = _ALONE.match(text) or _BUILTIN.match(text)
        if head is None:
            return None
        said = _Exception().name(head, number)
        self._adopt(said, within=False)
        self._held = said
        return Part.HEADER

    def _read_more(self, text: str, record: bool) -> Part:
        """A further line of the message, or none."""
        held = self._held
        if held is None or held.over:
            return Part.NONE
        if not text or _NATIVE_FRAME.match(text):
            return Part.MORE
        held.over = record or (self._quiet > 0 and not held.is_open) or len(held.more) >= MOST_MORE
        if held.over:
            return Part.NONE
        held.more.append(text)
        return Part.MORE

    def _open(self, block: _Exception, within: bool) -> None:
        self._drop_block()
        self._adopt(block, within)
        self._block = block

    def _adopt(self, new: _Exception, within: bool) -> None:
        """Chain the held exception to the one that begins, if the log says that they belong together."""
        held = self._held
        if held and self._link:
            new.earlier, new.handling = held.alone(), bool(self._link["handling"])
            new.outer, self._held = held.outer, None
        elif (
            held
            and held.depth < _MOST_NESTED
            and (within or held.is_open or held.type.endswith("ExceptionGroup"))
        ):
            new.outer, new.depth, self._held = held, held.depth + 1, None
        self._hold(None)

    def _hold(self, said: _Exception | None) -> None:
        """Another exception may refer to this one from here on, and none to the one before."""
        if self._held:
            self.done.append(self._held.folded().alone())
        self._held, self._link = said, None

    def _drop_block(self) -> None:
        """Give up frames that have no header. What was chained to them stays."""
        block, self._block, self._dump = self._block, None, None
        if block and block.earlier:
            self.done.append(block.earlier)
        if block and block.outer:
            self.done.append(block.outer.folded().alone())


def _frame(found: re.Match[str]) -> QuotedFrame:
    return QuotedFrame(found["file"], int(found["line"]), (found.groupdict().get("function") or "").strip())


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
