"""`rallypoint enable`: in an environment that says so, every torch comes up by itself; in no other."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from command_line import invoke
from processes import hand_over
from rallypoint.diagnose.verify import SIMULATION
from rallypoint.errors import RallypointError
from rallypoint.launch.environment import isolating_file, put_on_path
from rallypoint.pytorch import autoload

_STORE = """
import torch.distributed as dist
print(type(dist.TCPStore("127.0.0.1", 0, is_master=True)).__name__)
"""


class _Environment:
    """A Python environment of its own, with the packages of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self._python = folder / "bin" / "python"
        packages = put_on_path({}, Path(sysconfig.get_path("purelib")))
        source = put_on_path(packages, Path(__file__).parents[2] / "src")  # an editable install is not seen
        self._environ = {**os.environ, **source, "OMP_NUM_THREADS": "1"}

    def run(self, *words: str, simulate: str = "") -> subprocess.CompletedProcess[str]:
        environ = self._environ
        if simulate:
            environ = {**put_on_path(environ, SIMULATION), "RALLYPOINT_SIMULATE": simulate}
        return subprocess.run(
            [str(self._python), *words], env=environ, capture_output=True, text=True, timeout=180
        )


@pytest.mark.skipif(sys.platform == "win32", reason="environments are laid out otherwise there")
def test_in_an_environment_that_says_so_torch_comes_up_by_itself(tmp_path: Path) -> None:
    place = _Environment(tmp_path / "env")
    enabled = place.run("-m", "rallypoint", "enable")
    assert enabled.returncode == 0, enabled.stderr
    helped = place.run("-c", _STORE, simulate="no-libuv")
    assert (helped.returncode, helped.stdout) == (0, "TCPStore\n"), helped.stderr


def test_torch_is_helped_from_enable_to_disable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What torch calls when it is imported, in this process."""
    calls: list[str] = []
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("rallypoint.pytorch.autoload.substitute", lambda: calls.append("helped"))
    monkeypatch.setitem(sys.modules, "torch.distributed", sys)  # it has been imported
    helped = []
    for command in ("enable", "disable", "disable"):  # the last: nothing to do
        assert invoke(command).exit_code == 0
        calls.clear()
        autoload.activate()
        helped.append(len(calls))
    assert helped == [1, 0, 0]


def test_a_process_of_a_run_that_ignores_pythonpath_is_helped_by_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such are the Pythons of applications for Windows, with a `._pth` file; and those with -E or -I."""
    calls: list[str] = []
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("rallypoint.pytorch.autoload.substitute", lambda: calls.append("helped"))
    monkeypatch.setitem(sys.modules, "torch.distributed", sys)
    hand_over(monkeypatch, tmp_path)
    before = sys.excepthook
    monkeypatch.setitem(sys.modules, "rallypoint_hooks", sys)  # the folder on PYTHONPATH was found
    autoload.activate()
    assert (calls, sys.excepthook) == ([], before)
    monkeypatch.delitem(sys.modules, "rallypoint_hooks")
    autoload.activate()
    assert calls == ["helped"]
    error = ValueError("the learning rate is a banana")
    sys.excepthook(ValueError, error, None)
    assert "banana" in next(tmp_path.glob("failed-*.json")).read_text()


def test_a_python_that_ignores_pythonpath_and_lacks_rallypoint_is_found(tmp_path: Path) -> None:
    portable = tmp_path / "my app ä" / "python_embeded"
    accelerate = portable / "Scripts" / "accelerate.exe"
    accelerate.parent.mkdir(parents=True)
    assert isolating_file(portable / "python.exe") is None
    listing = portable / "python311._pth"
    lines = "python311.zip\n.\n..\n# a comment\nLib/mehr ä  # ours\n"
    listing.write_text(f"{lines}import site\n", encoding="utf-8")
    (portable.parent / "rallypoint").mkdir()  # a clone, which is no package
    assert isolating_file(portable / "python.exe") == isolating_file(accelerate) == listing
    for packages in ("Lib/mehr ä", "Lib/site-packages"):
        package = portable / packages / "rallypoint" / "__init__.py"
        package.parent.mkdir(parents=True)
        package.touch()
        assert isolating_file(portable / "python.exe") is isolating_file(accelerate) is None
        package.unlink()
    package.touch()
    listing.write_text(f"{lines}#import site\n", encoding="utf-8")
    assert isolating_file(portable / "python.exe") == listing


def test_nothing_escapes_into_the_import_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("anything")

    monkeypatch.setattr("rallypoint.launch.switches.enabling_file", fail)
    autoload.activate()


def test_an_environment_that_cannot_be_written_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("rallypoint.cli.enable.enabling_file", lambda: blocked / "rallypoint" / "enabled")
    result = invoke("enable")
    assert isinstance(result.exception, RallypointError)
    assert "rallypoint run" in result.exception.hint


def test_the_plug_ins_are_registered() -> None:
    assert [each.value for each in entry_points(group="torchrun.handlers", name="rallypoint")]
    assert [each.value for each in entry_points(group="torch.backends", name="rallypoint")]
