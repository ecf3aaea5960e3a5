"""Real two-rank trainings by every route: with torch as it is and without libuv, whatever USE_LIBUV says.

Not marked as slow are a few of those for which Rallypoint is there: a torch without libuv, and nothing said;
and one that shows that it does no harm to a torch that needs no help.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.verify import running
from rallypoint.verify.routes import BY_NAME, ROUTES, Build, Command, Route
from rallypoint.verify.running import Result, Setting

_HELPED = ("tcp", "torchrun-static-2", "torchrun-rallypoint-2", "accelerate")
_HARMLESS = ("tcp",)
_SECONDS = 100.0

# A training that loses its port is run again.
pytestmark = pytest.mark.timeout(2 * _SECONDS + 60)


def _cases() -> Iterator[Any]:
    for route in ROUTES:
        for build in Build:
            for use_libuv in (None, "0", "1"):
                common = route.name in (_HELPED if build is Build.WITHOUT_LIBUV else _HARMLESS)
                marks = [] if common and use_libuv is None else [pytest.mark.slow]
                name = f"{route.name}-{build.value.replace(' ', '_')}-USE_LIBUV={use_libuv or 'unset'}"
                yield pytest.param(route, build, use_libuv, id=name, marks=marks)


def _train(route: Route, build: Build, use_libuv: str | None = None) -> Result:
    if running.is_missing(route):
        pytest.skip(f"{route.needs} is not installed")
    return running.run(route, build, Setting(use_libuv=use_libuv, seconds=_SECONDS))


@pytest.mark.parametrize(("route", "build", "use_libuv"), list(_cases()))
def test_two_ranks_train(route: Route, build: Build, use_libuv: str | None) -> None:
    result = _train(route, build, use_libuv)
    assert result.ok, "\n".join([*result.problems, result.log])
    assert {report.backend for report in result.reports} == {"gloo"}


def test_without_help_the_simulated_torch_refuses() -> None:
    alone = replace(BY_NAME["torchrun-standalone"], injected=False)
    result = _train(alone, Build.WITHOUT_LIBUV)
    assert not result.ok
    assert "use_libuv was requested but PyTorch was built without libuv support" in result.log


# The training, but for 20 ms that each step takes longer.
_SLOW = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("training", r"{script}")
training = importlib.util.module_from_spec(spec)
spec.loader.exec_module(training)
make_batch = training.make_batch
training.make_batch = lambda *which: time.sleep(0.02) or make_batch(*which)
sys.argv = ["training"]
training.main()
"""


@pytest.mark.slow
def test_a_slow_rank_is_found_out() -> None:
    """All ranks take the same time for a step: those that are fast wait for the slow one."""
    route = BY_NAME["env"]
    first, second = route.commands
    route = replace(route, commands=(first, Command(("-c", _SLOW), second.variables)))
    result = _train(route, Build.AS_IT_IS)
    assert result.ok, "\n".join([*result.problems, result.log])
    fast, slow = result.reports
    assert fast.steps_per_second == pytest.approx(slow.steps_per_second, rel=0.1)
    (warning,) = [each for each in result.warnings if "lags" in each]
    assert warning.startswith("rank 1 on cpu")


# One rank trains; afterwards, it prints the names of its threads.
_THREADS = """
import importlib.util, pathlib
spec = importlib.util.spec_from_file_location("training", r"{script}")
training = importlib.util.module_from_spec(spec)
spec.loader.exec_module(training)
training.run_rank("file://{folder}/meeting?rank=0&world_size=1")
print(*(file.read_text() for file in pathlib.Path("/proc/self/task").glob("*/comm")))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are listed in /proc")
def test_the_training_leaves_no_thread_that_could_abort_it() -> None:
    """gloo's threads end with the process group, if nothing holds it when it is destroyed."""
    route = Route("threads", (Command(("-c", _THREADS)),), ranks=1)
    result = _train(route, Build.AS_IT_IS)
    assert result.ok, "\n".join([*result.problems, result.log])
    assert "python" in result.log
    assert "gloo" not in result.log
