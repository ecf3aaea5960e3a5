"""Results as figures: times, costs and rates, for the documentation and for `--plot`.

A target has a colour, a marker and dashes of its own, always the same, so that a print in black and white
tells them apart. What a figure says is in its alternative text. `rallypoint.plots` says how all figures look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rallypoint import text
from rallypoint.bench.growth import growth
from rallypoint.bench.results import Record, Results, Spread, merge_targets, spread
from rallypoint.plots import GRID, INK, check_plot, drawing, need_matplotlib, write

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
PUBLISHED: Final = (("torch-legacy", 1_800.0, True), ("torch-libuv", 100.0, False))
"""From PyTorch's tutorial on the libuv backend: seconds, and whether they only are a lower bound."""
PUBLISHED_BY: Final = "published by PyTorch,\nanother machine"

OPERATIONS: Final = ("get", "get-pipelined", "set", "add")

# Files


def save(results: Results, path: Path) -> list[str]:
    """Draw all figures that there is data for into one file, and return their names; of none, no file."""
    check_plot(path)
    names = [name for name, figure in FIGURES.items() if figure.has_data(results)]
    if not names:
        return []
    with drawing():
        from matplotlib.figure import Figure

        heights = [FIGURES[name].height for name in names]
        whole = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        parts = whole.subfigures(len(names), 1, height_ratios=heights, squeeze=False)[:, 0]
        for name, part in zip(names, parts, strict=True):
            FIGURES[name].paint(results, part)
        write(whole, path)
    return names


def save_all(results: Results, folder: Path) -> list[Path]:
    """Draw each figure that there is data for as an SVG of its own; those of an earlier run go."""
    need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    for name in FIGURES:
        path, figure = folder / f"{name}.svg", draw(results, name)
        if figure is None:
            path.unlink(missing_ok=True)
        else:
            with drawing():
                write(figure, path)
            saved.append(path)
    return saved


def draw(results: Results, name: str) -> Figure | None:
    """One figure by its name; None if nothing of it was measured."""
    kind = FIGURES[name]
    if not kind.has_data(results):
        return None
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_WIDTH, kind.height), layout="constrained")
        kind.paint(results, figure)
        return figure


# Lines over ranks


@dataclass(frozen=True)
class Line:
    """What one target has at each size."""

    target: str
    sizes: list[int]
    spreads: list[Spread]


def lines(results: Results, name: str) -> list[Line]:
    """The times of a record with sizes, a line for each target."""
    records = results.sizes(name)
    found = []
    for target in merge_targets(records):
        spreads = [
            (record.ranks, each)
            for record in records
            if target in record.entries and (each := record.entries[target].spread()) is not None
        ]
        if spreads:
            found.append(Line(target, [size for size, _ in spreads], [each for _, each in spreads]))
    return sorted(found, key=lambda line: _order(line.target))


def costs(results: Results, name: str, figure: str) -> list[Line]:
    """A cost per rank at each of several sizes, a line for each target."""
    found = []
    for target in sorted(merge_targets(results.sizes(name)), key=_order):
        grown = growth(results, name, target, figure)
        if grown is not None:
            found.append(Line(target, grown.sizes, [spread([cost]) for cost in grown.per_rank]))
    return found


def _order(target: str) -> int:
    return list(STYLES).index(target) if target in STYLES else len(STYLES)


def _draw_lines(axes: Axes, found: Sequence[Line], labels: Callable[[str], str] = str) -> None:
    for line in found:
        style = STYLES.get(line.target, _STRANGER)
        medians = [each.median for each in line.spreads]
        axes.errorbar(
            line.sizes,
            medians,
            yerr=_bars(line.spreads),
            label=labels(line.target),
            color=style.colour,
            marker=style.marker,
            linestyle=style.dashes,
            linewidth=1.4,
            markersize=5,
            elinewidth=0.7,
            capsize=2.5,
        )


def _bars(spreads: Sequence[Spread]) -> list[list[float]]:
    """How far the quartiles are below and above the medians; rounding may put them a hair beyond."""
    below = [max(0.0, each.median - each.lower) for each in spreads]
    return [below, [max(0.0, each.upper - each.median) for each in spreads]]


