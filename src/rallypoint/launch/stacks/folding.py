"""What a stack means: in which call it is, and where in the user's own code. Pure.

Frames of torch, of other packages and of Python itself are folded to the one call that the user's code made.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Final

from rallypoint.frames import Frame, is_library_file

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
    own: tuple[Frame, ...]
    """The frames of the user's own code, innermost first; of a process without any, its innermost frame."""

    @cached_property
    def place(self) -> Hashable:
        """The same for ranks that do the same, also if their machines have the code in other folders."""
        return self.call, tuple((file_name(each), each.line, each.function) for each in self.own)


NOTHING: Final = Doing("", False, ())
"""Of a rank whose stack is not known."""


def file_name(frame: Frame) -> str:
    """The last part of its path."""
    return _SEPARATOR.split(frame.file)[-1]


def is_library(frame: Frame) -> bool:
    """Whether it is not the user's own code."""
    return not frame.file or is_library_file(frame.file)


def fold(stack: Sequence[Frame]) -> Doing:
    """What a stack means."""
    called = list(takewhile(is_library, stack))
    own = tuple(each for each in stack if not is_library(each))
    call, waits = _call(called)
    if not own:  # a module that is run as it is, of a package
        return Doing(call, waits, tuple(stack[:1]))
    return Doing(call, waits, own)


def _call(called: Sequence[Frame]) -> tuple[str, bool]:
    """The call that the user's code has made, of the frames below it, and whether that waits for others."""
    outermost_first = list(reversed(called))
    for each in outermost_first:
        if _OF_COLLECTIVES.search(each.file) and _COLLECTIVES.match(each.function):
            return each.function, True
    for each in outermost_first:
        if _OF_STORE.search(each.file):
            return f"{module_of(each)}.{each.function}", True
    for each in outermost_first:
        if each.function not in _WRAPPERS:
            in_torch = module_of(each).partition(".")[0] == "torch"
            return f"{module_of(each)}.{each.function}", in_torch and bool(_WAITS.match(each.function))
    return "", False


def module_of(frame: Frame) -> str:
    """The module of a library's frame, as far as its path tells."""
    found = _MODULE.search(frame.file)
    path = found["path"] if found else file_name(frame).removesuffix(".py")
    name = re.sub(r"[/\\]+", ".", path.strip("<>").removeprefix("frozen "))
    name = re.sub(r"^(?:site|dist)-packages\.", "", name)
    return name.removesuffix(".__init__") or "?"
