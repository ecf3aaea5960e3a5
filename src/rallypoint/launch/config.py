"""Where the value of each option comes from: command line over environment over file over built-in.

The file is the nearest `rallypoint.toml`, or `pyproject.toml` with a table `[tool.rallypoint]`, in the
folder or one above it; its table `run` has the options, its table `env` variables for the job. Each value
keeps its source, to be shown and to be named in errors. Two options may speak of the same thing: an endpoint
can also be said by master_addr and standalone, and three settings by rdzv_conf. There, too, the higher source
wins. No torch, no output.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Final, Generic, TypeVar, cast

from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import Endpoint
from rallypoint.launch.options import (
    BY_NAME,
    DEFAULT_MASTER_PORT,
    FOLDER,
    OPTIONS,
    Nodes,
    Option,
    advice,
    text_of,
)

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
    BUILT_IN = 3


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value, and where it comes from: in words, and as a level."""

    value: T
    source: str = "built-in"
    level: Level = Level.BUILT_IN

    @property
    def is_set(self) -> bool:
        """Whether somebody chose it, be it to the built-in value."""
        return self.level is not Level.BUILT_IN

    @property
    def text(self) -> str:
        """The value as a command line would spell it; empty for none."""
        return text_of(self.value)


@dataclass(frozen=True)
class Settings:
    """Every option of `rallypoint run`, settled and checked. The names are those of the options.

    `rdzv_endpoint` is what standalone, rdzv_endpoint, master_addr and master_port come to, and None for a
    job on one machine that takes a free port. `node_rank`, `join_timeout` and `relay` count in rdzv_conf.
    """

    nnodes: Setting[Nodes]
    nproc_per_node: Setting[int | str]
    node_rank: Setting[int | None]
    rdzv_endpoint: Setting[Endpoint | None]
    standalone: Setting[bool]
    rdzv_id: Setting[str | None]
    rdzv_conf: Setting[Mapping[str, str]]
    max_restarts: Setting[int]
    monitor_interval: Setting[float]
    start_method: Setting[str]
    role: Setting[str]
    local_addr: Setting[str | None]
    log_dir: Setting[str | None]
    redirects: Setting[str]
    tee: Setting[str]
    local_ranks_filter: Setting[str]
    master_addr: Setting[str | None]
    master_port: Setting[int | None]
    join_timeout: Setting[float]
    relay: Setting[str]
    patch: Setting[str]
    client: Setting[str]
    use_libuv: Setting[str]
    variables: Mapping[str, Setting[str]] = field(default_factory=dict)
    """What the file says of the environment; a variable that is set already is not among them."""

    def __getitem__(self, name: str) -> Setting[object]:
        """The setting of that name, for code that goes through a table of names."""
        return cast(Setting[object], getattr(self, name))

    def describe(self) -> list[tuple[str, str, str]]:
        """Rows of name, value and source, to be printed; a value that is empty reads (none)."""
        options = [(name, self[name].text or "(none)", self[name].source) for name in _NAMES]
        return [
            *options,
            *((f"{ENV}.{name}", each.text, each.source) for name, each in self.variables.items()),
        ]

    def as_json(self) -> dict[str, dict[str, object]]:
        """Value and source by name, of what JSON has: an endpoint and a range of machines are texts."""
        found = {name: _as_json(self[name]) for name in _NAMES}
        return {**found, **{f"{ENV}.{name}": _as_json(each) for name, each in self.variables.items()}}


_NAMES: Final = tuple(each.name for each in fields(Settings) if each.name in BY_NAME)


def _as_json(setting: Setting[T]) -> dict[str, object]:
    return {"value": _plain(setting.value), "source": setting.source}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, Nodes | Endpoint) else value


