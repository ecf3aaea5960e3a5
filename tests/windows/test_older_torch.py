"""A torch for Windows of any release: its refusal is known, and a job comes up on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from rallypoint.pytorch.substitution import Fault, fault_in

pytestmark = pytest.mark.windows

# A master as every release makes it by default, one on a socket that the caller has opened, and a group.
JOB = """
import socket
from datetime import timedelta
import torch.distributed as dist

master = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), False)
client = dist.TCPStore("127.0.0.1", master.port, None, False, timedelta(seconds=30), False)
master.set("key", "value")
assert client.get("key") == b"value"

listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
on_socket = dist.TCPStore(
    "127.0.0.1", port, None, True, timedelta(seconds=30), False, master_listen_fd=listener.detach()
)
assert on_socket.port == port and on_socket.add("n", 1) == 1

try:
    dist.init_process_group("gloo")
except RuntimeError as error:
    assert "unsupported gloo device" in str(error)  # 2.7 and 2.8: their gloo has none on Windows
print("came up")
"""


@pytest.mark.parametrize("is_master", [True, False])
def test_the_words_of_its_refusal_are_known(is_master: bool) -> None:
    with pytest.raises(RuntimeError) as caught:
        dist.TCPStore("127.0.0.1", 29_500, None, is_master, wait_for_workers=False, use_libuv=True)
    assert fault_in(caught.value) is Fault.NO_LIBUV


@pytest.mark.timeout(400)  # launcher and rank import torch, one after the other
def test_a_job_comes_up(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    command = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node=1", str(tmp_path / "job.py")]
    with (tmp_path / "output").open("w+", encoding="utf-8") as output:
        ran = subprocess.run(command, stdout=output, stderr=output, timeout=380)
        output.seek(0)
        said = output.read()
    assert ran.returncode == 0, said
    assert "came up" in said
