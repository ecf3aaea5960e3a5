"""Where the value of each option comes from: command line, environment, file, scheduler, or built in.

The first of these that says something counts. The file is the nearest `rallypoint.toml`, or `pyproject.toml`
with a table `[tool.rallypoint]`, in the folder or one above it, that `trust` lets us obey; its table `run`
has the options, its table `env` variables for the job. What a scheduler tells comes in as a `Placement`. Each
value keeps its source, to be shown and to be named in errors. Two options may speak of the same thing: an
endpoint can also be said by master_addr and standalone, and four settings by rdzv_conf. There, too, the
higher source wins. No torch, no output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import Endpoint, Endpoints
from rallypoint.launch.environment import without_rank
from rallypoint.launch.options import (
    BACKEND,
    BY_NAME,
    DEFAULT_MASTER_PORT,
    IN_CONF,
    OPTIONS,
    Option,
    check_backend,
    flag_of,
    text_of,
    torchruns_option,
)
from rallypoint.launch.rendezvous.roster import Size
from rallypoint.launch.schedulers.placement import Placement, Told
from rallypoint.launch.trust import doubt_about
from rallypoint.store.server.guard.secret import FILE_VARIABLE, SECRET_VARIABLE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


class Level(IntEnum):
    """Where a value can come from; the lower number wins."""

    COMMAND_LINE = 0
    ENVIRONMENT = 1
    FILE = 2
    SCHEDULER = 3
    BUILT_IN = 4


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value, and where it comes from: in words, and as a level."""

    value: T
    source: str = "built-in"
    level: Level = Level.BUILT_IN

    @property
    def is_set(self) -> bool:
        """Whether a source names it, even if the value is the built-in one."""
        return self.level is not Level.BUILT_IN

    @property
    def text(self) -> str:
        """The value as a command line would spell it; empty for none."""
        return text_of(self.value)


@dataclass(frozen=True)
class Settings:
    """Every option of `rallypoint run`, settled. The names are those of the options.

    `rdzv_endpoint` is what standalone, rdzv_endpoint, master_addr and master_port come to, and None for a
    job on one machine that takes a free port. The options of `IN_CONF` count in rdzv_conf.
    """

    nnodes: Setting[Size]
    spares: Setting[int]
    health: Setting[str]
    nproc_per_node: Setting[int | str]
    node_rank: Setting[int | None]
    rdzv_endpoint: Setting[Endpoints | None]
    standalone: Setting[bool]
    rdzv_conf: Setting[Mapping[str, str]]
    master_addr: Setting[str | None]
    master_port: Setting[int | None]
    join_timeout: Setting[float]
    relay: Setting[str]
    port_range: Setting[str | None]
    patch: Setting[str]
    client: Setting[str]
    stacks: Setting[str]
    stall_after: Setting[float]
    use_libuv: Setting[str]
    allow_user: Setting[str]
    insecure: Setting[bool]
    passed_on: Mapping[str, Setting[object]] = field(default_factory=dict)
    """torchrun's other options by name, as they were given; True for one without a value."""
    variables: Mapping[str, Setting[str]] = field(default_factory=dict)
    """The variables in the file, without those that are set already."""
    file: Path | None = None
    """The file that was used."""
    placement: Placement | None = None
    """What the scheduler tells of this process."""
    warnings: tuple[str, ...] = ()
    """Files that were not used, and why; and where the scheduler says something else."""

    def everything(self) -> dict[str, Setting[object]]:
        """All settings by name, in the order in which they are shown."""
        known = {option.name: cast(Setting[object], getattr(self, option.name)) for option in OPTIONS}
        variables = {f"{ENV}.{name}": cast(Setting[object], each) for name, each in self.variables.items()}
        return {**known, **self.passed_on, **variables}


def settle(
    arguments: Mapping[str, str | bool],
    environ: Mapping[str, str],
    folder: Path,
    placement: Placement | None = None,
) -> Settings:
    """Find the value of every option, and check that they go together.

    `arguments` are the options of the command line, as `split_arguments` gives them. A variable that is empty
    counts as not set. The search for a file begins in `folder`. `placement` is what a scheduler tells.
    UsageError says which value of which source cannot be meant, and what would be right.
    """
    file = read_file(folder)
    of_command_line: dict[str, Setting[object]] = {
        name: Setting(value, f"command line ({flag_of(name)})", Level.COMMAND_LINE)
        for name, value in arguments.items()
    }
    said = {**file.options, **_of_environment(without_rank(environ)), **of_command_line}
    settings = _with_values(said, file, environ)
    if placement is not None and not settings.standalone.value:
        told = _of_scheduler(placement, settings.spares.value)
        fitting = {name: each for name, each in told.items() if _fits(name, told, settings)}
        warnings = (*file.warnings, *_disagreements(told, settings, placement))
        settings = _with_values({**fitting, **said}, file, environ)
        settings = replace(settings, placement=placement, warnings=warnings)
    settings = replace(settings, rdzv_endpoint=_meeting_place(settings))
    _check(settings)
    return settings


