"""torch's Flight Recorder: which collective the ranks of a hung job do not agree on.

Each rank dumps its last collectives, as a pickle or as JSON (`TORCH_FR_BUFFER_SIZE`,
`TORCH_NCCL_DUMP_ON_TIMEOUT`). All ranks of a group have to call the same collectives in the same order, so
the first number at which they differ is where the job went wrong: another operation, other sizes, or a rank
that has not come so far.

A pickle can run code. Here it may hold containers, texts and numbers alone: whatever names a class or a
function is refused before it is looked up.

While a job hangs, torch watches a pipe for each rank, if a variable names it, and dumps when something is
written there: where the user or torch wants it, with torch 2.11 within a second.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rallypoint.errors import UsageError
from rallypoint.frames import is_library_file
from rallypoint.launch.stacks.activity import Recorded
from rallypoint.text import excerpt, named_ranks, printable

if TYPE_CHECKING:
    from rallypoint.explain.events import Event

MOST_BYTES: Final = 1 << 28
_NAME: Final = re.compile(r"trace_rank_?(?P<rank>\d{1,9})(?:\.(?:json|pkl|pickle))?$")
_MOST_TEXT: Final = 200
_MOST_DIMENSIONS: Final = 16
_MOST_KINDS: Final = 8
_LAST: Final = 8


def rank_of_dump(name: str) -> int | None:
    """The rank whose dump a file is, by its name; None if it is none."""
    found = _NAME.search(name)
    return int(found["rank"]) if found else None


# Reading ---------------------------------------------------------------------------------------------------


@dataclass
class Dump:
    """The collectives of one rank: by group, and by their numbers in it."""

    rank: int
    groups: dict[str, dict[int, Recorded]] = field(default_factory=dict)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of a group, where the dump tells them."""

    @classmethod
    def of(cls, rank: int, recorded: Iterable[Recorded]) -> Dump:
        dump = cls(rank)
        for each in recorded:
            dump.groups.setdefault(each.group, {})[each.number] = each
        return dump

    @property
    def last_calls(self) -> tuple[Recorded, ...]:
        """The last collectives of each group, for the way to another machine."""
        last = (call for calls in self.groups.values() for _, call in sorted(calls.items())[-_LAST:])
        return tuple(replace(call, created=0) for call in last)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}")


def read_dump(rank: int, data: bytes) -> Dump:
    """What a rank has dumped. UsageError if it is no dump, or holds more than texts and numbers."""
    try:
        found = json.loads(data) if data.lstrip()[:1] == b"{" else _Unpickler(io.BytesIO(data)).load()
        entries = [each for each in found["entries"] if isinstance(each, dict)]
    except Exception as error:  # a damaged pickle may raise almost anything
        raise UsageError(
            f"the dump of rank {rank} cannot be read: {excerpt(printable(str(error)), _MOST_TEXT)}",
            hint="name the files of torch's Flight Recorder as it has written them",
        ) from None
    numbered = ((each, each.get("collective_seq_id")) for each in entries if not each.get("is_p2p"))
    dump = Dump.of(rank, (_recorded(number, each) for each, number in numbered if isinstance(number, int)))
    configured = found.get("pg_config")
    for name, config in configured.items() if isinstance(configured, dict) else ():
        text = config.get("ranks") if isinstance(config, dict) else None
        if isinstance(text, str) and isinstance(name, str):
            dump.members[name] = tuple(int(each) for each in re.findall(r"\b\d{1,9}\b", text))
    return dump


def _recorded(number: int, entry: Mapping[str, Any]) -> Recorded:
    # The name of a group: what is unique comes first, and then what it is for.
    names = [each for each in _items(entry.get("process_group")) if isinstance(each, str)]
    created, sizes = entry.get("time_created_ns"), _items(entry.get("input_sizes"))
    sized = (each[:_MOST_DIMENSIONS] for each in sizes if isinstance(each, list | tuple))
    return Recorded(
        " ".join(names[:2]) or "default",
        number,
        _text(entry.get("profiling_name")),
        tuple(tuple(filter(_is_size, each)) for each in sized),
        tuple(_text(each) for each in _items(entry.get("input_dtypes"))),
        bool(entry.get("retired")) or entry.get("state") == "completed",
        _place(_items(entry.get("frames"))),
        created if isinstance(created, int) else 0,
    )


def _items(found: object) -> Sequence[Any]:
    return found if isinstance(found, list | tuple) else ()


def _is_size(found: object) -> bool:
    return isinstance(found, int) and 0 <= found < 1 << 63


def _text(found: object) -> str:
    return printable(found)[:_MOST_TEXT] if isinstance(found, str) else "?"


