"""Which backend serves: the routes of the choice, their priority, and a libuv that is not there."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import psutil
import pytest

from processes import serving
from rallypoint.client.tcp import TCPStore
from rallypoint.errors import UsageError
from rallypoint.store.server.loops.backend import Choice, choose, parse_switch
from raw import RawClient

pytestmark = pytest.mark.windows

PACKAGE = "winloop" if sys.platform == "win32" else "uvloop"
LIBUV, LEGACY = {"USE_LIBUV": "1"}, {"USE_LIBUV": "0"}


@pytest.mark.parametrize(
    ("argument", "query", "environ", "expected"),
    [
        (None, None, {}, Choice.AUTO),
        (None, None, {"USE_LIBUV": ""}, Choice.AUTO),
        (None, None, LIBUV, Choice.LIBUV),
        (None, None, LEGACY, Choice.LEGACY),
        (None, "1", {}, Choice.LIBUV),
        (None, "0", LIBUV, Choice.LEGACY),
        (None, "1", LEGACY, Choice.LIBUV),
        (True, None, LEGACY, Choice.LIBUV),
        (True, "0", LEGACY, Choice.LIBUV),
        (False, "1", LIBUV, Choice.LEGACY),
        (False, None, {}, Choice.LEGACY),
        (True, "maybe", {"USE_LIBUV": "maybe"}, Choice.LIBUV),
        (None, "off", {"USE_LIBUV": "maybe"}, Choice.LEGACY),
    ],
)
def test_argument_over_query_over_variable(
    argument: bool | None, query: str | None, environ: dict[str, str], expected: Choice
) -> None:
    assert choose(argument, query, environ) is expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["1", "true", "True", "TRUE", "on", "On"], True),
        (["0", "false", "False", "FALSE", "off", "OFF"], False),
    ],
)
def test_switches_in_any_case(texts: list[str], expected: bool) -> None:
    assert [parse_switch(text, "it") for text in texts] == [expected] * len(texts)


@pytest.mark.parametrize("text", ["yes", "2", ""])
def test_anything_else_is_a_usage_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=f"URL is '{text}'.*\n.*0, 1, true, false, on, off"):
        choose(None, text, {})
    monkeypatch.setenv("USE_LIBUV", text or "maybe")
    with pytest.raises(UsageError, match="the variable USE_LIBUV is '"):
        TCPStore("localhost", 0, is_master=True)


def server_of_this_process() -> psutil.Process:
    """The one hosted server that this process has; those that other tests left behind have ended."""
    alive = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    (server,) = (
        child for child in alive if "rallypoint.store.server.process.child" in " ".join(child.cmdline())
    )
    return server


def has_loaded_libuv(process: psutil.Process) -> bool:
    return any(PACKAGE in mapped.path for mapped in process.memory_maps())


@pytest.mark.parametrize(
    ("argument", "variable", "libuv"), [(None, None, True), (True, "0", True), (None, "off", False)]
)
def test_the_store_tells_which_backend_serves(
    argument: bool | None, variable: str | None, libuv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("USE_LIBUV", raising=False)
    if variable is not None:
        monkeypatch.setenv("USE_LIBUV", variable)
    with TCPStore("localhost", 0, is_master=True, use_libuv=argument) as store:
        assert store.libuvBackend is libuv
        assert has_loaded_libuv(server_of_this_process()) is libuv
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_client_tells_what_it_was_told() -> None:
    with TCPStore("localhost", 0, is_master=True, use_libuv=False) as master:
        for choice in (True, False):
            with TCPStore("localhost", master.port, use_libuv=choice) as client:
                assert client.libuvBackend is choice


@pytest.fixture
def without_libuv(tmp_path: Path) -> Path:
    """A folder that, when it is the first to be searched, makes the import of libuv's package fail."""
    package = tmp_path / "first" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libuv.so.1: no such file')\n")
    return package.parent


@pytest.mark.parametrize(("argument", "variable"), [(True, None), (None, "1"), (None, None)])
def test_a_hosted_server_without_libuv_falls_back(
    argument: bool | None,
    variable: str | None,
    without_libuv: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("USE_LIBUV", raising=False)
    if variable is not None:
        monkeypatch.setenv("USE_LIBUV", variable)
    monkeypatch.syspath_prepend(without_libuv)
    with TCPStore("localhost", 0, is_master=True, use_libuv=argument) as store:
        assert store.libuvBackend is False
        assert not has_loaded_libuv(server_of_this_process())
        store.set("key", "value")
        assert store.get("key") == b"value"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    wanted = argument is True or variable == "1"
    assert len(warnings) == (1 if wanted else 0)
    if wanted:
        assert f"{PACKAGE} cannot be imported (libuv.so.1: no such file)" in warnings[0]
        assert f"pip install {PACKAGE}" in warnings[0]
    assert "libuv" not in "".join(capfd.readouterr()), "the server process has warned once more"


@pytest.mark.parametrize(("backend", "warnings"), [("libuv", 1), ("auto", 0)])
def test_serve_without_libuv_falls_back(
    backend: str, warnings: int, without_libuv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(without_libuv), prepend=os.pathsep)
    with serving(backend) as server:
        assert server.backend == "legacy"
        with RawClient(server.port) as client:
            assert client.answers()
        assert server.read_log().count(f"{PACKAGE} cannot be imported") == warnings
