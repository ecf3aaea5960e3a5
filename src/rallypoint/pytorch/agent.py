"""torchrun, as `rallypoint run` starts it: `python -m rallypoint.pytorch.agent` and torchrun's arguments.

It runs torchrun's own main function, with additions: `--nproc-per-node=devices` counts the accelerators of
this machine, which only torch can do; agent and ranks end when `rallypoint run` is killed; the agent survives
signals that are meant for its ranks; and, on Windows, ranks are ended in a way that exists there.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rallypoint.launch.handover import read_handover
from rallypoint.launch.options import BACKEND
from rallypoint.launch.rendezvous.servers import prepare_first_store
from rallypoint.launch.reports import erase_live_line, exits_of, report_exits
from rallypoint.launch.switches import can_fork
from rallypoint.pytorch.autoload import get_handler
from rallypoint.pytorch.forking import number_of_ranks, prepare_template
from rallypoint.store.machine.lifetime import on_parent_end
from rallypoint.store.server.guard.secret import SECRET_VARIABLE, Secret, set_process_secret

_THREADS = "OMP_NUM_THREADS"
_DEVICES = "--nproc-per-node=devices"

_GRACE_SECONDS = 2.0  # for ranks that want to end in order
_SAME_CTRL_C_SECONDS = 1.0
_PARTING_SECONDS = 0.5  # for the agent, once they have ended

_CONSOLES_SIGNALS = (signal.SIGINT, getattr(signal, "SIGBREAK", signal.SIGINT))


def end_with_launcher() -> None:
    """From now on, end this agent and its ranks when the launcher that started it is gone.

    Not what ranks have started in sessions of their own: torchrun leaves that alone, too. The launcher has
    written the secret that it had in a variable into the pipe, or an empty line.
    """
    given = read_handover(os.environ)
    if given.lifeline >= 0:
        os.environ.update(given._replace(lifeline=-1).variables())  # it is not for the ranks
        if text := on_parent_end(given.lifeline, _end_soon):
            set_process_secret(Secret(text, f"the variable {SECRET_VARIABLE}"))


def _end_soon() -> None:
    os.kill(os.getpid(), signal.SIGTERM)  # torchrun tells its ranks to end, and ends
    time.sleep(_GRACE_SECONDS)
    _kill_ranks()
    time.sleep(_PARTING_SECONDS)
    os._exit(1)  # the servers that it holds end with their last client


def _kill_ranks() -> None:
    import psutil

    for child in psutil.Process().children():
        try:
            if "RANK" not in child.environ():  # it is a server
                continue
            if sys.platform == "win32":
                child.kill()
            else:
                os.killpg(child.pid, signal.SIGKILL)
        except (psutil.Error, OSError):
            pass  # it has just ended


def end_ranks_as_windows_does() -> None:
    """Let torchrun end its ranks on Windows.

    By itself it sends Ctrl-C to end a rank. That goes to all processes of the console, this launcher's
    included; and without a console it fails, and the ranks run on.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler.close = _close_rank


def with_ctrl_break(arguments: Sequence[str]) -> list[str]:
    """torchrun's arguments, with the signals of Windows; its default has some that are not there.

    Older torches have no such option. One that the user has given comes later, and counts.
    """
    from torch.distributed.run import get_args_parser

    option = "--signals-to-handle"
    known = option in get_args_parser()._option_string_actions
    return [f"{option}=SIGTERM,SIGINT,SIGBREAK", *arguments] if known else list(arguments)


def _close_rank(handler: Any, death_sig: int | None = None) -> None:
    if death_sig in _CONSOLES_SIGNALS:
        return  # the console has sent it to the rank as well; 30 seconds later torchrun calls this again
    handler.proc.terminate()
    for stream in (handler._stdout, handler._stderr):
        if stream:
            stream.close()


