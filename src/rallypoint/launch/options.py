"""The settings of `rallypoint run`: one table with a row for each, and what a value of a setting is.

A row of `Settings` says all about an option: its name, its type, how a text is read, the default, the help,
the variable, and who reads it. A new option is a new row. An option has one name everywhere:
`--nproc-per-node` on the command line, `nproc-per-node` or `nproc_per_node` in a file, `PET_NPROC_PER_NODE`
in the environment. Names and meanings are torchrun's, so that a torchrun command can be taken over word by
word; some options are Rallypoint's own. Every option that is not in the table goes to torchrun as it stands,
and torchrun checks it. Pure: no torch, no files, no environment.
"""

# ruff: noqa: RUF009 - a row of the table is a field, whatever function makes it

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import DEFAULT_PORT, IPV6, STORE_PORT, Endpoints, parse_endpoints
from rallypoint.launch.endpoint import HOST as HOST_NAME
from rallypoint.launch.rendezvous.roster import Settings as SharedSettings
from rallypoint.launch.rendezvous.roster import Size
from rallypoint.launch.schedulers import Placement
from rallypoint.launch.stacks import STACKS_VARIABLE, STALL_SECONDS, STALL_VARIABLE, signals_of
from rallypoint.launch.switches import CLIENT_VARIABLE, PATCH_VARIABLE, PRELOAD_VARIABLE, START_VARIABLE
from rallypoint.store.server.guard.other_users import INSECURE_VARIABLE, USERS_VARIABLE
from rallypoint.store.server.loops.backend import VARIABLE as LIBUV_VARIABLE
from rallypoint.store.server.loops.backend import parse_switch
from rallypoint.store.server.process.binding import ANY_PORT

T = TypeVar("T")

DEFAULT_MASTER_PORT: Final = 29500
"""The port beside a master_addr that comes without a master_port; torchrun's."""

ENV: Final = "env"
"""The table of a file with variables for the jobs."""

BACKEND: Final = "rallypoint"
"""The only rendezvous backend that `rallypoint run` uses."""

# What a value can be --------------------------------------------------------------------------------------