def _with_values(
    said: Mapping[str, Setting[object]], file: SettingsFile, environ: Mapping[str, str]
) -> Settings:
    settings = Settings(
        **{option.name: _read(option, said.get(option.name)) for option in OPTIONS},  # type: ignore[arg-type]
        passed_on={name: each for name, each in said.items() if name not in BY_NAME},
        variables={name: each for name, each in file.variables.items() if name not in environ},
        file=file.path,
        warnings=file.warnings,
    )
    found: dict[str, Any] = {
        name: _or_by_conf(getattr(settings, name), name, settings.rdzv_conf, key)
        for name, key in IN_CONF.items()
    }
    return replace(settings, **found)


def _of_environment(environ: Mapping[str, str]) -> dict[str, Setting[object]]:
    """What the variables of our options say, and those of torchrun's others."""
    ours = {option.variable: option.name for option in OPTIONS}
    found: dict[str, Setting[object]] = {}
    for variable, text in environ.items():
        name = ours.get(variable) or torchruns_option(variable)
        if name and text:
            found[name] = Setting(text, f"environment ({variable})", Level.ENVIRONMENT)
    return found


def _read(option: Option, said: Setting[object] | None) -> Setting[object]:
    if said is None:
        return Setting(option.default)
    return replace(said, value=option.read(text_of(said.value), said.source))


# The scheduler --------------------------------------------------------------------------------------------


def _of_scheduler(placement: Placement, spares: int) -> dict[str, Setting[object]]:
    """What a scheduler says of our options, by their names.

    Of the machines that it gives to the job, some may be spares. Then it does not say which rank each has.
    """
    nnodes = placement.nnodes
    told: dict[str, Told[int] | Told[str] | None] = {
        "nnodes": nnodes and replace(nnodes, value=max(nnodes.value - spares, 1)),
        "nproc_per_node": placement.nproc_per_node,
        "node_rank": None if spares else placement.node_rank,
        "master_addr": placement.first_host,
        "master_port": placement.port if placement.first_host else None,
        "rdzv_id": placement.run_id,
    }
    return {
        name: Setting(each.value, f"{placement.scheduler.name} ({each.variable})", Level.SCHEDULER)
        for name, each in told.items()
        if each is not None
    }


def _fits(name: str, told: Mapping[str, Setting[object]], said: Settings) -> bool:
    """Whether what a scheduler says of an option is of use beside what the other sources say.

    A job of one machine meets nowhere. Machines keep the scheduler's ranks only if the job has as many
    machines as the scheduler says, and has such a rank. An address that somebody else names has the port that
    it always has.
    """
    machines = _size(told, said)
    if name == "node_rank":
        is_known = machines.least == machines.most > 1 and not _differs("nnodes", told, said)
        return is_known and int(told[name].text) < machines.most
    if name in ("master_addr", "master_port"):
        return machines.most + said.spares.value > 1 and not said.master_addr.is_set
    return True


def _size(told: Mapping[str, Setting[object]], said: Settings) -> Size:
    """How many machines the job has."""
    by_scheduler = told.get("nnodes")
    if said.nnodes.is_set or by_scheduler is None:
        return said.nnodes.value
    return Size(int(by_scheduler.text), int(by_scheduler.text))


def _differs(name: str, told: Mapping[str, Setting[object]], said: Settings) -> bool:
    """Whether another source says something of an option that does not go with what the scheduler says."""
    other, by_scheduler = said.everything().get(name), told.get(name)
    if other is None or not other.is_set or by_scheduler is None:
        return False
    if isinstance(other.value, Size):
        return not other.value.least <= int(by_scheduler.text) <= other.value.most
    # A word such as `devices` is a number that only torch knows.
    return type(other.value) is type(by_scheduler.value) and other.value != by_scheduler.value


def _disagreements(
    told: Mapping[str, Setting[object]], said: Settings, placement: Placement
) -> Iterator[str]:
    spares = f", and spares is {said.spares.text} by {said.spares.source}" if said.spares.value else ""
    for name in ("nnodes", "nproc_per_node", "node_rank"):
        if _differs(name, told, said):
            other, by_scheduler = said.everything()[name], getattr(placement, name)
            yield (
                f"{name} is {other.text} by {other.source}{spares if name == 'nnodes' else ''}; "
                f"{placement.scheduler.name} says {by_scheduler.value} ({by_scheduler.variable})"
            )


