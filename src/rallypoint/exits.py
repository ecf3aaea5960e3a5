"""How a process has ended, in words: by a signal, or with an exit code or a status of Windows. Pure.

Windows has no signals. A process that crashes there, or is ended by the system, has a large exit code:
3221225477 is 0xC0000005, an access violation. No other system has exit codes above 255.
"""

from __future__ import annotations

import signal
from typing import Final

ENDED_BY_CONSOLE: Final = 0xC000013A
"""The exit code of a process that Ctrl-C, Ctrl-Break or the closing of its console window has ended."""

_CRASHED: Final = "it crashed in native code: PYTHONFAULTHANDLER=1 shows where"
_ABORTED: Final = "it was aborted in native code: its own message stands above"
_DLL: Final = (
    "reinstall the package whose import fails, and Microsoft's Visual C++ runtime (2015 to 2022, x64)"
)

_STATUSES: Final = {
    0x40010004: ("the system has ended it", "somebody has logged off or shut Windows down"),
    0xC0000005: ("access violation", _CRASHED),
    0xC0000017: ("no memory", "memory ran out: a larger page file helps, or fewer workers"),
    0xC000001D: ("illegal instruction", "this processor lacks an instruction: install another build"),
    0xC00000FD: ("stack overflow", _CRASHED),
    0xC000012D: ("no memory can be committed", "memory ran out: a larger page file helps, or fewer workers"),
    0xC0000135: ("a DLL was not found", _DLL),
    0xC0000139: ("a DLL lacks a function", _DLL),
    ENDED_BY_CONSOLE: ("Ctrl-C, Ctrl-Break, or its console window was closed", ""),
    0xC0000142: ("a DLL did not start", _DLL),
    0xC0000374: ("its heap is corrupt", _CRASHED),
    0xC0000409: ("it has aborted itself", _ABORTED),
}
"""Windows' statuses: what each means, and what it may come from."""

# An exception has words, which `rallypoint explain` knows; a signal or a status has none.
_HINTS: Final = {
    "SIGKILL": "somebody sent it SIGKILL; if that was the kernel because memory ran out, `dmesg -T` says so",
    "SIGSEGV": _CRASHED,
    "SIGFPE": "native code divided by zero: PYTHONFAULTHANDLER=1 shows where",
    "SIGILL": "this processor lacks an instruction: install another build",
    "SIGABRT": _ABORTED,
    "SIGBUS": "it crashed in native code; often shared memory is full (/dev/shm)",
    **{f"0x{status:08X}": hint for status, (_, hint) in _STATUSES.items() if hint},
}


_LINUX: Final = {
    1: "HUP",
    2: "INT",
    3: "QUIT",
    10: "USR1",
    12: "USR2",
    4: "ILL",
    5: "TRAP",
    6: "ABRT",
    7: "BUS",
    8: "FPE",
    9: "KILL",
    11: "SEGV",
    13: "PIPE",
    15: "TERM",
}
"""Linux's signals, for its logs where they are read on Windows, which knows but a few."""


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on; SIG77 for one that has no name."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number) or f"SIG{_LINUX.get(number, number)}"


def signal_number(name: str) -> int:
    """9 for SIGKILL, and so on; 0 for a name that no signal has."""
    own = {each.name: each.value for each in signal.Signals}
    return own.get(name) or next((number for number, each in _LINUX.items() if f"SIG{each}" == name), 0)


def exit_text(code: int) -> str:
    """`exit code 1`; `exit code 3221225477 (0xC0000005, access violation)`."""
    if code not in _STATUSES:
        return f"exit code {code}"
    return f"exit code {code} (0x{code:08X}, {_STATUSES[code][0]})"


def hint_for(ending: str) -> str:
    """What an ending may come from, by the signal or the status in its words; empty if that is not known."""
    return next((hint for name, hint in _HINTS.items() if name in ending), "")