def text_of(value: object) -> str:
    """A value as a command line or a file would spell it; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, Mapping):
        return ",".join(f"{key}={text_of(each)}" for key, each in value.items())
    return str(value)


# From a text to a value: each returns it or raises ValueError ---------------------------------------------


def _match(pattern: str, text: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text.strip())
    if match is None:
        raise ValueError(text)
    return match


def _whole(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(_match("[0-9]+", text)[0])
        if not minimum <= number <= maximum:
            raise ValueError(text)
        return number

    return parse


def _like(pattern: str) -> Callable[[str], str]:
    return lambda text: _match(pattern, text)[0]


def parse_seconds(text: str) -> float:
    """A number of seconds, more than 0; ValueError for anything else."""
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


def parse_ports(text: str) -> range:
    """`FIRST-LAST`, both included; ValueError for anything else."""
    match = _match("([0-9]+)-([0-9]+)", text)
    first, last = _port(match[1]), _port(match[2])
    if first > last:
        raise ValueError(text)
    return range(first, last + 1)


def _ports(text: str) -> str:
    ports = parse_ports(text)
    return f"{ports[0]}-{ports[-1]}"


def _nodes(text: str) -> Size:
    match = _match("([0-9]+)(?::([0-9]+))?", text)
    least = int(match[1])
    most = least if match[2] is None else int(match[2])
    if not 1 <= least <= most:
        raise ValueError(text)
    return Size(least, most)


def _ranks_per_node(text: str) -> int | str:
    word = _match(r"\S+", text)[0]
    return int(word) if word.isdecimal() else word


def _endpoints(text: str) -> Endpoints | None:
    if not text.strip():
        return None
    endpoints = parse_endpoints(text)
    for each in endpoints:
        _port(str(each.port))  # 0, a free one, could not be known to other machines
    return endpoints


def _host(text: str) -> str:
    return _match(rf"{HOST_NAME}|{IPV6}|\[{IPV6}\]", text)[0].strip("[]")


def _conf(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")] if text.strip() else []
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    if not all(conf.keys()) or not all(conf.values()):
        raise ValueError(text)
    return conf


def _switch(text: str) -> bool:
    return parse_switch(text, "a switch")


def _stacks(text: str) -> str:
    signals_of(text, "stacks")  # a signal that is not known is told here, and not by every machine
    return text.strip()


def _libuv(text: str) -> str:
    word = text.strip().lower()
    return word if word == "auto" else str(int(parse_switch(word, "use_libuv")))


_port: Final = _whole(1, 65535)


# A value, and where it comes from --------------------------------------------------------------------------


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


# The table of options ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One option; of `Settings` a row.

    `metavar` is empty for one that takes no value on the command line. `parse` raises ValueError for a text
    that is not allowed. `default` is the built-in value; `variable` is read where the command line is silent.
    """

    name: str
    metavar: str
    parse: Callable[[str], object]
    default: object
    help: str
    variable: str = ""
    short: str = ""
    repeats: bool = False
    """Whether an option given twice has both values, with a comma between them; else the last counts."""
    in_conf: str = ""
    """Its name in rdzv_conf, if it can be given there as well: then it goes to the rendezvous."""
    for_processes: bool = False
    """Whether all processes of a job read its variable, also those of a command behind `--`."""
    for_tasks: bool = False
    """Whether it means something with --tasks, besides those that all processes read."""

    def __post_init__(self) -> None:
        if not self.variable:
            object.__setattr__(self, "variable", f"PET_{self.name.upper()}")

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    def read(self, text: str, source: str) -> object:
        """The value that a text stands for; UsageError, naming the source, for one that is not allowed."""
        try:
            return self.parse(text)
        except ValueError:
            hint = f"write {self.metavar or 'true or false'}: {self.help}"
            raise UsageError(f"{source}: {self.name} cannot be {text!r}", hint=hint) from None


def flag_of(name: str) -> str:
    """An option as the command line spells it."""
    return f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"


def _row(
    metavar: str,
    parse: Callable[[str], T],
    default: T,
    help_text: str,
    variable: str = "",
    **more: Any,
) -> Setting[T]:
    """A field of `Settings`, with the option that it is settled from."""
    row = {"metavar": metavar, "parse": parse, "default": default, "help": help_text, "variable": variable}
    return cast(Setting[T], field(metadata={**row, **more}))


def _choice(metavar: str, help_text: str, variable: str, **more: Any) -> Setting[str]:
    """An option of Rallypoint's own that is one of the words in its metavar, `auto` by default."""
    return _row(metavar, _like(metavar), "auto", help_text, variable, **more)


