"""Turns a forked process into what a new `python -u SCRIPT ARGS` would be, and runs the script in it.

What a new process would have of its own is made anew: environment, signal dispositions, streams, `sys.argv`,
`sys.path`, `__main__`, entropy, exit handlers, and what /proc shows of it. What cannot be: the seed of
`hash()`, which the ranks of a machine share. And the traceback of a failing exit handler has one more frame.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import logging
import os
import random
import runpy
import signal
import sys
import threading
import time
import weakref
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from itertools import compress, takewhile
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn, TextIO

Dispositions = Mapping[int, "signal.Handlers"]

_BUFFERS = (io.BufferedIOBase, io.TextIOBase)


class Command(NamedTuple):
    """A Python command line, taken apart."""

    is_module: bool
    is_safe: bool
    """Whether the folder of the script or the working directory stays off `sys.path`."""
    target: str
    """The path of a script, or the name of a module."""
    arguments: Sequence[str]


def parse_command(words: Sequence[str]) -> Command | None:
    """The command if it is `PYTHON [-u] [-P] [-m] TARGET ...` with this interpreter; None for any other."""
    options = list(takewhile(lambda each: each in ("-u", "-P", "-m"), words[1:]))
    rest = words[1 + len(options) :]
    if words[0] != sys.executable or not rest or rest[0].startswith("-") or "-m" in options[:-1]:
        return None
    return Command("-m" in options, "-P" in options, rest[0], rest[1:])


def inherited_dispositions() -> dict[int, signal.Handlers]:
    """Which signals a new process would ignore, and which have their default."""
    return {
        number: signal.SIG_IGN if signal.getsignal(number) is signal.SIG_IGN else signal.SIG_DFL
        for number in signal.valid_signals()
        if number not in (signal.SIGKILL, signal.SIGSTOP)
    }


def run_as_new_process(
    words: Sequence[str],
    environ: Mapping[str, str],
    dispositions: Dispositions,
    prepare: Callable[[], object],
) -> NoReturn:
    """Be a new Python process that runs a command; never returns. Streams 0, 1 and 2 are in place.

    `prepare` is called before the script. No thread but this one may run. ValueError for a command that
    `parse_command` refuses.
    """
    command = parse_command(words)
    if command is None:
        raise ValueError(words)
    old_path = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(environ)
    _restore_signals(dispositions)
    show_process(words, environ)
    _open_streams()
    _renew_entropy()
    _limit_threads(environ)
    gc.enable()  # a parent that imports much does without it
    _set_path(command, old_path)
    sys.argv = ["-m" if command.is_module else command.target, *command.arguments]
    sys.orig_argv = list(words)
    prepare()
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    _exit(_run(command, main))


# The process ------------------------------------------------------------------------------------------------


def _restore_signals(dispositions: Dispositions) -> None:
    for number, handler in dispositions.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    if dispositions.get(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGPIPE", "SIGXFSZ"):  # as every Python process begins
        signal.signal(getattr(signal, name), signal.SIG_IGN)


class _MemoryMap(ctypes.Structure):
    """Where the kernel finds what it shows of a process: prctl_mm_map of Linux's prctl."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end")),
        *(("auxv", ctypes.c_uint64), ("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32)),
    )


def show_process(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Show a command line and an environment in /proc, where `ps`, `pkill -f` and nvidia-smi read them.

    OSError where the kernel cannot: before Linux 3.18, or without CONFIG_CHECKPOINT_RESTORE.
    """
    with open("/proc/self/stat", encoding="utf-8") as stat:
        fields = [0] * 3 + [int(each) for each in stat.read().rpartition(")")[2].split()[1:]]  # as in proc(5)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    arguments = "".join(f"{each}\0" for each in words).encode(errors="surrogateescape")
    variables = "".join(f"{name}={value}\0" for name, value in environ.items()).encode(
        errors="surrogateescape"
    )
    texts = [ctypes.create_string_buffer(each, len(each)) for each in (arguments, variables)]
    (start, end), (environ_start, environ_end) = [
        (ctypes.addressof(each), ctypes.addressof(each) + len(each)) for each in texts
    ]
    code, data = fields[25:27], fields[44:46]
    brk, no_file = libc.sbrk(0), 0xFFFFFFFF
    shown = _MemoryMap(
        *code, *data, fields[46], brk, fields[27], start, end, environ_start, environ_end, 0, 0, no_file
    )
    set_mm, set_map = 35, 14
    if libc.prctl(
        set_mm, set_map, ctypes.byref(shown), ctypes.c_ulong(ctypes.sizeof(shown)), ctypes.c_ulong(0)
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(texts))  # the kernel reads them until the process has ended
    with open("/proc/self/comm", "w", encoding="utf-8") as comm:
        # Slurm's proctrack/linuxproc overlooks a process whose name has a space.
        comm.write(os.path.basename(words[0]).partition(" ")[0].rstrip(":")[:15])


def why_not_shown() -> str:
    """Why `show_process` is of no use here, in words; empty if it works. It changes nothing."""
    try:
        with open("/proc/self/cmdline", "rb") as words, open("/proc/self/comm", encoding="utf-8") as comm:
            command, name = words.read().decode(errors="surrogateescape").split("\0")[:-1], comm.read()
        show_process(command)
        with open("/proc/self/comm", "w", encoding="utf-8") as comm:
            comm.write(name.rstrip("\n"))
    except OSError as error:
        return f"this kernel does not let a process show its command line ({error.strerror})"
    return ""


def _open_streams() -> None:
    """`sys.stdin`, `sys.stdout` and `sys.stderr` over the descriptors 0, 1 and 2, unbuffered as with -u."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            new: TextIO | None = _open_stream(number, name, mode)
        except OSError:  # the descriptor is closed
            new = None
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    libc = ctypes.CDLL(None)
    unbuffered = 2  # _IONBF
    for name in ("stdin", "stdout", "stderr"):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, unbuffered, 0)


def _open_stream(number: int, name: str, mode: str) -> TextIO:
    raw = io.FileIO(number, mode, closefd=False)
    raw.name = f"<{name}>"
    # Those of standard input: the launcher has changed how it writes what cannot be encoded itself.
    encoding = getattr(sys.__stdin__, "encoding", None) or "utf-8"
    errors = "backslashreplace" if number == 2 else getattr(sys.__stdin__, "errors", None) or "strict"
    buffer: Any = raw if number else io.BufferedReader(raw)
    stream = io.TextIOWrapper(buffer, encoding, errors, newline="\n" if number else None, write_through=True)
    stream.mode = mode  # type: ignore[misc]
    return stream


def close_inherited(kept: int) -> None:
    """Close all descriptors of the parent but this one and the standard streams.

    First those that an object owns, such as a socket: left open, it would close whatever has that number by
    the time it is deleted.
    """
    everything = gc.get_objects()
    kinds = list(map(type, everything))
    owners = {kind for kind in set(kinds) if _owns_descriptor(kind)}
    for owner in list(compress(everything, map(owners.__contains__, kinds))):
        with contextlib.suppress(Exception):  # it is closed already, or not even initialised
            if owner.fileno() not in (0, 1, 2, kept):
                owner.close()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _owns_descriptor(kind: type) -> bool:
    """Whether instances own a descriptor. Buffers do not: closing one would write what it holds."""
    return hasattr(kind, "fileno") and hasattr(kind, "close") and not issubclass(kind, _BUFFERS)


def forget_parent() -> None:
    """Drop what the forked process would do for its parent: log, and remove temporary folders at its exit."""
    for logger in (logging.root, logging.getLogger("rallypoint")):
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
    logging.root.setLevel(logging.WARNING)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]


