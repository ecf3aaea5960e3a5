"""Which imports are safe before a fork: those that leave no thread, no open file and no accelerator.

A module that decides by RANK when it is imported (Lightning does) would decide for all ranks at once. So the
environment is watched meanwhile, and such a package is left to the ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

from rallypoint.launch.environment import is_of_a_rank
from rallypoint.launch.handover import read_handover

_ACCELERATOR = re.compile(r"/dev/(nvidia-uvm|kfd|dri/render|accel|davinci|hl\d|neuron)")
"""Device files that a process has open once it has initialised an accelerator."""


class Unsafe(NamedTuple):
    """Importing a package has made a fork unsafe."""

    package: str
    reason: str


def why_unsafe() -> str:
    """Why this process must not be forked, in words; empty if it may."""
    if threading.active_count() > 1:
        names = ", ".join(each.name for each in threading.enumerate() if each is not threading.main_thread())
        return f"threads run beside the main one: {names}"
    for each in _open_descriptors():
        if _ACCELERATOR.match(each):
            return f"an import has opened the accelerator, {each}"
    return ""


def _open_descriptors() -> set[str]:
    """What the descriptors of this process are, such as the paths of files."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


_modules_of_template: frozenset[str] | None = None
"""In a forked rank: the modules that it began with."""
_REPORT = "modules.txt"


def note_modules() -> None:
    """In a forked rank, at its start: note what the template had imported."""
    global _modules_of_template
    _modules_of_template = frozenset(sys.modules)


def report_modules() -> None:
    """In a machine's first rank, if it was forked: report which packages it has imported itself."""
    folder = read_handover(os.environ).reports
    if folder is None or _modules_of_template is None or os.environ.get("LOCAL_RANK") != "0":
        return
    sites = tuple(entry + os.sep for entry in sys.path if os.path.basename(entry).endswith("-packages"))
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    names = [
        each for each, file in files.items() if each not in _modules_of_template and file.startswith(sites)
    ]
    draft = folder / f"{_REPORT}.{os.getpid()}"
    with contextlib.suppress(OSError):
        draft.write_text("\n".join(names), encoding="utf-8")
        draft.replace(folder / _REPORT)


def take_report() -> list[str]:
    """In the agent: the modules that a rank has reported, once, in the order of their imports."""
    folder = read_handover(os.environ).reports
    if folder is None:
        return []
    try:
        names = (folder / _REPORT).read_text(encoding="utf-8").split()
        (folder / _REPORT).unlink()
    except OSError:
        return []
    return names


def import_all(modules: Sequence[str]) -> Unsafe | None:
    """Import modules, silently; the first package after which a fork is unsafe, or None."""
    for name in modules:
        if name in sys.modules:
            continue
        threads, descriptors = len(os.listdir("/proc/self/task")), _open_descriptors()
        # Whatever fails: the rank that imports it will see it.
        with _watched_environment() as reads, _silence(), contextlib.suppress(BaseException):
            import_module(name)
        reason = why_unsafe()
        if reads:
            reason = f"it reads {reads[0]} when it is imported"
        elif len(os.listdir("/proc/self/task")) > threads:
            reason = reason or "it starts a thread when it is imported"
        elif opened := _open_descriptors() - descriptors:
            reason = reason or f"it leaves {opened.pop()} open when it is imported"
        if reason:
            return Unsafe(name.partition(".")[0], reason)
    return None


@contextlib.contextmanager
def _watched_environment() -> Iterator[list[str]]:
    """Yield a list, which receives the names of the variables of a rank that are read in the block."""
    reads: list[str] = []
    kind = type(os.environ)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            if is_of_a_rank(name):
                reads.append(name)
            value: str = super().__getitem__(name)
            return value

    os.environ.__class__ = Watched
    try:
        yield reads
    finally:
        os.environ.__class__ = kind


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drop what is written to standard output and error: it has been written once, by a rank."""
    kept = [os.dup(1), os.dup(2)]
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nothing, number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for number, each in zip((1, 2), kept, strict=True):
            os.dup2(each, number)
            os.close(each)
        os.close(nothing)
