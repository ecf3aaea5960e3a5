"""Which branches of the package a stream takes: marks are put into its code as it is imported.

A mark is one assignment, `__marks__[number] = 1`, at the beginning of a function, of each arm of an `if` or
`try` (also of one that is not written), and of each loop and what is behind it. That is fast, takes nothing
but the standard library, and is the same on every version of Python and every machine.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

MARKED = (
    *("codec", "text", "store.wire", "store.engine", "store.rollcall", "store.core", "store.relay.core"),
    "store.connect.connection",
    *("client.snapshots", "launch.rendezvous.roster", "watch.timeline", "explain"),
)
"""The modules and packages of Rallypoint that get marks: all that read foreign bytes, and what they call."""

MARKS = bytearray()
"""One byte for each mark; 1 if it was passed since the last `take`."""


def install() -> None:
    """Put marks into what is imported from now on."""
    sys.meta_path.insert(0, _Finder())


def take() -> int:
    """The marks that were passed since this was last called, as the bits of a number."""
    passed = int.from_bytes(MARKS, "little")
    MARKS[:] = bytes(len(MARKS))
    return passed


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not f"{name}.".startswith(tuple(f"rallypoint.{each}." for each in MARKED)):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        _put_marks(tree)
        code: CodeType = compile(tree, self.path, "exec")
        return code

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__marks__"] = MARKS
        super().exec_module(module)


def _put_marks(tree: ast.AST) -> None:
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ExceptHandler | ast.match_case):
            node.body = _marked(node.body)
        elif isinstance(node, ast.If | ast.For | ast.While):
            node.body, node.orelse = _marked(node.body), _marked(node.orelse)


def _marked(body: list[ast.stmt]) -> list[ast.stmt]:
    MARKS.append(0)
    return [*ast.parse(f"__marks__[{len(MARKS) - 1}] = 1").body, *body]
