"""How a process gets a torch that uses Rallypoint, once it has imported torch.distributed.

torch calls `activate` when it is imported in an environment where Rallypoint is installed, as everything in
the entry-point group `torch.backends`; an exception there would break `import torch` for everybody. So it
does nothing unless `rallypoint enable` was said in this environment, and it lets nothing escape.
"""

from __future__ import annotations

import logging


def activate() -> None:
    """Make this process's torch use Rallypoint where it has to, if that is enabled here."""
    try:
        from rallypoint.launch.switches import enabling_file

        if enabling_file().exists():
            from rallypoint.pytorch.injection.rallypoint_hooks import after_import

            after_import("torch.distributed", _try_to_substitute)
    except Exception:
        _warn()


def substitute() -> None:
    """Patch torch's `TCPStore`, and make `rally://` known. UsageError if a variable of ours is wrong."""
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


def _try_to_substitute() -> None:
    try:
        substitute()
    except Exception:
        _warn()


def _warn() -> None:
    logging.getLogger("rallypoint.torch").warning("Rallypoint could not be loaded", exc_info=True)
