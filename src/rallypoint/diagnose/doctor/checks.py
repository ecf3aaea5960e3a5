"""All checks of one machine, and running them side by side, each with a time limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rallypoint.diagnose.doctor import engine, files, machine, network, stores, torch, variables
from rallypoint.diagnose.doctor.situation import Situation
from rallypoint.diagnose.findings import Finding, unknown


@dataclass(frozen=True)
class Check:
    """One thing to examine. It may have several findings, or none if it does not apply."""

    name: str
    examine: Callable[[Situation], Iterable[Finding]]
    seconds: float = 8.0
    """The time limit; findings made by then count."""


CHECKS: Final = (
    Check("python", machine.check_python),
    Check("packages", machine.check_packages),
    Check("event-loop", machine.check_event_loop),
    Check("torch", torch.check_torch, torch.SECONDS),
    Check("variables", variables.check_variables),
    Check("host-name", network.check_host_name),
    Check("reverse-look-up", network.check_reverse),
    Check("address-families", network.check_families),
    Check("interfaces", network.check_interfaces),
    Check("endpoint", stores.check_endpoint),
    Check("port", stores.check_port),
    Check("loopback", stores.check_loopback, 20.0),
    Check("interface", stores.check_interface, 20.0),
    Check("store", stores.check_store, 20.0),
    Check("engine", engine.check_engine, 30.0),
    Check("open-files", machine.check_open_files),
    Check("backlog", machine.check_backlog),
    Check("shared-memory", machine.check_shared_memory),
    Check("file-init", files.check_file_init, 15.0),
    Check("clock", machine.check_clock),
    Check("proxies", network.check_proxies),
)
"""In the order in which their findings are shown."""

_Results = queue.SimpleQueue[tuple[Check, Finding | None]]


def run_checks(checks: Sequence[Check], situation: Situation) -> Iterator[tuple[Check, Sequence[Finding]]]:
    """Run all checks at the same time. Yield the findings of each when it ends, or when its time is over.

    Each check has a daemon thread. A thread whose time is over is left alone: the system's resolver, a file
    system or a GPU may never answer.
    """
    begun = time.monotonic()
    results: _Results = queue.SimpleQueue()
    for check in checks:
        work = (check, situation, results)
        threading.Thread(target=_run_check, args=work, daemon=True, name=f"check-{check.name}").start()
    found: dict[Check, list[Finding]] = {check: [] for check in checks}
    while found:
        next_over = min(found, key=lambda check: check.seconds)
        left = begun + next_over.seconds - time.monotonic()
        if left <= 0:
            late = unknown(next_over.name, f"there was no answer within {next_over.seconds:g} s")
            yield next_over, [*found.pop(next_over), late]
            continue
        try:
            check, finding = results.get(timeout=left)
        except queue.Empty:
            continue
        if check in found and finding is not None:
            found[check].append(replace(finding, seconds=round(time.monotonic() - begun, 3)))
        elif check in found:
            yield check, found.pop(check)


def _run_check(check: Check, situation: Situation, results: _Results) -> None:
    try:
        for finding in check.examine(situation):
            results.put((check, finding))
    except Exception as error:  # a check that breaks says so, and the others go on
        reason = " ".join(str(error).split()) or type(error).__name__
        results.put((check, unknown(check.name, f"it could not be looked at: {reason}")))
    results.put((check, None))