def _renew_entropy() -> None:
    """Seed anew what a library has seeded at its import. `random` does this itself after a fork."""
    random.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


def _limit_threads(environ: Mapping[str, str]) -> None:
    """Apply OMP_NUM_THREADS, which torch has read when the template imported it."""
    number, torch = environ.get("OMP_NUM_THREADS", ""), sys.modules.get("torch")
    if torch is not None and number.isdecimal() and int(number) and torch.get_num_threads() != int(number):
        torch.set_num_threads(int(number))


def _set_path(command: Command, old_path: str) -> None:
    """`sys.path` as a new process would have it: the script's folder, PYTHONPATH, and what the site adds."""
    ours = {os.path.abspath(entry) for entry in old_path.split(os.pathsep) if entry}
    kept = sys.path[0 if getattr(sys.flags, "safe_path", False) else 1 :]
    site = [entry for entry in kept if os.path.abspath(entry) not in ours]
    new = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if command.is_module:
        first = os.getcwd()
    elif _is_package(command.target):
        first = os.path.abspath(command.target)
    else:
        first = os.path.dirname(os.path.realpath(command.target))
    is_safe = (command.is_safe or os.environ.get("PYTHONSAFEPATH")) and not _is_package(command.target)
    sys.path[:] = [*([] if is_safe else [first]), *new, *site]
    importlib.invalidate_caches()


