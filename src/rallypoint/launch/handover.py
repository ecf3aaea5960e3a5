"""What a launcher hands to the processes of its job: one record, in one variable that they inherit.

Every Python process of a job reads it at its start, in `pytorch/injection/sitecustomize.py`. That imports
nothing of Rallypoint and takes the fields apart itself. So the record is no JSON: importing `json` would
delay each of these processes by milliseconds.

Two facts stay in variables of their own, which clients read that know nothing of launchers: RALLYPOINT_RELAY,
which is public, and RALLYPOINT_RELAY_OF beside it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

VARIABLE: Final = "RALLYPOINT_JOB"


class Handover(NamedTuple):
    """The record. A NamedTuple, as `rallypoint.step` reads it and `dataclasses` takes long to import."""

    reports: Path | None = None
    """The folder in which processes leave reports for their launcher; None: it asks for none."""
    signals: tuple[int, ...] = ()
    """For ranks: the signals that ask them for their stacks; empty: they are not asked."""
    scheduled: str = ""
    """Which job of a scheduler has become this one: a launcher within a rank does not take it for its own."""
    lifeline: int = -1
    """For torchrun's agent: a pipe that has the job's secret, and that ends when the launcher does."""

    def variables(self) -> dict[str, str]:
        """The variable that `read_handover` reads."""
        fields = {
            "reports": str(self.reports or ""),
            "signals": ",".join(map(str, self.signals)),
            "scheduled": self.scheduled,
            "lifeline": str(self.lifeline) if self.lifeline >= 0 else "",
        }
        return {VARIABLE: ";".join(f"{name}={_escape(text)}" for name, text in fields.items() if text)}


def read_handover(environ: Mapping[str, str]) -> Handover:
    """What the launcher of the process with this environment has handed to it."""
    pairs = (part.partition("=") for part in environ.get(VARIABLE, "").split(";"))
    fields = {name: text.replace("%3B", ";").replace("%25", "%") for name, _, text in pairs}
    folder, lifeline = fields.get("reports"), fields.get("lifeline", "")
    return Handover(
        Path(folder) if folder else None,
        tuple(int(each) for each in fields.get("signals", "").split(",") if each.isdecimal()),
        fields.get("scheduled", ""),
        int(lifeline) if lifeline.isdecimal() else -1,
    )


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace(";", "%3B")
