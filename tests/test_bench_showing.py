"""Whatever shows results: words, tables, comparisons, figures and the page of the documentation."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from rich.console import Console
from typer.testing import CliRunner

from bench_results import MOST, full_results, make_entry, make_record, make_results
from rallypoint import plots, text
from rallypoint.bench import comparing, figures, names, sheets, tables, words
from rallypoint.bench.page import alt_text, page, write_page
from rallypoint.bench.results import Results, Spread, read, to_json
from rallypoint.cli.bench import app
from rallypoint.errors import RallypointError, UsageError

# Words


def test_times_have_three_digits_and_a_unit() -> None:
    said = {
        1_800.0: "1,800 s",
        23.46: "23.5 s",
        0.0995: "99.5 ms",
        -62e-6: "-62.0 us",
        5e-9: "5.00 ns",
        0.0: "0 s",
    }
    assert {seconds: text.fine_duration(seconds) for seconds in said} == said


def test_other_figures_in_words() -> None:
    assert [text.duration(each) for each in (12.34, 95.0, 7_320.0)] == [
        "12 s",
        "1 min 35 s",
        "2 h 2 min",
    ]
    assert [text.rate(each) for each in (12_345.4, 1.5)] == ["12,345/s", "1.50/s"]
    assert [text.size(each) for each in (640.0, 2_900.0, 9e7)] == ["640 B", "2.83 KiB", "85.8 MiB"]
    assert words.ratio(Spread(1.1, 1.23, 1.31)) == "1.23x (1.10 to 1.31)"
    assert words.ratio(Spread(0.068, 0.068, 0.068)) == "0.068x"


def test_a_unit_is_said_once_unless_the_quartiles_have_two() -> None:
    assert words.with_quartiles(Spread(1.0, 2.0, 3.0), text.fine_duration) == "2.00 s (1.00 to 3.00 s)"
    assert words.with_quartiles(Spread(0.9, 0.95, 1.1), text.fine_duration) == "950 ms (900 ms to 1.10 s)"


# Tables


def test_all_that_can_be_measured_has_a_title_and_a_style() -> None:
    assert tuple(sheets.TITLES) == names.COMMANDS
    assert set(figures.STYLES) == {*names.TARGETS, *names.AS_IS}


def _printed(results: Results, **options: Any) -> str:
    output = io.StringIO()
    tables.print_results(results, Console(file=output, **options))
    return output.getvalue()


@cache
def _printed_whole() -> str:
    """A full run where there is no terminal."""
    return _printed(full_results())


def _row(text: str, *starts: str) -> list[str]:
    """The cells of the first row of an ASCII table that has these in its first columns."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if tuple(cells[: len(starts)]) == starts:
            return cells
    raise AssertionError(f"no row starts with {starts}")


def test_a_full_run_is_printed_whole_where_there_is_no_terminal() -> None:
    text = _printed_whole()
    for fact in (
        "An Example 3000",
        "2.13.0+cpu",
        "open files per process: 20,000",
        "20 min 34 s",
        "2026-01-02T",
    ):
        assert fact in text
    for command in sheets.TITLES:
        assert f"\n{sheets.TITLES[command]}\n" in text
    assert text.isascii()
    assert "…" not in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) > 80


def test_a_row_has_the_figures_of_one_target() -> None:
    text = _printed_whole()
    row = _row(text, "init", "1,024", "rallypoint-libuv")
    assert row[3:10] == ["70.0 ms", "35.0 ms", "69.3 ms", "41.0 us", "2.83 KiB", "55%", "70%"]
    assert re.fullmatch(r"1\.\d\dx \(1\.\d\d to 1\.\d\d\)", row[10])
    assert _row(text, "get", "rallypoint-libuv")[2] == "52,000/s"


def test_the_baseline_says_so_and_the_others_have_a_ratio() -> None:
    values = {
        "torch-libuv": [1_000.0] * 4,
        "redis": [1_100.0, 1_200.0, 1_300.0, 1_404.0],
        "rallypoint-relay": [],
    }
    record = make_record("get", "rate", values)
    record.entries["rallypoint-relay"].fault = "it [bold]ended[/bold] early"
    text = _printed(make_results(record))
    assert _row(text, "get", "torch-libuv") == ["get", "torch-libuv", "1,000/s", "baseline"]
    assert _row(text, "", "redis") == ["", "redis", "1,250/s", "1.25x (1.17 to 1.33)"]
    assert _row(text, "", "rallypoint-relay") == ["", "rallypoint-relay", "fault", "-"]
    assert "\nFaults:\n- get, rallypoint-relay: it [bold]ended[/bold] early\n" in text