# The script -------------------------------------------------------------------------------------------------


def _is_package(path: str) -> bool:
    """Whether a path is a folder or an archive with a `__main__` in it."""
    return os.path.isdir(path) or zipfile.is_zipfile(path)


def _run(command: Command, main: ModuleType) -> int:
    """Run the script, and return the exit code that Python would end with."""
    try:
        if command.is_module:
            runpy._run_module_as_main(command.target, True)  # type: ignore[attr-defined]
        elif _is_package(command.target):
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            exec(_load(command.target, main), main.__dict__)  # noqa: S102 - this is what a launcher is for
    except SystemExit as error:
        return _exit_code(error.code)
    except BaseException as error:
        return _report(error)
    return 0


def _load(path: str, main: ModuleType) -> CodeType:
    place = os.path.abspath(path)
    try:
        with io.open_code(place) as file:
            source = file.read()
    except OSError as error:
        _print_error(f"{sys.executable}: can't open file {place!r}: [Errno {error.errno}] {error.strerror}")
        raise SystemExit(2) from None
    main.__dict__.update(
        __file__=place, __cached__=None, __loader__=SourceFileLoader("__main__", place), __spec__=None
    )
    code: CodeType = compile(source, place, "exec", dont_inherit=True)
    return code


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    _print_error(str(code))
    return 1


def _print_error(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")


def _report(error: BaseException) -> int:
    """Report an uncaught exception as Python would, without the frames of this module."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as exit_error:
        return _exit_code(exit_error.code)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _exit(code: int) -> NoReturn:
    """End this process as Python ends: join threads, run exit handlers, flush, finalize."""
    if code == -signal.SIGINT:
        _end_by_interrupt()
    _let_threads_come_to_rest()
    python: Any = ctypes.pythonapi
    python.Py_Exit(code)
    raise AssertionError


def _let_threads_come_to_rest() -> None:
    """Return when no other thread runs, or after a tenth of a second.

    gloo's threads free Python objects after a collective. That aborts the process if Python has begun to
    finalize, and a forked rank gets there sooner than one that was started by itself.
    """
    deadline = time.monotonic() + 0.1
    while time.monotonic() < deadline:
        time.sleep(0.001)  # without the interpreter lock, so that they can have it
        if "R" not in _states_of_threads():
            return


def _states_of_threads() -> list[str]:
    """Of all threads but this one, as in proc(5)."""
    states = []
    for each in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{each}/stat", encoding="utf-8") as stat:
            if int(each) != threading.get_native_id():
                states.append(stat.read().rpartition(")")[2].split()[0])
    return states


def _end_by_interrupt() -> None:
    """End by SIGINT, as Python does after a KeyboardInterrupt, so that the parent sees it."""
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
