"""Which build of the package is in use: its hot modules compiled, or all of it pure Python.

Both are of the same source. A compiled build has an extension module beside the .py file of each hot module,
and some without a .py file, which their users can do without. This module is imported where RALLYPOINT_PURE
is set, and by whoever asks.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from importlib.util import spec_from_file_location

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_HOT = "rallypoint.store.wire.parser"
"""It is compiled if any module is."""


class SourceOnly:
    """Finds the modules of this package as a pure installation has them."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("rallypoint."):
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is None or not isinstance(found.loader, ExtensionFileLoader):
            return found
        source = os.path.join(os.path.dirname(found.loader.path), name.rpartition(".")[2] + ".py")
        if not os.path.exists(source):
            raise ModuleNotFoundError(f"{name!r} is compiled, and RALLYPOINT_PURE is set", name=name)
        return spec_from_file_location(name, source)


def use_source_only() -> None:
    """Have the interpreter run all modules of this package that are imported from now on."""
    sys.meta_path.insert(0, SourceOnly)


def in_use() -> str:
    """Which build runs in this process, in words."""
    folder = os.path.join(os.path.dirname(__file__), "store", "wire")
    found = PathFinder.find_spec(_HOT, [folder])
    if found is None or not isinstance(found.loader, ExtensionFileLoader):
        return "pure Python"
    return "pure Python, as RALLYPOINT_PURE is set" if SourceOnly in sys.meta_path else "compiled"