@dataclass(frozen=True)
class Settings:
    """Every option of `rallypoint run`, settled: the table of options, in the order in which they are shown.

    `rdzv_endpoint` is what standalone, rdzv_endpoint, master_addr and master_port come to, and None for a
    job on one machine that takes a free port.
    """

    nnodes: Setting[Size] = _row(
        "N|MIN:MAX", _nodes, Size(1, 1), "How many machines, 1 or more, or from how many to how many."
    )
    spares: Setting[int] = _row(
        "N",
        _whole(0),
        0,
        "How many machines more than nnodes are to wait, to take the place of one that is lost or not fit.",
        "RALLYPOINT_SPARES",
        in_conf="spares",
    )
    health: Setting[str] = _choice(
        "auto|quick|full|off",
        "What a machine examines of itself before it takes part: quick, what takes 3 seconds at most; full; "
        "off; auto, quick if there are spares.",
        "RALLYPOINT_HEALTH",
        in_conf="health",
    )
    nproc_per_node: Setting[int | str] = _row(
        "N|WORD",
        _ranks_per_node,
        "devices",
        "Ranks on each machine: a number, or devices (one per accelerator, else one), auto (one per "
        "accelerator, else one per core), gpu, cpu, xpu.",
    )
    node_rank: Setting[int | None] = _row(
        "N",
        _whole(0),
        None,
        "The rank, from 0 on, that this machine asks for among the machines.",
        in_conf="rank",
    )
    rdzv_endpoint: Setting[Endpoints | None] = _row(
        "HOST[:PORT]",
        _endpoints,
        None,
        f"Where the machines meet, the same on each of them; the port is {DEFAULT_PORT} if none is given. An "
        "IPv6 address goes in brackets. One machine needs none. Several, with commas: the places of a store "
        f"that outlives its machine (serve --engine); their port is {STORE_PORT} if the last has none.",
        for_tasks=True,
    )
    standalone: Setting[bool] = _row(
        "",
        _switch,
        False,
        "One machine that needs no endpoint, whatever the environment or a file says of one.",
    )
    rdzv_conf: Setting[Mapping[str, str]] = _row(
        "K=V,...", _conf, {}, "More settings of the rendezvous; in a file also a table."
    )
    master_addr: Setting[str | None] = _row(
        "HOST",
        _host,
        None,
        "The host of the endpoint, where rdzv_endpoint is not given.",
        for_tasks=True,
    )
    master_port: Setting[int | None] = _row(
        "PORT",
        _port,
        None,
        f"The port of the endpoint, where rdzv_endpoint is not given; {DEFAULT_MASTER_PORT} beside a "
        "master_addr.",
        for_tasks=True,
    )
    join_timeout: Setting[float] = _row(
        "SECONDS",
        parse_seconds,
        600.0,
        "Seconds, more than 0, until the machines must have come.",
        "RALLYPOINT_JOIN_TIMEOUT",
        in_conf="join_timeout",
        for_tasks=True,
    )
    relay: Setting[str] = _choice(
        "auto|on|off",
        "Whether each machine's ranks share a relay: auto, with two machines or more; on; off.",
        "RALLYPOINT_RELAY",
        in_conf="relay",
    )
    port_range: Setting[str | None] = _row(
        "FIRST-LAST",
        _ports,
        None,
        "Ports, such as 29600-29699: the launcher takes one of them where it opens one to other machines, "
        "besides the endpoint's. They need it for ranks that share no relay. Without this, a free port.",
        "RALLYPOINT_PORT_RANGE",
        in_conf="port_range",
    )
    patch: Setting[str] = _choice(
        "auto|always|never",
        "When Rallypoint serves a store that torch is asked for: auto, where this torch has no libuv; "
        "always; never.",
        PATCH_VARIABLE,
        for_processes=True,
    )
    client: Setting[str] = _choice(
        "auto|torch|python", "Which client talks to the store.", CLIENT_VARIABLE, for_processes=True
    )
    start: Setting[str] = _choice(
        "auto|fork|spawn",
        "How ranks are started: fork, from one process that has imported torch, which saves each rank the "
        "import; spawn, as torchrun does; auto, fork on Linux.",
        START_VARIABLE,
        for_processes=True,
    )
    preload: Setting[str] = _row(
        "MODULE,...",
        _like(r"[\w.]+(\s*,\s*[\w.]+)*"),
        "",
        "More modules to import before ranks are forked.",
        PRELOAD_VARIABLE,
        repeats=True,
        for_processes=True,
    )
    stacks: Setting[str] = _row(
        "on|off|SIGNAL,...",
        _stacks,
        "on",
        "Whether ranks are asked what they are doing, and by which signals to their helper threads: for the "
        "interpreter, and for a rank in which C code holds the interpreter lock. "
        "On: SIGRTMAX-3,SIGRTMAX-4; on macOS SIGINFO; on Windows an event.",
        STACKS_VARIABLE,
        for_processes=True,
    )
    stall_after: Setting[float] = _row(
        "SECONDS",
        parse_seconds,
        STALL_SECONDS,
        "Seconds for which ranks may wait for others without a move before it is said what each does.",
        STALL_VARIABLE,
        for_processes=True,
    )
    use_libuv: Setting[str] = _row(
        "auto|0|1",
        _libuv,
        "auto",
        "Which backend serves: 1 libuv, 0 the standard library, auto what is there.",
        LIBUV_VARIABLE,
        for_processes=True,
    )
    allow_user: Setting[str] = _row(
        "NAME|UID,...",
        _like(r"[^\s,]+(\s*,\s*[^\s,]+)*"),
        "",
        "Other users of this machine who may take part, and whose servers may be joined, besides yourself "
        "and root; may be repeated.",
        USERS_VARIABLE,
        repeats=True,
        for_processes=True,
    )
    insecure: Setting[bool] = _row(
        "",
        _switch,
        False,
        "Let every user of this machine take part, and join a server whoever holds it.",
        INSECURE_VARIABLE,
        for_processes=True,
    )

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

    def variables_of_processes(self) -> dict[str, str]:
        """The variables in which all processes of the job read their options."""
        values = {each.variable: getattr(self, each.name).value for each in OPTIONS if each.for_processes}
        if self.use_libuv.value == "auto":  # to servers, that is no variable at all
            del values[LIBUV_VARIABLE]
        given = {name: value for name, value in values.items() if value not in (False, "")}
        return {name: "1" if value is True else text_of(value) for name, value in given.items()}


