"""The hooks of a process: on the import of torch, on a failure, and on a request for its stacks.

Every Python process of a job runs this, and most never import torch: so it imports next to nothing, and
nothing of Rallypoint. It is a module of the package, and also stands on PYTHONPATH, beside `sitecustomize`.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock, start_new_thread  # now: gevent replaces them later

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


def read_job(text: str) -> tuple[str, list[int]]:
    """The folder and the signals in RALLYPOINT_JOB, as `launch.handover` writes them; empty: not there."""
    pairs = (part.partition("=") for part in text.split(";"))
    fields = {name: value.replace("%3B", ";").replace("%25", "%") for name, _, value in pairs}
    signals = fields.get("signals", "").split(",")
    return fields.get("reports", ""), [int(each) for each in signals if each]


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


_MOST_THREADS = 100
"""As many as `faulthandler` writes, the youngest first."""
_HELPER = "rallypoint"
"""The helper thread's name, by which the launcher finds it; `launch.stacks.system` has it, too."""


class _Answers:
    """The file that this process writes its stacks into, and what its helper thread needs for that."""

    def __init__(self, file: int, path: str, signals: list[int]) -> None:
        self.file = file
        self.path = path
        self.signals = signals
        self.owner = os.getpid()


_answers: _Answers | None = None


def answer_for_stacks(folder: str, rank: int, signals: list[int]) -> None:
    """Write the stacks of all threads into a file of `folder` whenever the launcher asks.

    A helper thread does it, and signals are sent to that thread alone, so no call of any other thread is ever
    interrupted. It sleeps in `sigwait` for the first signal, which needs no file, and then writes the stacks
    while it has the interpreter lock (GIL). While a thread keeps the GIL in C code, the second signal has
    `faulthandler` write them in the helper thread, without the GIL: the launcher checks that this is safe.

    The name of the file has the rank and the process. A process that turns out to be another rank calls this
    again. For the main thread only, like everything that changes signal handlers.
    """
    global _answers
    path = os.path.join(folder, f"stack-{rank}-{os.getpid()}.txt")
    if _answers is not None:
        _rename(_answers, path)
        return
    if sys.platform == "win32":
        _answer_by_event(path)
        return
    import _signal  # type: ignore[import-not-found]  # `signal` would import `enum`

    if any(_signal.getsignal(number) is not _signal.SIG_DFL for number in signals):
        return  # the program uses one of them for itself
    draft = path.replace(".txt", ".draft")
    try:
        file = _open(draft)
    except OSError:  # the folder is of another machine, or gone
        return
    _answers = _Answers(file, path, signals)
    if sys.platform == "linux":
        for number in signals[1:]:
            # `faulthandler` restores this at exit; the default would end the process.
            _signal.signal(number, _signal.SIG_IGN)
            _register(number, file)
        os.register_at_fork(after_in_child=_answer_after_fork)
        _start_helper(signals)
    else:  # a signal cannot be sent to one thread from outside: the main thread handles it
        import atexit

        _signal.signal(signals[0], _write_stacks)
        _signal.siginterrupt(signals[0], False)
        atexit.register(_signal.signal, signals[0], _signal.SIG_IGN)
    os.rename(draft, path)


def _register(number: int, file: int) -> None:
    import faulthandler

    faulthandler.register(number, file=file, all_threads=True)


def _answer_after_fork() -> None:
    """In the child: it needs a helper thread of its own; threads are not forked."""
    if _answers is not None:
        try:
            _start_helper(_answers.signals)
        except RuntimeError:  # no more threads: the child is not asked
            pass


def _start_helper(signals: list[int]) -> None:
    """Start the helper thread, and wait until it has its name: the script may close all files at once."""
    ready = allocate_lock()
    ready.acquire()
    start_new_thread(_help, (signals, ready.release))
    ready.acquire()


def _help(signals: list[int], tell: Callable[[], None]) -> None:
    """The helper thread. It takes no signal that is meant for the process."""
    import _signal

    if sys.platform == "win32":
        return
    first, *second = signals
    try:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, _signal.valid_signals().difference(second))
        file = os.open("/proc/thread-self/comm", os.O_WRONLY)
        os.write(file, _HELPER.encode())
        os.close(file)
    except OSError:  # the launcher does not find it then
        return
    finally:
        tell()
    while True:
        _signal.sigwait([first])
        _write_stacks()


def _answer_by_event(path: str) -> None:
    """Windows has no signals for this: a thread waits for an event, and writes the stacks."""
    global _answers
    if sys.platform != "win32":
        return
    import ctypes

    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_BINARY | os.O_NOINHERIT)
    except OSError:
        return
    kernel = ctypes.WinDLL("kernel32")
    kernel.CreateEventW.restype = ctypes.c_void_p
    name = f"{os.path.basename(os.path.dirname(path))}-{os.path.basename(path)}"
    event = ctypes.c_void_p(kernel.CreateEventW(None, False, False, name))

    def answer() -> None:
        while kernel.WaitForSingleObject(event, -1) == 0:
            _write_stacks()

    if event:
        _answers = _Answers(file, path, [])
        start_new_thread(answer, ())


def _rename(answers: _Answers, path: str) -> None:
    """The file is that of another rank; not if this process was forked, and it is its parent's."""
    if answers.owner == os.getpid() and path != answers.path:
        try:
            os.rename(answers.path, path)
        except OSError:  # the launcher has removed it
            return
        answers.path = path


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _write_stacks(*_: object) -> None:
    """Write the stacks of all threads, the main thread last. Nothing is raised into the user's code."""
    try:
        import faulthandler

        if _answers is None:
            return
        if sys.platform != "win32" and not _is_open(_answers):
            _answers.file = _open(_answers.path)
            for number in _answers.signals[1:]:
                _register(number, _answers.file)
        if len(sys._current_frames()) <= _MOST_THREADS:
            # Written at once: unlike frames that are held here, it delays the end of no object.
            faulthandler.dump_traceback(_answers.file)
        else:
            import threading

            lines = _stack_lines(sys._current_frames().get(threading.main_thread().ident or 0))
            os.write(_answers.file, "".join(lines).encode("ascii", "backslashreplace"))
    except BaseException:  # noqa: S110 - there is nobody to tell
        pass


def _is_open(answers: _Answers) -> bool:
    """Whether the file is still open under its number: the script may have closed all files."""
    path = os.stat(answers.path)
    try:
        return os.path.samestat(path, os.fstat(answers.file))
    except OSError:
        return False


def _stack_lines(frame: Any) -> list[str]:
    """The main thread as `faulthandler` writes it."""
    lines = ["Thread 0x0 (most recent call first):\n"]
    while frame is not None and len(lines) <= 100:
        code = frame.f_code
        line = f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}'
        lines.append(line.replace("\n", "\\x0a").replace("\r", "\\x0d") + "\n")
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
