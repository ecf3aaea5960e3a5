"""What waits in a process until it turns out to use torch: for the import of a module, and for its end.

Every Python process of a job runs this, and most never import torch: so it imports next to nothing, and
nothing of Rallypoint. It is a module of the package, and stands by itself beside `sitecustomize`.
"""

from __future__ import annotations

import os
import sys

if False:  # typing would cost more than all the rest
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any


def after_import(name: str, act: Callable[[], None]) -> None:
    """Call `act` once, when the module `name` has been imported: now, if that is so already."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder:
    """Finds one module as the others would, and has its loader tell when it has been loaded."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        if name != self._name or self not in sys.meta_path:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)  # from here on the others find it
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, loader: Any, act: Callable[[], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._act()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # resources, source, and what else a loader may have


def on_failure(report: Callable[[type[BaseException], BaseException, TracebackType | None], bool]) -> None:
    """Call `report` with an exception that ends this process; True from it means: do not print it."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            silent = report(kind, error, trace)
        except Exception:  # a full disk, an exception that cannot be formatted
            silent = False
        if not silent:
            previous(kind, error, trace)

    sys.excepthook = hook


_HIGH_FILE = 100
_is_answering = False


def answer_for_stacks(folder: str, rank: int, signals: list[int]) -> None:
    """Write the stack of the main thread into a file of `folder` whenever the first signal comes.

    If there is a second signal, it is for those of all threads. C code does it, without the interpreter lock.
    A signal that comes while the process ends is ignored. The name of the file has the rank, the process and
    the number of the open file: whoever sends the signal looks first whether all three still hold.
    """
    global _is_answering
    if _is_answering or not signals:
        return
    _is_answering = True
    import _signal  # type: ignore[import-not-found]  # `signal` would import `enum`
    import faulthandler
    import fcntl

    draft = os.path.join(folder, f"stack-{rank}-{os.getpid()}.draft")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:  # programs that close files which they do not know begin with the low numbers
        high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH_FILE)
        os.close(file)
    except OSError:  # it may have few files only
        high = file
    for at, number in enumerate(signals):
        if _signal.getsignal(number) is not _signal.SIG_DFL:
            continue  # the program uses it for itself
        # What `faulthandler` puts back at the end; the default would be to end the process.
        _signal.signal(number, _signal.SIG_IGN)
        faulthandler.register(number, file=high, all_threads=at > 0)
    os.rename(draft, os.path.join(folder, f"stack-{rank}-{os.getpid()}-{high}.txt"))


def run_next_sitecustomize(file: str) -> None:
    """Run the sitecustomize that stands behind that in `file` on the path, as Python would have."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(file))
    places = [os.path.abspath(entry or os.curdir) for entry in sys.path]
    behind = sys.path[places.index(here) + 1 :] if here in places else []
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
