"""`rallypoint torch check`: what it says of wheels, installed torches, libraries and trees."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build_files import (
    OLD,
    ON,
    WITH,
    WITHOUT,
    configure,
    elf,
    macho,
    package,
    pe,
    tree,
    universal,
    wheel,
)
from command_line import invoke
from rallypoint.diagnose.builds.check import BuildReport, check, explain_import, judge_import
from rallypoint.diagnose.builds.packages import (
    MISSING,
    SERVER,
    TEXTS,
    UnreadableError,
    find_texts,
    identify,
    is_found,
    is_on,
    is_same_build,
    read_cache,
)
from rallypoint.diagnose.findings import Finding, State
from rallypoint.errors import RallypointError, UsageError
from raw import SECONDS

_NOWHERE = {"PATH": os.environ.get("PATH", "")}
_BUILT_AT = 1_700_000_000
_INTEL = 0x01000007


def _look(path: Path | None, environment: Mapping[str, str] = _NOWHERE) -> BuildReport:
    return check(path, sys.executable, environment)


def _finding(report: BuildReport, name: str) -> Finding:
    return next(finding for finding in report.findings if finding.name == name)


# Libraries


def test_other_files_are_not_taken_for_libraries() -> None:
    a_class_of_java = b"\xca\xfe\xba\xbe\x00\x00\x00\x41" + bytes(64)
    for head in (b"", b"#!/bin/sh\n", b"PK\x03\x04", b"MZ", b"\x7fELF", a_class_of_java):
        assert identify(head) is None


@given(
    st.sampled_from([elf(), pe(), macho(), universal(macho())]),
    st.integers(0, 600),
    st.lists(st.tuples(st.integers(0, 599), st.integers(0, 255)), max_size=8),
)
def test_whatever_is_cut_off_or_changed_raises_nothing(
    content: bytes, size: int, changes: list[tuple[int, int]]
) -> None:
    damaged = bytearray(content[:size])
    for at, value in changes:
        if at < len(damaged):
            damaged[at] = value
    identify(bytes(damaged))


@given(st.binary(max_size=64), st.binary(max_size=64), st.integers(1, 50))
def test_a_text_is_found_wherever_the_pieces_end(before: bytes, after: bytes, piece: int) -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(piece, size or piece))

    content = before + WITH + after
    assert find_texts(Slow(content)) == {text for text in TEXTS if text in content} >= {SERVER}


def test_an_installation_by_cmake_rewrites_search_paths_and_nothing_else(tmp_path: Path) -> None:
    built, installed = tmp_path / "build" / "lib" / "x.so", tmp_path / "x.so"
    built.parent.mkdir(parents=True)
    path = bytes(built.parent) + b":/opt/lib"
    content = elf(b"before\0" + path + b"\0after\0more of " + path)
    built.write_bytes(content)
    rewritten = content.replace(path, b"$ORIGIN".ljust(len(path), b"\0"))
    for other, same in (
        (content, True),
        (rewritten, True),
        (rewritten.replace(b"before", b"BEFORE"), False),
        (rewritten.replace(b"after", b"AFTER"), False),
        (rewritten + b"x", False),
    ):
        installed.write_bytes(other)
        assert is_same_build(built, installed) is same


def test_an_empty_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").touch()
    with pytest.raises(UnreadableError, match=r"cannot read .*x\.so"):
        is_same_build(tmp_path / "x.so", tmp_path / "x.so")


# Wheels


@pytest.mark.parametrize(
    ("library", "content", "libuv", "platform"),
    [
        ("libtorch_cpu.so", elf(WITH), True, "Linux on x86_64"),
        ("torch_cpu.dll", pe(WITHOUT), False, "Windows on x86_64"),
        ("libtorch_cpu.dylib", macho(WITH), True, "macOS on arm64"),
        ("libtorch_cpu.dylib", universal(macho(WITH, _INTEL), macho(WITH)), True, "x86_64 and arm64"),
    ],
)
def test_wheels_of_all_platforms(
    library: str, content: bytes, libuv: bool, platform: str, tmp_path: Path
) -> None:
    report = _look(wheel(tmp_path / "torch.whl", library, content, {"torch/lib/uv.dll": b"x"}))
    assert (report.kind, report.libuv, report.ok) == ("wheel", libuv, libuv)
    assert platform in _finding(report, "torch").found
    assert "2.9.0+cu128, CUDA 12.8" in _finding(report, "torch").found
    shipped = "uv.dll comes with it, which proves nothing"
    assert [shipped in each.found for each in report.findings].count(True) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (elf(WITHOUT), "not compiled in"),
        (elf(OLD), "knows nothing of libuv"),
        (elf(b""), "built without distributed"),
        (universal(macho(WITH), macho(WITHOUT)), "missing in another"),
    ],
)
def test_why_the_server_is_not_there(content: bytes, words: str, tmp_path: Path) -> None:
    finding = _finding(_look(wheel(tmp_path / "torch.whl", "libtorch_cpu.so", content)), "libuv server")
    assert finding.state is State.FAILURE
    assert words in finding.found
    assert "rallypoint run" in finding.hint


def test_damaged_wheels_are_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path / "torch.whl", "libtorch_cpu.so", elf(WITH))
    content = path.read_bytes()
    for damaged in (b"", content[:10], content[:300]):
        path.write_bytes(damaged)
        with pytest.raises(UnreadableError, match="cannot read the wheel"):
            _look(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as file:
        file.writestr("torch/lib/libtorch_cpu.so", elf(WITH))
    with pytest.raises(UnreadableError, match="packed in a way that wheels do not use"):
        _look(path)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_of_a_wheel_never_raise_anything_else(changes: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = wheel(Path(folder, "torch.whl"), "libtorch_cpu.so", elf(WITH + bytes(range(256))))
        content = bytearray(path.read_bytes())
        for at, value in changes:
            content[at % len(content)] = value
        path.write_bytes(content)
        try:
            _look(path)
        except (UnreadableError, UsageError):
            pass


def test_what_is_no_torch_is_a_wrong_usage(tmp_path: Path) -> None:
    other = wheel(tmp_path / "other.whl", "other.so", elf())
    text, library = tmp_path / "text", tmp_path / "libother.so"
    text.write_text("nothing")
    library.write_bytes(elf())
    pipe = tmp_path / "libtorch_cpu.so"
    if hasattr(os, "mkfifo"):
        os.mkfifo(pipe)  # it must not be read: that would take for ever
    for path in (tmp_path, other, text, library, pipe, tmp_path / "missing"):
        with pytest.raises(UsageError):
            _look(path)
    with pytest.raises(UsageError, match="cannot run the Python"):
        check(None, "/no/such/python", _NOWHERE)


# Installed


def test_the_torch_of_an_environment_is_found(tmp_path: Path) -> None:
    folder = package(tmp_path / "lib" / "python3.11" / "site-packages" / "torch", elf(WITH))
    for path in (tmp_path, folder.parent, folder):
        report = _look(path)
        assert (report.kind, report.path, report.ok) == ("installed", str(folder), True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the builds for Linux have the server")
def test_the_torch_of_python_here() -> None:
    """The one that these tests run with: the real thing, and quick enough."""
    report = _look(None, os.environ)
    assert report.libuv is True
    assert f"{version('torch')}, for Linux on" in _finding(report, "torch").found
    assert _finding(report, "loader").state is State.OK


def test_python_path_leads_to_another_torch(tmp_path: Path) -> None:
    mine = package(tmp_path / "a" / "torch", elf(WITHOUT))
    other = package(tmp_path / "b" / "torch", elf(WITH))
    report = _look(None, {**_NOWHERE, "PYTHONPATH": f"{mine.parent}{os.pathsep}{other.parent}"})
    assert (report.path, report.libuv) == (str(mine), False)
    finding = _finding(report, "import")
    assert finding.state is State.WARNING
    assert f"{mine}: PYTHONPATH names its place; it hides {other}" in finding.found


def test_sources_hide_the_installed_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree(tmp_path / "pytorch"))
    report = _look(None)
    finding = _finding(report, "import")
    assert (report.ok, report.libuv, finding.state) == (False, None, State.FAILURE)
    assert "it is in the current directory" in finding.found
    assert "it has no libraries" in finding.found


def test_an_editable_install_is_recognised(tmp_path: Path) -> None:
    folder = package(tmp_path / "pytorch" / "torch", elf(WITH))
    found = explain_import(str(folder / "__init__.py"), ["", "/usr/lib/python3"], "", tmp_path / "elsewhere")
    assert found.reason == "an editable install leads there"
    assert judge_import(found).state is State.OK
    assert judge_import(explain_import(None, [str(tmp_path)], "", tmp_path)).state is State.FAILURE


# The loader


def test_the_library_path_of_macos(tmp_path: Path) -> None:
    folder = package(tmp_path / "torch", macho(WITH), library="libtorch_cpu.dylib")
    other = package(tmp_path / "other", macho(WITHOUT), library="libtorch_cpu.dylib")
    assert _finding(_look(folder), "loader").state is State.OK
    environment = {**_NOWHERE, "DYLD_LIBRARY_PATH": str(other / "lib")}
    assert _finding(_look(folder, environment), "loader").state is State.FAILURE


@pytest.fixture
def loadable(tmp_path: Path) -> Path:
    """A folder of torch whose libraries the loader of Linux can take, and beside it a `stale` library."""
    compiler = shutil.which("cc")
    if not sys.platform.startswith("linux") or compiler is None or shutil.which("ldd") is None:
        pytest.skip("it takes Linux, ldd and a C compiler")
    folder = package(tmp_path / "torch", b"")
    (tmp_path / "stale").mkdir()

    def compile_library(path: Path, text: bytes, *options: str) -> None:
        source = f'char text_of_{path.stem}[] = "{text.decode()}";'
        command = [compiler, "-shared", "-x", "c", "-", "-o", str(path), *options]
        subprocess.run(command, input=source.encode(), check=True, timeout=SECONDS)

    lib = folder / "lib"
    compile_library(lib / "libtorch_cpu.so", SERVER)
    compile_library(tmp_path / "stale" / "libtorch_cpu.so", MISSING)
    needs, first = (f"-L{lib}", "-Wl,--no-as-needed,--enable-new-dtags"), "$ORIGIN/../../build/lib"
    compile_library(lib / "libtorch_python.so", b"", *needs, f"-Wl,-rpath,{first}:$ORIGIN", "-ltorch_cpu")
    compile_library(folder / "_C.so", b"", *needs, "-Wl,-rpath,$ORIGIN/lib", "-ltorch_python")
    return folder


def test_a_library_path_with_another_torch(loadable: Path) -> None:
    assert _finding(_look(loadable), "loader").found == "libtorch_cpu.so is torch's own"
    stale = loadable.parent / "stale"
    finding = _finding(_look(loadable, {**_NOWHERE, "LD_LIBRARY_PATH": str(stale)}), "loader")
    assert finding.state is State.FAILURE
    assert f"the loader takes {stale}/libtorch_cpu.so" in finding.found
    assert finding.found.endswith("LD_LIBRARY_PATH names its folder")


def test_copies_that_lead_to_their_build_folder(loadable: Path) -> None:
    """What is copied and not installed keeps the search path of the build, and that is no contradiction."""
    lib, build = loadable / "lib", loadable.parent / "build" / "lib"
    shutil.copytree(lib, build)
    finding = _finding(_look(loadable), "loader")
    assert (finding.state, finding.found[-16:]) == (State.OK, "two are the same")
    shutil.copy(loadable.parent / "stale" / "libtorch_cpu.so", lib)
    finding = _finding(_look(loadable), "loader")
    assert finding.state is State.FAILURE
    assert "a search path in torch's libraries leads there" in finding.found


def test_without_ldd_nothing_is_said_of_the_loader(tmp_path: Path) -> None:
    report = _look(package(tmp_path / "torch", elf(WITH)), {"PATH": str(tmp_path)})
    assert "loader" not in [finding.name for finding in report.findings]


# Trees


def test_a_tree_that_is_right(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    (folder / "torch" / "lib").mkdir()
    shutil.copy2(folder / "build" / "lib" / "libtorch_cpu.so", folder / "torch" / "lib")
    report = _look(folder, {**_NOWHERE, "PYTHONPATH": str(folder)})
    assert report.ok, report
    assert {finding.state for finding in report.findings} == {State.OK}
    assert _look(folder / "build", {**_NOWHERE, "PYTHONPATH": str(folder)}) == report


def test_use_libuv_is_not_what_compiles_the_server_in(tmp_path: Path) -> None:
    """The story of many: USE_LIBUV=ON was configured, and the server is not there."""
    options = {**ON, "USE_TENSORPIPE:BOOL": "OFF", "USE_LIBUV:BOOL": "ON"}
    report = _look(tree(tmp_path / "pytorch", options, flags="", built=elf(WITHOUT)))
    assert (report.ok, report.libuv) == (False, False)
    assert _finding(report, "options").hint == (
        "configure again with -DUSE_TENSORPIPE=ON: the server is compiled where both are on"
    )
    assert "an option of gloo" in _finding(report, "USE_LIBUV").found
    assert "without TORCH_USE_LIBUV" in _finding(report, "configured").found


@pytest.mark.parametrize(
    ("installed", "seconds_later", "state", "words"),
    [
        (elf(WITHOUT), -60, State.FAILURE, "libtorch_cpu.so was built 2023-11-14 22:13:20 UTC, the one in"),
        (elf(WITH + b"more"), 60, State.WARNING, "is newer than what was built"),
        (elf(WITH + b"symbols"), -60, State.OK, "the same as built"),
    ],
)
def test_the_installed_library_and_the_one_that_was_built(
    installed: bytes, seconds_later: int, state: State, words: str, tmp_path: Path
) -> None:
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH + b"symbols"))
    library = folder / "torch" / "lib" / "libtorch_cpu.so"
    library.parent.mkdir()
    library.write_bytes(installed)
    os.utime(library, (_BUILT_AT + seconds_later, _BUILT_AT + seconds_later))
    os.utime(folder / "build" / "lib" / "libtorch_cpu.so", (_BUILT_AT, _BUILT_AT))
    report = _look(folder, {**_NOWHERE, "PYTHONPATH": str(folder)})
    finding = _finding(report, "installed")
    assert (finding.state, report.ok) == (state, state is not State.FAILURE)
    assert words in finding.found


def test_a_tree_whose_build_folder_is_gone(tmp_path: Path) -> None:
    """The libraries that were installed from it are still there to be looked into."""
    folder = tree(tmp_path / "pytorch")
    (folder / "torch" / "lib").mkdir()
    (folder / "torch" / "lib" / "libtorch_cpu.so").write_bytes(elf(WITH))
    assert (_look(folder).kind, _look(folder).ok) == ("installed", True)


def test_build_folders_of_other_projects(tmp_path: Path) -> None:
    (tmp_path / "CMakeCache.txt").write_text("CMAKE_PROJECT_NAME:STATIC=small\n")
    with pytest.raises(UsageError):
        _look(tmp_path)
    (tmp_path / "CMakeCache.txt").write_text("CMAKE_PROJECT_NAME:STATIC=Torch\n")
    assert _look(tmp_path).kind == "tree"


@pytest.mark.parametrize(
    ("version", "installed"),
    [("2.5.0", "what was built is not installed anywhere"), ("2.9.0a0+git12", "rebuilt but not copied")],
)
def test_python_loads_another_torch_than_the_tree(version: str, installed: str, tmp_path: Path) -> None:
    """It is compared if it is of the same version."""
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    other = package(tmp_path / "site" / "torch", elf(WITHOUT), version)
    os.utime(other / "lib" / "libtorch_cpu.so", (1, 1))
    report = _look(folder, {**_NOWHERE, "PYTHONPATH": str(other.parent)})
    assert _finding(report, "import").state is State.WARNING
    assert f"Python takes {other}: PYTHONPATH names its place" in _finding(report, "import").found
    assert "it is not this tree" in _finding(report, "import").found
    assert installed in _finding(report, "installed").found


def test_a_tree_for_windows(tmp_path: Path) -> None:
    """No hint there to turn on what cannot be turned on."""
    options = {**ON, "USE_TENSORPIPE:BOOL": "OFF", "CMAKE_CXX_COMPILER:FILEPATH": "C:/VC/bin/cl.exe"}
    folder = tree(tmp_path / "pytorch", options, "")
    (folder / "build" / "bin").mkdir()
    (folder / "build" / "bin" / "torch_cpu.dll").write_bytes(pe(WITHOUT))
    report = _look(folder)
    assert report.libuv is False
    for name in ("options", "configured", "libuv server"):
        assert "no option of torch's CMake files" in _finding(report, name).hint


def test_stages_of_a_tree(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch")
    assert "not configured" in _finding(_look(folder), "tree").found
    configure(folder, ON, "-DTORCH_USE_LIBUV")
    old = folder / "build_old" / "CMakeCache.txt"
    old.parent.mkdir()
    old.touch()
    os.utime(old, (1, 1))
    report = _look(folder)
    builds = f"2.9.0a0, built in {folder / 'build'}; older ones: {old.parent}"
    assert _finding(report, "tree").found == builds
    assert _finding(report, "configured").state is State.OK
    assert "not built yet" in _finding(report, "libuv server").found
    assert (report.ok, report.libuv) == (False, None)


# CMakeCache.txt


def test_the_cache_of_cmake(tmp_path: Path) -> None:
    (tmp_path / "CMakeCache.txt").write_text(
        "# a comment\n//Use distributed\nA:BOOL=ON\nB:BOOL=1\nC:UNINITIALIZED=OFF\n"
        "F:STRING=a=b\nD:FILEPATH=D-NOTFOUND\nE:STRING=\nnonsense\n"
    )
    cache = read_cache(tmp_path)
    found = {name: value for name, value in cache.items() if is_found(value)}
    assert found == {"A": "ON", "B": "1", "C": "OFF", "F": "a=b"}
    assert [name for name, value in cache.items() if is_on(value)] == ["A", "B"]


# The command


def test_exit_codes_and_json(tmp_path: Path) -> None:
    good = wheel(tmp_path / "good.whl", "libtorch_cpu.so", elf(WITH))
    bad = wheel(tmp_path / "bad.whl", "libtorch_cpu.so", elf(WITHOUT))
    library = package(tmp_path / "torch", elf(WITHOUT)) / "lib" / "libtorch_cpu.so"
    assert invoke("torch", "check", str(good)).exit_code == 0
    assert invoke("torch", "check", str(library)).stdout.startswith(f"library: {library}\n")
    assert "failure  libuv server" in invoke("torch", "check", str(bad)).stdout
    result = invoke("torch", "check", str(bad), "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["ok"], document["libuv"]) == (False, False)
    assert [finding["state"] for finding in document["findings"]] == ["ok", "failure"]
    assert {tuple(finding) for finding in document["findings"]} == {("name", "state", "found", "hint")}


def test_in_a_log_of_both_streams_the_verdict_comes_behind_the_report(tmp_path: Path) -> None:
    bad = wheel(tmp_path / "bad.whl", "libtorch_cpu.so", elf(WITHOUT))
    command = [sys.executable, "-m", "rallypoint", "torch", "check", str(bad)]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
    ) as process:
        first, *_, last = process.communicate(timeout=SECONDS)[0].splitlines()
    assert (process.returncode, first, last[:12]) == (1, f"wheel: {bad}", "rallypoint: ")


def test_an_error_of_the_file_system_is_told_as_one() -> None:
    result = invoke("torch", "check", "x" * 5000)
    assert isinstance(result.exception, RallypointError)
    assert not isinstance(result.exception, OSError)
