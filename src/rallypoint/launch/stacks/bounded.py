"""Programs of others that are asked something, and given up after a while, whatever they hang in."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence


def output_of(command: Sequence[str], seconds: float) -> str:
    """What a program prints; nothing if it cannot be started, or takes too long.

    One that sits in a driver does not even end when it is killed: nobody waits for that.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return ""
    try:
        return process.communicate(timeout=seconds)[0]
    except (subprocess.SubprocessError, ValueError):
        process.kill()
        return ""
