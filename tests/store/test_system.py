"""What the operating system says about itself: by what it says here, and by made-up files for the rest."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rallypoint.store.connect.deadline import within
from rallypoint.store.machine import interfaces, system
from raw import SECONDS

pytestmark = pytest.mark.windows

# Patience --------------------------------------------------------------------------------------------------


def test_calls_that_answer_fail_or_do_neither() -> None:
    assert within(SECONDS, lambda: 3) == 3
    assert within(SECONDS, lambda: None) is None
    with pytest.raises(ValueError, match="invalid literal"):
        within(SECONDS, lambda: int("x"))
    never = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
            within(0.01, lambda: never.wait(SECONDS))
    finally:
        never.set()


# Limits ----------------------------------------------------------------------------------------------------


def test_numbers_in_files(tmp_path: Path) -> None:
    path = tmp_path / "number"
    assert system._number_in(str(path)) is None
    path.write_text("4096\n")
    assert system._number_in(str(path)) == 4096
    path.write_text("many\n")
    assert system._number_in(str(path)) is None


# Names and packages ----------------------------------------------------------------------------------------


def test_look_ups_end_when_one_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def quick(address: tuple[str, int, int, int], flags: int) -> tuple[str, str]:
        assert (address[0], flags) == ("::ffff:127.0.0.1", 0)
        clock[0] += 0.01
        raise socket.gaierror(-2, "no name")

    monkeypatch.setattr(socket, "getnameinfo", quick)
    found = interfaces.time_look_ups()
    assert (found.count, found.stall) == (64, False)

    def slow(*_: object) -> tuple[str, str]:
        clock[0] += 0.6
        return "localhost", "9"

    monkeypatch.setattr(socket, "getnameinfo", slow)
    clock[0] = 0.0
    answered: list[float] = []
    found = interfaces.time_look_ups(answered.append)
    assert (found.count, found.stall) == (2, True)
    assert answered == [0.6, 1.2]


def test_packages() -> None:
    assert system.installed("pytest") == pytest.__version__
    assert system.installed("no-such-package-at-all") == system.ABSENT


# Ports -----------------------------------------------------------------------------------------------------


def test_ports_for_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "range"
    monkeypatch.setattr(system, "_RANGE_FILE", path)
    monkeypatch.setattr(sys, "platform", "linux")
    assert system.client_ports() == (32_768, 60_999)
    path.write_text("1024\t65000\n")
    assert system.client_ports() == (1024, 65_000)
    path.write_text("odd\n")
    assert system.client_ports() == (32_768, 60_999)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert system.client_ports() == (49_152, 65_535)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS tells only root")
def test_the_process_behind_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = ["python", "-c", "import  torch\nsecret = 1", "--more"]
        monkeypatch.setattr(psutil.Process, "cmdline", lambda _: command)
        named = f"process {os.getpid()} (python -c import torch --more)"
        assert system.holder_of(port) == named, "no program, but its start"
        assert port in system.listening_ports()
        with socket.create_connection(listener.getsockname()) as client:
            assert system.holder_of(client.getsockname()[1]) is None, "a client holds it"
    assert system.holder_of(port) is None


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), PermissionError(13, "no"), RuntimeError("odd")])
def test_a_system_that_does_not_tell_who_listens(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(psutil, "net_connections", refuse)
    assert system.holder_of(29_500) is None
    assert system.listening_ports() == set()


def test_a_process_that_has_ended_has_no_command() -> None:
    assert system._command_of(1 << 30) == "ended"
