"""What an error number of a socket means, in words."""

from __future__ import annotations

import os
from typing import Final

# Windows has numbers of its own for sockets, and `os.strerror` knows none of them.
_OF_WINDOWS: Final = {
    10013: "Permission denied",
    10048: "Address already in use",
    10049: "Cannot assign requested address",
    10051: "Network is unreachable",
    10054: "Connection reset by peer",
    10060: "Connection timed out",
    10061: "Connection refused",
    10065: "No route to host",
}


def reason_of(code: int) -> str:
    """The system's words; on Windows those that other systems have for it."""
    return _OF_WINDOWS.get(code) or os.strerror(code)
