"""`rallypoint torch check`: what it says of wheels, installed torches, libraries and trees."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
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
    libuv,
    macho,
    package,
    pe,
    tree,
    universal,
    wheel,
)
from command_line import invoke
from rallypoint.diagnose.builds.cache import Entry, parse_cache
from rallypoint.diagnose.builds.check import check
from rallypoint.diagnose.builds.loader import explain_import, judge_import, resolve
from rallypoint.diagnose.builds.verdicts import Report
from rallypoint.diagnose.builds.window import Binary, UnreadableError
from rallypoint.diagnose.findings import Finding, State
from rallypoint.errors import RallypointError, UsageError
from raw import SECONDS

_NOWHERE = {"PATH": os.environ.get("PATH", "")}
_WINDOWS_TORCH = "2.10.0"
"""Small for a torch: 114 MB."""


def _look(path: Path | None, environment: Mapping[str, str] = _NOWHERE) -> Report:
    return check(path, sys.executable, environment)


def _finding(report: Report, name: str) -> Finding:
    return next(finding for finding in report.findings if finding.name == name)


# Wheels and libraries


@pytest.mark.parametrize(
    ("library", "content", "libuv", "platform"),
    [
        ("libtorch_cpu.so", elf(WITH), True, "Linux on x86_64"),
        ("libtorch_cpu.so", elf(WITHOUT), False, "Linux on x86_64"),
        ("torch_cpu.dll", pe(WITHOUT, ["uv.dll"]), False, "Windows on x86_64"),
        ("torch_cpu.dll", pe(WITH, ["uv.dll"]), True, "Windows on x86_64"),
        ("libtorch_cpu.dylib", macho(WITH), True, "macOS on arm64"),
        (
            "libtorch_cpu.dylib",
            universal((0x01000007, macho(WITH)), (0x0100000C, macho(WITH))),
            True,
            "x86_64 and arm64",
        ),
    ],
)
def test_wheels_of_all_platforms(
    library: str, content: bytes, libuv: bool, platform: str, tmp_path: Path
) -> None:
    report = _look(wheel(tmp_path / "torch.whl", library, content))
    assert (report.kind, report.libuv, report.ok) == ("wheel", libuv, libuv)
    assert platform in _finding(report, "torch").found
    assert "2.9.0+cu128, CUDA 12.8" in _finding(report, "torch").found


def test_a_shipped_uv_dll_proves_nothing(tmp_path: Path) -> None:
    path = wheel(tmp_path / "torch.whl", "torch_cpu.dll", pe(WITHOUT), {"torch/lib/uv.dll": b"x"})
    report = _look(path)
    assert not report.ok
    assert "uv.dll comes with it, which proves nothing" in _finding(report, "libuv library").found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (elf(WITHOUT), "not compiled in"),
        (elf(OLD), "knows nothing of libuv"),
        (elf(b""), "built without distributed"),
        (universal((0x01000007, macho(WITH)), (0x0100000C, macho(WITHOUT))), "missing in another"),
    ],
)
def test_why_the_server_is_not_there(content: bytes, words: str, tmp_path: Path) -> None:
    finding = _finding(_look(wheel(tmp_path / "torch.whl", "libtorch_cpu.so", content)), "libuv server")
    assert finding.state is State.FAILURE
    assert words in finding.found
    assert "rallypoint run" in finding.hint


def test_a_single_library(tmp_path: Path) -> None:
    path = tmp_path / "torch_cpu.dll"
    path.write_bytes(pe(WITHOUT, ["c10.dll", "uv.dll"]))
    report = _look(path)
    assert (report.kind, report.libuv) == ("library", False)
    assert "linked with uv.dll" in _finding(report, "libuv library").found


@pytest.mark.parametrize("size", [0, 10, 100, 300])
def test_damaged_wheels_are_refused(size: int, tmp_path: Path) -> None:
    path = wheel(tmp_path / "torch.whl", "libtorch_cpu.so", elf(WITH))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UnreadableError, match="cannot read the wheel"):
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
    for path in (tmp_path, other, text, library, tmp_path / "missing"):
        with pytest.raises(UsageError):
            _look(path)


# Installed


def test_the_torch_of_an_environment_is_found(tmp_path: Path) -> None:
    folder = package(tmp_path / "lib" / "python3.11" / "site-packages" / "torch", elf(WITH))
    for path in (tmp_path, folder.parent, folder):
        report = _look(path)
        assert (report.kind, report.path, report.ok) == ("installed", str(folder), True)


def test_the_torch_of_python_here() -> None:
    """The one that these tests run with, a Linux build: the real thing, and quick enough."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the builds for Linux are those with the server")
    report = _look(None, os.environ)
    assert report.libuv is True
    assert _finding(report, "loader").state is State.OK