def survive_user_signals() -> None:
    """Outlive SIGUSR1 and SIGUSR2: schedulers send them to every process of a job, and mean its ranks."""
    for name in ("SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            # Not ignored: ranks would inherit that.
            signal.signal(getattr(signal, name), lambda *_: None)


def raise_at_first_interrupt() -> None:
    """Let one Ctrl-C end this process before it has ranks: it is sent by the terminal and by the launcher.

    Another one, a second later, interrupts what it still does at its end.
    """
    taken: list[float] = []

    def interrupt(*_: object) -> None:
        taken.append(time.monotonic())
        if len(taken) == 1 or taken[-1] - taken[0] > _SAME_CTRL_C_SECONDS:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def end_ranks_once() -> None:
    """Have torchrun end its ranks at the first SIGTERM or SIGINT, and ignore the ones that follow.

    Schedulers send several, and `rallypoint run` passes one on. By itself, torchrun would abandon its ranks
    at the second signal, while they clean up. Another Ctrl-C, a second later, kills the ranks.
    """
    from torch.distributed.elastic.multiprocessing import api

    api._terminate_process_handler = _once(api._terminate_process_handler)


def _once(handler: Callable[[int, FrameType | None], None]) -> Callable[[int, FrameType | None], None]:
    told: list[float] = []

    def take(number: int, frame: FrameType | None) -> None:
        told.append(time.monotonic())
        if len(told) == 1:
            erase_live_line()  # torchrun prints something now
            if number == signal.SIGINT:
                os.write(2, b"rallypoint: the ranks have 30 s to end; another Ctrl-C kills them\n")
            handler(number, frame)
        elif number == signal.SIGINT and told[-1] - told[0] > _SAME_CTRL_C_SECONDS:
            _kill_ranks()

    return take


def report_ends_of_attempts() -> None:
    """Report how ranks have ended at the end of each attempt, before the agent joins the next rendezvous.

    torchrun tells that only of the last one, when it is too late to tell other machines. And only torchrun
    knows how many restarts are left.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    monitor = LocalElasticAgent._monitor_workers

    def watch(agent: Any, group: Any) -> Any:
        result = monitor(agent, group)
        if result.is_failed():
            report_exits(exits_of(result.failures))
        group.spec.rdzv_handler.restarts_left = agent._remaining_restarts - result.is_failed()
        return result

    LocalElasticAgent._monitor_workers = watch


@contextmanager
def threads_of_ranks(arguments: Sequence[str]) -> Iterator[None]:
    """Import with the OMP_NUM_THREADS that torchrun gives to several ranks; libraries read it only then."""
    if number_of_ranks(arguments) == 1 or _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = "1"
    yield
    del os.environ[_THREADS]  # torchrun sets it, with a warning


def count_devices() -> int:
    """One rank per accelerator, else one."""
    import torch

    accelerator = getattr(torch, "accelerator", None)  # torch 2.6 and later
    count = accelerator.device_count() if accelerator is not None else torch.cuda.device_count()
    return max(int(count), 1)


def settle_ranks(arguments: Sequence[str]) -> list[str]:
    """torchrun's arguments, with the number of devices put in; what stands behind `--` is the script's."""
    ours = list(arguments).index("--") if "--" in arguments else len(arguments)
    number = f"--nproc-per-node={count_devices()}" if _DEVICES in arguments[:ours] else ""
    return [number if each == _DEVICES else each for each in arguments[:ours]] + list(arguments[ours:])


def main() -> None:
    """Run torchrun; it raises when a rank has failed, and `reports` sees to the rest."""
    gc.disable()  # what is imported stays, and each collection would visit all of it
    survive_user_signals()
    raise_at_first_interrupt()
    if "--nnodes=1" in sys.argv:
        prepare_first_store()  # meanwhile, torch is imported
    if can_fork():
        with threads_of_ranks(sys.argv[1:]):
            import torch.distributed
        prepare_template()
    end_with_launcher()  # a thread: the template must have none
    import torch
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import main as run_torchrun

    try:
        import rallypoint.pytorch.plugin  # noqa: F401 - it needs torch's rendezvous
    except ImportError as error:
        sys.exit(f"rallypoint: torch {torch.__version__} has no such rendezvous ({error}); 2.6 or later has")
    # An entry point has done so already, unless the package was not installed but only put on the path.
    rendezvous_handler_registry.register(BACKEND, get_handler())
    sys.argv[0] = "torchrun"  # what it calls itself where it refuses an option
    arguments = settle_ranks(sys.argv[1:])
    end_ranks_once()
    report_ends_of_attempts()
    if sys.platform == "win32":
        end_ranks_as_windows_does()
        arguments = with_ctrl_break(arguments)
    gc.freeze()
    gc.enable()
    run_torchrun(arguments)


if __name__ == "__main__":
    main()
