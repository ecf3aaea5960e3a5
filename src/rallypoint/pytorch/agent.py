"""torchrun, as `rallypoint run` starts it: `python -m rallypoint.pytorch.agent` and torchrun's arguments.

It is torchrun's own main function. All that is added is what only torch can tell: how many ranks
`--nproc-per-node=devices` means on this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from rallypoint.launch.options import BACKEND

_DEVICES = "--nproc-per-node=devices"


def count_devices() -> int:
    """One rank per accelerator, else one."""
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
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import main as run_torchrun

    try:
        from rallypoint.pytorch.plugin import create_handler
    except ImportError as error:
        sys.exit(f"rallypoint: torch {torch.__version__} has no such rendezvous ({error}); 2.6 or later has")
    # An entry point has done so already, unless the package was not installed but only put on the path.
    rendezvous_handler_registry.register(BACKEND, create_handler)
    sys.argv[0] = "torchrun"  # what it calls itself where it refuses an option
    run_torchrun(settle_ranks(sys.argv[1:]))


if __name__ == "__main__":
    main()