OPTIONS: Final[tuple[Option, ...]] = tuple(
    Option(each.name, **each.metadata) for each in fields(Settings) if each.metadata
)
"""What the command line, the environment and a file can say."""


def _flag(name: str, help_text: str, short: str = "") -> Option:
    """An option without a value."""
    return Option(name, "", _switch, False, help_text, short=short)


FLAGS: Final[tuple[Option, ...]] = (
    _flag("module", "What follows the options is a module, started as python -m does.", "-m"),
    _flag("tasks", "A scheduler has started a task for each rank: be the rank that it says."),
    _flag("no_explain", "Do not explain a failure at the end of the output."),
    _flag("show_config", "Print each setting with where it comes from, and start nothing."),
    _flag("json", "Print JSON."),
    _flag("help", "Show this message and exit.", "-h"),
)
"""What the command line alone can say."""


def _conf_row(write: str, parse: Callable[[str], T], default: T) -> T:
    """A field of `RendezvousSettings`; `write` says what is allowed."""
    row: T = field(default=default, metadata={"write": write, "parse": parse})
    return row


def _workers(text: str) -> int | None:
    from rallypoint.store.relay.store_with_workers import parse_workers  # late: it is much to import

    return parse_workers(text, "it")


_SECONDS: Final = "a positive number of seconds"


