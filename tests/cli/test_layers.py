"""Which part may import which: arrows point down, and the pure parts stay pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rallypoint

ROOT = Path(rallypoint.__file__).parent

# Lowest first. Parts of one level do not import each other. The store's parts have levels of their own.
LEVELS = [
    {"build", "compiling", "errors", "text", "codec", "exits"},
    {"frames", "store.wire"},
    {"store.machine"},
    {"store.engine", "store.rollcall"},
    {"store.core"},
    {"store.server"},
    {"store.connect"},
    {"store.relay", "store.replica"},
    {"client"},
    {"explain"},
    {"launch"},
    {"pytorch"},
    {"diagnose", "watch"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}

# Folders and modules, with all that is below them.
PURE = {
    *("rallypoint.text", "rallypoint.codec", "rallypoint.exits", "rallypoint.frames"),
    *(f"rallypoint.store.{name}" for name in ("wire", "engine", "rollcall")),
    *(f"rallypoint.launch.stacks.{name}" for name in ("activity", "frames", "progress", "words")),
    *("rallypoint.store.core", "rallypoint.store.relay.core", "rallypoint.store.replica.core"),
    *(f"rallypoint.launch.rendezvous.{name}" for name in ("digest", "roster")),
    *("rallypoint.launch.handover", "rallypoint.launch.schedulers"),
    "rallypoint.store.replica.engines.etcd_messages",
    "rallypoint.diagnose.findings",
    "rallypoint.diagnose.doctor.between_machines",
    *(f"rallypoint.watch.timeline.{name}" for name in ("judgement", "records")),
}
IMPURE_MODULES = {
    "rallypoint.diagnose.findings",
    *("socket", "time", "threading", "asyncio", "selectors", "select"),
    *("random", "os", "datetime", "logging"),
}

# The package itself is below all: anyone may ask for its version, and nothing else.
PACKAGE = "rallypoint"
NAMES_OF_PACKAGE = {"rallypoint", "rallypoint.__version__"}


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands and the full name of what it imports."""

    module: str
    line: int
    target: str
    lazy: bool
    """Whether it is in a function, or for the type checker alone."""

    @property
    def part(self) -> str:
        """The part of the package that imports: right below it, or below `store`; empty for itself."""
        return _part(self.module)

    @property
    def where(self) -> str:
        return f"{self.module}, line {self.line}: imports {self.target}"


def _part(name: str) -> str:
    parts = name.split(".")[1:3]
    return ".".join(parts if parts[:1] == ["store"] else parts[:1])


def imports_of(root: Path) -> list[Import]:
    """All imports of a package, those in functions included."""
    return [found for path in sorted(root.rglob("*.py")) for found in _imports_in(path, root)]


def _imports_in(path: Path, root: Path) -> Iterator[Import]:
    names = [root.name, *path.relative_to(root).with_suffix("").parts]
    is_package = names[-1] == "__init__"
    module = ".".join(names[:-1] if is_package else names)
    package = module if is_package else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node, lazy in _nodes(tree):
        for target in _targets(node, package, root):
            yield Import(module, getattr(node, "lineno", 0), target, lazy)


