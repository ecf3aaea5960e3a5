"""The files of ninja, the progress that follows from them, and what is shown of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.cli.torch import describe
from rallypoint.diagnose.builds.ninja import (
    BuildProgress,
    CompilerLoad,
    Console,
    Libuv,
    Output,
    count_steps,
    libuv_of,
    of_this_run,
    pace,
    parse_console,
    parse_log,
    read_custom_outputs,
    read_outputs,
    state_of,
    targets_of,
)
from rallypoint.diagnose.builds.packages import UnreadableError

_LINES = """0\t17\t1794753749936574438\tCMakeFiles/m.dir/m.c.o\t6747aa9e5bc3411a
23\t69\t1794753749984574440\tlibuv_a.a\t560b02174eca31b3
"""


def test_logs_of_all_known_formats() -> None:
    for version in (5, 6, 7):
        first, second = parse_log(f"# ninja log v{version}\n{_LINES}")
        assert first == Output(0, 17, 1794753749936574438, "CMakeFiles/m.dir/m.c.o", "6747aa9e5bc3411a")
        assert second.path == "libuv_a.a"
    for text in ("", "nothing", "# ninja log v4\n", "# ninja log v8\n"):
        with pytest.raises(UnreadableError):
            parse_log(text)


@pytest.mark.parametrize("rest", ["", "\t1794753750109\thalf of a na", "\t1794753750109\tname\t56"])
def test_a_line_that_is_still_being_written(rest: str) -> None:
    assert len(parse_log(f"# ninja log v5\n{_LINES}74\t94{rest}")) == 2


@given(st.lists(st.text()))
def test_any_log_and_any_output_is_read(lines: list[str]) -> None:
    parse_log("\n".join(["# ninja log v6", *lines]))
    parse_console(lines)


_BUILD = """rule CC
  command = cc $in
build all: phony a b
build a$ b.o | implicit.o: CC in.c | header.h || order
  FLAGS = -O2 -DX
  DEP_FILE = a.d
build $:odd c.o: CC in.c
  FLAGS = -O0
