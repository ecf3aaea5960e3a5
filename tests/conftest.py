"""Fixtures that more than one test module uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from processes import BACKENDS, Server, relaying, serving


@contextmanager
def _serving(backend: str, relays: int, folder: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        log = stack.enter_context((folder / "server.log").open("w+"))
        running = stack.enter_context(serving(backend, log))
        for _ in range(relays):
            running = stack.enter_context(relaying(running.address, log))
        yield running


@pytest.fixture(params=BACKENDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server process, once on each backend."""
    with _serving(request.param, 0, tmp_path) as running:
        yield running


@pytest.fixture(
    params=[
        *(pytest.param((backend, 0), id=backend) for backend in BACKENDS),
        pytest.param(("libuv", 1), id="relay"),
        pytest.param(("libuv", 2), id="relay on a relay", marks=pytest.mark.slow),
    ]
)
def any_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """What clients may find at the address that they are given: a server on each backend, or a relay."""
    backend, relays = request.param
    with _serving(backend, relays, tmp_path) as running:
        yield running
