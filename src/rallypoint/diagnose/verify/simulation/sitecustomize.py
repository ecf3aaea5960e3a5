"""Makes torch behave like another build, in every Python process that has this folder on its PYTHONPATH.

    RALLYPOINT_SIMULATE=no-libuv    TCPStore refuses libuv, which it takes by default, clients included
    RALLYPOINT_SIMULATE=broken      TCPStore does not work at all

The check comes first in the constructor, and with the exception types and words of real builds. It is in
place before anything else can have seen the class: right when torch's C++ part makes it.
"""

import os
import sys
from typing import Any

from rallypoint.pytorch.injection.rallypoint_hooks import after_import, run_next_sitecustomize


def _change_store() -> None:
    core: Any = sys.modules["torch._C"]  # it has just been imported; torch itself is still under way
    make = core._c10d_init

    def make_and_change() -> Any:
        made = make()
        if made:
            _replace_constructor(core, sys.modules["torch._C._distributed_c10d"])
        return made

    core._c10d_init = make_and_change


def _replace_constructor(core: Any, c10d: Any) -> None:
    init, broken = c10d.TCPStore.__init__, os.environ["RALLYPOINT_SIMULATE"] == "broken"

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        if broken:
            raise core._DistNetworkError("Unknown error")
        if args[8:] != (False,) and kwargs.get("use_libuv", True):
            raise core._DistStoreError("use_libuv was requested but PyTorch was built without libuv support")
        init(self, *args, **kwargs)

    c10d.TCPStore.__init__ = refuse


after_import("torch._C", _change_store)
run_next_sitecustomize(__file__)
