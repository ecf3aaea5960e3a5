"""What the operating system says about itself: by what it says here, and by made-up files for the rest."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from rallypoint.server.machine import limits, names, packages, ports
from rallypoint.stores.client.patience import within
from raw import SECONDS

# Patience --------------------------------------------------------------------------------------------------


def test_a_call_that_has_an_answer() -> None:
    assert within(SECONDS, lambda: 3) == 3
    assert within(SECONDS, lambda: None) is None


def test_a_call_that_fails() -> None:
    def fail() -> int:
        raise socket.gaierror(-2, "no such name")

    with pytest.raises(socket.gaierror, match="no such name"):
        within(SECONDS, fail)


def test_a_call_that_has_no_answer_in_time() -> None:
    never = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
            within(0.01, lambda: never.wait(SECONDS))
    finally:
        never.set()


# Limits ----------------------------------------------------------------------------------------------------


def test_numbers_in_files(tmp_path: Path) -> None:
    path = tmp_path / "number"
    assert limits._number_in(str(path)) is None
    path.write_text("4096\n")
    assert limits._number_in(str(path)) == 4096
    path.write_text("many\n")
    assert limits._number_in(str(path)) is None


# Names and packages ----------------------------------------------------------------------------------------


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

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def row(port: int, state: str, inode: int) -> str:
    rest = f"00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0000 100"
    return f"   0: 0100007F:{port:04X} 00000000:0000 {state} {rest}\n"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc of two processes, of which the second holds a socket."""
    (tmp_path / "net").mkdir()
    (tmp_path / "sys/net/ipv4").mkdir(parents=True)
    for number in ("41", "42"):
        (tmp_path / number / "fd").mkdir(parents=True)
    (tmp_path / "42/cmdline").write_bytes(b"python\0train.py\0--name=a\nb\0")
    os.symlink("socket:[777]", tmp_path / "42/fd/3")
    os.symlink("/dev/null", tmp_path / "42/fd/0")
    monkeypatch.setattr(ports, "_PROC", tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_who_listens_on_a_port(proc: Path) -> None:
    (proc / "net/tcp").write_text(HEADER + row(29_500, "0A", 777) + row(4000, "01", 778))
    (proc / "net/tcp6").write_text(HEADER + row(5000, "0A", 779))
    assert ports.holder_of(29_500) == "process 42 (python train.py --name=a)"
    (proc / "42/cmdline").write_bytes(b"python\0-c\0import  torch\nsecret = 1\0--more\0")
    assert ports.holder_of(29_500) == "process 42 (python -c import torch --more)", (
        "no program, but its start"
    )
    assert ports.holder_of(5000) is None
    assert ports.holder_of(4000) is None
    assert ports.listening_ports() == {29_500, 5000}
    (proc / "42/cmdline").unlink()
    assert ports.holder_of(29_500) == "process 42 (ended)"


def test_without_proc_nobody_is_named(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_PROC", proc / "none")
    assert ports.holder_of(29_500) is None
    assert ports.listening_ports() == set()
    assert ports.client_ports() == (32_768, 60_999)


def test_ports_for_clients(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = proc / "sys/net/ipv4/ip_local_port_range"
    path.write_text("1024\t65000\n")
    assert ports.client_ports() == (1024, 65_000)
    path.write_text("odd\n")
    assert ports.client_ports() == (32_768, 60_999)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert ports.client_ports() == (49_152, 65_535)
