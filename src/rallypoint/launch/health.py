"""Whether this machine is fit to take part in a job, by the doctor's checks, in a process of their own.

A GPU's driver, a file system or a resolver may never answer. So the checks have a deadline, and a machine of
which they say nothing in time counts as fit: no healthy machine is late or left out because of them.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Final

from rallypoint.errors import RallypointError

logger = logging.getLogger("rallypoint.health")

SECONDS: Final = {"quick": 3.0, "full": 120.0}
"""The kinds of examination, and how long each may take."""


class UnfitError(RallypointError):
    """This machine is not fit to take part in the job."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(
            f"this machine is not fit to take part: {reason}",
            hint=f"rallypoint doctor --health={kind} says more; --health=off takes the machine as it is",
        )


def why_unfit(kind: str) -> str:
    """Why this machine is not fit to take part; nothing if it is, or if that is not known in time.

    `kind`: quick, full or off, which examines nothing.
    """
    if kind not in SECONDS:
        return ""
    here = ["-P"] if sys.version_info >= (3, 11) else []  # nothing of the job's folder is imported
    command = [sys.executable, *here, "-m", "rallypoint", "doctor", f"--health={kind}", "--json"]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=SECONDS[kind], check=False)
        findings = json.loads(ended.stdout)["findings"]
    except subprocess.TimeoutExpired:
        logger.warning("rallypoint: this machine was not examined within %g s", SECONDS[kind])
        return ""
    except (OSError, ValueError, KeyError) as error:
        logger.warning("rallypoint: this machine could not be examined: %r", error)
        return ""
    return "; ".join(str(each["found"]) for each in findings if each["state"] == "failure")