def test_python_path_leads_to_another_torch(tmp_path: Path) -> None:
    mine, other = (
        package(tmp_path / "a" / "torch", elf(WITHOUT)),
        package(tmp_path / "b" / "torch", elf(WITH)),
    )
    report = _look(None, {**_NOWHERE, "PYTHONPATH": f"{mine.parent}{os.pathsep}{other.parent}"})
    assert (report.path, report.libuv) == (str(mine), False)
    finding = _finding(report, "import")
    assert finding.state is State.WARNING
    assert "PYTHONPATH" in finding.found
    assert str(other) in finding.found


def test_sources_hide_the_installed_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree(tmp_path / "pytorch"))
    report = _look(None)
    finding = _finding(report, "import")
    assert (report.ok, report.libuv, finding.state) == (False, None, State.FAILURE)
    assert "the current directory" in finding.found
    assert "no libraries" in finding.found


def test_an_editable_install_is_recognised(tmp_path: Path) -> None:
    folder = package(tmp_path / "pytorch" / "torch", elf(WITH))
    found = explain_import(str(folder / "__init__.py"), ["", "/usr/lib/python3"], "", tmp_path / "elsewhere")
    assert found.reason == "an editable install leads there"
    assert judge_import(found).state is State.OK


def test_no_torch_at_all(tmp_path: Path) -> None:
    found = explain_import(None, [str(tmp_path)], "", tmp_path)
    assert judge_import(found).state is State.FAILURE


def test_a_python_that_is_none() -> None:
    with pytest.raises(UsageError, match="cannot run the Python"):
        check(None, "/no/such/python", _NOWHERE)


# The loader of Linux


def test_the_library_path_comes_between_the_two_search_paths(tmp_path: Path) -> None:
    for name in ("rpath", "variable", "runpath"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lib.so").touch()
    variable = str(tmp_path / "variable")
    old = Binary("ELF", "Linux", (), rpaths=("$ORIGIN/rpath",))
    new = Binary("ELF", "Linux", (), rpaths=("$ORIGIN/rpath",), runpaths=("${ORIGIN}/runpath",))
    taken = [
        resolve(binary, tmp_path, "lib.so", path)
        for binary, path in [(old, variable), (new, variable), (new, ""), (new, "/nowhere")]
    ]
    assert [each and each.path.parent.name for each in taken] == ["rpath", "variable", "runpath", "runpath"]
    assert resolve(Binary("ELF", "Linux", ()), tmp_path, "lib.so", "") is None


def test_the_library_path_of_macos(tmp_path: Path) -> None:
    folder = package(tmp_path / "torch", macho(WITH), library="libtorch_cpu.dylib")
    other = package(tmp_path / "other", macho(WITHOUT, uuid=bytes(16)), library="libtorch_cpu.dylib")
    assert _finding(_look(folder), "loader").state is State.OK
    environment = {**_NOWHERE, "DYLD_LIBRARY_PATH": str(other / "lib")}
    assert _finding(_look(folder, environment), "loader").state is State.FAILURE


def test_a_library_path_with_another_torch(tmp_path: Path) -> None:
    folder = package(tmp_path / "torch", elf(WITH))
    (folder / "lib" / "libtorch_python.so").write_bytes(elf(runpath="$ORIGIN"))
    (folder / "_C.cpython-311-x86_64-linux-gnu.so").write_bytes(elf(runpath="$ORIGIN/lib"))
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / "libtorch_cpu.so").write_bytes(elf(WITHOUT))
    assert _finding(_look(folder), "loader").state is State.OK
    finding = _finding(_look(folder, {**_NOWHERE, "LD_LIBRARY_PATH": str(stale)}), "loader")
    assert finding.state is State.FAILURE
    assert str(stale) in finding.found
    assert "LD_LIBRARY_PATH" in finding.found


