"""The build hook: a wheel has its hot modules compiled where a C compiler is, and is pure Python elsewhere.

The modules of `COMPILED` are Python that runs as it is; mypyc compiles them as well, all into one library.
What is written in Cython (`*.pyx`) has no other form: its users do without it in a pure build. Whatever is
missing or fails, the result is the pure wheel, and one line that says why. RALLYPOINT_PURE=1 asks for it.

The compilers run in a process of their own (`python hatch_build.py FOLDER`): all that they say is in one log.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
SOURCE = ROOT / "src"

COMPILED = {
    "store/wire": "encoding parser requests sessions",
    "store/engine": "barriers engine keyspace waiters",
    "store/core": "clients server_core sessions store tickets",
    "store/relay/core": "combining downstream relay relay_client upstream upstream_requests values",
    "store/relay": "relay worker",
    "store/server/guard": "other_users",
    "store/machine": "addresses socket_owner",
    "store/server/loops": "backlog link listening pump",
}
"""What every request passes through, by folder.

A class is here only if its bases are; one with subclasses elsewhere is marked with `mypyc_attr`. A constant
that tests change is not Final, as mypyc writes those into the code.
"""

PYTHONS = ((3, 10), (3, 14))
"""The first and the last Python for which mypyc is known to have wheels."""


def sources() -> list[Path]:
    """The modules that mypyc compiles."""
    package = SOURCE / "rallypoint"
    return [package / folder / f"{name}.py" for folder, names in COMPILED.items() for name in names.split()]


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the extension modules to a wheel; an editable installation has none."""

    def dependencies(self) -> list[str]:
        return [] if why_not() else self.metadata.core.optional_dependencies["compile"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        folder = Path(self.root, "build", f"native-{sys.implementation.cache_tag}-{sysconfig.get_platform()}")
        why = why_not() or compile_into(folder)
        if why:
            self.app.display_warning(f"rallypoint: built as pure Python, which is slower: {why}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        built = folder / "lib"
        for path in built.rglob("*"):
            if path.is_file():
                build_data["force_include"][str(path)] = path.relative_to(built).as_posix()


def why_not() -> str:
    """Why nothing can be compiled here, as far as one can tell without trying; empty if it can."""
    if os.environ.get("RALLYPOINT_PURE", "0") not in ("", "0"):
        return "RALLYPOINT_PURE is set"
    if sys.implementation.name != "cpython" or not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return f"{platform.python_implementation()} {platform.python_version()} is not one it is compiled for"
    if not _has_compiler():
        return "there is no C compiler (set CC, or install gcc, clang or Visual Studio's build tools)"
    return _why_no_headers()


def _has_compiler() -> bool:
    if sys.platform == "win32":
        installer = Path(os.environ.get("PROGRAMFILES(X86)", ""), "Microsoft Visual Studio", "Installer")
        return bool(shutil.which("cl")) or (installer / "vswhere.exe").exists()
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    return shutil.which(command[0]) is not None


def _why_no_headers() -> str:
    headers = Path(sysconfig.get_path("include"))
    try:
        text = (headers / "patchlevel.h").read_text(encoding="utf-8")
    except OSError:
        return f"Python's headers are not in {headers} (install python3-dev or python3-devel)"
    version = ".".join(re.findall(r"#define PY_(?:MAJOR|MINOR)_VERSION\s+(\d+)", text))
    if version != "{}.{}".format(*sys.version_info):
        return f"the headers in {headers} are of Python {version}, not of {platform.python_version()}"
    return ""


def compile_into(folder: Path) -> str:
    """Leave the extension modules in `folder/lib`; why that failed, or empty."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, str(Path(__file__).resolve()), str(folder)]
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
    return f"{_first_error(log)} (all of it is in {log})" if code else ""


def _first_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [line for line in lines if re.search(r"\berror\b|Error:", line, re.I)]
    return (errors or lines or ["the compiler said nothing"])[0]


def main(folder: Path) -> None:
    """Run mypyc, Cython and the C compiler, this one only if something has changed since the last time."""
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    class SideBySide(build_ext):  # type: ignore[misc]
        """Compiles the files of one extension module at the same time, too."""

        def build_extensions(self) -> None:
            compile_one, link = self.compiler._compile, self.compiler.link_shared_object
            begun: list[Future[None]] = []

            def link_compiled(*words: Any, **options: Any) -> None:
                for each in begun:
                    each.result()
                link(*words, **options)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                self.compiler._compile = lambda *words: begun.append(pool.submit(compile_one, *words))
                self.compiler.link_shared_object = link_compiled
                super().build_extensions()

    _try_compiler(folder)
    from Cython.Build import cythonize
    from mypyc.build import mypycify

    # Not the project's settings of mypy: those are for its own code in an environment with all its packages.
    settings = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    extensions = mypycify(
        [*settings, f"--cache-dir={folder / 'cache'}", *map(str, sources())],
        group_name="rallypoint",
        target_dir=str(folder / "c"),
        multi_file=True,  # one C file per module: a third less to do for the compiler, and no slower
        opt_level="2",
        debug_level="0",
    )
    if sys.platform != "win32":
        for extension in extensions:  # calls within the library need no table; a warning is no error
            extension.extra_compile_args += ["-fvisibility=hidden", "-Wno-error"]
    written = [
        Extension(".".join(path.relative_to(SOURCE).with_suffix("").parts), [str(path)])
        for path in sorted((SOURCE / "rallypoint").rglob("*.pyx"))
        if sys.platform == "linux" or path.parent.name == "wire"  # the others ask Linux
    ]
    extensions += cythonize(written, build_dir=str(folder / "c"), language_level=3)
    build = SideBySide(Distribution({"name": "rallypoint", "ext_modules": extensions}))
    build.build_lib = str(folder / "lib")
    build.build_temp = str(folder / "objects")
    build.parallel = os.cpu_count()
    build.ensure_finalized()
    build.run()
    for path in {*(folder / "lib").rglob("*.*")} - {*map(Path, build.get_outputs())}:
        path.unlink()  # of a module that is no longer compiled


def _try_compiler(folder: Path) -> None:
    """End this process now, and not in a minute, if the compiler is of no use; it says why."""
    from setuptools._distutils.ccompiler import new_compiler
    from setuptools._distutils.sysconfig import customize_compiler

    trial = folder / "trial.c"
    trial.write_text("#include <Python.h>\nint trial(void) { return PY_MAJOR_VERSION; }\n", encoding="utf-8")
    compiler = new_compiler()
    customize_compiler(compiler)
    headers = [sysconfig.get_path("include")]
    compiler.compile([str(trial)], output_dir=str(folder / "objects"), include_dirs=headers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
