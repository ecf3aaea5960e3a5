"""Libraries of three platforms are recognised and searched, and damaged ones are refused, loading none."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from build_files import WITH, elf, macho, pe, universal
from rallypoint.diagnose.builds.libraries import (
    Elf,
    UnreadableError,
    find_texts,
    identify,
    is_same_build,
    read_elf,
)
from rallypoint.diagnose.builds.verdicts import SERVER, TEXTS


def test_headers_of_elf(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(elf(b"x", ["libc10.so", "libuv.so.1"], "$ORIGIN:/lib", "/opt", b"\x01\xff"))
    found = read_elf(path)
    assert found.needed == ("libc10.so", "libuv.so.1")
    assert (found.rpaths, found.runpaths) == (("/opt",), ("$ORIGIN", "/lib"))
    path.write_bytes(pe())
    assert read_elf(path) == Elf()


def test_other_files_are_not_taken_for_libraries() -> None:
    a_class_of_java = b"\xca\xfe\xba\xbe\x00\x00\x00\x41" + bytes(64)
    for head in (b"", b"#!/bin/sh\n", b"PK\x03\x04", b"MZ", b"\x7fELF", a_class_of_java):
        assert identify(head) is None


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([elf(b"x", ["libc10.so"], "$ORIGIN", build_id=b"\1"), pe(), macho(), universal(macho())]),
    st.integers(0, 600),
    st.lists(st.tuples(st.integers(0, 599), st.integers(0, 255)), max_size=8),
)
def test_whatever_is_cut_off_or_changed_is_read_or_refused(
    tmp_path: Path, content: bytes, size: int, changes: list[tuple[int, int]]
) -> None:
    damaged = bytearray(content[:size])
    for at, value in changes:
        if at < len(damaged):
            damaged[at] = value
    identify(bytes(damaged))
    (tmp_path / "library").write_bytes(damaged)
    try:
        read_elf(tmp_path / "library")
    except UnreadableError:
        pass


def test_tables_without_an_end_are_refused(tmp_path: Path) -> None:
    content = bytearray(elf())
    content[56:58] = b"\xff\xff"  # the number of segments
    (tmp_path / "library").write_bytes(content + bytes(4 << 20))
    with pytest.raises(UnreadableError, match="library: the headers name 65,535 segments"):
        read_elf(tmp_path / "library")


@given(st.binary(max_size=64), st.binary(max_size=64), st.integers(1, 50))
def test_a_text_is_found_wherever_the_pieces_end(before: bytes, after: bytes, piece: int) -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(piece, size or piece))

    content = before + WITH + after
    assert find_texts(Slow(content)) == {text for text in TEXTS if text in content} >= {SERVER}


def test_an_installation_by_cmake_rewrites_search_paths_and_nothing_else(tmp_path: Path) -> None:
    built, installed = tmp_path / "built", tmp_path / "installed"
    content = elf(b"x" * 9, ["libc10.so"], runpath="/tree/build/lib", rpath="/old")
    built.write_bytes(content)
    for rewritten, same in ((content, True), (content[:-1] + b"y", False)):
        installed.write_bytes(rewritten.replace(b"/tree/build/lib", b"$ORIGIN".ljust(15, b"\0")))
        assert is_same_build(built, installed) is same
