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
_answers: tuple[int, int, str] | None = None
"""Of the process that has begun to answer, which those that it forks go on with: its number, its file."""


def answer_for_stacks(folder: str, rank: int, signals: list[int]) -> None:
    """Write stacks into a file of `folder` whenever one of the signals comes.

    The first is handled by the interpreter, between two of its steps, and all threads are written. The second
    is for a main thread that is in a call of C code, and does not come to that: `faulthandler` writes its
    stack then, from C. That is safe only there: C code that is about to enter a function has half a frame.
    The third interrupts a main thread that waits for a lock: then it comes to the first. The others let
    system calls go on, as C code may not expect that one is interrupted.

    A signal that comes while the process ends is ignored. The name of the file has the rank, the process and
    the number of the open file: whoever sends the signal looks first whether all three still hold. A process
    that turns out to be another rank calls this again. For the main thread alone, as all about signals.
    """
    global _answers
    if _answers is not None:
        _rename(folder, rank, *_answers)
        return
    if sys.platform == "win32":
        _answer_by_event(folder, rank)
        return
    import _signal  # type: ignore[import-not-found]  # `signal` would import `enum`
    import _thread
    import atexit

    if any(_signal.getsignal(number) is not _signal.SIG_DFL for number in signals):
        return  # the program uses one of them for itself
    draft = os.path.join(folder, f"stack-{rank}-{os.getpid()}.draft")
    try:
        file = _open_high(draft)
    except OSError:  # the folder is of another machine, or gone
        return
    main = _thread.get_ident()
    _signal.signal(signals[0], lambda _, frame: _write_stacks(file, main, frame))
    _signal.siginterrupt(signals[0], False)
    for number in signals[2:]:
        _signal.signal(number, _do_nothing)
    # At its end Python puts the default back, which would end the process by the signal.
    for number in signals[::2]:
        atexit.register(_signal.signal, number, _signal.SIG_IGN)
    for number in signals[1:2]:
        import faulthandler

        # What `faulthandler` puts back at the end; the default would be to end the process.
        _signal.signal(number, _signal.SIG_IGN)
        faulthandler.register(number, file=file, all_threads=False)
    path = _path(folder, rank, file)
    os.rename(draft, path)
    _answers = os.getpid(), file, path


def _answer_by_event(folder: str, rank: int) -> None:
    """Windows has no signals for this: a thread waits for an event, and writes what the main thread does."""
    global _answers
    if sys.platform != "win32":
        return
    import _thread
    import ctypes

    path = _path(folder, rank, 0)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_BINARY | os.O_NOINHERIT)
    except OSError:
        return
    kernel = ctypes.WinDLL("kernel32")
    kernel.CreateEventW.restype = ctypes.c_void_p
    name = f"{os.path.basename(folder)}-{os.path.basename(path)}"
    event = ctypes.c_void_p(kernel.CreateEventW(None, False, False, name))
    main = _thread.get_ident()

    def answer() -> None:
        while kernel.WaitForSingleObject(event, -1) == 0:
            _write_stacks(file, main, sys._current_frames().get(main))

    if event:
        _thread.start_new_thread(answer, ())
        _answers = os.getpid(), file, path


def _path(folder: str, rank: int, file: int) -> str:
    return os.path.join(folder, f"stack-{rank}-{os.getpid()}-{file}.txt")


def _rename(folder: str, rank: int, pid: int, file: int, path: str) -> None:
    """The file is that of another rank; not if this process was forked, and it is its parent's."""
    global _answers
    fresh = _path(folder, rank, file)
    if pid == os.getpid() and path != fresh:
        try:
            os.rename(path, fresh)
        except OSError:  # the launcher has removed it
            return
        _answers = pid, file, fresh


def _open_high(path: str) -> int:
    """Programs that close files which they do not know begin with the low numbers."""
    import fcntl

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH_FILE)
    except OSError:  # it may have few files only
        return file
    os.close(file)
    return high


def _do_nothing(*_: object) -> None:
    pass


def _write_stacks(file: int, main: int, frame: object) -> None:
    """As `faulthandler` writes them, the main thread at the end. Nothing may be raised in the user's code."""
    try:
        import _thread

        lines = []
        for thread, each in sys._current_frames().items():
            if thread not in (main, _thread.get_ident()):
                lines += _stack_lines(f"Thread {thread:#x}", each)
        lines += _stack_lines(f"Current thread {main:#x}", frame)
        os.write(file, "".join(lines).encode("ascii", "backslashreplace"))
    except BaseException:  # noqa: S110 - there is nobody to tell
        pass


def _stack_lines(name: str, frame: Any) -> list[str]:
    lines = [f"{name} (most recent call first):\n"]
    while frame is not None and len(lines) <= 100:
        code = frame.f_code
        where = f"{code.co_filename}\0{code.co_name}"
        if not where.isprintable():  # the zero is not
            where = where.replace("\n", "\\x0a").replace("\r", "\\x0d")
        path, _, function = where.partition("\0")
        lines.append(f'  File "{path}", line {frame.f_lineno or 0} in {function}\n')
        frame = frame.f_back
    return lines


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
