"""Results as figures: times, costs and rates, for the documentation and for `--plot`.

A target has a colour, a marker and dashes of its own, always the same, so that a print in black and white
tells them apart. What a figure says is in its alternative text. `watch.plots` says how figures look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.results import merge_targets, record_of, sizes
from rallypoint import text
from rallypoint.bench.results import Record, Results, Spread
from rallypoint.watch.plots import INK, check_plot, drawing, need_matplotlib, write

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    Canvas = Figure | SubFigure


@dataclass(frozen=True)
class Style:
    """How a target is drawn, everywhere."""

    colour: str
    marker: str
    dashes: str | tuple[int, tuple[float, ...]]


STYLES: Final = {
    "rallypoint-libuv": Style("#1a7fd4", "o", "-"),
    "rallypoint-legacy": Style("#9b62d1", "s", (0, (5.0, 1.5))),
    "rallypoint-relay": Style("#0e8f6e", "D", (0, (7.0, 1.5, 1.5, 1.5))),
    "torch-libuv": Style("#d4571c", "^", (0, (3.0, 1.5))),
    "torch-legacy": Style("#a87708", "v", (0, (1.2, 1.4))),
    "redis": Style("#d43d7b", "P", (0, (5.0, 1.5, 1.2, 1.5, 1.2, 1.5))),
    "torch-libuv-as-is": Style("#c0643f", "<", (0, (3.0, 3.0))),
    "torch-legacy-as-is": Style("#8f7a2a", ">", (0, (1.2, 3.0))),
}
_STRANGER: Final = Style(INK, "X", (0, (1.0, 2.0)))

PUBLISHED_RANKS: Final = 98_304
PUBLISHED: Final = (("torch-legacy", 1_800.0, "> 1,800 s"), ("torch-libuv", 100.0, "100 s"))
"""From PyTorch's tutorial on the libuv backend: seconds, and what it says in words."""

FIGURES: Final[dict[str, dict[str, str]]] = {
    "init": {"init": "init: all ranks come up"},
    "barrier": {
        "barrier": "barrier: all ranks at once",
        "barrier-trickle": "barrier: one after the other",
    },
    "ops": {},
}
"""By their names, as they are shown: the records that each has over ranks, and their titles."""
OPERATIONS: Final = ("get", "get-pipelined", "set", "add")

_WIDTH: Final = 8.4
_HEIGHT: Final = 4.2

# Files


def save(results: Results, path: Path, wanted: Iterable[str] = FIGURES) -> list[str]:
    """Draw figures that there is data for into one file, and return their names; of none, no file."""
    check_plot(path)
    names = [name for name in wanted if panels(results, name)]
    if names:
        with drawing():
            write(draw(results, *names), path)
    return names


def save_all(results: Results, folder: Path) -> list[Path]:
    """Draw each figure that there is data for as an SVG of its own; those of an earlier run go."""
    need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.svg" for name in FIGURES}
    saved = [path for name, path in paths.items() if save(results, path, [name])]
    for path in paths.values():
        if path not in saved:
            path.unlink(missing_ok=True)
    return saved


def draw(results: Results, *names: str) -> Figure:
    """Figures by their names, one below the other; each of them has to have data."""
    with drawing():
        from matplotlib.figure import Figure

        whole = Figure(figsize=(_WIDTH, _HEIGHT * len(names)), layout="constrained")
        parts = whole.subfigures(len(names), 1, squeeze=False)[:, 0]
        for name, part in zip(names, parts, strict=True):
            _paint(part, panels(results, name))
        return whole


# What is drawn


@dataclass(frozen=True)
class Line:
    """The figures of one target. A place on the horizontal axis is a size, or the number of an operation."""

    target: str
    places: list[int]
    spreads: list[Spread]


@dataclass(frozen=True)
class Panel:
    """Lines over the same axes; the vertical one is logarithmic. Without operations, over ranks."""

    title: str
    measure: str
    say: Callable[[float], str]
    lines: list[Line]
    operations: tuple[str, ...] = ()

    @property
    def published(self) -> tuple[tuple[str, float, str], ...]:
        """The figures that PyTorch has published for the same load."""
        return PUBLISHED if self.title == FIGURES["init"]["init"] else ()


