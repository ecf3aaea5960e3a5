"""Logs from files, folders, standard input and failure reports, as streams of bytes.

The bytes that come out are UTF-8 or nearly so: gzip is unpacked, and UTF-16, as PowerShell writes it, is
recoded. A path may tell a rank, a host or a try: `attempt_0/3/stderr.log` (torchrun), `slurm-4711_3.out`
(Slurm's %j_%t, a file for each task), `rank3.log`, `node-a.log`.
"""

from __future__ import annotations

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from rallypoint.diagnose.explain.scanning import Log
from rallypoint.diagnose.explain.sieve import BLOCK_BYTES
from rallypoint.diagnose.explain.stamps import complete_stamp
from rallypoint.diagnose.explain.tracebacks import BEGIN
from rallypoint.errors import UsageError
from rallypoint.launch.reports import Failure

_TORCHRUN: Final = re.compile(
    r"attempt_(?P<attempt>\d+)[/\\](?P<rank>\d+)[/\\](?:stdout|stderr)\.log(?:\.gz)?$"
)
_RANK: Final = re.compile(r"(?i)(?:^|[^a-z])rank[-_.]?(?P<rank>\d+)(?:\D|$)")
_SLURM: Final = re.compile(r"slurm-\d+_(?P<rank>\d+)\.(?:out|err|log)")
_HOST: Final = re.compile(
    r"(?i)(?P<host>(?:[a-z\d]+-)*(?:node|host|worker|master|machine)(?:[-_]?\d+|-[a-z])(?:-\d+)*)\."
)
_HEAD: Final = 1 << 16
_MOST_ZEROS: Final = 0.1
"""How much of a text may be zero bytes."""
_HOLE: Final = re.compile(rb"\0{16,}")
"""A log that somebody cuts while it is written has holes: the writer goes on where it was."""
_LOG: Final = re.compile(r"(?i)\.(?:log|out|err|txt|stdout|stderr)(?:\.\d+)?(?:\.gz)?$|^(?:stdout|stderr)$")


def find_logs(paths: Sequence[str]) -> list[Path]:
    """The files, with the logs of a folder in its place. UsageError if a folder has none."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        for file in _logs_in(path) if path.is_dir() else [path]:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _logs_in(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if _LOG.search(path.name) and path.is_file())
    if not files:
        raise UsageError(
            f"there is no log in {folder}",
            hint="name the files: what counts as a log in a folder ends with .log, .out, .err or .txt",
        )
    return files


def open_log(path: Path) -> Log:
    """A file as a log. It is read when its chunks are asked for. UsageError if it cannot be opened."""
    try:
        status = os.stat(path)
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the name") from None
    rank, host, attempt = told_by_name(path)
    return Log(str(path), _file_chunks(path), rank=rank, host=host, attempt=attempt, modified=status.st_mtime)


def stream_log(stream: IO[bytes], name: str, now: float) -> Log:
    """Standard input as a log."""
    return Log(name, recoded(iter(lambda: stream.read(BLOCK_BYTES), b"")), modified=now)


def log_of_failure(failure: Failure) -> Log:
    """What a process of `rallypoint run` has reported of its failure, as a log."""
    rank = failure.who.rank if failure.who.rank >= 0 else None
    # A long traceback was cut at its beginning; its end is what counts.
    text = failure.traceback if BEGIN in failure.traceback else f"{BEGIN}:\n{failure.traceback}"
    chunks, stamp = [text.encode(errors="replace")], complete_stamp(failure.time)
    return Log(failure.name, chunks, rank, failure.who.host, failure.who.tries, failure.time, stamp)


def told_by_name(path: Path) -> tuple[int | None, str | None, int | None]:
    """Rank, host and number of the try, if the path tells them."""
    torchrun = _TORCHRUN.search(str(path))
    if torchrun:
        return int(torchrun["rank"]), None, int(torchrun["attempt"])
    rank, host = _RANK.search(path.name) or _SLURM.match(path.name), _HOST.match(path.name)
    return (int(rank["rank"]) if rank else None), (host["host"] if host else None), None


def _file_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        try:
            yield from recoded(iter(lambda: stream.read(BLOCK_BYTES), b""))
        except UsageError as error:
            raise UsageError(f"cannot read {path}: {error.message}", hint=error.hint) from None
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"cannot read {path} to its end: {error}", hint="is it damaged?") from None


def recoded(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks in UTF-8, without a byte order mark."""
    decoder, begun = None, False
    for chunk in chunks:
        if not begun:
            chunk = chunk.lstrip(b"\0") if chunk.startswith(b"\0\0") else chunk
            begun = bool(chunk)
            head = _HOLE.sub(b"", chunk[:_HEAD])
            decoder = _decoder_for(head)
            if decoder is None and head.count(0) > _MOST_ZEROS * len(head):
                raise UsageError("it is no text", hint="name the logs of the job")
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
