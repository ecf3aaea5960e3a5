"""Commands that build torch: the script of a plan, and a build that is run to be watched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rallypoint.errors import RallypointError, UsageError

_GOODBYE_SECONDS: Final = 10


def run_script(script: str) -> int:
    """Run a script for bash to its end; its exit code. An interruption ends all of its processes."""
    if os.name != "posix":
        raise UsageError(
            "a script for Windows is not run from here", hint="save it as a .bat file, and run that"
        )
    bash = shutil.which("bash")
    if bash is None:
        raise RallypointError("there is no bash here to run the script with")
    process = subprocess.Popen([bash, "-c", script], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait()
    finally:
        _end(process)


@contextmanager
def running_command(
    command: Sequence[str], log: Path | None
) -> Iterator[tuple[subprocess.Popen[bytes] | None, Path | None]]:
    """The process of a command, if there is one, and the file of its output. After the block it has ended."""
    if not command:
        yield None, log
        return
    with tempfile.TemporaryDirectory() as folder:
        path = log or Path(folder, "log")
        process = _start(command, path)
        try:
            yield process, path
        finally:
            _end(process)


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    try:
        file = log.open("wb")
    except OSError as error:
        raise UsageError(f"cannot write to {log}: {error.strerror}", hint="name another --log") from None
    with file:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            hint = "write the command behind -- as in a shell: a program and its arguments"
            raise UsageError(f"cannot run {command[0]}: {error.strerror}", hint=hint) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still running, with its process group: all that it has started."""
    if process.poll() is not None:
        return
    _signal(process, signal.SIGTERM)
    try:
        process.wait(_GOODBYE_SECONDS)
    except subprocess.TimeoutExpired:
        _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if os.name == "posix":
        os.killpg(process.pid, number)
    else:
        process.terminate()
