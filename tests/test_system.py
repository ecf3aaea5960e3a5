"""What the operating system says about itself: by what it says here, and by made-up files for the rest."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rallypoint.server.machine import interfaces, limits, names, packages, ports
from rallypoint.server.machine.interfaces import Interface
from rallypoint.server.machine.names import LookUps
from rallypoint.stores.client.patience import within
from raw import SECONDS

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


# Interfaces ------------------------------------------------------------------------------------------------


def test_interfaces_that_lead_out() -> None:
    real = ["eth0", "bridge0", "ens3f1", "ib0", "bond0", "wlan0", "en0"]
    virtual = ["docker0", "br-1234", "veth12", "tun0", "tap0", "wg0", "tailscale0", "utun3"]
    virtual += ["lxdbr0", "kube-ipvs0", "vEthernet (x)"]
    assert [name for name in real + virtual if Interface(name, True, ("10.0.0.1",)).leads_out] == real
    assert Interface("eth0", True, ("fd00::1",)).leads_out
    assert not Interface("eth0", False, ("10.0.0.1",)).leads_out, "it is down"
    assert not Interface("eth0", True, ()).leads_out
    for loopback in ("127.0.0.1", "::1"):
        assert not Interface("lo", True, (loopback,)).leads_out


def test_interfaces_with_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(family: int, address: str) -> object:
        return SimpleNamespace(family=family, address=address)

    six, four, link = socket.AF_INET6, socket.AF_INET, -1
    there = {
        "eth0": [
            entry(six, "fd00::1"),
            entry(link, "00:11"),
            entry(four, "10.0.0.1"),
            entry(six, "FE80::1%eth0"),
            entry(four, "169.254.7.7"),
        ],
        "eth1": [entry(four, "169.254.7.8")],
        "gone": [],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True)})
    assert interfaces.interfaces() == [
        Interface("eth0", True, ("10.0.0.1", "fd00::1")),
        Interface("eth1", False, ()),
        Interface("gone", False, ()),
    ]


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), RuntimeError("no"), PermissionError(13, "no")])
def test_interfaces_that_the_system_does_not_tell(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr(psutil, "net_if_stats", refuse)
    with pytest.raises(OSError):  # noqa: PT011 - whatever it says
        interfaces.interfaces()


def test_this_machine_has_a_loopback() -> None:
    assert any(each.is_loopback and each.is_up for each in interfaces.interfaces())


# Limits ----------------------------------------------------------------------------------------------------


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.open_files_allowed() == resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, -1))
    assert limits.open_files_allowed() == (1024, sys.maxsize)
    monkeypatch.setattr(sys, "platform", "win32")
    assert limits.open_files_allowed() is None


def test_numbers_in_files(tmp_path: Path) -> None:
    path = tmp_path / "number"
    assert limits._number_in(str(path)) is None
    path.write_text("4096\n")
    assert limits._number_in(str(path)) == 4096
    path.write_text("many\n")
    assert limits._number_in(str(path)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells them by files")
def test_backlogs_of_this_machine() -> None:
    for found in (limits.accept_backlog(), limits.syn_backlog()):
        assert found is None or found > 0


# Names and packages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "stall"), [(0.0, False), (1.0, False), (1.001, True)])
def test_look_ups_that_stall(seconds: float, stall: bool) -> None:
    assert LookUps(3, seconds).stall == stall
    assert str(LookUps(3, 0.5)) == "3 look-ups of ::ffff:127.0.0.1 took 0.5 s"


def test_look_ups_end_when_one_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def quick(address: tuple[str, int, int, int], flags: int) -> tuple[str, str]:
        assert (address[0], flags) == ("::ffff:127.0.0.1", 0)
        clock[0] += 0.01
        raise socket.gaierror(-2, "no name")

    monkeypatch.setattr(socket, "getnameinfo", quick)
    found = names.look_up()
    assert (found.count, found.stall) == (64, False)

    def slow(*_: object) -> tuple[str, str]:
        clock[0] += 0.6
        return "localhost", "9"

    monkeypatch.setattr(socket, "getnameinfo", slow)
    clock[0] = 0.0
    answered: list[float] = []
    found = names.look_up(answered.append)
    assert (found.count, found.stall) == (2, True)
    assert answered == [0.6, 1.2]


def test_packages() -> None:
    assert packages.installed("pytest") == pytest.__version__
    assert packages.installed("no-such-package-at-all") == packages.ABSENT


# Ports -----------------------------------------------------------------------------------------------------


def test_ports_for_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "range"
    monkeypatch.setattr(ports, "_RANGE_FILE", path)
    monkeypatch.setattr(sys, "platform", "linux")
    assert ports.client_ports() == (32_768, 60_999)
    path.write_text("1024\t65000\n")
    assert ports.client_ports() == (1024, 65_000)
    path.write_text("odd\n")
    assert ports.client_ports() == (32_768, 60_999)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert ports.client_ports() == (49_152, 65_535)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS tells only root")
def test_the_process_behind_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = ["python", "-c", "import  torch\nsecret = 1", "--more"]
        monkeypatch.setattr(psutil.Process, "cmdline", lambda _: command)
        named = f"process {os.getpid()} (python -c import torch --more)"
        assert ports.holder_of(port) == named, "no program, but its start"
        assert port in ports.listening_ports()
        with socket.create_connection(listener.getsockname()) as client:
            assert ports.holder_of(client.getsockname()[1]) is None, "a client holds it"
    assert ports.holder_of(port) is None


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), PermissionError(13, "no"), RuntimeError("odd")])
def test_a_system_that_does_not_tell_who_listens(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(psutil, "net_connections", refuse)
    assert ports.holder_of(29_500) is None
    assert ports.listening_ports() == set()


def test_a_process_that_has_ended_has_no_command() -> None:
    assert ports._command_of(1 << 30) == "ended"
