"""What torch calls when it is imported, in an environment where Rallypoint is installed.

torch loads everything in the entry-point group `torch.backends`; an exception here would break `import
torch` for everybody. So this does nothing unless `rallypoint enable` was said in this environment, and it
lets nothing escape.
"""

from __future__ import annotations

import logging


def activate() -> None:
    """Make this process's torch use Rallypoint where it has to, if that is enabled here."""
    try:
        from rallypoint.launch.switches import enabling_file

        if enabling_file().exists():
            from rallypoint.pytorch.injection.rallypoint_hooks import after_import

            after_import("torch.distributed", _substitute)
    except Exception:
        _warn()


def _substitute() -> None:
    try:
        from rallypoint.pytorch.worker import substitute

        substitute()
    except Exception:
        _warn()


def _warn() -> None:
    logging.getLogger("rallypoint.torch").warning("Rallypoint could not be loaded", exc_info=True)
