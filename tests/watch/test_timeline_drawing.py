"""The timeline as a figure: the straggler stands out, nothing covers anything, and a crowd stays readable."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from colours import contrast
from rallypoint.store.rollcall.events import Connected, RoundPlanned, Stopped
from rallypoint.store.rollcall.plan import Plan, PlannedMachine
from rallypoint.watch import plots as paper
from rallypoint.watch.timeline import drawing
from rallypoint.watch.timeline.drawing import MOST_ROWS, rows_of, spans_of
from rallypoint.watch.timeline.judgement import Timeline
from startups import BEGIN, START, arrival, judged, key_of, open_wait, straggler, wait


def _draw(timeline: Timeline) -> Figure:
    with paper.drawing(math=False):
        figure = drawing.draw(timeline)
        figure.draw_without_rendering()  # lays it out
    return figure


def _missing() -> Timeline:
    plan = RoundPlanned(BEGIN - 1, Plan(0, (PlannedMachine("node-a", 0, 2), PlannedMachine("node-b", 2, 2))))
    events = [event for rank in range(3) for event in arrival(rank, 0.1 * rank, f"node-{'aab'[rank]}")]
    waits = [open_wait(rank, 0.5, key_of(3)) for rank in range(3)]
    return judged(START, plan, *events, *waits, Stopped(BEGIN + 50))


def _strangers() -> Timeline:
    names = ["gpu-$1$" + "-long" * 30, "größe $\\frac$", "\x1b[31m", "<b>&amp;"]
    events = [event for rank in range(4) for event in arrival(rank, 0.1 * rank, names[rank], 6)]
    others = [Connected(BEGIN + at, 50 + at, f"[fe80::{at}]:5000") for at in (5, 12)]
    waits = [*wait(0, 1.0, 12.0, "$x^", by=1), *wait(1, 1.0, 6.0, "k", gave_up=True)]
    return judged(START, *events, *others, *waits, Stopped(BEGIN + 20))


CASES: dict[str, Callable[[], Timeline]] = {
    "straggler": lambda: judged(*straggler(8, last=5, late=41.2)),
    "missing": _missing,
    "strangers": _strangers,
    "nobody": lambda: judged(START),
    "128 machines": lambda: judged(*straggler(128, last=99, late=20.0, per_machine=1)),
    "crowd": lambda: judged(*straggler(200, last=99, late=20.0, per_machine=8)),
}


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> tuple[Timeline, Figure]:
    timeline = CASES[request.param]()
    return timeline, _draw(timeline)


def _texts(figure: Figure) -> list[Text]:
    """All that is written, but for ticks beyond the ends of an axis, which are not drawn."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]  # type: ignore[attr-defined]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = axis.get_major_ticks()
            found += [each.label1 for each in ticks if min(limits) <= each.get_loc() <= max(limits)]
    return [each for each in found if each.get_visible() and each.get_text().strip()]


def _words(figure: Figure) -> list[str]:
    return [each.get_text() for each in _texts(figure)]


# What it shows


def test_no_text_covers_another_or_leaves_the_figure(case: tuple[Timeline, Figure]) -> None:
    _, figure = case
    boxes = [(each.get_text(), each.get_window_extent()) for each in _texts(figure)]
    for (one, here), (other, there) in combinations(boxes, 2):
        assert not _overlap(here, there), f"{one!r} and {other!r}"
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.width, text
        assert box.y0 >= 0, text
        assert box.y1 <= figure.bbox.height, text


