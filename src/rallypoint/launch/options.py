"""The options of `rallypoint run`, in one table, and its command line taken apart by that table.

An option has one name everywhere: `--nproc-per-node` on the command line, `nproc-per-node` or
`nproc_per_node` in a file, `PET_NPROC_PER_NODE` in the environment. Whatever its source, a value comes
down to a text, and the option's kind turns that into a value or refuses it. Names and meanings are
torchrun's, so that a torchrun command can be taken over word by word; Rallypoint's own options are the
last few. Pure: no torch, no files, no environment.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final, Literal

from rallypoint.errors import UsageError
from rallypoint.launch.endpoint import DEFAULT_PORT, IPV6, Endpoint, parse_endpoint
from rallypoint.launch.endpoint import HOST as HOST_NAME
from rallypoint.server.loops.backend import VARIABLE as LIBUV_VARIABLE
from rallypoint.server.loops.backend import parse_switch

USAGE: Final = "rallypoint run [options] script.py [arguments], or -m module [arguments], or -- command"

DEFAULT_MASTER_PORT: Final = 29500
"""The port beside a master_addr that comes without a master_port; torchrun's."""

BACKEND: Final = "rallypoint"
"""The only rendezvous backend that `rallypoint run` uses."""


# What a value can be --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nodes:
    """How many machines a job takes: at least `minimum`, at most `maximum`."""

    minimum: int
    maximum: int

    def __str__(self) -> str:
        return str(self.maximum) if self.minimum == self.maximum else f"{self.minimum}:{self.maximum}"


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


def _match(pattern: str | re.Pattern[str], text: str) -> re.Match[str]:
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


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