def test_a_value_beside_a_fault_is_marked() -> None:
    record = make_record("get", "rate", {"redis": [10.0]})
    record.entries["redis"].fault = "it ended early"
    assert _row(_printed(make_results(record)), "get", "redis")[2] == "10/s (fault)"


def test_growth_is_shown_for_several_sizes_only() -> None:
    records = [
        make_record("init", "time", {"redis": [size**2 * 1e-6]}, size, "init") for size in (1_000, 10_000)
    ]
    text = _printed(make_results(*records))
    assert _row(text, "init", "redis", "time") == ["init", "redis", "time", "1.00 ms", "10.0 ms", "2.00"]
    assert "exponent" not in _printed(make_results(records[0]))


def test_brackets_in_a_name_are_no_markup() -> None:
    assert _row(_printed(make_results(make_record("get", "rate", {"a[bold]b": [1.0]}))), "get", "a[bold]b")


def test_the_load_of_all_sizes_is_said_once() -> None:
    assert _printed_whole().count("\ninit: ranks that init. One operation: rank.\n") == 1


def test_extras_are_shown_known_or_not() -> None:
    record = make_record("accept", "rate", {})
    record.entries["redis"] = make_entry("redis", [1.0])
    record.entries["redis"].samples[0].extras.update(unheard_of=12.34, dropped=3.0)
    text = _printed(make_results(record))
    assert "| connects dropped | unheard_of |" in text
    assert _row(text[text.index("further figures") :], "accept", "redis") == ["accept", "redis", "3", "12.3"]


def test_who_was_held_back_notes_and_goals_are_told() -> None:
    text = _printed_whole()
    assert "- get-pipelined, redis: the load took 93% of a core and the server 72%" in text
    assert "- restart: torch's server cannot be restarted on its port" in text
    assert _row(text, "met", "get: rallypoint-libuv against torch-libuv")[2] == "at least 0.85x"
    assert "more goals" not in text
    small = make_results(make_record("get", "rate", {"rallypoint-libuv": [8.0], "torch-libuv": [10.0]}))
    text = _printed(small)
    assert _row(text, "not met", "get: rallypoint-libuv against torch-libuv")[3] == "0.80x"
    assert "23 more goals are about what this run has not measured" in text
    assert "Held back" not in text


def test_an_interrupted_run_without_records_can_be_printed() -> None:
    results = make_results()
    results.interrupted = True
    assert "interrupted" in _printed(results)


def test_a_narrow_terminal_loses_no_target() -> None:
    results = full_results()
    results.records = results.records[:1]
    text = _printed(results, force_terminal=True, width=80, no_color=True)
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in text.splitlines()) <= 80
    assert "rallypoint-legacy" in text


# Comparisons


def test_a_ratio_of_two_runs_is_that_of_the_medians_and_above_1_is_better() -> None:
    a, b = (
        make_results(
            make_record("get", "rate", {"redis": [rate, rate + 1, rate + 2]}),
            make_record("init", "time", {"redis": [seconds] * 3}, 1_024),
        )
        for rate, seconds in ((10.0, 2.0), (21.0, 1.0))
    )
    rate, seconds = comparing.compare(a, b)
    assert (rate.record, rate.ranks, rate.target) == ("get", 0, "redis")
    assert (rate.ratio, rate.spread) == (2.0, "apart")
    assert (rate.a.median, rate.b.median) == (11.0, 22.0)
    assert (seconds.ranks, seconds.ratio) == (1_024, 2.0)
    assert [row.ratio for row in comparing.compare(b, a)] == [0.5, 0.5]


def test_quartiles_tell_whether_two_runs_differ() -> None:
    for a, b, spread in (
        ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], "apart"),
        ([4.0, 5.0, 6.0], [1.0, 2.0, 3.0], "apart"),
        ([1.0, 9.0, 17.0], [8.0, 9.0, 10.0], "overlap"),
        ([1.0, 2.0], [4.0, 5.0, 6.0], "too few rounds"),
    ):
        one, other = (make_results(make_record("get", "rate", {"redis": each})) for each in (a, b))
        assert [row.spread for row in comparing.compare(one, other)] == [spread]


