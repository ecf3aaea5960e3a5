"""Plain data as bytes and back: None, numbers, texts, bytes, and lists of such. Pure.

Checkpoints are written with it. The same data gives the same bytes, on every machine and in every version.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

_HEAD: Final = struct.Struct("<BQ")
_FLOAT: Final = struct.Struct("<d")
_NONE, _FALSE, _TRUE, _INT, _FLOATING, _BYTES, _TEXT, _LIST, _RUN = range(9)
_DEEPEST: Final = 32


def pack(value: Any) -> bytes:
    """Data as bytes."""
    parts: list[bytes] = []
    _write(value, parts.append)
    return b"".join(parts)


def unpack(data: bytes) -> Any:
    """The data that `pack` was given, with lists for tuples. ValueError if these are not such bytes."""
    value, end = _read(data, 0, _DEEPEST)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes are left")
    return value


def _write(value: Any, put: Callable[[bytes], None]) -> None:
    if isinstance(value, bytes):
        put(_HEAD.pack(_BYTES, len(value)))
        put(value)
    elif isinstance(value, list | tuple):
        if len(value) > 1 and set(map(type, value)) == {bytes}:  # keys and values: very many, and quickly
            put(_HEAD.pack(_RUN, len(value)))
            put(struct.pack(f"<{len(value)}Q", *map(len, value)))
            put(b"".join(value))
            return
        put(_HEAD.pack(_LIST, len(value)))
        for each in value:
            _write(each, put)
    elif value is None or isinstance(value, bool):
        put(_HEAD.pack(_NONE if value is None else _TRUE if value else _FALSE, 0))
    elif isinstance(value, int):
        content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        put(_HEAD.pack(_INT, len(content)))
        put(content)
    elif isinstance(value, float):
        put(_HEAD.pack(_FLOATING, _FLOAT.size))
        put(_FLOAT.pack(value))
    elif isinstance(value, str):
        content = value.encode(errors="surrogatepass")
        put(_HEAD.pack(_TEXT, len(content)))
        put(content)
    else:
        raise TypeError(f"{type(value).__name__} is no plain data")


def _read(data: bytes, start: int, depth: int) -> tuple[Any, int]:
    begin = start + _HEAD.size
    if begin > len(data):
        raise ValueError("it ends too early")
    kind, size = _HEAD.unpack_from(data, start)
    if kind == _LIST:
        if not depth:
            raise ValueError("lists within lists go too deep")
        values = []
        for _ in range(size):
            value, begin = _read(data, begin, depth - 1)
            values.append(value)
        return values, begin
    if kind == _RUN:
        return _read_run(data, begin, size)
    end = begin + size
    if end > len(data):
        raise ValueError("it ends too early")
    return _value_of(kind, data[begin:end]), end


def _read_run(data: bytes, begin: int, count: int) -> tuple[list[bytes], int]:
    position = begin + 8 * count
    if position > len(data):
        raise ValueError("it ends too early")
    values = []
    for length in struct.unpack_from(f"<{count}Q", data, begin):
        values.append(data[position : position + length])
        position += length
    if position > len(data):
        raise ValueError("it ends too early")
    return values, position


def _value_of(kind: int, content: bytes) -> Any:
    if kind == _BYTES:
        return content
    if kind == _INT:
        return int.from_bytes(content, "little", signed=True)
    if kind == _TEXT:
        return content.decode(errors="surrogatepass")
    if kind == _FLOATING and len(content) == _FLOAT.size:
        return _FLOAT.unpack(content)[0]
    if kind in (_NONE, _FALSE, _TRUE) and not content:
        return None if kind == _NONE else kind == _TRUE
    raise ValueError(f"there is no kind {kind} of {len(content)} bytes")