def _finish(axes: Axes, title: str, found: Sequence[Line], measure: Measure, *sizes: int) -> None:
    """Axes with a logarithmic scale each, whose ranks are those that were measured, and `sizes`."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set(title=title, xlabel="ranks", ylabel=measure.label, yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_sizes(found, sizes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.margins(x=0.08, y=0.1)
    _widen(axes)
    axes.yaxis.set_major_locator(LogLocator(base=measure.base, subs=_steps(axes, measure.base)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: measure.say(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="major")


def _sizes(found: Iterable[Line], others: Iterable[int]) -> list[int]:
    return sorted({size for line in found for size in line.sizes} | set(others))


def _widen(axes: Axes) -> None:
    """At least a decade: what hardly differs is to look so."""
    low, high = axes.get_ylim()
    if high / low < 10:
        middle = (low * high) ** 0.5
        axes.set_ylim(middle / 10**0.5, middle * 10**0.5)


def _steps(axes: Axes, base: int) -> tuple[float, ...]:
    """Which parts of a decade have a label: the more, the fewer decades there are."""
    low, high = axes.get_ylim()
    return (1.0,) if base == 2 or high / low > 1_000 else (1.0, 2.0, 5.0) if high / low < 100 else (1.0, 3.0)


def _legend(canvas: Canvas, axes: Sequence[Axes]) -> None:
    """Beside the axes, where it covers nothing; each target once."""
    pairs = [pair for each in axes for pair in zip(*each.get_legend_handles_labels(), strict=True)]
    found: dict[str, Artist] = {}
    for handle, label in sorted(pairs, key=lambda pair: PUBLISHED_BY in str(pair[1])):
        found.setdefault(str(label), handle)
    canvas.legend(found.values(), found, loc="outside right upper", handlelength=3.4, labelspacing=0.7)


@dataclass(frozen=True)
class Measure:
    """What a vertical axis measures: its label, its ticks in words, and the base of its logarithm."""

    label: str
    say: Callable[[float], str]
    base: int = 10


def _round_duration(seconds: float) -> str:
    """A time at an axis: 1 s, where a table says 1.00 s."""
    return _in_units(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)))


def _round_size(count: float) -> str:
    return _in_units(count, (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)))


def _in_units(figure: float, units: Sequence[tuple[str, float]]) -> str:
    unit, scale = next((each for each in units if figure >= each[1] * 0.999), units[-1])
    return f"{figure / scale:,.3g} {unit}" if figure < 1_000 * scale else f"{figure / scale:,.0f} {unit}"


TIME: Final = Measure("time", _round_duration)
COSTS: Final = {
    "cpu": Measure("CPU time of the server per rank", _round_duration),
    "memory": Measure("memory of the server per rank", _round_size, base=2),
}
_SHORT: Final = {"cpu": "CPU", "memory": "memory"}


# The figures


def _paint_init(results: Results, canvas: Canvas) -> None:
    axes = canvas.add_subplot()
    found = lines(results, "init")
    _draw_lines(axes, found)
    for target, seconds, at_least in PUBLISHED:
        _draw_published(axes, target, seconds, at_least)
    _finish(axes, "init: all ranks come up", found, TIME, PUBLISHED_RANKS)
    axes.set_ylim(top=8_000)  # room for the arrow
    if _are_close(_sizes(found, [PUBLISHED_RANKS])):
        _tilt(axes)
    _legend(canvas, [axes])


def _draw_published(axes: Axes, target: str, seconds: float, at_least: bool) -> None:
    """A hollow marker: it was not measured here."""
    style = STYLES[target]
    axes.plot(
        [PUBLISHED_RANKS],
        [seconds],
        linestyle="none",
        marker=style.marker,
        markersize=8,
        markerfacecolor="none",
        markeredgecolor=style.colour,
        markeredgewidth=1.4,
        label=f"{target},\n{PUBLISHED_BY}",
    )
    text = f"> {seconds:,.0f} s" if at_least else f"{seconds:,.0f} s"
    axes.annotate(
        text,
        (PUBLISHED_RANKS, seconds),
        (-9, 2),  # beside the marker, above a line of the grid
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=INK,
    )
    if at_least:
        arrow = {"arrowstyle": "->", "color": style.colour, "linewidth": 1.4, "shrinkA": 6.0, "shrinkB": 0.0}
        axes.annotate(
            "",
            (PUBLISHED_RANKS, seconds * 3.2),
            (PUBLISHED_RANKS, seconds),
            arrowprops=arrow,
            annotation_clip=False,
        )


_BARRIERS: Final = {
    "barrier": "barrier: all ranks at once",
    "barrier-trickle": "barrier: one after the other",
}


def _paint_barrier(results: Results, canvas: Canvas) -> None:
    found = {name: each for name in _BARRIERS if (each := lines(results, name))}
    panels = canvas.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for panel, each in zip(panels, found.values(), strict=True):
        _draw_lines(panel, each)
    for panel, (name, each) in zip(panels, found.items(), strict=True):
        _finish(panel, _BARRIERS[name], each, TIME)
        _tilt(panel)
    _legend(canvas, panels)


def _paint_growth(results: Results, canvas: Canvas) -> None:
    found = {figure: each for figure in COSTS if (each := costs(results, "init", figure))}
    panels = canvas.subplots(1, len(found), squeeze=False)[0]
    for panel, (figure, each) in zip(panels, found.items(), strict=True):
        _draw_lines(panel, each, lambda target: _with_exponents(results, target))
        _finish(panel, f"init: {_SHORT[figure]}", each, COSTS[figure])
        _tilt(panel)
    _legend(canvas, panels)


def _with_exponents(results: Results, target: str) -> str:
    """A target, with how its costs grow: as the ranks to the power of 1 is linear."""
    found = ((figure, growth(results, "init", target, figure)) for figure in COSTS)
    said = [f"{_SHORT[figure]} $n^{{{each.exponent:.2f}}}$" for figure, each in found if each is not None]
    return f"{target}\n{', '.join(said)}"


def _are_close(sizes: Sequence[int]) -> bool:
    return any(after < 2.5 * before for before, after in pairwise(sizes))


def _tilt(axes: Axes) -> None:
    """Where it is narrow, labels beside each other need a slope."""
    axes.tick_params(axis="x", labelrotation=35)


def _paint_ops(results: Results, canvas: Canvas) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes = canvas.add_subplot()
    records = _rate_records(results)
    targets = _targets_of(records)
    pitch = len(targets) + 1.2
    for number, record in enumerate(records):
        _draw_rates(axes, record, targets, number * pitch)
    for number in range(1, len(records)):
        axes.axhline(number * pitch - 1.1, color=GRID, linewidth=0.5)
    middle = (len(targets) - 1) / 2
    axes.set(title="ops: many clients", xlabel="operations per second", ylabel="operation", xscale="log")
    axes.set_yticks(
        [number * pitch + middle for number in range(len(records))], [each.name for each in records]
    )
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(records) * pitch - 1.1, -1.1)
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.2, high * 2.4)  # room for the words beside the rightmost marker
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="major", axis="x")
    _legend(canvas, [axes])


def _rate_records(results: Results) -> list[Record]:
    found = (results.record(name) for name in OPERATIONS)
    return [record for record in found if record is not None and _targets_of([record])]


def _targets_of(records: Sequence[Record]) -> list[str]:
    measured = [name for name in merge_targets(records) if any(_rate_of(each, name) for each in records)]
    return sorted(measured, key=_order)


def _rate_of(record: Record, target: str) -> Spread | None:
    entry = record.entries.get(target)
    return None if entry is None else entry.spread()


def _draw_rates(axes: Axes, record: Record, targets: Sequence[str], top: float) -> None:
    """A marker for each target, in lines of their own so that none covers another."""
    for number, target in enumerate(targets):
        rate, style = _rate_of(record, target), STYLES.get(target, _STRANGER)
        if rate is None:
            continue
        axes.errorbar(
            [rate.median],
            [top + number],
            xerr=_bars([rate]),
            label=target,
            color=style.colour,
            marker=style.marker,
            linestyle="none",
            markersize=5.5,
            elinewidth=0.7,
            capsize=2.5,
        )
        axes.annotate(
            text.rate(rate.median),
            (rate.upper, top + number),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=INK,
        )


_WIDTH: Final = 8.4


@dataclass(frozen=True)
class Kind:
    """A figure: how high it is, what it needs, and how it is painted."""

    height: float
    has_data: Callable[[Results], bool]
    paint: Callable[[Results, Any], None]


FIGURES: Final = {
    "init": Kind(4.4, lambda results: bool(lines(results, "init")), _paint_init),
    "barrier": Kind(4.0, lambda results: any(lines(results, name) for name in _BARRIERS), _paint_barrier),
    "growth": Kind(4.0, lambda results: any(costs(results, "init", each) for each in COSTS), _paint_growth),
    "ops": Kind(4.8, lambda results: bool(_rate_records(results)), _paint_ops),
}
"""By their names, in the order in which they are shown."""