def settle(arguments: Mapping[str, str | None], environ: Mapping[str, str], folder: Path) -> Settings:
    """Find the value of every option, and check that they go together.

    `arguments` has the texts of the command line by name, as `split_arguments` gives them; None is as good
    as not there. A variable that is empty counts as not set. The search for a file begins in `folder`.
    UsageError says which value of which source cannot be meant, and what would be right.
    """
    file = _read_file(folder)
    found = {option.name: _settle_one(option, arguments, environ, file.options) for option in OPTIONS}
    settings = _combine(Settings(**found))  # type: ignore[arg-type]
    _check(settings)
    return replace(
        settings, variables={name: each for name, each in file.variables.items() if name not in environ}
    )


def _settle_one(
    option: Option,
    arguments: Mapping[str, str | None],
    environ: Mapping[str, str],
    of_file: Mapping[str, Setting[object]],
) -> Setting[object]:
    text = arguments.get(option.name)
    if text is not None:
        return _read(option, text, f"command line ({option.flag})", Level.COMMAND_LINE)
    text = environ.get(option.variable)
    if text:
        return _read(option, text, f"environment ({option.variable})", Level.ENVIRONMENT)
    return of_file.get(option.name, Setting(option.default))


def _read(option: Option, text: str, source: str, level: Level) -> Setting[object]:
    return Setting(option.read(text, source), source, level)


# The file -------------------------------------------------------------------------------------------------

FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "rallypoint.toml": (),
    "pyproject.toml": ("tool", "rallypoint"),
}
"""The files that are read, the first one first, and the table in which each has what is ours."""

RUN: Final = "run"
"""The table with the options of `rallypoint run`."""

ENV: Final = "env"
"""The table with variables for the jobs that it starts."""

_TOML_NAMES: Final[Mapping[type, str]] = {
    str: "a string",
    int: "an integer",
    float: "a float",
    bool: "true or false",
    dict: "a table",
}


@dataclass(frozen=True)
class _Content:
    """What a file says, checked."""

    options: Mapping[str, Setting[object]] = field(default_factory=dict)
    variables: Mapping[str, Setting[str]] = field(default_factory=dict)


def find_file(folder: Path) -> Path | None:
    """The file that counts for jobs that are started in a folder."""
    return next((path for path, _, _ in _files_about_us(folder)), None)


def _read_file(folder: Path) -> _Content:
    """All settings of the file that counts, checked one by one; nothing if there is no file."""
    for path, tables, ours in _files_about_us(folder):
        return _read_tables(ours, path, tables)
    return _Content()


def _files_about_us(folder: Path) -> Iterator[tuple[Path, tuple[str, ...], object]]:
    """Files with something for us, the nearest first: the path, the names of our table, and what it holds."""
    start = folder.resolve()
    for place in (start, *start.parents):
        for name, tables in FILES.items():
            ours = _our_table(place / name, tables)
            if ours is not None:
                yield place / name, tables, ours


def _our_table(path: Path, tables: tuple[str, ...]) -> object:
    """What a file has for us, or None if it is not there or not about us."""
    if not os.path.isfile(path):
        return None
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
    """The text, or None if it lacks the mention: a file that is not about us may be as broken as it likes."""
    try:
        content = path.read_bytes()
        # Some editors begin a file with a byte order mark.
        return content.decode("utf-8-sig") if mention.encode() in content else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="it must be readable UTF-8") from None


def _read_tables(ours: object, path: Path, tables: tuple[str, ...]) -> _Content:
    known = _checked_table(ours, path, tables)
    for key in known:
        if key not in (RUN, ENV):
            raise _unknown_table(key, path, tables)
    return _Content(
        _options_of_table(known.get(RUN, {}), path, (*tables, RUN)),
        _variables_of_table(known.get(ENV, {}), path, (*tables, ENV)),
    )


def _variables_of_table(ours: object, path: Path, tables: tuple[str, ...]) -> dict[str, Setting[str]]:
    found: dict[str, Setting[str]] = {}
    for name, value in _checked_table(ours, path, tables).items():
        source = f"{path} ({'.'.join((*tables, name))})"
        if type(value) not in (str, int) or not name or "=" in name or "\0" in f"{name}{value}":
            raise UsageError(f"{source} is {value!r}", hint='write NAME = "text" or a whole number')
        found[name] = Setting(str(value), source, Level.FILE)
    return found


