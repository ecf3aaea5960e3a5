"""Runs a Python command in a fork of a template, for comparison with the same command in a new process.

`python forking.py [--preload=MODULE,...] [-m] TARGET ARGS`; it ends as the command ends.
"""

from __future__ import annotations

import os
import signal
import sys

from rallypoint.launch.template.template import Refused, start_template


def main(words: list[str]) -> int:
    preloaded = words.pop(0).partition("=")[2].split(",") if words[0].startswith("--preload=") else []
    template = start_template()
    if isinstance(template, Refused):
        sys.stderr.write(f"refused: {template.reason}\n")
        return 125
    for fault in template.preload_now(preloaded):
        sys.stderr.write(f"{fault.package}: {fault.reason}\n")
    rank = template.start([sys.executable, "-u", *words], {**os.environ, "RANK": "0"}, None, None)
    if isinstance(rank, Refused):
        sys.stderr.write(f"refused: {rank.reason}\n")
        return 126
    code = rank.wait()
    template.close()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
