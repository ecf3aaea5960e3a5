"""Full disks, few file descriptors, other users' files and links, and where the secret can be read.

What a server and a launcher do in surroundings that are exhausted or hostile, with real processes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from cable import recording
from processes import BACKENDS, serving
from rallypoint.client.file import FileStore
from rallypoint.errors import AccessError
from rallypoint.launch import reports
from rallypoint.store.connect.connection import GuardedSocket
from rallypoint.store.connect.deadline import Deadline
from rallypoint.store.server.guard.other_users import USERS_VARIABLE
from rallypoint.store.server.guard.secret import SECRET_VARIABLE, Secret
from rallypoint.store.server.guard.tls import client_channel
from raw import SECONDS, RawClient, until
from threads import prove

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs /proc and tmpfs")

_SECRET = Secret("5e" * 32, "the test")
_STRANGER = 54_321
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount, or be another user"
)


@contextmanager
def _small_disk(folder: Path, size: str = "64k") -> Iterator[Path]:
    """A file system of this size."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder])
    if mounted.returncode:
        pytest.skip("this root may not mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _fill(folder: Path) -> Path:
    """The file that fills the disk of this folder."""
    with (folder / "fill").open("wb", buffering=0) as file:
        while file.tell() < 1 << 20:
            try:
                file.write(bytes(1 << 12))
            except OSError:
                break
    assert shutil.disk_usage(folder).free == 0
    return folder / "fill"


# Exhausted -------------------------------------------------------------------------------------------------


def _offend(port: int, times: int) -> None:
    """Connect and break a rule, which the log and the events tell."""
    for _ in range(times):
        with RawClient(port) as client:
            client.send(b"\xff")
            assert client.read_rest() == b""


@needs_root
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_disk_under_the_log_and_the_events(backend: str, tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk") as disk:
        events = disk / "events.jsonl"
        with (
            (disk / "log").open("w+") as log,
            serving(backend, log, ("--events", str(events))) as server,
            RawClient(server.port) as client,
        ):
            _offend(server.port, 3)
            fill = _fill(disk)
            _offend(server.port, 3)
            for _ in range(100):  # their events need more than what is left of the last page
                with RawClient(server.port) as other:
                    assert other.answers()
            client.set(b"key", b"value")
            assert client.get(b"key") == b"value"
            refused = "cannot write events to .*: No space left on device"
            until(lambda: re.search(refused, server.read_log()), "the log tells of refused events")
            fill.unlink()
            until(lambda: '"event":"lost"' in events.read_text(), "the events file tells of lost events")
            _offend(server.port, 1)
            lost = "are written to .* again; [0-9]+ events? lost"
            until(lambda: re.search(lost, server.read_log()), "the log tells of lost events")
        for line in events.read_text().splitlines():
            json.loads(line)  # none is torn


@needs_root
def test_a_full_disk_under_a_file_store(tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk") as disk, FileStore(disk / "store") as store:
        store.set("before", b"1")
        fill = _fill(disk)
        with pytest.raises(Exception, match=r"cannot use the file .* as a store: No space left on device"):
            store.set("large", bytes(1 << 16))
        assert store.get("before") == b"1"
        fill.unlink()
        store.set("after", b"2")
        assert store.get("after") == b"2"


_JOB = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("passed", flush=True)
dist.destroy_process_group()
"""


@needs_root
@pytest.mark.slow
def test_a_job_with_full_shared_memory_and_a_full_folder_for_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_JOB)
    shell = (
        "mount -t tmpfs -o size=64k tmpfs /dev/shm && mount -t tmpfs -o size=64k tmpfs temporary || exit 77;"
        "for disk in /dev/shm temporary; do ! dd if=/dev/zero of=$disk/fill 2> /dev/null || exit 1; done;"
        'TMPDIR=$PWD/temporary exec "$@"'
    )
    (tmp_path / "temporary").mkdir()
    job = _start(["unshare", "--mount", "sh", "-c", shell, "sh", *_run_two()], tmp_path)
    said, _ = job.communicate(timeout=240)
    if job.returncode == 77:
        pytest.skip("this root may not mount")
    assert (job.returncode, said.count("passed")) == (0, 2), said


def _run_two() -> list[str]:
    words = ["run", "--nproc-per-node=2", "train.py"]
    return [sys.executable, "-m", "rallypoint", *words]


def _start(command: Sequence[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_clients_beyond_64_file_descriptors_wait_and_the_others_are_served(backend: str) -> None:
    with serving(backend) as server, RawClient(server.port) as one:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (64, 64))
        many = [socket.create_connection(("127.0.0.1", server.port), SECONDS) for _ in range(100)]
        until(lambda: "Too many open files; they wait" in server.read_log(), "there is no room")
        assert one.answers()
        for sock in many:
            sock.close()
        with RawClient(server.port) as late:
            assert late.answers()


# Hostile ---------------------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o777], ids=["sticky", "open"])
def test_a_file_store_that_another_user_has_put_there(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of everybody's, it is refused before anything in it is read or changed."""
    folder = tmp_path / "everybodys"
    folder.mkdir()
    folder.chmod(mode)
    path = folder / "store"
    path.write_text("theirs")
    path.chmod(0o666)
    os.chown(path, _STRANGER, _STRANGER)
    with pytest.raises(Exception, match=rf"another user, uid {_STRANGER}|Permission denied"):
        FileStore(path)
    assert path.read_text() == "theirs"
    if mode & 0o1000 and Path("/proc/sys/fs/protected_regular").read_text().strip() != "0":
        return  # the kernel itself refuses it
    path.write_text("")  # as good as none
    monkeypatch.setenv(USERS_VARIABLE, str(_STRANGER))
    FileStore(path).close()


@needs_root
def test_a_file_store_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    """There, the file may be another user's: some file systems of several machines change owners."""
    path = tmp_path / "store"
    path.touch()
    os.chown(path, _STRANGER, _STRANGER)
    with FileStore(path) as store:
        store.set("key", b"value")


def test_links_in_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher removes folders of launchers that are gone, and nothing that a link leads to."""
    temporary, precious = tmp_path / "temporary", tmp_path / "precious"
    for folder in (temporary, precious):
        folder.mkdir()
    for name in ("owner", "data"):
        (precious / name).write_text("precious")
    (temporary / "rallypoint-link").symlink_to(precious)
    (temporary / "rallypoint-file").mkdir()
    (temporary / "rallypoint-file" / "owner").symlink_to(precious / "owner")
    (temporary / "rallypoint-of-another-kind").mkdir()
    (temporary / "rallypoint-gone").mkdir()
    (temporary / "rallypoint-gone" / "owner").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with reports.new_folder() as folder, reports.new_folder():
        assert folder.stat().st_mode & 0o777 == 0o700
        assert not (temporary / "rallypoint-gone").exists()
    left = {each.name for each in temporary.iterdir()}
    assert left >= {"rallypoint-link", "rallypoint-of-another-kind"}
    assert sorted(each.name for each in precious.iterdir()) == ["data", "owner"]
    assert {each.read_text() for each in precious.iterdir()} == {"precious"}


# The secret ------------------------------------------------------------------------------------------------


def test_a_recorded_handshake_is_worth_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, _SECRET.text)
    with serving("auto", host="0.0.0.0") as server:
        with (
            recording(server.port) as (port, said, _),
            socket.create_connection(("127.0.0.1", port), SECONDS) as sock,
        ):
            prove(sock, _SECRET)
        assert len(said) >= 3
        for at_once in (False, True):
            with RawClient(server.port, shake_hands=False) as replay:
                for message in [b"".join(said)] if at_once else said:
                    try:
                        replay.send(message)
                        answer = replay.sock.recv(1 << 16)
                    except ConnectionError:  # it is closed already
                        break
                    assert b"ping" not in answer
                    if not answer:
                        break
                else:
                    assert replay.read_rest() == b""
            until(lambda: server.read_log().count("TLS failed") == 1 + at_once, "it is refused")  # noqa: B023


def _call(*words: str, **variables: str) -> str:
    environ = {**os.environ, **variables}
    made = subprocess.run(
        [sys.executable, "-m", "rallypoint", *words], env=environ, capture_output=True, text=True, timeout=120
    )
    return made.stdout + made.stderr


@pytest.mark.slow
def test_the_secret_is_in_nothing_that_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log, events, status, page and metrics; and those who fail to prove it hear nothing of it."""
    monkeypatch.setenv(SECRET_VARIABLE, _SECRET.text)
    events = tmp_path / "events.jsonl"
    options = ("--events", str(events), "--web", "0")
    with serving("auto", options=options, host="0.0.0.0") as server:
        other = Secret("07" * 32, "the test")
        for secret in (_SECRET, other):
            with socket.create_connection(("127.0.0.1", server.port), SECONDS) as sock:
                client = GuardedSocket(sock, client_channel("localhost", secret), Deadline(SECONDS))
                if secret is other:
                    with pytest.raises(AccessError) as refused:
                        client.open()
                else:
                    client.open()
        until(lambda: "the page is at " in server.read_log(), "the page is up")
        [page] = re.findall(r"the page is at (http://\S+)", server.read_log())
        shown = [repr(refused.value)]
        for part in ("", "metrics"):
            with urllib.request.urlopen(urllib.parse.urljoin(page, part), timeout=SECONDS) as answer:
                shown.append(answer.read().decode())
        place = f"127.0.0.1:{server.port}"
        shown += [_call("status", place), _call("status", "--json", place)]
        until(lambda: '"event":"error"' in events.read_text(), "the events are written")
        shown += [events.read_text(), server.read_log()]
        command_line = Path(f"/proc/{server.process.pid}/cmdline").read_text()
    shown += [command_line, _call("run", "--show-config", "train.py")]
    for text in shown:
        for form in (_SECRET.text, _SECRET.text.upper(), repr(bytes.fromhex(_SECRET.text))[2:-1]):
            assert form not in text
    assert "it does not prove" in shown[0]


_LOOK_ROUND = """
import os, sys
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
found = []
needle = Path("needle").read_bytes()
for process in Path("/proc").iterdir():
    for name in ("environ", "cmdline"):
        try:
            text = (process / name).read_bytes()
        except OSError:
            continue
        if process.name.isdigit() and needle in text:
            found.append((name, (process / "cmdline").read_bytes().split(b"\\0")[3].decode()))
print("found", sorted(set(found)), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_secret_is_in_no_process_but_the_launcher_that_was_given_it(tmp_path: Path) -> None:
    secret = os.urandom(32).hex()
    (tmp_path / "needle").write_text(secret)
    (tmp_path / "train.py").write_text(_LOOK_ROUND)
    job = _start(_run_two(), tmp_path, **{SECRET_VARIABLE: secret})
    said, _ = job.communicate(timeout=240)
    assert job.returncode == 0, said
    assert said.count("found [('environ', 'run')]") == 2, said
