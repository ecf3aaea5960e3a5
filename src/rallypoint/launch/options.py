"""The options of `rallypoint run` that Rallypoint itself reads, and its command line taken apart.

An option has one name everywhere: `--nproc-per-node` on the command line, `nproc-per-node` or
`nproc_per_node` in a file, `PET_NPROC_PER_NODE` in the environment. Names and meanings are torchrun's, so
that a torchrun command can be taken over word by word; the last few options are Rallypoint's own. Every
option that is not in the table goes to torchrun as it stands, and torchrun checks it. Pure: no torch, no
files, no environment.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import DEFAULT_PORT, IPV6, STORE_PORT, Endpoints, parse_endpoints
from rallypoint.launch.endpoint import HOST as HOST_NAME
from rallypoint.launch.rendezvous.roster import Size
from rallypoint.launch.stacks.switch import STALL_SECONDS, STALL_VARIABLE, signals_of
from rallypoint.launch.stacks.switch import VARIABLE as STACKS_VARIABLE
from rallypoint.store.access import INSECURE_VARIABLE, USERS_VARIABLE
from rallypoint.store.server.loops.backend import VARIABLE as LIBUV_VARIABLE
from rallypoint.store.server.loops.backend import parse_switch

_USAGE: Final = (
    "write rallypoint run [OPTIONS] SCRIPT [ARGS]..., or -m MODULE [ARGS]..., or -- COMMAND [ARGS]..."
)

DEFAULT_MASTER_PORT: Final = 29500
"""The port beside a master_addr that comes without a master_port; torchrun's."""

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


# The options ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One option.

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


def _flag(name: str, help_text: str, short: str = "") -> Option:
    """An option without a value."""
    return Option(name, "", _switch, False, help_text, short=short)


def _choice(name: str, metavar: str, help_text: str) -> Option:
    """An option of Rallypoint's own that is one of the words in its metavar, `auto` by default."""
    return Option(name, metavar, _like(metavar), "auto", help_text, f"RALLYPOINT_{name.upper()}")


OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        "nnodes",
        "N|MIN:MAX",
        _nodes,
        Size(1, 1),
        "How many machines, 1 or more, or from how many to how many.",
    ),
    Option(
        "spares",
        "N",
        _whole(0),
        0,
        "How many machines more than nnodes are to wait, to take the place of one that is lost or not fit.",
        "RALLYPOINT_SPARES",
    ),
    _choice(
        "health",
        "auto|quick|full|off",
        "What a machine examines of itself before it takes part: quick, what takes 3 seconds at most; full; "
        "off; auto, quick if there are spares.",
    ),
    Option(
        "nproc_per_node",
        "N|WORD",
        _ranks_per_node,
        "devices",
        "Ranks on each machine: a number, or devices (one per accelerator, else one), auto (one per "
        "accelerator, else one per core), gpu, cpu, xpu.",
    ),
    Option(
        "node_rank",
        "N",
        _whole(0),
        None,
        "The rank, from 0 on, that this machine asks for among the machines.",
    ),
    Option(
        "rdzv_endpoint",
        "HOST[:PORT]",
        _endpoints,
        None,
        f"Where the machines meet, the same on each of them; the port is {DEFAULT_PORT} if none is given. An "
        "IPv6 address goes in brackets. One machine needs none. Several, with commas: the places of a store "
        f"that outlives its machine (serve --engine); their port is {STORE_PORT} if the last has none.",
    ),
    _flag(
        "standalone", "One machine that needs no endpoint, whatever the environment or a file says of one."
    ),
    Option("rdzv_conf", "K=V,...", _conf, {}, "More settings of the rendezvous; in a file also a table."),
    Option("master_addr", "HOST", _host, None, "The host of the endpoint, where rdzv_endpoint is not given."),
    Option(
        "master_port",
        "PORT",
        _port,
        None,
        f"The port of the endpoint, where rdzv_endpoint is not given; {DEFAULT_MASTER_PORT} beside a "
        "master_addr.",
    ),
    Option(
        "join_timeout",
        "SECONDS",
        parse_seconds,
        600.0,
        "Seconds, more than 0, until the machines must have come.",
        "RALLYPOINT_JOIN_TIMEOUT",
    ),
    _choice(
        "relay",
        "auto|on|off",
        "Whether each machine's ranks share a relay: auto, with two machines or more; on; off.",
    ),
    Option(
        "port_range",
        "FIRST-LAST",
        _ports,
        None,
        "Ports, such as 29600-29699: the launcher takes one of them where it opens one to other machines, "
        "besides the endpoint's. They need it for ranks that share no relay. Without this, a free port.",
        "RALLYPOINT_PORT_RANGE",
    ),
    _choice(
        "patch",
        "auto|always|never",
        "When Rallypoint serves a store that torch is asked for: auto, where this torch has no libuv; "
        "always; never.",
    ),
    _choice("client", "auto|torch|python", "Which client talks to the store."),
    Option(
        "stacks",
        "on|off|SIGNAL,...",
        _stacks,
        "on",
        "Whether ranks are asked what they are doing, and by which signals to their helper threads: for the "
        "interpreter, and for a rank in which C code holds the interpreter lock. "
        "On: SIGRTMAX-3,SIGRTMAX-4; on macOS SIGINFO; on Windows an event.",
        STACKS_VARIABLE,
    ),
    Option(
        "stall_after",
        "SECONDS",
        parse_seconds,
        STALL_SECONDS,
        "Seconds for which ranks may wait for others without a move before it is said what each does.",
        STALL_VARIABLE,
    ),
    Option(
        "use_libuv",
        "auto|0|1",
        _libuv,
        "auto",
        "Which backend serves: 1 libuv, 0 the standard library, auto what is there.",
        LIBUV_VARIABLE,
    ),
    Option(
        "allow_user",
        "NAME|UID,...",
        _like(r"[^\s,]+(\s*,\s*[^\s,]+)*"),
        "",
        "Other users of this machine who may take part, and whose servers may be joined, besides yourself "
        "and root; may be repeated.",
        USERS_VARIABLE,
        repeats=True,
    ),
    Option(
        "insecure",
        "",
        _switch,
        False,
        "Let every user of this machine take part, and join a server whoever holds it.",
        INSECURE_VARIABLE,
    ),
)
"""What the command line, the environment and a file can say."""