def _place(frames: Sequence[Any]) -> str:
    for frame in frames:
        if isinstance(frame, dict) and not is_library_file(_text(frame.get("filename"))):
            line = frame.get("line")
            where = f"{_text(frame.get('filename'))}, line {line if _is_size(line) else '?'}"
            return f"{where}, in {_text(frame.get('name'))}"
    return ""


# Comparing -------------------------------------------------------------------------------------------------

_SAME_SIZES: Final = (
    *("all_reduce", "allreduce", "broadcast", "reduce", "_all_gather_base", "all_gather_into_tensor"),
    *("_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "barrier"),
)
"""Operations whose sizes have to be the same on all ranks."""


@dataclass(frozen=True)
class Difference:
    """The first collective of a group on which its ranks do not agree."""

    kind: str
    """Of `_KINDS`."""
    group: str
    number: int
    calls: tuple[tuple[str, tuple[int, ...], str], ...]
    """Each call, the ranks that made it, and its place; those of fewest ranks first."""
    absent: tuple[int, ...]
    """The ranks that have not reached it."""
    created: int


def compare(dumps: Sequence[Dump]) -> list[Difference]:
    """The first difference of each group, in the order of time; none if all ranks agree."""
    groups = dict.fromkeys(group for dump in dumps for group in dump.groups)
    found = [each for group in groups for each in _of_group(group, dumps)]
    return sorted(found, key=lambda each: (each.kind == "unfinished", each.created))


def _of_group(group: str, dumps: Sequence[Dump]) -> Iterator[Difference]:
    """The first difference in a group; in each, if ranks give one name to groups of different ranks."""
    name = group.partition(" ")[0]
    told = sorted({dump.members.get(name, ()) for dump in dumps} - {()})
    for members in told or [()]:
        calls = {
            dump.rank: dump.groups.get(group, {})
            for dump in dumps
            if dump.members.get(name, members) == members and (group in dump.groups or dump.rank in members)
        }
        found = _first_difference(group, calls)
        if found is not None:
            yield found


def _alike(call: Recorded) -> tuple[object, ...]:
    """What has to be the same on all ranks."""
    is_sized = call.operation.rpartition(":")[2] in _SAME_SIZES
    return (call.operation, call.sizes, call.kinds) if is_sized else (call.operation,)


def _first_difference(group: str, calls: Mapping[int, Mapping[int, Recorded]]) -> Difference | None:
    # The recorder forgets the oldest: what one of them has forgotten cannot be compared.
    begin = max((min(each) for each in calls.values() if each), default=0)
    numbers = sorted({number for each in calls.values() for number in each if number >= begin})
    made = {n: {rank: each[n] for rank, each in calls.items() if n in each} for n in numbers}
    for number in numbers:
        absent = tuple(sorted(rank for rank, each in calls.items() if max(each, default=-1) < number))
        differs = len(set(map(_alike, made[number].values()))) > 1
        if differs or absent:
            return _difference("differs" if differs else "missing", group, number, made[number], absent)
    for number in numbers:
        waiting = {rank: call for rank, call in made[number].items() if not call.is_done}
        if waiting:
            return _difference("unfinished", group, number, waiting, ())
    return None


def _difference(
    kind: str, group: str, number: int, made: Mapping[int, Recorded], absent: tuple[int, ...]
) -> Difference:
    by_call: dict[tuple[object, ...], list[int]] = {}
    for rank, call in sorted(made.items()):
        by_call.setdefault(_alike(call), []).append(rank)
    calls = sorted(by_call.values(), key=lambda ranks: (len(ranks), ranks))
    rows = tuple((_call_text(made[ranks[0]]), tuple(ranks), made[ranks[0]].place) for ranks in calls)
    return Difference(kind, group, number, rows, absent, min(each.created for each in made.values()))


# Words -----------------------------------------------------------------------------------------------------

_KINDS: Final = {
    "differs": (
        "the ranks call different ones",
        "Find the branch on which these ranks part: all have to call the same collectives in the same order, "
        "with the same sizes (uneven batches, a condition on the rank, an early `continue`).",
    ),
    "missing": (
        "not all ranks have reached it",
        "Look at what the missing ranks do instead: their logs, or `py-spy dump --pid PID` while they hang. "
        "A rank that has ended early, or is still loading data, keeps all others waiting.",
    ),
    "unfinished": (
        "all ranks have reached it, and it has not ended",
        "All ranks have come to it, and it has not ended: look at the network, and at `NCCL_DEBUG=INFO` of "
        "these ranks.",
    ),
}
"""What is said of a difference, and what to do."""


def _call_text(call: Recorded) -> str:
    sizes = ", ".join(f"[{', '.join(map(str, each))}]" for each in call.sizes[:_MOST_KINDS])
    of = f" of {sizes} {', '.join(dict.fromkeys(call.kinds))}".rstrip() if sizes else ""
    return excerpt(f"{call.operation}{of}", _MOST_TEXT)


def as_lines(dumps: Sequence[Dump], found: Sequence[Difference]) -> list[str]:
    """What the dumps show, in lines for a terminal."""
    ranks = sorted(dump.rank for dump in dumps)
    lines = [f"Flight Recorder: dumps of {named_ranks(ranks)}"]
    unseen = sorted({rank for dump in dumps for each in dump.members.values() for rank in each} - set(ranks))
    if unseen:
        lines.append(f"  there is no dump of {named_ranks(unseen)}, which may be the one that differs")
    if not found:
        return [*lines, "  all of them have called the same collectives, and all have ended"]
    for each in found[:_MOST_KINDS]:
        group = printable(each.group)[:_MOST_TEXT]
        lines.append(f"  group {group}, collective {each.number}: {_KINDS[each.kind][0]}")
        for call, who, place in each.calls[:_MOST_KINDS]:
            lines.append(f"    {named_ranks(who)}: {call}{f', at {place}' if place else ''}")
        if each.absent:
            lines.append(f"    {named_ranks(each.absent)}: not reached")
    return [*lines, f"  What to do: {_KINDS[found[0].kind][1]}"]


def as_document(dumps: Sequence[Dump], found: Sequence[Difference]) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "ranks": sorted(dump.rank for dump in dumps),
        "differences": [
            {
                "kind": each.kind,
                "group": each.group,
                "number": each.number,
                "calls": [{"call": call, "ranks": who, "place": place} for call, who, place in each.calls],
                "absent": each.absent,
            }
            for each in found
        ],
    }