def test_what_is_only_in_one_and_what_differs_is_told() -> None:
    a, b = full_results(), full_results()
    b.records = [record for record in b.records if record.name != "cancel"]
    b.versions["torch"], b.limits["ports"] = "2.14.0", "9"
    a.records[0].entries["torch-libuv"].samples.clear()
    assert comparing.only_in(a, b) == ["cancel, rallypoint-libuv", "cancel, torch-libuv"]
    assert comparing.only_in(b, a) == ["init, 1,024 ranks, torch-libuv"]
    found = comparing.differences(a, b)
    assert [(each.name, each.a, each.b) for each in found] == [
        ("torch", "2.13.0+cpu", "2.14.0"),
        ("ports", "-", "9"),
    ]
    assert comparing.differences(a, a) == []


def test_a_comparison_is_printed_and_goes_into_json() -> None:
    a, b = full_results(), full_results()
    b.versions["torch"] = "2.14.0"
    b.records[0].load = "another load"
    output = io.StringIO()
    comparing.print_comparison(a, b, Console(file=output))
    text = output.getvalue()
    assert "- torch: A 2.13.0+cpu, B 2.14.0" in text
    assert _row(text, "get", "rallypoint-libuv")[4:] == ["1.00x", "overlap"]
    assert "Not under the same load, so not to be compared:\n- init, 1,024 ranks, rallypoint-libuv" in text
    assert "Only in" not in text
    document = json.loads(json.dumps(comparing.to_document(a, b)))
    assert len(document["rows"]) == len(comparing.compare(a, b)) > 50
    assert document["rows"][0]["same_load"] is False
    assert document["rows"][0]["a"]["median"] == pytest.approx(0.07)
    assert document["differences"] == [{"name": "torch", "a": "2.13.0+cpu", "b": "2.14.0"}]


# Figures


def _draw(name: str, results: Results) -> Figure:
    figure = figures.draw(results, name)
    assert figure is not None
    figure.draw_without_rendering()  # ticks are made when they are needed
    return figure


@cache
def _drawn(name: str) -> Figure:
    """A figure of a full run; drawn once, since that takes a while."""
    return _draw(name, full_results())


@pytest.fixture(params=list(figures.FIGURES))
def drawn(request: pytest.FixtureRequest) -> tuple[str, Figure]:
    """Each figure of a full run."""
    return request.param, _drawn(request.param)


def _luminance(colour: str) -> float:
    channels = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in to_rgba(colour)[:3]
    )
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), channels, strict=True))


