"""Opens logs as streams of bytes: files, folders and standard input.

The bytes that come out are UTF-8, more or less: gzip is unpacked, UTF-16 (as PowerShell writes it) is
decoded, holes of NUL are left out. A name may tell a rank, a host or an attempt: `attempt_0/3/stderr.log`
(torchrun), `job-rank3.out` (Slurm: `job-rank%t.out`), `node-a.log`. A file that cannot be read is skipped and
noted.
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
_HOST: Final = re.compile(
    r"(?i)(?P<host>(?:[a-z\d]+-)*(?:node|host|worker|machine)(?:[-_]?\d+|-[a-z])(?:-\d+)*)\."
)
_LOG: Final = re.compile(r"(?i)\.(?:log|out|err|txt|stdout|stderr)(?:\.\d+)?(?:\.gz)?$|^(?:stdout|stderr)$")
_CHUNK_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 1 << 16
_MOST_ZEROS: Final = 0.1
_HOLE: Final = re.compile(rb"\0{16,}")
"""A log that is truncated while it is written has holes: the writer goes on at its old offset."""


class Opener:
    """Opens logs, and notes which of them cannot be read and why."""

    def __init__(self) -> None:
        self.unreadable: list[tuple[str, str]] = []

    def open(self, path: Path) -> Source:
        """A file. It is opened when its chunks are asked for: a pipe can be opened only once."""
        return Source(str(path), self._noted(str(path), _chunks_of(path)), *told_by_name(path))

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
    try:
        found = {file.resolve(): file for name in names for file in _logs_at(Path(name))}
    except OSError as error:  # a name too long, a loop of links, a folder of somebody else
        raise UsageError(
            f"cannot read {error.filename}: {error.strerror}", hint="name files that you can read"
        ) from None
    return list(found.values())


def _logs_at(path: Path) -> list[Path]:
    if not path.exists():
        raise UsageError(f"cannot read {path}: no such file", hint="check the name")
    if not path.is_dir():
        return [path]
    if files := sorted(each for each in path.rglob("*") if _LOG.search(each.name) and each.is_file()):
        return files
    hint = "name the files: in a folder, logs are files that end with .log, .out, .err or .txt"
    raise UsageError(f"there is no log in {path}", hint=hint)


def told_by_name(path: Path) -> tuple[int | None, str | None, int | None]:
    """Rank, host and number of the attempt, if the path tells them."""
    if torchrun := _TORCHRUN.search(str(path)):
        return int(torchrun["rank"]), None, int(torchrun["attempt"])
    rank, host = _RANK.search(path.name), _HOST.match(path.name)
    return (int(rank["rank"]) if rank else None), (host["host"] if host else None), None


def _chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from recoded(_unpacked(file))


def _unpacked(stream: IO[bytes]) -> Iterator[bytes]:
    packed = isinstance(stream, io.BufferedReader) and stream.peek(2)[:2] == b"\x1f\x8b"
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
            decoder = _decoder_for(_HOLE.sub(b"", chunk[:_HEAD_BYTES]))
            chunk = chunk.removeprefix(codecs.BOM_UTF8)
        if decoder:
            yield decoder.decode(chunk).encode(errors="replace")
        else:
            yield _HOLE.sub(b"", chunk) if b"\0" in chunk else chunk


def _decoder_for(head: bytes) -> codecs.IncrementalDecoder | None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return codecs.getincrementaldecoder("utf-16")("replace")
    if head[1:400:2].count(0) > 0.4 * len(head[:400]):
        return codecs.getincrementaldecoder("utf-16-le")("replace")
    if head.count(0) > _MOST_ZEROS * len(head):
        raise UsageError("binary, not text")
    return None
