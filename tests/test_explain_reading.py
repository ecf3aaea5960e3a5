"""Logs from files: whatever their encoding, and what their names tell."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explaining import report_of
from rallypoint.diagnose.explain.reading import find_logs, open_log, recoded, stream_log, told_by_name
from rallypoint.diagnose.explain.sieve import BLOCK_BYTES
from rallypoint.errors import UsageError

pytestmark = pytest.mark.windows

_TEXT = "naïve 🏖\nEADDRINUSE on port 29500\n"


@pytest.mark.parametrize(
    "content",
    [
        _TEXT.encode(),
        _TEXT.encode("utf-8-sig"),
        _TEXT.encode("utf-16"),
        _TEXT.encode("utf-16-le"),
        _TEXT.encode("utf-16-be"),
        _TEXT.replace("\n", "\r\n").encode(),
        b"\xff\xfd\xfe broken\n" + _TEXT.encode("latin-1", errors="replace"),
        _TEXT.encode().rstrip(b"\n"),
        b"\x00" * 100 + b"\n" + _TEXT.encode(),
        _TEXT.encode() + b"\x00" * 5000,
        b"\x00" * (2 * BLOCK_BYTES + 7) + _TEXT.encode(),
        gzip.compress(_TEXT.encode(), mtime=0),
    ],
)
def test_encodings(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / ("train.log.gz" if content.startswith(b"\x1f\x8b") else "train.log")
    path.write_bytes(content)
    report = report_of(open_log(path))
    assert report.verdict is not None
    assert report.verdict.incident.facts == {"port": "29500"}
    assert report.verdict.incident.first.text == "EADDRINUSE on port 29500"


@given(st.text(), st.integers(1, 7))
def test_utf_16_may_be_cut_anywhere(text: str, size: int) -> None:
    content = ("\ufeff" + text).encode("utf-16-le", errors="surrogatepass")
    chunks = [content[begin : begin + size] for begin in range(0, len(content), size)]
    if len(chunks[0]) < 2:
        chunks[:2] = [b"".join(chunks[:2])]
    assert b"".join(recoded(chunks)) == text.encode(errors="replace")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.log.gz", gzip.compress(_TEXT.encode() * 100, mtime=0)[:-20], r"cannot read .* to its end"),
        ("model.pt", bytes(range(4)) * 200, r"cannot read .*model\.pt: it is no text"),
        ("model.pt", b"\x7fELF\x02\x01" + b"\x00\x01\x02" * 500, "it is no text"),
        ("missing", None, "cannot read .*missing: "),
    ],
)
def test_what_cannot_be_read_is_told(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        report_of(open_log(tmp_path / name))


def test_a_stream() -> None:
    assert report_of(stream_log(io.BytesIO(_TEXT.encode()), "standard input", 0.0)).found


@pytest.mark.parametrize(
    ("name", "rank", "host", "attempt"),
    [
        ("logs/none_x/attempt_1/3/stderr.log", 3, None, 1),
        ("rank3.log", 3, None, None),
        ("slurm-4711_3.out", 3, None, None),
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


def test_a_folder_without_logs_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no log in"):
        find_logs([str(tmp_path)])
