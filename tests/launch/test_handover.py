"""What a launcher hands to its processes is read as it was written, also by `sitecustomize`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.launch.handover import VARIABLE, Handover, read_handover
from rallypoint.pytorch.injection.rallypoint_hooks import read_job


@pytest.mark.parametrize(
    "given",
    [
        Handover(),
        Handover(Path("/tmp/a;b=c%3B ä"), (62, 61), "4711.0;%25=x", 7),
        Handover(Path("folder"), (0,)),
        Handover(scheduled="job"),
        Handover(lifeline=0),
    ],
)
def test_it_is_read_as_it_was_written(given: Handover) -> None:
    variables = given.variables()
    assert read_handover(variables) == given
    assert read_job(variables[VARIABLE]) == (str(given.reports or ""), list(given.signals))


@pytest.mark.parametrize("environ", [{}, {VARIABLE: ""}, {VARIABLE: ";;=;signals=x,1;lifeline=-3;new=1"}])
def test_what_nobody_has_written_is_no_error(environ: dict[str, str]) -> None:
    assert read_handover(environ)._replace(signals=()) == Handover()