def _options_of_table(ours: object, path: Path, tables: tuple[str, ...]) -> dict[str, Setting[object]]:
    found: dict[str, Setting[object]] = {}
    for key, value in _checked_table(ours, path, tables).items():
        source = f"{path} ({'.'.join((*tables, key))})"
        option = _option_of_key(key, source)
        if option.name in found:
            raise UsageError(f"{source}: {option.name} is there twice, with - and with _", hint="keep one")
        text = _text_in_file(option, value, source, path.parent)
        found[option.name] = _read(option, text, source, Level.FILE)
    return found


def _option_of_key(key: str, source: str) -> Option:
    option = BY_NAME.get(key.replace("-", "_"))
    if option is None:
        raise UsageError(f"{source}: there is no option {key!r}", hint=advice(key, BY_NAME))
    return option


def _checked_table(value: object, path: Path, tables: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict):
        name = ".".join(tables)
        raise UsageError(f"{path}: {name} is {value!r}, but must be a table", hint=f"write [{name}]")
    return value


def _unknown_table(key: str, path: Path, tables: tuple[str, ...]) -> UsageError:
    run = f"[{'.'.join((*tables, RUN))}]"
    what = f"{path}: there is no table {'.'.join((*tables, key))}"
    if key.replace("-", "_") in BY_NAME:
        return UsageError(what, hint=f"{key} goes below {run}")
    return UsageError(what, hint=f"there are {run} and [{'.'.join((*tables, ENV))}]")


def _text_in_file(option: Option, value: object, source: str, folder: Path) -> str:
    """The text that a TOML value stands for; a relative path is made absolute."""
    types = option.kind.file_types
    if type(value) not in types:  # not isinstance: to Python, true is a whole number
        wanted = " or ".join(_TOML_NAMES[each] for each in types)
        refusal = option.refusal(value, source)
        raise UsageError(refusal.message, hint=f"{refusal.hint}; in TOML, {wanted}")
    if isinstance(value, dict) and not all(_is_plain_pair(key, each) for key, each in value.items()):
        raise option.refusal(value, source)
    if option.kind is FOLDER and value:
        return str(folder / str(value))
    return text_of(value)


def _is_plain_pair(key: str, value: object) -> bool:
    return type(value) in (str, int, float, bool) and "," not in f"{key}{value}" and "=" not in key


# What several options say together ------------------------------------------------------------------------


def _combine(said: Settings) -> Settings:
    return replace(
        said,
        rdzv_endpoint=_meeting_place(said),
        node_rank=_or_by_conf(said.node_rank, "node_rank", said.rdzv_conf, "rank"),
        join_timeout=_or_by_conf(said.join_timeout, "join_timeout", said.rdzv_conf, "join_timeout"),
        relay=_or_by_conf(said.relay, "relay", said.rdzv_conf, "relay"),
    )


def _meeting_place(said: Settings) -> Setting[Endpoint | None]:
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


def _by_master(said: Settings) -> Setting[Endpoint | None]:
    """The endpoint by master_addr and master_port. A port alone is this machine's, if there is but one."""
    address, port = said.master_addr, said.master_port
    if address.value is None and (port.value is None or said.nnodes.value.maximum > 1):
        return Setting(None)
    endpoint = Endpoint(address.value or "127.0.0.1", port.value or DEFAULT_MASTER_PORT)
    if port.level < address.level:
        return Setting(endpoint, port.source, port.level)
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
    nodes, rank = settings.nnodes, settings.node_rank
    if nodes.value.maximum > 1 and settings.rdzv_endpoint.value is None:
        raise UsageError(
            f"nnodes is {nodes.value} by {nodes.source}, but nothing says where the machines meet",
            hint="add --rdzv-endpoint HOST[:PORT] with the name of one of them, the same on each",
        )
    if rank.value is not None and rank.value >= nodes.value.maximum:
        raise UsageError(
            f"node_rank is {rank.value} by {rank.source}, but nnodes is {nodes.value} by {nodes.source}",
            hint=f"machines have ranks from 0 to {nodes.value.maximum - 1}",
        )
