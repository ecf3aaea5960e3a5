"""The facts about a build of torch, and findings from them, each with a state and a hint. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rallypoint.diagnose.findings import Finding, State, failure, ok, unknown, warning

SERVER: Final = b"LibUVStoreDaemon"
"""The class of the libuv server: in every build that has it, in symbols and in type information."""
MISSING: Final = b"LibUV TCPStore implementation missing"
"""The text that builds without the server have in its place."""
STORE: Final = b"TCPStore"
TEXTS: Final = (SERVER, MISSING, STORE)

_TRUE: Final = {"1", "on", "yes", "true", "y"}
_ARCHITECTURES: Final = ("TORCH_CUDA_ARCH_LIST", "CMAKE_CUDA_ARCHITECTURES")
_OPTIONS: Final = ("USE_DISTRIBUTED", "USE_TENSORPIPE", "USE_GLOO", "USE_NCCL", "USE_CUDA", "USE_LIBUV")
_NEEDED: Final = ("USE_DISTRIBUTED", "USE_TENSORPIPE")

_WITHOUT: Final = (
    "jobs come up on it with `rallypoint run`; "
    "`rallypoint torch plan pytorch` writes the script of a build with it, in a folder pytorch"
)
_ON_WINDOWS: Final = (
    "jobs come up on it with `rallypoint run`; no option of torch's CMake files compiles the server with MSVC"
)


def is_on(value: str) -> bool:
    """Whether `if(VARIABLE)` is true in CMake for a variable of its cache."""
    number = re.fullmatch(r"-?[0-9]+", value) is not None and int(value) != 0
    return value.lower() in _TRUE or number


def is_found(value: str) -> bool:
    """Whether a search of CMake has found something: an empty value or one that ends in NOTFOUND has not."""
    return bool(value) and not value.endswith("NOTFOUND")


def architectures(cache: Mapping[str, str]) -> str:
    """The GPU architectures that a build is for, as they were given."""
    given = [cache[name] for name in _ARCHITECTURES if is_found(cache.get(name, ""))]
    return next((value for value in given if value != "OFF"), "")


@dataclass(frozen=True)
class InstalledCopy:
    """A library that was built, and the one of its name where it is loaded from."""

    name: str
    same: bool
    """Equal but for the changes that an installation makes."""
    built_at: float
    installed_at: float
    """When they were written, in seconds since 1970."""


@dataclass(frozen=True)
class BuildReport:
    """All that was found in one build."""

    kind: str
    path: str
    libuv: bool | None
    """Whether the libuv server is in it; None if no library was there to look into."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether the server is in it and nothing contradicts."""
        return self.libuv is True and all(each.state is not State.FAILURE for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints. A build has no fixes that could be written, and nothing is timed."""
        rows = [
            {"name": each.name, "state": each.state.value, "found": each.found, "hint": each.hint}
            for each in self.findings
        ]
        return {"ok": self.ok, "kind": self.kind, "path": self.path, "libuv": self.libuv, "findings": rows}


def has_server(found: frozenset[bytes]) -> bool:
    """Whether the texts in a library are those of a build with the libuv server."""
    return SERVER in found and MISSING not in found


def judge_server(found: frozenset[bytes], windows: bool) -> Finding:
    """By the texts in the library that would hold it."""
    name, hint = "libuv server", _ON_WINDOWS if windows else _WITHOUT
    if has_server(found):
        return ok(name, f"compiled in ({SERVER.decode()} is in the library)")
    if SERVER in found:
        why = "in a part of the library and missing in another; is it for several machines?"
    elif MISSING in found:
        why = f"not compiled in (the library says {MISSING.decode()!r})"
    elif STORE in found:
        why = "not in it; this torch has a TCPStore that knows nothing of libuv, as before 2.1"
    else:
        why = "not in it, and no TCPStore either: torch was built without distributed"
    return failure(name, why, hint)


def is_libuv(name: str) -> bool:
    """Whether a file name is one of libuv's shared libraries."""
    base = name.replace("\\", "/").rpartition("/")[2].lower()
    return base == "uv.dll" or base.startswith(
        ("libuv.so", "libuv.dll", "libuv-", "libuv.1.dylib", "libuv.dylib")
    )


def judge_shipped(shipped: Sequence[str]) -> Finding | None:
    """The libuv that comes with it, if any: some take it for the server."""
    proof = "which proves nothing: gloo uses it too"
    return ok("libuv library", f"{', '.join(shipped)} comes with it, {proof}") if shipped else None


# A tree ----------------------------------------------------------------------------------------------------


def judge_options(cache: Mapping[str, str], defined: bool | None, windows: bool) -> list[Finding]:
    """The options of a build folder, and whether the file with the server gets the macro that counts."""
    off = [name for name in _NEEDED if name in cache and not is_on(cache[name])]
    shown = [f"{name}={cache.get(name, 'not set')}" for name in _OPTIONS]
    shown.append(f"architectures {architectures(cache) or 'not set'}")
    wanted = " and ".join(f"-D{name}=ON" for name in off)
    hint = f"configure again with {wanted}: the server is compiled where both are on"
    text = ", ".join(shown)
    findings = [failure("options", text, _ON_WINDOWS if windows else hint) if off else ok("options", text)]
    if is_on(cache.get("USE_LIBUV", "")) and not windows and (off or defined is False):
        findings.append(
            warning(
                "USE_LIBUV",
                "ON, which does not compile the server in: it is an option of gloo, for its transport",
                "the server comes with USE_DISTRIBUTED and USE_TENSORPIPE",
            )
        )
    return [*findings, _judge_macro(defined, windows)]


def _judge_macro(defined: bool | None, windows: bool) -> Finding:
    name = "configured"
    if defined:
        return ok(name, "the store's server is compiled with TORCH_USE_LIBUV")
    if defined is None:
        found = "build.ninja has no step for TCPStoreLibUvBackend.cpp, so this cannot be told"
        return unknown(name, found, "is it configured, for ninja, with USE_DISTRIBUTED?")
    return failure(
        name,
        "the store's server is compiled without TORCH_USE_LIBUV",
        _ON_WINDOWS if windows else "configure again with -DUSE_DISTRIBUTED=ON and -DUSE_TENSORPIPE=ON",
    )


def judge_copies(folder: str, copies: Sequence[InstalledCopy]) -> Finding:
    """Whether what was built is what is installed: by content, and by time where that differs."""
    name, other = "installed", [copy for copy in copies if not copy.same]
    if not other:
        names = ", ".join(copy.name for copy in copies)
        return ok(name, f"{names} in {folder}: the same as built")
    stale = [copy for copy in other if copy.built_at >= copy.installed_at]
    if stale:
        what = "; ".join(
            f"{copy.name} was built {_moment(copy.built_at)}, the one in {folder} is of "
            f"{_moment(copy.installed_at)} and differs"
            for copy in stale
        )
        return failure(name, f"rebuilt but not copied: {what}", f"copy what was built to {folder}")
    what = ", ".join(copy.name for copy in other)
    return warning(
        name,
        f"{what} in {folder} is newer than what was built, and differs",
        "was it installed from another build, or stripped?",
    )


def _moment(seconds: float) -> str:
    moment = datetime(1970, 1, 1) + timedelta(seconds=seconds)  # `fromtimestamp` has limits on Windows
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
