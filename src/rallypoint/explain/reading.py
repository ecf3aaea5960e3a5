"""Opens logs as streams of bytes: files, folders and standard input.

The bytes that come out are UTF-8, more or less: gzip is unpacked, UTF-16 (as PowerShell writes it) is
decoded, holes of NUL are left out. A name may tell a rank, a host or an attempt: `attempt_0/3/stderr.log`
(torchrun), `slurm-4711_3.out` (Slurm's %j_%t), `node-a.log`. A file that cannot be read is skipped and noted.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from rallypoint.errors import UsageError
from rallypoint.explain.scan import Source

STANDARD_INPUT: Final = "standard input"
_TORCHRUN: Final = re.compile(r"attempt_(?P<attempt>\d+)[/\\](?P<rank>\d+)[/\\]std(?:out|err)\.log(?:\.gz)?$")
_RANK: Final = re.compile(r"(?i)(?:^|[^a-z])rank[-_.]?(?P<rank>\d+)(?:\D|$)")
_SLURM: Final = re.compile(r"slurm-\d+_(?P<rank>\d+)\.(?:out|err|log)")
_HOST: Final = re.compile(
    r"(?i)(?P<host>(?:[a-z\d]+-)*(?:node|host|worker|master|machine)(?:[-_]?\d+|-[a-z])(?:-\d+)*)\."
)
_LOG: Final = re.compile(r"(?i)\.(?:log|out|err|txt|stdout|stderr)(?:\.\d+)?(?:\.gz)?$|^(?:stdout|stderr)$")
_CHUNK_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 1 << 16
_MOST_ZEROS: Final = 0.1
"""The share of NUL bytes that a text may have."""
_HOLE: Final = re.compile(rb"\0{16,}")
"""A log that is truncated while it is written has holes: the writer goes on at its old offset."""
_GZIP: Final = b"\x1f\x8b"


class Reader:
    """Opens logs, and notes which of them cannot be read and why."""

    def __init__(self) -> None:
        self.unreadable: list[tuple[str, str]] = []

    def open(self, path: Path) -> Source:
        """A file. It is opened when its chunks are asked for: a pipe can be opened only once."""
        rank, host, attempt = told_by_name(path)
        return Source(str(path), self._noted(str(path), _chunks_of(path)), rank, host, attempt)

    def stream(self, stream: IO[bytes]) -> Source:
        """Standard input."""
        return Source(STANDARD_INPUT, self._noted(STANDARD_INPUT, recoded(_unpacked(stream))))

    def _noted(self, name: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        try:
            yield from chunks
        except (OSError, EOFError, zlib.error, UsageError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.unreadable.append((name, reason[:1].lower() + reason[1:]))


def find_logs(names: Sequence[str]) -> list[Path]:
    """The files, each once, and for a folder the logs in it. UsageError if a name or a folder has none."""
    found: dict[Path, Path] = {}
    for path in map(Path, names):
        for file in _logs_in(path) if path.is_dir() else [path]:
            found.setdefault(file.resolve(), file)
    if missing := next((file for file in found.values() if not file.exists()), None):
        raise UsageError(f"cannot read {missing}: no such file", hint="check the name")
    return list(found.values())


def _logs_in(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if _LOG.search(path.name) and path.is_file())
    if not files:
        raise UsageError(
            f"there is no log in {folder}",
            hint="name the files: in a folder, logs are files that end with .log, .out, .err or .txt",
        )
    return files


def told_by_name(path: Path) -> tuple[int | None, str | None, int | None]:
    """Rank, host and number of the attempt, if the path tells them."""
    if torchrun := _TORCHRUN.search(str(path)):
        return int(torchrun["rank"]), None, int(torchrun["attempt"])
    rank, host = _RANK.search(path.name) or _SLURM.match(path.name), _HOST.match(path.name)
    return (int(rank["rank"]) if rank else None), (host["host"] if host else None), None


def _chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from recoded(_unpacked(file))


def _unpacked(stream: IO[bytes]) -> Iterator[bytes]:
    packed = isinstance(stream, io.BufferedReader) and stream.peek(2)[:2] == _GZIP
    source = gzip.GzipFile(fileobj=stream) if packed else stream
    # In small pieces, as the piece with the damage is lost as a whole.
    return iter(lambda: source.read(_HEAD_BYTES if packed else _CHUNK_BYTES), b"")


def recoded(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks in UTF-8, without a byte order mark and without holes. UsageError if they are no text."""
    decoder, begun = None, False
    for chunk in chunks:
        if not begun:
            chunk = chunk.lstrip(b"\0") if chunk.startswith(b"\0\0") else chunk
            begun = bool(chunk)
            head = _HOLE.sub(b"", chunk[:_HEAD_BYTES])
            decoder = _decoder_for(head)
            if decoder is None and head.count(0) > _MOST_ZEROS * len(head):
                raise UsageError("binary, not text")
            chunk = chunk.removeprefix(codecs.BOM_UTF8)
        if decoder:
            yield decoder.decode(chunk).encode(errors="replace")
        else:
            yield _HOLE.sub(b"", chunk) if b"\0" in chunk else chunk


def _decoder_for(start: bytes) -> codecs.IncrementalDecoder | None:
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return codecs.getincrementaldecoder("utf-16")("replace")
    head = start[:400]
    for name, zeros in (("utf-16-le", head[1::2]), ("utf-16-be", head[::2])):
        if len(head) > 1 and zeros.count(0) > 0.4 * len(head):
            return codecs.getincrementaldecoder(name)("replace")
    return None