def as_events(differences: Sequence[Difference]) -> Iterator[Event]:
    """What the dumps show: ranks apart from the others, or a collective that does not end."""
    from rallypoint.explain.events import Event, Kind, Process  # late: launchers do not need it
    from rallypoint.explain.reported import LAUNCHER

    for each in differences:
        where = f"group {each.group}, collective {each.number}"
        for rank in each.absent:
            text = f"rank {rank} has not reached {where}"
            yield Event(Kind.STALL, LAUNCHER, 0, text, Process(rank))
        call, ranks, place = each.calls[0]
        if each.kind == "unfinished":
            text = f"all ranks have reached {where} ({call}), and it does not end"
            yield Event(Kind.ERROR, LAUNCHER, 0, text)
        at = f", at {place}" if place else ""
        for rank in ranks if each.kind == "differs" else ():
            text = f"rank {rank} calls {call}{at}, unlike the other ranks: {where}"
            yield Event(Kind.ERROR, LAUNCHER, 0, text, Process(rank))


# Asking for dumps while the job hangs ----------------------------------------------------------------------

PIPES: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_SIZES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PLACES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_FILES: Final = ("comm_lib_trace_rank_", "nccl_trace_rank_")
_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 0.05


def with_pipes(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment in which torch's recorder can be asked, if it is on, and the pipes are not in use."""
    is_on = hasattr(os, "mkfifo") and any(environ.get(name, "0").strip() not in ("", "0") for name in _SIZES)
    return {PIPES: str(folder / "flight-"), **environ} if is_on else dict(environ)


def read_recorders(ranks: Iterable[int], environ: Mapping[str, str]) -> dict[int, tuple[Recorded, ...]]:
    """The last collectives by rank, of those whose recorder answers."""
    asked = [rank for rank in ranks if _request(rank, environ)]
    began = time.time() - 1.0  # the clock of files is coarse; a dump of a moment before would be as good
    deadline = time.monotonic() + _SECONDS
    found: dict[int, tuple[Recorded, ...]] = {}
    while asked and time.monotonic() < deadline:
        for rank in list(asked):
            dump = _fresh_dump(rank, environ, began)
            if dump is not None:
                found[rank] = dump.last_calls
                asked.remove(rank)
        time.sleep(_LOOK_SECONDS)
    return found


def _request(rank: int, environ: Mapping[str, str]) -> bool:
    if not (stem := environ.get(PIPES)):
        return False
    try:
        pipe = os.open(f"{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        with open(pipe, "wb", buffering=0) as file:
            file.write(b"1\n")
    except OSError:  # there is none, or nobody reads it
        return False
    return True


def _fresh_dump(rank: int, environ: Mapping[str, str], since: float) -> Dump | None:
    """None while there is none, or it is being written."""
    for stem in _stems(environ):
        path = Path(f"{stem}{rank}")
        try:
            if path.stat().st_mtime >= since:
                with path.open("rb") as file:
                    return read_dump(rank, file.read(MOST_BYTES))
        except (OSError, UsageError):
            continue
    return None


def _stems(environ: Mapping[str, str]) -> Iterator[str]:
    yield from (environ[name] for name in _PLACES if environ.get(name))
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for name in _FILES:
        yield os.path.join(cache, "torch", name)
        yield os.path.join("/tmp", name)  # noqa: S108 - where older torches write it