# The file -------------------------------------------------------------------------------------------------

FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "rallypoint.toml": (),
    "pyproject.toml": ("tool", "rallypoint"),
}
"""The files that are read, the first one first, and the table of each that is ours."""

_MOST_BYTES: Final = 1 << 20

RUN: Final = "run"
"""The table with the options of `rallypoint run`."""

ENV: Final = "env"
"""The table with variables for the jobs that it starts."""


_REFUSED: Final = ("BASH_ENV", "ENV", "PATH")
_REFUSED_PREFIXES: Final = ("LD_", "DYLD_", "PYTHON")
"""Variables that no file may set, and how others begin: they decide which code programs load."""


@dataclass(frozen=True)
class SettingsFile:
    """The options and the variables in the file that counts; empty if there is no such file."""

    path: Path | None = None
    options: Mapping[str, Setting[object]] = field(default_factory=dict)
    variables: Mapping[str, Setting[str]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """Nearer files that do not count, since others may write them, each with the reason."""


def read_file(folder: Path) -> SettingsFile:
    """The file that counts for jobs that are started in a folder."""
    start = folder.resolve()
    warnings: list[str] = []
    for path, tables in _candidates(start):
        doubt = doubt_about(path, start)
        if doubt:
            if _mentions_us(path, tables):
                warnings.append(f"{path} is not used: {doubt}")
            continue
        content = _our_table(path, tables)
        if content is not None:
            known = _checked_table(content, path, tables)
            for key in known:
                if key not in (RUN, ENV):
                    raise _unknown_table(key, path, tables)
            options = _options_of_table(known.get(RUN, {}), path, (*tables, RUN))
            variables = _variables_of_table(known.get(ENV, {}), path, (*tables, ENV))
            return SettingsFile(path, options, variables, tuple(warnings))
    return SettingsFile(warnings=tuple(warnings))


def _candidates(start: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Files that may be about us, the nearest first, and the names of the table that would be ours."""
    for place in (start, *start.parents):
        for name, tables in FILES.items():
            if os.path.isfile(place / name):
                yield place / name, tables


def _mentions_us(path: Path, tables: tuple[str, ...]) -> bool:
    """Whether a file seems to be about us. It is not read any further, as it may be anybody's."""
    if not tables:
        return True
    try:
        with path.open("rb") as file:
            return tables[-1].encode() in file.read(_MOST_BYTES)
    except OSError:
        return False


def _our_table(path: Path, tables: tuple[str, ...]) -> object:
    """Our table of a file, or None if the file is not about us."""
    text = _text_of_file(path, tables[-1] if tables else "")
    if text is None:
        return None
    try:
        content: object = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}", hint="correct it at that place") from None
    for table in tables:
        content = content.get(table) if isinstance(content, dict) else None
    return content


def _text_of_file(path: Path, mention: str) -> str | None:
    """The text, or None if it lacks the mention: a file that is not about us may be broken in any way."""
    try:
        content = path.read_bytes()
        # Some editors begin a file with a byte order mark.
        return content.decode("utf-8-sig") if mention.encode() in content else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="it must be readable UTF-8") from None


def _checked_table(value: object, path: Path, tables: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict):
        name = ".".join(tables)
        raise UsageError(f"{path}: {name} is {value!r}, but must be a table", hint=f"write [{name}]")
    return value


def _unknown_table(key: str, path: Path, tables: tuple[str, ...]) -> UsageError:
    run, env = (f"[{'.'.join((*tables, name))}]" for name in (RUN, ENV))
    is_option = key.replace("-", "_") in BY_NAME
    return UsageError(
        f"{path}: there is no table {'.'.join((*tables, key))}",
        hint=f"{key} goes below {run}" if is_option else f"there are {run} and {env}",
    )


def _variables_of_table(content: object, path: Path, tables: tuple[str, ...]) -> dict[str, Setting[str]]:
    found: dict[str, Setting[str]] = {}
    for name, value in _checked_table(content, path, tables).items():
        source = f"{path} ({'.'.join((*tables, name))})"
        if type(value) not in (str, int) or not name or "=" in name or "\0" in f"{name}{value}":
            raise UsageError(f"{source} is {value!r}", hint='write NAME = "text" or a whole number')
        if name.upper() in _REFUSED or name.upper().startswith(_REFUSED_PREFIXES):
            raise UsageError(
                f"{source}: no file may set {name}, which decides which code programs load",
                hint=f"take it out, and set it where the job is started: export {name}=...",
            )
        if name.upper() == SECRET_VARIABLE:
            raise _no_place_for_secrets(source)
        found[name] = Setting(str(value), source, Level.FILE)
    return found


