"""The tests run where they mean to: on Windows, with the project installed and a torch without libuv."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import rallypoint

pytestmark = pytest.mark.windows


def test_the_project_is_installed_on_a_drive_of_windows() -> None:
    assert Path(rallypoint.__file__).drive == "C:"
    assert [entry.module for entry in entry_points(group="torch.backends", name="rallypoint")] == [
        "rallypoint.pytorch.autoload"
    ]
    said = subprocess.run(["rallypoint", "--version"], capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout.strip()) == (0, f"rallypoint {rallypoint.__version__} (pure Python)")


def test_torch_refuses_libuv_in_the_words_that_people_search_for() -> None:
    code = "import torch.distributed as dist; dist.TCPStore('127.0.0.1', 0, is_master=True, use_libuv=True)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert said.returncode == 1
    assert "use_libuv was requested but PyTorch was built without libuv support" in said.stderr
