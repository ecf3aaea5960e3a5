"""Fixtures that more than one test module uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import BACKENDS, Server, serving


@pytest.fixture(params=BACKENDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server process, once on each backend."""
    with (tmp_path / "server.log").open("w+") as log, serving(request.param, log) as running:
        yield running