"""


def test_steps_of_a_build_file() -> None:
    lines = _BUILD.splitlines()
    assert list(read_outputs(lines)) == ["a b.o", ":odd"]
    assert list(read_custom_outputs(["build x: CUSTOM_COMMAND in", *lines])) == ["x"]


_CONSOLE = """ninja: Entering directory `build'
[1/4] Building C object a.o
[2/4] Building C object b.o
FAILED: {code}b.o
/usr/bin/cc -c b.c
b.c:1:2: error: #error boom
[3/4] Building C object c.o
ninja: build stopped: subcommand failed.
more
"""


@pytest.mark.parametrize("code", ["", "[code=1] "])
def test_what_ninja_prints(code: str) -> None:
    console = parse_console(_CONSOLE.format(code=code).splitlines())
    assert (console.done, console.total, console.ended) == (2, 4, True)  # the one that failed is not done
    (failure,) = console.failures
    assert (failure.step, failure.lines) == ("b.o", ("/usr/bin/cc -c b.c", "b.c:1:2: error: #error boom"))


def test_only_the_last_run_counts() -> None:
    console = parse_console([*_CONSOLE.format(code="").splitlines(), "[1/2] Building", "  [2/2] Linking"])
    assert (console.done, console.total, console.ended, console.failures) == (2, 2, False, ())
    assert parse_console(["ninja: no work to do."]) == Console(ended=True)
    assert parse_console(["[100%] Built target x", "-- Configuring done"]) == Console()


def _output(end: int, path: str = "a", stamp: float = 0.0, command: str = "", start: int = 0) -> Output:
    return Output(start, end, int(stamp * 1e9), path, command or path)


def test_steps_of_this_run() -> None:
    """Neither what is too old, nor what ended later than what follows it: that was another run."""
    new = [_output(2, "new", 100.5), _output(2, "twin", 100.5, "new"), _output(9, "always", 0)]
    assert of_this_run([_output(1, "old", 90.0), *new], 100.0, 100.5) == new
    assert of_this_run([_output(1, "old", 99.5), _output(5, "older run", 99.9), *new], 100.0, 100.5) == new
    assert of_this_run([], 100.0, 0.0) == []
    assert count_steps(new) == 2


def test_what_the_run_before_has_done_is_not_counted() -> None:
    """It may have ended a moment ago: its lines say that it began long before, the log's time as well."""
    before = [_output(60_000, "made", 99.5, start=59_000), _output(60_500, "always", 0)]
    assert of_this_run(before, 100.0, 99.9) == []
    new = _output(60_700, "new", 159.5, start=59_500)
    assert of_this_run([*before[:1], new], 100.0, 160.7) == [new]


def test_pace_is_that_of_the_last_minutes() -> None:
    slow_then_quick = [_output(1_000, "a"), *(_output(900_000 + n, str(n)) for n in range(60))]
    assert pace(slow_then_quick, 960.0) == 0.5
    assert pace(slow_then_quick[:1], 2.0) == 0.5
    assert pace([], 10.0) is None


def test_libuv() -> None:
    objects = {
        "third_party/tensorpipe/tensorpipe/CMakeFiles/tensorpipe_uv.dir/__/third_party/libuv/src/idna.c.o",
        "lib/libtensorpipe_uv.a",
    }
    server = "caffe2/CMakeFiles/torch_cpu.dir/__/torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp.o"
    known = frozenset({*objects, server, "libother.a"})
    assert libuv_of(known, objects.__contains__) == Libuv(2, 2, False)
    assert libuv_of(known, known.__contains__) == Libuv(2, 2, True)
    assert libuv_of(frozenset({"lib/libtorch_cpu.so"}), known.__contains__) == Libuv(0, 0, None)
    assert libuv_of(frozenset({*objects, "a"}), known.__contains__) is None


_NOTHING = Console()


@pytest.mark.parametrize(
    ("console", "left", "code", "begun", "state"),
    [
        (_NOTHING, 0, None, True, "complete"),
        (_NOTHING, 3, None, True, "stopped"),
        (_NOTHING, None, None, True, "stopped"),
        (_NOTHING, 3, 0, True, "complete"),
        (_NOTHING, 0, 2, True, "failed"),
        (_NOTHING, 3, None, False, "not begun"),
        (_NOTHING, 0, None, False, "complete"),
        (Console(2, 2), 3, None, True, "complete"),
        (Console(1, 2), 0, None, True, "stopped"),
        (Console(2, 2, ended=True), 0, None, True, "stopped"),
        (parse_console(_CONSOLE.format(code="").splitlines()), 0, None, True, "failed"),
    ],
)
def test_states(console: Console, left: int | None, code: int | None, begun: bool, state: str) -> None:
    assert state_of(console, left, code, begun) == state


@pytest.mark.parametrize(
    ("arguments", "targets"),
    [
        ("ninja", []),
        ("ninja -C build -j8 -j 8 -v torch_cpu torch_python", ["torch_cpu", "torch_python"]),
        ("ninja --quiet -k0 install", ["install"]),
        ("ninja -f other.ninja all", None),
    ],
)
def test_targets_of_a_command_line(arguments: str, targets: list[str] | None) -> None:
    assert targets_of(arguments.split()) == targets


def test_a_line_about_a_build() -> None:
    snapshot = BuildProgress(
        "running", 1200, 5000, 310.4, 735, CompilerLoad(8, 790.2, 6 << 30), Libuv(30, 34, False)
    )
    assert describe(snapshot) == (
        "running: 1,200 of 5,000 steps; 12 min 15 s left; 310 a minute; 8 at work, 790 % CPU, 6,144 MiB; "
        "libuv: 30 of 34 files, its server is not"
    )
    assert describe(BuildProgress("stopped", 0, None)) == "stopped: 0 of ? steps"
    without = BuildProgress("stopped", 1, 2, libuv=Libuv(0, 0, None))
    assert describe(without) == "stopped: 1 of 2 steps; no libuv in this build"
    killed = BuildProgress("failed", 5, 5, exit_code=-9)
    assert describe(killed) == "failed: 5 of 5 steps; the command was ended by signal 9"
