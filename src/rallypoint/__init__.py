"""Rallypoint: the meeting place of a distributed PyTorch job.

What is listed here is imported when it is first used, so that `import rallypoint` costs next to nothing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as in typing, which takes almost as long to import as Python takes to start

if TYPE_CHECKING:
    from rallypoint.client.base import PrefixStore, Store
    from rallypoint.client.file import FileStore
    from rallypoint.client.local import HashStore
    from rallypoint.client.rendezvous import Rendezvous, rendezvous
    from rallypoint.client.tcp import TCPStore
    from rallypoint.errors import (
        AccessError,
        BindError,
        ConnectError,
        ConnectionLostError,
        JoinTimeoutError,
        LimitError,
        MeetingClosedError,
        PortInUseError,
        ProtocolError,
        QueueEmptyError,
        RallypointError,
        ServerStartError,
        StaleFileError,
        StoreTimeoutError,
        UsageError,
    )
    from rallypoint.launch.stacks.steps import step

__all__ = [
    "AccessError",
    "BindError",
    "ConnectError",
    "ConnectionLostError",
    "FileStore",
    "HashStore",
    "JoinTimeoutError",
    "LimitError",
    "MeetingClosedError",
    "PortInUseError",
    "PrefixStore",
    "ProtocolError",
    "QueueEmptyError",
    "RallypointError",
    "Rendezvous",
    "ServerStartError",
    "StaleFileError",
    "Store",
    "StoreTimeoutError",
    "TCPStore",
    "UsageError",
    "__version__",
    "rendezvous",
    "step",
]

__version__ = "0.1.0"

_HOMES = {
    "FileStore": "rallypoint.client.file",
    "HashStore": "rallypoint.client.local",
    "PrefixStore": "rallypoint.client.base",
    "Rendezvous": "rallypoint.client.rendezvous",
    "Store": "rallypoint.client.base",
    "TCPStore": "rallypoint.client.tcp",
    "rendezvous": "rallypoint.client.rendezvous",
    "step": "rallypoint.launch.stacks.steps",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'rallypoint' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES.get(name, "rallypoint.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _choose_build() -> None:
    if os.environ.get("RALLYPOINT_PURE", "0") not in ("", "0"):
        from rallypoint.build import use_source_only

        use_source_only()


_choose_build()
