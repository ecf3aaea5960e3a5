"""Results of `rallypoint bench` as users see them: tables, comparisons, figures and the page of the docs."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bench_results import MOST, full_results, make_record, make_results
from benchmarks import figures, tables
from benchmarks.__main__ import BENCHMARKS
from benchmarks.page import page, write_page
from benchmarks.planning import COMMANDS
from benchmarks.results import read
from benchmarks.tables import with_quartiles
from benchmarks.targets import AS_IS, USUAL
from colours import contrast
from rallypoint import text
from rallypoint.bench.results import Results, Spread, to_json
from rallypoint.cli.bench import print_run
from rallypoint.errors import RallypointError, UsageError
from rallypoint.watch import plots

# Tables


def test_all_that_can_be_measured_has_a_title_and_a_style() -> None:
    assert tuple(tables.TITLES) == COMMANDS
    assert set(figures.STYLES) == {*USUAL, *AS_IS}


def _printed(results: Results) -> str:
    found = [sheet for each in tables.commands(results) for sheet in tables.sheets(results, each)]
    with redirect_stdout(io.StringIO()) as output:
        print_run(results, found)
    return output.getvalue()


def _row(text: str, *starts: str) -> list[str]:
    """The cells of the first row of a table that has these in its first columns."""
    for line in text.splitlines():
        cells = re.split(r"\s{2,}", line)
        if tuple(cells[: len(starts)]) == starts:
            return cells
    raise AssertionError(f"no row starts with {starts}")


def test_a_full_run_is_printed_whole() -> None:
    text = _printed(full_results())
    for fact in ("An Example 3000", "2.13.0+cpu", "open files per process", "20 min 34 s", "2026-01"):
        assert fact in text
    for command in tables.TITLES:
        assert f"\n{tables.TITLES[command]}\n" in text
    assert text.count("\ninit: ranks that init. One operation: rank.\n") == 1  # of all sizes
    assert text.isascii()
    assert "- get-pipelined, redis: the load took 93% of a core and the server 72%" in text
    assert "- restart: torch's server cannot be restarted on its port" in text
    row = _row(text, "init", "1,024", "rallypoint-libuv")
    assert row[3:10] == ["70.0 ms", "35.0 ms", "69.3 ms", "41.0 us", "2.83 KiB", "55%", "70%"]
    assert re.fullmatch(r"1\.\d\dx \(1\.\d\d to 1\.\d\d\)", row[10])
    assert _row(text, "get", "rallypoint-libuv")[2] == "52,000/s"


def test_the_baseline_says_so_and_the_others_have_a_ratio_or_a_fault() -> None:
    values = {
        "torch-libuv": [1_000.0] * 4,
        "redis": [1_100.0, 1_200.0, 1_300.0, 1_404.0],
        "rallypoint-relay": [],
        "another": [10.0],
    }
    record = make_record("get", "rate", values)
    for name in ("rallypoint-relay", "another"):
        record.entries[name].fault = "it ended early"
    text = _printed(make_results(record))
    assert _row(text, "get", "torch-libuv") == ["get", "torch-libuv", "1,000/s", "baseline"]
    assert _row(text, "get", "redis") == ["get", "redis", "1,250/s", "1.25x (1.17 to 1.33)"]
    assert _row(text, "get", "rallypoint-relay") == ["get", "rallypoint-relay", "fault", "-"]
    assert _row(text, "get", "another") == ["get", "another", "10/s (fault)", "0.01x"]
    assert "\nFaults:\n- get, rallypoint-relay: it ended early\n" in text


def test_growth_is_shown_for_several_sizes_only() -> None:
    records = [
        make_record("init", "time", {"redis": [size**2 * 1e-6]}, size, "init") for size in (1_000, 10_000)
    ]
    text = _printed(make_results(*records))
    assert _row(text, "init", "redis", "time") == ["init", "redis", "time", "1.00 ms", "10.0 ms", "2.00"]
    assert "exponent" not in _printed(make_results(records[0]))


def test_extras_are_shown_of_targets_that_have_some() -> None:
    record = make_record("accept", "rate", {"redis": [1.0], "torch-libuv": [1.0]})
    record.entries["redis"].samples[0].extras.update(turned_away=12.0, dropped=3.0)
    text = _printed(make_results(record)).partition("further figures")[2]
    assert "connects dropped  connections reset\n" in text
    assert _row(text, "accept", "redis") == ["accept", "redis", "3", "12"]
    assert "torch-libuv" not in text.partition("Medians")[0]


# Comparisons


def test_a_ratio_of_two_runs_is_that_of_the_medians_and_above_1_is_better() -> None:
    a, b = (
        make_results(
            make_record("get", "rate", {"redis": [rate, rate + 1, rate + 2]}),
            make_record("init", "time", {"redis": [seconds] * 3}, 1_024),
        )
        for rate, seconds in ((10.0, 2.0), (21.0, 1.0))
    )
    rate, seconds = tables.compare(a, b)["rows"]
    assert (rate["record"], rate["ranks"], rate["target"], rate["ratio"]) == ("get", 0, "redis", 2.0)
    assert (rate["a"]["median"], rate["b"]["median"]) == (11.0, 22.0)
    assert (seconds["ranks"], seconds["ratio"]) == (1_024, 2.0)
    assert [row["ratio"] for row in tables.compare(b, a)["rows"]] == [0.5, 0.5]


def test_a_comparison_is_printed_with_what_limits_it_and_goes_into_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = full_results(), full_results()
    b.records = [record for record in b.records if record.name != "cancel"]
    b.records[0].load = "another load"
    b.versions["torch"], b.limits["ports"] = "2.14.0", "9"
    a.records[0].entries["torch-libuv"].samples.clear()
    for name, results in (("a", a), ("b", b)):
        (tmp_path / name).write_text(to_json(results))
    assert BENCHMARKS("benchmarks", ["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "A and B did not run under the same conditions:\n- torch: A 2.13.0+cpu, B 2.14.0\n- ports:" in text
    assert _row(text, "get", "-", "rallypoint-libuv")[3] == "52,000/s (50,440/s to 53,560/s)"
    assert _row(text, "get", "-", "rallypoint-libuv")[5] == "1.00x"
    document = json.loads(json.dumps(tables.compare(a, b)))
    only = [line.partition(":")[0] for line in document["only_a"]]
    first = [
        f"init, 1,024 ranks, {name}" for name in ("rallypoint-libuv", "rallypoint-relay", "torch-legacy")
    ]
    assert only == [*first, "cancel, rallypoint-libuv", "cancel, torch-libuv"]
    assert [line.partition(":")[2] for line in document["only_b"]] == [" another load"] * 4
    assert "Only in A:\n- init, 1,024 ranks, rallypoint-libuv: 1,024 ranks that init\n" in text
    assert "\nOnly in B:\n" in text


def test_a_unit_is_said_once_unless_the_quartiles_have_two() -> None:
    assert with_quartiles(Spread(1.0, 2.0, 3.0), text.fine_duration) == "2.00 s (1.00 to 3.00 s)"
    assert with_quartiles(Spread(0.9, 0.95, 1.1), text.fine_duration) == "950 ms (900 ms to 1.10 s)"


# Figures


@cache
def _drawn(name: str) -> Figure:
    """A figure of a full run; drawn once, since that takes a while."""
    figure = figures.draw(full_results(), name)
    figure.draw_without_rendering()  # ticks are made when they are needed
    return figure


@pytest.fixture(params=list(figures.FIGURES))
def drawn(request: pytest.FixtureRequest) -> tuple[str, Figure]:
    """Each figure of a full run."""
    return request.param, _drawn(request.param)


def test_axes_are_labelled_and_what_is_a_figure_is_logarithmic(drawn: tuple[str, Figure]) -> None:
    name, figure = drawn
    assert len(_axes(figure)) == (2 if name == "barrier" else 1)
    sizes, operations = ["1,024", "4,096", "16,384", "98,304"], ["get", "get-pipelined", "set", "add"]
    for axes in _axes(figure):
        assert axes.get_title()
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert (axes.get_xscale(), axes.get_yscale()) == ("linear" if name == "ops" else "log", "log")
        ticks = [text.get_text() for text in axes.get_xticklabels()]
        assert ticks == (operations if name == "ops" else sizes)


def _axes(figure: Figure) -> list[Any]:
    return [axes for part in figure.subfigs for axes in part.axes]


def _legend(figure: Figure) -> list[str]:
    return [text.get_text() for part in figure.subfigs for each in part.legends for text in each.get_texts()]


def test_each_target_has_a_colour_a_marker_and_dashes_of_its_own() -> None:
    styles = figures.STYLES.values()
    assert all(contrast(style.colour, ground) >= 3 for style in styles for ground in plots.GROUNDS)
    for part in ("colour", "marker", "dashes"):
        assert len({getattr(style, part) for style in styles}) == len(styles)


def test_the_figure_of_init_has_what_pytorch_has_published() -> None:
    (axes,) = _axes(_drawn("init"))
    lines = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in lines] == [(MOST, 1_800.0), (MOST, 100.0)]
    *measured, legacy, libuv = _legend(_drawn("init"))
    assert measured == ["rallypoint-libuv", "rallypoint-relay", "torch-libuv", "torch-legacy"]
    assert legacy == "torch-legacy, > 1,800 s,\npublished by PyTorch,\nanother machine"
    assert libuv.startswith("torch-libuv, 100 s,\n")


def test_lines_go_through_the_medians_with_quartiles_beside_them() -> None:
    values = {"redis": [1.0, 2.0, 3.0, 4.0, 5.0]}
    results = make_results(*(make_record("barrier", "time", values, size, "barrier") for size in (2, 4)))
    (axes,) = _axes(figures.draw(results, "barrier"))
    (container,) = axes.containers
    line, _, (bars,) = container.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([2, 4], [3.0, 3.0])
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[2.0, 4.0], [2.0, 4.0]]


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    results = make_results(
        make_record("multi-get", "rate", {"redis": [1.0]}), make_record("get", "rate", {"a": []})
    )
    assert figures.save(results, tmp_path / "all.svg") == []
    assert figures.save_all(results, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a full run, in a folder that has its figures beside it."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "result.json").write_text(to_json(full_results()))
    path = folder / "docs" / "benchmarks.md"
    assert BENCHMARKS("benchmarks", ["page", str(folder / "result.json"), "--output", str(path)]) == 0
    return path


def test_an_svg_is_the_same_each_time_and_one_of_an_earlier_run_goes(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written.parent / "figures", tmp_path / "figures"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"init.svg", "barrier.svg", "ops.svg"}
    results = full_results()
    results.records = [record for record in results.records if record.command == "ops"]
    assert figures.save_all(results, folder) == [folder / "ops.svg"]
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == {"ops.svg": before["ops.svg"]}


def test_what_cannot_be_saved_is_told(tmp_path: Path) -> None:
    for name in ("plot.gif", "plot", "plot.svg.gz", ".png"):
        with pytest.raises(UsageError, match="is no SVG, PNG or PDF") as caught:
            plots.check_plot(tmp_path / name)
        assert ".svg" in caught.value.hint
    with pytest.raises(UsageError, match="no folder"):
        plots.check_plot(tmp_path / "nowhere" / "plot.svg")
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
        lambda: write_page(full_results(), tmp_path / "page.md"),
    ):
        with pytest.raises(UsageError, match="figures need matplotlib") as caught:
            act()
        assert "pip install '.[bench]'" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


# The page


def test_the_page_of_the_docs_is_what_its_result_file_says() -> None:
    docs = Path(__file__).parents[2] / "docs"
    drawn = {name: f"figures/{name}.svg" for name in figures.FIGURES}
    assert all((docs / path).is_file() for path in drawn.values())
    text = (docs / "benchmarks.md").read_text()
    assert text == page(read(docs / "benchmarks.json"), drawn), "make it anew, as its first line says"


def test_nothing_in_a_result_becomes_markup_and_prose_keeps_to_the_usual_width() -> None:
    """Every row has as many cells as its header, whatever the data; no break at a hyphen."""
    results = full_results()
    results.machine["processor"] = "a | b <c>"
    results.notes = ["as noted: " + " ".join(["torch-libuv-as-was"] * 20)]
    text = page(results, {})
    for block in [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block}) == 1, block[0]
    assert [line for line in text.splitlines() if len(line) > 110 and not line.startswith("|")] == []
    assert text.count("torch-libuv-as-was") == 20


_LIMITS = {
    "redis": "redis is compared",
    "torch": "torch's servers look up",
    "relays": f"no other target at {MOST:,} ranks",
    "tutorial": "PyTorch's tutorial",
    "interpreter": "without optimisations",
    "clients": "real clients of torch",
}


def _limits(text: str) -> list[str]:
    text = text.replace("\n  ", " ")
    text = text[text.index("What these figures do not show") :]
    assert "loopback" in text
    return [name for name, words in _LIMITS.items() if words in text]


def test_the_page_tells_the_limits_of_what_was_measured_and_no_others() -> None:
    assert _limits(page(full_results(), {"init": "figures/init.svg"})) == list(_LIMITS)
    assert _limits(page(make_results(make_record("get", "rate", {"rallypoint-libuv": [1.0]})), {})) == []


def test_the_page_tells_faults_and_that_a_run_was_interrupted() -> None:
    results = full_results()
    assert "## Faults" not in page(results, {})
    assert "interrupted" not in page(results, {})
    results.records[0].entries["torch-libuv"].fault = "it ended early"
    results.interrupted = True
    text = page(results, {})
    assert "## Faults\n\n- init, 1,024 ranks, torch-libuv: it ended early\n" in text
    assert "**The run was interrupted" in text
