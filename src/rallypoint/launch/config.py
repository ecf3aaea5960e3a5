"""Where the value of each option comes from: command line, environment, file, scheduler, or built in.

The first of these that says something counts. `split_arguments` takes the command line apart, `settings_file`
reads the file, and what a scheduler tells comes in as a `Placement`. Each value keeps its source, to be shown
and to be named in errors. Two options may speak of the same thing: an endpoint can also be said by
master_addr and standalone, and some settings by rdzv_conf. There, too, the higher source wins. No torch, no
output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import Endpoint, Endpoints
from rallypoint.launch.environment import without_rank
from rallypoint.launch.options import (
    BACKEND,
    BY_NAME,
    DEFAULT_MASTER_PORT,
    FLAGS,
    IN_CONF,
    OPTIONS,
    Level,
    Option,
    Setting,
    Settings,
    check_backend,
    flag_of,
    text_of,
    torchruns_option,
)
from rallypoint.launch.rendezvous.roster import Size
from rallypoint.launch.schedulers import Placement, Told
from rallypoint.launch.settings_file import SettingsFile, read_file

T = TypeVar("T")

_USAGE: Final = (
    "write rallypoint run [OPTIONS] SCRIPT [ARGS]..., or -m MODULE [ARGS]..., or -- COMMAND [ARGS]..."
)

_KNOWN: Final = {**BY_NAME, **{flag.name: flag for flag in FLAGS}}
_SHORT: Final = {"-m": "module", "-h": "help", "-r": "redirects", "-t": "tee"}

_WITHOUT_VALUE: Final = frozenset({"no_python", "run_path", "virtual_local_rank"})
"""Options of torchrun that take no value: the word behind them may be the script, whatever its name."""


# The command line -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """What to start: `words` are the script, the module or the command, and its arguments, untouched."""

    kind: Literal["script", "module", "command"]
    words: tuple[str, ...]


@dataclass(frozen=True)
class CommandLine:
    """What a command line of `rallypoint run` asks for.

    `options` has the text of each option that was given, by its name, and True for one without a value.
    `target` is None only where nothing is to be started: with `help`, in which case nothing else was looked
    at, or with `show_config`.
    """

    options: Mapping[str, str | bool] = field(default_factory=dict)
    target: Program | None = None
    tasks: bool = False
    no_explain: bool = False
    show_config: bool = False
    json: bool = False
    help: bool = False


def split_arguments(arguments: Sequence[str]) -> CommandLine:
    """Take apart what follows `rallypoint run`.

    Options end at the first word that is none: it is the script, or with -m the module, and all that
    follows belongs to it; behind a `--` stands a command. Of an option given twice, the last counts, unless
    it `repeats`. An option that is not in the table takes the next word as its value, unless that begins
    with - or ends in .py. UsageError for an option of the table that lacks its value, and for a missing or
    double target. The values themselves are not looked at: `settle` does that.
    """
    words = deque(arguments)
    given: dict[str, str | bool] = {}
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        name, value = _take_option(words)
        if name == "help":
            return CommandLine(help=True)
        option = _KNOWN.get(name)
        repeats = option is not None and option.repeats and name in given
        given[name] = f"{given[name]},{value}" if repeats else value
    check_backend(given.pop("rdzv_backend", BACKEND))
    as_module, tasks, no_explain, show_config, json = (
        bool(given.pop(name, False)) for name in ("module", "tasks", "no_explain", "show_config", "json")
    )
    target = _target(tuple(words), as_module)
    if target is None and not show_config:
        raise UsageError(f"there is no {'module' if as_module else 'script'} to start", hint=_USAGE)
    return CommandLine(given, target, tasks, no_explain, show_config, json)


def _take_option(words: deque[str]) -> tuple[str, str | bool]:
    """Take an option and its value, True for one that has none, off the front of the words."""
    word = words.popleft()
    flag, equals, value = _parts(word)
    name = _SHORT.get(flag, flag.lstrip("-").replace("-", "_"))
    option = _KNOWN.get(name)
    if option is not None and not option.metavar:
        if equals:
            raise UsageError(
                f"{flag} takes no value, but {word} gives it one", hint=f"write {flag} by itself"
            )
        return name, True
    if equals:
        return name, value
    may_be_value = bool(words) and not words[0].startswith("-")
    if option is None:
        may_be_value = may_be_value and name not in _WITHOUT_VALUE and not words[0].endswith(".py")
        return name, words.popleft() if may_be_value else True
    if not may_be_value:
        raise UsageError(
            f"{flag} needs a value", hint=f"write {flag} VALUE, or {flag}=VALUE for one that begins with -"
        )
    return name, words.popleft()


def _parts(word: str) -> tuple[str, bool, str]:
    """An option, whether there is a value in the same word, and that value: of --tee=3, -t3 or -t=3."""
    if word[:2] in _SHORT:
        return word[:2], len(word) > 2, word[2:].removeprefix("=")
    flag, equals, value = word.partition("=")
    return flag, bool(equals), value


def _target(words: tuple[str, ...], as_module: bool) -> Program | None:
    if words[:1] == ("--",):
        return _command(words[1:], as_module)
    if not words or not words[0]:
        return None
    if as_module and (words[0].endswith(".py") or "/" in words[0]):
        raise UsageError(
            f"-m takes a module, but {words[0]} is a script", hint="leave out -m, or name a module: pkg.train"
        )
    return Program("module" if as_module else "script", words)


def _command(words: tuple[str, ...], as_module: bool) -> Program:
    if as_module:
        raise UsageError("there is both -m and a command behind --", hint=_USAGE)
    if not words or not words[0]:
        raise UsageError("there is no command behind --", hint=_USAGE)
    return Program("command", words)


# Settling --------------------------------------------------------------------------------------------------


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