def _overlap(one: Any, other: Any) -> bool:
    """By more than the space that letters leave."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return bool(width > 1 and height > 3)


def test_the_straggler_has_its_colour_and_its_label(case: tuple[Timeline, Figure]) -> None:
    timeline, figure = case
    late = {each.name for each in timeline.straggling.members} if timeline.straggling else set()
    coloured = [each.get_text() for each in _texts(figure) if to_hex(each.get_color()) == drawing.LATE]
    for name in late:
        assert any(label.startswith(name) for label in coloured)
    assert bool(late) == any(("came" in each) or ("others waited" in each) for each in coloured)
    assert ("late" in _words(figure)) is bool(late)


def test_rows_are_members_or_machines_and_the_axis_is_in_seconds(case: tuple[Timeline, Figure]) -> None:
    timeline, figure = case
    [axes] = figure.axes
    labels = [each.get_text() for each in axes.get_yticklabels()]
    assert len(labels) == sum(row.member is not None for row in rows_of(timeline))
    assert len(labels) == len(timeline.members) or (len(timeline.members) > MOST_ROWS and len(labels) <= 40)
    low, high = axes.get_xlim()
    assert low == 0
    assert timeline.seconds <= high <= max(timeline.seconds * 1.1, 0.1)
    assert axes.get_xlabel() == "seconds after the first came"


def test_all_that_is_drawn_stands_out_from_white_and_from_dark(tmp_path: Path) -> None:
    text = ""
    for timeline in (_missing(), _strangers()):
        drawing.save(timeline, tmp_path / "timeline.svg")
        text += (tmp_path / "timeline.svg").read_text()
    colours = set(re.findall(r"#[0-9a-f]{6}\b", text))
    assert {drawing.WAITS, drawing.IN_VAIN, drawing.LATE, paper.INK} <= colours
    for colour in colours:
        for ground in paper.GROUNDS:
            assert contrast(colour, ground) >= 3, f"{colour} on {ground}"


# Rows


def test_rows_are_grouped_by_machine_unless_each_has_one_rank() -> None:
    def labels(timeline: Timeline) -> list[str]:
        return [row.label for row in rows_of(timeline)]

    grouped = judged(*straggler(4, last=3, late=9.0, per_machine=2))
    assert labels(grouped) == ["node-0000", "rank 0", "rank 1", "node-0001", "rank 2", "rank 3"]
    assert [row.is_late for row in rows_of(grouped)] == [False] * 5 + [True]
    single = judged(*straggler(2, last=1, late=9.0, per_machine=1))
    assert labels(single) == ["rank 0 on node-0000", "rank 1 on node-0001"]
    assert labels(judged(START, *arrival(0, 0.0, ""))) == ["rank 0"]


def test_of_a_crowd_the_machines_of_the_last_are_shown() -> None:
    rows = rows_of(judged(*straggler(1_024, last=500, late=20.0, per_machine=8)))
    assert [row.label for row in rows if row.member is None] == [
        "node-0062",
        *(f"node-{machine:04}" for machine in range(124, 128)),
    ]
    assert [row.label for row in rows if row.is_late] == ["rank 500"]


def test_waits_that_cannot_be_told_apart_are_one_bar() -> None:
    waits = [each for at in range(1_000) for each in wait(0, 0.01 * at, 0.01 * at + 0.009, "k")]
    timeline = judged(START, *arrival(0, 0.0), *arrival(1, 10.0), *waits)
    assert len(spans_of(timeline, timeline.members[-1], met=True)) == 1
    assert spans_of(timeline, timeline.members[-1], met=False) == []


# Files


@pytest.mark.parametrize("suffix", [".SVG", ".png", ".pdf"])
def test_files_are_written_and_the_same_each_time(suffix: str, tmp_path: Path) -> None:
    """An SVG says in words what it shows."""
    timeline = judged(*straggler(8, last=5, late=41.2))
    paths = [tmp_path / f"one{suffix}", tmp_path / f"two{suffix}"]
    for path in paths:
        paper.check_plot(path)
        drawing.save(timeline, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    starts = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}
    assert paths[0].read_bytes().startswith(starts[suffix.lower()])
    if suffix == ".SVG":
        assert "<dc:title>rank 5 on node-0001 came 41.2 s after the first;" in paths[0].read_text()


@pytest.fixture(autouse=True)
def _strict_about_warnings(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """matplotlib warns of letters that its font does not have, and of layouts that do not fit."""
    yield
    assert [str(each.message) for each in recwarn.list] == []
    assert "matplotlib.pyplot" not in sys.modules
