"""Plain data as bytes and back: None, numbers, texts, bytes, and lists of such. Pure.

Checkpoints are written with it. The same data gives the same bytes, on every machine and in every version.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

_HEAD: Final = Struct("<BQ")
_FLOAT: Final = Struct("<d")
_NONE, _FALSE, _TRUE, _INT, _FLOATING, _BYTES, _TEXT, _LIST = range(8)
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
    end = begin + size
    if end > len(data):
        raise ValueError("it ends too early")
    return _value_of(kind, data[begin:end]), end


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