def panels(results: Results, name: str) -> list[Panel]:
    """The panels of one figure that have data."""
    found = []
    for each, title in FIGURES[name].items():
        lines = _lines({record.ranks: record for record in sizes(results, each)})
        found.append(Panel(title, "time", text.fine_duration, lines))
    if name == "ops":
        records = {each: record for each in OPERATIONS if (record := record_of(results, each)) is not None}
        lines = _lines(dict(enumerate(records.values())))
        found.append(Panel("ops: many clients", "operations per second", text.rate, lines, tuple(records)))
    return [panel for panel in found if panel.lines]


def _lines(records: Mapping[int, Record]) -> list[Line]:
    """The main figure of records, a line for each target; by the places of the records."""
    lines = []
    for target in merge_targets(records.values()):
        found = {
            place: each
            for place, record in records.items()
            if target in record.entries and (each := record.entries[target].spread()) is not None
        }
        if found:
            lines.append(Line(target, list(found), list(found.values())))
    order = {target: number for number, target in enumerate(STYLES)}
    return sorted(lines, key=lambda line: order.get(line.target, len(order)))


# Drawing


def _paint(canvas: Canvas, found: Sequence[Panel]) -> None:
    """Panels beside each other, and a legend beside them, where it covers nothing."""
    all_axes = canvas.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, panel in zip(all_axes, found, strict=True):
        _draw_lines(axes, panel)
        _draw_published(axes, panel)
    for axes, panel in zip(all_axes, found, strict=True):
        _label_axes(axes, panel)
    handles: dict[str, Artist] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle)
    canvas.legend(handles.values(), handles, loc="outside right upper", handlelength=3.4, labelspacing=0.7)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    """A line through the medians, with the quartiles; of operations, markers beside each other."""
    for number, line in enumerate(panel.lines):
        style = STYLES.get(line.target, _STRANGER)
        aside = 0.8 * ((number + 0.5) / len(panel.lines) - 0.5) if panel.operations else 0.0
        # Rounding may put a quartile a hair beyond the median.
        below = [max(0.0, each.median - each.lower) for each in line.spreads]
        above = [max(0.0, each.upper - each.median) for each in line.spreads]
        axes.errorbar(
            [place + aside for place in line.places],
            [each.median for each in line.spreads],
            yerr=[below, above],
            label=line.target,
            color=style.colour,
            marker=style.marker,
            linestyle="none" if panel.operations else style.dashes,
            linewidth=1.4,
            markersize=5,
            elinewidth=0.7,
            capsize=2.5,
        )


def _draw_published(axes: Axes, panel: Panel) -> None:
    """Hollow markers: these were not measured here."""
    for target, seconds, words in panel.published:
        axes.errorbar(
            [PUBLISHED_RANKS],
            [seconds],
            linestyle="none",
            marker=STYLES[target].marker,
            markersize=8,
            markerfacecolor="none",
            markeredgecolor=STYLES[target].colour,
            markeredgewidth=1.4,
            label=f"{target}, {words},\npublished by PyTorch,\nanother machine",
        )


def _label_axes(axes: Axes, panel: Panel) -> None:
    """The ticks are the sizes that were measured, or the operations; what hardly differs is to look so."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_title(panel.title, loc="center")
    axes.set(ylabel=panel.measure, yscale="log")
    axes.margins(x=0.08, y=0.1)
    low, high = axes.get_ylim()
    if high / low < 10:
        middle = (low * high) ** 0.5
        low, high = axes.set_ylim(middle / 10**0.5, middle * 10**0.5)
    if panel.operations:
        axes.set(xlabel="operation")
        axes.set_xticks(range(len(panel.operations)), panel.operations)
    else:
        axes.set(xlabel="ranks")
        axes.set_xscale("log", base=2)
        sizes = {place for line in panel.lines for place in line.places}
        axes.xaxis.set_major_locator(FixedLocator(sorted(sizes | {PUBLISHED_RANKS for _ in panel.published})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        axes.tick_params(axis="x", labelrotation=35)
    steps = (1.0, 2.0, 5.0) if high / low < 100 else (1.0, 3.0) if high / low < 1_000 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: panel.say(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="major", axis="y" if panel.operations else "both")
