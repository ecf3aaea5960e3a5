"""Libraries of three platforms are recognised, searched and compared, loading none."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build_files import WITH, elf, macho, pe, universal
from rallypoint.diagnose.builds.packages import UnreadableError, find_texts, identify, is_same_build
from rallypoint.diagnose.builds.verdicts import SERVER, TEXTS


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
