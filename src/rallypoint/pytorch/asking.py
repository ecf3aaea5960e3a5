"""Asking torch about itself, in another process: it takes seconds, and may hang. Imports no torch."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rallypoint.exits import exit_text

# Without the folder it happens to stand in, which may hold a torch of its own: the sources, say.
_PROGRAM: Final = """
import sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
from rallypoint.pytorch.examination import main
main()
"""


@dataclass(frozen=True)
class Answers:
    """What `examination` found, by part; and how the process ended, if it did not end well."""

    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0

    def error_of(self, part: str) -> str:
        """Why there is no answer to a part; empty if there is one."""
        if part not in self.parts:
            return self.problem or "it was not asked"
        return str(self.parts[part].get("error", ""))


def ask(parts: Sequence[str], environ: Mapping[str, str], seconds: float) -> Answers:
    """Ask for some parts, in this order; what is not there after `seconds` is given up."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *parts],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    atexit.register(process.kill)  # the caller may have given up waiting when this process ends
    try:
        output, log = process.communicate(timeout=seconds)
        problem = _problem(process.returncode, log)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        problem = f"it is not done after {seconds:g} s"
    except BaseException:
        process.kill()
        process.communicate()
        raise
    finally:
        atexit.unregister(process.kill)
    return Answers(_read(output), problem, time.monotonic() - begun)


def _problem(code: int, log: str) -> str:
    if code == 0:
        return ""
    lines = [line for line in log.splitlines() if line.strip()]
    return f"{exit_text(code)}: {lines[-1].strip()}" if lines else exit_text(code)


def _read(output: str) -> dict[str, dict[str, Any]]:
    """The lines that are ours; libraries print to standard output, too."""
    found: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        try:
            content = json.loads(line)
            found[content.pop("part")] = content
        except (ValueError, TypeError, AttributeError, KeyError):
            continue
    return found