@dataclass(frozen=True)
class RendezvousSettings:
    """What torchrun's `--rdzv-conf` says to the backend `rallypoint`, by the same names.

    `rallypoint run` passes on here what `Settings` has with `in_conf`.
    """

    join_timeout: float = _conf_row(_SECONDS, parse_seconds, 600.0)
    """How long to wait until enough machines have joined."""
    last_call_timeout: float = _conf_row(_SECONDS, parse_seconds, 30.0)
    """How long to wait for more machines after that."""
    close_timeout: float = _conf_row(_SECONDS, parse_seconds, 30.0)
    """How long the machine with the store waits at the end for the others to leave."""
    keep_alive_interval: float = _conf_row(_SECONDS, parse_seconds, 1.0)
    keep_alive_max_attempt: int = _conf_row("a number", lambda text: max(int(text), 1), 4)
    """How many heartbeats a machine may miss before it counts as lost."""
    rank: int = _conf_row("a number", int, -1)
    """The machine's rank, if it asks for one."""
    is_host: bool | None = _conf_row("one of 0, 1, true, false, on, off", _switch, None)
    """Whether this machine holds the rendezvous store; None: if the endpoint names it."""
    relay: str = _conf_row("one of auto, on, off", _like("auto|on|off"), "auto")
    workers: int | None = _conf_row("a number to 64, or auto; 0 on Windows", _workers, None)
    """How many processes the job's store has besides its first one; None: as many as it needs."""
    port_range: range = _conf_row("FIRST-LAST, such as 29600-29699", parse_ports, ANY_PORT)
    spares: int = _conf_row("a number", lambda text: max(int(text), 0), 0)
    health: str = _conf_row("auto|quick|full|off", _like("auto|quick|full|off"), "auto")
    start: str = _conf_row("auto|fork|spawn", _like("auto|fork|spawn"), "")
    """How ranks are started; empty: as RALLYPOINT_START says."""
    max_restarts: str = _conf_row("a number", lambda text: str(int(text)), "")
    """For comparison with other machines: torch counts the restarts. Empty: not known."""

    def shared(self, size: Size, *, has_relays: bool) -> SharedSettings:
        """The settings that all machines of the job must have alike."""
        restarts = (("--max-restarts", self.max_restarts),) if self.max_restarts else ()
        relay = "on" if has_relays else "off"
        return (("--nnodes", str(size)), ("--spares", str(self.spares)), ("--relay", relay), *restarts)

    @property
    def silence(self) -> float:
        """After how many seconds without a heartbeat a machine counts as lost."""
        return (self.keep_alive_max_attempt + 1) * self.keep_alive_interval

    def outlasting(self, seconds: float) -> RendezvousSettings:
        """The same, but no machine counts as lost that was silent for less than so many seconds."""
        most = max(self.keep_alive_max_attempt, math.ceil(seconds / self.keep_alive_interval))
        return replace(self, keep_alive_max_attempt=most)

    @property
    def examination(self) -> str:
        """Which health checks this machine runs before it joins."""
        return self.health if self.health != "auto" else "quick" if self.spares else "off"


# torchrun puts a time-out in for its static backend; the others are about torch's own store.
_CONF_OF_TORCH: Final = ("timeout", "heartbeat_timeout", "read_timeout", "store_type")


def parse_conf(config: Mapping[str, object]) -> RendezvousSettings:
    """The pairs of `--rdzv-conf`. UsageError for an invalid value; an unknown name is a warning."""
    rows = {each.name: each.metadata for each in fields(RendezvousSettings)}
    found: dict[str, Any] = {}
    for name, text in ((name, str(value).strip()) for name, value in config.items()):
        if name in rows:
            try:
                found[name] = rows[name]["parse"](text)
            except ValueError:
                hint = f"write {rows[name]['write']}"
                raise UsageError(f"{name} in --rdzv-conf is {text!r}", hint=hint) from None
        elif name not in _CONF_OF_TORCH:
            near = get_close_matches(name, rows, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            logging.getLogger("rallypoint.torchrun").warning(
                "--rdzv-conf has %r, which the rallypoint backend does not know%s", name, meant
            )
    return RendezvousSettings(**found)


BY_NAME: Final[Mapping[str, Option]] = {option.name: option for option in OPTIONS}

IN_CONF: Final[Mapping[str, str]] = {each.name: each.in_conf for each in OPTIONS if each.in_conf}
"""Options that can be given in rdzv_conf as well, by their names in it."""

_NOT_BY_VARIABLE: Final = frozenset({"rdzv_backend", "module", "no_python", "run_path"})
"""Options of torchrun that `rallypoint run` takes from its command line alone, if at all."""


def torchruns_option(variable: str) -> str:
    """The option, not in the table, that torchrun reads from a variable; empty for any other variable."""
    name = variable[len("PET_") :].lower() if variable.startswith("PET_") else ""
    return "" if name in BY_NAME or name in _NOT_BY_VARIABLE else name


def check_backend(backend: object) -> None:
    """UsageError for a rendezvous backend that is not Rallypoint's."""
    if backend != BACKEND:
        raise UsageError(
            f"--rdzv-backend is {backend!r}, but rallypoint run always meets on Rallypoint's own",
            hint="leave it out, or run torchrun itself: rallypoint run -- torchrun --rdzv-backend="
            f"{backend} ...",
        )