def _no_place_for_secrets(source: str) -> UsageError:
    return UsageError(
        f"{source}: a file of settings is no place for a secret: others may read it, and it is shown",
        hint=f"put the secret into a file of its own, and name that in the table [{ENV}]: {FILE_VARIABLE}",
    )


def _options_of_table(content: object, path: Path, tables: tuple[str, ...]) -> dict[str, Setting[object]]:
    found: dict[str, Setting[object]] = {}
    for key, value in _checked_table(content, path, tables).items():
        source = f"{path} ({'.'.join((*tables, key))})"
        name = key.replace("-", "_")
        if name in found:
            raise UsageError(f"{source}: {name} is there twice, with - and with _", hint="keep one")
        if name in ("secret", "secret_file"):
            raise _no_place_for_secrets(source)
        if not _is_plain(value) and not (name == "rdzv_conf" and _is_plain_table(value)):
            shown = "a table" if name == ENV else repr(value)  # there may be a secret in it
            raise UsageError(
                f"{source}: {name} cannot be {shown}",
                hint="write a text, a number, true or false; rdzv_conf also a table of these, without commas",
            )
        if name == "log_dir":
            value = str(path.parent / str(value))  # relative to the file, wherever the job is started
        found[name] = Setting(value, source, Level.FILE)
    check_backend(found.pop("rdzv_backend", Setting(BACKEND)).value)
    return found


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _is_plain_table(value: object) -> bool:
    return isinstance(value, dict) and all(
        _is_plain(each) and "," not in f"{key}{each}" and "=" not in key for key, each in value.items()
    )


# What several options say together ------------------------------------------------------------------------


def _meeting_place(said: Settings) -> Setting[Endpoints | None]:
    """The endpoint by the highest source that says anything of it; a free port of this machine if none."""
    named = min(said.rdzv_endpoint, _by_master(said), key=lambda claim: claim.level)  # a tie: the former
    alone = said.standalone
    if not alone.value or named.level < alone.level:
        return named
    if named.value is not None and named.level is alone.level:
        raise UsageError(
            f"standalone is for one machine without an endpoint, but there is {named.value} as well: "
            f"{alone.source}, {named.source}",
            hint="leave out one of them",
        )
    return Setting(None, alone.source, alone.level)


def _by_master(said: Settings) -> Setting[Endpoints | None]:
    """The endpoint by master_addr and master_port. A port alone is this machine's, if it is the only one.

    Another port for the address that a scheduler tells does not make that somebody's choice of an address.
    """
    address, port = said.master_addr, said.master_port
    if address.value is None and (port.value is None or said.nnodes.value.most + said.spares.value > 1):
        return Setting(None)
    endpoint = Endpoints([Endpoint(address.value or "127.0.0.1", port.value or DEFAULT_MASTER_PORT)])
    if port.level < address.level:
        is_told = address.level is Level.SCHEDULER
        return Setting(endpoint, port.source, address.level if is_told else port.level)
    return Setting(endpoint, address.source, address.level)


def _or_by_conf(own: Setting[T], name: str, conf: Setting[Mapping[str, str]], key: str) -> Setting[T]:
    """A setting of its own, or what rdzv_conf says of it, whichever has the higher source."""
    text = conf.value.get(key)
    if text is None:
        return own
    value = cast(T, BY_NAME[name].read(text, f"{conf.source}, {key}"))
    if own.level is conf.level and own.value != value:
        raise UsageError(
            f"{name} is {own.text} by {own.source}, but {key}={text} by {conf.source}",
            hint="leave out one of them",
        )
    return own if own.level <= conf.level else Setting(value, conf.source, conf.level)


def _check(settings: Settings) -> None:
    """UsageError for values that are right one by one but not together."""
    nodes, rank, spares = settings.nnodes, settings.node_rank, settings.spares
    if nodes.value.most + spares.value > 1 and settings.rdzv_endpoint.value is None:
        beside = f", and spares is {spares.value} by {spares.source}" if spares.value else ""
        raise UsageError(
            f"nnodes is {nodes.value} by {nodes.source}{beside}, but nothing says where the machines meet",
            hint="add --rdzv-endpoint HOST[:PORT] with the name of one of them, the same on each",
        )
    if rank.value is not None and rank.value >= nodes.value.most:
        raise UsageError(
            f"node_rank is {rank.value} by {rank.source}, but nnodes is {nodes.value} by {nodes.source}",
            hint=f"machines have ranks from 0 to {nodes.value.most - 1}",
        )
