"""Logs from files: any encoding, files that cannot be read, and what names tell."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.explain.reading import Opener, find_logs, recoded, told_by_name

pytestmark = pytest.mark.windows

_TEXT = "naïve 🏖\nEADDRINUSE on port 29500\n"
_LINE = b"EADDRINUSE on port 29500"


def _read(path: Path) -> tuple[bytes, list[tuple[str, str]]]:
    reader = Opener()
    return b"".join(reader.open(path).chunks), reader.unreadable


@pytest.mark.parametrize(
    "content",
    [
        _TEXT.encode(),
        _TEXT.encode("utf-8-sig"),
        _TEXT.encode("utf-16"),
        _TEXT.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + _TEXT.encode("utf-16-be"),
        _TEXT.replace("\n", "\r\n").encode(),
        b"\xff\xfd\xfe broken\n" + _TEXT.encode("latin-1", errors="replace"),
        _TEXT.encode().rstrip(b"\n"),
        b"\x00" * 100 + b"\n" + _TEXT.encode(),
        _TEXT.encode() + b"\x00" * 5000,
        b"\x00" * ((2 << 20) + 7) + _TEXT.encode(),
        gzip.compress(_TEXT.encode(), mtime=0),
        gzip.compress(b"step 1\n", mtime=0) + gzip.compress(_TEXT.encode(), mtime=0),
    ],
)
def test_every_encoding_becomes_utf_8(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    text, unreadable = _read(path)
    assert _LINE in text.splitlines()
    assert unreadable == []


@given(st.text(), st.integers(1, 7))
def test_utf_16_may_be_cut_anywhere(text: str, size: int) -> None:
    content = ("\ufeff" + text).encode("utf-16-le", errors="surrogatepass")
    chunks = [content[begin : begin + size] for begin in range(0, len(content), size)]
    if len(chunks[0]) < 2:
        chunks[:2] = [b"".join(chunks[:2])]
    assert b"".join(recoded(chunks)) == text.encode(errors="replace")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(os.urandom(50_000), mtime=0)[:-20], "ended before the end-of-stream marker"),
        (b"\x1f\x8b but not gzip", "method"),
        (bytes(range(4)) * 200, "binary, not text"),
        (b"\x7fELF\x02\x01" + b"\x00\x01\x02" * 500, "binary, not text"),
    ],
)
def test_a_file_that_cannot_be_read_is_noted(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    _, [(name, noted)] = _read(path)
    assert name == str(path)
    assert reason in noted


def test_a_damaged_file_is_read_up_to_its_damage(tmp_path: Path) -> None:
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress(_TEXT.encode() * 40_000, mtime=0)[:-20])
    text, unreadable = _read(path)
    assert _LINE in text
    assert len(unreadable) == 1


def test_a_file_without_permission_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "train.log").touch()
    monkeypatch.setattr(Path, "open", refuse)
    assert _read(tmp_path / "train.log")[1] == [(str(tmp_path / "train.log"), "permission denied")]


def test_standard_input_may_be_packed() -> None:
    packed = io.BufferedReader(io.BytesIO(gzip.compress(_TEXT.encode())))
    for stream in (io.BytesIO(_TEXT.encode()), packed):
        source = Opener().stream(stream)
        assert source.name == "standard input"
        assert b"".join(source.chunks) == _TEXT.encode()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_is_opened_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe.log"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(_TEXT.encode(),))
    writer.start()
    text, _ = _read(find_logs([str(path)])[0])
    writer.join()
    assert text == _TEXT.encode()


@pytest.mark.parametrize(
    ("name", "rank", "host", "attempt"),
    [
        ("logs/none_x/attempt_1/3/stderr.log", 3, None, 1),
        ("rank3.log", 3, None, None),
        ("slurm-4711_3.out", None, None, None),
        ("train_rank_12.err", 12, None, None),
        ("node-a.log", None, "node-a", None),
        ("worker-3.out", None, "worker-3", None),
        ("gpu-node17.log", None, "gpu-node17", None),
        ("train.log", None, None, None),
        ("no-gpu.torchrun.log", None, None, None),
        ("host-not-found.log", None, None, None),
        ("frank3.log", None, None, None),
        ("slurm-4711.out", None, None, None),
    ],
)
def test_names_tell(name: str, rank: int | None, host: str | None, attempt: int | None) -> None:
    assert told_by_name(Path(name)) == (rank, host, attempt)


def test_a_folder_means_the_logs_in_it(tmp_path: Path) -> None:
    logs = ["attempt_0/0/stderr.log", "attempt_0/1/stderr.log", "slurm-1.out", "old.log.1.gz"]
    for name in [*logs, "model.bin", "error.json"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_logs([str(tmp_path), str(tmp_path / "slurm-1.out")])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == sorted(logs)


def test_wrong_names_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no log in"):
        find_logs([str(tmp_path)])
    with pytest.raises(UsageError, match=r"cannot read no-such\.log: no such file"):
        find_logs(["no-such.log"])
    with pytest.raises(UsageError, match=r"cannot read xxx.*xx: (File name too long|no such file)"):
        find_logs(["x" * 300])
