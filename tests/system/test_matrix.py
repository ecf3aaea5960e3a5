"""Real two-rank trainings by every route: with torch as it is and without libuv, whatever USE_LIBUV says.

Not marked as slow is the one for which Rallypoint is there: torchrun on a torch without libuv, and nothing
said.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.diagnose.verify import trainings
from rallypoint.diagnose.verify.routes import BY_NAME, ROUTES, Build, Route
from rallypoint.diagnose.verify.trainings import Result, TrainingSettings

_SECONDS = 180.0

# A training that loses its port is run again.
pytestmark = pytest.mark.timeout(2 * _SECONDS + 60)


def _train(route: Route, build: Build, use_libuv: str | None = None) -> Result:
    if route.missing:
        pytest.skip(f"{route.missing} is not installed")
    return trainings.run(route, build, TrainingSettings(use_libuv=use_libuv, seconds=_SECONDS))


def _assert_trained(result: Result) -> None:
    assert result.ok, "\n".join([*result.problems, result.log])
    assert {report.backend for report in result.reports} == {"gloo"}


# The training; afterwards, each rank prints the names of its threads.
_THREADS = """
import importlib.util, os, pathlib
spec = importlib.util.spec_from_file_location("training", {script!r})
training = importlib.util.module_from_spec(spec)
spec.loader.exec_module(training)
training.main()
names = [file.read_text().strip() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
os.write(1, ("\\nthreads: " + ", ".join(names) + "\\n").encode())
"""


@pytest.mark.slow
def test_torchrun_trains_without_libuv_and_leaves_no_thread_that_could_abort_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo's threads end with the process group, if nothing holds it when it is destroyed."""
    if sys.platform.startswith("linux"):  # where threads are listed in /proc
        (tmp_path / "training.py").write_text(_THREADS.format(script=str(trainings.SCRIPT)))
        monkeypatch.setattr(trainings, "SCRIPT", tmp_path / "training.py")
    result = _train(BY_NAME["torchrun-standalone"], Build.WITHOUT_LIBUV)
    _assert_trained(result)
    if sys.platform.startswith("linux"):
        assert len(re.findall(r"^threads: .*(?:python|pt_)", result.log, re.MULTILINE)) == 2, result.log
        assert not re.search(r"^threads: .*gloo", result.log, re.MULTILINE), result.log


def _cases() -> Iterator[Any]:
    for route in ROUTES:
        for build in Build:
            for use_libuv in (None, "0", "1"):
                name = f"{route.name}-{build.value.replace(' ', '_')}-USE_LIBUV={use_libuv or 'unset'}"
                yield pytest.param(route, build, use_libuv, id=name)


@pytest.mark.slow
@pytest.mark.parametrize(("route", "build", "use_libuv"), list(_cases()))
def test_two_ranks_train(route: Route, build: Build, use_libuv: str | None) -> None:
    _assert_trained(_train(route, build, use_libuv))


@pytest.mark.slow
def test_without_help_the_simulated_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Route, "injected", False)
    result = _train(BY_NAME["torchrun-standalone"], Build.WITHOUT_LIBUV)
    assert not result.ok
    assert "use_libuv was requested but PyTorch was built without libuv support" in result.log


# The training, but for 20 ms that each step of rank 1 takes longer.
_SLOW = """
import importlib.util, os, time
spec = importlib.util.spec_from_file_location("training", {script!r})
training = importlib.util.module_from_spec(spec)
spec.loader.exec_module(training)
make_batch = training.make_batch
if os.environ["RANK"] == "1":
    training.make_batch = lambda *which: time.sleep(0.02) or make_batch(*which)
training.main()
"""


@pytest.mark.slow
def test_a_slow_rank_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks take the same time for a step: those that are fast wait for the slow one."""
    (tmp_path / "training.py").write_text(_SLOW.format(script=str(trainings.SCRIPT)))
    monkeypatch.setattr(trainings, "SCRIPT", tmp_path / "training.py")
    result = _train(BY_NAME["env"], Build.AS_IT_IS)
    assert result.ok, "\n".join([*result.problems, result.log])
    fast, slow = result.reports
    assert fast.steps_per_second == pytest.approx(slow.steps_per_second, rel=0.1)
    (warning,) = [each for each in result.warnings if "lags" in each]
    assert warning.startswith("rank 1 on cpu")
