"""How a process gets a torch that uses Rallypoint, once it has imported torch.distributed.

torch calls `activate` when it is imported in an environment where Rallypoint is installed, as everything in
the entry-point group `torch.backends`; an exception there would break `import torch` for everybody. So it
does nothing unless `rallypoint enable` was said in this environment or `rallypoint run` has started the
process, and it lets nothing escape.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

_OF_INJECTION = "rallypoint_hooks"


def activate() -> None:
    """Make this process's torch use Rallypoint where it has to, if that is enabled here or it is in a job.

    A process of a job has that from the folder on PYTHONPATH, unless its interpreter ignores that variable:
    with -E or -I, or a `._pth` file, as the Pythons have that come with applications for Windows.
    """
    try:
        from rallypoint.launch.switches import enabling_file

        was_missed = bool(os.environ.get("RALLYPOINT_JOB")) and _OF_INJECTION not in sys.modules
        if was_missed or enabling_file().exists():
            from rallypoint.pytorch.injection.rallypoint_hooks import after_import, on_failure

            after_import("torch.distributed", _try_to_substitute)
            if was_missed:
                on_failure(_report)
    except Exception:
        _warn()


def substitute() -> None:
    """Patch torch's `TCPStore`, and make `rally://` known. UsageError if a variable of ours is wrong.

    To be called once this process has imported torch.distributed.
    """
    from rallypoint.launch.switches import Patch, patch_of

    patch = patch_of()
    import torch.distributed as dist

    if patch is Patch.NEVER or not dist.is_available():  # not every build has it
        return
    from rallypoint.pytorch.schemes import register_rally, register_schemes
    from rallypoint.pytorch.substitution import install

    install()
    if patch is Patch.ALWAYS:
        register_schemes()
    else:
        register_rally()


def get_handler() -> Callable[[Any], Any]:
    """What every torchrun loads: it returns what makes a handler, and imports nothing that is not needed."""
    return _create_handler


def _create_handler(parameters: Any) -> Any:
    collects = gc.isenabled()
    gc.disable()  # what is imported stays, and one collection visits all of torch: half of the import's time
    try:
        from rallypoint.pytorch.plugin import create_handler
    finally:
        if collects:
            gc.enable()
    return create_handler(parameters)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> bool:
    from rallypoint.launch.reports import report_failure  # late: hardly any process fails

    return report_failure(kind, error, trace)


def _try_to_substitute() -> None:
    try:
        substitute()
    except Exception:
        _warn()


def _warn() -> None:
    logging.getLogger("rallypoint.torch").warning("Rallypoint could not be loaded", exc_info=True)
