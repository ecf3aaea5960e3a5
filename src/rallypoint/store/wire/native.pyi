from rallypoint.store.wire.limits import Limits
from rallypoint.store.wire.requests import Handler

def pack_i64(number: int, /) -> bytes: ...
def cut_blobs(
    data: bytes, position: int, blobs: list[bytes], left: int, caps: tuple[int, ...], most: int, /
) -> int: ...

class Hot:
    sets: int
    adds: int
    checks: int
    pings: int
    carried: int
    def __init__(self, limits: Limits, large_reply: int) -> None: ...
    def serve_one(self, handler: Handler, data: bytes, /) -> bytes | None: ...
    def serve(
        self, handler: Handler, data: bytes, position: int, pause: int, replies: list[bytes], /
    ) -> tuple[int, int]: ...
