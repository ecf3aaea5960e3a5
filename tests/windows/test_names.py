"""What Windows has of its own: drives, ports that others could take, and unusual names of files."""

from __future__ import annotations

import socket
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import rallypoint
from processes import serving
from rallypoint.client.file import FileStore
from rallypoint.errors import PortInUseError
from rallypoint.store.rollcall.events import Left
from rallypoint.store.server.events import EventLog
from rallypoint.store.server.process.binding import listen
from raw import RawClient

pytestmark = pytest.mark.windows

FOLDERS = ["Gr\u00fc\u00dfe aus K\u00f6ln", "\u8bad\u7ec3 (1)", "a folder & a bit more"]


def test_the_project_is_installed_on_a_drive_of_windows() -> None:
    assert Path(rallypoint.__file__).drive == "C:"
    assert [entry.module for entry in entry_points(group="torch.backends", name="rallypoint")] == [
        "rallypoint.pytorch.autoload"
    ]
    said = subprocess.run(["rallypoint", "--version"], capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout.strip()) == (0, f"rallypoint {rallypoint.__version__} (pure Python)")


def test_nobody_takes_the_port_of_a_server() -> None:
    """Who says SO_REUSEADDR may take any port there, unless its owner has said that it is its alone."""
    (listener,) = listen("127.0.0.1", 0)
    with listener, socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError):  # noqa: PT011, its number is another one as the system likes it
            thief.bind(listener.getsockname())
        with pytest.raises(PortInUseError, match="is in use"):
            listen("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize("folder", FOLDERS)
def test_stores_and_logs_in_folders_with_any_name(folder: str, tmp_path: Path) -> None:
    place = tmp_path / folder
    place.mkdir()
    with FileStore(place / "the store") as first, FileStore(place / "the store") as second:
        first.set("key", "value")
        assert second.get("key") == b"value"
    log = EventLog(place / "events \u00e4.jsonl")
    log.put(Left(1.0, 1))
    log.close()
    assert (place / "events \u00e4.jsonl").read_text(encoding="utf-8").count("\n") == 1
    with (place / "log").open("w+", encoding="utf-8") as written:
        options = ["--events", str(place / "server \u00fc.jsonl")]
        with serving("auto", written, options) as server, RawClient(server.port) as client:
            assert client.answers()
    assert [path.name for path in place.glob("*.jsonl")] == ["events \u00e4.jsonl", "server \u00fc.jsonl"]


def test_a_path_longer_than_260_characters(tmp_path: Path) -> None:
    place = tmp_path / ("long" * 20) / ("longer" * 20) / ("longest" * 10)
    try:
        place.mkdir(parents=True)
    except OSError:
        pytest.skip("this Windows has no long paths switched on")
    with FileStore(place / "store") as store:
        store.set("key", "value")
    assert not (place / "store").exists()