def _text(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _like(pattern: str) -> Callable[[str], str]:
    return lambda text: _match(pattern, text)[0]


def _nodes(text: str) -> Nodes:
    match = _match("([0-9]+)(?::([0-9]+))?", text)
    minimum = int(match[1])
    maximum = minimum if match[2] is None else int(match[2])
    if not 1 <= minimum <= maximum:
        raise ValueError(text)
    return Nodes(minimum, maximum)


def _ranks_per_node(text: str) -> int | str:
    word = text.strip()
    return word if word in RANKS_PER_NODE else _whole(1)(word)


def _endpoint(text: str) -> Endpoint | None:
    if not text.strip():
        return None
    endpoint = parse_endpoint(text)
    _port(str(endpoint.port))  # 0, a free one, could not be known to other machines
    return endpoint


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


def _libuv(text: str) -> str:
    word = text.strip().lower()
    return word if word == "auto" else str(int(parse_switch(word, "use_libuv")))


_port: Final = _whole(1, 65535)


# The kinds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What an option can be set to.

    `parse` raises ValueError for a text that is not allowed; `allowed` says what is, as "write ..." would
    go on. `file_types` are the TOML types that may stand for such a text.
    """

    metavar: str
    parse: Callable[[str], object]
    allowed: str
    file_types: tuple[type, ...] = (str,)


RANKS_PER_NODE: Final = ("devices", "auto", "gpu", "cpu", "xpu")
"""The words that nproc_per_node knows; only torch can turn them into a number.

`devices`, the built-in value, is one rank per accelerator and one where there is none; the others are
torchrun's, whose `auto` is one rank per accelerator and one per CPU core where there is none.
"""

_STREAMS: Final = "[0-3]|[0-9]:[0-3](?:,[0-9]:[0-3])*"


def _one_of(*words: str) -> Kind:
    return Kind("|".join(words), _like("|".join(words)), f"one of {', '.join(words)}")


NODES: Final = Kind(
    "N|MIN:MAX", _nodes, "the number of machines, 1 or more, or MIN:MAX with MIN not above MAX", (int, str)
)
RANKS: Final = Kind(
    "N|WORD",
    _ranks_per_node,
    f"a whole number, 1 or more, or one of {', '.join(RANKS_PER_NODE)}",
    (int, str),
)
COUNT: Final = Kind("N", _whole(0), "a whole number, 0 or more", (int,))
PORT: Final = Kind("PORT", _port, "a port from 1 to 65535", (int,))
SECONDS: Final = Kind("SECONDS", _seconds, "a number of seconds above 0", (int, float))
TEXT: Final = Kind("TEXT", _text, "a text that is not empty")
FOLDER: Final = Kind("FOLDER", _text, "the path of a folder")
HOST: Final = Kind("HOST", _host, "a host name or an IP address, without a port")
ENDPOINT: Final = Kind(
    "HOST[:PORT]",
    _endpoint,
    "HOST or HOST:PORT, with a port from 1 to 65535 and an IPv6 address in brackets; "
    "leave it out on one machine, where a free port is taken",
)
CONF: Final = Kind(
    "K=V,...",
    _conf,
    "KEY=VALUE,KEY=VALUE (in a file also a table of plain values), no commas within a value",
    (str, dict),
)
STREAMS: Final = Kind(
    "0-3|RANK:0-3,...",
    _like(_STREAMS),
    "0 for no stream, 1 for stdout, 2 for stderr, 3 for both, or such a number for each local rank from "
    "0 to 9, as in 0:3,1:1",
    (int, str),
)
LOCAL_RANKS: Final = Kind(
    "N,...", _like("(?:[0-9]+(?:,[0-9]+)*)?"), "local ranks with commas between, as in 0,1,2", (int, str)
)
SWITCH: Final = Kind("", _switch, "one of 0, 1, true, false, on, off", (bool,))
LIBUV: Final = Kind("auto|0|1", _libuv, "one of auto, 0, 1, true, false, on, off", (bool, int, str))
START_METHOD: Final = _one_of("spawn", "fork", "forkserver")
PATCH: Final = _one_of("auto", "always", "never")
CLIENT: Final = _one_of("auto", "torch", "python")
RELAY: Final = _one_of("auto", "on", "off")


# The options ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One option. `default` is its built-in value; `variable` is read where the command line is silent."""

    name: str
    kind: Kind
    default: object
    help: str
    variable: str = ""
    short: str = ""

    def __post_init__(self) -> None:
        if not self.variable:
            object.__setattr__(self, "variable", f"PET_{self.name.upper()}")

    @property
    def flag(self) -> str:
        return _flag(self.name)

    @property
    def takes_value(self) -> bool:
        """Whether a value follows it on the command line."""
        return self.kind is not SWITCH

    def read(self, text: str, source: str) -> object:
        """The value that a text stands for; UsageError, naming the source, for one that is not allowed."""
        try:
            return self.kind.parse(text)
        except ValueError:
            raise self.refusal(text, source) from None

    def refusal(self, value: object, source: str) -> UsageError:
        """The error for a value that this option cannot have."""
        return UsageError(f"{source}: {self.name} cannot be {value!r}", hint=f"write {self.kind.allowed}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


OPTIONS: Final[tuple[Option, ...]] = (
    Option("nnodes", NODES, Nodes(1, 1), "How many machines, or from how many to how many."),
    Option(
        "nproc_per_node",
        RANKS,
        "devices",
        "Ranks on each machine: a number, or devices (one per accelerator, else one), auto (one per "
        "accelerator, else one per core), gpu, cpu, xpu.",
    ),
    Option(
        "node_rank", COUNT, None, "The rank that this machine asks for among the machines; else any is fine."
    ),
    Option(
        "rdzv_endpoint",
        ENDPOINT,
        None,
        f"Where the machines meet, the same on each of them; the port is {DEFAULT_PORT} if none is given. "
        "One machine needs none.",
    ),
    Option(
        "standalone",
        SWITCH,
        False,
        "One machine that needs no endpoint, whatever the environment or a file says of one.",
    ),
    Option("rdzv_id", TEXT, None, "A name for the job, the same on every machine."),
    Option("rdzv_conf", CONF, {}, "More settings of the rendezvous."),
    Option("max_restarts", COUNT, 0, "How often the ranks are started again after one has failed."),
    Option("monitor_interval", SECONDS, 0.1, "Seconds between two looks at the ranks."),
    Option("start_method", START_METHOD, "spawn", "How multiprocessing starts a rank that is a function."),
    Option("role", TEXT, "default", "A name for the ranks in logs and in their environment."),
    Option("local_addr", HOST, None, "The address by which the others reach this machine; else its name."),
    Option(
        "log_dir",
        FOLDER,
        None,
        "The folder for log files; in a file, a relative path counts from the folder of that file.",
    ),
    Option("redirects", STREAMS, "0", "Which streams of the ranks go to log files instead.", short="-r"),
    Option("tee", STREAMS, "0", "Which streams of the ranks go to log files as well.", short="-t"),
    Option("local_ranks_filter", LOCAL_RANKS, "", "Show only the output of these ranks; else of all."),
    Option("master_addr", HOST, None, "The host of the endpoint, where rdzv_endpoint is not given."),
    Option(
        "master_port",
        PORT,
        None,
        f"The port of the endpoint, where rdzv_endpoint is not given; {DEFAULT_MASTER_PORT} beside a "
        "master_addr.",
    ),
    Option(
        "join_timeout",
        SECONDS,
        600.0,
        "Seconds until the machines must have come.",
        variable="RALLYPOINT_JOIN_TIMEOUT",
    ),
    Option(
        "relay",
        RELAY,
        "auto",
        "Whether each machine's ranks share a relay: auto, with two machines or more; on; off.",
        variable="RALLYPOINT_RELAY",
    ),
    Option(
        "patch",
        PATCH,
        "auto",
        "When Rallypoint serves a store that torch is asked for: auto, where this torch has no libuv; "
        "always; never.",
        variable="RALLYPOINT_PATCH",
    ),
    Option("client", CLIENT, "auto", "Which client talks to the store.", variable="RALLYPOINT_CLIENT"),
    Option(
        "use_libuv",
        LIBUV,
        "auto",
        "Which backend serves: 1 libuv, 0 the standard library, auto what is there.",
        variable=LIBUV_VARIABLE,
    ),
)

BY_NAME: Final[Mapping[str, Option]] = {option.name: option for option in OPTIONS}


@dataclass(frozen=True)
class Flag:
    """What the command line alone can say, and without a value."""

    name: str
    help: str
    short: str = ""

    @property
    def flag(self) -> str:
        return _flag(self.name)


FLAGS: Final[tuple[Flag, ...]] = (
    Flag("module", "What follows the options is a module, started as python -m does.", "-m"),
    Flag("show_config", "Print each setting with where it comes from, and start nothing."),
    Flag("json", "Print JSON."),
    Flag("help", "Print this help.", "-h"),
)

TORCHRUN_ONLY: Final = frozenset(
    {
        *("rdzv_backend", "event_log_handler", "no_python", "run_path", "duplicate_stdout_filters"),
        *("duplicate_stderr_filters", "logs_specs", "numa_binding", "signals_to_handle"),
        *("shutdown_timeout", "virtual_local_rank"),
    }
)
"""Options of torchrun that `rallypoint run` does not have."""


def advice(name: str, known: Collection[str], spell: Callable[[str], str] = str) -> str:
    """The hint for a name that is not known: whose it is, or the nearest known one, or all of them."""
    plain = name.strip("-").replace("-", "_").lower()
    if plain in TORCHRUN_ONLY:
        return f"{_flag(plain)} is torchrun's: use it with rallypoint run -- torchrun ..."
    alike = [each for each in known if plain and each.startswith(plain)] or get_close_matches(plain, known)
    if alike:
        return f"did you mean {spell(alike[0])}?"
    return f"known: {', '.join(map(spell, known))}"


# The command line -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What to start: `words` are the script, the module or the program, and its arguments, untouched."""

    kind: Literal["script", "module", "command"]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Order:
    """What a command line of `rallypoint run` asks for.

    `options` has the text of each option that was given, by its name. `target` is None only where nothing
    is to be started: with `help`, in which case nothing else was looked at, or with `show_config`.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    target: Target | None = None
    show_config: bool = False
    json: bool = False
    help: bool = False


_VALUE_TAKERS: Final = frozenset({"rdzv_backend", *(each.name for each in OPTIONS if each.takes_value)})
_KNOWN: Final[Mapping[str, Option | Flag]] = {**BY_NAME, **{each.name: each for each in FLAGS}}
_SPELLINGS: Final[Mapping[str, str]] = {
    _flag("rdzv_backend"): "rdzv_backend",
    **{each.flag: each.name for each in _KNOWN.values()},
    **{each.short: each.name for each in _KNOWN.values() if each.short},
}


def split_arguments(arguments: Sequence[str]) -> Order:
    """Take apart what follows `rallypoint run`.

    Options end at the first word that is none: it is the script, or with -m the module, and all that
    follows belongs to it; behind a `--` stands a command. Of an option given twice, the last counts.
    UsageError for an option that does not exist or lacks its value, and for a missing or double target.
    The values themselves are not looked at: `rallypoint.launch.config.settle` does that.
    """
    words = deque(arguments)
    given: dict[str, str] = {}
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        name, value = _take_option(words)
        if name == "help":
            return Order(help=True)
        given[name] = value
    _check_backend(given.pop("rdzv_backend", BACKEND))
    as_module, show_config, json = (given.pop(name, "") != "" for name in ("module", "show_config", "json"))
    target = _target(tuple(words), as_module)
    if target is None and not show_config:
        raise UsageError(f"there is no {'module' if as_module else 'script'} to start", hint=USAGE)
    return Order(given, target, show_config, json)


def _take_option(words: deque[str]) -> tuple[str, str]:
    """Take an option and its value, "true" for one that has none, off the front of the words."""
    word = words.popleft()
    flag, value = _parts(word)
    name = _SPELLINGS.get(flag)
    if name is None:
        unknown = word.partition("=")[0]
        raise UsageError(f"there is no option {unknown}", hint=advice(unknown, _KNOWN, _flag))
    if name in _VALUE_TAKERS:
        return name, _take_value(flag, words) if value is None else value
    if value is not None:
        raise UsageError(f"{flag} takes no value, but {word} gives it one", hint=f"write {flag} by itself")
    return name, "true"


def _parts(word: str) -> tuple[str, str | None]:
    """An option as the table spells it, and the value in the same word: --tee=3, -t3 or -t=3."""
    if not word.startswith("--"):
        return (word[:2], word[2:].removeprefix("=")) if len(word) > 2 else (word, None)
    flag, equals, value = word.partition("=")
    return f"--{flag[2:].replace('_', '-')}", value if equals else None


def _take_value(flag: str, words: deque[str]) -> str:
    if not words or words[0].startswith("-"):
        raise UsageError(
            f"{flag} needs a value", hint=f"write {flag} VALUE, or {flag}=VALUE for one that begins with -"
        )
    return words.popleft()


def _check_backend(backend: str) -> None:
    if backend != BACKEND:
        raise UsageError(
            f"--rdzv-backend is {backend!r}, but rallypoint run always meets on Rallypoint's own",
            hint="leave it out, or run torchrun itself: rallypoint run -- torchrun --rdzv-backend="
            f"{backend} ...",
        )


def _target(words: tuple[str, ...], as_module: bool) -> Target | None:
    if words[:1] == ("--",):
        return _command(words[1:], as_module)
    if not words or not words[0]:
        return None
    if as_module and (words[0].endswith(".py") or "/" in words[0]):
        raise UsageError(
            f"-m takes a module, but {words[0]} is a script", hint="leave out -m, or name a module: pkg.train"
        )
    return Target("module" if as_module else "script", words)


def _command(words: tuple[str, ...], as_module: bool) -> Target:
    if as_module:
        raise UsageError("there is both -m and a command behind --", hint=USAGE)
    if not words or not words[0]:
        raise UsageError("there is no command behind --", hint=USAGE)
    return Target("command", words)