def _nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes, and whether each is in a function or for the type checker alone."""
    left = [(tree, False)]
    while left:
        node, lazy = left.pop()
        guarded = isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING"
        lazy = lazy or guarded or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield node, lazy
        left += [(child, lazy) for child in ast.iter_child_nodes(node)]


def _last_name(node: ast.AST) -> str:
    """Of `a.b.c`, or of `c`: c."""
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def _targets(node: ast.AST, package: str, root: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = parents[: len(parents) + 1 - node.level] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        # `from rallypoint import x` and `from rallypoint.store.wire import x` may name a module.
        return [_resolve(source, alias.name, root) for alias in node.names]
    if isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__"):
        return [
            arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
    return []


def _resolve(source: str, name: str, root: Path) -> str:
    parts = source.split(".")
    if parts[0] != root.name:
        return source
    path = root.joinpath(*parts[1:], name)
    if len(parts) == 1 or path.is_dir() or path.with_suffix(".py").is_file():
        return f"{source}.{name}"
    return source


def faults_of(found: list[Import]) -> list[str]:
    """What the rules above forbid among some imports, as messages."""
    return [f"{each.where}: {fault}" for each in found if (fault := _fault(each))]


def _fault(found: Import) -> str:
    top = found.target.partition(".")[0]
    if top == "benchmarks":
        return "the package is used without the full benchmark"
    if top == "torch" and found.part != "pytorch":
        return "only pytorch/ may import torch"
    if _is_pure(found.module) and top in IMPURE_MODULES:
        return f"{found.module} knows nothing of I/O, clocks or threads"
    if top != PACKAGE or found.target in NAMES_OF_PACKAGE:
        return ""
    return _fault_of_arrow(found, _part(found.target))


def _is_pure(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:length]) in PURE for length in range(2, len(parts) + 1))


def _fault_of_arrow(found: Import, target: str) -> str:
    if found.part == "":
        return "" if found.lazy or target == "errors" else "the package itself imports lazily"
    if found.part == target:
        return ""
    for part in (found.part, target):
        if part not in LEVEL_OF:
            return f"{part} has no place among the layers of this test"
    if LEVEL_OF[target] < LEVEL_OF[found.part]:
        return ""
    return "the arrow points up" if LEVEL_OF[target] > LEVEL_OF[found.part] else "the arrow points sideways"


def circles_of(found: list[Import]) -> list[list[str]]:
    """Modules that import each other, by whatever way: each circle's members, sorted.

    Imports in functions and for the type checker count as well: they hide a circle, and do not open it. What
    the package itself imports lazily does not count, since the package is below all others.
    """
    arrows: dict[str, set[str]] = {}
    for each in found:
        if each.module != PACKAGE and each.target.startswith(f"{PACKAGE}."):
            arrows.setdefault(each.module, set()).add(each.target)
    reached = {module: _reached_from(module, arrows) for module in arrows}
    circles = {
        tuple(sorted(other for other in reached[module] if module in reached.get(other, ())))
        for module in arrows
        if module in reached[module]
    }
    return [list(circle) for circle in sorted(circles)]


def _reached_from(module: str, arrows: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    left = [module]
    while left:
        for target in arrows.get(left.pop(), ()):
            if target not in reached:
                reached.add(target)
                left.append(target)
    return reached


def test_arrows_point_down_and_the_pure_parts_are_pure() -> None:
    found = imports_of(ROOT)
    assert len(found) > 50
    assert faults_of(found) == []


def test_no_modules_import_each_other() -> None:
    assert circles_of(imports_of(ROOT)) == []


def test_a_circle_is_found_however_it_is_hidden(tmp_path: Path) -> None:
    root = tmp_path / "rallypoint"
    root.mkdir()
    (root / "__init__.py").write_text("def late():\n    from rallypoint.a import x")
    (root / "a.py").write_text("from rallypoint import b")
    (root / "b.py").write_text("def late():\n    from rallypoint.c import x")
    (root / "c.py").write_text("if TYPE_CHECKING:\n    from rallypoint.a import x")
    (root / "d.py").write_text("from rallypoint.a import x")
    assert circles_of(imports_of(root)) == [["rallypoint.a", "rallypoint.b", "rallypoint.c"]]


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("store/engine/x.py", "import rallypoint.store.rollcall", "sideways"),
        ("store/engine/x.py", "from rallypoint.store.rollcall import x", "sideways"),
        ("store/relay/core/relay.py", "import time", "nothing of I/O"),
        ("store/relay/relay.py", "import time", None),
        ("store/wire/x.py", "from rallypoint.errors import UsageError", None),
        ("store/wire/x.py", "from ..core.store import Core", "up"),
        ("store/wire/x.py", "from . import y", None),
        ("store/wire/x.py", "def late():\n    from time import sleep", "clocks"),
        ("store/wire/x.py", "import os.path", "clocks"),
        ("store/engine/x.py", "from rallypoint.store.wire import limits", None),
        ("store/server/x.py", "import time, rallypoint.store.engine", None),
        ("store/server/x.py", "from rallypoint.store.connect import x", "up"),
        ("store/connect/x.py", "import importlib\nimportlib.import_module('rallypoint.cli.main')", "up"),
        ("client/x.py", "def late():\n    import torch.distributed", "torch"),
        ("pytorch/x.py", "import torch", None),
        ("bench/x.py", "from rallypoint.pytorch import x", None),
        ("bench/x.py", "from benchmarks.targets import x", "without the full benchmark"),
        ("watch/x.py", "from rallypoint.diagnose import x", "sideways"),
        ("cli/x.py", "import rallypoint\nfrom rallypoint import __version__", None),
        ("store/server/x.py", "from rallypoint.store import doors", "no place"),
        ("utils.py", "from rallypoint.store.wire import limits", "no place"),
        ("__init__.py", "from rallypoint.client import x", "lazily"),
        ("__init__.py", "def late():\n    from rallypoint.client import x", None),
        ("__main__.py", "from rallypoint.cli.main import main", None),
    ],
)
def test_the_rules_catch_what_they_are_for(tmp_path: Path, path: str, text: str, fault: str | None) -> None:
    file = tmp_path / "rallypoint" / path
    for module in (
        file,
        tmp_path / "rallypoint/store/wire/limits.py",
        tmp_path / "rallypoint/store/wire/parser.py",
    ):
        module.parent.mkdir(parents=True, exist_ok=True)
        module.touch()
    file.write_text(text)
    faults = faults_of(imports_of(tmp_path / "rallypoint"))
    assert len(faults) == (fault is not None), faults
    assert fault is None or fault in faults[0]


IMPORT = """
import sys, time
before = set(sys.modules)
begin = time.process_time()
import rallypoint
print(time.process_time() - begin, *(set(sys.modules) - before))
"""
HEAVY = {"torch", "uvloop", "winloop", "typing", "rich", "asyncio", "numpy"}


def test_importing_the_package_is_light() -> None:
    """In a fresh interpreter, beyond its own start: under 60 ms of work, and nothing heavy comes along."""
    seconds = []
    for _ in range(5):
        run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        duration, *modules = run.stdout.split()
        seconds.append(float(duration))
        assert HEAVY.isdisjoint(modules)
    assert min(seconds) < 0.060