FLAGS: Final[tuple[Option, ...]] = (
    _flag("module", "What follows the options is a module, started as python -m does.", "-m"),
    _flag("tasks", "A scheduler has started a task for each rank: be the rank that it says."),
    _flag("no_explain", "Do not explain a failure at the end of the output."),
    _flag("show_config", "Print each setting with where it comes from, and start nothing."),
    _flag("json", "Print JSON."),
    _flag("help", "Show this message and exit.", "-h"),
)
"""What the command line alone can say."""

BY_NAME: Final[Mapping[str, Option]] = {option.name: option for option in OPTIONS}

IN_CONF: Final[Mapping[str, str]] = {
    "node_rank": "rank",
    **{name: name for name in ("join_timeout", "relay", "port_range", "spares", "health")},
}
"""Options that can be given in rdzv_conf as well, and go to the rendezvous there: by their names in it."""

_KNOWN: Final = {**BY_NAME, **{flag.name: flag for flag in FLAGS}}
_SHORT: Final = {"-m": "module", "-h": "help", "-r": "redirects", "-t": "tee"}

_WITHOUT_VALUE: Final = frozenset({"no_python", "run_path", "virtual_local_rank"})
"""Options of torchrun that take no value: the word behind them may be the script, whatever its name."""


_NOT_BY_VARIABLE: Final = frozenset({"rdzv_backend", "module", "no_python", "run_path"})
"""Options of torchrun that `rallypoint run` takes from its command line alone, if at all."""


def torchruns_option(variable: str) -> str:
    """The option, not in the table, that torchrun reads from a variable; empty for any other variable."""
    name = variable[len("PET_") :].lower() if variable.startswith("PET_") else ""
    return "" if name in BY_NAME or name in _NOT_BY_VARIABLE else name


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
    double target. The values themselves are not looked at: `rallypoint.launch.config.settle` does that.
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


def check_backend(backend: object) -> None:
    """UsageError for a rendezvous backend that is not Rallypoint's."""
    if backend != BACKEND:
        raise UsageError(
            f"--rdzv-backend is {backend!r}, but rallypoint run always meets on Rallypoint's own",
            hint="leave it out, or run torchrun itself: rallypoint run -- torchrun --rdzv-backend="
            f"{backend} ...",
        )


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
