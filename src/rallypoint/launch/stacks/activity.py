"""What a launcher reports of the ranks on its machine, and how that is packed. Pure.

The text is compressed JSON, so that thousands of machines fit into one snapshot. It is read as all data from
the network: bounded, and checked.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from rallypoint.codec import Within, at_most, from_text, to_text
from rallypoint.frames import MOST_FRAMES, Frame, Stack

MOST_PACKED: Final = 48 * 1024
"""Characters of a packed activity."""
_MOST_BYTES: Final = 4 << 20
_FEW_FRAMES: Final = 12
MUCH: Final = 0.5
"""Of a core: a rank that uses more is computing."""
_Text = Annotated[str, at_most(500)]
_Number = Annotated[int, Within(-1, 1 << 62)]
_Seconds = Annotated[float, Within(-1, 1e11)]


@dataclass(frozen=True)
class ProcessFacts:
    """What the system knows of a process; empty, 0 or -1 where it does not know."""

    state: _Text = ""
    """In words: `sleeps`, `is stopped`, `is in the kernel, and cannot be interrupted`."""
    call: _Text = ""
    """The system call of its main thread: `read() of /data/shard-17.tar`."""
    memory: _Number = 0
    """Bytes that are resident."""
    swapped: _Number = 0
    cores: _Seconds = -1.0
    """How much of a core it has used since the sample before."""
    gpu: _Text = ""
    """What its GPU does: `GPU 3 at 100 %`."""

    @property
    def computes(self) -> bool:
        """Whether it uses much CPU time, or would if others left it any."""
        return self.cores >= MUCH or self.state == "runs"

    @property
    def is_stopped(self) -> bool:
        return self.state.startswith("is stopped")


NO_FACTS: Final = ProcessFacts()


@dataclass(frozen=True)
class Child:
    """A process that a rank has started, such as a data loader's."""

    pid: _Number
    stack: Stack = ()
    facts: ProcessFacts = NO_FACTS


@dataclass(frozen=True)
class Recorded:
    """A collective in torch's Flight Recorder, as one rank has called it."""

    group: _Text
    number: _Number
    operation: _Text
    sizes: Annotated[tuple[tuple[_Number, ...], ...], at_most(16)] = ()
    kinds: Annotated[tuple[_Text, ...], at_most(16)] = ()
    is_done: bool = False
    place: _Text = ""
    """The innermost frame outside of libraries; empty if none was recorded."""
    created: _Number = 0
    """When, in nanoseconds of the unix time; 0: not known."""


@dataclass(frozen=True)
class RankActivity:
    """One rank, as it was seen last."""

    rank: Annotated[int, Within(0, 1 << 32)]
    pid: _Number
    stack: Stack = ()
    """Of its main thread; empty: it has not answered yet."""
    still_seconds: _Seconds = 0.0
    """For how long it has not moved: the same stack, and hardly any work."""
    silent_seconds: _Seconds = -1.0
    """For how long it has not answered; -1: it answers."""
    ended: _Text = ""
    """How it has ended, if it has."""
    step: _Number = -1
    """What it gave `rallypoint.step` last; -1: nothing."""
    steps_per_second: _Seconds = -1.0
    step_seconds: _Seconds = -1.0
    """Since that step."""
    facts: ProcessFacts = NO_FACTS
    threads: Annotated[tuple[Stack, ...], at_most(100)] = ()
    """The stacks of its other threads, if its interpreter answers."""
    children: Annotated[tuple[Child, ...], at_most(16)] = ()
    """Its processes, if it waits for one of them."""
    recorded: Annotated[tuple[Recorded, ...], at_most(64)] = ()
    """Its last collectives, where torch records them and the job stands still."""
    stack_seconds: _Seconds = -1.0
    """The age of its stack, if that is from an earlier sample; -1: it is from the last one."""
    lock_holder: Stack = ()
    """The thread that keeps the interpreter lock (GIL), if it is not the main thread."""
    idle_seconds: _Seconds = -1.0
    """For how long it has made no progress (see `Movement`), unless it waits; -1: not known."""


@dataclass(frozen=True)
class MachineActivity:
    """The ranks of one machine."""

    host: _Text
    ranks: tuple[RankActivity, ...]
    world_size: _Number = -1
    """How many ranks the job has; -1: not known."""


@dataclass(frozen=True)
class _Packed:
    """An activity whose stacks are numbered: ranks of a machine mostly have the same ones."""

    activity: MachineActivity
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]
    of_ranks: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...] = field(default=())
    """By rank: the stacks of its main thread, of its other threads, and of its children; -1: none."""


def pack(activity: MachineActivity) -> str:
    """As ASCII, at most `MOST_PACKED` characters: what does not fit is left out, threads first."""
    cuts: list[dict[str, Any]] = [{}, {"threads": ()}, {"threads": (), "children": (), "recorded": ()}]
    for most, cut in [*((MOST_FRAMES, each) for each in cuts), (_FEW_FRAMES, cuts[-1]), (0, cuts[-1])]:
        ranks = tuple(replace(each, stack=each.stack[:most], **cut) for each in activity.ranks)
        text = _packed(replace(activity, ranks=ranks))
        if len(text) <= MOST_PACKED:
            return text
    return _packed(replace(activity, ranks=()))


def unpack(text: str) -> MachineActivity | None:
    """The activity of a machine; None for a text that cannot be read, as it may be of another version."""
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        if unzip.unconsumed_tail:
            return None
        packed = from_text(_Packed, data)
        stacks = [tuple(packed.frames[at] for at in each) for each in packed.stacks]

        def stack(number: int) -> tuple[Frame, ...]:
            return stacks[number] if number >= 0 else ()

        for each, (main, threads, children) in zip(packed.activity.ranks, packed.of_ranks, strict=True):
            # No other code has it yet, and copying thousands would take a third of the whole time.
            object.__setattr__(each, "stack", stack(main))
            object.__setattr__(each, "threads", tuple(map(stack, threads)))
            for child, at in zip(each.children, children, strict=True):
                object.__setattr__(child, "stack", stack(at))
        return packed.activity
    except (ValueError, IndexError, binascii.Error, zlib.error):
        return None


def _packed(activity: MachineActivity) -> str:
    frames: dict[Frame, int] = {}
    stacks: dict[tuple[int, ...], int] = {}

    def number(stack: Sequence[Frame]) -> int:
        if not stack:
            return -1
        numbers = tuple(frames.setdefault(each, len(frames)) for each in stack)
        return stacks.setdefault(numbers, len(stacks))

    bare, of_ranks = [], []
    for each in activity.ranks:
        children = tuple(replace(child, stack=()) for child in each.children)
        bare.append(replace(each, stack=(), threads=(), children=children))
        of_children = tuple(number(child.stack) for child in each.children)
        of_ranks.append((number(each.stack), tuple(map(number, each.threads)), of_children))
    whole = _Packed(replace(activity, ranks=tuple(bare)), tuple(frames), tuple(stacks), tuple(of_ranks))
    return base64.b64encode(zlib.compress(to_text(whole, sparse=True).encode())).decode("ascii")
