"""What makes torch use Rallypoint: the only part that imports torch.

Importing this package changes nothing. `register` makes `rally://` and Rallypoint's `file://` known to
`init_process_group`; `rallypoint run` does that, and more, in every process it starts.
"""

from __future__ import annotations


def register() -> None:
    """Let `init_process_group` take `rally://host:port`, and check files of `file://` for being stale.

    Call it before `init_process_group`, on every rank; a second call does nothing.
    """
    from rallypoint.pytorch.schemes import register_schemes

    register_schemes()


__all__ = ["register"]