# Trees


def test_a_tree_that_is_right(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    (folder / "torch" / "lib").mkdir()
    shutil.copy2(folder / "build" / "lib" / "libtorch_cpu.so", folder / "torch" / "lib")
    report = _look(folder, {**_NOWHERE, "PYTHONPATH": str(folder)})
    assert report.ok, report
    assert {finding.state for finding in report.findings} == {State.OK}
    assert _finding(report, "libuv versions").found.startswith("1.41.0, which TensorPipe carries")
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


def test_rebuilt_but_not_copied(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    (folder / "torch" / "lib").mkdir()
    old = folder / "torch" / "lib" / "libtorch_cpu.so"
    old.write_bytes(elf(WITHOUT))
    os.utime(old, (1_700_000_000, 1_700_000_000))
    report = _look(folder, {**_NOWHERE, "PYTHONPATH": str(folder)})
    finding = _finding(report, "installed")
    assert (report.libuv, report.ok, finding.state) == (True, False, State.FAILURE)
    assert finding.found.startswith("rebuilt but not copied: libtorch_cpu.so was built ")
    assert "2023-11-14 22:13:20 UTC and differs" in finding.found


def test_a_stripped_copy_is_the_same(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH + b"symbols", build_id=b"\x01" * 20))
    (folder / "torch" / "lib").mkdir()
    library = folder / "torch" / "lib" / "libtorch_cpu.so"
    environment = {**_NOWHERE, "PYTHONPATH": str(folder)}
    for build_id, state in [(b"\x01" * 20, State.OK), (b"\x02" * 20, State.FAILURE), (b"", State.FAILURE)]:
        library.write_bytes(elf(WITH, build_id=build_id))
        os.utime(library, (1, 1))
        assert _finding(_look(folder, environment), "installed").state is state


def test_a_tree_whose_build_folder_is_gone(tmp_path: Path) -> None:
    """What was installed from it is still there to be looked into."""
    folder = tree(tmp_path / "pytorch")
    (folder / "torch" / "lib").mkdir()
    (folder / "torch" / "lib" / "libtorch_cpu.so").write_bytes(elf(WITH))
    report = _look(folder)
    assert (report.kind, report.ok) == ("installed", True)


def test_build_folders_of_other_projects(tmp_path: Path) -> None:
    (tmp_path / "CMakeCache.txt").write_text("CMAKE_PROJECT_NAME:STATIC=small\n")
    with pytest.raises(UsageError):
        _look(tmp_path)
    (tmp_path / "CMakeCache.txt").write_text("CMAKE_PROJECT_NAME:STATIC=Torch\n")
    assert _look(tmp_path).kind == "tree"


def test_the_installed_one_is_newer(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    os.utime(folder / "build" / "lib" / "libtorch_cpu.so", (1_700_000_000, 1_700_000_000))
    (folder / "torch" / "lib").mkdir()
    (folder / "torch" / "lib" / "libtorch_cpu.so").write_bytes(elf(WITH + b"more"))
    report = _look(folder, {**_NOWHERE, "PYTHONPATH": str(folder)})
    assert (report.ok, _finding(report, "installed").state) == (True, State.WARNING)


def test_python_loads_another_torch_than_the_tree(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    other = package(tmp_path / "site" / "torch", elf(WITHOUT), "2.5.0")
    report = _look(folder, {**_NOWHERE, "PYTHONPATH": str(other.parent)})
    finding = _finding(report, "import")
    assert finding.state is not State.OK
    assert str(other) in finding.found
    assert _finding(report, "installed").found == "what was built is not installed anywhere"


def test_an_installed_torch_of_the_same_version_is_compared(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    other = package(tmp_path / "site" / "torch", elf(WITHOUT), "2.9.0a0")
    os.utime(other / "lib" / "libtorch_cpu.so", (1, 1))
    report = _look(folder, {**_NOWHERE, "PYTHONPATH": str(other.parent)})
    assert "rebuilt but not copied" in _finding(report, "installed").found


def test_copies_that_lead_to_their_build_folder(tmp_path: Path) -> None:
    """What is copied and not installed keeps the search path of the build, and that is no contradiction."""
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    built, installed = folder / "build" / "lib", folder / "torch" / "lib"
    (built / "libtorch_python.so").write_bytes(elf(runpath=str(built)))
    shutil.copytree(built, installed)
    environment = {**_NOWHERE, "PYTHONPATH": str(folder)}
    report = _look(folder, environment)
    assert report.ok
    assert "the two are the same" in _finding(report, "loader").found
    (installed / "libtorch_cpu.so").write_bytes(elf(WITHOUT))
    assert _finding(_look(folder, environment), "loader").state is State.FAILURE


def test_a_tree_for_windows(tmp_path: Path) -> None:
    """No hint there to turn on what cannot be turned on."""
    options = {**ON, "USE_TENSORPIPE:BOOL": "OFF", "CMAKE_CXX_COMPILER:FILEPATH": "C:/VC/bin/cl.exe"}
    folder = tree(tmp_path / "pytorch", options, "")
    (folder / "build" / "bin").mkdir()
    (folder / "build" / "bin" / "torch_cpu.dll").write_bytes(pe(WITHOUT, ["uv.dll"]))
    report = _look(folder)
    assert report.libuv is False
    for name in ("options", "configured", "libuv server"):
        assert "no option of torch's CMake files" in _finding(report, name).hint
    assert "libuv versions" not in [finding.name for finding in report.findings]


def test_headers_of_another_libuv(tmp_path: Path) -> None:
    system = libuv(tmp_path / "include", "1.48.0")
    folder = tree(tmp_path / "pytorch", ON, f"-DTORCH_USE_LIBUV -I{system}", elf(WITH))
    finding = _finding(_look(folder), "libuv versions")
    assert finding.state is State.FAILURE
    assert f"the headers in use are of 1.48.0 ({system}), the library is 1.41.0" in finding.found


def test_a_variable_that_brings_other_headers(tmp_path: Path) -> None:
    system = libuv(tmp_path / "include", "1.48.0")
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    finding = _finding(_look(folder, {**_NOWHERE, "CPATH": str(system)}), "libuv versions")
    assert finding.state is State.FAILURE


def test_another_libuv_that_is_not_used(tmp_path: Path) -> None:
    libuv(tmp_path / "include", "1.48.0")
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    finding = _finding(_look(folder, {**_NOWHERE, "libuv_ROOT": str(tmp_path)}), "libuv versions")
    assert finding.state is State.OK
    assert f"1.48.0 in {tmp_path / 'include'} is not used" in finding.found


def test_stages_of_a_tree(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch")
    assert "not configured" in _finding(_look(folder), "tree").found
    configure(folder, ON, "-DTORCH_USE_LIBUV")
    report = _look(folder)
    assert _finding(report, "configured").state is State.OK
    assert "not built yet" in _finding(report, "libuv server").found
    assert (report.ok, report.libuv) == (False, None)


def test_the_newest_of_several_build_folders(tmp_path: Path) -> None:
    folder = tree(tmp_path / "pytorch", ON, built=elf(WITH))
    (folder / "build_old").mkdir()
    (folder / "build_old" / "CMakeCache.txt").touch()
    os.utime(folder / "build_old" / "CMakeCache.txt", (1, 1))
    found = _finding(_look(folder), "tree").found
    assert found == f"2.9.0a0, built in {folder / 'build'}; older ones: {folder / 'build_old'}"


# CMakeCache.txt


def test_the_cache_of_cmake() -> None:
    text = """# a comment
//Use distributed
USE_DISTRIBUTED:BOOL=ON
//No help, variable specified on the command line.
USE_LIBUV:BOOL=1
FOO:UNINITIALIZED=OFF
"odd:name":STRING=a=b
libuv_LIBRARY:FILEPATH=libuv_LIBRARY-NOTFOUND
EMPTY:STRING=
nonsense
"""
    cache = parse_cache(text)
    assert cache["USE_DISTRIBUTED"] == Entry("BOOL", "ON")
    assert (cache["USE_LIBUV"].on, cache["FOO"].on) == (True, False)
    assert cache["odd:name"].value == "a=b"
    assert (cache["libuv_LIBRARY"].found, cache["EMPTY"].found) == (False, False)
    assert "nonsense" not in cache


# The command


def test_exit_codes_and_json(tmp_path: Path) -> None:
    good = wheel(tmp_path / "good.whl", "libtorch_cpu.so", elf(WITH))
    bad = wheel(tmp_path / "bad.whl", "libtorch_cpu.so", elf(WITHOUT))
    assert invoke("torch", "check", str(good)).exit_code == 0
    shown = invoke("torch", "check", str(bad))
    assert shown.exit_code == 1
    assert "failure  libuv server" in shown.stdout
    result = invoke("torch", "check", str(bad), "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["ok"], document["libuv"]) == (False, False)
    assert [finding["state"] for finding in document["findings"]] == ["ok", "failure"]
    assert {tuple(finding) for finding in document["findings"]} == {("name", "state", "found", "hint")}


def test_in_a_log_of_both_streams_the_verdict_comes_behind_the_report(tmp_path: Path) -> None:
    bad = wheel(tmp_path / "bad.whl", "libtorch_cpu.so", elf(WITHOUT))
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "torch", "check", bad],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"wheel: {bad}"
    assert lines[-1].startswith("rallypoint: ")
    assert done.returncode == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
@pytest.mark.parametrize("name", ["torch.whl", "libtorch_cpu.so"])
def test_a_pipe_is_not_read(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match="is no torch"):
        _look(tmp_path / name)


def test_an_error_of_the_file_system_is_told_as_one() -> None:
    result = invoke("torch", "check", "x" * 5000)
    assert isinstance(result.exception, RallypointError)
    assert not isinstance(result.exception, OSError)


def _download(folder: Path, *wanted: str) -> Path:
    """A wheel from the package registry; the test is skipped if there is none to be had."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run([*command, *wanted, "--dest", folder], capture_output=True, text=True, timeout=110)
    if done.returncode != 0:
        pytest.skip(f"the package registry does not give {wanted[-1]}: {done.stderr.strip()[-200:]}")
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_a_real_wheel_for_windows(tmp_path: Path) -> None:
    """A build without the server, and with a uv.dll."""
    platform = ("--platform", "win_amd64", "--python-version", "3.11")
    report = _look(_download(tmp_path, *platform, f"torch=={_WINDOWS_TORCH}"))
    assert (report.ok, report.libuv) == (False, False)
    assert f"{_WINDOWS_TORCH}+cpu, for Windows on x86_64" in _finding(report, "torch").found
    assert "implementation missing" in _finding(report, "libuv server").found
    assert "uv.dll" in _finding(report, "libuv library").found


@pytest.mark.slow
def test_a_real_wheel_for_linux(tmp_path: Path) -> None:
    """The one that the tests use."""
    report = _look(_download(tmp_path, f"torch=={version('torch').partition('+')[0]}"))
    assert (report.ok, report.libuv) == (True, True)
    assert f"{version('torch')}, for Linux on" in _finding(report, "torch").found
    assert "LibUVStoreDaemon" in _finding(report, "libuv server").found
