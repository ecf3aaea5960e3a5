"""A timeline as a figure: a row for each member, from when it came, with its waits; and the stragglers.

Of a crowd, the figure shows the machines of the last members. The time for which a straggler was late has a
colour of its own.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rallypoint.text import printable
from rallypoint.watch.plots import INK, drawing, write
from rallypoint.watch.timeline.judgement import StartupMember, Timeline, merged
from rallypoint.watch.timeline.records import WaitEnding
from rallypoint.watch.timeline.words import headline, seconds

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS: Final = 128
"""Up to this number, each member has a row; more members are a crowd."""
_CROWD_ROWS: Final = 40
_OF_ONE_MACHINE: Final = 16
"""Rows of one machine, in a crowd."""
_UNKNOWN_HOST: Final = "machine not known"


@dataclass(frozen=True)
class FigureRow:
    """A member; or the name of a machine, above its members."""

    label: str
    member: StartupMember | None = None
    is_late: bool = False
    """Whether it is a straggler."""


def rows_of(timeline: Timeline) -> list[FigureRow]:
    """A row for each member; of a crowd, for the members on the machines of the last ones."""
    is_crowd = len(timeline.members) > MOST_ROWS
    members = _last_of(timeline.members) if is_crowd else timeline.members
    groups: dict[str, list[StartupMember]] = defaultdict(list)
    for each in sorted(members, key=lambda each: (each.rank < 0, each.rank, each.came or 0.0, each.name)):
        groups[each.host].append(each)
    late = {id(each) for each in timeline.straggling.members} if timeline.straggling is not None else ()
    with_names = set(groups) != {""} and 2 * len(groups) <= len(members)  # else most rows would be names
    rows: list[FigureRow] = []
    for host, theirs in groups.items():
        if with_names:
            rows.append(FigureRow(_plain(host or _UNKNOWN_HOST)))
        where = f" on {host}" if host and not with_names else ""
        rows += (FigureRow(_plain(f"{each.name}{where}"), each, id(each) in late) for each in theirs)
    return rows


def _last_of(members: Sequence[StartupMember]) -> Sequence[StartupMember]:
    """The last members, and the others on their machines. The last member is the first in the list."""
    of_host: dict[str, list[StartupMember]] = defaultdict(list)
    for each in members:
        of_host[each.host].append(each)
    chosen: list[StartupMember] = []
    for group in of_host.values():  # the machine of the last one is the first
        if chosen and len(chosen) + len(group[:_OF_ONE_MACHINE]) > _CROWD_ROWS:
            break
        chosen += group[:_OF_ONE_MACHINE]
    return chosen


def spans_of(timeline: Timeline, member: StartupMember, *, met: bool) -> list[tuple[float, float]]:
    """When a member waited, and for how long: either the waits that were met or all others.

    Waits too close to be told apart are one.
    """
    theirs = [each for each in member.waits if (each.ending is WaitEnding.MET) is met]
    spans = merged(theirs, timeline.seconds / 1000)
    return [(begin - timeline.origin, end - begin) for begin, end in spans]


WAITS: Final = "#1a7fd4"
IN_VAIN: Final = "#d43d7b"
LATE: Final = "#d4571c"

_WIDTH: Final = 8.4
_TITLE_CHARACTERS: Final = 100
_NAME_CHARACTERS: Final = 36
_MARGIN: Final = 1.5
"""Inches for the title, the axis and the legend."""
_PITCHES: Final = ((24, 0.24, 8.0), (64, 0.17, 7.0), (1 << 30, 0.12, 5.5))
"""The most rows, with the inches per row and the size of their labels."""


def save(timeline: Timeline, path: Path) -> None:
    """Draw a timeline into a file. To be called after `plots.check_plot`."""
    with drawing(math=False):
        write(draw(timeline), path, headline(timeline))


def draw(timeline: Timeline) -> Figure:
    """To be called within `plots.drawing`."""
    from matplotlib.figure import Figure

    rows = rows_of(timeline)
    pitch, size = next((pitch, size) for most, pitch, size in _PITCHES if len(rows) <= most)
    height = max(len(rows), 2) * pitch
    figure = Figure(figsize=(_WIDTH, height + _MARGIN), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(0, max(timeline.seconds * 1.02, 0.1))
    if len(timeline.members) > MOST_ROWS:
        axes.set_title("the last ones, and who is on their machines", loc="left", fontsize=size + 1)
    _paint_rows(timeline, axes, rows, size)
    text = _ascii(headline(timeline))
    parts = [text] if len(text) <= _TITLE_CHARACTERS else text.split("; ")
    title = ";\n".join("\n".join(textwrap.wrap(part, _TITLE_CHARACTERS)) for part in parts)
    figure.suptitle(title, x=0.012, ha="left", fontsize=10.5)
    axes.set_xlabel("seconds after the first came")
    _legend(figure, timeline)
    return figure


# Rows


def _paint_rows(timeline: Timeline, axes: Axes, rows: Sequence[FigureRow], size: float) -> None:
    for y, row in enumerate(rows):
        if row.member is None:
            axes.annotate(row.label, (0, y), (3, 0), textcoords="offset points", va="center", fontsize=size)
        else:
            _paint_member(timeline, axes, y, row.member, row.is_late)
    places = [y for y, row in enumerate(rows) if row.member is not None]
    axes.set_yticks(places, [rows[y].label for y in places], fontsize=size)
    for y, tick in zip(places, axes.get_yticklabels(), strict=True):
        tick.set_color(LATE if rows[y].is_late else INK)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=True, axis="x")
    axes.set_axisbelow(True)
    _label_late(axes, rows, size)


def _paint_member(timeline: Timeline, axes: Axes, y: int, member: StartupMember, is_late: bool) -> None:
    if is_late:  # until it came; or if it came in time, while it kept others waiting
        begin = 0.0 if member.came is None or member.came_late else member.came
        end = timeline.seconds if member.came is None else member.came if member.came_late else member.late
        axes.barh(y, end - begin, 0.62, begin, facecolor="none", edgecolor=LATE, linewidth=0.8, hatch="////")
    if member.came is None:
        return
    end = axes.get_xlim()[1] if member.left is None else member.left
    axes.hlines(y, member.came, end, colors=INK, linewidth=1.0, zorder=1)
    colour = LATE if is_late else INK
    axes.plot([member.came], [y], marker="|", markersize=5, markeredgewidth=1.4, color=colour)
    for met, colour in ((True, WAITS), (False, IN_VAIN)):
        axes.broken_barh(spans_of(timeline, member, met=met), (y - 0.31, 0.62), facecolors=colour)


def _label_late(axes: Axes, rows: Sequence[FigureRow], size: float) -> None:
    """Label late rows at their right, where the text covers nothing; once for rows that follow each other."""
    for is_late, group in groupby(enumerate(rows), key=lambda item: item[1].is_late):
        if is_late:
            places, late = zip(*group, strict=True)
            axes.annotate(
                _late_text([row.member for row in late if row.member is not None]),
                (1.0, (places[0] + places[-1]) / 2),
                (4, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                fontsize=size,
                fontweight="bold",
                color=LATE,
                annotation_clip=False,
            )


def _late_text(members: Sequence[StartupMember]) -> str:
    last = max(members, key=lambda each: each.late)
    if last.came is None:
        return "never came"
    what, when = ("came", last.came) if last.came_late else ("others waited", last.late)
    return f"{what}\n{'after' if last.came_late else 'until'} {seconds(when)}"


# All of it


def _legend(figure: Figure, timeline: Timeline) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    endings = {wait.ending for each in timeline.members for wait in each.waits}
    handles: list[Artist] = [Line2D([], [], color=INK, linewidth=1.4, label="here")]
    if WaitEnding.MET in endings:
        handles.append(Patch(color=WAITS, label="waits"))
    if endings - {WaitEnding.MET}:
        handles.append(Patch(color=IN_VAIN, label="waits in vain"))
    if timeline.straggling is not None:
        handles.append(Patch(facecolor="none", edgecolor=LATE, hatch="////", label="late"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _plain(text: str) -> str:
    """A name that leaves room for the figure, in letters that the font has."""
    plain = _ascii(printable(text))
    half = _NAME_CHARACTERS // 2
    return plain if len(plain) <= _NAME_CHARACTERS else f"{plain[: half - 2]}...{plain[1 - half :]}"


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
