"""Libraries of three platforms are read, and damaged ones are refused, without loading any."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build_files import WITH, elf, macho, pe, universal
from rallypoint.diagnose.builds.binaries import identify, read_binary, read_headers, scan
from rallypoint.diagnose.builds.trees import compare
from rallypoint.diagnose.builds.verdicts import SERVER, STORE, TEXTS
from rallypoint.diagnose.builds.window import UnreadableError

_MAKERS: dict[str, Callable[[], bytes]] = {
    "elf": lambda: elf(b"x", ["libc10.so", "libuv.so.1"], "$ORIGIN", build_id=b"\x01\x02"),
    "elf-big": lambda: elf(b"x", ["libc10.so"], rpath="/opt", order=">"),
    "pe": lambda: pe(b"x", ["c10.dll", "uv.dll"]),
    "macho": lambda: macho(b"x", ["@rpath/libc10.dylib"], ["@loader_path"]),
    "universal": lambda: universal((0x01000007, macho(machine=0x01000007)), (0x0100000C, macho())),
}


def test_elf() -> None:
    binary = read_headers(
        io.BytesIO(elf(b"x", ["libc10.so", "libuv.so.1"], "$ORIGIN:/lib", build_id=b"\x01\xff"))
    )
    assert (binary.platform, binary.machines) == ("Linux", ("x86_64",))
    assert binary.needed == ("libc10.so", "libuv.so.1")
    assert (binary.rpaths, binary.runpaths) == ((), ("$ORIGIN", "/lib"))
    assert binary.build_id == "01ff"


def test_elf_with_an_old_search_path_in_the_other_byte_order() -> None:
    binary = read_headers(io.BytesIO(elf(rpath="/opt/torch", order=">")))
    assert (binary.rpaths, binary.runpaths) == (("/opt/torch",), ())


def test_pe() -> None:
    binary = read_headers(io.BytesIO(pe(b"x", ["c10.dll", "uv.dll"])))
    assert (binary.platform, binary.machines, binary.needed) == (
        "Windows",
        ("x86_64",),
        ("c10.dll", "uv.dll"),
    )
    assert read_headers(io.BytesIO(pe())).needed == ()


def test_macho() -> None:
    binary = read_headers(io.BytesIO(macho(b"x", ["@rpath/libc10.dylib"], ["@loader_path"])))
    assert (binary.platform, binary.machines) == ("macOS", ("arm64",))
    assert (binary.needed, binary.rpaths) == (("@rpath/libc10.dylib",), ("@loader_path",))
    assert binary.build_id == bytes(range(16)).hex()


def test_macho_for_two_machines() -> None:
    intel = macho(needed=["libuv.1.dylib"], machine=0x01000007)
    binary = read_headers(io.BytesIO(universal((0x01000007, intel), (0x0100000C, macho()))))
    assert (binary.machines, binary.needed) == (("x86_64", "arm64"), ("libuv.1.dylib",))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads a library of Linux")
def test_a_real_library() -> None:
    module = sys.modules["_struct"].__file__ if hasattr(sys.modules.get("_struct"), "__file__") else None
    binary = read_binary(Path(module or sys.executable).resolve())
    assert binary.format == "ELF"
    assert any(name.startswith("libc.") for name in binary.needed)


def test_other_files_are_refused() -> None:
    a_class_of_java = b"\xca\xfe\xba\xbe\x00\x00\x00\x41" + bytes(64)
    for head in (b"", b"#!/bin/sh\n", b"PK\x03\x04", a_class_of_java):
        with pytest.raises(UnreadableError, match="no library"):
            identify(head)


def test_cut_off_anywhere() -> None:
    """However much is missing: it is read, since the headers are complete, or refused."""
    for name, make in _MAKERS.items():
        whole = make()
        refused = 0
        for size in range(len(whole)):
            try:
                read_headers(io.BytesIO(whole[:size]))
            except UnreadableError:
                refused += 1
        assert refused > 40, name


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(_MAKERS)), data=st.data())
def test_changed_bytes_never_raise_anything_else(name: str, data: st.DataObject) -> None:
    content = bytearray(_MAKERS[name]())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, min(len(content), 600) - 1))] = data.draw(st.integers(0, 255))
    _read_or_refuse(bytes(content))


@given(
    st.sampled_from([b"", b"\x7fELF\x02\x01", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"]),
    st.binary(max_size=400),
)
def test_random_bytes_never_raise_anything_else(magic: bytes, rest: bytes) -> None:
    _read_or_refuse(magic + rest)


def _read_or_refuse(content: bytes) -> None:
    try:
        read_headers(io.BytesIO(content))
    except UnreadableError:
        pass


@given(st.binary(max_size=64), st.binary(max_size=64), st.integers(1, 50))
def test_a_text_is_found_wherever_the_pieces_end(before: bytes, after: bytes, piece: int) -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(piece, size or piece))

    assert SERVER in scan(Slow(before + WITH + after), TEXTS).found
    absent = scan(Slow(before + WITH[: len(STORE) + 5] + after), [b"NotThere"]).found
    assert (b"NotThere" in absent) == (b"NotThere" in before + after)


def test_the_digest_does_not_depend_on_search_paths() -> None:
    built, installed, other = (
        elf(payload, runpath=path, room=room)
        for payload, path, room in [(b"x", "/tree/build/lib", 0), (b"x", "$ORIGIN", 8), (b"y", "$ORIGIN", 8)]
    )
    digests = []
    for content in (built, installed, other):
        paths_at = read_headers(io.BytesIO(content)).paths_at
        digests.append(scan(io.BytesIO(content), (), paths_at).digest)
    assert len(built) == len(installed)
    assert digests[0] == digests[1] != digests[2]


def test_cmake_rewrites_search_paths_and_nothing_else(tmp_path: Path) -> None:
    """What `compare` builds on, by a real installation of a real library."""
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler here")
    (tmp_path / "a.c").write_text("int a(void) { return 1; }\n")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(small C)\n"
        'set(CMAKE_INSTALL_RPATH "\\$ORIGIN")\n'
        "add_library(base SHARED a.c)\nadd_library(torch_cpu SHARED a.c)\n"
        "target_link_libraries(torch_cpu base)\ninstall(TARGETS base torch_cpu DESTINATION lib)\n"
    )
    build, prefix = tmp_path / "build", tmp_path / "installed"
    _cmake("-G", "Ninja", "-S", tmp_path, "-B", build, f"-DCMAKE_INSTALL_PREFIX={prefix}")
    _cmake("--build", build)
    _cmake("--install", build)
    library = next(build.glob("libtorch_cpu.*"))
    installed = prefix / "lib" / library.name
    assert library.read_bytes() != installed.read_bytes()
    pair = compare(library, installed)
    assert pair.same
    installed.write_bytes(installed.read_bytes()[:-1] + b"\x7f")
    assert not compare(library, installed).same


def _cmake(*arguments: str | Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["cmake", *map(str, arguments)]
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True, capture_output=True, timeout=60)
