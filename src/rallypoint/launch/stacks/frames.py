"""Stacks: read back as Python's `faulthandler` writes them, and folded to what they mean. Pure.

Frames of torch, of other packages and of Python itself are folded to the one call that the user's code made.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Final

from rallypoint.frames import MOST_FRAMES, Frame, Stack, is_library_file

_HEAD: Final = re.compile(
    r"(?P<kind>Current thread|Thread|Stack)(?: (?P<ident>0x[0-9a-f]+))?.*\(most recent call first\):\s*$"
)
_FRAME: Final = re.compile(
    r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>\d{1,9}|\?\?\?) in (?P<name>.*)$'
)
# It writes what is no ASCII, and control characters, as escapes; a backslash in a name stays as it is.
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_AND_MORE: Final = "..."
"""Instead of further threads; further frames of a thread are indented."""
_OUTERMOST: Final = "<module>"


@dataclass(frozen=True)
class Dump:
    """What one process has written at once."""

    threads: tuple[Stack, ...]
    """The main thread's is the last one. The thread that has written all of them is left out."""
    idents: tuple[int, ...]
    """What Python identifies each thread by; 0: not known."""
    lock_holder: Stack = ()
    """The thread that keeps the interpreter lock (GIL), if it is not the main thread."""

    @property
    def stack(self) -> Stack:
        return self.threads[-1]

    @property
    def others(self) -> tuple[Stack, ...]:
        return self.threads[:-1]


def read_dump(text: str) -> Dump | None:
    """The stacks of one process; None if there is none in the text.

    The youngest thread is written first, so the main thread is the last one; it is missing if there are more
    threads than are written. The current thread wrote the dump: a helper, unless it is the main thread.
    """
    threads: list[list[Frame]] = []
    idents: list[int] = []
    writer = -1
    for line in text.split("\n"):
        if head := _HEAD.match(line):
            if head["kind"] == "Current thread":
                writer = len(threads)
            threads.append([])
            idents.append(int(head["ident"] or "0", 16))
        elif line == _AND_MORE:
            return None
        elif threads and len(threads[-1]) < MOST_FRAMES and (found := _FRAME.match(line)):
            number = int(found["line"]) if found["line"].isdigit() else 0
            threads[-1].append(Frame(_unescaped(found["file"] or ""), number, _unescaped(found["name"])))
    if 0 <= writer < len(threads) - 1:
        del threads[writer], idents[writer]
    return Dump(tuple(map(tuple, threads)), tuple(idents)) if threads else None


def is_complete(text: str) -> bool:
    """Whether a dump is certainly written to its end: the main thread, the last one, began in a module."""
    last = text[:-1].rpartition("\n")[2]
    found = _FRAME.match(last) if text.endswith("\n") else None
    return found is not None and found["name"] == _OUTERMOST


def _unescaped(name: str) -> str:
    return _ESCAPE.sub(_character, name) if "\\" in name else name


def _character(found: re.Match[str]) -> str:
    number = int(next(filter(None, found.groups())), 16)
    # What `faulthandler` writes as it is was a backslash in the name.
    return found[0] if 0x20 <= number < 0x7F or number > 0x10FFFF else chr(number)


# What a stack means ----------------------------------------------------------------------------------------

_SEPARATOR: Final = re.compile(r"[/\\]")
_MODULE: Final = re.compile(r"(?:packages|python3(?:\.\d+)?|[/\\]Lib)[/\\](?P<path>.+?)(?:\.pyc?)?$")
_OF_COLLECTIVES: Final = re.compile(r"[/\\]torch[/\\]distributed[/\\](?:distributed_c10d|_functional_coll)")
_OF_STORE: Final = re.compile(r"[/\\](?:torch[/\\]distributed[/\\]rendezvous|rallypoint[/\\]client[/\\])")
_COLLECTIVES: Final = re.compile(
    r"(?:all_reduce|reduce|broadcast|all_gather|gather|scatter|reduce_scatter|all_to_all|barrier|send|recv"
    r"|monitored_barrier|batch_isend_irecv|(?:init|destroy)_process_group|new_(?:sub)?groups?|split_group)\w*$"
)
# Calls of torch in which a rank waits for the others, too: its gradients, its streams.
_WAITS: Final = re.compile(r"(?:backward|synchronize|wait_stream|_engine_run_backward)$")
_WRAPPERS: Final = frozenset(
    ("wrapper", "inner", "wrapped", "decorate_context", "_call_impl", "_wrapped_call_impl")
)


@dataclass(frozen=True)
class Doing:
    """What a rank does, in few words."""

    call: str
    """The call that its own code is in: `all_reduce`, `torch.utils.data.dataloader.__next__`; nothing: its
    own code runs."""
    waits: bool
    """Whether that call waits for other ranks."""
    own: Stack
    """The frames of the user's own code, innermost first; of a process without any, its innermost frame."""

    @cached_property
    def place(self) -> Hashable:
        """The same for ranks that do the same, also if their machines have the code in other folders."""
        return self.call, tuple((file_name(each), each.line, each.function) for each in self.own)


@lru_cache(maxsize=256)
def fold(stack: Stack) -> Doing:
    """What a stack means. Ranks mostly have the same few."""
    call, waits = _call(list(takewhile(is_library, stack)))
    own = tuple(each for each in stack if not is_library(each))
    return Doing(call, waits, own or stack[:1])  # a module that is run as it is, of a package, has no other


def _call(called: Sequence[Frame]) -> tuple[str, bool]:
    """The call that the user's code has made, of the frames below it, and whether that waits for others."""
    outermost_first = list(reversed(called))
    for each in outermost_first:
        if _OF_COLLECTIVES.search(each.file) and _COLLECTIVES.match(each.function):
            return each.function, True
    for each in outermost_first:
        if _OF_STORE.search(each.file):
            return f"{_module_of(each)}.{each.function}", True
    for each in outermost_first:
        if each.function not in _WRAPPERS:
            module = _module_of(each)
            in_torch = module.partition(".")[0] == "torch"
            return f"{module}.{each.function}", in_torch and bool(_WAITS.match(each.function))
    return "", False


def _module_of(frame: Frame) -> str:
    """The module of a library's frame, as far as its path tells."""
    found = _MODULE.search(frame.file)
    path = found["path"] if found else file_name(frame).removesuffix(".py")
    name = re.sub(r"[/\\]+", ".", path.strip("<>").removeprefix("frozen "))
    name = re.sub(r"^(?:site|dist)-packages\.", "", name)
    return name.removesuffix(".__init__") or "?"


def file_name(frame: Frame) -> str:
    """The last part of its path."""
    return _SEPARATOR.split(frame.file)[-1]


def is_library(frame: Frame) -> bool:
    """Whether it is not the user's own code."""
    return not frame.file or is_library_file(frame.file)