def _contrast(one: str, other: str) -> float:
    """By the definition of WCAG."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _least_contrast(colour: str) -> float:
    return min(_contrast(colour, ground) for ground in plots.GROUNDS)


def _colours(artist: Artist) -> Iterator[Any]:
    if isinstance(artist, Line2D):
        if artist.get_linestyle() != "None":
            yield artist.get_color()
        if artist.get_marker() != "None":
            yield from (artist.get_markerfacecolor(), artist.get_markeredgecolor())
    elif isinstance(artist, Text):
        yield from [artist.get_color()] if artist.get_text() else []
    elif isinstance(artist, Patch):
        yield from [artist.get_facecolor()] + ([artist.get_edgecolor()] if artist.get_linewidth() else [])
    elif isinstance(artist, Collection):
        yield from (*artist.get_facecolor(), *artist.get_edgecolor())


def test_all_that_is_drawn_stands_out_and_nothing_is_half_transparent(drawn: tuple[str, Figure]) -> None:
    artists = drawn[1].findobj(lambda artist: artist.get_visible())
    assert {artist.get_alpha() for artist in artists} <= {None, 1.0}
    colours = {to_rgba(colour) for artist in artists for colour in _colours(artist)}
    assert {colour[3] for colour in colours} == {0.0, 1.0}
    painted = {to_hex(colour) for colour in colours if colour[3]}
    assert len(painted) >= 5
    assert {colour for colour in painted if _least_contrast(colour) < 3} == set()


def test_both_axes_are_labelled_and_what_is_a_figure_is_logarithmic(drawn: tuple[str, Figure]) -> None:
    name, figure = drawn
    assert figure.axes
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_xscale() == "log"
        assert axes.get_yscale() == ("linear" if name == "ops" else "log")  # operations have no scale
        assert axes.get_title()


def test_the_ranks_at_the_axis_are_those_that_were_measured(drawn: tuple[str, Figure]) -> None:
    name, figure = drawn
    if name != "ops":
        for axes in figure.axes:
            assert [text.get_text() for text in axes.get_xticklabels()] == [
                "1,024",
                "4,096",
                "16,384",
                "98,304",
            ]


def test_no_two_labels_of_an_axis_overlap_and_no_legend_covers_axes(drawn: tuple[str, Figure]) -> None:
    figure = drawn[1]
    for axes in figure.axes:
        for labels in (axes.get_yticklabels(), _annotations(axes)):
            boxes = [text.get_window_extent() for text in labels if text.get_text()]
            clashes = [(a, b) for n, a in enumerate(boxes) for b in boxes[:n] if a.overlaps(b)]
            assert clashes == []
        for legend in figure.legends:
            assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    for legend in figure.legends:
        assert legend.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize(("sizes", "is_tilted"), [((1_024, 16_384), False), ((1_024, 65_536), True)])
def test_ranks_that_are_close_have_tilted_labels(sizes: tuple[int, ...], is_tilted: bool) -> None:
    records = [make_record("init", "time", {"redis": [1.0]}, size, "init") for size in sizes]
    labels = _draw("init", make_results(*records)).axes[0].get_xticklabels()
    assert {text.get_rotation() > 0 for text in labels} == {is_tilted}


def _annotations(axes: Axes) -> list[Text]:
    return [text for text in axes.texts if text.get_text()]


def _legend(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_each_target_has_a_colour_a_marker_and_dashes_of_its_own() -> None:
    styles = figures.STYLES.values()
    for part in ("colour", "marker", "dashes"):
        assert len({getattr(style, part) for style in styles}) == len(styles)


def test_the_figure_of_init_has_what_pytorch_has_published() -> None:
    figure = _drawn("init")
    (axes,) = figure.axes
    hollow = {
        (float(line.get_xdata()[0]), float(line.get_ydata()[0]))  # type: ignore[index, arg-type]
        for line in axes.lines
        if line.get_markerfacecolor() == "none"
    }
    assert hollow == {(98_304.0, 1_800.0), (98_304.0, 100.0)}
    assert [text.get_text() for text in _annotations(axes)] == ["> 1,800 s", "100 s"]
    (arrow,) = [text.arrow_patch for text in axes.texts if text.arrow_patch is not None]  # type: ignore[attr-defined]
    assert arrow.get_edgecolor() == to_rgba(figures.STYLES["torch-legacy"].colour)
    published = [label for label in _legend(figure) if "published by PyTorch,\nanother machine" in label]
    assert [label.partition(",")[0] for label in published] == ["torch-legacy", "torch-libuv"]
    assert len(_legend(figure)) == 7


def test_lines_go_through_the_medians_with_quartiles_beside_them() -> None:
    values = {"redis": [1.0, 2.0, 3.0, 4.0, 5.0]}
    results = make_results(*(make_record("init", "time", values, size, "init") for size in (2, 4)))
    (axes,) = _draw("init", results).axes
    (container,) = axes.containers
    line, _, (bars,) = container.lines  # type: ignore[attr-defined]
    assert list(line.get_ydata()) == [3.0, 3.0]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[2.0, 4.0], [2.0, 4.0]]


def test_barriers_have_a_panel_each_and_growth_has_exponents() -> None:
    assert len(_drawn("barrier").axes) == 2
    growth = _drawn("growth")
    assert [axes.get_title() for axes in growth.axes] == ["init: CPU", "init: memory"]
    assert "rallypoint-relay\nCPU $n^{1.00}$, memory $n^{1.00}$" in _legend(growth)


def test_operations_are_shown_by_their_rates() -> None:
    figure = _drawn("ops")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["get", "get-pipelined", "set", "add"]
    assert {text.get_text() for text in _annotations(axes)} >= {"52,000/s", "610,000/s"}
    assert _legend(figure) == ["rallypoint-libuv", "rallypoint-legacy", "torch-libuv", "redis"]


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    results = make_results(
        make_record("multi-get", "rate", {"redis": [1.0]}), make_record("get", "rate", {"a": []})
    )
    assert [figures.draw(results, name) for name in figures.FIGURES] == [None] * 4
    assert figures.save(results, tmp_path / "all.svg") == []
    assert figures.save_all(results, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_figures_heed_no_settings_of_the_user_and_change_none() -> None:
    with matplotlib.rc_context({"font.size": 33.0, "text.color": "black"}):
        figure = figures.draw(make_results(make_record("get", "rate", {"redis": [1.0]})), "ops")
        assert figure is not None
        assert figure.axes[0].title.get_fontsize() == 10.0
        assert _legend(figure)
        assert matplotlib.rcParams["font.size"] == 33.0
        assert matplotlib.rcParams["text.color"] == "black"


def test_a_png_has_all_figures_on_a_transparent_ground(tmp_path: Path) -> None:
    """Also of a small run: one size, one round, and a target that has no style."""
    path = tmp_path / "all.PNG"
    results = make_results(
        make_record("init", "time", {"stranger": [0.1]}, 64, "init"),
        make_record("get", "rate", {"redis": [9.0]}),
    )
    assert figures.save(results, path) == ["init", "ops"]
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    pixels = imread(path, format="png")
    assert pixels.shape[1] > 1_000
    assert pixels[0, 0, 3] == 0
    assert (pixels[:, :, 3] > 0).any()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a full run, in a folder that has its figures beside it."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "result.json").write_text(to_json(full_results()))
    path = folder / "docs" / "benchmarks.md"
    run = CliRunner().invoke(app, ["page", str(folder / "result.json"), "--output", str(path)])
    assert (run.exit_code, run.output) == (0, "")
    return path


def test_an_svg_needs_no_font_and_has_no_date(written: Path) -> None:
    for path in (written.parent / "figures").iterdir():
        text = path.read_text()
        assert "<svg" in text
        assert "<text" not in text
        assert "<dc:date>" not in text
        colours = set(re.findall(r"#[0-9a-f]{6}\b", text))
        assert len(colours) >= 6
        assert {colour for colour in colours if _least_contrast(colour) < 3} == set()


def test_an_svg_is_the_same_each_time_and_one_of_an_earlier_run_goes(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written.parent / "figures", tmp_path / "figures"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"init.svg", "barrier.svg", "growth.svg", "ops.svg"}
    results = full_results()
    results.records = [record for record in results.records if record.command == "ops"]
    (path,) = figures.save_all(results, folder)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == {"ops.svg": before["ops.svg"]}
    assert path == folder / "ops.svg"


def test_other_suffixes_are_refused_beforehand(tmp_path: Path) -> None:
    for name in ("plot.gif", "plot", "plot.svg.gz", ".png"):
        with pytest.raises(UsageError, match="is no SVG, PNG or PDF") as caught:
            plots.check_plot(tmp_path / name)
        assert ".svg" in caught.value.hint


def test_a_folder_that_is_not_there_is_told_beforehand(tmp_path: Path) -> None:
    plots.check_plot(tmp_path / "plot.svg")
    with pytest.raises(UsageError, match="no folder"):
        plots.check_plot(tmp_path / "nowhere" / "plot.svg")


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "plot.svg").mkdir()
    results = make_results(make_record("init", "time", {"redis": [0.1]}, 64, "init"))
    with pytest.raises(RallypointError, match="cannot write"):
        figures.save(results, tmp_path / "plot.svg")


def test_without_matplotlib_there_is_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for act in (
        lambda: plots.check_plot(tmp_path / "plot.svg"),
        lambda: figures.draw(full_results(), "init"),
        lambda: figures.save_all(full_results(), tmp_path),
        lambda: write_page(full_results(), tmp_path / "page.md"),
    ):
        with pytest.raises(UsageError, match="figures need matplotlib") as caught:
            act()
        assert "pip install 'rallypoint[bench]'" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_whoever_draws_nothing_imports_no_matplotlib() -> None:
    code = "import sys, rallypoint.bench.page, rallypoint.bench.comparing; print('matplotlib' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


# The page


def test_the_page_of_the_docs_is_what_its_result_file_says() -> None:
    docs = Path(__file__).parents[1] / "docs"
    drawn = {name: f"figures/{name}.svg" for name in figures.FIGURES}
    assert all((docs / path).is_file() for path in drawn.values())
    text = (docs / "benchmarks.md").read_text()
    assert text == page(read(docs / "benchmarks.json"), drawn), "make it anew, as its first line says"


def test_a_page_is_written_from_a_result_file(written: Path) -> None:
    text = written.read_text()
    assert text.startswith(
        "<!-- Generated by `rallypoint bench page RESULT.json --output docs/benchmarks.md`"
    )
    shown = [written.parent / target for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)]
    assert sorted(shown) == sorted((written.parent / "figures").iterdir())
    assert sorted(written.parent.iterdir()) == [written, written.parent / "figures"]


def test_the_page_says_what_was_measured_and_how_to_do_it_again() -> None:
    text = page(full_results(), {"init": "figures/init.svg"})
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == [
        "Goals",
        *sheets.TITLES.values(),
        "Held back by the load",
        "Notes",
        "How to reproduce",
        "What these figures do not show",
    ]
    for fact in ("| processor | An Example 3000 |", "| torch | 2.13.0+cpu |", "took 20 min 34 s"):
        assert fact in text
    for command in ("make bench", "make bench-full", "rallypoint bench all --json result.json"):
        assert f"\n{command} " in text or f"\n{command}\n" in text
    assert re.search(
        r"^\| init \| 1,024 \| rallypoint-libuv \| 70\.0 ms \|.* \| 1\.\d\dx \(", text, re.MULTILINE
    )
    assert "of 24 goals, this run measured 24" in text.replace("\n", " ")


def test_each_table_of_the_page_is_one() -> None:
    """Every row has as many cells as its header, whatever the data."""
    results = full_results()
    results.machine["processor"] = "a | b <c>"
    blocks = [block.splitlines() for block in page(results, {}).split("\n\n") if block.startswith("|")]
    assert len(blocks) > 10
    for lines in blocks:
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
        assert len(counts) == 1, lines[0]
        assert len(lines) > 2


def test_a_goal_that_was_missed_stands_out_and_one_not_measured_says_so() -> None:
    text = page(
        make_results(make_record("get", "rate", {"rallypoint-libuv": [1.0], "torch-libuv": [10.0]})), {}
    )
    assert "| get: rallypoint-libuv against torch-libuv | at least 0.85x | 0.10x | **not met** |" in text
    assert "| cancel: rallypoint-libuv against torch-libuv | at least 50x | - | not measured |" in text


_LIMITS = {
    "-as-is": "`-as-is`",
    "redis": "redis is compared",
    "torch": "torch's servers look up",
    "relays": "go through relays",
    "tutorial": "PyTorch's tutorial",
    "interpreter": "without optimisations",
    "cores": "the 2 cores",
    "clients": "real clients of torch",
}


def test_the_page_tells_the_limits_of_a_full_run() -> None:
    text = page(full_results(), {"init": "figures/init.svg"}).replace("\n  ", " ")
    limits = text[text.index("What these figures do not show") :]
    assert [name for name, words in _LIMITS.items() if words not in limits] == []
    assert f"{MOST:,}" in limits


def test_the_page_tells_no_limits_of_what_was_not_measured() -> None:
    text = page(make_results(make_record("get", "rate", {"rallypoint-libuv": [1.0]})), {}).replace(
        "\n  ", " "
    )
    limits = text[text.index("What these figures do not show") :]
    assert "loopback" in limits
    assert [name for name, words in _LIMITS.items() if words in limits] == []


def test_the_page_tells_faults_and_that_a_run_was_interrupted() -> None:
    results = full_results()
    assert "## Faults" not in page(results, {})
    assert "interrupted" not in page(results, {})
    results.records[0].entries["torch-libuv"].fault = "it ended early"
    results.interrupted = True
    text = page(results, {})
    assert "## Faults\n\n- init, 1,024 ranks, torch-libuv: it ended early\n" in text
    assert "**The run was interrupted" in text


def test_the_examples_of_the_page_are_not_run_as_tests() -> None:
    for block in re.finditer(r"^```sh$", page(full_results(), {}), re.MULTILINE):
        before = block.string[: block.start()].rstrip("\n").rpartition("\n")[2]
        assert re.fullmatch(r"<!-- not run: .+ -->", before)


def test_a_figure_has_an_alternative_text_with_its_figures() -> None:
    for name, part in {
        "init": "rallypoint-relay: 110 ms at 1,024 ranks, 8.41 s at 98,304",
        "barrier": "rallypoint-libuv: 70.0 ms at 1,024 ranks",
        "growth": "rallypoint-libuv 2.83 KiB at 16,384 ranks",
        "ops": "get-pipelined: rallypoint-libuv 610,000/s",
    }.items():
        said = alt_text(full_results(), name)
        assert said.endswith(".")
        assert part in said


def test_lines_are_broken_between_words_only() -> None:
    """Markdown would make a break at a hyphen a space."""
    results = make_results()
    results.notes = ["as noted: " + " ".join(["torch-libuv-as-is"] * 20)]
    assert len(re.findall(r"torch-libuv-as-is", page(results, {}))) == 20


def test_prose_keeps_to_the_usual_width() -> None:
    lines = page(full_results(), {}).splitlines()
    assert [line for line in lines if len(line) > 110 and not line.startswith(("|", "!"))] == []
