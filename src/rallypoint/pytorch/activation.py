"""Making the torch of this process use Rallypoint. Called once it has imported torch.distributed."""

from __future__ import annotations


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
